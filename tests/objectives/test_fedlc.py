from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedskew.errors import ArgumentError
from fedskew.objectives.functional import cross_entropy, fedlc


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


def test_one_row_worked_out_by_hand():
    # Margins 16^-1/4 = 1/2 and 1^-1/4 = 1, class 2 missing: logits 0.5 and 1 become equal, so the loss is ln 2.
    value = fedlc(torch.tensor([[0.5, 1.0, 9.0]]), torch.tensor([0]), torch.tensor([16.0, 1.0, 0.0]))
    assert value.item() == pytest.approx(math.log(2), abs=1e-7)


def test_a_missing_class_gets_no_gradient_and_changes_nothing():
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    counts, targets = torch.tensor([3.0, 0.0, 8.0, 1.0]), torch.tensor([0, 2, 3, 2, 0])
    value = fedlc(logits, targets, counts)
    value.backward()
    assert (logits.grad[:, 1] == 0).all()
    without = fedlc(logits[:, [0, 2, 3]], torch.tensor([0, 1, 2, 1, 0]), counts[[0, 2, 3]])
    torch.testing.assert_close(value, without)


def test_tau_zero_with_all_classes_is_cross_entropy():
    logits, targets = torch.randn(6, 3, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 2, 1, 0])
    torch.testing.assert_close(
        fedlc(logits, targets, torch.tensor([5.0, 1.0, 90.0]), tau=0), cross_entropy(logits, targets)
    )


def test_equal_counts_are_cross_entropy_for_any_tau():
    logits, targets = torch.randn(6, 3, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 2, 1, 0])
    torch.testing.assert_close(fedlc(logits, targets, torch.full((3,), 7.0), tau=4), cross_entropy(logits, targets))


def test_with_the_target_excluded_a_single_class_client_has_nothing_to_learn():
    logits = torch.tensor([[1.0, 2.0, 3.0, -1.0]] * 3, requires_grad=True)
    value = fedlc(logits, torch.full((3,), 2), torch.tensor([0.0, 0.0, 3.0, 0.0]), exclude_target=True)
    value.backward()
    assert value == 0
    assert (logits.grad == 0).all()


def test_with_the_target_excluded_the_loss_has_no_lower_bound():
    logits = torch.tensor([[1e4, 0.0]])
    assert fedlc(logits, torch.tensor([0]), torch.tensor([1.0, 1.0]), exclude_target=True) == -1e4


@pytest.mark.parametrize("counts", [torch.ones(3), torch.ones(4, dtype=torch.float64), torch.ones(2, 4), [1, 1, 1, 1]])
def test_counts_of_another_shape_or_dtype_are_refused_by_name(counts):
    with pytest.raises(ArgumentError, match=r"^counts: expected one client's counts, shape \(4,\) and dtype"):
        fedlc(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), counts)


@pytest.mark.parametrize("tau", [-1.0, math.nan, math.inf])
def test_a_senseless_tau_is_refused_by_name(tau):
    with pytest.raises(ArgumentError, match=r"^tau: input should be (greater than or equal to 0|a finite number)"):
        fedlc(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), torch.ones(2), tau=tau)
