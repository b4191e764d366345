"""Pairs of classes that clients hold together."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts, colocation, describe, unheld_classes

COUNTS = LabelCounts([[300, 4, 0, 0], [0, 250, 90, 0], [7, 0, 120, 0]], ["x", "y", "z"], ["cat", "dog", "fox", "owl"])


def test_colocation_by_hand() -> None:
    # cat and dog: min(300, 4) at x; cat and fox: min(7, 120) at z; dog and fox: min(250, 90) at y
    expected = [[307, 4, 7, 0], [4, 254, 90, 0], [7, 90, 210, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(colocation(COUNTS), expected)


def test_colocation_client_by_client() -> None:
    counts = np.random.default_rng(0).integers(0, 4, (70, 9)) * np.random.default_rng(1).integers(0, 2, (70, 9))
    expected = sum(np.minimum(row[:, None], row[None, :]) for row in counts)
    np.testing.assert_array_equal(colocation(counts), expected)


def test_colocation_of_wrong_counts_is_refused() -> None:
    with pytest.raises(ArgumentError, match="counts"):
        colocation([1, 2, 3])


def test_pairs_that_nobody_can_tell_apart_are_counted_and_named() -> None:
    report = describe(COUNTS)
    assert report.pairs.number == 3  # no owl anywhere
    assert report.pairs.under(10).tolist() == [[0, 1], [0, 2]]
    assert report.pairs.under(100).tolist() == [[0, 1], [0, 2], [1, 2]]
    (found,) = (text for text in report.sentences() if "told apart" in text)
    assert "2 of 3 pairs of classes have under 10 samples together" in found
    assert "3 under 100: cat and dog; cat and fox." in found
    assert "2 of 3 by under 10 samples, 3 by under 100" in str(report)
    plain = json.loads(json.dumps(report.to_dict()))["class_pairs"]
    assert (plain["pairs"], plain["under_10"], plain["under_100"]) == (3, 2, 3)
    assert plain["fewest"][0] == {"classes": ["cat", "dog"], "together": 4.0}


def test_nothing_is_said_of_pairs_where_all_are_held_together_or_there_is_one_client() -> None:
    assert "told apart" not in str(describe(np.full((5, 4), 30)))
    assert "told apart" not in str(describe([[300, 1]]))


def test_classes_of_a_target_that_nobody_holds_are_named_with_the_ceiling() -> None:
    target = [0.25, 0.25, 0.0, 0.5]
    assert unheld_classes(COUNTS, target).tolist() == [3]
    report = describe(COUNTS, target)
    assert report.target is not None
    assert report.target.unheld.tolist() == [3]
    assert report.target.ceiling == 0.5
    text = "No client holds class owl, 50% of the target: no method learns what nobody has, so expect at most 50.0%"
    assert any(sentence.startswith(text) for sentence in report.sentences())
    plain = report.to_dict()["target"]
    assert (plain["unheld"], plain["ceiling"]) == (["owl"], 0.5)
    assert "No client holds class owl, 50%" not in str(describe(COUNTS, [1, 1, 1, 0]))
