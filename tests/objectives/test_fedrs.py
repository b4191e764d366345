from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedskew.objectives.functional import cross_entropy, fedrs


@pytest.mark.parametrize("counts", [[4, 0, 8, 1], [3, 3, 3, 3], [0, 0, 0, 9]])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("graded", [False, True])
def test_the_formula(counts, alpha, graded):
    rng = np.random.default_rng(5)
    logits, targets = rng.normal(size=(6, 4)), rng.choice(np.flatnonzero(counts), size=6)
    total = 0.0
    for row, y in zip(logits, targets, strict=True):
        scale = [alpha + (1 - alpha) * n / max(counts) if graded else (1 if n > 0 else alpha) for n in counts]
        scaled = [s * f for s, f in zip(scale, row, strict=True)]
        total += math.log(sum(math.exp(value) for value in scaled)) - scaled[y]
    value = fedrs(torch.tensor(logits), torch.tensor(targets), torch.tensor(counts, dtype=torch.float64), alpha, graded)
    assert value.item() == pytest.approx(total / 6, abs=1e-12)


def test_at_alpha_1_it_is_cross_entropy_and_at_alpha_0_a_missing_class_still_counts():
    logits, targets = torch.tensor([[2.0, 5.0, -1.0]]), torch.tensor([0])
    counts = torch.tensor([1.0, 0.0, 7.0])
    torch.testing.assert_close(fedrs(logits, targets, counts, alpha=1.0), cross_entropy(logits, targets))
    with_zero = cross_entropy(torch.tensor([[2.0, 0.0, -1.0]]), targets)
    torch.testing.assert_close(fedrs(logits, targets, counts, alpha=0.0), with_zero)
