from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedskew.objectives.functional import fedlc


def by_formula(logits, targets, counts, tau, exclude_target):
    """Methods 2.6, in loops: -(f_y - tau n_y^-1/4) + log of the sum over the observed classes, with or without y."""
    total = 0.0
    for row, y in zip(logits, targets, strict=True):
        calibrated = {c: row[c] - tau * counts[c] ** -0.25 for c in range(len(counts)) if counts[c] > 0}
        among = [g for c, g in calibrated.items() if not (exclude_target and c == y)]
        if among:
            total += math.log(sum(math.exp(g) for g in among)) - calibrated[y]
    return total / len(targets)


@pytest.mark.parametrize("exclude_target", [False, True])
@pytest.mark.parametrize("counts", [[16, 81, 1, 0, 0, 5], [1, 2, 3, 4, 5, 6], [0, 0, 9, 0, 0, 0]])
@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_the_formula(counts, tau, exclude_target):
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(8, 6))
    targets = rng.choice(np.flatnonzero(counts), size=8)
    value = fedlc(
        torch.tensor(logits), torch.tensor(targets), torch.tensor(counts, dtype=torch.float64), tau, exclude_target
    )
    assert value.item() == pytest.approx(by_formula(logits, targets, counts, tau, exclude_target), abs=1e-12)


def test_a_missing_class_gets_no_gradient_and_changes_nothing():
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    counts, targets = torch.tensor([3.0, 0.0, 8.0, 1.0]), torch.tensor([0, 2, 3, 2, 0])
    value = fedlc(logits, targets, counts)
    value.backward()
    assert (logits.grad[:, 1] == 0).all()
    without = fedlc(logits[:, [0, 2, 3]], torch.tensor([0, 1, 2, 1, 0]), counts[[0, 2, 3]])
    torch.testing.assert_close(value, without)


def test_with_the_target_excluded_a_single_class_client_has_nothing_to_learn():
    logits = torch.tensor([[1.0, 2.0, 3.0, -1.0]] * 3, requires_grad=True)
    value = fedlc(logits, torch.full((3,), 2), torch.tensor([0.0, 0.0, 3.0, 0.0]), exclude_target=True)
    value.backward()
    assert value == 0
    assert (logits.grad == 0).all()
