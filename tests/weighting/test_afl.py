"""AFL: the projection of its weights, and what it keeps between rounds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import local_end, round_end
from fedskew.errors import ArgumentError
from fedskew.weighting import AFL, Answered, afl_update
from programmes import minimum

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


def weights_of(sizes, ids, *state: float) -> list[float]:
    """Of those who answered; `state` are all clients' weights, of none as before the first round."""
    sizes = np.array(sizes, dtype=np.float64)
    kept = {WEIGHTS: torch.tensor(state, dtype=torch.float64)} if state else {}
    return AFL().weigh(Answered(sizes[:, None], sizes, ids=np.array(ids), state=kept)).tolist()


@pytest.mark.parametrize(
    ("sizes", "ids", "state", "expected"),
    [
        ([5, 90, 1], [3, 0, 2], [0.25] * 4, [1 / 3] * 3),
        ([5, 90, 0], [0, 1, 2], [], [0.5, 0.5, 0]),  # the first weights are uniform whatever the sizes
        ([9, 1], [3, 0], [0.1, 0.2, 0.3, 0.4], [0.8, 0.2]),  # those who answered share their lambda
        ([9, 0, 1], [3, 2, 0], [0.1, 0.2, 0.3, 0.4], [0.8, 0, 0.2]),  # without samples, whatever its lambda
        ([9, 1], [0, 2], [0.0, 1.0, 0.0], [0.5, 0.5]),  # where nobody has a lambda they count equally
        ([3], [0], [0.0, 1.0], [1.0]),  # a single participant is the model
    ],
)
def test_those_who_answered_share_their_lambda(sizes, ids, state, expected):
    assert weights_of(sizes, ids, *state) == pytest.approx(expected)


def test_nobody_with_samples_is_refused():
    with pytest.raises(ArgumentError, match="sizes: no client holds a sample"):
        weights_of([0, 0], [0, 1], 0.5, 0.5)


def after(state, ids, losses, clients, step_size=0.1):
    replies = [{LOSS: torch.tensor(loss)} for loss in losses]
    return AFL(step_size).end_round(state, round_end(replies, ids=np.array(ids), clients=clients))


def test_an_absent_client_s_loss_is_0_before_the_projection():
    # From (1/4, 1/4, 1/4, 1/4), 0.1 times (0, 3, 0, 1) added, and 0.4 / 4 taken off.
    state = AFL().init_server(torch.zeros(3), 4)
    assert state[WEIGHTS].tolist() == [0.25] * 4
    np.testing.assert_allclose(after(state, [3, 1], [1.0, 3.0], clients=4)[WEIGHTS], [0.15, 0.45, 0.15, 0.25])


def test_a_client_returns_its_loss_at_the_sent_model():
    kept, reply = AFL().end_local(local_end(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 0.0])))
    assert kept == {}
    assert reply[LOSS] == 5


def test_the_largest_loss_gains_weight_round_by_round_until_it_has_all():
    state, weights = AFL(step_size=0.05).init_server(torch.zeros(3), 3), []
    for _ in range(8):
        state = after(state, [0, 1, 2], [1.0, 2.0, 5.0], clients=3, step_size=0.05)
        weights.append(state[WEIGHTS].numpy())
    assert (np.diff([row[2] for row in weights]) >= 0).all()
    np.testing.assert_allclose(weights[-1], [0, 0, 1])
