"""Labels ranked, and their differences from one of them, seed by seed.

A difference is tested by the paired t-test over the seeds that both labels have, with Student's interval of 95 %. With
the three to five seeds that are common here, Wilcoxon's signed ranks can't reach a p-value below 0.25 to 0.06,
whatever the differences. The p-values of a column are corrected for their number by Holm's method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.report._groups import Group, same_split, same_target
from fedskew.report._imbalance import most_frequent
from fedskew.report._runs import SeedRun, headline, last_tenth, rounds_to
from fedskew.report.drawing import FloatArray
from fedskew.tables import Spread

_MOST_REFERENCES = 60
_COMPARED = ("target_accuracy", "balanced_accuracy", "accuracy", "worst_class")


@dataclass(frozen=True)
class Difference:
    """The difference of one label from its reference.

    Attributes:
        mean: Mean over the seeds that both have.
        low: Lower end of the interval of 95 %; NaN for fewer than two seeds.
        high: Its upper end.
        p: P-value of the paired t-test, corrected; NaN where there is no test.
        seeds: How many seeds both have.
    """

    mean: float
    low: float
    high: float
    p: float
    seeds: int


def paired_differences(values: FloatArray, references: FloatArray) -> list[Difference]:
    """Return the differences between rows over seeds, with intervals and corrected p-values.

    Args:
        values: A row for each label, shape `(labels, seeds)`; NaN where a seed is missing.
        references: What each row is compared with, of the same shape.
    """
    from scipy import special

    differences = values - references
    known = np.isfinite(differences)
    seeds = known.sum(axis=1)
    filled = np.where(known, differences, 0.0)
    mean = filled.sum(axis=1) / np.maximum(seeds, 1)
    squares = (np.where(known, differences - mean[:, None], 0.0) ** 2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(squares / (seeds - 1) / seeds)
        # differences that rounding alone tells apart have no spread to test by
        error = np.where((seeds > 1) & (error > 1e-9 * np.maximum(np.abs(mean), 1e-3)), error, np.nan)
        half = special.stdtrit(np.maximum(seeds - 1, 1), 0.975) * error
        p = 2 * special.stdtr(np.maximum(seeds - 1, 1), -np.abs(mean / error))
    mean = np.where(seeds > 0, mean, np.nan)
    corrected = holm(p)
    rows = zip(mean.tolist(), half.tolist(), corrected.tolist(), seeds.tolist(), strict=True)
    return [Difference(middle, middle - ends, middle + ends, value, count) for middle, ends, value, count in rows]


def holm(p: FloatArray) -> FloatArray:
    """Correct p-values for their number by Holm's method.

    Args:
        p: P-values; NaN where there is no test.

    Returns:
        Corrected p-values, same shape.
    """
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    corrected = np.full(p.shape, np.nan)
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return corrected


@dataclass(frozen=True)
class Measure:
    """A number of every run.

    Attributes:
        key: Its key in a summary.
        name: Its heading.
        values: Its values, shape `(labels, seeds)`, shares in percent; NaN where missing.
        digits: Decimals.
        most: Whether more is better.
    """

    key: str
    name: str
    values: FloatArray
    digits: int
    most: bool

    @property
    def is_share(self) -> bool:
        """Whether it is a share of test samples, whose differences are tested."""
        return self.key in _COMPARED

    def means(self) -> list[float | None]:
        """Return the mean of each label over its seeds."""
        return [Spread.of(row[np.isfinite(row)].tolist()).mean for row in self.values]

    def texts(self) -> list[str]:
        """Return mean ± standard deviation of each label, and over how many seeds where not all have it."""
        found = []
        for row in self.values:
            known = row[np.isfinite(row)].tolist()
            found.append(Spread.of(known).text(self.digits, nothing="\u2013"))
        return found


@dataclass(frozen=True)
class Ranking:
    """The table of a comparison.

    Attributes:
        groups: The labels, best first.
        axes: The values of each label (in the order of the page's runs) on the axes of a grid, by the axis' name.
        measures: The numbers of each run; the first one ranks.
        references: What labels can be compared with, by name: the number of each label's reference, -1 for none.
        chosen: Name of the reference that is shown first.
        tests: The differences by reference and measure.
    """

    groups: list[Group]
    axes: dict[str, list[str]]
    measures: list[Measure]
    references: dict[str, NDArray[np.int64]]
    chosen: str
    tests: dict[str, dict[str, list[Difference]]]

    def text(self, reference: str, measure: str, at: int) -> str:
        """Return a difference in words.

        Args:
            reference: Name of the reference.
            measure: Key of the measure.
            at: Number of the label.
        """
        other = self.references[reference][at]
        if other == at:
            return "reference"
        found = self.tests[reference][measure][at]
        if other < 0 or not np.isfinite(found.mean):
            return "\u2013"
        if not np.isfinite(found.low):
            every = "in every seed" if found.seeds > 1 else "one seed"
            return f"equal ({every})" if abs(found.mean) < 1e-9 else f"{found.mean:+.1f} ({every})"
        p = "p < 0.001" if found.p < 0.0005 else f"p = {found.p:.3f}"
        return f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f}), {p}"

    def plain(self) -> dict[str, Any]:
        """Return what `report.js` reads."""

        def number(value: float) -> float | None:
            return round(value, 4) if np.isfinite(value) else None

        return {
            "axes": self.axes,
            "chosen": self.chosen,
            "measures": [
                {
                    "key": measure.key,
                    "name": measure.name,
                    "values": [[number(value) for value in row] for row in measure.values.tolist()],
                    "share": measure.is_share or measure.key == "last_tenth",
                }
                for measure in self.measures
            ],
            "tests": {
                reference: {
                    measure: [
                        [number(found.mean), number(found.low), number(found.high), self.text(reference, measure, at)]
                        for at, found in enumerate(rows)
                    ]
                    for measure, rows in tests.items()
                }
                for reference, tests in self.tests.items()
            },
        }


def ranking(groups: list[Group], axes: Mapping[str, Mapping[str, str]], accuracy: float | None) -> Ranking:
    """Rank labels by their accuracy on the target mix, or on the test set where there is none.

    Where the test set's classes are uneven (see `most_frequent`), that is balanced accuracy.

    Args:
        groups: The labels.
        axes: The value of each label on each axis of a grid, by the label; empty without a grid.
        accuracy: The test accuracy, a share, whose first round is a column; None for no such column.
    """
    measures = [measure for measure in _measures(groups, accuracy) if np.isfinite(measure.values).any()]
    names = list(next(iter(axes.values()))) if axes else []
    places = {name: [axes[group.label][name] for group in groups] for name in names}
    references = _references(groups, places)
    first = [measure.key for measure in measures if measure.is_share]
    tests = {
        name: {
            measure.key: paired_differences(measure.values, _reference_values(measure, others, groups))
            for measure in measures
            if measure.key in first
        }
        for name, others in references.items()
    }
    chosen = next((name for name in references if name.rpartition(" = ")[2] == "fedavg"), next(iter(references), ""))
    means = measures[0].means() if first else [None] * len(groups)
    order = sorted(range(len(groups)), key=lambda at: -np.inf if (mean := means[at]) is None else -mean)
    order.sort(key=lambda at: means[at] is None)
    return Ranking([groups[at] for at in order], places, measures, references, chosen, tests)


def _measures(groups: list[Group], accuracy: float | None) -> list[Measure]:
    seeds = sorted({run.seed for group in groups for run in group.seeds})

    def values(figure: Any) -> FloatArray:
        table = np.full((len(groups), len(seeds)), np.nan)
        for row, group in enumerate(groups):
            for run in group.seeds:
                value = figure(run)
                table[row, seeds.index(run.seed)] = np.nan if value is None else value
        return table

    def share(key: str, figures: Callable[[SeedRun], Mapping[str, Any]] = headline) -> Any:
        def figure(run: SeedRun) -> float | None:
            value = figures(run).get(key)
            return None if value is None else 100 * value

        return figure

    def megabytes(run: SeedRun) -> float | None:
        return (run.summary["bytes_up"] + run.summary["bytes_down"]) / 1e6 if run.summary else None

    runs = [run for group in groups for run in group.seeds]
    targets = any(headline(run).get("target_accuracy") is not None for run in runs)
    uneven = most_frequent(runs) is not None
    judged = "target_accuracy" if targets else "balanced_accuracy" if uneven else "accuracy"
    balanced = [Measure("balanced_accuracy", "Balanced accuracy", values(share("balanced_accuracy")), 1, True)]
    found = [
        Measure("target_accuracy", "Target mix", values(share("target_accuracy")), 1, True),
        *(balanced if uneven else []),
        Measure("accuracy", "Accuracy", values(share("accuracy")), 1, True),
        Measure("worst_class", "Worst class", values(share("worst_class")), 1, True),
        Measure("last_tenth", "Last tenth", values(share(judged, last_tenth)), 1, True),
        Measure("megabytes", "MB", values(megabytes), 1, False),
        Measure("seconds", "Seconds", values(lambda run: run.summary.get("seconds")), 1, False),
    ]
    if accuracy is not None:
        rounds = Measure(
            "rounds", f"Rounds to {100 * accuracy:g} %", values(lambda run: rounds_to(run, accuracy)), 1, False
        )
        found.insert(-2, rounds)
    return found


def _references(groups: list[Group], axes: Mapping[str, Sequence[str]]) -> dict[str, NDArray[np.int64]]:
    """Return what each label can be compared with: another value of one axis, or one label for all."""
    numbers = np.arange(len(groups))
    varied = {name: values for name, values in axes.items() if len(set(values)) > 1}
    if not varied:
        return {groups[at].label: np.full(len(groups), at) for at in numbers[:_MOST_REFERENCES]}
    places = {tuple(values[at] for values in varied.values()): at for at in numbers.tolist()}
    found = {}
    for axis, (name, values) in enumerate(varied.items()):
        for value in dict.fromkeys(values):
            others = [
                places.get(tuple(value if place == axis else own[at] for place, own in enumerate(varied.values())), -1)
                for at in numbers.tolist()
            ]
            found[f"{name} = {value}"] = np.array(others)
    return found


def _reference_values(measure: Measure, others: NDArray[np.int64], groups: list[Group]) -> FloatArray:
    """Return the values of each label's reference; NaN where the two are not of the same data."""
    table = np.full_like(measure.values, np.nan)
    for at, other in enumerate(others.tolist()):
        if other < 0 or other == at or not same_split(groups[at], groups[other]):
            continue
        if measure.key == "target_accuracy" and same_target(groups[at]) != same_target(groups[other]):
            continue
        table[at] = measure.values[other]
    return table
