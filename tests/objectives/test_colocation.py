"""Losses that compare only a client's own classes give a pair that no client holds together no gradient."""

from __future__ import annotations

import pytest
import torch

from fedskew.components import has
from fedskew.objectives import INDEX
from fedskew.objectives.functional import cross_entropy, fedlc, fedrs, fedvls_calibration
from losses import balanced_cross_entropy

A, B, C = 0, 1, 2


def pull_apart(loss, counts: list[int]) -> float:
    """How hard a client pulls the logits of A and B apart: the derivative by their difference, at equal logits.

    The batch is all of the client's samples.
    """
    classes = len(counts)
    targets = torch.repeat_interleave(torch.arange(classes), torch.tensor(counts))
    logits = torch.zeros(len(targets), classes, dtype=torch.float64, requires_grad=True)
    loss(logits, targets, torch.tensor(counts, dtype=torch.float64)).backward()
    assert logits.grad is not None
    of = logits.grad.sum(dim=0)
    return float((of[A] - of[B]) / 2)


def pushed_by_others(loss, counts: list[int]) -> float:
    """How hard the samples of A push the logit of B, which the client does not hold."""
    targets = torch.full((5,), A)
    logits = torch.zeros(5, len(counts), dtype=torch.float64, requires_grad=True)
    loss(logits, targets, torch.tensor(counts, dtype=torch.float64)).backward()
    assert logits.grad is not None
    return float(logits.grad[:, B].abs().sum())


RELYING = {"fedvls_calibration": fedvls_calibration, "fedlc": fedlc, "fedrod": balanced_cross_entropy}
OTHERS = {"cross_entropy": lambda logits, targets, counts: cross_entropy(logits, targets), "fedrs": fedrs}


@pytest.mark.parametrize("counts", [[40, 0, 0], [0, 40, 0]])
@pytest.mark.parametrize("name", RELYING)
def test_a_client_of_one_class_does_not_pull_a_pair_apart_by_a_calibrated_loss(name: str, counts: list[int]):
    assert abs(pull_apart(RELYING[name], counts)) < 1e-6


@pytest.mark.parametrize("counts", [[40, 0, 0], [0, 40, 0]])
@pytest.mark.parametrize("name", OTHERS)
def test_a_client_of_one_class_pulls_a_pair_apart_by_cross_entropy(name: str, counts: list[int]):
    # At equal logits cross-entropy's gradient is (1/3 - 1, 1/3): a difference of 1, halved; FedRS scales B's by alpha.
    assert abs(pull_apart(OTHERS[name], counts)) == pytest.approx(
        0.5 if name == "cross_entropy" else (2 / 3 + 1 / 6) / 2
    )


def test_a_client_with_a_third_class_does_not_either():
    # At equal logits the calibrated softmax is the client's prior, so that its samples' gradients add up to 0.
    assert abs(pull_apart(fedvls_calibration, [30, 0, 10])) < 1e-6
    # Cross-entropy: (1/3 - 3/4, 1/3), a difference of -3/4, halved.
    assert pull_apart(OTHERS["cross_entropy"], [30, 0, 10]) == pytest.approx(-3 / 8)


@pytest.mark.parametrize("name", [*RELYING, *OTHERS])
def test_samples_of_a_class_push_only_logits_that_the_loss_compares_with(name: str):
    loss = (RELYING | OTHERS)[name]
    pushed = pushed_by_others(loss, [30, 0, 10])
    assert pushed < 1e-6 if name in RELYING else pushed > 0.1


def test_a_client_that_holds_both_pulls_them_apart_by_a_calibrated_loss_too():
    targets = torch.full((5,), A)
    logits = torch.zeros(5, 3, dtype=torch.float64, requires_grad=True)
    fedvls_calibration(logits, targets, torch.tensor([30.0, 30.0, 0.0], dtype=torch.float64)).backward()
    assert logits.grad is not None
    assert logits.grad.sum(dim=0).tolist() == pytest.approx([-0.5, 0.5, 0.0], abs=1e-6)


def test_losses_declare_it():
    assert {name for name, kind in INDEX.items() if has(kind, "needs_colocation")} == set(RELYING)
