"""Figures at each client, by its own test samples: in a run, its folder and its records."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

import fedskew
from common import task
from fedskew.errors import ArgumentError
from fedskew.experiment import RunFolder, make_task, resolve
from fedskew.metrics import SiteRow

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
