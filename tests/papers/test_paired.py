"""Differences from FedAvg, paired by seed."""

from __future__ import annotations

import pytest
from scipy.stats import ttest_rel

from fedskew.papers import paired


def test_a_difference_is_of_the_same_task_and_seed_with_students_interval():
    ours, theirs = {0: 5.0, 1: 8.0, 2: 9.0, 3: 4.0}, {0: 4.0, 1: 6.0, 2: 10.0, 7: 1.0}
    lines = [
        ({"dataset": "A", "method": "FedAvg"}, theirs),
        ({"dataset": "A", "method": "FedLA"}, ours),
        ({"dataset": "B", "method": "FedLA"}, ours),
    ]
    (found,) = paired(lines)  # B has no FedAvg
    assert found.labels == {"dataset": "A", "method": "FedLA"}
    assert found.differences == (1.0, 2.0, -1.0)
    assert found.ahead == 2
    interval = ttest_rel([5.0, 8.0, 9.0], [4.0, 6.0, 10.0]).confidence_interval(0.95)
    assert found.interval == pytest.approx((interval.low, interval.high))


def test_seeds_of_one_federation_count_once():
    def line(federation: str, method: str, values: dict[int, float]):
        return {"method": method, "federation": federation}, values

    (found,) = paired(
        [
            line("0", "FedAvg", {0: 1.0, 1: 3.0}),
            line("1", "FedAvg", {0: 5.0}),
            line("0", "FedVLS", {0: 2.0, 1: 6.0}),
            line("1", "FedVLS", {0: 4.0, 1: 9.0}),
        ]
    )
    assert found.labels == {"method": "FedVLS"}
    assert found.differences == (2.0, -1.0)


def test_seeds_of_the_only_federation_count_each():
    one = {"dataset": "A", "federation": "0"}
    (found,) = paired(
        [({**one, "method": "FedAvg"}, {0: 1.0, 1: 3.0}), ({**one, "method": "FedVLS"}, {0: 2.0, 1: 7.0})]
    )
    assert found.differences == (1.0, 4.0)
    assert found.interval is not None


def test_a_single_difference_has_no_interval():
    (found,) = paired([({"method": "FedAvg"}, {0: 1.0}), ({"method": "FedVLS"}, {0: 1.5})])
    assert (found.mean, found.interval) == (0.5, None)
