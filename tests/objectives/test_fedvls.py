from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedskew.objectives.functional import (
    fedvls,
    fedvls_calibration,
    fedvls_distillation,
    fedvls_suppression,
)

COUNTS = ([200, 100, 40, 10, 0, 0], [1, 2, 3, 4, 5, 6], [0, 8, 1, 1, 1, 1], [0, 0, 5, 0, 0, 0])


def batch(counts, rows=9, seed=3):
    rng = np.random.default_rng(seed)
    targets = rng.choice(np.flatnonzero(counts), size=rows)
    return rng.normal(scale=2, size=(rows, 6)), targets, rng.normal(scale=2, size=(rows, 6))


def tensors(logits, targets, teacher, counts):
    return torch.tensor(logits), torch.tensor(targets), torch.tensor(teacher), torch.tensor(counts, dtype=torch.float64)


def log_zero(value):
    return math.log(value) if value > 0 else -math.inf


def calibration_by_formula(logits, targets, counts, eps):
    total = 0.0
    for row, y in zip(logits, targets, strict=True):
        shifted = [row[c] + log_zero(counts[c] / sum(counts) + eps) for c in range(6)]
        total += math.log(sum(math.exp(value) for value in shifted)) - shifted[y]
    return total / len(targets)


def distillation_by_formula(logits, teacher, counts):
    vacant = [c for c in range(6) if counts[c] == 0]
    total = 0.0
    for row, other in zip(logits, teacher, strict=True):
        q = {c: math.exp(row[c]) / sum(math.exp(row[o]) for o in vacant) for c in vacant}
        qg = {c: math.exp(other[c]) / sum(math.exp(other[o]) for o in vacant) for c in vacant}
        total += sum(qg[c] * math.log(qg[c] / q[c]) for c in vacant)
    return total / len(logits)


def official_by_formula(logits, targets, counts, eps):
    """The mask multiplies the exponent, so that a label's own entry counts as e^0."""
    total = 0.0
    for c in range(6):
        p = counts[c] / sum(counts)
        if p == 0:
            continue
        exponents = [
            (y != c) * (row[c] - math.log(p + eps) + math.log(1 / 6 + eps))
            for row, y in zip(logits, targets, strict=True)
        ]
        total += p * (math.log(sum(math.exp(value) for value in exponents)) - math.log(len(targets)))
    return total


def printed_by_formula(logits, targets, counts):
    total = 0.0
    for c in range(6):
        among = [math.exp(row[c]) for row, y in zip(logits, targets, strict=True) if y != c]
        if counts[c] > 0 and among:
            total += counts[c] / sum(counts) * math.log(sum(among) / len(targets))
    return total


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("eps", [1e-9, 1e-3, 0.0])
def test_the_formulas(counts, eps):
    logits, targets, teacher = batch(counts)
    f, y, g, n = tensors(logits, targets, teacher, counts)
    official = official_by_formula(logits, targets, counts, eps)
    printed = printed_by_formula(logits, targets, counts)
    distillation = distillation_by_formula(logits, teacher, counts)
    calibration = calibration_by_formula(logits, targets, counts, eps)
    assert fedvls_suppression(f, y, n, prior_eps=eps).item() == pytest.approx(official, abs=1e-12)
    assert fedvls_suppression(f, y, n, form="printed").item() == pytest.approx(printed, abs=1e-12)
    assert fedvls_distillation(f, g, n).item() == pytest.approx(distillation, abs=1e-12)
    assert fedvls_calibration(f, y, n, prior_eps=eps).item() == pytest.approx(calibration, abs=1e-12)
    whole = fedvls(f, y, g, n, prior_eps=eps)
    assert whole.item() == pytest.approx(calibration + 0.1 * distillation + 0.005 * official, abs=1e-12)
    whole = fedvls(f, y, g, n, distillation_weight=0.5, suppression_weight=1.0, form="printed", prior_eps=eps)
    assert whole.item() == pytest.approx(calibration + 0.5 * distillation + printed, abs=1e-12)


@pytest.mark.parametrize("counts", [[3.0, 2.0, 1.0, 4.0], [3.0, 0.0, 1.0, 4.0]], ids=["none", "one"])
def test_with_fewer_than_two_vacant_classes_there_is_nothing_to_distil(counts):
    logits = (1e3 * torch.randn(5, 4, generator=torch.Generator().manual_seed(4))).requires_grad_()
    value = fedvls_distillation(logits, logits.detach().flip(0), torch.tensor(counts))
    value.backward()
    assert value == 0
    assert (logits.grad == 0).all()


def test_the_printed_form_skips_a_class_to_which_every_row_belongs():
    counts, targets = torch.tensor([4.0, 4.0, 0.0]), torch.tensor([0, 0])
    logits = torch.tensor([[9.0, 1.0, 5.0], [7.0, 2.0, 6.0]], requires_grad=True)
    value = fedvls_suppression(logits, targets, counts, form="printed")
    value.backward()
    # Only class 1 is left: 1/2 ln((e + e^2) / 2).
    assert value.item() == pytest.approx(math.log((math.e + math.e**2) / 2) / 2, abs=1e-6)
    assert (logits.grad[:, [0, 2]] == 0).all()


@pytest.mark.parametrize("form", ["official", "printed"])
def test_a_single_class_client_has_nothing_to_suppress(form):
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(8)).requires_grad_()
    value = fedvls_suppression(logits, torch.full((4,), 1), torch.tensor([0.0, 4.0, 0.0]), form=form)
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-6)
    assert logits.grad.abs().max() < 1e-6


def test_the_official_form_is_bounded_below_and_the_printed_one_is_not():
    targets, counts = torch.tensor([0, 1]), torch.tensor([1.0, 1.0])
    low = torch.full((2, 2), -1e4)
    assert fedvls_suppression(low, targets, counts).item() == pytest.approx(-math.log(2), abs=1e-6)
    assert fedvls_suppression(low, targets, counts, form="printed").item() < -9e3


def vacant_share(form: str, weight: float) -> float:
    """The share of its own data that softmax regression predicts as one of two vacant classes after 500 steps."""
    counts = torch.tensor([200.0, 100.0, 40.0, 10.0, 0.0, 0.0])
    rng = np.random.default_rng(0)
    targets = np.repeat(np.arange(6), counts.long())
    angle = 2 * np.pi * targets / 6
    points = 5 * np.stack([np.cos(angle), np.sin(angle)], axis=1) + rng.normal(size=(len(targets), 2))
    inputs = torch.tensor(np.column_stack([points, np.ones(len(points))]), dtype=torch.float32)
    weights = torch.zeros(6, 3, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.01, momentum=0.9)
    for _ in range(500):
        logits, labels = inputs @ weights.T, torch.tensor(targets)
        loss = fedvls_calibration(logits, labels, counts)
        loss = loss + weight * fedvls_suppression(logits, labels, counts, form=form)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (inputs @ weights.T).argmax(dim=1).ge(4).float().mean().item()


@pytest.mark.slow
def test_at_weight_1_the_printed_form_makes_the_client_predict_classes_that_it_lacks():
    assert vacant_share("printed", 1.0) > 0.4
    assert vacant_share("official", 0.005) == 0
