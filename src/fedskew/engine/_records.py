"""The outcome of a round, and its record: one line of `rounds.jsonl`.

To record a new value, add a field with a default to `RoundRecord`, and compute it in `Collected.record` if it comes
from the round itself. It then appears in the run folder, in `Result.rounds` and at the trackers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple, Protocol, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn import functional

from fedskew import metrics
from fedskew.data import Inputs
from fedskew.engine.contracts import checked_figure
from fedskew.errors import RunError, in_one_line
from fedskew.models import ModelState

FloatArray = NDArray[np.float64]


@dataclass
class Notes:
    """What is noted of a round while it is played.

    Attributes:
        logged: Figures that components logged at the server, by name; the last of each.
        bytes_up: Bytes that clients sent before the round, when they were asked for something.
        bytes_down: Bytes that were sent to them then.
    """

    logged: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0

    def log(self, name: str, value: Any) -> None:
        """Note a figure."""
        self.logged[name] = float(checked_figure(name, value))


class Cohort(NamedTuple):
    """The clients selected in a round.

    Attributes:
        ids: Client ids, `(cohort,)`, in the order of selection.
        lost: Mask of the clients that drop out, `(cohort,)`.
        counts: Label counts of the samples that each client trains on, `(cohort, classes)`; the quotas if the selection
            assigns quotas.
        quotas: Whether `counts` are quotas.
        notes: What is noted of the round.
        samples: Samples of each, `(cohort,)`, where a sample may have several labels, or none; None: as the counts sum.
    """

    ids: NDArray[np.int64]
    lost: NDArray[np.bool_]
    counts: FloatArray
    quotas: bool
    notes: Notes
    samples: FloatArray | None = None

    @property
    def sizes(self) -> FloatArray:
        """Samples that each client trains on, `(cohort,)`."""
        return self.counts.sum(axis=1) if self.samples is None else self.samples

    def only(self, clients: Collection[int]) -> Cohort:
        """Return the sub-cohort of some clients."""
        known = frozenset(clients)
        members = np.array([client in known for client in self.ids.tolist()], dtype=np.bool_)
        samples = None if self.samples is None else self.samples[members]
        return Cohort(self.ids[members], self.lost[members], self.counts[members], self.quotas, self.notes, samples)


@dataclass
class Evaluation:
    """Metrics of a model on one data set.

    Accuracies are shares in [0, 1]. A metric that is undefined is None.

    Attributes:
        loss: Mean cross-entropy; None if it is not finite.
        per_class: Accuracy on each class; None for a class without a sample.
        confusion: Confusion matrix: a row for each true class, a column for each predicted class.
        target_accuracy: Per-class accuracy averaged with the target mix; None without a target.
        auroc: Area under the ROC curve, one class against the others, mean over classes; this and what follows is None
            where only a confusion matrix is known, as at real sites that tell no scores.
        pr_auc: Average precision, likewise.
        ece: Expected calibration error.
        per_class_auroc: AUROC of each class; None for a class without a sample.
        per_class_pr_auc: Average precision of each class, likewise.
        reliability: Samples, how many of them are right, and the sum of their confidences, in 15 bins of confidence.

    Where a sample may have several labels (`of_labels`), `loss` and all means are over the labels, accuracy is of
    samples whose labels are all right, `per_class` is sensitivity at one half, and there is no confusion matrix.
    """

    accuracy: float
    loss: float | None
    balanced_accuracy: float | None
    macro_f1: float | None
    per_class: list[float | None]
    confusion: list[list[int]]
    target_accuracy: float | None = None
    auroc: float | None = None
    pr_auc: float | None = None
    ece: float | None = None
    per_class_auroc: list[float | None] | None = None
    per_class_pr_auc: list[float | None] | None = None
    reliability: list[list[float]] | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """Read an evaluation from plain values."""
        return _readers()[0].validate_python(values)

    @property
    def worst_class(self) -> float | None:
        """The lowest per-class accuracy; None if no class has a sample."""
        return min((value for value in self.per_class if value is not None and math.isfinite(value)), default=None)

    @property
    def score(self) -> float:
        """Accuracy on the target mix if there is one, else accuracy; of several labels AUROC, else what is known."""
        if self.of_labels:
            return max(self.judged("auto"), 0.0)
        return self.accuracy if self.target_accuracy is None else self.target_accuracy

    @property
    def of_labels(self) -> bool:
        """Whether a sample may have several labels, or none."""
        return self.per_class_auroc is not None and not self.confusion

    @property
    def majority(self) -> float:
        """The share of the most frequent class: the accuracy of always naming it."""
        samples = [sum(row) for row in self.confusion]
        return float(max(samples, default=0) / max(sum(samples), 1))

    @property
    def uneven(self) -> bool:
        """Whether one class has more than 60 % of the samples, or than one and a half times an even share."""
        present = sum(any(row) for row in self.confusion)
        return present > 1 and self.majority > min(DOMINANT, UNEVEN / present)

    def measure(self, wanted: str) -> str:
        """Return the figure that a value of `evaluation.measure` means here.

        "auto" is the accuracy on the target mix if there is one; else balanced accuracy where the classes are `uneven`,
        and accuracy where they are not; where a sample may have several labels, AUROC, or if only counts at one half
        are known, as at real sites, balanced accuracy.
        """
        if wanted != "auto" or self.of_labels:
            known = "balanced_accuracy" if self.auroc is None and self.loss is not None else "auroc"
            return known if wanted == "auto" else wanted
        own = "balanced_accuracy" if self.uneven else "accuracy"
        return own if self.target_accuracy is None else "target_accuracy"

    def judged(self, wanted: str) -> float:
        """Return a number by which models are compared, the higher the better; -1 where the figure is undefined."""
        value = getattr(self, name := self.measure(wanted))
        return -1.0 if value is None or not math.isfinite(value) else 1 - value if name == "ece" else float(value)

    @staticmethod
    def of_findings(logits: NDArray[Any], targets: NDArray[np.int64]) -> Evaluation:
        """Compute the metrics where a sample may have several labels (see `metrics.finding_figures`)."""
        return Evaluation._of_labels(metrics.finding_figures(logits, targets))

    @staticmethod
    def of_tally(
        tally: metrics.Tally, counts: NDArray[np.int64], loss: float, target: NDArray[np.float64] | None = None
    ) -> Evaluation:
        """Compute the metrics of what was counted of samples at real sites, `(tally.size,)`."""
        if not tally.several:
            more = {name: _plain(value) for name, value in tally.of_scores(counts).items()}
            return replace(Evaluation.of(tally.table(counts), loss, target), **more)
        return Evaluation._of_labels(tally.figures(counts) | {"loss": loss if math.isfinite(loss) else math.nan})

    @staticmethod
    def _of_labels(found: dict[str, Any]) -> Evaluation:
        plain_lists = {"per_class": plain(found.pop("recalls")), "per_class_auroc": plain(found.pop("aurocs"))}
        plain_lists["per_class_pr_auc"] = plain(found.pop("pr_aucs"))
        numbers = {name: _defined(value) for name, value in found.items()}
        return Evaluation(**numbers, **plain_lists, confusion=[])  # type: ignore[arg-type]

    @staticmethod
    def of(
        confusion: NDArray[np.int64],
        loss: float,
        target: NDArray[np.float64] | None,
        scores: metrics.Scores | None = None,
    ) -> Evaluation:
        """Compute the metrics; `target` is the target's label mix, `(classes,)`, if there is one."""
        more = {} if scores is None else scores.of_scores()
        return Evaluation(
            accuracy=float(np.trace(confusion) / max(confusion.sum(), 1)),
            loss=loss if math.isfinite(loss) else None,
            balanced_accuracy=metrics.balanced_accuracy(confusion),
            macro_f1=metrics.macro_f1(confusion),
            per_class=plain(metrics.per_class_accuracy(confusion)),
            confusion=confusion.tolist(),
            target_accuracy=None if target is None else _defined(metrics.target_accuracy(confusion, target)),
            **{name: _plain(value) for name, value in more.items()},
        )


@dataclass
class ClientEvaluation:
    """Metrics of one client's model on the test set, right after its local training.

    `majority`, `minority` and `vacant` are mean accuracies over the groups of `fedskew.metrics.class_groups`; None for
    an empty group. The confusion matrix has a row for each true class.
    """

    client: int
    per_class: list[float | None]
    confusion: list[list[int]]
    majority: float | None = None
    minority: float | None = None
    vacant: float | None = None


DOMINANT, UNEVEN = 0.6, 1.5
"""The share of one class, and the multiple of an even share, beyond which models are compared by balanced accuracy."""
_SPARSE = {"sparse": True}
"""Marks a field that is written only in the records of rounds in which there is something to say."""
_NUMBER = (int, float, int | None, float | None)
"""The types of fields that hold one number."""


@dataclass
class RoundRecord:
    """The record of a round: one line of `rounds.jsonl`.

    Round 0 stands for the untrained model; its record has an evaluation and an empty cohort.

    Attributes:
        cohort: The selected clients, in the order of selection.
        answered: The cohort without the clients that dropped out or diverged.
        dropped: Clients that sent nothing back.
        diverged: Clients whose update was not finite.
        weights: Weights of `answered`, sum 1: those that the aggregation gives them, where it keeps updates apart.
        steps: Local steps of `answered`; empty where updates are masked.
        loss: Training loss of the round: mean over those of `answered` that took a step (of all, where updates are
            masked), with their weights.
        entropy: Entropy of the cohort's pooled labels, in bits.
        kl: Kullback-Leibler divergence of the cohort's pooled labels from uniform, in bits.
        ess: Effective sample size of the weights.
        ess_share: `ess` as a share of the samples of `answered`.
        target_distance: Squared distance of the weighted label mix from the target mix.
        drift: Drift diversity of the updates; None where they are masked.
        seconds: Seconds that the round took, without evaluation.
        bytes_up: Bytes sent by clients.
        bytes_down: Bytes sent to clients.
        evaluation: Metrics of the model on the test set; None in rounds without evaluation.
        validation: Metrics of the model on the validation set; None in rounds without validation.
        clients: Metrics of each client's model after its local training; None if clients are not evaluated.
        limited: Clients whose weight `training.weight_limit` lowered; only in records of rounds in which it did.
        unmoved: Why the aggregation left the model as it was; only in records of such rounds.
        fallback: Why the weights were FedAvg's in place of the method's; only in records of such rounds.
        target: The target's label mix, as estimated after the round (see `Estimation.update`): `mix`, its standard
            errors `se`, the test's `p` and `excess`, whether it was a `misfit`, classes `unseen` in the `held_out`
            samples, the target's `samples`, how many `sites` were tested against the others and which are odd, by their
            p-value, and why the mix is `unused`; or why the estimate was `skipped`. Only in records of such rounds.
        deployment: Events at real sites and the checks of their replies; only in records of deployments.
        steps_summed: Local steps of `answered` together, in place of `steps`, where updates are masked.
        privacy: Only with differential privacy: the largest `epsilon` of any client so far, its `delta`, the epsilon
            that the `round` alone costs, the most `rounds` that a client has taken part in, and who `declined`, as its
            budget is spent.
        sites: Figures at the clients, on their own test samples, summarised over the clients (see
            `metrics.SiteRow.over_clients`); only in records of rounds with `evaluation.sites`.
        logged: Figures that the method's components logged, by name: at the server, or at the clients the mean over
            those of `answered`; None for what is not finite. Only in records of rounds with such figures.
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
    limited: list[int] | None = field(default=None, metadata=_SPARSE)
    unmoved: str | None = field(default=None, metadata=_SPARSE)
    fallback: str | None = field(default=None, metadata=_SPARSE)
    target: dict[str, Any] | None = field(default=None, metadata=_SPARSE)
    deployment: dict[str, Any] | None = field(default=None, metadata=_SPARSE)
    steps_summed: int | None = field(default=None, metadata=_SPARSE)
    privacy: dict[str, Any] | None = field(default=None, metadata=_SPARSE)
    sites: dict[str, Any] | None = field(default=None, metadata=_SPARSE)
    logged: dict[str, float | None] | None = field(default=None, metadata=_SPARSE)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, as it is written to `rounds.jsonl`."""
        values = dict(vars(self))
        for name in ("evaluation", "validation"):
            values[name] = None if values[name] is None else dict(vars(values[name]))
        if self.clients is not None:
            values["clients"] = [dict(vars(client)) for client in self.clients]
        absent = {field.name for field in fields(self) if field.metadata == _SPARSE and values[field.name] is None}
        return {name: value for name, value in values.items() if name not in absent}

    def numbers(self) -> dict[str, float | None]:
        """Return the fields that hold one number each, by name; None where such a number is undefined."""
        return {name: getattr(self, name) for name, kind in get_type_hints(RoundRecord).items() if kind in _NUMBER}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoundRecord:
        """Read the record from a line of `rounds.jsonl`; fields that an older fedskew did not write get defaults."""
        return _readers()[1].validate_python(values)


class RoundRunner(Protocol):
    """Plays rounds one after another.

    Its states have the attributes `round`, the number of the last round, and `model`, the model in training.
    """

    def open(self) -> None:
        """Open the backend (see `Backend.open`)."""

    def close(self) -> None:
        """Close the backend (see `Backend.close`)."""

    def start(self, model: ModelState) -> Any:
        """Make the state before the first round, with round 0, for the untrained model."""

    def run_round(self, state: Any) -> tuple[Any, RoundRecord]:
        """Play one round from a state; return the next one, and the round's record without evaluations."""

    def evaluated_model(self, state: Any) -> ModelState | None:
        """Build the model to evaluate and to save; None while the clients share none."""


BATCH = 1000


class Predictions(NamedTuple):
    """A model's confusion matrix, mean cross-entropy (of a part, the sum) and logits, `(samples, classes)`."""

    confusion: NDArray[np.int64]
    loss: float
    logits: NDArray[Any]


def predict(network: nn.Module, inputs: Inputs, targets: Tensor, num_classes: int) -> Predictions:
    """Predict a data set."""
    return predicted(predict_batch(network, *batch, num_classes) for batch in batches(inputs, targets))


def batches(inputs: Inputs, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a data set in parts of `BATCH` samples, without samples as one of none."""
    for start in range(0, max(len(targets), 1), BATCH):
        y = targets[start : start + BATCH]
        if isinstance(inputs, Tensor):  # a view
            yield inputs[start : start + len(y)], y
        else:
            yield inputs.index_select(0, torch.arange(start, start + len(y), device=inputs.device)), y


def outputs(network: nn.Module, x: Tensor) -> Tensor:
    """Compute what a network says of some samples; RunError where it fails, as one of a user's own may."""
    try:
        computed: Tensor = network.eval()(x)
    except Exception as error:
        where = f"the network fails in evaluation, on samples of shape {tuple(x.shape)}"
        raise RunError(f"{where}: {in_one_line(error)}") from error
    return computed


@torch.inference_mode()
def predict_batch(network: nn.Module, x: Tensor, y: Tensor, num_classes: int) -> Predictions:
    """Predict a part of a data set."""
    logits = outputs(network, x)
    confusion = torch.bincount(y * num_classes + logits.argmax(1), minlength=num_classes * num_classes)
    loss = float(functional.cross_entropy(logits, y, reduction="sum"))
    return Predictions(confusion.reshape(num_classes, num_classes).cpu().numpy(), loss, logits.float().cpu().numpy())


def predicted(parts: Iterable[Predictions]) -> Predictions:
    """Put the parts of a data set together, in their order, on which the last digits of the loss depend."""
    tables, losses, logits = zip(*parts, strict=True)
    confusion: NDArray[np.int64] = sum(tables[1:], start=tables[0])
    return Predictions(confusion, sum(losses) / max(int(confusion.sum()), 1), np.concatenate(logits))


def plain(values: NDArray[np.float64]) -> list[float | None]:
    """Convert an array to a list of floats, with None in place of NaN, which JSON does not have."""
    return [_defined(float(value)) for value in values]


def _plain(value: Any) -> Any:
    """Convert a figure likewise: a number, an array or a list."""
    return plain(value) if isinstance(value, np.ndarray) else _defined(value) if isinstance(value, float) else value


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


@cache
def _readers() -> tuple[TypeAdapter[Evaluation], TypeAdapter[RoundRecord]]:
    return TypeAdapter(Evaluation), TypeAdapter(RoundRecord)
