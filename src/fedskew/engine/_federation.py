"""A round of federated learning, for every method: select, train, weigh, update."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew import components, metrics
from fedskew.aggregation import Mean
from fedskew.engine._backend import Assignment, Backend, Sent, Update, tensor_bytes
from fedskew.engine._clients import ClientStates
from fedskew.engine._contracts import (
    calling,
    checked_aggregate,
    checked_choice,
    checked_model,
    checked_parameters,
    checked_quotas,
    checked_weights,
    is_own,
    name_in,
)
from fedskew.engine._faults import is_moderate
from fedskew.engine._finite import finite, is_finite, stilled
from fedskew.engine._masked import Asked, Integers, Opened, add_up, bytes_of, decode_sums, encode_update, whole_weight
from fedskew.engine._records import Cohort, FloatArray, RoundOutcome, RoundRecord, Summed
from fedskew.engine._target import EstimatedMix, Estimation, Target
from fedskew.engine._update_buffer import as_matrix
from fedskew.engine.cohort import CohortBackend, CohortRequest, train_together
from fedskew.errors import ArgumentError, ComponentError
from fedskew.hooks import Hooks, RoundEnd
from fedskew.labels import LabelCounts
from fedskew.methods import Method, masks_refused
from fedskew.models import ModelState
from fedskew.privacy import Protection
from fedskew.randomness import Purpose, generator
from fedskew.server_updates import reads_sums
from fedskew.sums import LEAST
from fedskew.weighting import Answered, BySums, Facts, FedAvg, Weighting, limited

_PRIVACY, _TAKEN = "privacy", "rounds"
"""Where the state has how many rounds each client took part in, where that is limited."""


@dataclass(frozen=True)
class Conditions:
    """Clients that drop out of a round, and clients that do less work, as in FedEntOpt's table III.

    Attributes:
        dropout: Share of each cohort that drops out after selection (0.3 in the table).
        dropout_rule: "exact": floor(dropout * cohort) clients at random, but never the whole cohort; "bernoulli": each
            client independently with probability `dropout`, so that a round may have no participants.
        stragglers: Share of the clients (0.5 in the table) that do 1 to `epochs` local epochs; the stragglers and their
            epochs are drawn once for all rounds.
    """

    dropout: float = 0.0
    dropout_rule: Literal["exact", "bernoulli"] = "exact"
    stragglers: float = 0.0

    def dropped(self, cohort: int, seed: int, round: int) -> NDArray[np.bool_]:
        """Draw which clients of a cohort drop out.

        Args:
            cohort: Number of clients in the cohort.
            seed: The run's seed.
            round: Number of the round, from 1.

        Returns:
            A mask, `(cohort,)`, True for clients that drop out.
        """
        rng = generator(seed, Purpose.DROPOUT, round)
        if self.dropout_rule == "bernoulli":
            return rng.random(cohort) < self.dropout
        dropped = np.zeros(cohort, dtype=np.bool_)
        dropped[rng.permutation(cohort)[: min(math.floor(self.dropout * cohort + 1e-9), cohort - 1)]] = True
        return dropped

    def epochs(self, clients: int, epochs: float, seed: int) -> NDArray[np.int64] | NDArray[np.float64]:
        """Draw the local epochs of every client, the same in every round.

        Args:
            clients: Number of clients.
            epochs: Local epochs of a client that is not a straggler.
            seed: The run's seed.

        Returns:
            The local epochs of each client, `(clients,)`.
        """
        each = np.full(clients, epochs)
        slow = math.floor(self.stragglers * clients + 1e-9)
        if slow:
            rng = generator(seed, Purpose.STRAGGLERS)
            each[rng.permutation(clients)[:slow]] = rng.integers(
                1, max(math.floor(epochs), 1), size=slow, endpoint=True
            )
        return each


@dataclass(frozen=True)
class ServerState:
    """The server's state between rounds.

    A run can be resumed from it, the clients' states and the config.

    Attributes:
        round: Number of the last round.
        model: The global model.
        selection: The selection's state.
        server_update: The server update's state.
        hooks: Tensors that components with hooks keep at the server, by the component's place in the method (see
            `hooked`).
        target: The target's estimated label mix, if it is estimated.
    """

    round: int
    model: ModelState
    selection: Any
    server_update: Any
    hooks: dict[str, dict[str, Tensor]]
    target: Target = field(default_factory=Target)


class RoundRunner(Protocol):
    """Plays rounds one after another.

    Each runner has states of its own type. They have the attributes `round`, the number of the last round, and `model`,
    the model in training.
    """

    def open(self) -> None:
        """Open the backend (see `Backend.open`)."""

    def close(self) -> None:
        """Close the backend (see `Backend.close`)."""

    def start(self, model: ModelState) -> Any:
        """Make the state before the first round.

        Args:
            model: The untrained model.

        Returns:
            The state, with round 0.
        """

    def run_round(self, state: Any) -> tuple[Any, RoundRecord]:
        """Play one round.

        Args:
            state: The state after the last round.

        Returns:
            The next state, and the round's record without evaluations.
        """

    def evaluated_model(self, state: Any) -> ModelState | None:
        """Build the model to evaluate and to save.

        Args:
            state: The state after a round.

        Returns:
            The model; None while the clients share none.
        """


@dataclass(frozen=True)
class Federation:
    """Plays the rounds of a method on a pool of clients; a `RoundRunner`.

    Attributes:
        method: The method; a server update with a parameter `clients` gets the number of clients.
        backend: Trains the cohorts.
        counts: Exact label counts, `(clients, classes)`.
        target: Target label mix, `(classes,)`; None: there is no target. With `estimation` it is compared with in
            records, and nothing else sees it.
        participation: Share of the clients that is selected in each round (see `cohort_size`).
        seed: Seed of all random draws.
        epochs: Local epochs of a client; stragglers do fewer.
        steps: Upper limit on a client's local steps; None: no limit.
        conditions: Dropouts and stragglers.
        seen: Label counts given to the selection, `(clients, classes)`; None: the exact ones.
        weighed: Label counts given to the weighting, `(clients, classes)`; None: the exact ones.
        clients: The states that clients keep between their participations.
        weight_limit: Upper limit on a client's weight (see `weighting.limited`); None: no limit.
        estimation: How the target's label mix is estimated; the weighting then sees the estimate in the server's state
            (see `EstimatedMix.used`). None: it sees `target`.
        masked: Whether the model moves by sums over clients in fixed point, as where masks hide each update; weights
            are then those of the whole cohort, renormalised over the clients that replied.
        announced: What was announced to all clients, from sums of their label counts, so that each knows its own weight
            and the server does not (see `weighting.BySums`); only where `masked`. None: the server weighs by their
            counts.
        protection: How updates are clipped and noise is added to them, for differential privacy; only where `masked`.
            None: they are not.
        constant_bytes: Bytes of the model that training does not change, and that therefore need not travel.

    Raises:
        ArgumentError: The weighting needs a target label mix and there is none, the selection can't work with the
            label counts, the cohort is too small for the aggregation or for masks, or the method can't do with sums.
    """

    method: Method
    backend: Backend
    counts: FloatArray
    target: FloatArray | None
    participation: float
    seed: int
    epochs: float = 1
    steps: int | None = None
    conditions: Conditions = field(default_factory=Conditions)
    seen: FloatArray | None = None
    weighed: FloatArray | None = None
    clients: ClientStates = field(default_factory=ClientStates)
    weight_limit: float | None = None
    estimation: Estimation | None = None
    masked: bool = False
    protection: Protection | None = None
    announced: Facts | None = None
    constant_bytes: int = 0

    def __post_init__(self) -> None:
        if self.masked:
            if (reason := masks_refused(self.method)) is not None:
                raise ArgumentError(f"updates are masked: {reason}")
            if self.cohort_size < LEAST:
                raise ArgumentError(
                    f"updates are masked: a sum over {self.cohort_size} would show each client's part to the others; "
                    f"let {LEAST} clients or more take part in a round"
                )
        if self.target is None and self.estimation is None and components.has(self.method.weighting, "needs_target"):
            raise ArgumentError(
                f"target: {type(self.method.weighting).__name__} weighs clients towards a target label mix, and none "
                "is given; set [target] mix, or choose another weighting"
            )
        if self.cohort_size < self.method.aggregation.least:
            raise ArgumentError(
                f"aggregation: {self.shortage(self.cohort_size)}; let more clients take part "
                "(training.participation), or take geometric_median, which any number will do for"
            )
        try:
            server_update = components.with_clients(self.method.server_update, len(self.counts))
        except ArgumentError as error:
            raise ArgumentError(f"server_update.{error}") from None
        object.__setattr__(self, "method", replace(self.method, server_update=server_update))
        check = getattr(self.method.selection, "check", None)  # a user's own selection may have none
        if check is not None:
            try:
                check(self._seen, self.cohort_size)
            except ArgumentError as error:
                raise ArgumentError(f"method.selection.{error}") from None

    @property
    def cohort_size(self) -> int:
        """Number of clients that are selected in each round."""
        return cohort_size(self.participation, len(self.counts))

    def constant_weights(self) -> FloatArray | None:
        """Weigh all clients, where each of them takes part in every round and weights follow from label counts alone.

        Returns:
            The weights of every round in which all clients reply, `(clients,)`; None where weights may differ between
            rounds.
        """
        method, everyone = self.method, len(self.counts)
        stays = (
            self.cohort_size == everyone
            and self.conditions.dropout == 0
            and not components.has(method.selection, "assigns_quotas")
            and not components.has(method.weighting, "keeps_state")
        )
        if not stays:
            return None
        shown = self.counts if self.weighed is None else self.weighed
        sizes, ids = self.counts.sum(axis=1), np.arange(everyone)
        given = Answered(shown, sizes, self.target, ids, limit=self.weight_limit)
        with calling("weighting", method.weighting, "weigh"):
            return checked_weights(method.weighting, method.weighting.weigh(given), ids)

    @cached_property
    def _seen(self) -> LabelCounts:
        """The label counts given to the selection, checked once for all rounds."""
        return LabelCounts(self.counts if self.seen is None else self.seen)

    @cached_property
    def _epochs(self) -> NDArray[np.int64] | NDArray[np.float64]:
        """Local epochs of every client."""
        return self.conditions.epochs(len(self.counts), self.epochs, self.seed)

    def open(self) -> None:
        """See `Backend.open`."""
        self.backend.open()

    def close(self) -> None:
        """See `Backend.close`."""
        self.backend.close()

    def start(self, model: ModelState) -> ServerState:
        """See `RoundRunner.start`."""
        selection, update = self.method.selection, self.method.server_update
        kept: dict[str, dict[str, Tensor]] = {}
        with calling("selection", selection, "init"):
            chosen = selection.init(self._seen)
        with calling("server_update", update, "init"):
            moved = update.init(model.parameters)
        for name, hooks in hooked(self.method).items():
            with calling(name, hooks, "init_server"):
                kept[name] = hooks.init_server(model.parameters, len(self.counts))
        if self.protection is not None:
            kept[_PRIVACY] = {_TAKEN: torch.zeros(len(self.counts), dtype=torch.int64)}
        target = Target() if self.estimation is None else self.estimation.start()
        return ServerState(round=0, model=model, selection=chosen, server_update=moved, hooks=kept, target=target)

    def run_round(self, state: ServerState) -> tuple[ServerState, RoundRecord]:
        """See `RoundRunner.run_round`."""
        began = time.perf_counter()
        cohort, following = self.select_participants(state)
        following, outcome = self.train(following, cohort)
        record = self.record(following.round, cohort, outcome)
        record.seconds = time.perf_counter() - began
        return following, record

    def select_participants(self, state: ServerState) -> tuple[Cohort, ServerState]:
        """Select the clients of the next round.

        Args:
            state: The state after the last round.

        Returns:
            The cohort, in which clients that drop out are marked as lost, and the state during this round.
        """
        round = state.round + 1
        ids, selection = self._select(state.selection, round)
        lost = self.conditions.dropped(len(ids), self.seed, round) | self._declined(state, ids)
        quotas = getattr(selection, "quotas", None)
        if quotas is None:
            counts = self.counts[ids]
        else:
            classes = self.counts.shape[1]
            counts = checked_quotas(self.method.selection, quotas, ids, classes, f"round {round}: ")
        return Cohort(ids, lost, counts, quotas is not None), replace(state, round=round, selection=selection)

    def train(self, state: ServerState, cohort: Cohort) -> tuple[ServerState, RoundOutcome]:
        """Train a cohort and move the model: `instructions`, then the backend's `train`, then `aggregate`.

        Args:
            state: The state during this round.
            cohort: The selected clients.

        Returns:
            The state after the round, and the round's outcome.
        """
        sent, assignments = self.instructions(state, cohort)
        updates = self.backend.train(state.round, assignments, sent)
        following, outcome = self.aggregate(state, cohort, sent, updates)
        self.check_finite(state.round, assignments, sent, updates, outcome)
        return following, outcome

    def instructions(self, state: ServerState, cohort: Cohort) -> tuple[Sent, list[Assignment]]:
        """Make what the clients of a round are sent.

        Args:
            state: The state during this round.
            cohort: The selected clients.

        Returns:
            What is sent to every client, and an assignment for each client that does not drop out.
        """
        hooks = hooked(self.method)
        parameters = state.model.parameters
        broadcast: dict[str, Tensor] = {}
        fresh: dict[str, Tensor] = {}
        for name, one in hooks.items():
            with calling(name, one, "broadcast", f"round {state.round}: "):
                broadcast |= one.broadcast(state.hooks[name])
            with calling(name, one, "init_client", f"round {state.round}: "):
                fresh |= one.init_client(parameters)
        assignments = [
            Assignment(
                client=client,
                epochs=self._epochs[client].item(),
                state=self.clients.get(client) or fresh,
                quota=cohort.counts[place] if cohort.quotas else None,
                steps=self.steps,
                samples=round(float(cohort.counts[place].sum())),
            )
            for place, client in enumerate(cohort.ids.tolist())
            if not cohort.lost[place]
        ]
        return Sent(state.model, broadcast), assignments

    def aggregate(
        self, state: ServerState, cohort: Cohort, sent: Sent, replies: Sequence[Update]
    ) -> tuple[ServerState, RoundOutcome]:
        """Weigh the updates and move the model, without the clients whose training diverged.

        Args:
            state: The state during this round.
            cohort: The selected clients.
            sent: What was sent to them.
            replies: Updates of all or some of the cohort's clients, in any order.

        Returns:
            The state after the round, and the round's outcome.
        """
        by_client = {update.client: update for update in replies}
        arrived = [client for client in cohort.ids.tolist() if client in by_client]
        if self.masked:
            return self._aggregate_masked(state, cohort, sent, [by_client[client] for client in arrived])
        updates = finite([by_client[client] for client in arrived])
        fine = np.isin(cohort.ids, [update.client for update in updates])

        counts, answered = cohort.counts[fine], cohort.ids[fine]
        weighting, fallback = self._weighting(state.target)
        weights, cut = self._weigh(weighting, answered, counts, cohort.quotas, state)
        held = answered[cut].tolist()
        unmoved = self.shortage(len(updates)) if 0 < len(weights) < self.method.aggregation.least else None
        if unmoved is not None:
            weights = weights[:0]

        following, drift = state, None
        moved = self._move(state, updates, answered, weights) if len(weights) else None
        if moved is not None:
            following, drift, weights = moved
        elif len(weights):  # the updates are finite but the next model is not: all count as diverged
            updates, counts, weights = [], counts[:0], weights[:0]
        for update in updates:
            self.clients.put(update.client, state.round, update.state)

        model_bytes = tensor_bytes(state.model._asdict()) - self.constant_bytes
        up = sum(model_bytes + tensor_bytes(update.reply) for update in replies)
        down = (model_bytes + tensor_bytes(sent.broadcast)) * len(cohort.ids)
        return following, RoundOutcome(arrived, updates, counts, weights, drift, up, down, held, unmoved, fallback)

    def ask(self, state: ServerState, cohort: Cohort) -> Asked:
        """Weigh the members of a sum, as is needed where updates are masked: each applies its weight itself.

        Args:
            state: The state during this round.
            cohort: The members. Where one of them is lost, the others are weighed anew.

        Returns:
            Their weights.
        """
        if self.announced is not None:
            shown = cohort.counts if self.weighed is None else self.weighed[cohort.ids]
            shares, limit = self._own_weights(shown, self.announced), self.weight_limit or 1.0
            return Asked(cohort.ids, np.minimum(shares, limit), shares > limit * (1 + 1e-9), None)
        weighting, fallback = self._weighting(state.target)
        weights, cut = self._weigh(weighting, cohort.ids, cohort.counts, cohort.quotas, state)
        return Asked(cohort.ids, weights, cut, fallback)

    def _own_weights(self, counts: FloatArray, announced: Facts) -> FloatArray:
        """Compute what each client computes of its own counts: its share of all clients."""
        weighting = self.method.weighting
        assert isinstance(weighting, BySums), "checked with the method"
        return np.array([weighting.own_weight(own, announced) for own in counts], dtype=np.float64)

    def aggregate_sums(
        self,
        state: ServerState,
        cohort: Cohort,
        sent: Sent,
        asked: Asked,
        clients: Sequence[int],
        totals: Integers,
        closed: str | None = None,
        opened_by: Collection[int] | None = None,
    ) -> tuple[ServerState, RoundOutcome]:
        """Move the model by sums over clients; `aggregate` does so in a simulation whose updates are masked.

        Args:
            state: The state during this round.
            cohort: The selected clients.
            sent: What was sent to them.
            asked: The sum's members and their weights, as `ask` returned them.
            clients: Those of them that the sums are over, in the order of the cohort.
            totals: Sums of what these clients encoded by `encode_update`; empty if nothing was opened.
            closed: Why nothing was opened; None: it was, or nobody replied.
            opened_by: With differential privacy: clients that were in a sum that was opened, or may have been. None:
                these clients, if anything was opened.

        Returns:
            The state after the round, and the round's outcome, without updates.
        """
        members, size = cohort.take(np.isin(cohort.ids, asked.clients)), len(asked.clients)
        fine = np.isin(members.ids, list(clients))
        counts, weights = members.counts[fine], asked.weights[fine] if len(asked.weights) else np.zeros(0)
        whole = whole_weight(totals, float(weights.sum()))
        following, opened = state, None
        if opened_by is None:
            opened_by = clients if totals else ()
        if totals and whole > 0:
            opened = decode_sums(totals, whole, size, len(clients), state.model)
            moved = self._move_by_sums(state, opened, members.ids[fine])
            if moved is None:
                opened, clients, counts = None, [], counts[:0]
            else:
                following = moved
        privacy = None
        if self.protection is not None:
            following, privacy = self._account(self.protection, state, following, cohort, opened_by)
        weights = weights[:0] if opened is None else weights / whole
        known = Summed(list(clients)) if opened is None else Summed(list(clients), opened.loss, opened.steps)
        model_bytes = tensor_bytes(state.model._asdict()) - self.constant_bytes
        return following, RoundOutcome(
            replied=list(clients),
            updates=[],
            counts=counts,
            weights=weights,
            drift=None,
            bytes_up=bytes_of(totals, size, len(clients)) * len(clients),
            bytes_down=(model_bytes + tensor_bytes(sent.broadcast)) * len(cohort.ids),
            limited=members.ids[fine & asked.limited].tolist(),
            unmoved=closed,
            fallback=asked.fallback,
            privacy=privacy,
            summed=known,
        )

    def check_finite(
        self,
        round: int,
        assignments: Sequence[Assignment],
        sent: Sent,
        replies: Sequence[Update],
        outcome: RoundOutcome,
    ) -> None:
        """Find out whether a component of a user's own is to blame for an update or a loss that is not finite.

        One such client is trained again, if there is one; see `Backend.find_fault`.

        Args:
            round: Number of the round, from 1.
            assignments: What its clients had to do.
            sent: What was sent to them.
            replies: What they replied.
            outcome: What `aggregate` made of it.

        Raises:
            ComponentError: One is; the message names it, the client and the step.
        """
        fine = {update.client for update in outcome.updates}
        suspects = {update.client for update in replies if update.client not in fine or not math.isfinite(update.loss)}
        task = next((task for task in assignments if task.client in suspects), None)
        find = getattr(self.backend, "find_fault", None)  # a user's own backend may have none
        if task is not None and find is not None and (fault := find(round, task, sent)) is not None:
            raise fault

    def evaluated_model(self, state: ServerState) -> ModelState:
        """Return the global model, or the model that a component's hook `evaluated` makes of it.

        Args:
            state: The state after a round.
        """
        parameters = state.model.parameters
        for name, hooks in hooked(self.method).items():
            parameters = hooks.evaluated(state.hooks[name], parameters)
        return state.model._replace(parameters=parameters)

    def record(self, round: int, cohort: Cohort, outcome: RoundOutcome) -> RoundRecord:
        """Make the record of a round, without evaluations and duration.

        Args:
            round: Number of the round, from 1.
            cohort: The selected clients.
            outcome: The round's outcome.

        Returns:
            The record.
        """
        return RoundRecord.of(self.seed, round, cohort, outcome, self.target)

    def _select(self, state: Any, round: int) -> tuple[NDArray[np.int64], Any]:
        rng, selection = generator(self.seed, Purpose.SELECTION, round), self.method.selection
        with calling("selection", selection, "select", f"round {round}: "):
            chosen = selection.select(state, self._seen, self.cohort_size, rng)
        return checked_choice(selection, chosen, len(self.counts), f"round {round}: ")

    def _weighting(self, target: Target) -> tuple[Weighting, str | None]:
        """Return the method's weighting; or FedAvg's, and why, where it needs an estimated target that is not used."""
        weighting = self.method.weighting
        if isinstance(target, EstimatedMix) and target.unused and components.has(weighting, "needs_target"):
            return FedAvg(), target.unused
        return weighting, None

    def _weigh(
        self,
        weighting: Weighting,
        answered: NDArray[np.int64],
        counts: FloatArray,
        by_quota: bool,
        state: ServerState,
    ) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Return the weights, and a mask of the clients whose weight the limit lowered from above it."""
        sizes, limit = counts.sum(axis=1), self.weight_limit
        none = np.zeros(len(answered), dtype=np.bool_)
        if sizes.sum() == 0:
            return np.zeros(0), none
        shown = counts if by_quota or self.weighed is None else self.weighed[answered]
        kept = state.hooks.get("weighting", {})
        target = state.target.used if isinstance(state.target, EstimatedMix) else self.target
        where = f"round {state.round}: "
        with calling("weighting", weighting, "weigh", where):
            given = Answered(shown, sizes, target, answered, kept, limit)
            weights = checked_weights(weighting, weighting.weigh(given), answered, where)
            if limit is None:
                return weights, none
            weights = limited(weights, limit, sizes)
            if weights.max() < limit * (1 - 1e-9):
                return weights, none
            # A weighting may have kept to the limit by itself.
            free = checked_weights(weighting, weighting.weigh(given._replace(limit=None)), answered, where)
        return weights, free * (1 - 1e-9) > np.maximum(weights, limit)

    def _aggregate_masked(
        self, state: ServerState, cohort: Cohort, sent: Sent, replies: Sequence[Update]
    ) -> tuple[ServerState, RoundOutcome]:
        """Simulate masked updates: what `aggregate` returns.

        As at real sites the clients that replied are weighed anew where others are lost, before a sum is opened.
        """
        arrived = [update.client for update in replies]
        updates = finite(replies) if self.protection is None else [stilled(update) for update in replies]
        clients = [update.client for update in updates]
        members = cohort.take(np.isin(cohort.ids, clients))
        asked, totals = self.ask(state, members), {}
        closed = self._why_closed(asked.weights, len(clients))
        if closed is None and len(asked.weights):
            weight_of = dict(zip(members.ids.tolist(), asked.weights.tolist(), strict=True))
            noise = None if self.protection is None else self.protection.noise
            totals = add_up(
                encode_update(
                    self.method,
                    update,
                    weight_of[update.client],
                    len(clients),
                    noise,
                    None if noise is None else generator(self.seed, Purpose.UPDATE_NOISE, state.round, update.client),
                    own_weight=self.announced is not None,
                )
                for update in updates
            )
        following, outcome = self.aggregate_sums(state, cohort, sent, asked, clients, totals, closed)
        for reply in finite(replies):
            self.clients.put(reply.client, state.round, reply.state)
        return following, outcome._replace(replied=arrived, updates=updates if len(outcome.weights) else [])

    def _why_closed(self, weights: FloatArray, clients: int) -> str | None:
        """Say why no sum is opened over so many clients with these weights; None: it is."""
        answers = None if self.protection is None else self.protection.noise.answers
        if 0 < clients < LEAST:
            return f"a masked sum is over {LEAST} clients at least, and there are {clients}"
        if answers is not None and 0 < clients < answers:
            return f"the updates' noise is made for {answers} clients at least, and there are {clients}"
        if clients and not weights.any():
            return "the clients that replied have no weight"
        if len(weights) and self.weight_limit is not None and weights.max() > self.weight_limit * (1 + 1e-9):
            return (
                f"one of the {clients} clients that replied has {weights.max():.3g} of the weight, and "
                f"training.weight_limit is {self.weight_limit:g}"
            )
        return None

    def _declined(self, state: ServerState, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the clients that have spent their privacy budget."""
        if self.protection is None:
            return np.zeros(len(ids), dtype=np.bool_)
        spent: NDArray[np.bool_] = state.hooks[_PRIVACY][_TAKEN].numpy()[ids] >= self.protection.most_rounds
        return spent

    def _account(
        self,
        protection: Protection,
        state: ServerState,
        following: ServerState,
        cohort: Cohort,
        opened_by: Collection[int],
    ) -> tuple[ServerState, dict[str, Any]]:
        """Count the sums that were opened for the clients that were in them; return the state and the record's part."""
        taken = state.hooks[_PRIVACY][_TAKEN].clone()
        taken[list(opened_by)] += 1
        most = int(taken.max())
        said = {
            "epsilon": protection.spent(most),
            "delta": protection.delta,
            "round": protection.spent(1),
            "rounds": most,
            "declined": cohort.ids[self._declined(state, cohort.ids)].tolist(),
        }
        return replace(following, hooks={**following.hooks, _PRIVACY: {_TAKEN: taken}}), said

    def shortage(self, clients: int) -> str:
        """Say that the aggregation needs more clients than there are.

        Args:
            clients: How many there are.
        """
        aggregation = self.method.aggregation
        name = name_in("aggregation", aggregation).removeprefix("aggregation ")
        return f"{name} needs {aggregation.least} clients, and there are {clients}"

    def _move(
        self, state: ServerState, updates: Sequence[Update], answered: NDArray[np.int64], weights: FloatArray
    ) -> tuple[ServerState, float | None, FloatArray] | None:
        """Return the state after the update, the drift diversity of the updates (None: undefined), and their weights.

        The weights are those that the aggregation gives them, if it keeps the updates apart.

        Return None if the next model would have a NaN or infinite value.
        """
        changes = as_matrix([update.change for update in updates])
        steps = np.array([update.steps for update in updates], dtype=np.int64)
        update, sent, where = self.method.server_update, state.model.parameters, f"round {state.round}: "
        with calling("aggregation", self.method.aggregation, "combine", where):
            combined = self.method.aggregation.combine(changes, weights)
        rows, shares = checked_aggregate(self.method.aggregation, combined, changes, where)
        buffers = self._aggregate_buffers(state.model.buffers, updates, weights, where)
        if len(rows) == len(changes):
            weights = shares
        else:  # all updates are merged into one
            steps = np.array([round(float(weights @ steps))])
        with calling("server_update", update, "update", where):
            moved = update.update(state.server_update, sent, rows, shares, steps)
        parameters, server_update = checked_model(update, moved, sent, where)
        if not is_finite(parameters):
            if is_own(update) and is_moderate(sent, changes):
                raise ComponentError(
                    f"{where}{name_in('server_update', update)}: update() returned NaN or infinity, although the model "
                    "and all updates are finite; guard its roots and quotients"
                )
            return None
        end = RoundEnd(
            old=state.model.parameters,
            new=parameters,
            changes=changes,
            ids=answered,
            weights=weights,
            replies=[update.reply for update in updates],
            clients=len(self.counts),
            server_update=server_update,
            weight_limit=self.weight_limit,
        )
        parameters, kept = self._end_round(state, end)
        integers = torch.stack([update.integers for update in updates]).amax(0)
        model = ModelState(parameters, buffers, integers)
        drift = metrics.drift_diversity(changes, torch.stack([update.norm for update in updates]).tolist())
        following = replace(state, model=model, server_update=server_update, hooks=kept)
        return following, drift if math.isfinite(drift) else None, weights  # undefined where updates cancel out

    def _move_by_sums(self, state: ServerState, opened: Opened, clients: NDArray[np.int64]) -> ServerState | None:
        """Return the state after the update; None if the next model would have a NaN or infinite value."""
        update, sent, where = self.method.server_update, state.model.parameters, f"round {state.round}: "
        one, function = np.ones(1), "update_from_sums" if reads_sums(update) else "update"
        with calling("server_update", update, function, where):
            if reads_sums(update):
                moved = update.update_from_sums(  # type: ignore[attr-defined]
                    state.server_update, sent, opened.change, opened.number
                )
            else:
                steps = np.array([round((opened.steps or 0) / len(clients))])
                moved = update.update(state.server_update, sent, opened.change[None], one, steps)
        parameters, server_update = checked_model(update, moved, sent, where, function)
        if not is_finite(parameters):
            return None
        end = RoundEnd(
            old=sent,
            new=parameters,
            changes=opened.change[None].to(sent.dtype),
            ids=clients,
            weights=one,
            replies=[opened.reply],
            clients=len(self.counts),
            server_update=server_update,
            weight_limit=self.weight_limit,
        )
        parameters, kept = self._end_round(state, end)
        model = ModelState(parameters, opened.buffers, opened.integers)
        return replace(state, model=model, server_update=server_update, hooks=kept)

    def _end_round(self, state: ServerState, end: RoundEnd) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """Return the next model's parameters, and what components keep at the server after the round."""
        where, components = f"round {state.round}: ", hooked(self.method)
        for name, hooks in components.items():
            if type(hooks).next_model is Hooks.next_model:
                continue
            with calling(name, hooks, "next_model", where):
                end = end._replace(new=checked_parameters(name, hooks, hooks.next_model(end), end.old, where))
        kept = {}
        for name, hooks in components.items():
            with calling(name, hooks, "end_round", where):
                kept[name] = hooks.end_round(state.hooks[name], end)
        return end.new, kept

    def _aggregate_buffers(self, sent: Tensor, updates: Sequence[Update], weights: FloatArray, where: str) -> Tensor:
        """Return the next buffers."""
        aggregation, buffers = self.method.aggregation, [update.buffers for update in updates]
        if type(aggregation) is Mean or not sent.numel():
            return _average(buffers, weights)
        changes = torch.stack(buffers) - sent
        with calling("aggregation", aggregation, "combine_buffers", where):
            combined = aggregation.combine_buffers(changes, weights)
        rows, shares = checked_aggregate(aggregation, combined, changes, where)
        return sent + _average(list(rows), shares)


def run_round_together(
    federations: Sequence[Federation], states: Sequence[ServerState]
) -> list[tuple[ServerState, RoundRecord]]:
    """Play one round of several federations, whose clients train as one cohort.

    Each federation makes the same random draws as alone. Its results are the same up to rounding: matrix products may
    be computed differently for a different number of clients. The duration of the round is divided equally among the
    records.

    Args:
        federations: Federations with the same network and data set, each with a `CohortBackend`. Those whose local
            training differs in more than samples, seed and learning rate train in cohorts of their own.
        states: The state of each federation after the last round.

    Returns:
        What `Federation.run_round` returns, for each federation.
    """
    began = time.perf_counter()
    rounds, requests = [], []
    for federation, state in zip(federations, states, strict=True):
        cohort, following = federation.select_participants(state)
        sent, assignments = federation.instructions(following, cohort)
        assert isinstance(federation.backend, CohortBackend), "only a CohortBackend trains several federations together"
        rounds.append((federation, following, cohort, sent))
        requests.append(CohortRequest(federation.backend, following.round, assignments, sent))
    played = []
    for (federation, following, cohort, sent), request, updates in zip(
        rounds, requests, train_together(requests), strict=True
    ):
        following, outcome = federation.aggregate(following, cohort, sent, updates)
        federation.check_finite(following.round, request.cohort, sent, updates, outcome)
        played.append((following, federation.record(following.round, cohort, outcome)))
    for _, record in played:
        record.seconds = (time.perf_counter() - began) / len(played)
    return played


def cohort_size(participation: float, clients: int) -> int:
    """Compute how many clients are selected in a round: `max(1, floor(participation * clients + 1e-9))`.

    Args:
        participation: Share of the clients that is selected.
        clients: Number of clients.

    Returns:
        The number of selected clients.
    """
    return max(1, math.floor(participation * clients + 1e-9))


def hooked(method: Method) -> dict[str, Hooks]:
    """Find the components of a method that have hooks.

    Args:
        method: The method.

    Returns:
        The components by their place in the method, such as `objective` or `objective.terms[0]`.
    """
    places: dict[str, Any] = {
        "selection": method.selection,
        "objective": method.objective.loss,
        **{f"objective.terms[{at}]": term for at, (_, term) in enumerate(method.objective.terms)},
        "local_step": method.local_step,
        "weighting": method.weighting,
        "server_update": method.server_update,
    }
    return {name: component for name, component in places.items() if isinstance(component, Hooks)}


def adapting(method: Method) -> list[Hooks]:
    """Find the components of a method that have hooks, in the order in which they adapt the network.

    The classification loss comes last: the last layer that it may put there is the network's.

    Args:
        method: The method.

    Returns:
        The components.
    """
    return [component for _, component in sorted(hooked(method).items(), key=lambda item: item[0] == "objective")]


def _average(rows: Sequence[Tensor], weights: FloatArray) -> Tensor:
    """Return the weighted mean of buffers, summed in float64 in the order of the cohort."""
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        total += row.double() * weight
    return total.to(rows[0].dtype)
