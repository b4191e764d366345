"""What a round's clients send, added up: as floats, or as integers that are exactly summed, with noise or without.

A codec says how updates travel. `Floats` is that of plain updates. With `FixedPoint` the server sees sums alone: a
client encodes (`fedskew.sums`: clipped, weighed, rounded), by its weight a,

    update    a f D                f is 1, or what the server update's `share` says
    buffers   a times the floating-point buffers
    integers  the integer buffers
    loss      a times its mean loss
    steps     its local steps
    extra.*   the extras of the server update's `share`
    weight    a, where the server does not know it
    reply.*   what a component returns beside the update, divided by the cohort's size

(with noise, the update alone: see `fedskew.privacy`), and the server divides the sums by A, the weights of those in it.
Weights come before the sum, over its members. A simulation and a federation of real sites call the same functions, so
that their sums are the same integers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedskew import sums
from fedskew.components import has, needs_label_counts
from fedskew.engine._backend import Assignment, Sent, Update, tensor_bytes
from fedskew.engine._faults import finite, stilled
from fedskew.engine._records import Cohort, FloatArray
from fedskew.engine._states import Named, ServerState
from fedskew.engine.contracts import shortage
from fedskew.engine.totals import Collected, Total, Weights, collect_each, shared, shown, total_of, weigh
from fedskew.errors import ArgumentError
from fedskew.methods import Method, masks_refused, sums_suffice
from fedskew.models import ModelState
from fedskew.privacy import Protection, UpdateNoise
from fedskew.randomness import Purpose, generator
from fedskew.sums import fixed_point
from fedskew.weighting import BySums, Facts

Federation = Any
"""That of `round`, which imports this file."""
Integers = Mapping[str, NDArray[Any]]

EXTRA, REPLY = "extra.", "reply."
MATRIX = 2**28
"""Bytes of a round's updates that are held at a time."""


class Floats:
    """Plain updates: the server gets each, and their aggregation may be any."""

    sees_each: ClassVar[bool] = True

    def check(self, method: Method, cohort: int) -> None:
        """Raise ArgumentError where the method can't do with what travels, or with cohorts of this size."""

    def start(self, clients: int) -> dict[str, Tensor]:
        """Return what the server keeps about so many clients before the first round."""
        return {}

    def declines(self, kept: Named, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the clients that take part in no further round."""
        return np.zeros(len(ids), dtype=np.bool_)

    def weigh(
        self, federation: Federation, state: ServerState, members: Cohort, updates: Sequence[Update] = ()
    ) -> Weights:
        """Weigh the clients of a sum, whose updates are given where the server has them."""
        return weigh(federation, state, members, updates)

    def collect(
        self, federation: Federation, state: ServerState, cohort: Cohort, sent: Sent, tasks: Sequence[Assignment]
    ) -> tuple[Collected, list[Update]]:
        """Have a cohort trained, and add up what it sends; return that, and every update that came: without tensors
        where they were added up as they come, as all at a time would take much memory, and nothing reads one alone."""
        can = self.sees_each and getattr(federation.backend, "train_each", None) is not None
        if can and len(tasks) * sent.model.parameters.nbytes > MATRIX and sums_suffice(federation.method):
            return collect_each(federation, self, state, cohort, sent, tasks)
        replies = federation.backend.train(state.round, tasks, sent)
        return self.add_up(federation, state, cohort, replies), replies

    def add_up(
        self, federation: Federation, state: ServerState, cohort: Cohort, replies: Sequence[Update]
    ) -> Collected:
        """Add up the updates of all or some of the cohort's clients, in any order."""
        arrived, updates = _in_order(cohort, replies)
        updates = finite(updates)
        members = cohort.only({update.client for update in updates})
        weights = self.weigh(federation, state, members, updates)
        unmoved = total = None
        if 0 < len(weights.values) < federation.method.aggregation.least:
            unmoved = shortage(federation.method.aggregation, len(updates))
        elif len(weights.values):
            total = total_of(federation, state, members, updates, weights.values)
            weights = weights._replace(values=total.weights)
        collected = Collected.of(members, arrived, weights, total, updates)
        up = federation.model_bytes(state.model) * len(replies) + sum(tensor_bytes(update.reply) for update in replies)
        states = {update.client: update.state for update in updates}
        return collected._replace(unmoved=unmoved, bytes_up=up, states=states)

    def account(self, kept: Named, cohort: Cohort, collected: Collected) -> tuple[Named, dict[str, Any] | None]:
        """Return what the server keeps after the round, and what the round cost (see `RoundRecord.privacy`)."""
        return kept, None


@dataclass(frozen=True)
class FixedPoint(Floats):
    """Updates of which the server sees the sum, as where masks hide each.

    Attributes:
        protection: How updates are clipped and noise is added to them, for differential privacy; None: they are not.
        announced: What was announced to all clients, from sums of their label counts, so that each knows its own weight
            and the server does not (see `weighting.BySums`). None: the server weighs by their counts.
    """

    sees_each: ClassVar[bool] = False

    protection: Protection | None = None
    announced: Facts | None = None

    def check(self, method: Method, cohort: int) -> None:
        """See `Floats.check`."""
        if (reason := masks_refused(method)) is not None:
            raise ArgumentError(f"updates are masked: {reason}")
        if cohort < sums.SumContext.LEAST:
            raise ArgumentError(
                f"updates are masked: a sum over {cohort} would show each client's part to the others; "
                f"let {sums.SumContext.LEAST} clients or more take part in a round"
            )

    def start(self, clients: int) -> dict[str, Tensor]:
        """Return the rounds that each client's budget was charged for, where it has one."""
        return {} if self.protection is None else {"rounds": torch.zeros(clients, dtype=torch.int64)}

    def declines(self, kept: Named, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `Floats.declines`: these have spent their privacy budget."""
        if self.protection is None:
            return super().declines(kept, ids)
        return kept["rounds"].numpy()[ids] >= self.protection.most_rounds

    def weigh(
        self, federation: Federation, state: ServerState, members: Cohort, updates: Sequence[Update] = ()
    ) -> Weights:
        """See `Floats.weigh`; where one of them is lost, the others are weighed anew."""
        if self.announced is None:
            return weigh(federation, state, members)
        weighting, limit = federation.method.weighting, federation.weight_limit or 1.0
        assert isinstance(weighting, BySums), "checked with the method"
        shares = np.array([weighting.own_weight(own, self.announced) for own in shown(federation, members)])
        return Weights(np.minimum(shares, limit), members.ids[shares > limit * (1 + 1e-9)].tolist())

    def add_up(
        self, federation: Federation, state: ServerState, cohort: Cohort, replies: Sequence[Update]
    ) -> Collected:
        """Simulate the sum; as at real sites those that replied are weighed anew where others are lost."""
        arrived, updates = _in_order(cohort, replies)
        states = {update.client: update.state for update in finite(updates)}
        updates = finite(updates) if self.protection is None else [stilled(update) for update in updates]
        members = cohort.only({update.client for update in updates})
        weights = self.weigh(federation, state, members)
        noise = None if self.protection is None else self.protection.noise
        closed, totals = self._why_closed(weights.values, len(updates), federation.weight_limit), {}
        if closed is None and len(weights.values):
            totals = add_up(
                encode_update(
                    federation.method,
                    update,
                    weight,
                    len(updates),
                    noise,
                    generator(federation.seed, Purpose.UPDATE_NOISE, state.round, update.client),
                    own_weight=self.announced is not None,
                )
                for update, weight in zip(updates, weights.values.tolist(), strict=True)
            )
        collected = self.opened(state.model, members, weights, totals, closed)
        observed = [update.observed for update in updates if totals]
        return collected._replace(replied=arrived, observed=observed, states=states)

    def opened(
        self, sent: ModelState, members: Cohort, weights: Weights, totals: Integers, unmoved: str | None = None
    ) -> Collected:
        """Decode what clients encoded and was summed."""
        number, clients, whole = len(members.ids), members.ids.tolist(), whole_weight(totals, weights.values.sum())
        up = (sum(array.nbytes for array in totals.values()) + sums.Key.SEED * (number + 1)) * number
        of_all = Collected(members, clients, weights, None, up, unmoved=unmoved, charged=clients if totals else ())
        if not totals or whole <= 0:
            return of_all._replace(weights=weights._replace(values=np.zeros(0)))
        total = decode_sums(totals, whole, number, number, sent)
        return of_all._replace(total=total, weights=weights._replace(values=weights.values / whole))

    def account(self, kept: Named, cohort: Cohort, collected: Collected) -> tuple[Named, dict[str, Any] | None]:
        """See `Floats.account`: a sum costs all that were in it."""
        if self.protection is None:
            return kept, None
        taken = kept["rounds"].clone()
        taken[list(collected.charged)] += 1
        most = int(taken.max())
        return {"rounds": taken}, {
            "epsilon": self.protection.spent(most),
            "delta": self.protection.delta,
            "round": self.protection.spent(1),
            "rounds": most,
            "declined": cohort.ids[self.declines(kept, cohort.ids)].tolist(),
        }

    def _why_closed(self, weights: FloatArray, clients: int, limit: float | None) -> str | None:
        """Say why no sum is opened over so many clients with these weights; None: it is."""
        answers = None if self.protection is None else self.protection.noise.answers
        if 0 < clients < sums.SumContext.LEAST:
            return f"a masked sum is over {sums.SumContext.LEAST} clients at least, and there are {clients}"
        if answers is not None and 0 < clients < answers:
            return f"the updates' noise is made for {answers} clients at least, and there are {clients}"
        if clients and not weights.any():
            return "the clients that replied have no weight"
        if len(weights) and limit is not None and weights.max() > limit * (1 + 1e-9):
            return (
                f"one of the {clients} clients that replied has {weights.max():.3g} of the weight, and "
                f"training.weight_limit is {limit:g}"
            )
        return None


def encode_update(
    method: Method,
    update: Update,
    weight: float,
    cohort: int,
    noise: UpdateNoise | None = None,
    rng: np.random.Generator | None = None,
    own_weight: bool = False,
) -> dict[str, NDArray[Any]]:
    """Encode what a client adds to a sum; at a real site, `sums.mask` takes it next."""
    if noise is not None:
        hidden = ["weight"] if own_weight else []
        if beside := [*update.reply, *(["buffers"] if update.buffers.numel() else []), *hidden]:
            raise ArgumentError(f"{', '.join(beside)}: would be sent without noise, beside an update with noise")
        return {"update": noise.protect(_numpy(update.change), weight, rng, cohort)}
    factor, extras = shared(method.server_update, update.change, update.steps, weight)
    loss = update.loss if math.isfinite(update.loss) else fixed_point.NUMBERS.limit
    arrays = {
        "update": fixed_point.UPDATES.encode(_numpy(update.change), weight * factor),
        "buffers": fixed_point.NUMBERS.encode(_numpy(update.buffers), weight),
        "integers": fixed_point.COUNTS.encode(_numpy(update.integers)),
        "loss": fixed_point.NUMBERS.encode([loss], weight),
        "steps": fixed_point.COUNTS.encode([update.steps]),
    }
    if own_weight:
        arrays["weight"] = fixed_point.NUMBERS.encode([weight])
    for name, value in extras.items():
        arrays[EXTRA + name] = fixed_point.NUMBERS.encode([value])
    for name, tensor in update.reply.items():
        arrays[REPLY + name] = fixed_point.UPDATES.encode(_numpy(tensor), 1 / cohort)
    return {name: array for name, array in arrays.items() if array.size}


def add_up(encoded: Iterable[Integers]) -> dict[str, NDArray[Any]]:
    """Add what clients encoded, at least one, as opened masks add it up."""
    total: dict[str, NDArray[Any]] = {}
    for arrays in encoded:
        if not total:
            total = {name: array.copy() for name, array in arrays.items()}
            continue
        for name, array in arrays.items():
            fixed_point.add_to(total[name], array)
    return total


def whole_weight(totals: Integers, known: float) -> float:
    """Return the sum of the weights in a sum: as it says, or as the server knows them."""
    return float(fixed_point.NUMBERS.decode(totals["weight"])[0]) if "weight" in totals else known


def decode_sums(totals: Integers, weight: float, cohort: int, members: int, sent: ModelState) -> Total:
    """Decode the sums of what clients encoded by `encode_update`."""
    like = sent.parameters
    integers = sent.integers  # where they are in no sum, as with noise, they stay
    if "integers" in totals:
        integers = torch.from_numpy(np.ceil(totals["integers"] / members)).to(integers.device, integers.dtype)
    buffers = fixed_point.NUMBERS.decode(totals["buffers"], weight) if "buffers" in totals else np.zeros(0)
    change = torch.from_numpy(fixed_point.UPDATES.decode(totals["update"], weight)).to(like.device)
    reply = {
        name.removeprefix(REPLY): torch.from_numpy(fixed_point.UPDATES.decode(total, 1 / cohort)).to(
            like.device, like.dtype
        )
        for name, total in totals.items()
        if name.startswith(REPLY)
    }
    return Total(
        change=change,
        extras={
            name.removeprefix(EXTRA): float(fixed_point.NUMBERS.decode(total, weight)[0])
            for name, total in totals.items()
            if name.startswith(EXTRA)
        },
        buffers=torch.from_numpy(buffers).to(sent.buffers.device, sent.buffers.dtype),
        integers=integers,
        changes=change[None].to(like.dtype),
        weights=np.ones(1),
        replies=[reply],
        loss=float(fixed_point.NUMBERS.decode(totals["loss"], weight)[0]) if "loss" in totals else None,
        steps=int(totals["steps"][0]) if "steps" in totals else None,
    )


def answers_in_sum(weighting: BySums, counts: FloatArray, question: Facts) -> FloatArray:
    """Add up what clients answer to a question about their label counts `(clients, classes)`, as masks add it up."""
    return decode_answers(fixed_point.add(encode_answer(weighting, own, question) for own in counts), question)


def stand_ins(weighting: BySums, counts: FloatArray, sizes: ArrayLike | None) -> FloatArray:
    """Return what stands for clients in sums, in the shape of their label counts: these, unless of several labels a
    sample. Then it is their `sizes` alone where no labels are read, or else their mix of labels times these, whose sum
    is their samples; of a weighting that takes each label by itself (`sums_labels`), the counts."""
    if sizes is None or has(weighting, "sums_labels"):
        return counts
    size, mix = np.asarray(sizes)[..., None], np.eye(counts.shape[-1])[0]
    if needs_label_counts("weighting", weighting):
        mix = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1e-9)
    found: FloatArray = size * mix
    return found


def summable(counts: FloatArray) -> FloatArray:
    """Round label counts with noise to what sums of them carry, so that a total is exactly the sum of its parts."""
    return fixed_point.AMOUNTS.decode(fixed_point.AMOUNTS.encode(counts))


def encode_answer(weighting: BySums, counts: FloatArray, question: Facts) -> NDArray[Any]:
    """Encode a client's answer to a question about its label counts; at a real site, `sums.mask` takes it next."""
    return _answers(question).encode(weighting.answer(counts, question))


def decode_answers(total: NDArray[Any], question: Facts) -> FloatArray:
    """Decode the sum of what clients encoded by `encode_answer`."""
    return _answers(question).decode(total)


def _answers(question: Facts) -> fixed_point.FixedPoint:
    """Return the encoding of the answers: of amounts of samples in the first question, of weights and mixes later."""
    return fixed_point.SHARES if question else fixed_point.AMOUNTS


def _in_order(cohort: Cohort, replies: Sequence[Update]) -> tuple[list[int], list[Update]]:
    """Return who replied, and their updates, in the order of the cohort."""
    by_client = {update.client: update for update in replies}
    arrived = [client for client in cohort.ids.tolist() if client in by_client]
    return arrived, [by_client[client] for client in arrived]


def _numpy(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().numpy()
