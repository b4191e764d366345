"""A round of federated learning, for every method: select, instruct, collect, move."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from fedskew.engine import contracts
from fedskew.engine._backend import Assignment, Backend, Conditions, Sent, Update, cohort_size, tensor_bytes
from fedskew.engine._faults import find_fault, is_finite, is_moderate
from fedskew.engine._records import Cohort, FloatArray, Notes, RoundRecord
from fedskew.engine._sight import Sight, losses_of
from fedskew.engine._states import ClientStates, Named, ServerState, packed, unpacked
from fedskew.engine.sums import Floats
from fedskew.engine.target import EstimatedMix, Estimation
from fedskew.engine.totals import Collected
from fedskew.hooks import Hooks, RoundEnd
from fedskew.labels import LabelCounts
from fedskew.methods import Method
from fedskew.models import FlatModel, ModelState
from fedskew.randomness import Purpose, generator


@dataclass(frozen=True)
class Federation:
    """Plays the rounds of a method on a pool of clients; a `RoundRunner`.

    Attributes:
        method: The method; a server update with a parameter `clients` gets the number of clients.
        backend: Trains the cohorts.
        counts: Exact label counts, `(clients, classes)`.
        sizes: Samples of each client, `(clients,)`, where a sample may have several labels, or none; None: as they sum.
        target: Target label mix, `(classes,)`, by which records measure; None: there is no target.
        participation: Share of the clients that is selected in each round (see `cohort_size`).
        seed: Seed of all random draws.
        epochs: Local epochs of a client; stragglers do fewer.
        steps: Upper limit on a client's local steps; None: no limit.
        conditions: Dropouts and stragglers.
        seen: Label counts given to the selection, `(clients, classes)`; None: the exact ones.
        weighed: Label counts given to the weighting, `(clients, classes)`; None: the exact ones.
        clients: The states that clients keep between their participations.
        weight_limit: Upper limit on a client's weight (see `mixing.limited`); None: no limit.
        aim: Gives the mix that clients are weighed towards; None: it is `target`.
        codec: How updates travel and are added up.
        constant_bytes: Bytes of the model that need not travel, as every client keeps its own.
        network: The network, for components that look at it; None: there is none here.
        samples: The samples that the server holds itself, `inputs` and `targets`; None: none.
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
    aim: Estimation | None = None
    codec: Floats = field(default_factory=Floats)
    constant_bytes: int = 0
    sizes: FloatArray | None = None
    network: FlatModel | None = None
    samples: Any = None

    def __post_init__(self) -> None:
        self.codec.check(self.method, self.cohort_size)
        object.__setattr__(self, "method", contracts.fitting(self))

    @property
    def cohort_size(self) -> int:
        """Number of clients that are selected in each round."""
        return cohort_size(self.participation, len(self.counts))

    @cached_property
    def counts_seen(self) -> LabelCounts:
        """The label counts given to the selection, checked once for all rounds."""
        return LabelCounts(self.counts if self.seen is None else self.seen)

    @cached_property
    def _epochs(self) -> NDArray[Any]:
        return self.conditions.epochs(len(self.counts), self.epochs, self.seed)

    @cached_property
    def _untouched(self) -> Any:
        """The selection's state before the first round."""
        with contracts.calling("selection", self.method.selection, "init"):
            return self.method.selection.init(self.counts_seen)

    def open(self) -> None:
        """See `Backend.open`."""
        self.backend.open()

    def close(self) -> None:
        """See `Backend.close`."""
        self.backend.close()

    def start(self, model: ModelState) -> ServerState:
        """See `RoundRunner.start`."""
        update, kept = self.method.server_update, dict[str, Named]()
        with contracts.calling("server_update", update, "init"):
            kept["server_update"] = contracts.checked_state(update, update.init(model.parameters))
        for name, hooks in contracts.hooked(self.method).items():
            made = contracts.tensors_of(name, hooks, "init_server", model.parameters, len(self.counts))
            kept[name] = {**kept.get(name, {}), **made}
        kept |= {"selection": packed(self._untouched), "codec": self.codec.start(len(self.counts))}
        kept["model"] = model._asdict()
        state = ServerState(0, {f"{owner}/{name}": part for owner, own in kept.items() for name, part in own.items()})
        return state if self.aim is None else self.aim.unknown.within(state)

    def run_round(self, state: ServerState) -> tuple[ServerState, RoundRecord]:
        """See `RoundRunner.run_round`."""
        began = time.perf_counter()
        cohort, following = self.select(state)
        following, collected = self.train(following, cohort)
        record = self.record(following.round, cohort, collected)
        record.seconds = time.perf_counter() - began
        return following, record

    def select(self, state: ServerState) -> tuple[Cohort, ServerState]:
        """Select the clients of the next round; return them, and the state during this round."""
        round, selection = state.round + 1, self.method.selection
        where, kept = f"round {round}: ", unpacked(state.of("selection"), self._untouched)
        state, notes = replace(state, round=round), Notes()
        called = kept, self.counts_seen, self.cohort_size, generator(self.seed, Purpose.SELECTION, round)
        estimated = EstimatedMix.of(state)
        mix = self.target if estimated is None else estimated.used
        seen = {"kept": state.of("selection.hooks"), "losses": losses_of(self, state, notes), "target": mix}
        chosen = self.sight(state, notes).call("selection", selection, "select", *called, **seen)
        ids, kept = contracts.checked_choice(selection, chosen, len(self.counts), where)
        lost = self.conditions.dropped(len(ids), self.seed, round) | self.codec.declines(state.of("codec"), ids)
        counts, quotas = self.counts[ids], getattr(kept, "quotas", None)
        if quotas is not None:
            counts = contracts.checked_quotas(selection, quotas, ids, self.counts.shape[1], where)
        following = state.having("selection", packed(kept))
        samples = None if self.sizes is None else self.sizes[ids]
        return Cohort(ids, lost, counts, quotas is not None, notes, samples), following

    def sight(self, state: ServerState, notes: Notes) -> Sight:
        """Return what components may see at the server beside their arguments."""
        return Sight(state, notes, self.network, self.samples)

    def train(self, state: ServerState, cohort: Cohort) -> tuple[ServerState, Collected]:
        """Train a cohort and move the model; return the state after the round, and what is recorded of it."""
        sent, tasks = self.instruct(state, cohort)
        collected, replies = self.codec.collect(self, state, cohort, sent, tasks)
        find_fault(self.backend, state.round, tasks, sent, replies, set(collected.members.ids.tolist()))
        return self.move(state, cohort, sent, collected)

    def instruct(self, state: ServerState, cohort: Cohort) -> tuple[Sent, list[Assignment]]:
        """Make what is sent to every client, and an assignment for each that does not drop out."""
        broadcast, fresh = dict[str, Tensor](), dict[str, Tensor]()
        sizes, where = cohort.sizes, f"round {state.round}: "
        for name, one in contracts.hooked(self.method).items():
            broadcast |= contracts.tensors_of(name, one, "broadcast", state.of(name), where=where)
            fresh |= contracts.tensors_of(name, one, "init_client", state.model.parameters, where=where)
        assignments = [
            Assignment(
                client=client,
                epochs=self._epochs[client].item(),
                state=fresh if (kept := self.clients.of(client)) is None else kept,
                quota=cohort.counts[place] if cohort.quotas else None,
                steps=self.steps,
                samples=round(float(sizes[place])),
            )
            for place, client in enumerate(cohort.ids.tolist())
            if not cohort.lost[place]
        ]
        return Sent(state.model, broadcast), assignments

    def aggregate(
        self, state: ServerState, cohort: Cohort, sent: Sent, replies: Sequence[Update]
    ) -> tuple[ServerState, Collected]:
        """Move the model by the updates of all or some of the cohort's clients, in any order."""
        return self.move(state, cohort, sent, self.codec.add_up(self, state, cohort, replies))

    def move(
        self, state: ServerState, cohort: Cohort, sent: Sent, collected: Collected
    ) -> tuple[ServerState, Collected]:
        """Move the model by what was collected; return the state after the round, and what is recorded of it."""
        moved = state if collected.total is None else self._moved(state, collected, cohort.notes)
        if moved is None:  # all that was sent is finite but the next model is not: all count as diverged
            collected = collected.without_members()
        for client, own in collected.states.items():
            self.clients.stage(client, state.round, own)
        self.clients.settle(keep=moved is not None)
        kept, privacy = self.codec.account(state.of("codec"), cohort, collected)
        down = (self.model_bytes(state.model) + tensor_bytes(sent.broadcast)) * len(cohort.ids)
        return (moved or state).having("codec", kept), collected._replace(bytes_down=down, privacy=privacy)

    def _moved(self, state: ServerState, collected: Collected, notes: Notes) -> ServerState | None:
        """Return the state with the next model; None if that would have a NaN or infinite value."""
        update, sent, total = self.method.server_update, state.model.parameters, collected.total
        components, where = contracts.hooked(self.method), f"round {state.round}: "
        assert total is not None, "by the caller"
        called = state.of("server_update"), sent, total.change, total.extras
        found = self.sight(state, notes).call("server_update", update, "move", *called)
        parameters, kept = contracts.checked_model(update, found, sent, where)
        if not is_finite(parameters):
            if self.codec.sees_each and is_moderate(sent, total.changes):
                contracts.blame_for_infinity(update, where)
            return None
        shown = sent, parameters, total.changes, collected.members.ids, total.weights, total.replies
        end = RoundEnd(*shown, clients=len(self.counts), weight_limit=self.weight_limit)
        for name, hooks in components.items():
            if type(hooks).next_model is not Hooks.next_model:
                made = self.sight(state.moved_to(total.model(end.new)), notes).call(name, hooks, "next_model", end)
                end = end._replace(new=contracts.checked_parameters(name, hooks, "next_model", made, sent, where))
        following = state.having("server_update", kept).moved_to(total.model(end.new))
        for name, hooks in components.items():
            ended = self.sight(following, notes).call(name, hooks, "end_round", following.of(name), end)
            following = following.having(name, contracts.tensors(name, hooks, "end_round", ended, where))
        return following

    def evaluated_model(self, state: ServerState) -> ModelState:
        """Return the global model, or the model that a component's hook `evaluated` makes of it."""
        parameters, where = state.model.parameters, f"round {state.round}: "
        for name, hooks in contracts.hooked(self.method).items():
            made = self.sight(state, Notes()).call(name, hooks, "evaluated", state.of(name), parameters)
            parameters = contracts.checked_parameters(name, hooks, "evaluated", made, parameters, where)
        return state.model._replace(parameters=parameters)

    def record(self, round: int, cohort: Cohort, collected: Collected) -> RoundRecord:
        """Make the record of a round, without evaluations and duration."""
        return collected.record(self.seed, round, cohort, self.target)

    def model_bytes(self, model: ModelState) -> int:
        """Return the bytes of a model, as far as they need to travel."""
        return tensor_bytes(model._asdict()) - self.constant_bytes
