"""Advice from a table: the nearest federations and what methods gained there, by hand; the command; the mistakes."""

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import refused
from fedskew import data
from fedskew.arena import advise
from fedskew.errors import ArgumentError, DataError
from fedskew.labels import LabelCounts, describe
from fedskew.tables import csv_text

COUNTS = np.array([[50, 50, 0, 0], [0, 50, 50, 0], [0, 0, 50, 50], [50, 0, 0, 50]])
HALF = [0.1] * 10 + [1.0] * 10
LIKE = np.eye(20, 10, dtype=int) * 150 + np.eye(20, 10, -10, dtype=int) * 150 + 5  # what ships is of such federations


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
    """Writes a table of federations that are alike but for the participation, a target and the network."""

    def write(gains, shares, target=(False,) * 99, networks=("net",) * 99):
        names = [f"gain:{method}" for method in "abcdef"[: len(gains[0])]]
        lines = [["network", "federation", *FIGURES, "participation", "target", "target_distance", *names]]
        for at, (row, share) in enumerate(zip(gains, shares, strict=True)):
            setting = [share, float(target[at]), DISTANCE if target[at] else 0.0]
            points = ["" if math.isnan(gain) else gain for gain in row]
            lines.append([networks[at], f"number {at}", *FIGURES.values(), *setting, *points])
        path = tmp_path / "evidence.csv.gz"
        path.write_bytes(gzip.compress(csv_text(lines).encode()))
        return path

    return write


@pytest.mark.parametrize(
    ("words", "apart"),
    [
        ({}, 0),
        ({"target": TARGET}, 0),
        ({"epochs": 3}, 1),
        ({"participation": 0.25}, 1),
        ({"counts": COUNTS * 25}, 2),
        ({"counts": np.eye(4) * 100}, 2),
        ({"counts": np.vstack([COUNTS] * 3)}, 1),
        ({"target": [1, 1, 1, 1]}, DISTANCE / 0.2),
    ],
)
def test_federations_are_compared_by_their_figures(table, words, apart):
    path = table([[1.0]] * 12, [0.5] * 12, [True, False] * 6)
    (found,) = advise(**{"counts": COUNTS, "participation": 0.5, "table": path} | words)
    assert found.neighbours[0]["distance"] == pytest.approx(apart / math.sqrt(8), abs=1e-6)


def test_a_federation_is_compared_with_its_nearest(table):
    path = table([[float(at), -1.0] for at in range(20)], HALF)
    (found,) = advise(COUNTS, None, 0.1, 1, table=path)
    assert [one["federation"] for one in found.neighbours] == [f"number {at}" for at in range(5)]
    first, second = found.methods
    assert first == {"method": "a", "mean": 2.0, "least": 0.0, "most": 4.0, "ahead": 4, "of": 5}
    assert (second["method"], second["mean"], second["ahead"]) == ("b", -1.0, 0)
    assert (found.neighbours[0]["best"], found.neighbours[3]["best"], found.neighbours[3]["gain"]) == ("fedavg", "a", 3)
    assert (found.refusal, found.method, found.network) == ("", "a", "net")
    said = "ahead of FedAvg in 4 of 5, by +2.0 points on average (+0.0 to +4.0)."
    assert f"a gained most of the methods that trained in half of them or more: {said}" in found.sentence()
    (rest,) = advise(COUNTS, None, 0.1, 1, without=["a"], table=path)
    assert ([one["method"] for one in rest.methods], rest.method) == (["b"], "fedavg")


def test_each_network_has_its_own_advice(table):
    path = table([[1.0, -1.0]] * 6 + [[-1.0, 1.0]] * 6, [0.1] * 12, networks=["small"] * 6 + ["large"] * 6)
    assert [(one.network, one.method) for one in advise(COUNTS, None, 0.1, 1, table=path)] == [
        ("small", "a"),
        ("large", "b"),
    ]


def test_the_nearest_by_participation_come_first_of_those_where_not_all_take_part(table):
    path = table([[float(at)] for at in range(24)], [*np.linspace(0.1, 0.9, 20), 1, 1, 1, 1])
    (found,) = advise(COUNTS, None, 0.9, 1, table=path)
    assert [one["federation"] for one in found.neighbours] == [f"number {at}" for at in range(19, 14, -1)]
    (whole,) = advise(COUNTS, table=path)
    assert [one["federation"] for one in whole.neighbours] == [f"number {at}" for at in range(20, 24)]
    few = "fewer than 5 simulated federations have no target and participation 1"
    assert whole.sentence() == f"On net no method is named: {few}."


def test_a_method_that_needs_a_target_is_named_only_where_there_is_one(table):
    path = table([[9.0, 1.0]] * 15 + [[math.nan, 1.0]] * 5, [0.1] * 20, [True] * 15 + [False] * 5)
    (without,) = advise(COUNTS, None, 0.1, 1, table=path)
    assert (without.method, [one["method"] for one in without.methods]) == ("b", ["b"])
    assert advise(COUNTS, TARGET, 0.1, 1, table=path)[0].method == "a"
    (nowhere,) = advise(COUNTS, TARGET, 1.0, 1, table=path)  # do all take part
    assert (nowhere.method, nowhere.neighbours) == (None, ())
    assert "have a target and participation 1" in nowhere.sentence()


def test_a_method_that_trained_in_few_of_the_nearest_is_not_named(table):
    path = table([[9.0, 0.5], [9.0, 0.5], *[[math.nan, 0.5]] * 4], [0.1] * 6)
    (found,) = advise(COUNTS, None, 0.1, 1, table=path)
    assert ([(one["method"], one["of"]) for one in found.methods], found.method) == ([("b", 5), ("a", 2)], "b")
    assert "less than a point says nothing" in found.sentence()


def test_outside_the_table_no_method_is_named(table):
    path = table([[2.0, 1.0]] * 20, np.linspace(0.1, 0.9, 20))
    (found,) = advise(np.full((300, 100), 7), None, 0.1, 1, table=path)
    assert (found.method, len(found.neighbours)) == (None, 5)
    assert "the simulated federations are unlike this one" in found.sentence()
    (even,) = advise(np.full((4, 4), 25), None, 0.1, 1, table=path)  # a skew of 0 where they have 0.5
    assert even.sentence() == "On net no method is named: its labels are more even than those of the nearest."


def test_where_a_sample_may_have_several_labels_no_method_is_named(table):
    both, path = (LabelCounts(COUNTS), LabelCounts(COUNTS, sizes=[60] * 4)), table([[2.0]] * 20, HALF)
    assert [advise(counts, None, 0.1, 1, table=path)[0].method for counts in both] == ["a", None]
    assert ["FedVLS" in str(describe(counts)) for counts in both] == [True, False]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"participation": 0}, "participation: input should be greater than 0 (got 0)"),
        ({"epochs": 0}, "epochs: input should be greater than 0 (got 0)"),
        ({"epochs": math.inf}, "epochs: input should be a finite number (got inf)"),
        ({"without": ["aa"]}, "without: the table has no method 'aa' (did you mean 'a'?)"),
    ],
)
def test_wrong_arguments(table, more, message):
    with refused(ArgumentError, message):
        advise(COUNTS, table=table([[1.0, 2.0]] * 12, [0.1] * 12), **more)


def test_what_is_no_table_is_named(tmp_path):
    (path := tmp_path / "evidence.csv.gz").write_bytes(b"no table")
    with pytest.raises(DataError, match="the table of evidence can't be read"):
        advise(COUNTS, table=path)
    header = ",".join(["network", "federation", *FIGURES, "participation", "target", "target_distance", "gain:a"])
    lines = ("net,number 0,nan,0,0,0,0,0,0,0,1", "net,number 0,0,0,0,0,0,0,0,0,inf", "net,number 0,0,0,0,0,0,0,0,0,1,2")
    damaged = [f"{header}\n{line}\n" for line in lines]
    for text in ("", "network,federation\n", "federation\nnumber 0\n", *damaged):
        path.write_bytes(gzip.compress(text.encode()))
        with pytest.raises(DataError, match="is not a table of evidence"):
            advise(COUNTS, table=path)


def test_the_table_that_ships_names_a_method_for_each_network():
    found = advise(LIKE, None, 0.2)
    assert [one.network for one in found] == ["logistic", "mlp3", "lenet5"]
    assert not any(one.refusal for one in found)
    assert all({"scaffold", "fedentopt"} <= {one["method"] for one in own.methods} for own in found)
    left = [one["method"] for own in advise(LIKE, None, 0.2, without=["gaussian", "fedlc"]) for one in own.methods]
    assert not [method for method in left if method.startswith(("gaussian", "fedlc"))]  # "fedlc: no mask"


@pytest.fixture
def counts_file(tmp_path):
    lines = ["client,w,x,y,z", *(f"{at},{','.join(map(str, row))}" for at, row in enumerate(COUNTS.tolist()))]
    (tmp_path / "counts.csv").write_text("\n".join(lines))


def test_the_command_shows_methods_and_neighbours(counts_file, table, command):
    table([[2.0 + at % 3, -1.0] if at < 10 else [-2.0, 3.0] for at in range(20)], HALF)
    own = ("advise", "counts.csv", "--table", "evidence.csv.gz")
    done = command(*own, "--participation", "0.1")
    assert "simulated federations most like this one, a gained most of the methods" in " ".join(done.stdout.split())
    assert "fedskew methods NAME says what a method asks of clients and reveals" in " ".join(done.stdout.split())
    assert "number 0" in done.stdout
    assert "Small networks, images, texts and tables" in done.stdout
    found = json.loads(command(*own, "--json").stdout)["net"]
    assert (found["method"], found["refusal"], len(found["neighbours"])) == ("b", "", 5)
    assert found["methods"][0] == {"method": "b", "mean": 3.0, "least": 3.0, "most": 3.0, "ahead": 5, "of": 5}
    assert "no method gained over FedAvg" in " ".join(command(*own, "--without", "b").stdout.split())


def test_a_method_that_trained_in_fewer_than_half_is_shown_last(counts_file, table, command):
    table([[1.0, 9.0 if at < 2 else math.nan, -1.0] for at in range(5)], HALF[:5])
    said = command("advise", "counts.csv", "--table", "evidence.csv.gz", "--participation", "0.1").stdout
    assert re.findall("^[abc] ", said, re.MULTILINE) == ["a ", "c ", "b "]


def test_a_network_can_be_named_or_is_the_config_s(tmp_path, counts_file, table, command):
    table([[1.0]] * 6 + [[-1.0]] * 6, [0.1] * 6 + [1.0] * 6, networks=["mlp3", "net"] * 6)
    own = ("--participation", "0.1", "--table", "evidence.csv.gz", "--json")
    assert [*json.loads(command("advise", "counts.csv", *own).stdout)] == ["mlp3", "net"]
    assert [*json.loads(command("advise", "counts.csv", "--network", "net", *own).stdout)] == ["net"]
    text = 'data = {name = "digits"}\npartition = {rule = "iid", clients = 4}\ntraining = {rounds = 1}\n'
    for model, networks in (("mlp3", ["mlp3"]), ("logistic", ["mlp3", "net"])):
        (tmp_path / "my.toml").write_text(f'{text}model = {{name = "{model}"}}\n')
        assert [*json.loads(command("advise", "my.toml", *own).stdout)] == networks
        said = command("advise", "my.toml", *own[:-1]).stdout
        assert ("logistic itself trained in no simulated federation" in said) == (model == "logistic")


def test_local_steps_count_as_epochs(tmp_path, table, command):
    table([[1.0]] * 6, [1.0] * 6)
    text = 'data = {name = "digits"}\npartition = {rule = "iid", clients = 4}\nmodel = {name = "mlp3"}\n'

    def found(training: str, *options: str) -> str:
        (tmp_path / "my.toml").write_text(f"{text}training = {{rounds = 1, {training}}}\n")
        return command("advise", "my.toml", "--table", "evidence.csv.gz", "--json", *options).stdout

    samples = len(data.load("digits").targets) / 4
    assert found("steps = 40, batch_size = 16") == found("epochs = 1", "--epochs", str(640 / samples))
    assert found("steps = 40, batch_size = 16") != found("epochs = 1")


def test_the_command_says_what_methods_cost(tmp_path, command):
    LabelCounts(LIKE, classes=list("abcdefghij")).to_csv(tmp_path / "counts.csv")
    said = " ".join(command("advise", "counts.csv", "--participation", "0.2", "--network", "lenet5").stdout.split())
    assert "costs beyond FedAvg" in said
    assert "client keeps 1 model" in said  # SCAFFOLD's


def test_the_table_of_fedskew_counts_no_1_epochs():
    federations = " ".join(near["federation"] for one in advise(COUNTS) for near in one.neighbours)
    assert ", epochs 1" in federations
    assert "1 epochs" not in federations
