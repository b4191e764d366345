"""Robust rules in whole rounds: parameters, buffers, records, what is refused, every backend, every weighting."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedskew
from common import Told, built, start, task, weights_by_client
from fedskew import methods
from fedskew.aggregation import INDEX
from fedskew.engine import Federation
from fedskew.errors import ArgumentError
from fedskew.experiment import resolve

MOVES = {0: [1.0, 2.0], 1: [2.0, 1.0], 2: [1.5, 1.5], 3: [1.0, 1.0], 4: [2.0, 2.0], 5: [1.2, 1.8]}
AFL = {"afl.loss": torch.tensor(0.5)}
ROBUST = [name for name in INDEX if name != "mean"]


def play(aggregation, moves=MOVES, weighting="uniform", counts=None, target=None, **options):
    """The moves of parameters, and of buffers, which move 100 times as far, in one round, and its record."""
    told = Told(moves, buffers=lambda client, move: 100 * move, also=lambda client: {"reply": AFL})
    counts = np.full((6, 2), 5.0) if counts is None else counts
    method = built(weighting=weighting, aggregation=aggregation)
    one = Federation(method, told, counts, target, 1.0, seed=0, **options)
    begun = start(one, buffers=(1000.0, 2000.0))
    state, record = one.run_round(begun)
    parameters, buffers = (one - other for one, other in zip(state.model[:2], begun.model[:2], strict=True))
    return parameters.tolist(), buffers.tolist(), record


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("liar", [[-40.0, -40.0], [1e30, 0.0]])
def test_one_liar_of_six_moves_neither_parameters_nor_buffers_out_of_bounds(name, liar):
    parameters, buffers, _ = play(name, {**MOVES, 5: liar})
    low = 0.5 if name == "norm_clipping" else 0.9  # which bounds how far a client pulls, not where
    assert all(low <= move <= 2.1 for move in parameters)
    assert all(100 * low <= move <= 210 for move in buffers)
    assert not 0.9 <= play("mean", {**MOVES, 5: liar})[0][0] <= 2.1


def test_the_mean_is_the_default_and_is_in_the_config_but_changes_no_folders_name():
    assert methods.expand({})["aggregation"] == {"name": "mean"}
    asked = ("fedavg", {"aggregation": "mean"}, {"aggregation": "median"})
    plain, named, other = (resolve(task(2, rounds=1) | {"method": method}).hash for method in asked)
    assert plain == named != other


def test_the_record_says_what_counted():
    assert sorted(play("krum")[2].weights) == [0, 0, 0, 0, 0, 1]
    assert play("median")[2].weights == pytest.approx([1 / 6] * 6)
    assert weights_by_client(play("geometric_median", {**MOVES, 5: [1e30, 0.0]})[2])[5] < 1e-20


def test_a_round_with_too_few_replies_leaves_the_model_and_says_so():
    parameters, _, record = play({"name": "krum", "malicious": 1}, {client: MOVES[client] for client in range(4)})
    assert parameters == [0, 0]
    assert record.unmoved == "krum needs 5 clients, and has 4"
    assert (record.weights, sorted(record.answered)) == ([], [0, 1, 2, 3])
    assert record.to_dict()["unmoved"] == record.unmoved
    assert "unmoved" not in play("krum")[2].to_dict()


def test_a_cohort_that_is_always_too_small_is_refused_before_the_run():
    with pytest.raises(ArgumentError, match=r"^aggregation: krum needs 9 clients, and has 6; .*participation"):
        play({"name": "krum", "malicious": 3})


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("weighting", ["fedavg", "uniform", "fedla", "fedpals", "afl"])
def test_every_rule_goes_with_every_weighting(name, weighting):
    counts = np.array([[4.0, 2], [6, 0], [0, 6], [1, 5], [3, 3], [5, 1]])
    parameters, _, record = play(name, weighting=weighting, counts=counts, target=np.array([0.5, 0.5]))
    assert all(0.9 <= move <= 2.1 for move in parameters)
    assert sum(record.weights) == pytest.approx(1)


def test_fednova_and_fedexp_go_with_rules_that_keep_updates_apart():
    for preset in ("fednova+geometric_median", "fednova+krum", "fedexp+norm_clipping", "fedexp+krum"):
        assert methods.check(built(preset)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["geometric_median", "trimmed_mean"])
def test_every_backend_aggregates_alike(name, tmp_path):
    tree = task(6, beta=0.5, width=8, rounds=2, batch_size=32, lr=0.05) | {"method": {"aggregation": name}}
    models = {}
    for backend in ("sequential", "processes", "cohort"):
        engine = {"backend": backend} | ({"processes": 2} if backend == "processes" else {})
        fedskew.simulate(tree, engine=engine, out=tmp_path / backend)
        (file,) = (tmp_path / backend).glob("*/model.safetensors")
        models[backend] = torch.cat([part.flatten() for part in load_file(file).values()])
    assert torch.equal(models["sequential"], models["processes"])
    torch.testing.assert_close(models["cohort"], models["sequential"], atol=1e-4, rtol=1e-3)


def test_the_weight_limit_holds_whatever_the_weighting_and_the_record_says_whom_it_binds():
    counts = np.array([[1e12, 1e12], [3, 0], [1, 0], [1, 0], [0, 5], [0, 5]])
    for weighting in ("fedavg", "fedla"):
        record = play("mean", weighting=weighting, counts=counts, weight_limit=0.5)[2]
        weights = weights_by_client(record)
        assert weights[0] == pytest.approx(0.5)
        assert record.limited == [0]
        assert record.to_dict()["limited"] == [0]
    assert weights[4] == pytest.approx(weights[5])
    free = play("mean", weighting="fedavg", counts=counts)[2]
    assert max(free.weights) > 0.999
    assert "limited" not in free.to_dict()


def test_the_record_names_only_those_whose_weight_the_limit_lowered():
    two = np.array([[5.0, 0], [0, 5.0], [0, 0], [0, 0], [0, 0], [0, 0]])
    alone = np.where(np.arange(6)[:, None] == 3, 5.0, 0.0) * [1.0, 1.0]
    for counts, weighting in ((two, "fedavg"), (alone, "fedavg"), (two, "fedpals"), (alone, "fedpals")):
        record = play("mean", weighting=weighting, counts=counts, target=np.array([0.5, 0.5]), weight_limit=0.5)[2]
        assert max(record.weights) >= 0.5
        assert record.limited is None
    for limit, counts in ((0.5, two), (0.3, two)):  # 0.3: two can't keep to it, and count alike
        record = play("mean", weighting="fedpals", counts=counts, target=np.array([0.9, 0.1]), weight_limit=limit)[2]
        assert sorted(record.weights)[-2:] == pytest.approx([0.5, 0.5])
        assert record.limited == [0]
