"""Noise on updates: its size in the sum, and its cost; runs with it: what is recorded and refused, who declines."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import kstest, norm

import fedskew
from common import task
from fedskew.errors import ArgumentError, ConfigError
from fedskew.privacy import COVERED, Protection, UpdateNoise, epsilon, most_rounds, noise_for, together
from fedskew.server_updates import Plain
from fedskew.sums.fixed_point import UPDATES, add

pytest.importorskip("dp_accounting")

UNIT = 2.0**24


def exact_epsilon(noise: float, rounds: int, delta: float) -> float:
    """Of Gaussian mechanisms, which compose to one with noise / sqrt(rounds) (Balle and Wang, ICML 2018, theorem 8)."""
    mu = math.sqrt(rounds) / noise

    def missing(eps: float) -> float:
        return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)) - delta

    return float(brentq(missing, 0, 200))


@pytest.mark.parametrize(
    ("noise", "rounds", "delta"), [(1.0, 1, 1e-5), (1.0, 20, 1e-5), (2.5, 100, 1e-6), (0.7, 3, 1e-3)]
)
def test_epsilon_is_that_of_composed_gaussian_mechanisms(noise: float, rounds: int, delta: float) -> None:
    found = epsilon(noise, rounds, delta)
    assert found == pytest.approx(exact_epsilon(noise, rounds, delta), rel=2e-3)
    assert found >= exact_epsilon(noise, rounds, delta) - 1e-6  # never less than the truth


@pytest.mark.parametrize(
    ("noise", "rounds", "delta", "pfl"),
    [
        (1.0, 20, 1e-5, 28.373473835291133),
        (2.0, 100, 1e-5, 33.10373250858201),
        (4.0, 50, 1e-3, 6.452429372609352),
        (0.8, 5, 1e-6, 16.610736674829006),
    ],
)
def test_epsilon_is_that_of_pfl(noise: float, rounds: int, delta: float, pfl: float) -> None:
    """Numbers of pfl 0.6.0's PLDPrivacyAccountant, by benchmarks/same_noise.py."""
    assert epsilon(noise, rounds, delta) == pytest.approx(pfl, rel=1e-6)


def test_several_mechanisms_cost_as_much_as_one_with_less_noise() -> None:
    assert together([3.0, 4.0]) == pytest.approx(2.4)  # 1/9 + 1/16 = (5/12)**2
    assert epsilon(together([2.0] * 9), 1, 1e-5) == pytest.approx(epsilon(2.0, 9, 1e-5))


def test_a_budget_lasts_for_as_many_rounds_as_it_pays() -> None:
    rounds = most_rounds(2.0, 4.0, 1e-5)
    assert exact_epsilon(2.0, rounds, 1e-5) <= 4.0 < exact_epsilon(2.0, rounds + 2, 1e-5)
    assert most_rounds(0.1, 1.0, 1e-5) == 0
    assert exact_epsilon(noise_for(4.0, 30, 1e-5), 30, 1e-5) == pytest.approx(4.0, rel=1e-4)
    protection = Protection(UpdateNoise(1.0, 2.0, 0.2, 5), 4.0, 1e-5)
    assert protection.most_rounds == rounds
    assert protection.spent(0) == 0.0
    assert protection.spent(rounds) <= 4.0 < protection.spent(rounds + 1)


def test_shares_add_up_to_the_mechanism_s_noise() -> None:
    noise = UpdateNoise(clip=0.5, noise=1.5, weight_limit=0.25, answers=6)
    update = np.zeros(20_000)
    total = add(noise.protect(update, 0.1, np.random.default_rng(client)) for client in range(6))
    # s = z (a C 2**24 + sqrt(P) / 2), in units
    deviation = 1.5 * (0.25 * 0.5 * UNIT + math.sqrt(20_000) / 2)
    assert noise.deviation(20_000) == pytest.approx(deviation)
    assert total.std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * 20_000))
    assert kstest(total / deviation, "norm").pvalue > 1e-4
    for members in (3, 8):  # whoever they are
        shared = UpdateNoise(clip=0.5, noise=1.5, weight_limit=0.25)
        shares = (shared.protect(update, 0.1, np.random.default_rng(client), members) for client in range(members))
        assert add(shares).std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * 20_000))
    more = add(noise.protect(update, 0.1, np.random.default_rng(client)) for client in range(12))
    assert more.std() == pytest.approx(math.sqrt(2) * deviation, rel=0.03)


@pytest.mark.slow
def test_secure_noise_has_the_same_size_and_can_not_be_repeated() -> None:
    pytest.importorskip("opendp")
    noise = UpdateNoise(clip=0.5, noise=1.5, weight_limit=0.25, answers=4)
    one, other = (noise.protect(np.zeros(1_000), 0.1) for _ in range(2))
    assert one.std() == pytest.approx(noise.deviation(1_000) / 2, rel=8 / math.sqrt(2 * 1_000))
    assert not np.array_equal(one, other)


def test_an_update_is_clipped_to_its_norm_before_it_is_weighed() -> None:
    noise = UpdateNoise(clip=0.5, noise=1e-5, weight_limit=0.25, answers=3)
    long, short = np.array([3.0, 4.0]), np.array([0.03, 0.04])
    found = UPDATES.decode(noise.protect(long, 0.2, np.random.default_rng(0)))
    assert found == pytest.approx([0.2 * 0.3, 0.2 * 0.4], abs=1e-5)
    assert UPDATES.decode(noise.protect(short, 0.2, np.random.default_rng(0))) == pytest.approx(0.2 * short, abs=1e-5)
    assert np.abs(noise.protect(np.zeros(2), 0.2, np.random.default_rng(0))).max() < 100


def test_one_client_changes_the_sum_by_no_more_than_the_sensitivity() -> None:
    noise = UpdateNoise(clip=0.5, noise=1.0, weight_limit=0.25, answers=3)
    rng = np.random.default_rng(0)
    for _ in range(20):
        update = rng.normal(size=300) * rng.exponential()
        with_it, without = (noise.protect(one, 0.25, np.random.default_rng(5)) for one in (update, np.zeros(300)))
        moved = np.linalg.norm(with_it.astype(np.float64) - without)
        assert moved <= noise.deviation(300) / noise.noise


def test_a_share_too_small_for_whole_numbers_is_refused() -> None:
    """At a third of a unit, a hundred clients' rounded shares add up to noise of 1.3 units where 3.3 are due."""
    small = UpdateNoise(clip=1e-5, noise=1.0, weight_limit=0.01)
    assert small.deviation(10) / math.sqrt(100) == pytest.approx(0.326, abs=1e-3)
    with pytest.raises(ArgumentError, match=r"noise: the share of one of 100 clients is 0.326 units .* 10 are the"):
        small.protect(np.zeros(10), 0.01, np.random.default_rng(0), 100)
    larger = UpdateNoise(clip=1e-3, noise=1.0, weight_limit=0.01)
    assert larger.share(10, 100) == pytest.approx(1.0 * (0.01 * 1e-3 * UNIT + math.sqrt(10) / 2) / 10)


def test_mistakes_are_said() -> None:
    with pytest.raises(ArgumentError, match="members: must be at least 1"):
        UpdateNoise(0.5, 1.0, 0.25).protect(np.zeros(2), 0.2, np.random.default_rng(0))
    with pytest.raises(ArgumentError, match="noises: expected one at least"):
        together([])
    with pytest.raises(ArgumentError, match="weight: 0.3 is above the limit 0.25"):
        UpdateNoise(0.5, 1.0, 0.25, 3).protect(np.zeros(2), 0.3, np.random.default_rng(0))
    for arguments, why in (
        ((0.0, 1.0, 0.2, 3), "clip: input should be greater than 0 .got 0.0."),
        ((9.0, 1.0, 0.2, 3), "clip: must be at most 8"),
        ((1.0, -1.0, 0.2, 3), "noise: input should be greater than 0 .got -1.0."),
        ((1.0, 1.0, 1.2, 3), "weight_limit: input should be less than or equal to 1 .got 1.2."),
        ((1.0, 1.0, 0.2, 0), "answers: input should be greater than or equal to 1 .got 0."),
        ((8.0, 50.0, 1.0, 3), "does not fit into a sum's 32 bits"),
    ):
        with pytest.raises(ArgumentError, match=why):
            UpdateNoise(*arguments)
    for arguments, why in (((0.0, 1, 1e-5), "noise"), ((1.0, 1, 0.0), "delta"), ((1.0, -1, 1e-5), "rounds")):
        with pytest.raises(ArgumentError, match=f"^{why}: input should be greater than"):
            epsilon(*arguments)
    with pytest.raises(ArgumentError, match="budget: input should be greater than 0 .got 0.0."):
        most_rounds(1.0, 0.0, 1e-5)


# Runs with differential privacy of updates: what is recorded, what is refused, and who declines.


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
    result = fedskew.simulate(TASK, model={"name": "test_privacy:Numbered"}, training={**TRAINING, "rounds": 1})
    assert result.rounds[-1]["privacy"]["rounds"] == 1


class Breaking(Plain):
    """A server update whose model is not finite in the first round."""

    def move(self, state: Any, *given: Any) -> Any:
        model, state = super().move(state, *given)
        return model * float("nan"), state


def test_a_round_whose_model_is_not_finite_is_charged() -> None:
    method = {"preset": "fedavg", "server_update": {"name": "test_privacy:Breaking"}}
    result = fedskew.simulate(TASK, method=method, training={**TRAINING, "rounds": 1})
    assert result.rounds[-1]["answered"] == []
    assert result.rounds[-1]["privacy"]["rounds"] == 1  # what was opened was seen


def test_a_network_with_buffers_is_refused_as_they_would_be_sent_without_noise() -> None:
    with pytest.raises(ConfigError, match="Normalised has buffers"):
        fedskew.simulate(TASK, model={"name": "common:Normalised"})
