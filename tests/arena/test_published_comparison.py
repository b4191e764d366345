"""The published comparison: worked out again from the published runs, without a line of fedskew's arithmetic."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
from scipy import stats

from fedskew.arena import ranks, scores, standings

RUNS = Path(__file__).parents[2] / "docs" / "measured" / "arena-runs.csv"
AXES = ("task", "rule", "participation", "target")


@pytest.fixture(scope="module")
def compared():
    with RUNS.open(newline="", encoding="utf-8") as file:
        return [line for line in csv.DictReader(file) if line["stage"] != "tune" and not line["failure"]]


@pytest.fixture(scope="module")
def gains(compared):
    """By method, training, partition and seed, the difference from FedAvg: the mean of both scorings."""
    curves = {}
    for line in compared:
        if line["stage"] == "run":
            key = tuple(line[axis] for axis in (*AXES, "partition", "seed"))
            curves[line["method"], key] = [float(value) / 100 for value in line["curve"].split()]
    found = defaultdict(lambda: defaultdict(list))
    for (method, key), curve in curves.items():
        reference = curves["fedavg", key]
        last = 1 if method.startswith("ccvr") else 3
        found[method][*key[:3], *key[4:]].append(fmean(curve[-last:]) - fmean(reference[-last:]))
    return {method: {key: fmean(values) for key, values in own.items()} for method, own in found.items()}


@pytest.fixture(scope="module")
def means(gains):
    """By method and training; all of them have two partitions of three seeds."""
    return {
        method: {key: fmean(value for run, value in own.items() if run[:3] == key) for key in {run[:3] for run in own}}
        for method, own in gains.items()
    }


@pytest.fixture(scope="module")
def found(compared):
    trainings = {key: key[:3] for key in {tuple(line[axis] for axis in AXES) for line in compared}}
    return scores(compared, AXES, "fedavg", last=3, trainings=trainings)


@pytest.mark.slow
def test_the_published_differences_and_p_values_are_those_of_trainings(found, gains, means) -> None:
    rows = {row.method: row for row in standings(found, "fedavg")}
    units = {method: list(own.values()) for method, own in means.items() if method != "fedavg"}
    assert {method: row.trainings for method, row in rows.items()} == {name: len(own) for name, own in units.items()}
    assert max(map(len, units.values())) == 22
    for method, own in units.items():
        assert rows[method].difference == pytest.approx(fmean(own), abs=1e-9)
        runs = gains[method].values()
        assert rows[method].median == pytest.approx(median(runs), abs=1e-9)
        assert (rows[method].collapsed, rows[method].runs) == (sum(gain < -20 for gain in runs), len(runs))
    raw = sorted((stats.wilcoxon(own).pvalue, method) for method, own in units.items())
    corrected, least = {}, 0.0
    for place, (value, method) in enumerate(raw):
        least = corrected[method] = max(least, min(1.0, (len(raw) - place) * value))
    assert {method: row.p for method, row in rows.items()} == pytest.approx(corrected)


@pytest.mark.slow
def test_the_published_ranks_are_those_of_trainings(found, means) -> None:
    made = ranks(found)
    table = np.array([[means[method][training] for method in made.methods] for training in means["fedavg"]])
    assert dict(zip(made.methods, made.ranks, strict=True)) == pytest.approx(
        dict(zip(made.methods, stats.rankdata(-table.round(9), axis=1).mean(axis=0).tolist(), strict=True))
    )
    assert made.p == pytest.approx(stats.friedmanchisquare(*table.T).pvalue)
