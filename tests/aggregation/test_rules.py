"""Robust rules by numbers worked out by hand, and in whole rounds: parameters, buffers, records, every backend."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedskew
from common import Told, built, start, task, weights_by_client
from fedskew import methods
from fedskew.aggregation import INDEX, Mean
from fedskew.engine import Federation
from fedskew.errors import ArgumentError
from fedskew.experiment import resolve

GeometricMedian, Krum, Median, NormClipping, TrimmedMean = (
    INDEX[name] for name in ("geometric_median", "krum", "median", "norm_clipping", "trimmed_mean")
)
LIAR = 1e30


def total(rule, updates, weights=None) -> np.ndarray:
    """The change of the model: the weighted sum of what the rule returns."""
    rows = torch.tensor(updates, dtype=torch.float64)
    given = np.full(len(rows), 1 / len(rows)) if weights is None else np.array(weights)
    before = rows.clone(), given.copy()
    combined, shares = rule.combine(rows, given)
    assert torch.equal(rows, before[0])
    assert (given == before[1]).all()
    assert shares.sum() == pytest.approx(1)
    return (torch.from_numpy(shares) @ combined).numpy()


KRUM, KRUM_WEIGHTS = (0, 1, 1.5, 3, 100), (0.1, 0.2, 0.3, 0.1, 0.3)


@pytest.mark.parametrize(
    ("rule", "values", "weights", "expected"),
    [
        (Median(), (1, 2, 10), (0.2, 0.4, 0.4), 2),
        (Median(), (10, 1, 2), (0.4, 0.2, 0.4), 2),  # whatever the order
        (Median(), (1, 2, 10), (0.2, 0.3, 0.5), 6),  # exactly half below: the mean of both
        (Median(), (1, 2, 10), (0.2, 0.2, 0.6), 10),
        (Median(), (5,), (1.0,), 5),
        (Median(), (3, 9, 4, 8), None, 6),
        (Median(), (3, 9, 4, 8, LIAR), None, 8),
        (Median(), (1, 2, LIAR), (0.5, 0.5, 0.0), 1.5),  # no weight, no say
        (TrimmedMean(0.25), (100, 0, 8, 4), None, 6),
        # On a line: 1 on [0, .1], 2 on [.1, .3], 3 on [.3, .7], 100 on [.7, 1]; what lies in [.25, .75] is
        # .05 * 2 + .4 * 3 + .05 * 100 = 6.3, over .5.
        (TrimmedMean(0.25), (1, 2, 3, 100), (0.1, 0.2, 0.4, 0.3), 12.6),
        (TrimmedMean(0.0), (1, 2, 6), None, 3),
        (TrimmedMean(0.2), (7,), (1.0,), 7),
        (TrimmedMean(0.2), (-LIAR, 1, 2, 3, LIAR), None, 2),
        # n = 5, f = 1, so two neighbours each: 0: 1 + 2.25, 1: 0.25 + 1, 1.5: 0.25 + 2.25, 3: 2.25 + 4, 100: far.
        (Krum(), KRUM, KRUM_WEIGHTS, 1),
        (Krum(keep=2), KRUM, KRUM_WEIGHTS, (0.2 * 1 + 0.3 * 1.5) / 0.5),
        (Krum(keep=9), KRUM, KRUM_WEIGHTS, (0.2 + 0.3 * 1.5 + 0.1 * 3) / 0.7),  # all but one
        (Krum(keep=2), KRUM, (0.5, 0, 0, 0.5, 0), 1.25),  # no weight at all: equally
        (Krum(), (0, 1, 1.5, 3, LIAR), None, 1),
    ],
)
def test_rules_of_numbers_by_hand(rule, values, weights, expected):
    assert total(rule, [[value] for value in values], weights) == pytest.approx([expected])
    assert (Krum().least, Krum(malicious=3).least) == (5, 9)


@pytest.mark.parametrize(
    ("points", "weights", "median"),
    [
        ([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2]], None, [0.5, math.sqrt(3) / 6]),  # equal sides: the centre
        ([[0, 0], [4, 0], [3, 3], [0, 2]], None, [4 / 3, 4 / 3]),  # a convex quadrilateral: where its diagonals cross
        ([[1, 5], [4, 0], [3, 3]], [0.6, 0.2, 0.2], [1, 5]),  # more than half of the weight
        ([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2], [LIAR, 0]], [0.3, 0.3, 0.3, 0.1], None),
        ([[2, 2]], None, [2, 2]),
        ([[0, 0], [0, 0]], None, [0, 0]),
    ],
)
def test_the_weighted_geometric_median(points, weights, median):
    found = total(GeometricMedian(), points, weights)
    if median is None:  # it stays among the honest, pulled towards the liar no more than by its weight
        assert np.linalg.norm(found - [0.5, math.sqrt(3) / 6]) < 0.2
    else:
        assert found == pytest.approx(median, abs=1e-5)


def test_clipping_keeps_directions_and_bounds_lengths():
    updates = [[3, 4], [0, 1], [0, 0], [-6, 8]]  # norms 5, 1, 0, 10; the client without a step is left out
    assert total(NormClipping(), updates) == pytest.approx([(3 - 3) / 4, (4 + 1 + 4) / 4])
    assert total(NormClipping(bound=2.5), updates) == pytest.approx([(1.5 - 1.5) / 4, (2 + 1 + 2) / 4])
    assert total(NormClipping(quantile=0.0, bound=2.5), updates) == pytest.approx([0, (0.8 + 1 + 0.8) / 4])
    assert total(NormClipping(), [[LIAR], [1.0]]) == pytest.approx([1])  # of two, the shorter one is the bound
    long = torch.ones(2, 3)
    assert NormClipping(bound=100).combine(long, np.full(2, 0.5))[0] is long


def test_buffers_are_clipped_by_their_own_lengths_and_not_by_the_bound_of_parameters():
    changes = torch.tensor([[30.0], [40.0], [LIAR]])
    clipped, _ = NormClipping(bound=0.1).combine_buffers(changes, np.full(3, 1 / 3))
    assert clipped.flatten().tolist() == pytest.approx([30, 40, 40])


def test_the_mean_costs_nothing():
    updates, weights = torch.ones(2, 3), np.array([0.5, 0.5])
    combined = Mean().combine(updates, weights)
    assert (combined[0] is updates, combined[1] is weights) == (True, True)


@pytest.mark.parametrize("name", INDEX)
def test_wide_models_are_taken_part_by_part(name):
    rng = np.random.default_rng(0)
    updates = torch.from_numpy(rng.normal(size=(7, 70_000)))  # more than one part
    parts, shares = INDEX[name]().combine(updates, np.full(7, 1 / 7))
    if name in ("median", "trimmed_mean"):
        kept = np.sort(updates.numpy(), axis=0)
        middle = kept[3] if name == "median" else (kept[2:5].sum(axis=0) + 0.6 * (kept[1] + kept[5])) / 4.2
        np.testing.assert_allclose(parts[0].numpy(), middle, atol=1e-12)
    else:
        assert parts.shape == updates.shape
        assert shares.sum() == pytest.approx(1)


# Robust rules in whole rounds: parameters, buffers, records, what is refused, every backend, every weighting.


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
