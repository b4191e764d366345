"""Runs: what is on disk, the same bits again, and nothing lost to a kill."""

import gc
import json
from weakref import WeakSet

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedskew
from common import alike, bits, records_of, task, without_times
from fedskew.errors import RunError
from fedskew.experiment import RunFolder

TASK = task(8, beta=0.3, rounds=4, participation=0.5, epochs=1, batch_size=16, lr=0.1, momentum=0.9) | {
    "name": "small",
    "method": {"preset": "fedentopt+fedvls"},
    "target": {"mix": "uniform"},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One run of the task, in a folder."""
    return fedskew.simulate(TASK, out=tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_a_run_leaves_everything_that_replays_and_explains_it(small, tmp_path):
    assert small.folder.name == f"small-{small.config.hash}"
    assert sorted(path.name for path in small.folder.iterdir()) == [
        "checkpoint", "config.toml", "identity.json", "inputs.json", "model.safetensors", "partition.npz",
        "report.html", "rounds.jsonl", "summary.json", "task.json",
    ]  # fmt: skip
    assert [record["round"] for record in records_of(small.folder)] == [0, 1, 2, 3, 4]
    stored = load_file(small.folder / "model.safetensors")
    assert alike(stored, small.model) == {*stored}
    summary = json.loads((small.folder / "summary.json").read_text())
    assert summary["final"]["accuracy"] == small.rounds[-1]["evaluation"]["accuracy"]
    assert {"versions", "machine", "revision"} <= set(summary)
    assert summary["objective"] == "fedvls_calibration + 0.1 vacant_distillation + 0.005 suppression"
    replay = fedskew.simulate(small.folder / "config.toml", out=tmp_path / "again")
    assert records_of(replay.folder) == records_of(small.folder)
    for file in ("model.safetensors", "partition.npz", "config.toml"):
        assert (replay.folder / file).read_bytes() == (small.folder / file).read_bytes()


@pytest.mark.slow
def test_from_memory_nothing_touches_the_disk_and_the_numbers_are_the_same(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = fedskew.simulate(TASK)
    assert list(tmp_path.iterdir()) == []
    assert result.folder is None
    assert without_times(result.rounds) == without_times(small.rounds)
    assert result.to_frame()["evaluation.accuracy"].tolist() == [
        record["evaluation"]["accuracy"] for record in result.rounds
    ]
    assert result.report(tmp_path / "page.html").exists()


@pytest.mark.slow
def test_the_records_say_what_was_trained(small):
    assert small.rounds[0]["cohort"] == []
    for record in small.rounds[1:]:
        assert len(record["cohort"]) == 4
        assert sum(record["weights"]) == pytest.approx(1.0)
        assert record["target_distance"] is not None
        evaluation = record["evaluation"]
        confusion = np.array(evaluation["confusion"])
        assert evaluation["accuracy"] == pytest.approx(np.trace(confusion) / confusion.sum())
        assert evaluation["target_accuracy"] == pytest.approx(np.mean(evaluation["per_class"]))


@pytest.mark.slow
def test_several_seeds_are_one_folder_each_and_a_mean_with_spread(small, tmp_path):
    result = fedskew.simulate({**TASK, "seeds": [3, 0]}, out=tmp_path)
    assert records_of(result.folder / "seed-0") == records_of(small.folder)
    accuracies = [run.summary["final"]["accuracy"] for run in result.runs]
    assert result.summary["final"]["accuracy"]["mean"] == pytest.approx(np.mean(accuracies))
    assert result.summary["final"]["accuracy"]["std"] == pytest.approx(np.std(accuracies, ddof=1))
    assert [run.seed for run in RunFolder.read_runs(result.folder)] == [3, 0]
    assert RunFolder.read_runs(result.folder)[1].rounds == result.runs[1].rounds


@pytest.mark.slow
def test_a_run_that_is_there_is_not_written_over(small):
    out, before = small.folder.parent, (small.folder / "rounds.jsonl").read_bytes()
    with pytest.raises(RunError, match="--resume"):
        fedskew.simulate(TASK, out=out)
    assert (small.folder / "rounds.jsonl").read_bytes() == before
    again = fedskew.simulate(TASK, out=out, resume=True)
    assert (small.folder / "rounds.jsonl").read_bytes() == before
    assert torch.equal(again.model.state_dict()["head.weight"], small.model.state_dict()["head.weight"])


@pytest.mark.slow
def test_a_validation_set_chooses_the_best_round_and_keeps_its_model(tmp_path):
    result = fedskew.simulate({**TASK, "data": {"name": "digits", "validation": 0.2}}, out=tmp_path)
    scores = [record["validation"]["target_accuracy"] for record in result.rounds]
    assert result.summary["best_by_validation"]["round"] == int(np.argmax(scores))
    assert (result.folder / "best.safetensors").exists()


def test_patience_stops_when_validation_no_longer_gains():
    tree = {
        **TASK,
        "data": {"name": "digits", "validation": 0.2},
        "training": {**TASK["training"], "rounds": 50, "lr": 1e-12},
        "evaluation": {"patience": 3},
    }
    assert fedskew.simulate(tree).summary["rounds"] == 3


def test_what_labels_do_not_allow_is_said_of_the_run_and_in_its_report(tmp_path):
    partition = {"rule": "sparsity", "clients": 4, "labels_per_client": 2}
    tree = {"data": "digits", "partition": partition, "model": "logistic", "training": {"rounds": 1, "batch_size": 64}}
    result = fedskew.simulate({**tree, "method": {"preset": "fedpals+fedlc"}}, out=tmp_path)
    run = result.runs[0]
    unheld = np.flatnonzero((run.target > 0) & (run.counts.sum(axis=0) == 0))
    assert len(unheld), "of this seed's target a digit has no holder"
    assert run.notes[0].startswith(f"No client holds class{'es' if len(unheld) > 1 else ''} {unheld[0]}")
    assert run.notes[1].startswith("fedlc tells two classes apart only where some client holds both.")
    assert RunFolder.read_runs(result.folder)[0].notes == run.notes
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    assert "no method learns what nobody has" in page
    assert "rely on it, and fedlc less with a larger floor." in page.replace("&#39;", "'")
    own = {"method": {"objective": {"name": "fedlc", "floor": 1.0}}, "conditions": {"dropout": 0.2}}
    most = fedskew.simulate({**tree, **own})
    assert most.runs[0].notes[-2].endswith("cross_entropy and fedrs don't rely on it.")
    assert most.runs[0].notes[-1].startswith("conditions.dropout = 0.2 of the 3 of a round is rounded down to none:")
    plain = fedskew.simulate({**tree, "partition": {**partition, "covered": True}}, out=tmp_path)
    assert plain.runs[0].notes == ()
    assert "notes" not in json.loads((plain.folder / "task.json").read_text())


ALIVE: WeakSet = WeakSet()


class Counted(nn.Module):
    """A linear model of which is known how many there are."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(int(np.prod(in_shape)), num_classes)
        ALIVE.add(self)

    def forward(self, x):
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("method", ["fedvls", "rod"])  # of the latter's network, which is not read as a chain, an error
def test_the_data_of_a_run_that_ended_do_not_wait_for_the_garbage_collector(method):
    def inputs():
        # By `type`, as isinstance() asks what a weak proxy refers to, which may be gone.
        return [id(one) for one in gc.get_objects() if type(one) is torch.Tensor and one.shape[1:] == (1, 8, 8)]

    gc.collect()
    gc.disable()
    try:
        before = inputs()
        fedskew.simulate(task(1, rounds=2), data={"name": "digits", "client_test": 0.3}, model="mlp3", method=method)
        assert inputs() == before
    finally:
        gc.enable()


@pytest.mark.slow
def test_of_the_values_that_are_tried_only_the_best_is_kept():
    alive = []

    def count(record):
        gc.collect()
        alive.append(len(ALIVE))

    result = fedskew.simulate(
        task(2, rounds=1, batch_size=200),
        data={"name": "digits", "validation": 0.1},
        model=f"{__name__}:Counted",
        tune={"key": "training.lr", "values": [1e-9, 0.5, 1e-8, 1e-7, 1e-6]},
        progress=count,
    )
    assert result.runs[0].config["training"]["lr"] == 0.5
    assert alive[-1] - alive[0] == 1
    with torch.no_grad():
        inputs, targets = fedskew.data.load("digits").test_inputs, fedskew.data.load("digits").test_targets
        right = (result.model.eval()(inputs).argmax(1) == targets).float().mean()
    assert float(right) == pytest.approx(result.summary["final"]["accuracy"]["mean"], abs=1e-6)


@pytest.mark.slow
def test_a_key_is_tuned_by_validation(tmp_path):
    tree = {
        **TASK,
        "data": {"name": "digits", "validation": 0.2},
        "tune": {"key": "training.lr", "values": [1e-9, 0.1]},
    }
    result = fedskew.simulate(tree, out=tmp_path)
    assert result.runs[0].config["training"]["lr"] == 0.1
    whole = json.loads((result.folder / "summary.json").read_text())
    assert whole["parts"] == ["seed-0-lr-0.1"]
    assert whole["validation"]["seed-0-lr-0.1"] > whole["validation"]["seed-0-lr-1e-09"]
    assert [run.config["training"]["lr"] for run in RunFolder.read_runs(result.folder)] == [0.1]


@pytest.mark.slow
def test_clients_are_looked_at_after_their_local_training():
    result = fedskew.simulate({**TASK, "evaluation": {"clients": True, "every": 2}})
    assert [record["clients"] is not None for record in result.rounds] == [False, False, True, False, True]
    for entry in result.rounds[2]["clients"]:
        counts = result.runs[0].counts[entry["client"]]
        vacant = np.array(entry["per_class"], dtype=float)[counts == 0]
        assert entry["vacant"] == (pytest.approx(vacant.mean()) if len(vacant) else None)


class TinyNet(nn.Module):
    """A user's own network, with a dropout layer of PyTorch's."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], width: int = 16) -> None:
        super().__init__()
        size = int(np.prod(in_shape))
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(size, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, num_classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.slow
def test_a_network_of_ones_own_trains_and_replays_from_its_config(tmp_path):
    result = fedskew.simulate(TASK, model={"name": TinyNet, "width": 8}, out=tmp_path)
    assert result.model.layers[1].out_features == 8
    before = torch.get_rng_state()
    replay = fedskew.simulate(result.folder / "config.toml")
    assert torch.equal(before, torch.get_rng_state())
    assert bits(replay) == bits(result)
