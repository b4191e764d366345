from __future__ import annotations

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.partition import INDEX, stratified

IID = INDEX["iid"]

LABELS = np.repeat(np.arange(10), 1000)


def test_sizes_differ_by_one_at_most_and_all_samples_are_dealt() -> None:
    split = IID().split(LABELS[:1003], 10, np.random.default_rng(0))
    assert [len(held) for held in split] == [101] * 3 + [100] * 7


def test_label_mixes_are_those_of_drawing_without_replacement() -> None:
    counts = np.array([np.bincount(LABELS[held]) for held in IID().split(LABELS, 20, np.random.default_rng(0))])
    deviation = np.sqrt(50 * 0.9 * (10_000 - 500) / 9_999)  # hypergeometric: 500 of 10,000, of which a tenth in a class
    assert counts.std() == pytest.approx(deviation, rel=0.15)
    assert abs(counts - 50).max() < 5 * deviation


def test_a_stratified_draw_has_every_class_by_its_share() -> None:
    labels = np.repeat([0, 1, 2], [70, 20, 10])
    for size in (1, 7, 10, 33, 100):
        drawn = stratified(labels, size, np.random.default_rng(size))
        counts, share = np.bincount(labels[drawn], minlength=3), np.array([0.7, 0.2, 0.1]) * size
        assert counts.sum() == len(set(drawn.tolist())) == size
        assert (abs(counts - share) < 1).all()
        assert (np.diff(drawn) > 0).all()
    for size in (0, 101):
        with pytest.raises(ArgumentError, match="rows: must be from 1 to the number of samples, 100"):
            stratified(labels, size, np.random.default_rng(0))
