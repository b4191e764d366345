"""FedAvg's, equal, and FedLA's weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.components import has
from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts
from fedskew.weighting import INDEX, Answered, FedAvg, Uniform, fedavg, fedla, uniform

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
