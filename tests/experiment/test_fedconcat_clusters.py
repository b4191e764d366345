"""FedConcat's clusters, and how it divides rounds."""

from __future__ import annotations

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.pipelines import INDEX, FedConcat


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# Three kinds of clients, whatever their sizes: mostly class 2, classes 0 and 1 alike, mostly class 3.
KINDS = np.array(
    [[0, 1, 9, 0], [5, 5, 0, 0], [0, 0, 0, 3], [1, 0, 40, 1], [0, 0, 5, 95], [60, 50, 0, 2], [0, 0, 1, 30]]
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_clients_of_one_kind_share_a_cluster_numbered_by_its_first_client(seed):
    assert FedConcat(3).divide(KINDS, rng(seed)).tolist() == [0, 1, 2, 0, 2, 1, 2]


def test_sizes_play_no_part():
    sizes = np.array([[1], [1000], [3], [7], [2], [500], [9]])
    assert FedConcat(3).divide(KINDS * sizes, rng()).tolist() == FedConcat(3).divide(KINDS, rng()).tolist()


def test_one_cluster_is_everybody_and_as_many_as_clients_are_one_each():
    assert FedConcat(1).divide(KINDS, rng()).tolist() == [0] * 7
    assert FedConcat(7).divide(KINDS, rng()).tolist() == list(range(7))


def test_a_client_without_samples_goes_to_the_most_even_centre_and_moves_none():
    # The centres' squared lengths: 1 for a single class, 1/2 for two halves.
    counts = np.array([[0, 0, 0], [4, 0, 0], [0, 3, 3], [9, 0, 0], [0, 2, 2], [0, 0, 0]])
    assert FedConcat(2).divide(counts, rng()).tolist() == [0, 1, 0, 1, 0, 0]


def test_it_is_a_local_optimum_of_k_means():
    counts = rng(1).integers(0, 50, (40, 6))
    shares = counts / counts.sum(axis=1, keepdims=True)
    found = FedConcat(4).divide(counts, rng())
    centres = np.stack([shares[found == cluster].mean(axis=0) for cluster in range(4)])
    distances = ((shares[:, None] - centres) ** 2).sum(axis=2)
    assert (distances.argmin(axis=1) == found).all()


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (KINDS[:2], "clusters: 3, but there are 2 clients, of whom 2 hold samples and 2 hold different label shares"),
        ([[1, 1], [2, 2], [0, 0], [3, 1]], "4 clients, of whom 3 hold samples and 2 .*; at most 2"),
    ],
)
def test_more_clusters_than_different_clients_are_refused(counts, says):
    with pytest.raises(ArgumentError, match=says):
        FedConcat(3).divide(counts, rng())


def test_counts_are_checked():
    with pytest.raises(ArgumentError, match="counts"):
        FedConcat(2).divide([[1, -1], [2, 3]], rng())


@pytest.mark.parametrize(("given", "rounds", "first"), [(None, 2, 1), (None, 5, 2), (None, 980, 490), (480, 980, 480)])
def test_encoders_have_half_the_rounds_or_what_they_are_given(given, rounds, first):
    assert FedConcat(encoder_rounds=given).split(rounds) == first


@pytest.mark.parametrize(("given", "rounds"), [(None, 0), (None, 1), (5, 5), (6, 5)])
def test_each_part_needs_a_round(given, rounds):
    with pytest.raises(ArgumentError, match="encoder_rounds: .* rounds; encoders need one at least, and the head one"):
        FedConcat(encoder_rounds=given).split(rounds)


@pytest.mark.parametrize("wrong", [{"clusters": 0}, {"encoder_rounds": 0}, {"batches": 0}, {"head": "warm"}])
def test_a_wrong_parameter_is_named(wrong):
    with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))}: input should be"):
        FedConcat(**wrong)


def test_the_index_names_it():
    assert {"fedconcat": FedConcat} == INDEX
