from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import CIFAR_LABELS, counts_of

from fedskew.partition import DirichletByClient


def test_counts_are_the_drawn_mix_by_largest_remainder_where_nothing_runs_out() -> None:
    sizes = (100, 37, 0, 1)
    draws = np.random.default_rng(5).dirichlet(np.full(10, 0.5), size=4)
    split = DirichletByClient(0.5, sizes=sizes).split(CIFAR_LABELS, 4, np.random.default_rng(5))
    for counts, size, mix in zip(counts_of(split, CIFAR_LABELS), sizes, draws, strict=True):
        expected = [int(size * p) for p in mix]
        by_remainder = sorted(range(10), key=lambda c: (-(size * mix[c] - expected[c]), c))
        for label in by_remainder[: size - sum(expected)]:
            expected[label] += 1
        np.testing.assert_array_equal(counts, expected)


def test_without_sizes_everybody_gets_the_same_number() -> None:
    split = DirichletByClient(0.1).split(CIFAR_LABELS[:49_999], 10, np.random.default_rng(0))
    assert [len(held) for held in split] == [4999] * 10


@pytest.mark.slow
def test_mixes_have_the_dirichlet_mean_and_variance() -> None:
    # Dir(beta, ..., beta) over C classes: mean 1/C, variance (1/C)(1 - 1/C) / (C beta + 1) = 0.09 / 6 at beta 0.5.
    sizes = (200,) * 2000
    labels = np.repeat(np.arange(10), 400_000)
    split = DirichletByClient(0.5, sizes=sizes).split(labels, 2000, np.random.default_rng(0))
    mixes = counts_of(split, labels) / 200
    np.testing.assert_allclose(mixes.mean(axis=0), 0.1, atol=0.01)
    np.testing.assert_allclose(mixes.var(axis=0), 0.09 / 6, rtol=0.15)


def test_where_a_class_runs_out_those_who_asked_are_cut_alike() -> None:
    # Everybody asks for 50 of each class; class 0 has 100 for four, so each gets 25 of it and 75 of class 1.
    labels = np.repeat([0, 1], [100, 300])
    split = DirichletByClient(1e9).split(labels, 4, np.random.default_rng(0))
    np.testing.assert_array_equal(counts_of(split, labels, 2), [[25, 75]] * 4)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    class_sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any),
    clients=st.integers(1, 7),
    beta=st.sampled_from([1e-6, 0.05, 0.5, 10.0]),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_sizes_are_met_exactly_whatever_is_left(class_sizes, clients, beta, seed, data) -> None:
    labels = np.repeat(np.arange(len(class_sizes)), class_sizes)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(labels)), min_size=clients, max_size=clients)))
    sizes = tuple(int(size) for size in np.diff([0, *cuts]))
    rule = DirichletByClient(beta, sizes=sizes)
    split = rule.split(labels, clients, np.random.default_rng(seed), num_classes=len(class_sizes))
    assert tuple(map(len, split)) == sizes
    assert len(np.unique(np.concatenate(split))) == sum(sizes)
