from __future__ import annotations

import numpy as np
import pytest
from splits import CIFAR_LABELS, counts_of, dealt

from fedskew.partition import Sparsity


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("seed", range(5))
def test_every_pair_of_client_and_label_gets_the_largest_equal_number(k: int, seed: int) -> None:
    labels = np.repeat(np.arange(10), np.arange(500, 1500, 100))
    counts = counts_of(Sparsity(k).split(labels, 10, np.random.default_rng(seed)), labels)
    holders = (counts > 0).sum(axis=0)
    assert np.all((counts > 0).sum(axis=1) == k)
    (quota,) = np.unique(counts[counts > 0])
    assert quota == min(size // held for size, held in zip(np.arange(500, 1500, 100), holders, strict=True) if held)


@pytest.mark.slow
def test_labels_are_drawn_uniformly_for_the_target_too() -> None:
    holds = np.zeros((4, 10))
    for seed in range(600):
        split = Sparsity(3).split(CIFAR_LABELS[::50], 4, np.random.default_rng(seed))
        holds += counts_of(split, CIFAR_LABELS[::50]) > 0
    # Each label with chance 0.3: 180 of 600, standard deviation 11.
    np.testing.assert_allclose(holds, 180, atol=45)


def test_all_labels_for_all_is_an_even_split() -> None:
    counts = dealt(Sparsity(10), 10)
    np.testing.assert_array_equal(counts, 500)


@pytest.mark.slow
def test_a_target_is_drawn_again_only_where_a_label_of_it_has_no_holder() -> None:
    again = 0
    for seed in range(60):
        plain, covered = (
            counts_of(rule.split(CIFAR_LABELS, 5, np.random.default_rng(seed)), CIFAR_LABELS) > 0
            for rule in (Sparsity(3), Sparsity(3, covered=True))
        )
        held = plain[:-1].any(axis=0)
        np.testing.assert_array_equal(plain[:-1], covered[:-1])
        assert covered[-1].sum() == 3
        assert not (covered[-1] & ~held).any()
        if not (plain[-1] & ~held).any():
            np.testing.assert_array_equal(plain[-1], covered[-1])
        again += (plain[-1] & ~held).any()
    # A label has no holder with chance 0.7^4 = 0.24: well over a quarter of all targets have such a label.
    assert 15 < again < 45
