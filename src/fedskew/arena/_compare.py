"""The comparison of an arena's methods: differences from the reference, ranks, intervals.

On each partition, a method's difference from the reference is the mean over the seeds that both have of the difference
on that seed; a situation's is the mean over its partitions; a training's is the mean over its situations, as those
that differ only in the mix that models are scored on are one training scored several times. Partitions of one training
are alike, too, so intervals, tests and ranks take trainings as independent. With blocks (`arena.blocks`, the task, say)
trainings of a block are alike: intervals are by a bootstrap that draws blocks, and of each its trainings, and p-values
by the signs of blocks.

The two of a pair are always evaluated alike: a finished model, of which there is one evaluation, is compared with the
reference's of the same round, whatever the number of evaluations that other scores are means of.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Literal, NamedTuple

import numpy as np

from fedskew.arena._plan import Line
from fedskew.parameters import FloatArray
from fedskew.tables import counted, grouped, holm

View = Literal["rounds", "compute", "traffic", "common", "personal"]
VIEWS: tuple[View, ...] = ("rounds", "compute", "traffic", "common", "personal")
"""What is equal when methods are compared: rounds; compute (local steps, one with a further pass counting for more); or
traffic (bytes, up and down, those of a finish included). Or, at equal rounds, the common or the personal models' mean
accuracy over clients, where clients have test samples."""

HARM, COLLAPSED = -1.0, -20.0
"""Points from which on a method does harm, or a run counts as collapsed."""
LEVEL = 0.95
_RESAMPLES = 10_000
_FEWEST, _FEWEST_BLOCKS = 5, 3  # trainings, and blocks of them, from which an interval is given
_NEARLY_ALL = 0.9
_MOST_ROWS, _MOST_PARTS = 20, 6  # of the figure
_ROUNDING = 1e-3  # of what was spent, as the runs' table has it
_SPENT: dict[View, str] = {"compute": "steps", "traffic": "megabytes"}

Situation = tuple[str, ...]
"""A situation's label on each axis."""
Runs = dict[tuple[Hashable, str, str], float]
"""Values by training, partition and seed."""


@dataclass(frozen=True)
class Standing:
    """How a method stands against the reference, over the trainings in which both have runs.

    `federations` are trainings times partitions; `score` (percent) and `difference` (points) are means over trainings;
    `low` and `high` end the interval of 95 % of the mean difference, by bootstrap over trainings, or over blocks, NaN
    for fewer than three; `median` is over runs, which a few that collapsed don't move. `p`: Wilcoxon's signed-rank test
    over trainings, or the signs of blocks' means, corrected by Holm's method; NaN where there is no test. `ahead` and
    `harmed` are shares of the trainings, `collapsed` is a number of runs.
    """

    method: str
    trainings: int
    federations: int
    score: float
    difference: float
    low: float
    high: float
    median: float
    p: float
    ahead: float
    harmed: float
    collapsed: int
    runs: int


@dataclass(frozen=True)
class Ranks:
    """The average ranks of methods over trainings that all of them have, by their differences from the reference.

    `methods` are their labels, best first, and `ranks` theirs, 1 the best. `critical` is the smallest difference of
    average ranks that is significant at 5 %, corrected for all pairs (Nemenyi), NaN for fewer than two trainings; `p`
    is that of Friedman's test that all methods are alike. `left_out` lack some of the situations.
    """

    methods: tuple[str, ...]
    ranks: tuple[float, ...]
    trainings: int
    critical: float
    p: float
    left_out: tuple[str, ...]


class Scored(NamedTuple):
    """The score of a run in percent, and how many points it is ahead of the reference's run of its seed, if any."""

    score: float
    difference: float | None


@dataclass(frozen=True)
class Scores:
    """The score of every compared run under one view: by method, then situation, partition and seed.

    A situation is part of the training that `trainings` names, else one of its own, and of the block that its label on
    the axis `blocks` names, if there is one.
    """

    axes: tuple[str, ...]
    values: Mapping[str, Mapping[tuple[Situation, str, str], Scored]]
    trainings: Mapping[Situation, Hashable]
    blocks: str | None = None

    def pairs(self, method: str, within: Mapping[str, str] | None = None) -> tuple[Runs, Runs]:
        """Return a method's scores and differences where the reference has the seed, too, and labels as `within`.

        Both are means over the situations of a training.
        """
        found: dict[tuple[Hashable, str, str], list[tuple[float, float]]] = {}
        for (situation, partition, seed), scored in self.values.get(method, {}).items():
            shown = (within or {}).items() <= dict(zip(self.axes, situation, strict=True)).items()
            if shown and scored.difference is not None:
                training = self.trainings.get(situation, situation)
                found.setdefault((training, partition, seed), []).append((scored.score, scored.difference))
        means = {key: [fmean(column) for column in zip(*values, strict=True)] for key, values in found.items()}
        return {key: score for key, (score, _) in means.items()}, {key: gain for key, (_, gain) in means.items()}

    def gains(self, method: str) -> dict[Hashable, float]:
        """Return a method's mean difference in each situation, where the reference has the seeds, too."""
        scored = self.values.get(method, {})
        return _by_training({key: one.difference for key, one in scored.items() if one.difference is not None})

    @staticmethod
    def of(
        lines: Iterable[Line],
        axes: Sequence[str],
        reference: str,
        view: View = "rounds",
        last: int = 5,
        trainings: Mapping[Situation, Hashable] | None = None,
        blocks: str | None = None,
    ) -> "Scores":
        """Return the scores that are compared.

        Args:
            lines: Lines of `runs.csv`, those of compared runs.
            reference: Label of the reference: the others are scored where they have spent as much compute or traffic as
                it has at its last round, or at their own last round if they never do. A score between two
                evaluations is interpolated.
            last: Number of evaluations whose mean is a score.
            trainings: For each situation the training that it belongs to (see `Arena.trainings`).
            blocks: Name of the axis whose labels are blocks of trainings.
        """
        of: dict[str, dict[tuple[Situation, str, str], Line]] = {}
        for line in sorted(lines, key=lambda line: line["stage"] == "traffic"):
            if view == "traffic" or line["stage"] != "traffic":
                key = tuple(line[axis] for axis in axes), line["partition"], line["seed"]
                of.setdefault(line["method"], {})[key] = line
        values: dict[str, dict[tuple[Situation, str, str], Scored]] = {}
        for method, own in of.items():
            for key, line in own.items():
                if (scored := _scored(line, of.get(reference, {}).get(key), view, last)) is not None:
                    values.setdefault(method, {})[key] = scored
        return Scores(tuple(axes), values, trainings or {}, blocks)

    def standings(self, reference: str, within: Mapping[str, str] | None = None) -> list[Standing]:
        """Compare every method with the reference, the largest difference first.

        With `within`, only situations with these labels, by axis, count; there are no order, intervals and tests then.
        """
        rows, tests = [], []
        for method in self.values:
            percent, runs = self.pairs(method, within)
            if method == reference or not runs:
                continue
            of_training = _by_training(runs)
            units = np.array([*of_training.values()])
            difference, low, high, p = self._tested(of_training, tests=not within)
            federations, score = {key[:2] for key in runs}, fmean(_by_training(percent).values())
            shares = float((units > 0).mean()), float((units < HARM).mean())
            collapsed = sum(value < COLLAPSED for value in runs.values())
            means = score, difference, low, high, median(runs.values())
            rows.append(Standing(method, len(units), len(federations), *means, math.nan, *shares, collapsed, len(runs)))
            tests.append(p)
        if within:
            return rows
        rows = [replace(row, p=p) for row, p in zip(rows, holm(tests), strict=True)]
        return sorted(rows, key=lambda row: -row.difference)

    def by_label(self, reference: str, axis: str, most: int) -> dict[str, dict[str, Standing]]:
        """Return how methods stand under each label of an axis; nothing where it has one alone, or too many."""
        at, others = self.axes.index(axis), [own for method, own in self.values.items() if method != reference]
        pairs = [(place, one) for own in others for (place, _, _), one in own.items()]
        labels = {place[at]: None for place, one in pairs if one.difference is not None}
        if not 1 < len(labels) <= most:
            return {}
        return {label: {row.method: row for row in self.standings(reference, {axis: label})} for label in labels}

    def draw(self, reference: str, path: Path) -> None:
        """Draw how far ahead methods are, on the whole and by the axis of blocks, or the first of few labels."""
        from fedskew.report import drawing

        order = self.standings(reference)
        out = sorted(order, key=lambda row: abs(row.difference))[: max(0, len(order) - _MOST_ROWS)]
        rows = {row.method: row for row in order if row not in out}
        axes = sorted(self.axes, key=lambda axis: axis != self.blocks)
        by_axis = ((one, self.by_label(reference, one, _MOST_PARTS)) for one in axes)
        axis, found = next(((one, own) for one, own in by_axis if own), ("", {}))
        parts = {at: [own[one].difference if one in own else math.nan for one in rows] for at, own in found.items()}
        intervals = [(row.low, row.high) for row in rows.values()]
        least, most = (end(row.trainings for row in order) for end in (min, max))
        said = [f"dot: mean of {'' if least == most else f'{least} to '}{counted(most, 'training')}"]
        few = f"too few {self.blocks or 'training'}s for an interval"
        said += ["bar: its interval of 95 %" if np.isfinite(intervals).any() else few]
        said += [f"small: each {axis} alone"] if parts else []
        with drawing.figure(path, width=8, height=2 + 0.29 * len(rows)) as figure:
            plot, means = figure.subplots(), {method: row.difference for method, row in rows.items()}
            drawing.differences(plot, means, intervals, parts)
            title = f"Points of accuracy gained (right) or lost (left) against {reference}"
            figure.suptitle(f"{title}\n{'; '.join(said)}", fontsize=11)  # as wide as the figure; the plot is not
            if out:
                plot.set_xlabel("left out, nearest to 0: " + ", ".join(row.method for row in out), fontsize=10)

    def _tested(self, gains: Mapping[Hashable, float], tests: bool) -> tuple[float, float, float, float]:
        """Return the mean difference, the ends of its interval, and the p-value that it is not 0; NaN without tests."""
        units = np.array([*gains.values()])
        if not tests:
            return float(units.mean()), math.nan, math.nan, math.nan
        if self.blocks is not None:
            at = self.axes.index(self.blocks)
            of = {self.trainings.get(one, one): one[at] for own in self.values.values() for one, _, _ in own}
            blocks = [[gains[training] for training in own] for own in grouped(gains, of.__getitem__).values()]
            return fmean(map(fmean, blocks)), *_by_blocks([np.array(own) for own in blocks])
        return float(units.mean()), *_interval(units)

    def ranks(self) -> Ranks:
        """Rank the methods in every training, and average the ranks.

        A method that lacks over a tenth of the situations is left out, and a training that a remaining method lacks.
        """
        means = {method: _by_training(self.pairs(method)[1]) for method in self.values}
        trainings = list(dict.fromkeys(training for own in means.values() for training in own))
        situations = {method: {situation for situation, _, _ in own} for method, own in self.values.items()}
        most = len(set().union(*situations.values()))
        methods = [method for method in means if len(situations[method]) >= _NEARLY_ALL * most]
        blocks = [training for training in trainings if all(training in means[method] for method in methods)]
        left_out = tuple(method for method in means if method not in methods)
        if len(methods) < 2 or not blocks:
            return Ranks((), (), 0, math.nan, math.nan, left_out)
        table = np.array([[means[method][training] for method in methods] for training in blocks])
        above, equal = (np.sign(table[:, None] - table[:, :, None]) == sign for sign in (1, 0))
        average = (above.sum(axis=2) + (equal.sum(axis=2) + 1) / 2).mean(axis=0)
        number, size = len(blocks), len(methods)
        p = critical = math.nan
        if number > 1:
            from scipy import stats

            # Nemenyi's: the quantile of the range of `size` standard normal values, over the spread of an average rank
            quantile = float(stats.studentized_range.ppf(LEVEL, size, math.inf))
            critical = quantile / math.sqrt(2) * math.sqrt(size * (size + 1) / (6 * number))
            p = float(stats.friedmanchisquare(*table.T).pvalue) if size > 2 else math.nan
        order = np.argsort(average, kind="stable").tolist()
        best = tuple(methods[at] for at in order)
        return Ranks(best, tuple(average[order].tolist()), number, critical, p, left_out)


def _by_training(values: Runs) -> dict[Hashable, float]:
    """Return the mean over the partitions of each training, of the means over the seeds of each partition."""
    partitions = {key: fmean(values[run] for run in own) for key, own in grouped(values, lambda run: run[:2]).items()}
    trainings = grouped(partitions, lambda partition: partition[0])
    return {training: fmean(partitions[key] for key in own) for training, own in trainings.items()}


def _scored(line: Line, other: Line | None, view: View, last: int) -> Scored | None:
    """Return the score of a run once it has spent what the reference's spends; None where that is not known."""
    share = 1.0
    if view in ("common", "personal"):
        score, theirs = (None if one is None or not one.get(view) else 100 * float(one[view]) for one in (line, other))
        return None if score is None else Scored(score, None if theirs is None else score - theirs)
    if view != "rounds":
        if other is None:
            return None
        spent, most = float(line[_SPENT[view]]), float(other[_SPENT[view]])
        share = most / spent if spent > most else 1.0
    score = _mean(line, last, share)
    if score is None or other is None:
        return None if score is None else Scored(score, None)
    if line["finish_megabytes"] or other["finish_megabytes"]:
        last = 1
    own, theirs = _mean(line, last, share), _mean(other, last)
    return None if own is None or theirs is None else Scored(score, own - theirs)


def _mean(line: Line, last: int, share: float = 1.0) -> float | None:
    """Return the mean of a run's last evaluations in percent, until a share of its rounds; None if they begin later."""
    curve = [float(value) / 100 for value in line["curve"].split()]
    if line["finish_megabytes"]:
        return curve[0] if share > 1 - _ROUNDING else None
    until = share * len(curve)
    at = [place for place in (until - back for back in range(last)) if place >= 1]
    return fmean(np.interp(at, range(1, len(curve) + 1), curve).tolist()) if at else None


def _by_blocks(blocks: Sequence[FloatArray]) -> tuple[float, float, float]:
    """Return the interval of the mean over blocks of their means, by bootstrap (blocks are drawn, then trainings of
    each), and a two-sided p-value that the mean is 0: the share of all signs of the blocks' means with which it is as
    far from 0, of three blocks a quarter at least."""
    size = len(blocks)
    if size < _FEWEST_BLOCKS:
        return math.nan, math.nan, math.nan
    rng = np.random.default_rng(0)
    # Each block is resampled anew for each place where it may be drawn, so that twice the same block is not the same.
    means = np.stack([rng.choice(own, (_RESAMPLES, size, len(own))).mean(axis=2) for own in blocks])
    drawn = rng.integers(size, size=(_RESAMPLES, size))
    found = means[drawn, np.arange(_RESAMPLES)[:, None], np.arange(size)].mean(axis=1)
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    centres = np.array([own.mean() for own in blocks])
    every = 2**size <= _RESAMPLES
    bits = np.arange(2**size)[:, None] >> np.arange(size) & 1 if every else rng.integers(2, size=(_RESAMPLES, size))
    flipped = np.abs((1 - 2 * bits) @ centres)
    return low, high, float((flipped >= abs(centres.sum()) * (1 - 1e-9)).mean())


def _interval(units: FloatArray) -> tuple[float, float, float]:
    """Interval of the mean by bootstrap over trainings, bias-corrected and accelerated, and Wilcoxon's p-value."""
    if len(units) < _FEWEST:
        return math.nan, math.nan, math.nan
    from scipy import stats  # here, as where nothing is tested its import would take as long as all else

    p = float(stats.wilcoxon(units).pvalue) if units.any() else math.nan
    if np.ptp(units) == 0:
        return float(units[0]), float(units[0]), p
    rng = np.random.default_rng(0)
    found = stats.bootstrap((units,), np.mean, confidence_level=LEVEL, n_resamples=_RESAMPLES, random_state=rng)  # BCa
    return float(found.confidence_interval.low), float(found.confidence_interval.high), p
