"""Labels ranked, and their differences from one of them, seed by seed.

A difference is tested by the paired t-test over the seeds that both labels have, with Student's interval of 95 %. With
the three to five seeds that are common here, Wilcoxon's signed ranks can't reach a p-value below 0.25 to 0.06,
whatever the differences. The p-values of a column are corrected for their number by Holm's method.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedskew.report._runs import Group, SeedRun, same_split, same_target
from fedskew.report.drawing import FloatArray
from fedskew.tables import Spread, holm

_MOST_REFERENCES = 60
_NOTHING = "\u2013"


class Difference(NamedTuple):
    """A label's mean difference from its reference, its interval of 95 % and corrected p-value; NaN without a test."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int


def paired_differences(values: FloatArray, references: FloatArray) -> list[Difference]:
    """Return the differences between rows over seeds, with intervals and corrected p-values.

    `values` and `references`, what each row is compared with, are `(labels, seeds)`; NaN where a seed is missing.
    """
    from scipy import special

    differences = values - references
    known = np.isfinite(differences)
    seeds = known.sum(axis=1)
    mean = np.where(known, differences, 0.0).sum(axis=1) / np.maximum(seeds, 1)
    squares = (np.where(known, differences - mean[:, None], 0.0) ** 2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(squares / (seeds - 1) / seeds)
        # differences that rounding alone tells apart have no spread to test by
        error = np.where((seeds > 1) & (error > 1e-9 * np.maximum(np.abs(mean), 1e-3)), error, np.nan)
        half = special.stdtrit(np.maximum(seeds - 1, 1), 0.975) * error
        p = 2 * special.stdtr(np.maximum(seeds - 1, 1), -np.abs(mean / error))
    mean = np.where(seeds > 0, mean, np.nan)
    columns = [column.tolist() for column in (mean, mean - half, mean + half, p, seeds)]
    columns[3] = holm(columns[3])
    return [Difference(*row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Measure:
    """A number of every run: key, heading, values `(labels, seeds)`, in percent, NaN for none; runs of each label."""

    key: str
    name: str
    values: FloatArray
    runs: list[int]

    @property
    def is_share(self) -> bool:
        """Whether it is a share of test samples, whose differences are tested."""
        return self.key in SeedRun.FIGURES

    @property
    def is_low(self) -> bool:
        """Whether it is the better the lower it is."""
        return self.key == "ece"

    @property
    def spreads(self) -> list[Spread]:
        """Mean and standard deviation of each label over its seeds."""
        return [Spread.of(row[np.isfinite(row)].tolist()) for row in self.values]

    def texts(self) -> list[str]:
        """Return mean ± standard deviation of each label, and of how many runs, where some have no such number."""
        known = np.isfinite(self.values).sum(axis=1).tolist()
        of = [f" ({some}/{runs})" if 0 < some < runs else "" for some, runs in zip(known, self.runs, strict=True)]
        return [spread.text(1, nothing=_NOTHING) + some for spread, some in zip(self.spreads, of, strict=True)]


@dataclass(frozen=True)
class Ranking:
    """The table of a comparison: the labels, best first, and their numbers, of which the first ranks. `axes` has their
    values on the axes of a grid, in the order of the page's runs; `tests`, by what they are compared with (`chosen`:
    first) and by measure, each difference, the ends of its interval, and both in words."""

    groups: list[Group]
    axes: dict[str, list[str]]
    measures: list[Measure]
    chosen: str
    tests: dict[str, dict[str, list[list[Any]]]]

    def plain(self) -> dict[str, Any]:
        """Return what `report.js` reads."""
        measures = [
            {
                "key": measure.key,
                "name": measure.name,
                "values": [_rounded(row) for row in measure.values.tolist()],
                "share": measure.is_share or measure.key == "last_tenth",
                "low": measure.is_low,
            }
            for measure in self.measures
        ]
        return {"axes": self.axes, "chosen": self.chosen, "measures": measures, "tests": self.tests}


def ranking(groups: list[Group], axes: Mapping[str, Mapping[str, str]], accuracy: float | None) -> Ranking:
    """Rank labels by their measure; `axes` has each label's values on the axes of a grid, `accuracy` adds a column."""
    measures = [measure for measure in _measures(groups, accuracy) if np.isfinite(measure.values).any()]
    names = list(next(iter(axes.values()))) if axes else []
    places = {name: [axes[group.label][name] for group in groups] for name in names}
    tested = [measure for measure in measures if measure.is_share]
    tests = {
        name: {measure.key: _tests(measure, others, groups) for measure in tested}
        for name, others in _references(groups, places).items()
    }
    chosen = next((name for name in tests if name.rpartition(" = ")[2] == "fedavg"), next(iter(tests), ""))
    means = [spread.mean for spread in measures[0].spreads] if tested else [None] * len(groups)
    sign = 1 if tested and measures[0].is_low else -1
    order = sorted(range(len(groups)), key=lambda at: np.inf if (mean := means[at]) is None else sign * mean)
    return Ranking([groups[at] for at in order], places, measures, chosen, tests)


def _measures(groups: list[Group], accuracy: float | None) -> list[Measure]:
    runs = [run for group in groups for run in group.seeds]
    seeds = sorted({run.seed for run in runs})
    judged = SeedRun.measure_of(runs)
    names = {
        key: SeedRun.FIGURES[key][0].upper() + SeedRun.FIGURES[key][1:]
        for key in dict.fromkeys([judged, *SeedRun.shown_figures(runs)])
    }
    names |= {"last_tenth": "Last tenth"} | ({} if accuracy is None else {"rounds": f"Rounds to {100 * accuracy:g} %"})
    names |= {"megabytes": "MB", "seconds": "Seconds"}
    tables = {key: np.full((len(groups), len(seeds)), np.nan) for key in names}
    for row, group in enumerate(groups):
        for run in group.seeds:
            shares = {**run.headline, "last_tenth": run.last_tenth.get(judged)}
            numbers = {key: 100 * value for key, value in shares.items() if value is not None}
            numbers["rounds"] = None if accuracy is None else run.rounds_to(accuracy)
            if run.summary:
                sent = run.summary["bytes_up"] + run.summary["bytes_down"]
                numbers |= {"megabytes": sent / 1e6, "seconds": run.summary.get("seconds")}
            for key, table in tables.items():
                if (number := numbers.get(key)) is not None:
                    table[row, seeds.index(run.seed)] = number
    return [Measure(key, names[key], table, [len(group.seeds) for group in groups]) for key, table in tables.items()]


def _references(groups: list[Group], axes: Mapping[str, Sequence[str]]) -> dict[str, NDArray[np.int64]]:
    """Return what each label can be compared with: another value of one axis, or one label for all."""
    labels = range(len(groups))
    varied = {name: values for name, values in axes.items() if len(set(values)) > 1}
    if not varied:
        return {groups[at].label: np.full(len(groups), at) for at in labels[:_MOST_REFERENCES]}
    cells = list(zip(*varied.values(), strict=True))
    places = {cell: at for at, cell in enumerate(cells)}
    references = {}
    for axis, (name, values) in enumerate(varied.items()):
        for value in dict.fromkeys(values):
            others = [places.get((*cell[:axis], value, *cell[axis + 1 :]), -1) for cell in cells]
            references[f"{name} = {value}"] = np.array(others)
    return references


def _tests(measure: Measure, others: NDArray[np.int64], groups: list[Group]) -> list[list[Any]]:
    """Compare each label with its reference, where the two are of the same data: difference, its ends, in words."""
    references = np.full_like(measure.values, np.nan)
    for at, other in enumerate(others.tolist()):
        if other < 0 or other == at or not same_split(groups[at], groups[other]):
            continue
        if measure.key != "target_accuracy" or same_target(groups[at]) == same_target(groups[other]):
            references[at] = measure.values[other]
    found = paired_differences(measure.values, references)
    return [
        [*_rounded(one[:3]), "reference" if other == at else _in_words(one)]
        for at, (one, other) in enumerate(zip(found, others, strict=True))
    ]


def _in_words(difference: Difference) -> str:
    mean = f"{difference.mean:+.1f}"
    if not np.isfinite(difference.mean):
        return _NOTHING
    if not np.isfinite(difference.low):
        every = "in every seed" if difference.seeds > 1 else "one seed"
        return f"{'equal' if abs(difference.mean) < 1e-9 else mean} ({every})"
    p = "p < 0.001" if difference.p < 0.0005 else f"p = {difference.p:.3f}"
    return f"{mean} ({difference.low:+.1f} to {difference.high:+.1f}), {p}"


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [round(value, 4) if np.isfinite(value) else None for value in values]
