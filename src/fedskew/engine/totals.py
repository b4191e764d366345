"""A round's weights, and what plain updates are together: added up once all are there, or one by one as they come."""

import math
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedskew import components, metrics
from fedskew.aggregation import Mean
from fedskew.engine._backend import Assignment, Sent, Update, tensor_bytes
from fedskew.engine._faults import finite
from fedskew.engine._records import Cohort, FloatArray, RoundRecord
from fedskew.engine._sight import Sight
from fedskew.engine._states import Named, ServerState
from fedskew.engine.contracts import calling, checked_aggregate, checked_share, checked_weights, hooked, is_own
from fedskew.engine.target import EstimatedMix
from fedskew.labels import effective_sample_size, entropy, kl_to_uniform
from fedskew.methods import Method
from fedskew.mixing import limited
from fedskew.models import ModelState
from fedskew.server_updates import weighted_sum
from fedskew.weighting import Answered, FedAvg

Federation = Any
"""That of `round`, which imports this file."""


class Total(NamedTuple):
    """What clients sent, added up.

    Attributes:
        change: Sum of a f D, `(parameters,)`, float64, where the a sum to 1.
        changes: What hooks see of the updates, `(rows, parameters)`: each client's, or one of all.
        loss: Weighted mean of the losses; None if unknown.
        steps: Number of local steps of all; None if unknown.
        drift: Drift diversity of the updates; None if undefined or unknown.
    """

    change: Tensor
    extras: Mapping[str, Any]
    buffers: Tensor
    integers: Tensor
    changes: Tensor
    weights: FloatArray
    replies: Sequence[Named]
    loss: float | None = None
    steps: int | None = None
    drift: float | None = None

    def model(self, parameters: Tensor) -> ModelState:
        """Return the next model, with these parameters."""
        return ModelState(parameters, self.buffers, self.integers)


class Weights(NamedTuple):
    """The weights of some clients.

    Attributes:
        values: One for each client, sum 1; empty if nobody holds a sample, or if each knows its own alone, and where
            the model stays as it was.
        limited: The clients whose weight `training.weight_limit` lowered.
        fallback: Why they are FedAvg's in place of the method's; None if they are the method's.
    """

    values: FloatArray = np.zeros(0)
    limited: Sequence[int] = ()
    fallback: str | None = None


class Collected(NamedTuple):
    """What a round's clients sent, and what is recorded of it.

    Attributes:
        members: The clients that replied and did not diverge.
        replied: The clients that replied, in the order of the cohort.
        weights: Weights of `members`: those that the aggregation gives them, where it keeps updates apart.
        total: None: the model stays as it was.
        unmoved: Why the aggregation leaves the model as it was.
        steps: Local steps of `members`, and mean objectives over their local training, where each is known.
        observed: What the `Observer` returned of each member.
        logged: Figures that components logged at each member, by name.
        states: What each client keeps; without those that are staged already.
        charged: Clients whose privacy budget the round is charged to.
        privacy: See `RoundRecord.privacy`.
    """

    members: Cohort
    replied: list[int]
    weights: Weights
    total: Total | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    unmoved: str | None = None
    steps: Sequence[int] = ()
    losses: Sequence[float] = ()
    drift: float | None = None
    observed: Sequence[Any] = ()
    logged: Sequence[Mapping[str, float]] = ()
    states: Mapping[int, Named] = {}
    charged: Collection[int] = ()
    privacy: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, members: Cohort, replied: list[int], weights: Weights, total: Total | None, updates: Sequence[Update]
    ) -> "Collected":
        """Return what plain updates of the members are, without bytes and states."""
        return cls(
            members,
            replied,
            weights if total is not None else weights._replace(values=np.zeros(0)),
            total,
            steps=[update.steps for update in updates],
            losses=[update.loss for update in updates],
            drift=None if total is None else total.drift,
            observed=[update.observed for update in updates],
            logged=[update.logged for update in updates],
        )

    def without_members(self) -> "Collected":
        """Return the same if all clients count as diverged."""
        nothing = self._replace(weights=self.weights._replace(values=np.zeros(0)), total=None, drift=None)
        return nothing._replace(members=self.members.only(()), steps=(), losses=(), observed=(), logged=())

    def record(self, seed: int, round: int, cohort: Cohort, target: FloatArray | None) -> RoundRecord:
        """Make the record of the round, without evaluations and duration."""
        members, weights, ids = self.members, self.weights.values, cohort.ids.tolist()
        answered, samples, pooled = members.ids.tolist(), members.sizes, cohort.counts.sum(axis=0)
        total, known, there = self.total, frozenset(answered), frozenset(self.replied)
        loss = None if total is None else total.loss
        if self.losses and len(weights):
            taken = np.logical_or(self.steps, self.losses)  # no step: a loss of 0; a stock client tells no steps
            loss = float(weights @ self.losses / (1 - weights[~taken].sum())) if weights[taken].any() else None
        ess = effective_sample_size(weights, samples) if len(weights) else None
        distance = None if target is None or not len(weights) else metrics.mix_distance(weights, members.counts, target)
        return RoundRecord(
            seed=seed,
            round=round,
            cohort=ids,
            answered=answered,
            dropped=[client for client in ids if client not in there],
            diverged=[client for client in self.replied if client not in known],
            weights=weights.tolist(),
            steps=list(self.steps),
            steps_summed=None if total is None else total.steps,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            entropy=float(entropy(pooled)),
            kl=float(kl_to_uniform(pooled)),
            ess=ess,
            ess_share=None if ess is None else ess / float(samples.sum()),
            target_distance=distance,
            drift=self.drift,
            bytes_up=self.bytes_up + cohort.notes.bytes_up,
            bytes_down=self.bytes_down + cohort.notes.bytes_down,
            clients=[one for one in self.observed if one is not None] or None,
            limited=list(self.weights.limited) or None,
            unmoved=self.unmoved,
            fallback=self.weights.fallback,
            privacy=self.privacy,
            logged=self._figures(cohort.notes.logged) or None,
        )

    def _figures(self, noted: Mapping[str, float]) -> dict[str, float | None]:
        """Return what components logged at the server, and the means of what they logged at clients."""
        names = dict.fromkeys(name for own in self.logged for name in own)
        means = {name: float(np.mean([own[name] for own in self.logged if name in own])) for name in names}
        return {name: value if math.isfinite(value) else None for name, value in (means | dict(noted)).items()}


def shown(federation: Federation, members: Cohort) -> FloatArray:
    """Return the label counts of some clients that the weighting sees."""
    seen: FloatArray | None = federation.weighed
    return members.counts if members.quotas or seen is None else seen[members.ids]


def weigh(federation: Federation, state: ServerState, members: Cohort, updates: Sequence[Update] = ()) -> Weights:
    """Weigh clients; by FedAvg where the method's weighting needs a target mix that there is not yet."""
    weighting, limit, fallback, mix = federation.method.weighting, federation.weight_limit, None, federation.target
    sizes, counts = members.sizes, shown(federation, members)
    if (estimated := EstimatedMix.of(state)) is not None:
        mix = estimated.used
        if estimated.unused and components.has(weighting, "needs_target"):
            weighting, fallback = FedAvg(), estimated.unused
    if sizes.sum() == 0:
        return Weights(fallback=fallback)
    if not counts[sizes > 0].any() and components.needs_label_counts("weighting", weighting):
        why = "with noise all label counts of clients with samples are 0"
        weighting, fallback = FedAvg(), why if members.samples is None else "none of these clients' samples has a label"
    where, kept = f"round {state.round}: ", state.of("weighting")
    given = Answered(counts, sizes, mix, members.ids, kept, limit)
    changes = as_matrix([one.change for one in updates]) if components.takes(weighting, "weigh", "updates") else None

    def weighed(given: Answered) -> FloatArray:
        # one's own may write to them
        given, rows = deepcopy((given, changes)) if is_own(weighting) else (given, changes)
        found = federation.sight(state, members.notes).call("weighting", weighting, "weigh", given, updates=rows)
        return checked_weights(weighting, found, members.ids, where)

    free = weights = weighed(given)
    if limit is None:
        return Weights(weights, fallback=fallback)
    weights = limited(weights, limit, sizes)
    if components.has(weighting, "keeps_limit") and weights.max() >= limit * (1 - 1e-9):
        free = weighed(given._replace(limit=None))
    return Weights(weights, members.ids[free * (1 - 1e-9) > np.maximum(weights, limit)].tolist(), fallback)


class RunningTotal:
    """Adds up updates as they come, in the order of the cohort, with four vectors of the model's size in memory. The
    sums have the bits of `total_of`; of the drift only the last digits may differ."""

    def __init__(self, method: Method, state: ServerState) -> None:
        self._method, self._sent, self._where = method, state.model, f"round {state.round}: "
        parameters, self._integers = self._sent.parameters, self._sent.integers
        self._change = torch.zeros_like(parameters, dtype=torch.float64)
        self._buffers = torch.zeros_like(self._sent.buffers, dtype=torch.float64)
        self._apart = torch.zeros_like(parameters)  # the plain sum, for the drift
        self._extras: dict[str, Any] = {}
        self._reply: dict[str, Tensor] = {}
        self._norms: list[Tensor] = []

    def add(self, update: Update, weight: float) -> None:
        """Add one update; its tensors may be overwritten afterwards."""
        one = np.array([weight])
        factor, extras = shared(self._method.server_update, update.change, update.steps, weight, self._where)
        weighted_sum(update.change[None], one * factor, self._change)
        weighted_sum(update.buffers[None], one, self._buffers)
        self._integers = torch.maximum(self._integers, update.integers) if self._norms else update.integers
        self._apart += update.change
        self._norms.append(update.norm)
        _add_extras(self._extras, extras)
        for name, part in update.reply.items():
            if name not in self._reply:
                self._reply[name] = torch.zeros_like(part, dtype=torch.float64)
            floats = part.reshape(1, -1).to(torch.promote_types(part.dtype, torch.float32))
            weighted_sum(floats, np.ones(1), self._reply[name].view(-1))

    def total(self) -> Total:
        """Return the total of one update at least; hooks see it as that of a single client, with all of the weight."""
        shown = self._change[None].to(self._sent.parameters.dtype) if hooked(self._method) else self._apart[None]
        return Total(
            change=self._change,
            extras=self._extras,
            buffers=self._buffers.to(self._sent.buffers.dtype),
            integers=self._integers,
            changes=shown,
            weights=np.ones(1),
            replies=[self._reply],
            drift=_drift(self._apart[None], self._norms),
        )


def collect_each(
    federation: Federation, codec: Any, state: ServerState, cohort: Cohort, sent: Sent, tasks: Sequence[Assignment]
) -> tuple[Collected, list[Update]]:
    """Add up updates as they come. Where some are not finite, the others are trained again, as all weights change."""
    replies, bytes_up = dict[int, Update](), 0
    while True:
        members = cohort.only({task.client for task in tasks})
        weights, total = codec.weigh(federation, state, members), RunningTotal(federation.method, state)
        values = weights.values if len(weights.values) else np.zeros(len(tasks))
        diverged = set()
        trained = federation.backend.train_each(state.round, tasks, sent)
        for update, weight in zip(trained, values.tolist(), strict=True):
            if update.client not in replies:
                bytes_up += federation.model_bytes(state.model) + tensor_bytes(update.reply)
            if finite([update]):
                total.add(update, weight)
                federation.clients.stage(update.client, state.round, update.state)
            else:
                diverged.add(update.client)
            none = update.change.new_zeros(0)
            replies[update.client] = update._replace(change=none, buffers=none, reply={}, state={})
        if not diverged:
            break
        tasks = [task for task in tasks if task.client not in diverged]
    updates = [replies[task.client] for task in tasks]
    found = total.total() if len(weights.values) else None
    collected = Collected.of(members, list(replies), weights, found, updates)
    return collected._replace(bytes_up=bytes_up), list(replies.values())


def total_of(
    federation: Federation, state: ServerState, members: Cohort, updates: Sequence[Update], weights: FloatArray
) -> Total:
    """Add up the updates of a round by the method's aggregation."""
    method, sight, kept = federation.method, federation.sight(state, members.notes), state.of("aggregation")
    changes, where = as_matrix([update.change for update in updates]), f"round {state.round}: "
    steps = [update.steps for update in updates]
    rows, shares = _combined(method.aggregation, "combine", changes, weights, sight, kept)
    mean = sent = state.model.buffers
    buffers = torch.stack([update.buffers for update in updates])
    if type(method.aggregation) is Mean and sent.numel():
        mean = weighted_sum(buffers, weights).to(sent.dtype)
    elif sent.numel():
        moved = _combined(method.aggregation, "combine_buffers", buffers - sent, weights, sight, kept)
        mean = sent + weighted_sum(*moved).to(sent.dtype)
    if len(rows) == len(changes):
        weights = shares
    else:  # all updates are merged into one
        steps = [round(float(weights @ steps))]
    change, extras = summed(method.server_update, rows, shares, steps, where)
    return Total(
        change=change,
        extras=extras,
        buffers=mean,
        integers=torch.stack([update.integers for update in updates]).amax(0),
        changes=changes,
        weights=weights,
        replies=[update.reply for update in updates],
        drift=_drift(changes, [update.norm for update in updates]),
    )


def summed(
    update: Any, changes: Tensor, weights: FloatArray, steps: Sequence[int], where: str = ""
) -> tuple[Tensor, dict[str, Any]]:
    """Add up updates as a server update reads them."""
    factors, extras = [], dict[str, Any]()
    for change, taken, weight in zip(changes, steps, weights.tolist(), strict=True):
        factor, own = shared(update, change, taken, weight, where)
        factors.append(factor)
        _add_extras(extras, own)
    return weighted_sum(changes, weights * factors), extras


def shared(update: Any, change: Tensor, steps: int, weight: float, where: str = "") -> tuple[float, Mapping[str, Any]]:
    """Return how a client's update enters the sum, as the server update says (see `ServerUpdate`)."""
    share = getattr(update, "share", None)
    if share is None:
        return 1.0, {}
    with calling("server_update", update, "share", where):
        found = share(change, steps, weight)
    return checked_share(update, found)


def _add_extras(total: dict[str, Any], extras: Mapping[str, Any]) -> None:
    for name, value in extras.items():
        if isinstance(value, Tensor) and name in total:
            total[name] += value
        else:
            total[name] = total.get(name, 0.0) + value


def as_matrix(rows: Sequence[Tensor]) -> Tensor:
    """Stack vectors of equal length into a matrix: a view if they are adjacent in memory, else a copy."""
    first = rows[0]
    memory, width = first.untyped_storage().data_ptr(), first.numel()
    for position, row in enumerate(rows):
        adjacent = row.untyped_storage().data_ptr() == memory and row.dtype == first.dtype and row.is_contiguous()
        if not adjacent or row.storage_offset() != first.storage_offset() + position * width:
            return torch.stack(list(rows))
    return first.as_strided((len(rows), width), (width, 1))


def _combined(
    aggregation: Any, function: str, changes: Tensor, weights: FloatArray, sight: Sight, kept: Named
) -> tuple[Tensor, FloatArray]:
    unlogged = {"log": lambda name, value: None} if function == "combine_buffers" else {}
    given = changes.clone() if is_own(aggregation) else changes  # one's own may write to it
    combined = sight.call("aggregation", aggregation, function, given, weights, kept=kept, **unlogged)
    return checked_aggregate(aggregation, combined, changes, f"round {sight.state.round}: ")


def _drift(updates: Tensor, norms: Sequence[Tensor]) -> float | None:
    """Return the drift diversity of updates, or of their sum in one row; None where they cancel out."""
    drift = metrics.drift_diversity(updates, torch.stack(list(norms)).tolist())
    return drift if math.isfinite(drift) else None
