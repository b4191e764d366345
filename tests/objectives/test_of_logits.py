from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedskew.components import has
from fedskew.objectives import INDEX
from fedskew.objectives.functional import (
    cross_entropy,
    decoupled_distillation,
    distillation,
    fedlc,
    fedrs,
    fedvls_calibration,
    label_masking_distillation,
    not_true_distillation,
)
from losses import balanced_cross_entropy


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


def test_with_the_target_excluded_a_single_class_client_has_nothing_to_learn():
    logits = torch.tensor([[1.0, 2.0, 3.0, -1.0]] * 3, requires_grad=True)
    value = fedlc(logits, torch.full((3,), 2), torch.tensor([0.0, 0.0, 3.0, 0.0]), exclude_target=True)
    value.backward()
    assert value == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("counts", [[4, 0, 8, 1], [3, 3, 3, 3], [0, 0, 0, 9]])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("graded", [False, True])
def test_the_formula_of_fedrs(counts, alpha, graded):
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


# Losses that compare only a client's own classes give a pair that no client holds together no gradient.

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


# FedKD, FedEKD, FedNTD, FedLMD and FedDKD, which share their pieces and are known by what relates them.

RNG = np.random.default_rng(11)
LOGITS = torch.tensor(RNG.normal(scale=2, size=(7, 6)))
TEACHER = torch.tensor(RNG.normal(scale=2, size=(7, 6)))
TARGETS = torch.tensor(RNG.integers(6, size=7))
COUNTS = torch.tensor([90.0, 1.0, 60.0, 0.0, 4.0, 0.0], dtype=torch.float64)

temperatures = pytest.mark.parametrize("temperature", [1.0, 3.0, 0.5])


def softmax(row, among, temperature):
    total = sum(math.exp(row[c] / temperature) for c in among)
    return {c: math.exp(row[c] / temperature) / total for c in among}


def divergence(p, q):
    return sum(share * math.log(share / q[c]) for c, share in p.items())


def rows():
    return zip(LOGITS.tolist(), TEACHER.tolist(), TARGETS.tolist(), strict=True)


@temperatures
def test_distillation_is_pytorch_s_kl_div_times_the_squared_temperature(temperature):
    log_student, teacher = (LOGITS / temperature).log_softmax(1), (TEACHER / temperature).softmax(1)
    peer = temperature**2 * F.kl_div(log_student, teacher, reduction="batchmean")
    torch.testing.assert_close(distillation(LOGITS, TEACHER, temperature), peer)


@temperatures
def test_classes_are_ids_or_a_mask_and_distil_as_if_the_others_were_sliced_away(temperature):
    ids = torch.tensor([4, 0, 2])
    sliced = distillation(LOGITS[:, ids], TEACHER[:, ids], temperature)
    mask = torch.tensor([True, False, True, False, True, False])
    torch.testing.assert_close(distillation(LOGITS, TEACHER, temperature, classes=ids), sliced)
    torch.testing.assert_close(distillation(LOGITS, TEACHER, temperature, classes=mask), sliced)


@pytest.mark.parametrize("classes", [torch.tensor([], dtype=torch.int64), torch.tensor([3]), torch.zeros(6).bool()])
def test_one_class_or_none_leaves_nothing_to_distil(classes):
    logits = LOGITS.clone().requires_grad_()
    value = distillation(logits, TEACHER, classes=classes)
    value.backward()
    assert value == 0
    assert (logits.grad == 0).all()


@temperatures
def test_not_true_distillation_by_its_formula(temperature):
    total = 0.0
    for student, teacher, y in rows():
        among = [c for c in range(6) if c != y]
        total += divergence(softmax(teacher, among, temperature), softmax(student, among, temperature))
    value = not_true_distillation(LOGITS, TARGETS, TEACHER, temperature)
    assert value.item() == pytest.approx(temperature**2 * total / 7, abs=1e-12)


@temperatures
def test_label_masking_distillation_by_its_formula(temperature):
    # The mean count is 155 / 6 = 25.8, so the majority is {0, 2}.
    total = 0.0
    for student, teacher, y in rows():
        q = softmax(student, [c for c in range(6) if c != y], temperature)
        total += divergence(softmax(teacher, [c for c in (1, 3, 4, 5) if c != y], temperature), q)
    value = label_masking_distillation(LOGITS, TARGETS, TEACHER, COUNTS, temperature)
    assert value.item() == pytest.approx(temperature**2 * total / 7, abs=1e-12)


def test_a_class_with_exactly_the_mean_count_is_no_majority():
    equal = torch.full((6,), 5.0, dtype=torch.float64)
    torch.testing.assert_close(
        label_masking_distillation(LOGITS, TARGETS, TEACHER, equal), not_true_distillation(LOGITS, TARGETS, TEACHER)
    )


def test_label_masking_with_no_class_left_for_the_teacher_is_nothing():
    # Majority {0, 1} and true class 2: nothing is left. True class 0 leaves class 2.
    counts = torch.tensor([9.0, 9.0, 1.0])
    logits = torch.zeros(1, 3, requires_grad=True)
    value = label_masking_distillation(logits, torch.tensor([2]), torch.ones(1, 3), counts)
    value.backward()
    assert value == 0
    assert (logits.grad == 0).all()
    value = label_masking_distillation(logits, torch.tensor([0]), torch.ones(1, 3), counts)
    assert value.item() == pytest.approx(math.log(2), abs=1e-6)


@temperatures
def test_decoupled_distillation_by_its_formula(temperature):
    target = rest = 0.0
    for student, teacher, y in rows():
        among = [c for c in range(6) if c != y]
        p, pg = softmax(student, range(6), temperature)[y], softmax(teacher, range(6), temperature)[y]
        target += divergence({0: pg, 1: 1 - pg}, {0: p, 1: 1 - p})
        rest += divergence(softmax(teacher, among, temperature), softmax(student, among, temperature))
    value = decoupled_distillation(LOGITS, TARGETS, TEACHER, temperature, target_weight=2.0, rest_weight=8.0)
    assert value.item() == pytest.approx(temperature**2 * (2 * target + 8 * rest) / 7, abs=1e-12)


def test_with_a_single_class_there_is_nothing_to_distil():
    one = torch.zeros(3, 1, requires_grad=True)
    targets = torch.zeros(3, dtype=torch.int64)
    for value in (
        not_true_distillation(one, targets, torch.ones(3, 1)),
        decoupled_distillation(one, targets, torch.ones(3, 1)),
        label_masking_distillation(one, targets, torch.ones(3, 1), torch.ones(1)),
    ):
        value.backward()
        assert value == 0
    assert (one.grad == 0).all()
