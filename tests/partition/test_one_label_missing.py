from __future__ import annotations

import numpy as np
import pytest
from splits import counts_of, dealt

from fedskew.partition import INDEX

OneLabelMissing = INDEX["one_label_missing"]

# Sketch and cartoon of PACS, 5,683 pictures by label (FedPALS).
PACS = np.repeat(np.arange(7), [1050, 1084, 996, 672, 1033, 333, 515])


def test_pacs_is_divided_as_in_the_authors_code() -> None:
    # Labels 3 to 6: 2,553 samples, 851 each. Client 0 has half of labels 0 and 1 (525 + 542), of its 1,918 a tenth;
    # client 1 half of 0 and 2 (525 + 498); client 2 half of 1 and 2 (542 + 498).
    counts = dealt(OneLabelMissing(), 3, PACS)
    assert counts.sum(axis=1).tolist() == [191, 1874, 1891]
    assert counts[1, :3].tolist() == [525, 0, 498]
    assert counts[2, :3].tolist() == [0, 542, 498]
    assert counts[0, 2] == 0


def test_the_small_client_keeps_a_uniform_draw_of_what_it_had() -> None:
    rng = np.random.default_rng(0)
    mean = np.mean([counts_of(OneLabelMissing().split(PACS, 3, rng), PACS, 7)[0] for _ in range(100)], axis=0)
    thirds = np.array([672, 1033, 333, 515]) / 3
    expected = np.array([525, 542, 0, *thirds]) * 191 / 1918
    np.testing.assert_allclose(mean, expected, atol=2.2)  # four standard errors of a mean of 100


def test_the_other_labels_are_pooled_and_dealt() -> None:
    rng = np.random.default_rng(0)
    draws = np.stack([counts_of(OneLabelMissing(1.0).split(PACS, 3, rng), PACS, 7) for _ in range(60)])
    np.testing.assert_array_equal(draws.sum(axis=1), np.bincount(PACS)[None].repeat(60, axis=0))
    np.testing.assert_array_equal(draws[:, :, 3:].sum(axis=2), 851)
    np.testing.assert_allclose(draws[:, :, 4].mean(axis=0), 1033 / 3, atol=8)
    # Hypergeometric: 851 of 2,553 drawn, 1,033 of them of this label.
    assert draws[:, 0, 4].var() == pytest.approx(851 * (1033 / 2553) * (1520 / 2553) * (1702 / 2552), rel=0.6)


def test_any_number_of_clients_up_to_the_labels() -> None:
    labels = np.repeat(np.arange(4), 30)
    counts = dealt(OneLabelMissing(1.0), 4, labels)
    np.testing.assert_array_equal(counts, 10 * (1 - np.fliplr(np.eye(4, dtype=int))))
