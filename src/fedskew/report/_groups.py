"""Runs as a page compares them: the seeds of a label, which labels can be compared, what is noted on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedskew.report._runs import SeedRun

_NOT_TESTED = ("root", "validation", "held_out")  # keys of `[data]` that don't change the test set


@dataclass(frozen=True)
class Group:
    """The runs of one label, by seed, and the number of the label's colour and dashes, the same on the whole page."""

    label: str
    style: int
    seeds: list[SeedRun]

    @property
    def first(self) -> SeedRun:
        """The lowest seed, which figures of single clients show: another seed may split the data otherwise."""
        return self.seeds[0]


def alike(groups: Iterable[Group], kind: Callable[[Group], Hashable]) -> list[list[Group]]:
    """Return the groups that can share a figure."""
    found: dict[Hashable, list[Group]] = {}
    for group in groups:
        found.setdefault(kind(group), []).append(group)
    return list(found.values())


def same_classes(group: Group) -> Hashable:
    """Return a key that is equal for runs with the same classes."""
    return group.first.class_names


def same_test(group: Group) -> Hashable:
    """Return a key that is equal for runs whose accuracies are of the same test set."""
    data = {key: value for key, value in group.first.config.get("data", {}).items() if key not in _NOT_TESTED}
    return json.dumps(data, sort_keys=True, default=str), group.first.class_names


def same_target(group: Group) -> Hashable:
    """Return a key that is equal for runs with the same target."""
    return tuple((run.seed, None if run.target is None else run.target.tobytes()) for run in group.seeds)


def same_data(group: Group) -> Hashable:
    """Return a key, equal for runs whose clients hold the same numbers of samples of each class, seed by seed."""
    return same_test(group), tuple((run.seed, run.counts.tobytes()) for run in group.seeds)


def same_split(one: Group, other: Group) -> bool:
    """Return whether two groups have one test, and clients with the same label counts in every seed that both have."""
    if same_test(one) != same_test(other):
        return False
    counts = {run.seed: run.counts for run in one.seeds}
    return all(np.array_equal(run.counts, counts[run.seed]) for run in other.seeds if run.seed in counts)


def same_cohorts(group: Group) -> Hashable:
    """Return a key that is equal for runs that selected the same clients in every round of every seed."""
    return tuple((run.seed, tuple(tuple(sorted(record.cohort)) for record in run.rounds)) for run in group.seeds)


def together(groups: list[Group]) -> str:
    """Return the labels of groups whose figures are one and the same."""
    return " = ".join(group.label for group in groups)


def listed(names: Iterable[Any], most: int = 8) -> str:
    """Return names as a sentence has them, the first ones where there are many."""
    found = [str(name) for name in names]
    if len(found) > most:
        return f"{', '.join(found[:most])} and {len(found) - most:,} more"
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
