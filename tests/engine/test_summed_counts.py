"""Runs whose label counts are only ever summed over all clients: each computes its own weight."""

from typing import Any, cast

import numpy as np
import pytest

import fedskew
from common import task, under_masks
from fedskew.engine import Federation
from fedskew.engine.sums import answers_in_sum, encode_answer
from fedskew.experiment import make_training_loop, resolve
from fedskew.sums import fixed_point
from fedskew.weighting import INDEX, FedAvg, Uniform, fedla, fedpals

FedLA = INDEX["fedla"]
FedPALS = INDEX["fedpals"]

COUNTS = np.random.default_rng(1).integers(0, 40, size=(12, 4)).astype(float)
TARGET = np.array([0.4, 0.3, 0.2, 0.1])
SUMMED = {"updates": "masked", "label_counts": "summed"}
TASK = task(12, beta=0.5, rounds=2, epochs=1, batch_size=16, lr=0.05) | {
    "target": {"mix": [0.05] * 5 + [0.15] * 5},
    "engine": SUMMED,
}
HALF = {"training": TASK["training"] | {"participation": 0.5}}
PALS = {"weighting": {"name": "fedpals", "strength": 50.0}}


def shares(weighting: Any, counts: np.ndarray = COUNTS) -> np.ndarray:
    told = weighting.announce(lambda question: answers_in_sum(weighting, counts, question), TARGET, len(counts))
    return np.array([weighting.own_weight(own, told) for own in counts])


def test_the_shares_of_all_clients_are_the_weights() -> None:
    assert shares(FedLA()) == pytest.approx(fedla(COUNTS), abs=1e-15)
    assert shares(FedAvg()) == pytest.approx(COUNTS.sum(axis=1) / COUNTS.sum())
    assert shares(Uniform()) == pytest.approx(np.full(12, 1 / 12))
    strength = 0.02 * COUNTS.sum()
    assert np.abs(shares(FedPALS(strength=strength)) - fedpals(COUNTS, TARGET, strength)).sum() < 1e-6
    none = COUNTS.copy()
    none[3] = 0
    for weighting in (FedLA(), FedAvg(), Uniform(), FedPALS(strength=strength)):
        assert shares(weighting, none)[3] == 0


def test_questions_are_answered_in_masked_sums_to_the_last_integer() -> None:
    pytest.importorskip("cryptography")
    weighting = FedPALS(strength=0.02 * COUNTS.sum())
    exchanges = 0

    def ask(question: Any) -> np.ndarray:
        nonlocal exchanges
        exchanges += 1
        answers = {str(client): encode_answer(weighting, own, question) for client, own in enumerate(COUNTS)}
        return (fixed_point.SHARES if question else fixed_point.AMOUNTS).decode(under_masks(answers, exchanges))

    told = weighting.announce(ask, TARGET, len(COUNTS))
    there = np.array([weighting.own_weight(own, told) for own in COUNTS])
    assert np.array_equal(there, shares(weighting))
    assert 5 <= exchanges <= 40


@pytest.mark.parametrize("preset", ["fedla", "fedavg"])
def test_a_run_is_the_one_with_told_counts(preset: str) -> None:
    summed, told = (fedskew.simulate(TASK, method=preset, engine=engine) for engine in (SUMMED, {"updates": "masked"}))
    assert summed.runs[0].notes == ()  # for real sites, too
    for one, other in zip(summed.rounds[1:], told.rounds[1:], strict=True):
        assert one["weights"] == pytest.approx(other["weights"], abs=1e-9)
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert summed.rounds[-1]["evaluation"]["loss"] == pytest.approx(told.rounds[-1]["evaluation"]["loss"], abs=1e-5)


def shares_in(run: fedskew.Result) -> dict[int, float]:
    return dict(zip(run.rounds[1]["answered"], run.rounds[1]["weights"], strict=True))


def test_fedpals_is_solved_once_and_shared_by_each_cohort() -> None:
    whole, some = (fedskew.simulate(TASK | tables, method=PALS) for tables in ({}, HALF))
    assert [note.split(":")[0] for note in whole.runs[0].notes] == [
        "fedpals from sums of exact label counts is for simulations"
    ]
    of_all = shares_in(whole)
    for record in some.rounds[1:]:
        shares = np.array([of_all[client] for client in record["answered"]])
        assert record["weights"] == pytest.approx(shares / shares.sum(), abs=1e-9)


@pytest.mark.slow
def test_counts_may_have_noise_before_they_are_summed() -> None:
    tree = {**TASK, "conditions": {"count_epsilon": 0.2, "count_use": "all"}}
    assert fedskew.simulate(tree, method=PALS).runs[0].notes == ()
    summed = fedskew.simulate(tree, method="fedla")
    told = fedskew.simulate(tree, method="fedla", engine={"updates": "masked"})
    assert summed.rounds[1]["weights"] == pytest.approx(told.rounds[1]["weights"], abs=1e-7)

    loop = make_training_loop(resolve({**tree, "method": PALS}), 0)
    federation = cast(Federation, loop.runner)
    assert federation.weighed is not None
    assert (federation.weighed != federation.counts).any()
    _, record = federation.run_round(federation.start(loop.untrained))
    weights = fedpals(federation.weighed, TASK["target"]["mix"], 50.0)
    assert record.weights == pytest.approx(weights[record.answered], abs=1e-6)


def test_the_weight_limit_lowers_a_share() -> None:
    training = {**TASK["training"], "weight_limit": 0.1}
    record = fedskew.simulate(TASK, method="fedavg", training=training).rounds[1]
    free = fedskew.simulate(TASK, method="fedavg")
    share = shares_in(free)
    lowered = np.minimum([share[client] for client in record["answered"]], 0.1)
    assert record["weights"] == pytest.approx(lowered / lowered.sum(), abs=1e-9)
    assert set(record["limited"]) == {client for client, one in share.items() if one > 0.1}
