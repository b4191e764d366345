"""Checks of replies: what differs from the agreement is refused, so that no reply can crash the server.

They are pure, and raise only RefusedError, whatever a site sends. What can't be true is refused; what is not plausible
(`_plausible`) is out of line, and reported or left out as agreed. Neither is a defence against sites that send
plausible but wrong updates.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedskew.deploy import _wire as wire
from fedskew.deploy._arrays import COUNTER, VARIANCE, NotFiniteError, RefusedError, Specs, bytes_of, decode, short
from fedskew.metrics import Tally
from fedskew.report import SeedRun

MOST = 10**12
"""Upper limit of a network's integer counters."""

MOST_SAMPLES = 10**9
"""Upper limit of a site's number of samples of a class, and of all classes together."""

MOST_COUNT_BYTES = 2**24
"""Largest size of a reply with label counts, in bytes."""

ROUNDING = 1e-3
"""How far a loss may be below its least, by rounding."""

AnyRecord = TypeVar("AnyRecord", ArrayRecord, MetricRecord)


LARGEST_SHARE = 0.5
"""Largest share of all test samples that one of three or more sites may have in the evaluation of all."""

MOST_TESTED = 10.0
"""Most test samples that a site may have, as a multiple of the training samples that it reported."""

ANOTHER_MIX = 0.5
"""Total variation distance beyond which a site's test samples have another label mix than it reported for training."""

FEW_TESTED = 30
"""Fewer test samples than these say too little of a label mix."""

NAMED = 10
"""Most classes whose shares are logged."""


def bytes_needed(*arrays: Specs) -> int:
    """Compute an upper limit of the size of a reply with these arrays, in bytes."""
    return 2**20 + sum(map(bytes_of, arrays))


def size_of(content: RecordDict) -> int:
    """Compute the size of a message's records, in bytes."""
    total = 0
    for name, value in (item for record in content.values() for item in record.items()):
        total += len(name)
        if isinstance(value, Array):
            total += len(value.data) if isinstance(value.data, bytes) else 0
        elif isinstance(value, str | bytes):
            total += len(value)
        elif isinstance(value, list):
            total += sum(len(entry) if isinstance(entry, str | bytes) else 8 for entry in value)
        else:
            total += 8
    return total


def check_size(content: RecordDict, max_bytes: int) -> None:
    """Raise RefusedError for a reply of more than `max_bytes` bytes."""
    if (size := size_of(content)) > max_bytes:
        raise RefusedError(f"the reply has {size} bytes; expected {max_bytes} at most")


def check_arrays(
    record: ArrayRecord, expected: Specs, counters: Mapping[str, torch.Tensor], most_counted: int
) -> dict[str, NDArray[np.generic]]:
    """Validate a model's arrays: values are finite, variances not negative, counters as far on as they can be, and
    other integers, such as position ids, what was sent, as nothing of ours trains them."""
    arrays = decode(record, expected, "its array")
    for name, array in arrays.items():
        if not array.size or expected[name].is_float:
            if name.endswith(VARIANCE) and array.size and array.min() < 0:
                raise RefusedError(f"its array {name!r} has a variance below 0")
            continue
        if not 0 <= int(array.min()) <= int(array.max()) <= MOST:
            raise RefusedError(f"its array {name!r} has a counter below 0 or above {MOST}")
        if name in counters:
            change = array.reshape(-1).astype(np.int64) - counters[name].numpy()
            if not name.endswith(COUNTER) and change.any():
                raise RefusedError(
                    f"its array {name!r} is not what was sent; of integers only batch norm's {COUNTER} may change"
                )
            risen = int(change.max())
            if risen > most_counted:
                raise RefusedError(
                    f"its array {name!r} has a counter {risen} above what was sent; {most_counted} at most"
                )
    return arrays


def check_counts(content: RecordDict, classes: int, whole: bool, several: bool = False) -> NDArray[np.float64]:
    """Validate label counts, `(classes,)`, of `several` labels with the number of samples; `whole`: no fractions."""
    check_size(content, MOST_COUNT_BYTES)
    values = only(MetricRecord, content).get(wire.COUNTS)
    if not isinstance(values, list) or len(values) != classes + several:
        expected = f"{classes} numbers, one per class" + (", and that of samples" if several else "")
        raise RefusedError(f"its label counts are {short(values)}; expected {expected}")
    for value in values:
        if not 0 <= value <= MOST_SAMPLES:
            raise RefusedError(f"one of its label counts is {short(value)}; expected a number from 0 to {MOST_SAMPLES}")
        if whole and value != int(value):
            raise RefusedError(f"one of its label counts is {short(value)}; expected a whole number")
    if several and whole and max(values) > values[-1]:
        raise RefusedError(f"it has {short(max(values))} samples with one label, and {short(values[-1])} in all")
    if not several and sum(values) > MOST_SAMPLES:
        raise RefusedError(f"its label counts are {short(sum(values))} samples in all; expected {MOST_SAMPLES} at most")
    return np.array(values, dtype=np.float64)


def check_only_samples(content: RecordDict) -> int:
    """Validate the number of samples of a site that reports no label counts; RefusedError where it can't be one."""
    check_size(content, MOST_COUNT_BYTES)
    samples = only(MetricRecord, content).get(wire.SAMPLES)
    if not isinstance(samples, int | float) or not 0 <= samples <= MOST_SAMPLES or samples != int(samples):
        raise RefusedError(
            f"its number of samples is {short(samples)}; expected a whole number from 0 to {MOST_SAMPLES}"
        )
    return int(samples)


def figures_of(content: RecordDict, **echoed: object) -> MetricRecord:
    """Return a reply's figures, which repeat these of the message; RefusedError where they do not."""
    metrics = content.get(wire.METRICS)
    if not isinstance(metrics, MetricRecord):
        raise RefusedError(f"the reply has no {wire.METRICS}")
    for name, value in echoed.items():
        if metrics.get(key := wire.key_of(name)) != value:
            raise RefusedError(f"the reply is of {key} {short(metrics.get(key))}, not {value}")
    return metrics


def only(kind: type[AnyRecord], content: RecordDict) -> AnyRecord:
    """Return a reply's only record of a kind, whatever its key; RefusedError where there is none, or another."""
    records = [record for record in content.values() if isinstance(record, kind)]
    if len(records) != 1:
        raise RefusedError(f"the reply has {len(records)} {kind.__name__}s; expected one")
    return records[0]


def check_finite(value: object, what: str) -> float:
    """Return a finite number; RefusedError for anything else."""
    if not isinstance(value, int | float) or not -sys.float_info.max <= value <= sys.float_info.max:
        kind = NotFiniteError if isinstance(value, float) else RefusedError
        raise kind(f"its {what} is {short(value)}; expected a finite number")
    return float(value)


def check_loss(value: object, what: str, least: float) -> float:
    """Return a loss that is finite and not below the least that it can be; RefusedError for anything else."""
    loss = check_finite(value, what)
    if loss < least - ROUNDING:
        raise RefusedError(f"its {what} is {short(loss)}; expected a number from {least:g}")
    return loss


def check_amounts(values: object, shape: tuple[int, ...], what: str) -> NDArray[np.int64]:
    """Return numbers of samples as an array; RefusedError for anything else."""
    if (
        not isinstance(values, list)
        or len(values) != math.prod(shape)
        or not all(isinstance(value, int) and 0 <= value <= MOST_SAMPLES for value in values)
    ):
        raise RefusedError(f"its {what} is {short(values)}; expected {' x '.join(map(str, shape))} whole numbers")
    return np.array(values, dtype=np.int64).reshape(shape)


def arrays_of(content: RecordDict, key: str) -> ArrayRecord:
    """Return a message's arrays; RefusedError where there are none."""
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise RefusedError(f"the message's {key!r} is no ArrayRecord")
    return record


class SiteEvaluation(NamedTuple):
    """A model's evaluation on one site's own test samples: what was counted, `(tally.size,)`, and mean loss, infinite
    if it is not finite; `outcomes` has the columns of the confusion matrix divided into cells, `(classes, classes *
    bins)`, where asked for."""

    tally: Tally
    counts: NDArray[np.int64]
    loss: float
    outcomes: NDArray[np.int64] | None = None

    @property
    def samples(self) -> int:
        """Number of test samples."""
        return self.tally.samples(self.counts)

    def to_dict(self) -> dict[str, Any]:
        """Return accuracy, loss and samples as plain values, None for what is undefined."""
        return {
            "accuracy": self.tally.right(self.counts) / self.samples if self.samples else None,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "samples": self.samples,
        }


class Together(NamedTuple):
    """The evaluation on the samples of several sites, and whose samples counted less, by which factor (`reduced`)."""

    tally: Tally
    counts: NDArray[np.int64]
    loss: float
    reduced: tuple[int, float] | None


def check_outcomes(content: RecordDict, tally: Tally, bins: int, round: int) -> SiteEvaluation:
    """Validate an evaluation with test samples by true class and outcome cell, of which a predicted class has `bins`;
    it is a confusion matrix where there are none, outputs are not finite, or `bins` is 0. RefusedError where a number
    can't be, or is of another round."""
    classes = tally.classes
    metrics = _evaluation(content, classes, bins, round)
    loss = metrics.get(wire.EVALUATION_LOSS)
    mean = math.inf if isinstance(loss, float) and not math.isfinite(loss) else check_loss(loss, "loss", 0.0)
    if not bins or wire.OUTCOMES not in metrics:
        counts = check_amounts(metrics.get(wire.CONFUSION), (tally.size,), "confusion matrix")
        if (reason := tally.refuse(counts)) is not None:
            raise RefusedError(f"its confusion matrix can't be: {reason}")
        return SiteEvaluation(tally, counts, mean)
    outcomes = check_amounts(metrics.get(wire.OUTCOMES), (classes, classes * bins), "table of outcomes")
    counts = outcomes.reshape(classes, classes, bins).sum(axis=-1).reshape(-1)
    return SiteEvaluation(tally, counts, mean, outcomes)


def check_cells(content: RecordDict, classes: int, bins: int, round: int) -> NDArray[np.int64]:
    """Validate what the target site counted of its samples without labels: `(classes * bins,)`, by outcome cell."""
    metrics = _evaluation(content, classes, bins, round)
    return check_amounts(metrics.get(wire.CELLS), (classes * bins,), "count of its samples by outcome")


def _evaluation(content: RecordDict, classes: int, bins: int, round: int) -> MetricRecord:
    check_size(content, 2**20 + 16 * classes * (classes + 1) * max(bins, 1))
    return figures_of(content, round=round)


def limit(sizes: Mapping[int, float]) -> tuple[int, float]:
    """Return the site with the most samples, and how often these count: of three or more sites none has over half."""
    largest = max(sizes, key=lambda client: sizes[client])
    others = sum(sizes.values()) - sizes[largest]
    share = LARGEST_SHARE / (1 - LARGEST_SHARE)
    return largest, min(1.0, share * others / sizes[largest]) if len(sizes) >= 3 else 1.0


def together(evaluations: Mapping[int, SiteEvaluation]) -> Together | None:
    """Sum the sites' confusion matrices; None without a sample.

    Of three or more sites none counts for more than half of the samples: the matrix of one that would is multiplied by
    the number of the others' samples over its own, and rounded.
    """
    sizes = {client: one.samples for client, one in evaluations.items() if one.samples}
    if not sizes:
        return None
    largest, factor = limit(sizes)
    tally, counts = evaluations[largest].tally, {client: evaluations[client].counts for client in sizes}
    if factor < 1:
        counts[largest] = np.rint(counts[largest] * factor).astype(np.int64)
    weights = {client: tally.samples(own) for client, own in counts.items()}
    total = max(sum(weights.values()), 1)  # shares, as a finite loss times a number of samples may be infinite
    loss = sum(evaluations[client].loss * (weight / total) for client, weight in weights.items() if weight)
    return Together(tally, np.sum([*counts.values()], axis=0), loss, (largest, factor) if factor < 1 else None)


def check_plausible(evaluation: SiteEvaluation, training_samples: float) -> None:
    """Raise RefusedError where a site claims more test samples than its training samples make plausible."""
    most = MOST_TESTED * training_samples
    if evaluation.samples > most:
        raise RefusedError(
            f"its confusion matrix is of {evaluation.samples} test samples; at most {most:.0f} are plausible, "
            f"{MOST_TESTED:.0f} times the training samples that it reported"
        )


def mix_distance(evaluation: SiteEvaluation, counts: NDArray[np.float64]) -> float | None:
    """Compare the labels of a site's test samples with the label counts that it reported for training.

    A site whose samples are split at random has nearly the same mix in both. One whose reported counts are made up must
    make up its confusion matrix, too. An honest site may have been given a test set of another mix, so that a
    difference is a reason to ask, and not to refuse. Returns the total variation distance, if it is large and there
    are enough samples to tell; else None.
    """
    tested = evaluation.tally.table(evaluation.counts).sum(axis=1)
    if min(tested.sum(), counts.sum()) < FEW_TESTED:
        return None
    distance = float(np.abs(tested / tested.sum() - counts / counts.sum()).sum() / 2)
    return distance if distance > ANOTHER_MIX else None


def tables_of(
    evaluations: Mapping[int, SiteEvaluation], reduced: tuple[int, float] | None
) -> dict[int, NDArray[np.int64]]:
    """Return the tables that an estimate is made from: those of sites that sent one with a sample in it."""
    tables = {client: one.outcomes for client, one in evaluations.items() if one.outcomes is not None and one.samples}
    if reduced is not None and reduced[0] in tables:
        client, factor = reduced
        tables[client] = np.rint(tables[client] * factor).astype(np.int64)
    return tables


def target_line(run: SeedRun) -> str | None:
    """Say what came of the last estimate of the target's mix in a run; None where there was none yet."""
    known = [(record.round, record.target) for record in run.rounds if record.target is not None]
    if not known:
        return None
    round, target = next((one for one in reversed(known) if one[1]["mix"] is not None), known[-1])
    said = f"round {round}: {in_words(target, run.class_names, 'the target site')}"
    last_round, last = known[-1]
    return said if last_round == round else f"{said}; not estimated in round {last_round}: {last['skipped']}"


def in_words(record: Mapping[str, Any], classes: tuple[str, ...], site: str) -> str:
    """Describe the estimate of a round in one line."""
    unused = f"; not used: {record['unused']}" if record["unused"] else ""
    if record["mix"] is None:
        return f"the target's label mix is not estimated: {record['skipped']}{unused}"
    shares = sorted(zip(record["mix"], record["se"], classes, strict=True), key=lambda share: -share[0])
    said = ", ".join(f"{name} {100 * mix:.1f} ± {100 * error:.1f} %" for mix, error, name in shares[:NAMED])
    more = f" and {len(shares) - NAMED} more classes" if len(shares) > NAMED else ""
    p = "" if record["p"] is None else f" (p = {record['p']:.2g})"
    return (
        f"the target's label mix, by {record['samples']} samples of {site} and {record['held_out']} test samples: "
        f"{said}{more}{p}{unused}"
    )
