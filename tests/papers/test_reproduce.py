"""Ours beside theirs: what is read from runs, what is said about it, what is drawn."""

import copy
import csv
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from common import task
from fedskew.engine import Evaluation, RoundRecord
from fedskew.errors import ConfigError, DataError
from fedskew.papers import Recipe, RecipeRow, Reproduction, estimate, reproduce
from fedskew.report import SeedRun
from fedskew.tables import duration

DIGITS = {"schema": 1, "seeds": [0, 1], **task(10, labels=2, rounds=3, epochs=1)}


def row(label: str, **tables: Any) -> RecipeRow:
    labels = {"dataset": "CIFAR-10", "partition": "Dir(0.1)", "method": label}
    return RecipeRow(labels, copy.deepcopy({**DIGITS, **tables}))


def run_of(rounds: list[RoundRecord], seed: int = 0, **summary: Any) -> SeedRun:
    return SeedRun("run", seed, {}, rounds, None, (), (), None, summary)  # type: ignore[arg-type]


def test_a_measure_reads_a_summary_or_a_round():
    accuracies = [0.1, 0.5, 0.4, 0.7]
    records = [
        RoundRecord(0, number, evaluation=Evaluation(value, None, 0.0, 0.0, [], []), drift=number / 4)
        for number, value in enumerate(accuracies)
    ]
    run = run_of(records, last10={"accuracy": 0.425}, best_by_validation=None)

    def values(measure: str, **readings: tuple[str, ...]) -> list[float | None]:
        recipe = Recipe("some-table", "Some", "Table", measure, None, (row("Own"),), readings=readings)
        return [line.ours.get(0) for line in Reproduction.compare(recipe, [(recipe.rows[0], [run])])]

    assert values("last10.accuracy") == [pytest.approx(42.5)]
    assert values("best_by_validation.target_accuracy") == [None]
    assert values("last.drift") == [0.75]
    assert values("max.accuracy", rounds=("2", "9")) == [50.0, None]
    with pytest.raises(ConfigError, match="measure"):
        values("best.accuracy")


@pytest.mark.slow
def test_ours_stands_beside_theirs_and_what_was_smaller_is_said(tmp_path: Path):
    fedavg, fedentopt = row("FedAvg"), row("FedEntOpt", method={"preset": "fedentopt"}, seeds=[0, 1])
    for one in (fedavg, fedentopt):
        one.tree["training"]["participation"] = 0.5
    recipe = Recipe(
        "fedentopt-table1", "FedEntOpt", "Table I", "last10.accuracy", "fedentopt-table1", (fedavg, fedentopt),
        deviations=({"method": ["KL"], "says": "not here"}, {"says": "digits are not CIFAR-10."}),
    )  # fmt: skip
    done = reproduce(recipe, out=tmp_path, rounds=2, changes={"seeds": [0]})
    assert done.failures == ()
    # FedEntOpt's table I, CIFAR-10, Dir(0.1): FedAvg 46.61, FedEntOpt 52.80
    assert [line.theirs and line.theirs.mean for line in done.lines] == [46.61, 52.80]
    assert done.lines[0].difference == pytest.approx(done.lines[0].ours[0] - 46.61)
    assert "Changed from the recipe: seeds = [0] instead of [0, 1]; training.rounds = 2 instead of 3." in done.notes
    assert "Differs from the paper: digits are not CIFAR-10." in done.notes
    assert not any("not here" in note for note in done.notes)
    headings, body, _ = done.table()
    assert headings == ["method", "ours, %", "theirs, %", "difference"]
    assert [cells[0] for cells in body] == ["FedAvg", "FedEntOpt"]
    with (done.folder / "comparison.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert float(lines[1]["theirs_mean"]) == 52.80
    assert float(lines[1]["ours_mean"]) == pytest.approx(done.lines[1].spread.mean)

    again = reproduce(recipe, out=tmp_path, rounds=2, changes={"seeds": [0]})  # nothing is run twice
    assert [line.ours for line in again.lines] == [line.ours for line in done.lines]


@pytest.mark.slow
def test_a_row_that_a_change_makes_senseless_is_refused_with_its_reason_while_the_others_run(tmp_path: Path):
    rows = row("FedAvg"), row("SCAFFOLD", method={"preset": "scaffold"})
    recipe = Recipe("some-table", "Some", "Table", "last10.accuracy", None, rows)
    done = reproduce(recipe, out=tmp_path, rounds=1, changes={"seeds": [0], "method.aggregation": "krum"})
    assert [bool(line.ours) for line in done.lines] == [True, False]
    (text,) = done.refused
    assert "SCAFFOLD" in text
    assert "krum" in text.lower()
    assert f"Refused: {text}" in done.notes
    assert text in (done.folder / "comparison.md").read_text()
    with pytest.raises(ConfigError, match="SCAFFOLD"):  # nothing is left to run
        reproduce(recipe, rows[1:], out=tmp_path, changes={"method.aggregation": "krum"})


def test_a_change_against_another_row_is_taken_seed_by_seed():
    rows = row("Both"), row("FedAvg")
    recipe = Recipe(
        "some-table", "Some", "Table", "last10.accuracy", None, rows, relative={"Both": "FedAvg"},
    )  # fmt: skip
    runs = [
        (rows[0], [run_of([], seed=seed, last10={"accuracy": value}) for seed, value in enumerate([0.45, 0.50, 0.60])]),
        (rows[1], [run_of([], seed=seed, last10={"accuracy": value}) for seed, value in enumerate([0.40, 0.42])]),
    ]
    (line,) = Reproduction.compare(recipe, runs)
    assert line.ours == pytest.approx({0: 5.0, 1: 8.0})  # seed 2 has nothing to stand against
    assert (line.spread.mean, line.spread.std) == (pytest.approx(6.5), pytest.approx(4.5**0.5))


def test_each_seed_stands_by_itself_below_the_most_that_its_target_allows(tmp_path: Path):
    partition = {"rule": "sparsity", "clients": 4, "labels_per_client": 2}
    tree = {"partition": partition, "method": {"preset": "fedpals"}, "training": {"rounds": 1}}
    oracle = {"partition": {**partition, "oracle": True}, "training": {"rounds": 1}}
    rows = row("FedPALS", **tree), row("Oracle", **oracle)
    recipe = Recipe("some-table", "Some", "Table", "final.target_accuracy", None, rows)
    done = reproduce(recipe, out=tmp_path, processes=1)
    ours, bound = done.lines
    headings, body, labels = done.by_seed()
    assert headings == ["method", "seed 0", "seed 1"]
    assert labels == 1
    assert [cells[0] for cells in body] == ["ceiling", "FedPALS", "Oracle"]
    assert body[0][1:] == [f"{ours.ceilings[seed]:.2f}" for seed in (0, 1)]
    assert min(ours.ceilings.values()) in {0.0, 50.0}, "a digit of one of these targets has no holder"
    assert set(bound.ceilings.values()) == {100.0}
    assert body[1][1] == f"{ours.ours[0]:.2f}"
    with (done.folder / "by_seed.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["method"], line["seed"]) for line in lines] == [
        ("FedPALS", "0"), ("FedPALS", "1"), ("Oracle", "0"), ("Oracle", "1"),
    ]  # fmt: skip
    assert float(lines[0]["ceiling"]) == ours.ceilings[0]
    assert any("no method learns what nobody has" in note and "FedPALS (seed" in note for note in done.notes)


def test_fewer_rounds_cut_both_parts_of_fedconcat():
    rows = Recipe.read("fedentopt-table1").choose("cifar10,dir0.1,fedconcat,fedavg")
    fedavg, fedconcat = (row.config(rounds=98) for row in rows)
    assert fedavg.training.rounds == fedconcat.training.rounds == 98
    assert fedconcat.method["pipeline"]["encoder_rounds"] == 48  # 480 of 980
    assert rows[0].config(rounds=10_000).training.rounds == 500


@pytest.mark.slow
def test_missing_data_is_named_with_the_rows_that_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / "cifar-10-batches-py").mkdir(exist_ok=True)
        (tmp_path / "cifar-10-batches-py" / name).touch()
    recipe = Recipe.read("fedentopt-table1")
    assert RecipeRow({}, {"data": {"name": "cifar10"}}).missing(tmp_path) is None
    with pytest.raises(DataError, match=r"CINIC-10 is missing: .*cinic-10.* --rows 'CIFAR-10'"):
        reproduce(recipe, out=tmp_path / "runs", changes={"data.root": str(tmp_path)})
    with pytest.raises(DataError, match="FEDSKEW_DATA"):
        reproduce(recipe, out=tmp_path / "runs")


def test_an_estimate_grows_with_rounds_seeds_and_a_methods_passes():
    base = estimate(row("FedAvg").config(), alone=True)
    assert 0 < base < 60
    assert estimate(row("FedAvg", seeds=[0]).config(), alone=True) == pytest.approx(base / 2)
    assert estimate(row("FedSAM", method={"preset": "fedsam"}).config(), alone=True) > base
    assert estimate(row("FedAvg").config()) == 0.0  # to measure it would take as long


@pytest.mark.parametrize(
    ("seconds", "words"), [(3, "3 s"), (120, "2 min"), (7200, "2 h"), (2e5, "2 days"), (1e8, "3 years")]
)
def test_seconds_in_words(seconds: float, words: str):
    assert duration(seconds) == words


@pytest.mark.parametrize(("label", "number"), [("Dir(0.1)", 0.1), ("5 %", 5), ("7 of 150", 7), ("C=10", 10)])
def test_a_label_holds_its_number(label: str, number: float):
    assert RecipeRow({"axis": label}, {}).number("axis") == number


# Differences from FedAvg, paired by seed.


def test_a_difference_is_of_the_same_task_and_seed_with_students_interval():
    ours, theirs = {0: 5.0, 1: 8.0, 2: 9.0, 3: 4.0}, {0: 4.0, 1: 6.0, 2: 10.0, 7: 1.0}
    lines = [
        ({"dataset": "A", "method": "FedAvg"}, theirs),
        ({"dataset": "A", "method": "FedLA"}, ours),
        ({"dataset": "B", "method": "FedLA"}, ours),
    ]
    (found,) = Reproduction.paired(lines)  # B has no FedAvg
    assert found.labels == {"dataset": "A", "method": "FedLA"}
    assert found.differences == (1.0, 2.0, -1.0)
    assert found.ahead == 2
    interval = ttest_rel([5.0, 8.0, 9.0], [4.0, 6.0, 10.0]).confidence_interval(0.95)
    assert found.interval == pytest.approx((interval.low, interval.high))


def test_seeds_of_one_federation_count_once_and_of_the_only_one_each():
    def line(federation: str, method: str, *values: float):
        return {"method": method, "federation": federation}, dict(enumerate(values))

    lines = [line("0", "FedAvg", 1.0, 3.0), line("1", "FedAvg", 5.0), line("0", "FedVLS", 2.0, 6.0)]
    (found,) = Reproduction.paired([*lines, line("1", "FedVLS", 4.0, 9.0)])
    assert (found.labels, found.differences) == ({"method": "FedVLS"}, (2.0, -1.0))
    (found,) = Reproduction.paired([lines[0], line("0", "FedVLS", 2.0, 7.0)])
    assert found.differences == (1.0, 4.0)
    assert found.interval is not None


def test_a_single_difference_has_no_interval():
    (found,) = Reproduction.paired([({"method": "FedAvg"}, {0: 1.0}), ({"method": "FedVLS"}, {0: 1.5})])
    assert (found.mean, found.interval) == (0.5, None)
