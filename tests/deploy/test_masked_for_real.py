"""Masked updates for real: four sites, one killed between its answer and the opening, one before its answer; and ten
whose label counts are only ever summed."""

import json
import shutil
import signal
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from federated import FOUR, TEN, check_models, tree
from safetensors.numpy import load_file
from test_real_federation import PATIENCE, is_back, kill, pooled, real, rounds, run_folder, until

from fedskew.data import load
from fedskew.deploy import Book, LocalFederation
from fedskew.engine import Federation, predict
from fedskew.experiment import Config, TrainingLoop, make_training_loop
from fedskew.privacy import epsilon

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def is_asked(local: LocalFederation, kind: str, after: int) -> bool:
    """Whether the SuperLink holds messages of this kind of a round after this one; looked up in a copy of its state."""
    with tempfile.TemporaryDirectory() as aside:
        for part in (local.folder / "server").glob("state.db*"):
            with suppress(FileNotFoundError):
                shutil.copy(part, aside)
        state = sqlite3.connect(Path(aside) / "state.db")
        with closing(state), suppress(sqlite3.DatabaseError):  # copied while it was written
            query = "SELECT COUNT(*) FROM message_ins WHERE message_type = ? AND CAST(SUBSTR(group_id, 7) AS INT) > ?"
            return bool(state.execute(query, (kind, after)).fetchone()[0])
    return False


def simulated(config: Config, folder: Path, answered: list[list[int]]) -> TrainingLoop:
    """The simulation in which the same sites answer in each round."""
    loop = make_training_loop(config, 3, folder)
    runner = loop.runner
    assert isinstance(runner, Federation)
    there = iter(answered)

    class Lost(type(runner)):  # type: ignore[misc]
        def train(self, state, cohort):  # type: ignore[no-untyped-def]
            return super().train(state, cohort._replace(lost=~np.isin(cohort.ids, next(there))))

    loop.runner = Lost(**{name: getattr(runner, name) for name in runner.__dataclass_fields__})
    return loop


def accuracy(loop: TrainingLoop, arrays: dict[str, np.ndarray], folder: Path) -> float:
    samples = load("npz", folder / "whole.npz", rng=None)
    loop.model.module.load_state_dict({name: torch.from_numpy(values) for name, values in arrays.items()})
    confusion = predict(loop.model.module, samples.test_inputs, samples.test_targets, len(samples.classes)).confusion
    return float(np.trace(confusion) / confusion.sum())


def test_a_site_lost_before_its_answer_and_one_before_the_opening(tmp_path: Path) -> None:
    config = {**tree("fedavg", rounds=8, weight_limit=0.5), "evaluation": {"every": 8}}
    config["engine"] = {"updates": "masked"}
    with real(tmp_path, config, FOUR, updates="masked", start_timeout=300.0, round_timeout=300.0) as local:
        run = local.run()
        until(lambda: len(rounds(local)) >= 2, PATIENCE, local.log("run"))
        until(lambda: is_asked(local, "query.unmask", after=1), PATIENCE, local.log("run"))
        kill(local, "birch", signal.SIGKILL)  # it has answered, and never opens
        until(lambda: len(rounds(local)) >= 3, PATIENCE, local.log("run"))
        until(lambda: is_back(local), PATIENCE, local.log("run"))
        last = rounds(local)[-1]["round"]
        until(lambda: is_asked(local, "train", after=last), PATIENCE, local.log("run"))
        kill(local, "cedar", signal.SIGKILL)  # it is training
        assert run.wait(PATIENCE) == 4  # trained to its end, but for the round that was lost

    found = rounds(local)
    assert [record["round"] for record in found] == list(range(9))
    lost = next(record for record in found if "unmoved" in record)
    assert lost["unmoved"] == "the round's sum is lost, as birch masked and did not open it"
    assert lost["answered"] == []
    gone = next(record for record in found[lost["round"] + 1 :] if 2 not in record["answered"])
    assert sorted(gone["answered"]) == [0, 1, 3]
    plain = pooled(local, config).with_value("engine.updates", "plain")
    loop = simulated(plain, tmp_path / "plain", [record["answered"] for record in found[1:]])
    loop.run()
    folder = run_folder(local)
    assert folder is not None
    check_models(tmp_path / "plain", folder, rtol=0, atol=1e-4)  # eight rounds of rounding
    ours, theirs = load_file(folder / "model.safetensors"), load_file(tmp_path / "plain" / "model.safetensors")
    # A site that is gone does not evaluate: both models are compared on the test samples of all four.
    assert abs(accuracy(loop, ours, tmp_path) - accuracy(loop, theirs, tmp_path)) < 0.001


def test_noise_on_updates_is_paid_for_at_every_site(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    pytest.importorskip("opendp")
    config = {**tree("fedavg", rounds=2, weight_limit=0.5), "model": "logistic", "engine": {"updates": "masked"}}
    config["privacy"] = {"clip": 0.5, "noise": 4.0, "epsilon": 8.0, "delta": 1e-3}
    told = {"updates": "masked", "evaluation": "none", "start_timeout": 300.0, "round_timeout": 300.0}
    with real(tmp_path, config, FOUR, **told) as local:
        local.wait("run", local.run(), PATIENCE)

    found = rounds(local)
    assert [sorted(record["answered"]) for record in found[1:]] == [[0, 1, 2, 3]] * 2
    assert [record["privacy"]["rounds"] for record in found[1:]] == [1, 2]
    for name in FOUR:
        assert Book(local.folder / "sites" / name / "state").noises == (4.0, 4.0)
        assert epsilon(4.0, 2, 1e-3) == pytest.approx(found[-1]["privacy"]["epsilon"])


def test_ten_sites_whose_counts_are_only_summed_train_fedla_as_simulated(tmp_path: Path) -> None:
    """Ten, as FedLA takes no fewer."""
    config = {**tree("fedla", rounds=1, weight_limit=0.5), "model": "logistic"}
    config["engine"] = {"updates": "masked", "label_counts": "summed"}
    told = {"updates": "masked", "label_counts": "summed", "evaluation": "none"}
    with real(tmp_path, config, TEN, start_timeout=300.0, round_timeout=300.0, **told) as local:
        local.wait("run", local.run(), 2 * PATIENCE)
    found, folder = rounds(local), run_folder(local)
    assert folder is not None
    (record,) = found[1:]
    assert len(record["answered"]) >= 3  # on a busy machine not all ten: Flower gives a slow reply up

    loop = simulated(pooled(local, config), tmp_path / "simulated", [record["answered"]])
    loop.run()
    counts = loop.runner.counts  # type: ignore[attr-defined]
    assert json.loads((folder / "announced.json").read_text())["totals"] == counts.sum(axis=0).tolist()
    assert record["weights"] == []  # the server knows none
    assert json.loads((folder / "deployment.json").read_text())["sites"] == {}
    check_models(tmp_path / "simulated", folder, rtol=0, atol=1e-6)
