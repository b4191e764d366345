"""Figures at each client, by its own test samples: in a run, its folder and records, and whether it is worth it."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from example_runs import example_run, with_sites
from scipy import stats
from sklearn.metrics import accuracy_score, log_loss

import fedskew
from common import task
from fedskew.errors import ArgumentError
from fedskew.experiment import RunFolder, make_task, resolve
from fedskew.metrics import SiteRow
from fedskew.report import ClientTable, SeedRun, write_report

DATA = {"name": "digits", "client_test": 0.3}
CONFIG = task(10, labels=2, rounds=2, lr=0.5) | {"data": DATA, "evaluation": {"sites": True}}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return fedskew.simulate(CONFIG, out=tmp_path_factory.mktemp("runs"), seeds=[0, 1])


def test_the_common_model_at_each_client_of_each_seed(result):
    rows = result.sites()
    assert [(row["seed"], row["client"], row["row"]) for row in rows] == [
        (seed, client, "common") for seed in (0, 1) for client in range(10)
    ]
    made = make_task(resolve(CONFIG), 0)
    for row, own in zip(rows, made.client_test, strict=False):
        labels = made.dataset.targets[torch.from_numpy(own)].numpy()
        with torch.inference_mode():
            logits = result.model(made.dataset.inputs[torch.from_numpy(own)]).double()
        assert row["name"] == str(row["client"])
        assert row["samples"] == len(own)
        assert row["accuracy"] == accuracy_score(labels, logits.argmax(1).numpy())
        expected = log_loss(labels, logits.softmax(1).numpy(), labels=range(10))
        assert row["loss"] == pytest.approx(expected, rel=1e-5)


def test_rounds_have_the_summaries_over_the_clients(result):
    first, *_, last = result.runs[0].rounds
    assert last.sites == SiteRow.over_clients(result.runs[0].sites)
    assert first.sites["common"]["accuracy"]["clients"] == 10
    assert result.runs[0].series("sites.common.accuracy.worst_tenth").keys() == {0, 1, 2}


def test_rows_are_read_back_as_they_were(result):
    read = RunFolder.read_runs(result.folder)
    assert [run.sites for run in read] == [run.sites for run in result.runs]
    assert fedskew.simulate(CONFIG, out=result.folder.parent, seeds=[0, 1], resume=True).sites() == result.sites()


def test_a_run_that_was_killed_before_its_summary_has_the_same_rows(result, tmp_path):
    again = fedskew.simulate(CONFIG, out=tmp_path)
    written = (again.folder / "sites.csv").read_bytes()
    for name in ("summary.json", "report.html", "sites.csv"):
        (again.folder / name).unlink()
    assert fedskew.simulate(CONFIG, out=tmp_path, resume=True).runs[0].sites == result.runs[0].sites
    assert (again.folder / "sites.csv").read_bytes() == written == (result.folder / "seed-0/sites.csv").read_bytes()


def test_a_model_alone_that_is_the_best_so_far_is_saved_with_a_checkpoint(tmp_path):
    alone = CONFIG | {"data": DATA | {"held_out": 0.2}, "evaluation": {"baselines": ["alone"]}}
    rows = fedskew.simulate(alone, out=tmp_path).sites()
    assert [row["row"] for row in rows] == ["alone"] * 10 + ["common"] * 10


def test_an_undefined_figure_is_an_empty_cell_and_none_in_records(tmp_path):
    result = fedskew.simulate(CONFIG | {"partition": task(10, labels=1)["partition"]}, out=tmp_path)
    (read,) = RunFolder.read_runs(result.folder)
    assert all(np.isnan(row.auroc) for row in read.sites)
    assert [row.loss for row in read.sites] == [row["loss"] for row in result.sites()]
    assert (
        json.loads((result.folder / "rounds.jsonl").read_text().split("\n")[0])["sites"]["common"]["auroc"]["mean"]
        is None
    )


def test_a_run_without_test_samples_of_clients_says_what_to_set():
    result = fedskew.simulate(CONFIG | {"data": "digits", "evaluation": {}})
    with pytest.raises(ArgumentError, match=r"sites: clients have no test samples of their own; set data\.client_test"):
        result.sites()
    assert "sites" not in result.rounds[-1]


# Whether it is worth it for each client: rows over seeds, differences with intervals, and the page's figure.


NAN = math.nan
ROWS = {"alone": [0.5, 0.9, 0.7, 0.6, NAN], "common": [0.7, 0.8, 0.7, 0.9, 0.5], "personal": [0.8, 0.95, 0.8, 0.9, 0.6]}


def run_of(rows=ROWS, seed: int = 0, partition_seed: int | None = None) -> SeedRun:
    run = example_run("fedavg", seed, rounds=2, clients=5, cohort=2)
    rule = {"rule": "iid", "seed": partition_seed}
    return with_sites(dataclasses.replace(run, config=run.config | {"partition": rule}), rows)


def test_who_gains_and_who_loses_by_hand():
    table = ClientTable.of([run_of()])
    assert table.kinds == ["alone", "common", "personal"]
    common, personal, over_common = table.gains("accuracy")
    assert (common.row, common.other) == ("common", "alone")
    assert common.names == ("client 1", "client 2", "client 0", "client 3")
    assert common.differences == pytest.approx([-0.1, 0.0, 0.2, 0.3])
    assert (common.losing, common.gaining) == (1, 2)  # one is equal
    assert common.in_words().startswith("Common against alone: +10.0 points of accuracy in the mean over 4 clients (95")
    assert common.in_words().endswith("; 2 gain, 1 lose: client 1 (-10.0).")
    assert (personal.losing, personal.gaining) == (0, 4)
    assert len(over_common.names) == 5
    assert over_common.losing == 0
    (by_loss, *_) = table.gains("loss")
    assert by_loss.names == common.names  # a lower loss is a gain
    assert by_loss.differences == pytest.approx(-common.differences)
    assert (by_loss.losing, by_loss.gaining) == (1, 2)
    assert table.gains("auroc") == []
    assert table.summaries()["common"]["accuracy"]["losing"] == common.losing


def test_the_interval_is_that_of_the_bootstrap_over_clients_and_always_the_same():
    rng = np.random.default_rng(5)
    alone, common = rng.uniform(0.5, 0.9, size=(2, 40))
    run = run_of({"alone": alone.tolist(), "common": common.tolist()})
    run = dataclasses.replace(run, client_names=tuple(map(str, range(40))))
    (gain,) = ClientTable.of([run]).gains("accuracy")
    expected = stats.bootstrap((common - alone,), np.mean, method="percentile", n_resamples=4000, rng=rng)
    assert (gain.low, gain.high) == pytest.approx(expected.confidence_interval, abs=0.006)
    (again,) = ClientTable.of([run]).gains("accuracy")
    assert (again.low, again.high) == (gain.low, gain.high)


def test_a_single_client_has_no_interval():
    (gain,) = ClientTable.of([run_of({"alone": [0.5], "common": [0.75]})]).gains("accuracy")
    assert math.isnan(gain.low)
    assert gain.in_words().endswith("+25.0 points of accuracy in the mean over 1 client; 1 gain, 0 lose.")
    assert gain.to_dict()["low"] is None


def test_clients_of_one_federation_are_averaged_over_seeds_and_those_of_several_are_not():
    other = {row: [0.5 * value for value in values] for row, values in ROWS.items()}
    same = ClientTable.of([run_of(seed=0), run_of(other, seed=1)])
    assert len(same.names) == 10
    assert same.names[-1] == "client 4, seed 1"
    one = ClientTable.of([run_of(seed=0, partition_seed=3), run_of(other, seed=1, partition_seed=3)])
    assert one.names == tuple(f"client {at}" for at in range(5))
    assert one.values("common", "accuracy") == pytest.approx([0.525, 0.6, 0.525, 0.675, 0.375])
    assert one.seeds == (0, 1)


def test_the_page_names_who_loses(tmp_path):
    text = write_report([run_of()], tmp_path / "report.html", "Worth it").read_text(encoding="utf-8")
    assert "Worth it for each client" in text
    assert "2 gain, 1 lose: client 1 (-10.0)." in text
    (chart,) = [
        one
        for one in json.loads(text.split('id="figures"')[1].split(">", 1)[1].split("</script>")[0])["charts"]
        if [trace.get("name") for trace in one["data"]] == [None, "alone", "common", "personal"]
    ]
    lines, alone, _, personal = chart["data"]
    assert alone["y"] == ["client 0", "client 3", "client 2", "client 1", "client 4"]
    assert personal["x"] == [80.0, 90.0, 80.0, 95.0, 60.0]
    assert lines["x"][:4] == [50.0, 70.0, 80.0, None]
    without = write_report([example_run(rounds=2)], tmp_path / "none.html", "None").read_text(encoding="utf-8")
    assert "Worth it for each client" not in without


@pytest.mark.parametrize("clients", [1, 41, 1500])
def test_a_page_of_any_number_of_clients_can_be_drawn(tmp_path, clients):
    rows = {row: np.linspace(0.2, 0.9, clients).tolist() for row in ("alone", "common", "pooled")}
    run = dataclasses.replace(run_of(rows), client_names=tuple(f"site {at}" for at in range(clients)))
    run = dataclasses.replace(run, counts=np.ones((clients, 10), dtype=np.int64), rounds=run.rounds[:1])
    page = write_report([run], tmp_path / "report.html", "Worth it")
    assert "What each client gets" in page.read_text(encoding="utf-8")
