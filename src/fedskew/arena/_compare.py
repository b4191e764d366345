"""The comparison of an arena's methods: differences from the reference, ranks, intervals.

A federation is a situation on one partition. On each, a method's difference from the reference is the mean over the
seeds that both have of the difference on that seed. A situation's is the mean over its partitions. Partitions of one
situation are alike, so intervals and tests take situations, not partitions or seeds, as independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedskew.advice import HARM
from fedskew.arena._jobs import Line
from fedskew.report import holm

FloatArray = NDArray[np.float64]

View = Literal["rounds", "compute", "traffic"]
VIEWS: tuple[View, ...] = ("rounds", "compute", "traffic")
"""What is equal when methods are compared: rounds; compute (local steps, one with a further pass counting for more); or
traffic (bytes, up and down)."""

LEVEL = 0.95
_RESAMPLES = 10_000
_FEWEST = 3  # situations from which an interval is given
_NEARLY_ALL = 0.9
_SPENT: dict[View, str] = {"compute": "steps", "traffic": "megabytes"}


@dataclass(frozen=True)
class Standing:
    """How a method stands against the reference, over all situations in which both have runs.

    Attributes:
        method: Its label.
        situations: Number of these situations.
        federations: Number of federations in them.
        score: Mean score over them in percent.
        difference: Mean difference from the reference in points.
        interval: Interval of 95 % of that mean, by bootstrap over situations; None for fewer than three.
        p: P-value of Wilcoxon's signed-rank test over situations, corrected for the number of methods by Holm's method;
            NaN where there is no test.
        ahead: Share of the situations in which it is ahead.
        harmed: Share of the situations in which it is more than a point behind.
    """

    method: str
    situations: int
    federations: int
    score: float
    difference: float
    interval: tuple[float, float] | None
    p: float
    ahead: float
    harmed: float


@dataclass(frozen=True)
class Ranks:
    """The average ranks of methods over situations that all of them have.

    Attributes:
        methods: Their labels, best first.
        ranks: Their average ranks; 1 is the best.
        situations: Number of these situations.
        critical: Smallest difference of average ranks that is significant at 5 %, corrected for all pairs (Nemenyi);
            NaN for fewer than two situations.
        p: P-value of Friedman's test that all methods are alike; NaN where there is none.
        left_out: Methods that lack some of the situations.
    """

    methods: tuple[str, ...]
    ranks: tuple[float, ...]
    situations: int
    critical: float
    p: float
    left_out: tuple[str, ...]

    def groups(self) -> list[tuple[int, int]]:
        """Return groups of methods whose ranks do not differ significantly, each as its first and last position."""
        found: list[tuple[int, int]] = []
        if math.isnan(self.critical):
            return found
        for first, rank in enumerate(self.ranks):
            last = max(at for at, other in enumerate(self.ranks) if other - rank <= self.critical)
            if last > first and not any(begin <= first and last <= end for begin, end in found):
                found.append((first, last))
        return found


@dataclass(frozen=True)
class Scores:
    """The score of every compared run, in percent, under one view.

    Attributes:
        axes: Names of what situations differ in.
        values: By method, then situation (its labels) and partition: the score by seed.
    """

    axes: tuple[str, ...]
    values: Mapping[str, Mapping[tuple[tuple[str, ...], str], Mapping[str, float]]]

    @property
    def situations(self) -> list[tuple[str, ...]]:
        """All situations, in the order of the runs."""
        return list(dict.fromkeys(situation for own in self.values.values() for situation, _ in own))

    def differences(self, method: str, reference: str) -> dict[tuple[str, ...], list[float]]:
        """Return a method's difference from the reference on each partition, by situation.

        Args:
            method: Label of the method.
            reference: Label of the reference.
        """
        found: dict[tuple[str, ...], list[float]] = {}
        others = self.values.get(reference, {})
        for key, own in self.values.get(method, {}).items():
            other = others.get(key, {})
            same = [value - other[seed] for seed, value in own.items() if seed in other]
            if same:
                found.setdefault(key[0], []).append(fmean(same))
        return found

    def means(self, method: str) -> dict[tuple[str, ...], float]:
        """Return a method's mean score in each situation, over partitions and seeds.

        Args:
            method: Label of the method.
        """
        found: dict[tuple[str, ...], list[float]] = {}
        for (situation, _), own in self.values.get(method, {}).items():
            found.setdefault(situation, []).append(fmean(own.values()))
        return {situation: fmean(values) for situation, values in found.items()}


def scores(lines: Iterable[Line], axes: Sequence[str], reference: str, view: View = "rounds", last: int = 5) -> Scores:
    """Return the scores that are compared.

    Args:
        lines: Lines of `runs.csv`, those of compared runs.
        axes: Names of what situations differ in.
        reference: Label of the reference: the others are scored where they have spent as much compute or traffic as it
            has at its last round, or at their own last round if they never do.
        view: What is equal when methods are compared.
        last: Number of evaluations whose mean is a score.
    """
    of: dict[str, dict[tuple[tuple[str, ...], str], dict[str, Line]]] = {}
    for line in lines:
        key = tuple(line[axis] for axis in axes), line["partition"]
        of.setdefault(line["method"], {}).setdefault(key, {})[line["seed"]] = line
    values: dict[str, dict[tuple[tuple[str, ...], str], dict[str, float]]] = {}
    for method, federations in of.items():
        for key, seeds in federations.items():
            for seed, line in seeds.items():
                budget = of.get(reference, {}).get(key, {}).get(seed)
                score = _score(line, budget, view, last)
                if score is not None:
                    values.setdefault(method, {}).setdefault(key, {})[seed] = score
    return Scores(tuple(axes), values)


def _score(line: Line, budget: Line | None, view: View, last: int) -> float | None:
    """Return the score of a run in percent, once it has spent the run `budget`; None where that is not known."""
    if view == "rounds":
        return 100 * float(line["score"])
    if budget is None:
        return None
    spent, most = float(line[_SPENT[view]]), float(budget[_SPENT[view]])
    curve = [float(value) / 100 for value in line["curve"].split()]
    share = most / spent if spent > most else 1.0
    if share == 1.0:
        return 100 * float(line["score"])
    until = math.floor(share * len(curve) + 1e-9)
    return fmean(curve[max(until - last, 0) : until]) if until else None


def standings(found: Scores, reference: str) -> list[Standing]:
    """Compare every method with the reference.

    Args:
        found: The scores.
        reference: Label of the reference.

    Returns:
        The methods, the largest difference first.
    """
    from scipy import stats

    rows, tests = [], []
    for method in found.values:
        by_situation = found.differences(method, reference)
        if method == reference or not by_situation:
            continue
        units = np.array([fmean(values) for values in by_situation.values()])
        partitions = sum(map(len, by_situation.values()))
        own = found.means(method)
        row = Standing(
            method=method,
            situations=len(units),
            federations=partitions,
            score=fmean(own[situation] for situation in by_situation),
            difference=float(units.mean()),
            interval=_interval(units),
            p=math.nan,
            ahead=float((units > 0).mean()),
            harmed=float((units < HARM).mean()),
        )
        rows.append(row)
        tests.append(float(stats.wilcoxon(units).pvalue) if len(units) >= _FEWEST and units.any() else math.nan)
    corrected = holm(np.array(tests, dtype=np.float64))
    with_tests = [_with_p(row, p) for row, p in zip(rows, corrected.tolist(), strict=True)]
    return sorted(with_tests, key=lambda row: -row.difference)


def _with_p(row: Standing, p: float) -> Standing:
    return Standing(**{**vars(row), "p": p})


def _interval(units: FloatArray) -> tuple[float, float] | None:
    """Interval of the mean by bootstrap over situations, bias-corrected and accelerated."""
    from scipy import stats

    if len(units) < _FEWEST:
        return None
    if np.ptp(units) == 0:
        return float(units[0]), float(units[0])
    found = stats.bootstrap(
        (units,),
        np.mean,
        confidence_level=LEVEL,
        n_resamples=_RESAMPLES,
        random_state=np.random.default_rng(0),
        method="BCa",
    ).confidence_interval
    return float(found.low), float(found.high)


def ranks(found: Scores) -> Ranks:
    """Rank the methods in every situation, and average the ranks.

    A method that lacks more than a tenth of the situations is left out; so is a situation that one of the remaining
    methods lacks.

    Args:
        found: The scores.

    Returns:
        The average ranks.
    """
    from scipy import stats

    means = {method: found.means(method) for method in found.values}
    situations = found.situations
    methods = [method for method, own in means.items() if len(own) >= _NEARLY_ALL * len(situations)]
    blocks = [situation for situation in situations if all(situation in means[method] for method in methods)]
    left_out = tuple(method for method in means if method not in methods)
    if len(methods) < 2 or not blocks:
        return Ranks((), (), 0, math.nan, math.nan, left_out)
    table = np.array([[means[method][situation] for method in methods] for situation in blocks])
    average = stats.rankdata(-table, axis=1).mean(axis=0)
    number, size = len(blocks), len(methods)
    p = critical = math.nan
    if number > 1:
        # Nemenyi's: the quantile of the range of `size` standard normal values, over the spread of an average rank
        quantile = float(stats.studentized_range.ppf(LEVEL, size, math.inf))
        critical = quantile / math.sqrt(2) * math.sqrt(size * (size + 1) / (6 * number))
        p = float(stats.friedmanchisquare(*table.T).pvalue) if size > 2 else math.nan
    order = np.argsort(average, kind="stable").tolist()
    return Ranks(
        tuple(methods[at] for at in order), tuple(float(average[at]) for at in order), number, critical, p, left_out
    )


def by_axis(found: Scores, reference: str, axis: str) -> dict[str, dict[str, tuple[float, int]]]:
    """Return each method's mean difference and the number of situations, for every label of an axis.

    Args:
        found: The scores.
        reference: Label of the reference.
        axis: Name of the axis.
    """
    at = found.axes.index(axis)
    table: dict[str, dict[str, tuple[float, int]]] = {}
    for method in found.values:
        if method == reference:
            continue
        groups: dict[str, list[float]] = {}
        for situation, values in found.differences(method, reference).items():
            groups.setdefault(situation[at], []).append(fmean(values))
        table[method] = {label: (fmean(values), len(values)) for label, values in groups.items()}
    return table
