"""Every weighting by label counts: by hand, what holds for all, what is refused; limits; and FedDisco's cases."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import built, feddisco, local_end, round_end
from fedskew import methods
from fedskew.components import has
from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts
from fedskew.mixing import limited
from fedskew.weighting import (
    AFL,
    INDEX,
    Answered,
    FedAvg,
    FedDisco,
    Uniform,
    afl_update,
    fedavg,
    fedla,
    fedpals,
    uniform,
)
from programmes import minimum

FedLA = INDEX["fedla"]
LN2 = math.log(2)
L2 = 0.7 - 0.3 / math.sqrt(2)
# FedPALS of S = (1, 0), (0, 1), n = 10, 30, T = (1/2, 1/2), lambda = 12, a = (t, 1 - t):
# 2 (t - 1/2)^2 + 1.2 t^2 + 0.4 (1 - t)^2 has its least at 4 (t - 1/2) + 2.4 t - 0.8 (1 - t) = 0, t = 2.8 / 7.2.
TWO = [7 / 18, 11 / 18]
THREE = [[30, 10, 0], [0, 0, 8], [1, 2, 5]]
# Mixes (1, 0), (1/2, 1/2), (3/4, 1/4): KL to uniform ln 2, 0, and 3/4 ln(3/2) + 1/4 ln(1/2); shares 2/8, 2/8, 4/8.
THIRD = 0.75 * math.log(1.5) - 0.25 * LN2
FAR = np.array([0.0, 0.35, 0.6 - 0.5 * THIRD / (LN2 + THIRD)])  # the first is 0.35 - 0.5 * 0.842, below 0
# T = (1/2, 1/2, 1/3000): KL are ln 2, and 0.499 ln 0.998 + 0.001 ln 3 for the client with one stray sample.
STRAY = 0.499 * math.log(0.998) + 0.001 * math.log(3)


@pytest.mark.parametrize(
    ("weigh", "counts", "options", "weights"),
    [
        (fedavg, [[3, 0], [0, 1], [0, 0]], {}, [0.75, 0.25, 0]),
        (fedavg, [[3, 0], [0, 1]], {"sizes": [1, 1]}, [0.5, 0.5]),
        (uniform, [[9, 0], [0, 1], [0, 0]], {}, [0.5, 0.5, 0]),
        # FedLA's table 1: W = (1/5 + 1/2, 3/5 + 1/2 + 3/5, 1/5 + 2/5) over 3 labels.
        (fedla, [[1, 1, 0], [3, 1, 3], [1, 0, 2]], {}, [7 / 30, 17 / 30, 6 / 30]),
        (fedla, [[5, 0, 2]], {}, [1]),
        (fedla, [[1, 0], [0, 999]], {}, [0.5, 0.5]),  # who alone holds a label has it, even with one sample
        (feddisco, [[2, 0], [1, 1], [3, 1]], {}, FAR / FAR.sum()),
        # ||(1, 0) - (1/2, 1/2)|| = 1 / sqrt 2, not divided by a sum: 1/2 - 0.3 / sqrt 2 + 0.2 and 1/2 + 0.2.
        (feddisco, [[2, 0], [1, 1]], {"a": 0.3, "b": 0.2, "distance": "l2"}, [L2 / (L2 + 0.7), 0.7 / (L2 + 0.7)]),
        (
            feddisco,
            [[1000, 0, 0], [500, 499, 1]],
            {"target": [0.5, 0.5, 0]},
            [(0.6 - 0.5 * LN2 / (LN2 + STRAY)) / 0.7, (0.6 - 0.5 * STRAY / (LN2 + STRAY)) / 0.7],
        ),
        (feddisco, [[4, 0], [0, 12]], {"a": 9.0}, [0.25, 0.75]),  # where all would be 0 (both d are 1/2): FedAvg's
        (feddisco, [[3, 0]], {"a": 5.0, "b": 0.0}, [1]),
        (feddisco, [[1, 1], [3, 3]], {}, [0.35 / 1.2, 0.85 / 1.2]),  # all like the target: FedAvg with a bonus
        (feddisco, [[0, 0], [2, 2]], {}, [0, 1]),
        (feddisco, [[0, 0], [2.5, 1.5]], {"sizes": [7, 4]}, [0, 1]),  # noisy counts, clamped to 0, and exact sizes
        (feddisco, [[3.5, 3.5], [8, 8]], {"sizes": [40, 10]}, [0.9 / 1.2, 0.3 / 1.2]),
        (fedpals, [[10, 0], [0, 30]], {"target": [1, 1], "strength": 12}, TWO),
        (fedpals, [[0.5, 0], [0, 2.5]], {"target": [1, 1], "strength": 12, "sizes": [10, 30]}, TWO),
        (fedpals, [[1, 0], [0, 1], [0, 0]], {"target": [1, 1], "strength": 12, "sizes": [10, 0, 5]}, [1, 0, 0]),
        # Class 0 is held by the first three: any split of 1/2 among these fits; by sizes, 1 : 2 : 5, is worth most.
        (fedpals, [[10, 0], [20, 0], [50, 0], [0, 7]], {"target": [1, 1]}, [1 / 16, 2 / 16, 5 / 16, 1 / 2]),
        *((fedpals, THREE, {"target": [1, 1, 1], "strength": one}, fedavg(THREE)) for one in (1e12, 1e18, math.inf)),
        *((fedpals, [[3, 4]], {"target": [1, 0], "strength": one}, [1]) for one in (0.0, 1e-12, 1.0, 1e12, math.inf)),
        *((fedpals, [[3], [1]], {"target": [1], "strength": one}, [0.75, 0.25]) for one in (0.0, 1.0, 1e12, math.inf)),
        *(
            (fedpals, np.full((4, 3), 2.0), {"target": [0, 0, 1], "strength": one}, [1 / 4] * 4)
            for one in (0.0, 1e-12, 1.0, 1e12, math.inf)
        ),
        # A class each: the nearest point to the target with no weight above the limit, the rest raised alike.
        (fedpals, np.eye(3), {"target": [0.6, 0.3, 0.1], "limit": 0.5}, [0.5, 0.35, 0.15]),
        (fedpals, np.eye(3), {"target": [0.5, 0.5, 0.0], "limit": 0.4}, [0.4, 0.4, 0.2]),
        # Both fit; under the limit the larger one can't take its share of the samples.
        (fedpals, [[90, 90], [5, 5], [5, 5]], {"target": [1, 1], "limit": 0.6}, [0.6, 0.2, 0.2]),
        (fedpals, np.eye(3), {"target": [1, 0, 0], "limit": 0.2}, [1 / 3] * 3),  # too few: equal
        (fedpals, [[9, 1], [1, 4]], {"target": [1, 1], "strength": math.inf, "limit": 0.55}, [0.55, 0.45]),
    ],
)  # fmt: skip
def test_worked_out_by_hand(weigh, counts, options, weights) -> None:
    np.testing.assert_allclose(weigh(counts, **options), weights, rtol=1e-9, atol=1e-12)


AIMED = [
    *((feddisco, {"distance": distance}) for distance in ("kl", "l2")),
    *((fedpals, {"strength": strength}) for strength in (0.0, 0.01, 10.0)),
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([(fedavg, {}), (fedla, {}), (uniform, {}), (feddisco, {}), *AIMED]))
def test_weights_are_shares_that_follow_their_clients_and_have_no_scale(seed: int, way) -> None:
    weigh, options = way
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, (rng.integers(1, 9), rng.integers(1, 6))) * 10.0 ** rng.integers(0, 6)
    counts[0, 0] += 1
    if options:
        options = options | {"target": rng.integers(0, 3, counts.shape[1]) + np.eye(counts.shape[1])[0]}
    scaled = {key: value * 8 if key == "strength" else value for key, value in options.items()}
    weights, close = weigh(counts, **options), {"rtol": 1e-12, "atol": 1e-8 if weigh is fedpals else 1e-12}
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    assert (weights[counts.sum(axis=1) == 0] == 0).all()
    order = rng.permutation(len(counts))
    np.testing.assert_allclose(weigh(counts[order], **options), weights[order], **close)
    np.testing.assert_allclose(weigh(LabelCounts(8 * counts), **scaled), weights, **close)
    alike = np.outer(rng.integers(1, 100, 6), rng.integers(0, 5, 4) + np.eye(4)[0])  # one mix: FedAvg's
    np.testing.assert_allclose(fedla(alike), fedavg(alike), rtol=1e-13)


TO_HALVES, TO_ONES = partial(feddisco, target=[1, 1]), partial(fedpals, target=[1, 1])


@pytest.mark.parametrize("weigh", [fedavg, fedla, uniform, feddisco, TO_ONES])
@pytest.mark.parametrize(
    ("counts", "message"), [(np.zeros((2, 2)), "no client holds a sample"), ([[1, -2]], "not negative")]
)
def test_what_is_no_federation_is_refused(weigh, counts, message) -> None:
    with pytest.raises(ArgumentError, match=f"^counts.*{message}"):
        weigh(counts)


@pytest.mark.parametrize(
    ("weigh", "options", "message"),
    [
        (fedavg, {"sizes": [1, 2]}, "sizes: must have the shape"),
        (fedavg, {"sizes": [0]}, "sizes: no client holds a sample"),
        (fedpals, {"target": [1, 2, 3]}, "target"),
        (fedpals, {"target": [0, 0]}, "target"),
        *((TO_ONES, {"strength": wrong}, "strength") for wrong in (-1, math.nan, "1")),
        (TO_ONES, {"sizes": [1, 2]}, "sizes"),
        *((TO_ONES, {"limit": wrong}, "limit: must be above 0 and at most 1") for wrong in (0, 1.5, -1, "a", math.nan)),
    ],
)
def test_wrong_arguments_are_named(weigh, options, message) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        weigh([[1, 2]], **options)


def test_components_weigh_those_who_answered() -> None:
    # Noisy counts, exact sizes: FedAvg and Uniform go by the sizes, FedLA by the counts.
    answered = Answered(np.array([[1.5, 0.0], [0.5, 4.0]]), np.array([10.0, 30.0]))
    for kind, weights in ((FedAvg, [0.25, 0.75]), (Uniform, [0.5, 0.5]), (FedLA, [0.375, 0.625])):
        np.testing.assert_allclose(kind().weigh(answered), weights)
        assert not has(kind, "needs_target")


# FedDisco towards a target.


@pytest.mark.parametrize("share", [0.0, 1e-300, 1e-9, 1e-4])
def test_stray_samples_and_tiny_shares_of_the_target_change_little(share: float) -> None:
    for second in ([500, 500, 0], [500, 499, 1]):
        found = feddisco([[1000, 0, 0], second], target=[0.5, 0.5, share])
        np.testing.assert_allclose(found, [0.1 / 0.7, 0.6 / 0.7], atol=1e-3)


def test_it_reads_the_target_only_where_it_is_told_to_and_favours_who_holds_it() -> None:
    first, second, third = feddisco([[9, 1], [1, 9], [5, 5]], target=[9, 1])
    assert first > third > second
    first, second, third = feddisco([[9, 1], [1, 9], [5, 5]])
    assert third > first == pytest.approx(second, rel=1e-12)
    like, half, other = feddisco([[5, 5, 0], [5, 0, 5], [0, 0, 10]], target=[0.5, 0.5, 0])
    assert like > half > other
    counts = np.array([[9.0, 1.0], [1.0, 9.0]])
    given = Answered(counts, counts.sum(axis=1), np.array([0.9, 0.1]))
    assert FedDisco().weigh(given)[0] == 0.5
    assert FedDisco(target=True).weigh(given)[0] > 0.8
    assert (has(FedDisco(), "needs_target"), has(FedDisco(target=True), "needs_target")) == (False, True)
    with pytest.raises(ArgumentError, match="target: FedDisco is to compare"):
        FedDisco(target=True).weigh(given._replace(target=None))


def test_towards_a_target_it_conflicts_with_even_cohorts() -> None:
    reads = {"weighting": {"name": "feddisco", "target": True}}
    assert any("the goals conflict" in warning for warning in methods.check(built("fedentopt", **reads)))
    assert methods.check(built("fedentopt+feddisco")) == []


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


# AFL: the projection of its weights, and what it keeps between rounds.


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
