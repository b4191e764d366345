"""Numbers as integers: exact where they can be, within the stated bound elsewhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError
from fedskew.sums.fixed_point import COUNTS, NUMBERS, UPDATES, FixedPoint, add


def test_values_are_clipped_weighed_and_rounded_to_even() -> None:
    small = FixedPoint(32, 1, 3.0)  # halves
    # 0.25 and 0.75 are half way between two halves, and go to the even number of halves.
    assert small.encode([0.25, 0.75, -0.25, 1.5, 9.0, -9.0]).tolist() == [0, 2, 0, 3, 6, -6]
    assert small.encode([1.5, 9.0], weight=1 / 3).tolist() == [1, 2]
    assert UPDATES.encode([1.0, -8.5]).tolist() == [2**24, -(2**27)]
    assert NUMBERS.encode([1.0]).tolist() == [2**40]
    assert COUNTS.encode([[7, 0]]).tolist() == [[7, 0]]
    assert [one.encode([0.5]).dtype for one in (UPDATES, NUMBERS, COUNTS)] == [np.int32, np.int64, np.int64]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=9),
    seed=st.integers(0, 9),
    form=st.sampled_from([UPDATES, NUMBERS]),
)
def test_a_decoded_mean_is_within_its_bound(rows: list[list[float]], seed: int, form: FixedPoint) -> None:
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(rows)))
    whole = float(weights.sum())
    total = add(form.encode(row, weight) for row, weight in zip(rows, weights, strict=True))
    exact = weights @ np.clip(rows, -form.limit, form.limit) / whole
    assert np.abs(form.decode(total, whole) - exact).max() <= form.error(len(rows), whole) + 1e-14


def test_the_bounds_are_those_of_the_note() -> None:
    assert UPDATES.error(10) == pytest.approx(10 * 2**-25)  # 3e-7 at worst
    assert NUMBERS.error(100) == pytest.approx(100 * 2**-41)  # 5e-11 at worst
    assert (UPDATES.largest_weights, NUMBERS.largest_weights, COUNTS.largest_weights) == (15, 127, 2**23 - 1)


def test_nothing_overflows_up_to_the_largest_weights() -> None:
    for form in (UPDATES, NUMBERS, COUNTS):
        count = min(form.largest_weights, 127)
        total = add(form.encode([2 * form.limit, -2 * form.limit], form.largest_weights / count) for _ in range(count))
        assert form.decode(total, form.largest_weights) == pytest.approx([form.limit, -form.limit])


def test_a_sum_wraps_around_as_a_masked_one_does() -> None:
    high = np.array([2**31 - 1], dtype=np.int32)
    assert add([high, np.array([1], dtype=np.int32)]).tolist() == [-(2**31)]
    assert high.tolist() == [2**31 - 1]


def test_mistakes_are_said() -> None:
    for values in ([np.nan], [np.inf]):
        with pytest.raises(ArgumentError, match="values: must be finite"):
            UPDATES.encode(values)
    for weight in (-0.1, 16.0, np.nan):
        with pytest.raises(ArgumentError, match="weight: must be from 0 to 15"):
            UPDATES.encode([1.0], weight)
    with pytest.raises(ArgumentError, match="weight: must be above 0"):
        UPDATES.decode(np.array([1], dtype=np.int32), 0.0)
    with pytest.raises(ArgumentError, match="rows: there is none"):
        add([])
    with pytest.raises(ArgumentError, match=r"must be alike, not int32 \(1,\) and int64 \(1,\)"):
        add([np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)])
