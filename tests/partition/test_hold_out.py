"""A share of one client's samples that it does not train on."""

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.partition import hold_out

LABELS = np.repeat([0, 1, 2], [40, 9, 1])
ROWS = np.arange(50)


def test_every_sample_is_on_one_side_and_every_class_has_its_share_up_to_one():
    kept, held = hold_out(ROWS, LABELS, 0.2, np.random.default_rng(0))
    assert sorted([*kept, *held]) == ROWS.tolist()
    assert (np.diff(kept) > 0).all()
    assert (np.diff(held) > 0).all()
    assert (np.abs(np.bincount(LABELS[held], minlength=3) - [8, 1.8, 0.2]) < 1).all()


def test_every_sample_is_held_out_equally_often_also_of_a_class_of_one():
    # Standard error of a share of 2000 draws: sqrt(.2 * .8 / 2000) = .009.
    held = [hold_out(ROWS, LABELS, 0.2, np.random.default_rng(seed))[1] for seed in range(2000)]
    times = np.bincount(np.concatenate(held), minlength=50) / 2000
    assert np.abs(times - 0.2).max() < 0.04


@pytest.mark.parametrize("samples", [0, 1, 2])
def test_one_sample_at_least_stays(samples):
    for seed in range(20):
        kept, held = hold_out(ROWS[:samples], LABELS, 0.9, np.random.default_rng(seed))
        assert len(kept) + len(held) == samples
        assert len(kept) >= min(samples, 1)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_one_sample_of_every_class_stays_where_that_is_asked_for(share):
    for seed in range(20):
        kept, held = hold_out(ROWS, LABELS, share, np.random.default_rng(seed), every_class=True)
        assert sorted([*kept, *held]) == ROWS.tolist()
        assert set(LABELS[kept]) == {0, 1, 2}
        assert abs(np.bincount(LABELS[held], minlength=3)[0] - 40 * share) < 1 + (share == 0.95)
    assert [part.tolist() for part in hold_out(ROWS[:0], LABELS, 0.3, np.random.default_rng(0), True)] == [[], []]


def test_a_share_out_of_range_is_refused():
    with pytest.raises(ArgumentError, match="share: must be from 0 to below 1, not 1.0"):
        hold_out(ROWS, LABELS, 1.0, np.random.default_rng(0))
