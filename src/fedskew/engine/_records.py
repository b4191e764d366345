"""What happens in a round, and what is kept of it: one line of `rounds.jsonl`.

A new value of a round is a field of `RoundRecord` with a default; where it comes from the round itself,
`RoundRecord.of` computes it. It is then in the run folder, in `Result.rounds` and at the trackers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedskew import metrics
from fedskew.engine._backend import Update
from fedskew.labels import effective_sample_size, entropy, kl_to_uniform

FloatArray = NDArray[np.float64]

Row = TypeVar("Row")


class Cohort(NamedTuple):
    """The clients selected in a round.

    Attributes:
        ids: Client ids, `(cohort,)`, in order of choice.
        lost: Which of them drop out, `(cohort,)`.
        counts: Label counts of what each trains on, `(cohort, classes)`: quotas where the selection gives any.
        quotas: Whether `counts` are quotas.
    """

    ids: NDArray[np.int64]
    lost: NDArray[np.bool_]
    counts: FloatArray
    quotas: bool

    def take(self, members: NDArray[np.bool_]) -> Cohort:
        """A part of the cohort.

        Args:
            members: Mask of the clients to keep, `(cohort,)`.
        """
        return Cohort(self.ids[members], self.lost[members], self.counts[members], self.quotas)


class RoundOutcome(NamedTuple):
    """What a cohort did in a round.

    Attributes:
        replied: Clients that sent anything back.
        updates: The updates that count: of clients that replied and did not diverge.
        counts: Label counts of those clients, `(answered, classes)`.
        weights: Their weights, `(answered,)`; empty where the model stayed as it was.
        drift: Drift diversity of the updates; None where undefined.
        bytes_up: Bytes sent by clients.
        bytes_down: Bytes sent to clients.
    """

    replied: list[int]
    updates: list[Update]
    counts: FloatArray
    weights: FloatArray
    drift: float | None
    bytes_up: int
    bytes_down: int


@dataclass
class Evaluation:
    """A model on one data set. Shares are in [0, 1]; None where undefined (a class without a sample, no target).

    Attributes:
        accuracy: Share of samples that the model gets right.
        loss: Mean cross-entropy.
        balanced_accuracy: Mean of the per-class accuracies.
        macro_f1: Mean F1 over the classes.
        per_class: Accuracy by class.
        confusion: Confusion matrix; rows truth, columns prediction.
        target_accuracy: Per-class accuracy averaged with the target mix.
    """

    accuracy: float
    loss: float | None
    balanced_accuracy: float
    macro_f1: float
    per_class: list[float | None]
    confusion: list[list[int]]
    target_accuracy: float | None = None

    @property
    def worst_class(self) -> float | None:
        """The lowest per-class accuracy."""
        return min((value for value in self.per_class if value is not None and math.isfinite(value)), default=None)

    @property
    def score(self) -> float:
        """What choices are made by: accuracy on the target mix where there is one, else accuracy."""
        return self.accuracy if self.target_accuracy is None else self.target_accuracy


@dataclass
class ClientEvaluation:
    """One client's model after its local training, on the test set.

    Attributes:
        client: The client's id.
        per_class: Accuracy by class.
        confusion: Confusion matrix; rows truth, columns prediction.
        majority: Mean accuracy over the classes that the client holds many samples of.
        minority: The same over those that it holds few of.
        vacant: The same over those that it holds none of.
    """

    client: int
    per_class: list[float | None]
    confusion: list[list[int]]
    majority: float | None = None
    minority: float | None = None
    vacant: float | None = None


@dataclass
class RoundRecord:
    """One line of `rounds.jsonl`. Round 0 is the untrained model: it has an evaluation and an empty cohort.

    Attributes:
        seed: The run's seed.
        round: The round's number.
        cohort: The clients selected, in order of choice.
        answered: The cohort without the clients that dropped out or diverged.
        dropped: Clients that sent nothing back.
        diverged: Clients whose update was not finite.
        weights: Weights of `answered`, sum 1.
        steps: Local steps of `answered`.
        loss: Training loss of the round, weighted.
        entropy: Entropy of the cohort's summed labels, bits.
        kl: Their Kullback-Leibler divergence to uniform, bits.
        ess: Effective sample size of the weights.
        ess_share: The same as a share of the samples of `answered`.
        target_distance: Squared distance of the weighted label mix from the target.
        drift: Drift diversity of the updates.
        seconds: Seconds that the round took, without evaluation.
        bytes_up: Bytes sent by clients.
        bytes_down: Bytes sent to clients.
        evaluation: The model on the test set, in rounds that are evaluated.
        validation: The model on the validation set.
        clients: Each client's model after its local training.
        deployment: What happened to real sites and their replies; only in records of deployments.
    """

    seed: int
    round: int
    cohort: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    diverged: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    loss: float | None = None
    entropy: float | None = None
    kl: float | None = None
    ess: float | None = None
    ess_share: float | None = None
    target_distance: float | None = None
    drift: float | None = None
    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    evaluation: Evaluation | None = None
    validation: Evaluation | None = None
    clients: list[ClientEvaluation] | None = None
    deployment: dict[str, Any] | None = None

    @classmethod
    def of(cls, seed: int, round: int, cohort: Cohort, outcome: RoundOutcome, target: FloatArray | None) -> RoundRecord:
        """The record of a round that was played, without evaluations and time.

        Args:
            seed: The run's seed.
            round: The round's number.
            cohort: The clients selected.
            outcome: What they did.
            target: Target label mix, `(classes,)`, or None.
        """
        updates, counts, weights = outcome.updates, outcome.counts, outcome.weights
        ids, answered = cohort.ids.tolist(), [update.client for update in updates]
        pooled, samples = cohort.counts.sum(axis=0), counts.sum(axis=1)
        moved = len(weights) > 0
        loss = float(weights @ [update.loss for update in updates]) if moved else math.nan
        ess = effective_sample_size(weights, samples) if moved else None
        return cls(
            seed=seed,
            round=round,
            cohort=ids,
            answered=answered,
            dropped=_without(ids, outcome.replied),
            diverged=_without(outcome.replied, answered),
            weights=weights.tolist(),
            steps=[update.steps for update in updates],
            loss=loss if math.isfinite(loss) else None,
            entropy=float(entropy(pooled)),
            kl=float(kl_to_uniform(pooled)),
            ess=ess,
            ess_share=None if ess is None else ess / float(samples.sum()),
            target_distance=metrics.mix_distance(weights, counts, target) if moved and target is not None else None,
            drift=outcome.drift,
            bytes_up=outcome.bytes_up,
            bytes_down=outcome.bytes_down,
            clients=[update.observed for update in updates if update.observed is not None] or None,
        )

    def to_dict(self) -> dict[str, Any]:
        """The record in plain values, as it is written to `rounds.jsonl`."""
        values = dict(vars(self))
        for name in ("evaluation", "validation"):
            values[name] = None if values[name] is None else dict(vars(values[name]))
        if self.clients is not None:
            values["clients"] = [dict(vars(client)) for client in self.clients]
        if self.deployment is None:
            del values["deployment"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoundRecord:
        """The record of a line of `rounds.jsonl`, whose newer fields may be missing."""
        record = _read(cls, values)
        for name in ("evaluation", "validation"):
            part = values.get(name)
            setattr(record, name, None if part is None else _read(Evaluation, part))
        if record.clients is not None:
            record.clients = [_read(ClientEvaluation, client) for client in values["clients"]]
        return record


def _read(kind: type[Row], values: Mapping[str, Any]) -> Row:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known})


def _without(clients: Sequence[int], some: Sequence[int]) -> list[int]:
    members = frozenset(some)
    return [client for client in clients if client not in members]
