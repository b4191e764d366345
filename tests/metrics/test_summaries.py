from __future__ import annotations

import pytest

from fedskew.errors import ArgumentError
from fedskew.metrics import best_by_validation, final, highest, last10_mean

CURVE = [0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7]


def test_each_summary_of_a_curve() -> None:
    assert final(CURVE) == 0.7
    assert last10_mean(CURVE) == pytest.approx(4.7 / 10)
    assert highest(CURVE) == 0.9


def test_a_short_curve_is_averaged_whole() -> None:
    assert last10_mean([0.2, 0.4]) == pytest.approx(0.3)


def test_validation_chooses_the_first_of_the_best() -> None:
    assert best_by_validation([0.1, 0.5, 0.5, 0.4]) == 1


@pytest.mark.parametrize("summary", [final, last10_mean, highest, best_by_validation])
@pytest.mark.parametrize("curve", [[], [0.1, float("nan")], [[0.1]]])
def test_refuses_what_is_no_curve(summary, curve) -> None:
    with pytest.raises(ArgumentError, match=r"(curve|validation): must be at least one number"):
        summary(curve)
