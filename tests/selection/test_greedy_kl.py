from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.selection import FedEntOpt, GreedyKL

tables = st.integers(1, 4).flatmap(
    lambda classes: st.lists(st.lists(st.integers(0, 9), min_size=classes, max_size=classes), min_size=1, max_size=7)
)


def choose(selection, counts, size, **options) -> list[int]:
    cohort, _ = selection.select(selection.init(counts), counts, size, np.random.default_rng(0), **options)
    return cohort.tolist()


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(counts=tables, data=st.data())
def test_is_fedentopt_without_buffer_from_the_most_even_client(counts, data) -> None:
    size = data.draw(st.integers(1, len(counts)))
    cohort = choose(GreedyKL(), counts, size)
    assert cohort == choose(FedEntOpt(0), counts, size, first=cohort[0])


def test_the_first_client_is_the_nearest_to_uniform() -> None:
    # KL to uniform over 3 classes: (4, 1, 1) 0.33 bits, (2, 3, 2) 0.03, an empty client and (9, 0, 0) log2 3 = 1.58.
    assert choose(GreedyKL(), [[0, 0, 0], [9, 0, 0], [4, 1, 1], [2, 3, 2]], 1) == [3]


def test_normalised_every_client_counts_alike() -> None:
    # First (50, 50), even. Then raw: (50, 50) + (1, 0) is nearer to even than (50, 50) + (40, 60). Normalised:
    # (.5, .5) + (1, 0) = (1.5, .5) is further than (.5, .5) + (.4, .6) = (.9, 1.1).
    counts = [[50, 50], [1, 0], [40, 60]]
    assert choose(GreedyKL(), counts, 2) == [0, 1]
    assert choose(GreedyKL(normalise=True), counts, 2) == [0, 2]


def test_an_empty_client_changes_nothing_when_normalised() -> None:
    # (3, 1) first. With (0, 5) it is (.75, 1.25), more even than (.75, .25) with nobody.
    assert choose(GreedyKL(normalise=True), [[0, 0], [3, 1], [0, 5]], 3) == [1, 2, 0]
