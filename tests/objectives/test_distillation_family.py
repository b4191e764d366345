"""FedKD, FedEKD, FedNTD, FedLMD and FedDKD, which share their pieces and are known by what relates them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedskew.objectives.functional import (
    decoupled_distillation,
    distillation,
    label_masking_distillation,
    not_true_distillation,
)

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


def test_not_true_distillation_leaves_the_true_logit_alone():
    logits = LOGITS.clone().requires_grad_()
    not_true_distillation(logits, TARGETS, TEACHER).backward()
    assert (logits.grad.gather(1, TARGETS.unsqueeze(1)) == 0).all()


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


def test_label_masking_pushes_the_student_away_from_majority_classes_that_are_not_the_true_one():
    logits = torch.zeros(1, 4, requires_grad=True)
    label_masking_distillation(
        logits, torch.tensor([0]), torch.zeros(1, 4), torch.tensor([9.0, 9.0, 1.0, 0.0])
    ).backward()
    # The teacher gives 1/2 to each of classes 2 and 3, the student 1/3 to 1, 2 and 3.
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, 1 / 3, 1 / 3 - 1 / 2, 1 / 3 - 1 / 2]]))


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


def test_the_two_parts_make_up_distillation():
    # At temperature 1: KD = TCKD + mean of (1 - p^g_y) times the row of NCKD.
    target = decoupled_distillation(LOGITS, TARGETS, TEACHER, rest_weight=0.0)
    rest = torch.stack([not_true_distillation(LOGITS[[n]], TARGETS[[n]], TEACHER[[n]]) for n in range(7)])
    left = 1 - TEACHER.softmax(1).gather(1, TARGETS.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(target + (left * rest).mean(), distillation(LOGITS, TEACHER))


def test_a_student_that_agrees_pays_nothing():
    shifted = LOGITS + torch.arange(7.0).unsqueeze(1)
    for value in (
        distillation(LOGITS, shifted),
        not_true_distillation(LOGITS, TARGETS, shifted),
        decoupled_distillation(LOGITS, TARGETS, shifted),
    ):
        assert value.item() == pytest.approx(0, abs=1e-12)


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
