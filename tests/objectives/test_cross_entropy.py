from __future__ import annotations

import math

import pytest
import torch

from fedskew.errors import ArgumentError
from fedskew.objectives.functional import cross_entropy


def test_two_rows_worked_out_by_hand():
    # Row 1: probabilities 1/6, 2/6, 3/6, class 2: ln 2. Row 2: 1/2, 1/4, 1/4, class 1: ln 4.
    logits = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 1.0]], dtype=torch.float64).log()
    value = cross_entropy(logits, torch.tensor([2, 1]))
    assert value.item() == pytest.approx((math.log(2) + math.log(4)) / 2, abs=1e-15)


def test_it_is_pytorch_s_to_the_bit():
    logits, targets = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10
    assert torch.equal(cross_entropy(logits, targets), torch.nn.functional.cross_entropy(logits, targets))


def test_a_float32_mask_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"mask: expected one torch.bool for each row of logits, shape \(2,\)"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), mask=torch.ones(2))


@pytest.mark.parametrize(
    ("logits", "targets", "name"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), "logits"),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "logits"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), "logits"),
        ([[0.0, 1.0]], torch.zeros(1, dtype=torch.int64), "logits"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), "targets"),
        (torch.zeros(3, 2), torch.zeros(3), "targets"),
        (torch.zeros(3, 2), [0, 1, 0], "targets"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused_by_name(logits, targets, name):
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        cross_entropy(logits, targets)
