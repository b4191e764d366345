"""Differences from FedAvg on the same task and the same seed, with intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedskew.papers._recipe import Labels
from fedskew.report.drawing import FloatArray

BASELINE = "FedAvg"
DRAWN = "federation"
"""An axis of recipes whose labels are drawn alike: its runs are repetitions of one task."""

LEVEL = 0.95


@dataclass(frozen=True)
class PairedDifference:
    """How much a method is ahead of FedAvg.

    Attributes:
        labels: The task and the method.
        differences: The method's value minus FedAvg's on the same seed, or, where a task has several federations, the
            mean over the seeds of each of them.
    """

    labels: Labels
    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the differences."""
        return statistics.fmean(self.differences)

    @property
    def ahead(self) -> int:
        """How many of them are above 0."""
        return sum(difference > 0 for difference in self.differences)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by Student's t; None for a single difference."""
        number = len(self.differences)
        if number < 2:
            return None
        from scipy.stats import t

        reach = float(t.ppf((1 + LEVEL) / 2, number - 1)) * statistics.stdev(self.differences) / number**0.5
        return self.mean - reach, self.mean + reach


def paired(lines: Sequence[tuple[Labels, Mapping[int, float]]]) -> list[PairedDifference]:
    """Compare every method of a task with FedAvg, where both have values of the same seeds.

    Args:
        lines: Labels and the value of each seed.

    Returns:
        A difference for each method of each task.
    """
    tasks: dict[tuple[tuple[str, str], ...], dict[str, dict[str, Mapping[int, float]]]] = {}
    for labels, values in lines:
        task = tuple((axis, label) for axis, label in labels.items() if axis not in ("method", DRAWN))
        methods = tasks.setdefault(task, {})
        methods.setdefault(labels.get("method", ""), {})[labels.get(DRAWN, "")] = values
    found = []
    for task, methods in tasks.items():
        basis = methods.get(BASELINE, {})
        for method, federations in methods.items():
            of_seeds = [
                [value - basis[federation][seed] for seed, value in values.items() if seed in basis[federation]]
                for federation, values in federations.items()
                if federation in basis
            ]
            drawn = [differences for differences in of_seeds if differences]
            if drawn and method != BASELINE:
                units = drawn[0] if len(drawn) == 1 else [statistics.fmean(differences) for differences in drawn]
                found.append(PairedDifference({**dict(task), "method": method}, tuple(units)))
    return found


def repetitions(lines: Sequence[tuple[Labels, FloatArray]]) -> list[tuple[Labels, FloatArray]]:
    """Join the lines that differ only in the federation drawn, as its seeds do not repeat the draw.

    Args:
        lines: Labels, and what each seed gave, shape `(seeds, ...)`.

    Returns:
        Labels without the federation, in order of appearance, and what each repetition gave: each seed, or, where a
        task has several federations, each federation (the mean over its seeds).
    """
    tasks: dict[tuple[tuple[str, str], ...], list[FloatArray]] = {}
    for labels, values in lines:
        task = tuple((axis, label) for axis, label in labels.items() if axis != DRAWN)
        tasks.setdefault(task, []).append(values)
    return [
        (dict(task), drawn[0] if len(drawn) == 1 else np.stack([values.mean(axis=0) for values in drawn]))
        for task, drawn in tasks.items()
    ]
