"""Runs with differential privacy of updates: what is recorded, what is refused, and who declines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_noise import exact_epsilon

import fedskew
from common import task
from fedskew.errors import ConfigError
from fedskew.privacy import COVERED
from fedskew.server_updates import Plain

pytest.importorskip("dp_accounting")


class Normalised(torch.nn.Sequential):
    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__(
            torch.nn.Flatten(), torch.nn.BatchNorm1d(int(np.prod(in_shape))), torch.nn.Linear(64, num_classes)
        )


PRIVACY = {"clip": 0.5, "noise": 4.0, "epsilon": 8.0, "delta": 1e-3}
TRAINING = {"rounds": 3, "participation": 0.5, "epochs": 1, "batch_size": 16, "lr": 0.05, "weight_limit": 0.5}
TASK = task(8, beta=0.3, **TRAINING) | {"engine": {"updates": "masked"}, "privacy": PRIVACY}


@pytest.mark.slow
def test_records_and_summary_say_what_was_spent(tmp_path: Path) -> None:
    result = fedskew.simulate(TASK, out=tmp_path)
    taken = dict.fromkeys(range(8), 0)
    for record in result.rounds[1:]:
        for client in record["answered"]:
            taken[client] += 1
        said, most = record["privacy"], max(taken.values())
        assert (said["rounds"], said["delta"], said["declined"]) == (most, 1e-3, [])
        assert said["epsilon"] == pytest.approx(exact_epsilon(4.0, most, 1e-3), rel=5e-3)
        assert said["round"] == pytest.approx(exact_epsilon(4.0, 1, 1e-3), rel=5e-3)
        assert record["loss"] is None  # it would have no noise
        assert "steps_summed" not in record
    (folder,) = tmp_path.iterdir()
    summary = json.loads(next(folder.glob("**/summary.json")).read_text())
    spent = {key: said[key] for key in ("epsilon", "delta", "rounds")}
    assert summary["privacy"] == {**spent, "of": COVERED}
    page = next(folder.glob("**/report.html")).read_text()
    assert f"{said['epsilon']:.2f} at most, \u03b4 1e-03, of {COVERED}" in page


def test_the_noise_is_seeded_and_moves_the_model() -> None:
    one, again = fedskew.simulate(TASK), fedskew.simulate(TASK)
    assert one.rounds[-1]["evaluation"] == again.rounds[-1]["evaluation"]
    louder = fedskew.simulate(TASK, privacy={**PRIVACY, "noise": 40.0})
    assert louder.rounds[-1]["evaluation"]["loss"] > one.rounds[-1]["evaluation"]["loss"]


def test_a_run_resumes_with_what_was_spent(interrupt_after: Any, tmp_path: Path) -> None:
    interrupt_after(2, TASK, tmp_path / "resumed")
    resumed, whole = (fedskew.simulate(TASK, out=tmp_path / "resumed", resume=True), fedskew.simulate(TASK))
    assert [record["privacy"] for record in resumed.rounds[1:]] == [record["privacy"] for record in whole.rounds[1:]]
    assert resumed.rounds[-1]["evaluation"] == whole.rounds[-1]["evaluation"]


def test_a_client_whose_budget_is_spent_declines() -> None:
    rounds = 6
    spent = exact_epsilon(4.0, 3, 1e-3) * 1.01  # pays for three rounds, which is the mean
    privacy = {**PRIVACY, "epsilon": spent, "answers": 4}
    result = fedskew.simulate({**TASK, "training": {**TRAINING, "rounds": rounds}, "privacy": privacy})
    taken, closed = dict.fromkeys(range(8), 0), 0
    for record in result.rounds[1:]:
        assert record["privacy"]["declined"] == [client for client in record["cohort"] if taken[client] == 3]
        assert set(record["privacy"]["declined"]) <= set(record["dropped"])
        assert record["privacy"]["epsilon"] <= spent
        if 0 < len(record["answered"]) < 4:  # nothing is opened, so nothing is spent
            assert "noise is made for 4 clients" in record["unmoved"]
            closed += 1
            continue
        for client in record["answered"]:
            taken[client] += 1
        assert record["privacy"]["rounds"] == max(taken.values())
    assert (max(taken.values()), closed > 0) == (3, True)


def test_those_that_are_left_share_the_noise_among_them() -> None:
    conditions = {"dropout": 0.5, "dropout_rule": "bernoulli"}
    training = {**TRAINING, "participation": 1.0, "rounds": 4}
    result = fedskew.simulate(TASK, training=training, conditions=conditions)
    moved = [len(record["answered"]) for record in result.rounds[1:] if "unmoved" not in record]
    assert min(moved) >= 3
    assert len(set(moved)) > 1
    assert all("unmoved" not in record for record in result.rounds[1:] if len(record["answered"]) >= 3)


def test_a_server_update_that_keeps_something_of_its_own_goes_with_noise() -> None:
    training = {**TRAINING, "rounds": 2}
    result = fedskew.simulate({**TASK, "training": training}, method={"server_update": {"name": "fedacg"}})
    assert [len(record["answered"]) for record in result.rounds[1:]] == [4, 4]


class Numbered(torch.nn.Sequential):
    """A network with a buffer of integers, which nobody trains and nobody sends."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
        self.register_buffer("position_ids", torch.arange(4))


def test_integers_that_are_not_sent_stay_as_they_are() -> None:
    result = fedskew.simulate(TASK, model={"name": "test_private_run:Numbered"}, training={**TRAINING, "rounds": 1})
    assert result.rounds[-1]["privacy"]["rounds"] == 1


class Breaking(Plain):
    """A server update whose model is not finite in the first round."""

    def move(self, state: Any, *given: Any) -> Any:
        model, state = super().move(state, *given)
        return model * float("nan"), state


def test_a_round_whose_model_is_not_finite_is_charged() -> None:
    method = {"preset": "fedavg", "server_update": {"name": "test_private_run:Breaking"}}
    result = fedskew.simulate(TASK, method=method, training={**TRAINING, "rounds": 1})
    assert result.rounds[-1]["answered"] == []
    assert result.rounds[-1]["privacy"]["rounds"] == 1  # what was opened was seen


def test_a_network_with_buffers_is_refused_as_they_would_be_sent_without_noise() -> None:
    with pytest.raises(ConfigError, match="Normalised has buffers"):
        fedskew.simulate(TASK, model={"name": "test_private_run:Normalised"})
