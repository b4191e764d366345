"""The sites' evaluations of a model, and what they say together: one site must not decide it alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray

from fedskew.deploy import _wire as wire
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._arrays import RefusedError
from fedskew.deploy._replies import check_amounts, check_loss, check_size, figures_of
from fedskew.experiment import Config
from fedskew.report import SeedRun

LARGEST_SHARE = 0.5
"""Largest share of all test samples that one of three or more sites may have in the evaluation of all."""

MOST_TESTED = 10.0
"""Most test samples that a site may have, as a multiple of the training samples that it reported."""

ANOTHER_MIX = 0.5
"""Total variation distance beyond which a site's test samples have another label mix than it reported for training."""

FEW_TESTED = 30
"""Fewer test samples than these say too little of a label mix."""


class SiteEvaluation(NamedTuple):
    """A model's evaluation on one site's own test samples: confusion matrix (rows are true classes), and mean loss,
    infinite if it is not finite; `outcomes` has the columns divided into cells, `(classes, classes * bins)`, where
    asked for."""

    confusion: NDArray[np.int64]
    loss: float
    outcomes: NDArray[np.int64] | None = None

    @property
    def samples(self) -> int:
        """Number of test samples."""
        return int(self.confusion.sum())

    def to_dict(self) -> dict[str, Any]:
        """Return accuracy, loss and samples as plain values, None for what is undefined."""
        right = int(np.trace(self.confusion))
        return {
            "accuracy": right / self.samples if self.samples else None,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "samples": self.samples,
        }


class Together(NamedTuple):
    """The evaluation on the test samples of several sites; the mean loss is infinite if that of a site is.

    `reduced` is the site whose samples counted less than it said, and the factor; None if all counted fully.
    """

    confusion: NDArray[np.int64]
    loss: float
    reduced: tuple[int, float] | None


def check_outcomes(content: RecordDict, classes: int, bins: int, round: int) -> SiteEvaluation:
    """Validate an evaluation with test samples by true class and outcome cell, of which a predicted class has `bins`.

    A site that has no test samples, or for which the model's outputs are not finite, sends a confusion matrix; so do
    all of whom no outcomes were asked (`bins` 0). RefusedError where a number can't be, or is of another round.
    """
    metrics = _evaluation(content, classes, bins, round)
    loss = metrics.get(wire.EVALUATION_LOSS)
    mean = math.inf if isinstance(loss, float) and not math.isfinite(loss) else check_loss(loss, "loss", 0.0)
    if not bins or wire.OUTCOMES not in metrics:
        return SiteEvaluation(check_amounts(metrics.get(wire.CONFUSION), (classes, classes), "confusion matrix"), mean)
    outcomes = check_amounts(metrics.get(wire.OUTCOMES), (classes, classes * bins), "table of outcomes")
    return SiteEvaluation(outcomes.reshape(classes, classes, bins).sum(axis=-1), mean, outcomes)


def check_cells(content: RecordDict, classes: int, bins: int, round: int) -> NDArray[np.int64]:
    """Validate what the target site counted of its samples without labels: `(classes * bins,)`, by outcome cell.

    Raises RefusedError where the numbers are missing, negative or too many, or are of another round.
    """
    metrics = _evaluation(content, classes, bins, round)
    return check_amounts(metrics.get(wire.CELLS), (classes * bins,), "count of its samples by outcome")


def _evaluation(content: RecordDict, classes: int, bins: int, round: int) -> MetricRecord:
    check_size(content, 2**20 + 16 * classes * (classes + 1) * max(bins, 1))
    return figures_of(content, round=round)


def limit(sizes: Mapping[int, float]) -> tuple[int, float]:
    """Return the site with the most samples, and how often these count: of three or more sites none has over half.

    `sizes` are numbers of samples above 0, by client index; one at least.
    """
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
    confusions = {client: evaluations[client].confusion for client in sizes}
    if factor < 1:
        confusions[largest] = np.rint(confusions[largest] * factor).astype(np.int64)
    weights = {client: int(confusion.sum()) for client, confusion in confusions.items()}
    total = max(sum(weights.values()), 1)  # shares, as a finite loss times a number of samples may be infinite
    loss = sum(evaluations[client].loss * (weight / total) for client, weight in weights.items() if weight)
    return Together(np.sum([*confusions.values()], axis=0), loss, (largest, factor) if factor < 1 else None)


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
    tested = evaluation.confusion.sum(axis=1)
    if min(tested.sum(), counts.sum()) < FEW_TESTED:
        return None
    distance = float(np.abs(tested / tested.sum() - counts / counts.sum()).sum() / 2)
    return distance if distance > ANOTHER_MIX else None


IntArray = NDArray[np.int64]
NAMED = 10
"""Most classes whose shares are logged."""


def tables_of(evaluations: Mapping[int, SiteEvaluation], reduced: tuple[int, float] | None) -> dict[int, IntArray]:
    """Return the tables that an estimate is made from: those of sites that sent one with a sample in it."""
    tables = {client: one.outcomes for client, one in evaluations.items() if one.outcomes is not None and one.samples}
    if reduced is not None and reduced[0] in tables:
        client, factor = reduced
        tables[client] = np.rint(tables[client] * factor).astype(np.int64)
    return tables


def target_site_in_words(config: Config, agreement: Agreement) -> list[str]:
    """Say who the target site is, what it sends, and what bounds it if it lies; nothing where there is none."""
    name, section = agreement.target_site, config.target
    if name is None or not section.is_estimated:
        return []
    cells = len(agreement.classes) * section.bins
    labels = "it trains, too" if name in agreement.sites else "it does not train, and sends no model"
    return [
        f"target_site = {name}: after round {section.warmup} and every {section.every} rounds it sends how many of "
        f"its samples without labels are in each of {cells} cells (class and confidence of the model); {labels}",
        f"what {name} sends decides towards which label mix sites are weighed; training.weight_limit, the weighting's "
        f"effective_clients, and target.on_misfit = {section.on_misfit} bound that (docs/threats.md of fedskew)",
    ]


def target_line(run: SeedRun) -> str | None:
    """Say what came of the last estimate of the target's mix in a run; None where there was none yet."""
    records = [record for record in run.rounds if record.target is not None]
    if not records:
        return None
    good = [record for record in records if record.target is not None and record.target["mix"] is not None]
    shown = (good or records)[-1]
    assert shown.target is not None, "chosen by that"
    said = f"round {shown.round}: {in_words(shown.target, tuple(run.class_names), 'the target site')}"
    last = records[-1].target
    if last is None or records[-1] is shown:
        return said
    return f"{said}; not estimated in round {records[-1].round}: {last['skipped']}"


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
