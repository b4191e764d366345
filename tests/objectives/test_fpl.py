from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedskew.errors import ArgumentError
from fedskew.objectives._fpl import fpl_flat
from fedskew.objectives.functional import fpl

RNG = np.random.default_rng(9)
FEATURES = RNG.normal(size=(7, 3))
TARGETS = np.array([0, 1, 2, 3, 1, 0, 2])
PROTOTYPES = {2: RNG.normal(size=(1, 3)), 0: RNG.normal(size=(2, 3)), 1: RNG.normal(size=(4, 3))}


def cosine(a, b):
    return a @ b / math.sqrt((a @ a) * (b @ b))


def by_formula(temperature):
    """Methods 2.13, row by row. Class 3 has no prototype: its row adds nothing, but is counted."""
    total = 0.0
    for row, y in zip(FEATURES, TARGETS.tolist(), strict=True):
        if y not in PROTOTYPES:
            continue
        everyone = sum(math.exp(cosine(row, p) / temperature) for of_class in PROTOTYPES.values() for p in of_class)
        own = sum(math.exp(cosine(row, p) / temperature) for p in PROTOTYPES[y])
        total += -math.log(own / everyone) + ((row - PROTOTYPES[y].mean(axis=0)) ** 2).mean()
    return total / len(FEATURES)


def as_tensors(prototypes):
    return {label: torch.tensor(of_class) for label, of_class in prototypes.items()}


@pytest.mark.parametrize("temperature", [0.02, 0.5])
def test_the_formula(temperature):
    value = fpl(torch.tensor(FEATURES), torch.tensor(TARGETS), as_tensors(PROTOTYPES), temperature)
    assert value.item() == pytest.approx(by_formula(temperature), rel=1e-10)


def test_one_row_worked_out_by_hand():
    # Cosine 1 with its own prototype and 0 with the other, T = 1; the squared distance is (2 - 1)^2 over 2 dimensions.
    prototypes = {0: torch.tensor([[1.0, 0.0]]), 1: torch.tensor([[0.0, 1.0]])}
    value = fpl(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), prototypes, temperature=1.0)
    assert value.item() == pytest.approx(math.log(1 + math.exp(-1)) + 0.5, abs=1e-6)


def test_the_order_of_the_dictionary_means_nothing():
    backwards = as_tensors(dict(reversed(PROTOTYPES.items())))
    assert torch.equal(
        fpl(torch.tensor(FEATURES), torch.tensor(TARGETS), backwards),
        fpl(torch.tensor(FEATURES), torch.tensor(TARGETS), as_tensors(PROTOTYPES)),
    )


@pytest.mark.parametrize("prototypes", [{}, {5: torch.ones(1, 3, dtype=torch.float64)}], ids=["none", "of others"])
def test_without_prototypes_of_its_classes_a_batch_is_worth_nothing_and_moves_nothing(prototypes):
    features = torch.tensor(FEATURES, requires_grad=True)
    value = fpl(features, torch.tensor(TARGETS), prototypes)
    value.backward()
    assert value == 0
    assert (features.grad == 0).all()


def test_a_zero_feature_has_a_finite_gradient():
    features = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    fpl(features, torch.tensor([0, 1]), as_tensors(PROTOTYPES)).backward()
    assert features.grad.isfinite().all()
    assert features.grad.abs().max() < 1e3


def test_padding_of_the_flat_form_changes_nothing():
    values = torch.tensor(np.concatenate([PROTOTYPES[0], np.full((2, 3), 5.0), PROTOTYPES[1], PROTOTYPES[2]]))
    classes = torch.tensor([0, 0, -1, -1, 1, 1, 1, 1, 2])
    flat = fpl_flat(torch.tensor(FEATURES), torch.tensor(TARGETS), values, classes)
    torch.testing.assert_close(flat, fpl(torch.tensor(FEATURES), torch.tensor(TARGETS), as_tensors(PROTOTYPES)))


@pytest.mark.parametrize(
    "prototypes",
    [
        {0: torch.ones(3, dtype=torch.float64)},
        {0: torch.ones(1, 4, dtype=torch.float64)},
        {-1: torch.ones(1, 3, dtype=torch.float64)},
        {0: torch.ones(1, 3)},
        {0: [[1.0, 1.0, 1.0]]},
    ],
    ids=["a vector", "another dimension", "a negative class", "another dtype", "a list"],
)
def test_senseless_prototypes_are_refused_by_name(prototypes):
    with pytest.raises(ArgumentError, match=r"^prototypes(\[0\])?: expected"):
        fpl(torch.tensor(FEATURES), torch.tensor(TARGETS), prototypes)
