"""The round, written once: select, train, weigh, update."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew import metrics
from fedskew.engine._backend import Assignment, Backend, Sent, Update
from fedskew.engine._clients import ClientStates
from fedskew.engine._conditions import Conditions
from fedskew.engine._records import Cohort, FloatArray, RoundOutcome, RoundRecord
from fedskew.engine._update_buffer import as_matrix
from fedskew.errors import ArgumentError
from fedskew.hooks import Hooks, RoundEnd
from fedskew.labels import LabelCounts
from fedskew.methods import Method
from fedskew.models import ModelState
from fedskew.randomness import Purpose, generator
from fedskew.weighting import Answered


@dataclass(frozen=True)
class ServerState:
    """Everything that the server carries from round to round: with it, the clients' states and the config, a run goes
    on where it stood. `hooks`: what components keep, by the component's place in the method.
    """

    round: int
    model: ModelState
    selection: Any
    server_update: Any
    hooks: dict[str, dict[str, Tensor]]


class RoundRunner(Protocol):
    """Plays rounds one after another.

    A state is the runner's own; it has the number of its last `round`, and the `model` that is trained.
    """

    def open(self) -> None:
        """Get the backend ready."""

    def close(self) -> None:
        """Release what the backend holds."""

    def start(self, model: ModelState) -> Any:
        """The state before the first round, from the untrained model."""

    def run_round(self, state: Any) -> tuple[Any, RoundRecord]:
        """Play one round: the next state and the round's record, without evaluations."""

    def evaluated_model(self, state: Any) -> ModelState | None:
        """The model to evaluate and to save; None while there is none that all clients share."""


@dataclass(frozen=True)
class Federation:
    """A method on a pool of clients.

    `counts`: label counts, `(clients, classes)`, exact; `seen`: the same as the server's selection sees them (with
    noise), None where it sees them exactly; `weighed`: as the weighting sees them. `target`: `(classes,)` label mix, or
    None; `participation`: share of the clients that is asked each round, `max(1, floor(share * clients + 1e-9))` of
    them; `epochs`: local epochs of each client, where no straggler does less; `steps`: the most local steps of each, or
    None.
    """

    method: Method
    backend: Backend
    counts: FloatArray
    target: FloatArray | None
    participation: float
    seed: int
    epochs: int = 1
    steps: int | None = None
    conditions: Conditions = field(default_factory=Conditions)
    seen: FloatArray | None = None
    weighed: FloatArray | None = None
    clients: ClientStates = field(default_factory=ClientStates)

    def __post_init__(self) -> None:
        if self.target is None and self.method.weighting.needs_target:
            raise ArgumentError(
                f"target: {type(self.method.weighting).__name__} weighs clients towards a target label mix, and none "
                "is given; set [target] mix, or choose another weighting"
            )
        check = getattr(self.method.selection, "check", None)  # a selection of one's own may have none
        if check is not None:
            check(self._seen, self.cohort_size)

    @property
    def cohort_size(self) -> int:
        """How many clients are asked each round."""
        return cohort_size(self.participation, len(self.counts))

    @cached_property
    def _seen(self) -> LabelCounts:
        """What the selection sees: a record, so that a million clients' values are checked once, not every round."""
        return LabelCounts(self.counts if self.seen is None else self.seen)

    @cached_property
    def _epochs(self) -> NDArray[np.int64]:
        """Local epochs of every client."""
        return self.conditions.epochs(len(self.counts), self.epochs, self.seed)

    def open(self) -> None:
        """See `Backend.open`."""
        self.backend.open()

    def close(self) -> None:
        """See `Backend.close`."""
        self.backend.close()

    def start(self, model: ModelState) -> ServerState:
        """The state before the first round."""
        return ServerState(
            round=0,
            model=model,
            selection=self.method.selection.init(self._seen),
            server_update=self.method.server_update.init(model.parameters),
            hooks={
                name: hooks.init_server(model.parameters, len(self.counts))
                for name, hooks in hooked(self.method).items()
            },
        )

    def run_round(self, state: ServerState) -> tuple[ServerState, RoundRecord]:
        """One round: the next state and its record (without evaluations)."""
        began = time.perf_counter()
        cohort, following = self.select_participants(state)
        following, outcome = self.train(following, cohort)
        record = self.record(following.round, cohort, outcome)
        record.seconds = time.perf_counter() - began
        return following, record

    def select_participants(self, state: ServerState) -> tuple[Cohort, ServerState]:
        """Who trains in the next round, some of whom vanish; and the state in that round."""
        round = state.round + 1
        ids, selection = self._select(state.selection, round)
        lost = self.conditions.vanished(len(ids), self.seed, round)
        quotas = getattr(selection, "quotas", None)
        counts = self.counts[ids] if quotas is None else quotas
        return Cohort(ids, lost, counts, quotas is not None), replace(state, round=round, selection=selection)

    def train(self, state: ServerState, cohort: Cohort) -> tuple[ServerState, RoundOutcome]:
        """This round of a cohort: they train, whoever diverged is left out, the model moves."""
        sent, assignments = self.instructions(state, cohort)
        return self.aggregate(state, cohort, sent, self.backend.train(state.round, assignments, sent))

    def instructions(self, state: ServerState, cohort: Cohort) -> tuple[Sent, list[Assignment]]:
        """What is sent to everybody, and what each client that doesn't vanish is asked."""
        hooks = hooked(self.method)
        parameters = state.model.parameters
        broadcast = {
            key: value for name, one in hooks.items() for key, value in one.broadcast(state.hooks[name]).items()
        }
        fresh = {key: value for one in hooks.values() for key, value in one.init_client(parameters).items()}
        assignments = [
            Assignment(
                client=client,
                epochs=int(self._epochs[client]),
                state=self.clients.get(client) or fresh,
                quota=cohort.counts[place] if cohort.quotas else None,
                steps=self.steps,
                samples=int(cohort.counts[place].sum()),
            )
            for place, client in enumerate(cohort.ids.tolist())
            if not cohort.lost[place]
        ]
        return Sent(state.model, broadcast), assignments

    def aggregate(
        self, state: ServerState, cohort: Cohort, sent: Sent, replies: Sequence[Update]
    ) -> tuple[ServerState, RoundOutcome]:
        """This round once its replies are there, in any order, of all that were asked or of some."""
        by_client = {update.client: update for update in replies}
        arrived = [client for client in cohort.ids.tolist() if client in by_client]
        updates = _finite([by_client[client] for client in arrived])
        fine = np.isin(cohort.ids, [update.client for update in updates])

        # How much each counts, now that it is known who answered.
        counts, answered = cohort.counts[fine], cohort.ids[fine]
        weights = self._weigh(answered, counts, cohort.quotas, state)

        # How the model moves.
        following, drift = state, None
        moved = self._move(state, updates, answered, weights) if len(weights) else None
        if moved is not None:
            following, drift = moved
        elif len(weights):  # each update is finite, but not the model they lead to: all of them diverged
            updates, counts, weights = [], counts[:0], weights[:0]
        for update in updates:
            self.clients.put(update.client, state.round, update.state)

        model_bytes = _bytes(state.model._asdict())
        up = sum(model_bytes + _bytes(update.reply) for update in replies)
        down = (model_bytes + _bytes(sent.broadcast)) * len(cohort.ids)
        return following, RoundOutcome(arrived, updates, counts, weights, drift, up, down)

    def evaluated_model(self, state: ServerState) -> ModelState:
        """The model to evaluate and to save: the state's own, unless a component says otherwise."""
        parameters = state.model.parameters
        for name, hooks in hooked(self.method).items():
            parameters = hooks.evaluated(state.hooks[name], parameters)
        return state.model._replace(parameters=parameters)

    def record(self, round: int, cohort: Cohort, outcome: RoundOutcome) -> RoundRecord:
        """The record of a round, without evaluations and time."""
        return RoundRecord.of(self.seed, round, cohort, outcome, self.target)

    def _select(self, state: Any, round: int) -> tuple[NDArray[np.int64], Any]:
        rng = generator(self.seed, Purpose.SELECTION, round)
        return self.method.selection.select(state, self._seen, self.cohort_size, rng)

    def _weigh(self, answered: NDArray[np.int64], counts: FloatArray, by_quota: bool, state: ServerState) -> FloatArray:
        sizes = counts.sum(axis=1)
        if sizes.sum() == 0:
            return np.zeros(0)
        shown = counts if by_quota or self.weighed is None else self.weighed[answered]
        kept = state.hooks.get("weighting", {})
        return self.method.weighting.weigh(Answered(shown, sizes, self.target, answered, kept))

    def _move(
        self, state: ServerState, updates: Sequence[Update], answered: NDArray[np.int64], weights: FloatArray
    ) -> tuple[ServerState, float | None] | None:
        """The state with the next model and what the server keeps, and the drift diversity of the updates.

        None where the next model would have a value that is no number.
        """
        changes = as_matrix([update.change for update in updates])
        steps = np.array([update.steps for update in updates], dtype=np.int64)
        parameters, server_update = self.method.server_update.update(
            state.server_update, state.model.parameters, changes, weights, steps
        )
        if not _is_finite(parameters):
            return None
        model = ModelState(
            parameters,
            _average([update.buffers for update in updates], weights),
            torch.stack([update.integers for update in updates]).amax(0),
        )
        end = RoundEnd(
            old=state.model.parameters,
            new=parameters,
            changes=changes,
            ids=answered,
            weights=weights,
            replies=[update.reply for update in updates],
            clients=len(self.counts),
        )
        kept = {name: hooks.end_round(state.hooks[name], end) for name, hooks in hooked(self.method).items()}
        drift = metrics.drift_diversity(changes, torch.stack([update.norm for update in updates]).tolist())
        following = replace(state, model=model, server_update=server_update, hooks=kept)
        return following, _known(drift)  # updates that cancel out have none


def cohort_size(participation: float, clients: int) -> int:
    """How many of so many clients a share of them is."""
    return max(1, math.floor(participation * clients + 1e-9))


def hooked(method: Method) -> dict[str, Hooks]:
    """The components of a method that have hooks, by their place in it."""
    places: dict[str, Any] = {
        "selection": method.selection,
        "objective": method.objective.loss,
        **{f"objective.terms[{at}]": term for at, (_, term) in enumerate(method.objective.terms)},
        "local_step": method.local_step,
        "weighting": method.weighting,
        "server_update": method.server_update,
    }
    return {name: component for name, component in places.items() if isinstance(component, Hooks)}


def _finite(updates: Sequence[Update]) -> list[Update]:
    """Those in which no value is NaN or infinite; what lies on a GPU is waited for once."""
    norms = torch.stack([_norm(update) for update in updates]).tolist() if updates else []
    return [update for update, norm in zip(updates, norms, strict=True) if math.isfinite(norm) or _no_extremes(update)]


def _norm(update: Update) -> Tensor:
    """A number, 0-d, that is finite only where all of an update is: far faster than asking of every element."""
    return sum((torch.linalg.vector_norm(part) for part in _beside(update)), start=update.norm)


def _no_extremes(update: Update) -> bool:
    """The same by extremes, as a norm overflows sooner."""
    return all(map(_is_finite, (update.change, *_beside(update))))


def _beside(update: Update) -> list[Tensor]:
    """What an update has beside the change, of floating-point tensors that aren't empty."""
    parts = (update.buffers, *update.reply.values(), *update.state.values())
    return [part for part in parts if part.is_floating_point() and part.numel()]


def _is_finite(part: Tensor) -> bool:
    """No NaN and no infinity."""
    return all(map(math.isfinite, part.aminmax()))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _average(rows: Sequence[Tensor], weights: FloatArray) -> Tensor:
    """Weighted mean of buffers, accumulated in float64 in the order of the cohort."""
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        total += row.double() * weight
    return total.to(rows[0].dtype)
