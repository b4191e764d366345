"""Advice from a table: the nearest federations and what methods gained there, by hand; the command; the mistakes."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedskew.arena import advise
from fedskew.errors import ArgumentError, DataError
from fedskew.labels import LabelCounts, describe
from fedskew.tables import csv_text

COUNTS = np.array([[50, 50, 0, 0], [0, 50, 50, 0], [0, 0, 50, 50], [50, 0, 0, 50]])
HALF = [0.1] * 10 + [1.0] * 10


FIGURES = {  # of COUNTS, by hand
    "skew": 0.5,
    "clients_log": math.log(4),
    "classes_log": math.log(4),
    "samples_per_client_log": math.log(100),
    "epochs_log": 0.0,
}
TARGET = [3, 1, 1, 1]
DISTANCE = math.sqrt(0.25**2 + 3 * (1 / 12) ** 2)


@pytest.fixture
def table(tmp_path: Path) -> Any:
    """Writes a table of federations that are alike but for the participation and whether there is a target."""

    def write(gains, shares, target=(False,) * 99):
        names = [f"gain:{method}" for method in "abcdef"[: len(gains[0])]]
        lines = [["federation", *FIGURES, "participation", "target", "target_distance", *names]]
        for at, (row, share) in enumerate(zip(gains, shares, strict=True)):
            setting = [share, float(target[at]), DISTANCE if target[at] else 0.0]
            points = ["" if math.isnan(gain) else gain for gain in row]
            lines.append([f"number {at}", *FIGURES.values(), *setting, *points])
        path = tmp_path / "evidence.csv.gz"
        path.write_bytes(gzip.compress(csv_text(lines).encode()))
        return path

    return write


@pytest.mark.parametrize(
    ("words", "distance"),
    [
        ({}, 0),
        ({"target": TARGET}, 0),
        ({"epochs": math.e}, 1),  # figures that never vary in a table are compared as they are
        ({"counts": COUNTS * 10}, math.log(10)),
        ({"counts": np.eye(4) * 100}, 0.5),
        ({"counts": np.vstack([COUNTS, COUNTS])}, math.log(2)),
        ({"target": [1, 1, 1, 1]}, 2),  # which varies: in standard deviations
    ],
)
def test_federations_are_compared_by_their_figures(table, words, distance):
    path = table([[1.0]] * 12, [0.5] * 12, [True, False] * 6)
    found = advise(**{"counts": COUNTS, "participation": 0.5, "table": path} | words)
    assert found.neighbours[0]["distance"] == pytest.approx(distance / math.sqrt(8), abs=1e-6)


def test_a_federation_is_compared_with_its_nearest(table):
    path = table([[float(at), -1.0] for at in range(20)], HALF)
    found = advise(COUNTS, None, 0.1, 1, table=path)
    assert {one["federation"] for one in found.neighbours} == {f"number {at}" for at in range(10)}
    first, second = found.methods
    ends = {"low": pytest.approx(0.9), "high": pytest.approx(8.1)}
    assert first == {"method": "a", "median": 4.5, "ahead": 9, "of": 10} | ends
    assert (second["method"], second["median"], second["ahead"]) == ("b", -1.0, 0)
    assert (found.neighbours[0]["best"], found.neighbours[3]["best"], found.neighbours[3]["gain"]) == ("fedavg", "a", 3)
    assert (found.supported, found.method) == (True, "a")
    assert "it was ahead of FedAvg in 9 of 10, by +4.5 points" in found.sentence()
    rest = advise(COUNTS, None, 0.1, 1, without=["a"], table=path)
    assert ([one["method"] for one in rest.methods], rest.method) == (["b"], "fedavg")


def test_the_nearest_by_participation_come_first_of_those_where_not_all_take_part(table):
    path = table([[float(at)] for at in range(24)], [*np.linspace(0.1, 0.9, 20), 1, 1, 1, 1])
    found = advise(COUNTS, None, 0.9, 1, table=path)
    assert [one["federation"] for one in found.neighbours] == [f"number {at}" for at in range(19, 9, -1)]
    all_take_part = advise(COUNTS, table=path).neighbours
    assert [one["federation"] for one in all_take_part] == [f"number {at}" for at in range(20, 24)]


def test_a_method_that_needs_a_target_is_named_only_where_there_is_one(table):
    path = table([[9.0, 1.0]] * 15 + [[math.nan, 1.0]] * 5, [0.1] * 20, [True] * 15 + [False] * 5)
    without = advise(COUNTS, None, 0.1, 1, table=path)
    assert (without.method, [one["method"] for one in without.methods]) == ("b", ["b"])
    assert advise(COUNTS, TARGET, 0.1, 1, table=path).method == "a"
    assert advise(COUNTS, TARGET, 1.0, 1, table=path).method is None  # nowhere do all take part


def test_outside_the_table_no_method_is_named(table):
    found = advise(np.full((300, 100), 7), None, 0.1, 1, table=table([[2.0, 1.0]] * 20, np.linspace(0.1, 0.9, 20)))
    assert (found.supported, found.method, len(found.neighbours)) == (False, None, 10)
    assert "unlike all simulated ones" in found.sentence()


def test_where_a_sample_may_have_several_labels_no_method_is_named(table):
    both, path = (LabelCounts(COUNTS), LabelCounts(COUNTS, sizes=[60] * 4)), table([[2.0]] * 20, HALF)
    assert [advise(counts, None, 0.1, 1, table=path).method for counts in both] == ["a", None]
    assert ["FedVLS" in str(describe(counts)) for counts in both] == [True, False]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"participation": 0}, "participation: must be a share"),
        ({"epochs": 0}, "epochs: must be above 0"),
        ({"without": ["aa"]}, "without: the table has no method 'aa' (did you mean 'a'?)"),
    ],
)
def test_wrong_arguments(table, more, message):
    with pytest.raises(ArgumentError) as caught:
        advise(COUNTS, table=table([[1.0, 2.0]] * 12, [0.1] * 12), **more)
    assert message in str(caught.value)


def test_what_is_no_table_is_named(tmp_path):
    (path := tmp_path / "evidence.csv.gz").write_bytes(b"no table")
    with pytest.raises(DataError, match="the table of evidence can't be read"):
        advise(COUNTS, table=path)


def test_the_table_that_ships_names_a_method():
    rng = np.random.default_rng(0)
    found = advise(rng.multinomial(60, np.full(10, 0.1), 20), None, 0.2)
    assert found.supported
    assert {"ccvr", "fedentopt"} <= {one["method"] for one in found.methods}


def test_the_command_shows_methods_and_neighbours(tmp_path, table, command):
    table([[2.0 + at % 3, -1.0] if at < 10 else [-2.0, 3.0] for at in range(20)], HALF)
    lines = ["client,w,x,y,z", *(f"{at},{','.join(map(str, row))}" for at, row in enumerate(COUNTS.tolist()))]
    (tmp_path / "counts.csv").write_text("\n".join(lines))
    own = ("advise", "counts.csv", "--table", "evidence.csv.gz")
    done = command(*own, "--participation", "0.1")
    assert "simulated federations that are most like this one, a gained most" in " ".join(done.stdout.split())
    assert "fedskew methods NAME says what a method asks of clients and reveals" in " ".join(done.stdout.split())
    assert "number 9" in done.stdout or "number 0" in done.stdout
    assert "Small networks, digits and clothes" in done.stdout
    found = json.loads(command(*own, "--json").stdout)
    assert (found["method"], found["supported"], len(found["neighbours"])) == ("b", True, 10)
    assert found["methods"][0] == {"method": "b", "median": 3.0, "low": 3.0, "high": 3.0, "ahead": 10, "of": 10}
    assert "no method gained over FedAvg" in " ".join(command(*own, "--without", "b").stdout.split())


def test_the_command_says_what_methods_cost(tmp_path, command):
    counts = np.random.default_rng(0).multinomial(60, np.full(10, 0.1), 20)
    LabelCounts(counts, classes=list("abcdefghij")).to_csv(tmp_path / "counts.csv")
    said = " ".join(command("advise", "counts.csv", "--participation", "0.2").stdout.split())
    assert "costs beyond FedAvg" in said
    assert "client keeps 1 model" in said  # SCAFFOLD's


def test_the_table_of_fedskew_counts_no_1_epochs():
    federations = " ".join(near["federation"] for near in advise(COUNTS, TARGET).neighbours)
    assert ", epochs 1" in federations
    assert "1 epochs" not in federations
