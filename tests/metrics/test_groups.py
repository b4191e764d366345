from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError
from fedskew.metrics import class_groups


def test_client_0_of_fedvls_table_7() -> None:
    # The paper: 5, 8, 9 majority, 3 minority, the rest vacant.
    groups = class_groups([0, 0, 0, 141, 0, 1471, 0, 0, 1360, 366])
    assert groups.majority.tolist() == [5, 8, 9]
    assert groups.minority.tolist() == [3]
    assert groups.vacant.tolist() == [0, 1, 2, 4, 6, 7]


def test_exactly_the_mean_is_a_minority() -> None:
    groups = class_groups(np.full(4, 7))
    assert groups.minority.tolist() == [0, 1, 2, 3]
    assert len(groups.majority) == len(groups.vacant) == 0


def test_an_empty_client_holds_none_of_any_class() -> None:
    assert class_groups(np.zeros(3)).vacant.tolist() == [0, 1, 2]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_every_class_is_in_one_group(counts) -> None:
    groups = class_groups(counts)
    assert sorted(np.concatenate(groups)) == list(range(len(counts)))
    assert all(group.dtype == np.int64 for group in groups)
    mean = sum(counts) / len(counts)
    assert groups.majority.tolist() == [c for c, n in enumerate(counts) if n > mean]
    assert groups.vacant.tolist() == [c for c, n in enumerate(counts) if n == 0]


@pytest.mark.parametrize("counts", [[[1, 2]], [], [1, -1], [1.0, float("nan")]])
def test_refuses_what_are_no_counts_of_one_client(counts) -> None:
    with pytest.raises(ArgumentError, match="counts"):
        class_groups(counts)
