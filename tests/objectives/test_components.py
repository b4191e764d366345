"""The components of the objective slot, and their weighted sum."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedskew.models import Outputs
from fedskew.objectives import INDEX, Batch, Context, Objective, functional

G = torch.Generator().manual_seed(0)
LOGITS, TEACHER, FEATURES = (
    torch.randn(6, 4, generator=G),
    torch.randn(6, 4, generator=G),
    torch.randn(6, 3, generator=G),
)
TARGETS, COUNTS = torch.tensor([0, 2, 2, 0, 0, 2]), torch.tensor([5.0, 0.0, 2.0, 0.0])
MASK = torch.tensor([True, True, True, True, False, True])
BATCH = Batch(FEATURES, LOGITS, TARGETS, MASK)
CONTEXT = Context(COUNTS, teacher=Outputs(FEATURES, TEACHER))


@pytest.mark.parametrize("name", INDEX)
def test_every_component_is_a_frozen_dataclass_that_says_what_it_is_and_what_it_reads(name):
    kind = INDEX[name]
    assert dataclasses.is_dataclass(kind)
    assert kind.role in ("classification", "term")
    assert kind.reads <= {"teacher", "previous", "broadcast"}
    component = kind()
    assert component == kind()
    assert component.value(BATCH, CONTEXT).shape == ()
    context = CONTEXT if "teacher" in kind.reads else Context(COUNTS)
    assert torch.equal(component.value(BATCH, context), component.value(BATCH, CONTEXT))


def test_an_objective_is_its_loss_plus_its_weighted_terms():
    objective = Objective(
        INDEX["fedvls_calibration"](), ((0.1, INDEX["vacant_distillation"]()), (0.005, INDEX["suppression"]()))
    )
    assert objective.reads == {"teacher"}
    torch.testing.assert_close(
        objective.value(BATCH, CONTEXT), functional.fedvls(LOGITS, TARGETS, TEACHER, COUNTS, mask=MASK)
    )


def test_an_objective_without_terms_is_its_loss():
    assert torch.equal(
        Objective(INDEX["cross_entropy"]()).value(BATCH, CONTEXT), INDEX["cross_entropy"]().value(BATCH, CONTEXT)
    )
    assert Objective(INDEX["cross_entropy"]()).reads == frozenset()
