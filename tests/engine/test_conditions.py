"""What goes wrong: dropout after selection, stragglers, noisy label counts, a target that is told wrongly."""

import numpy as np
import pytest

import fedskew
from common import task
from fedskew.engine import Conditions
from fedskew.weighting import fedla

TASK = task(20, labels=2, rounds=3, participation=0.5, epochs=5, lr=0.1) | {"method": "fedentopt"}


def test_the_exact_rule_loses_the_share_rounded_down_and_never_everybody():
    for cohort, lost in ((10, 3), (3, 0), (4, 1), (1, 0)):
        assert Conditions(dropout=0.3).dropped(cohort, seed=0, round=1).sum() == lost
    assert Conditions(dropout=0.99).dropped(1, seed=0, round=1).sum() == 0


def test_who_vanishes_depends_on_seed_and_round_only():
    conditions = Conditions(dropout=0.3)
    draws = [tuple(conditions.dropped(10, seed, round)) for seed in range(3) for round in range(3)]
    assert draws[0] == tuple(conditions.dropped(10, 0, 0))
    assert len(set(draws)) > 5


def test_the_bernoulli_rule_loses_each_by_its_own_coin():
    conditions = Conditions(dropout=0.3, dropout_rule="bernoulli")
    lost = [conditions.dropped(10, 0, round).sum() for round in range(2000)]
    # binomial(10, 0.3): mean 3, standard deviation 1.45; the mean of 2000 lies within 0.1
    assert np.mean(lost) == pytest.approx(3, abs=0.1)
    assert np.std(lost) == pytest.approx(1.449, abs=0.1)


def test_stragglers_are_a_fixed_share_of_the_pool_with_epochs_drawn_once():
    epochs = Conditions(stragglers=0.5).epochs(100, 5, seed=3)
    assert np.array_equal(epochs, Conditions(stragglers=0.5).epochs(100, 5, seed=3))
    assert (epochs == 5).sum() >= 50
    assert set(epochs) == {1, 2, 3, 4, 5}
    assert (Conditions().epochs(100, 5, seed=3) == 5).all()


def test_a_run_records_who_dropped_and_weighs_those_who_answered():
    result = fedskew.simulate(TASK, conditions={"dropout": 0.3})
    for record in result.rounds[1:]:
        assert len(record["cohort"]) == 10
        assert len(record["dropped"]) == 3
        assert sorted(record["dropped"] + record["answered"]) == sorted(record["cohort"])
        sizes = result.runs[0].counts[record["answered"]].sum(axis=1)
        np.testing.assert_allclose(record["weights"], sizes / sizes.sum())


def test_a_round_in_which_nobody_answers_leaves_the_model_and_is_recorded():
    conditions = {"dropout": 0.9, "dropout_rule": "bernoulli"}
    training = TASK["training"] | {"participation": 0.1, "rounds": 10}
    result = fedskew.simulate(TASK, conditions=conditions, training=training)
    empty = [record["round"] for record in result.rounds[1:] if not record["answered"]]
    assert empty
    for round in empty:
        assert result.rounds[round]["evaluation"] == result.rounds[round - 1]["evaluation"]
        assert result.rounds[round]["weights"] == []


@pytest.mark.slow
def test_stragglers_take_fewer_steps():
    slow = fedskew.simulate(TASK, conditions={"stragglers": 1.0})
    fast = fedskew.simulate(TASK)
    assert sum(sum(record["steps"]) for record in slow.rounds) < 0.8 * sum(sum(r["steps"]) for r in fast.rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "steps_of"),
    [
        ({"epochs": 0.5}, lambda batches: -(-batches // 2)),
        ({"epochs": 0.01}, lambda batches: 1),
        ({"epochs": 1.25}, lambda batches: -(-5 * batches // 4)),
        ({"epochs": 2.0}, lambda batches: 2 * batches),
        ({"epochs": 1, "steps": 7}, lambda batches: 7),
        ({"epochs": 1, "steps": 100}, lambda batches: 100),
    ],
)
@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_a_fraction_of_an_epoch_or_a_number_of_steps_is_what_every_client_takes(training, steps_of, backend):
    training = TASK["training"] | {"rounds": 1, "participation": 0.25, "batch_size": 4} | training
    run = fedskew.simulate(TASK, training=training, engine={"backend": backend}).runs[0]
    sizes = run.counts.sum(axis=1)
    for record in run.rounds[1:]:
        assert record.steps == [steps_of(-(-sizes[client] // 4)) for client in record.answered]


def test_whole_epochs_written_as_a_fraction_are_the_same_run():
    whole, written = (
        fedskew.simulate(TASK, training=TASK["training"] | {"rounds": 1, "epochs": epochs}) for epochs in (2, 2.0)
    )
    assert whole.config == written.config
    assert whole.config.hash == written.config.hash


@pytest.mark.slow
def test_noisy_counts_choose_the_cohort_and_weights_stay_exact_unless_asked():
    told, all_told = {"count_epsilon": 0.1}, {"count_epsilon": 0.1, "count_use": "all"}
    exact, noisy, weighed = (
        fedskew.simulate(TASK, method="fedentopt+fedla", conditions=conditions) for conditions in ({}, told, all_told)
    )
    first, second, third = ([r["cohort"] for r in run.rounds] for run in (exact, noisy, weighed))
    assert first != second == third
    counts = exact.runs[0].counts
    np.testing.assert_allclose(noisy.rounds[1]["weights"], fedla(counts[noisy.rounds[1]["cohort"]]))
    assert noisy.rounds[1]["weights"] != weighed.rounds[1]["weights"]
    # Sizes stay exact: FedAvg's weights are the same under noise.
    averaged = fedskew.simulate(TASK, conditions=all_told).rounds[1]
    sizes = counts[averaged["answered"]].sum(axis=1)
    np.testing.assert_allclose(averaged["weights"], sizes / sizes.sum())


@pytest.mark.slow
def test_a_target_told_with_noise_is_measured_with_the_true_one():
    target = {"mix": [0.3, 0.1] + [0.075] * 8}
    true = fedskew.simulate(TASK, method="fedpals", target=target)
    told = fedskew.simulate(TASK, method="fedpals", target=target | {"noise": 0.5})
    assert told.rounds[0]["evaluation"] == true.rounds[0]["evaluation"]
    assert told.rounds[1]["weights"] != true.rounds[1]["weights"]
    assert told.rounds[1]["cohort"] == true.rounds[1]["cohort"]
