"""FedAvg's, equal, and FedLA's weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.components import has
from fedskew.errors import ArgumentError
from fedskew.hooks import LocalEnd, RoundEnd
from fedskew.labels import LabelCounts
from fedskew.mixing import limited
from fedskew.weighting import AFL, INDEX, Answered, FedAvg, Uniform, afl_update, fedavg, fedla, uniform
from programmes import minimum

FedLA = INDEX["fedla"]

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def test_fedavg_weighs_by_samples() -> None:
    assert fedavg([[3, 0], [0, 1], [0, 0]]).tolist() == [0.75, 0.25, 0]
    assert fedavg([[3, 0], [0, 1]], sizes=[1, 1]).tolist() == [0.5, 0.5]


def test_uniform_weighs_everybody_with_samples_alike() -> None:
    assert uniform([[9, 0], [0, 1], [0, 0]]).tolist() == [0.5, 0.5, 0]


def test_fedla_gives_its_papers_table_one() -> None:
    # Its three clients: W = (1/5 + 1/2, 3/5 + 1/2 + 3/5, 1/5 + 2/5) over 3 labels = 7/30, 17/30, 6/30.
    weights = fedla([[1, 1, 0], [3, 1, 3], [1, 0, 2]])
    np.testing.assert_allclose(weights, [7 / 30, 17 / 30, 6 / 30], rtol=1e-15)


def test_fedla_with_one_participant_is_fedavg() -> None:
    assert fedla([[5, 0, 2]]).tolist() == fedavg([[5, 0, 2]]).tolist() == [1]


def test_fedla_gives_a_label_to_who_alone_holds_it_even_with_one_sample() -> None:
    # W(0) = 1 (label 0 alone), W(1) = 1 (label 1 alone)
    assert fedla([[1, 0], [0, 999]]).tolist() == [0.5, 0.5]


@QUICK
@given(st.integers(0, 10**6))
def test_fedla_of_proportional_histograms_is_fedavg(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = np.outer(rng.integers(1, 100, 6), rng.integers(0, 5, 4) + np.eye(4)[0])
    np.testing.assert_allclose(fedla(counts), fedavg(counts), rtol=1e-13)


@QUICK
@given(st.integers(0, 10**6), st.sampled_from([fedavg, fedla, uniform]))
def test_weights_are_shares_that_follow_their_clients(seed: int, weigh: object) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 3, (rng.integers(1, 9), rng.integers(1, 6))) * 10.0 ** rng.integers(0, 6)
    counts[0, 0] += 1
    weights = weigh(counts)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    assert (weights[counts.sum(axis=1) == 0] == 0).all()
    order = rng.permutation(len(counts))
    np.testing.assert_allclose(weigh(counts[order]), weights[order], rtol=1e-12)
    np.testing.assert_allclose(weigh(LabelCounts(3 * counts)), weights, rtol=1e-12)


@pytest.mark.parametrize("weigh", [fedavg, fedla, uniform])
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.zeros((2, 2)), "no client holds a sample"),
        ([1, 2], "shape"),
        ([[1, -2]], "not negative"),
        ([[np.nan, 1]], "is nan"),
        (np.zeros((0, 2)), "there is no client"),
    ],
)
def test_weights_refuse_what_is_no_federation(weigh: object, counts: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"counts: .*{message}|counts.*{message}"):
        weigh(counts)


def test_fedavg_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="sizes: must have the shape"):
        fedavg([[1, 2]], sizes=[1, 2])
    with pytest.raises(ArgumentError, match="sizes: no client holds a sample"):
        fedavg([[1, 2]], sizes=[0])


def test_components_weigh_those_who_answered() -> None:
    # Noisy counts, exact sizes: FedAvg and Uniform go by the sizes, FedLA by the counts.
    answered = Answered(np.array([[1.5, 0.0], [0.5, 4.0]]), np.array([10.0, 30.0]))
    assert FedAvg().weigh(answered).tolist() == [0.25, 0.75]
    assert Uniform().weigh(answered).tolist() == [0.5, 0.5]
    np.testing.assert_allclose(FedLA().weigh(answered), [0.375, 0.625])
    assert not any(has(kind, "needs_target") for kind in (FedAvg, Uniform, FedLA))


# An upper limit on a client's weight.


@pytest.mark.parametrize(
    ("weights", "limit", "sizes", "found"),
    [
        ([0.8, 0.15, 0.05], 0.5, [8, 1, 1], [0.5, 0.375, 0.125]),  # the other half, three to one
        ([0.7, 0.25, 0.05], 0.4, [8, 1, 1], [0.4, 0.4, 0.2]),  # 0.6 * 5 / 6 = 0.5 is cut too
        ([0.3, 0.3, 0.4], 0.4, [1, 1, 1], [0.3, 0.3, 0.4]),
        ([1.0, 0.0, 0.0, 0.0], 0.4, [1, 1, 1, 0], [0.4, 0.3, 0.3, 0.0]),  # nobody else has weight; one has no sample
        ([0.9, 0.1, 0.0], 0.45, [1, 1, 1], [0.45, 0.45, 0.1]),
        ([0.9, 0.1], 0.3, [1, 1], [0.5, 0.5]),  # can't hold
        ([0.9, 0.1, 0.0], 0.3, [1, 1, 0], [0.5, 0.5, 0.0]),
        ([1.0], 0.5, [1], [1.0]),
        ([1 - 1e-12, 1e-12, 0.0], 0.5, [1e12, 1, 0], [0.5, 0.5, 0.0]),
        ([0.6, 0.4], 1.0, [1, 1], [0.6, 0.4]),
    ],
)
def test_what_is_cut_goes_to_the_others_by_their_weights(weights, limit, sizes, found):
    assert limited(weights, limit, sizes) == pytest.approx(found)


def test_any_weights_end_within_the_limit_and_keep_their_order():
    rng = np.random.default_rng(0)
    for _ in range(300):
        clients = int(rng.integers(1, 12))
        weights, limit = rng.dirichlet(np.full(clients, 0.3)), float(rng.uniform(0.02, 1))
        found = limited(weights, limit, np.ones(clients))
        assert found.sum() == pytest.approx(1)
        assert found.max() <= max(limit, 1 / clients) * (1 + 1e-9)
        assert (np.diff(found[np.argsort(weights)]) >= -1e-12).all()


@pytest.mark.parametrize("limit", [0, -1, 1.5, float("nan")])
def test_a_limit_is_a_share(limit):
    with pytest.raises(ArgumentError, match="limit: must be above 0 and at most 1"):
        limited([1.0], limit, [1])


WEIGHTS, LOSS = "afl.weights", "afl.loss"  # as in checkpoints


@pytest.mark.parametrize(
    ("weights", "losses", "expected"),
    [
        # Half of (0.4, 0, 0) added: (0.7, 0.3, 0.2), too much by 0.2, which is taken off in equal parts.
        ([0.5, 0.3, 0.2], [0.4, 0.0, 0.0], [0.7 - 0.2 / 3, 0.3 - 0.2 / 3, 0.2 - 0.2 / 3]),
        # (0.5, 0.5, 1): in equal parts the first two keep 1/6, the third 2/3.
        ([0.5, 0.5, 0.0], [0.0, 0.0, 2.0], [1 / 6, 1 / 6, 2 / 3]),
        # (0.6, 0.4, 5): the first two fall to 0.
        ([0.6, 0.4, 0.0], [0.0, 0.0, 10.0], [0, 0, 1]),
        # The same loss everywhere changes nothing.
        ([0.6, 0.4, 0.0], [3.0, 3.0, 3.0], [0.6, 0.4, 0.0]),
        ([1.0], [7.0], [1.0]),
    ],
)
def test_worked_out_by_hand_at_step_size_one_half(weights, losses, expected):
    np.testing.assert_allclose(afl_update(weights, losses, 0.5), expected, atol=1e-15)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(0, 10_000), st.floats(0, 3))
def test_it_is_the_nearest_point_of_the_simplex(clients, seed, step_size):
    rng = np.random.default_rng(seed)
    weights, losses = rng.dirichlet(np.full(clients, 0.3)), rng.normal(size=clients)
    found = afl_update(weights, losses, step_size)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert (found >= 0).all()
    np.testing.assert_allclose(found, minimum(np.eye(clients), -weights - step_size * losses), atol=1e-6)


def test_enormous_losses_do_not_blur_it():
    np.testing.assert_allclose(afl_update([0.5, 0.5, 0.0], [1e12, 1e12 + 1, -1e12], 0.5), [0.25, 0.75, 0], atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "losses", "step_size", "says"),
    [
        ([0.5, 0.5], [1.0], 0.1, "losses: expected"),
        ([0.5, 0.5], [1.0, math.nan], 0.1, "losses: expected a finite number"),
        ([[1.0]], [1.0], 0.1, "weights: expected a finite number"),
        ([], [], 0.1, "weights: expected a finite number"),
        ([1.5, -0.5], [1.0, 1.0], 0.1, "weights: none may be negative"),
        ([0.5, 0.4], [1.0, 1.0], 0.1, "sum must be 1, got sum 0.9"),
        ([1.0], [1.0], -1.0, "step_size: must be 0 or above"),
        ([1.0], [1.0], math.inf, "step_size: must be 0 or above"),
    ],
)
def test_senseless_arguments_are_refused_by_name(weights, losses, step_size, says):
    with pytest.raises(ArgumentError, match=says):
        afl_update(weights, losses, step_size)


def answered(sizes, ids, state) -> Answered:
    sizes = np.array(sizes, dtype=np.float64)
    return Answered(sizes[:, None], sizes, ids=np.array(ids), state=state)


def after(state, ids, losses, clients, step_size=0.1):
    replies = [{LOSS: torch.tensor(loss)} for loss in losses]
    none = torch.zeros(0)
    end = RoundEnd(none, none, none, np.array(ids), np.ones(len(ids)), replies, clients)
    return AFL(step_size).end_round(state, end)


def test_the_first_weights_are_uniform_whatever_the_sizes():
    state = AFL().init_server(torch.zeros(3), 4)
    assert AFL().weigh(answered([5, 90, 1], [3, 0, 2], state)).tolist() == pytest.approx([1 / 3] * 3)
    assert AFL().weigh(answered([5, 90, 0], [0, 1, 2], {})).tolist() == [0.5, 0.5, 0]


def test_an_absent_client_s_loss_is_0_before_the_projection():
    # From (1/4, 1/4, 1/4, 1/4), 0.1 times (0, 3, 0, 1) added, and 0.4 / 4 taken off.
    state = after(AFL().init_server(torch.zeros(3), 4), [3, 1], [1.0, 3.0], clients=4)
    np.testing.assert_allclose(state[WEIGHTS], [0.15, 0.45, 0.15, 0.25])


def test_those_who_answered_share_their_lambda():
    state = {WEIGHTS: torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)}
    assert AFL().weigh(answered([9, 1], [3, 0], state)).tolist() == pytest.approx([0.8, 0.2])
    # A client without samples has nothing to say, whatever its lambda.
    assert AFL().weigh(answered([9, 0, 1], [3, 2, 0], state)).tolist() == pytest.approx([0.8, 0, 0.2])


def test_where_nobody_has_a_lambda_they_count_equally():
    state = {WEIGHTS: torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)}
    assert AFL().weigh(answered([9, 1], [0, 2], state)).tolist() == [0.5, 0.5]


def test_a_single_participant_is_the_model():
    state = {WEIGHTS: torch.tensor([0.0, 1.0], dtype=torch.float64)}
    assert AFL().weigh(answered([3], [0], state)).tolist() == [1.0]


def test_nobody_with_samples_is_refused():
    with pytest.raises(ArgumentError, match="sizes: no client holds a sample"):
        AFL().weigh(answered([0, 0], [0, 1], AFL().init_server(torch.zeros(3), 2)))


def test_a_client_returns_its_loss_at_the_sent_model():
    start, parameters = torch.tensor([2.0, 3.0]), torch.tensor([0.0, 0.0])
    end = LocalEnd(start, parameters, start, 4, 0.1, 0.0, {}, {}, {}, lambda at: at, lambda at: at.sum())
    kept, reply = AFL().end_local(end)
    assert kept == {}
    assert reply[LOSS] == 5


def test_the_largest_loss_gains_weight_round_by_round_until_it_has_all():
    state, weights = AFL(step_size=0.05).init_server(torch.zeros(3), 3), []
    for _ in range(8):
        state = after(state, [0, 1, 2], [1.0, 2.0, 5.0], clients=3, step_size=0.05)
        weights.append(state[WEIGHTS].numpy())
    assert (np.diff([row[2] for row in weights]) >= 0).all()
    np.testing.assert_allclose(weights[-1], [0, 0, 1])
