"""What holds for every loss, whatever labels the client holds and however its batch is padded."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedskew.components import has
from fedskew.models import Outputs
from fedskew.objectives import INDEX, Batch, Context, Loss, Objective, functional

CLASSES = 5
VALUES = np.random.default_rng(3).normal(size=(5, CLASSES))

COUNTS = {
    "no vacant class": (3.0, 1.0, 4.0, 2.0, 6.0),
    "one vacant class": (3.0, 0.0, 4.0, 2.0, 6.0),
    "two vacant classes": (3.0, 0.0, 4.0, 0.0, 6.0),
    "all classes vacant but one": (0.0, 0.0, 7.0, 0.0, 0.0),
}


class Client(NamedTuple):
    """One client's batch and constants; `inputs` is what a loss is differentiated by."""

    inputs: Tensor
    targets: Tensor
    counts: Tensor
    teacher: Tensor
    mask: Tensor | None = None


PARAMETERS: dict[str, list[dict[str, Any]]] = {name: [{}] for name in INDEX} | {
    "fedlc": [{"tau": 0.7}, {"exclude_target": True}],
    "fedrod": [{}, {"least": 1.0}],
    "fedrs": [{}, {"graded": True}],
    "fedvls_calibration": [{}, {"prior_eps": 0.0}],
    "suppression": [{}, {"prior_eps": 0.0}, {"form": "printed"}],
    "fedntd": [{"temperature": 3.0}],
    "fedlmd": [{"temperature": 2.0}],
    "fedkd": [{"temperature": 2.0}],
    "feddkd": [{"temperature": 2.0, "rest_weight": 8.0}],
    "fpl": [{"temperature": 0.5}],
}


def value_of(loss: Loss, of: Client) -> Tensor:
    """A loss's value where features are logits, and the previous model is the sent one's mirror image."""
    prototypes = {
        "fpl.prototypes": torch.tensor(VALUES, dtype=of.inputs.dtype),
        "fpl.classes": torch.tensor([0, 0, 1, 2, 4]),  # none of class 3
    }
    sent, previous = (Outputs(rows, rows) for rows in (of.teacher, of.teacher.flip(1)))
    return loss.value(Batch(of.inputs, of.inputs, of.targets, of.mask), Context(of.counts, sent, previous, prototypes))


LOSSES: dict[str, tuple[str, Callable[[Client], Tensor]]] = {
    " ".join([name, *map(str, parameters.values())]): (name, partial(value_of, INDEX[name](**parameters)))
    for name, several in PARAMETERS.items()
    for parameters in several
}

NOT_MEANS_OF_ROWS = {"fedmr", "feddecorr", "classifier_variance", "uniformity", "suppression"}

OF_FEATURES = {"moon", *(name for name, kind in INDEX.items() if has(kind, "shapes_features"))}


def losses_but(names: set[str]) -> pytest.MarkDecorator:
    kept = {case: loss for case, (name, loss) in LOSSES.items() if name not in names}
    return pytest.mark.parametrize("loss", kept.values(), ids=kept.keys())


every_loss = losses_but(set())


def for_each(clients: Mapping[str, tuple[float, ...]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a test run with the label counts of each client, as one: a thousand small tests take seconds to begin."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def with_each(**given) -> None:
            for name, counts in clients.items():
                try:
                    test(counts=counts, **given)
                except BaseException as error:
                    error.add_note(f"The client has {name}.")
                    raise

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name != "counts"]
        with_each.__signature__ = signature.replace(parameters=others)
        return with_each

    return decorate


every_client = for_each(COUNTS)
every_client_and_an_empty_one = for_each({**COUNTS, "no samples": (0.0,) * CLASSES})


def client(counts: tuple[float, ...], rows: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64) -> Client:
    rng = np.random.default_rng(seed)
    observed = np.flatnonzero(counts)
    return Client(
        inputs=torch.tensor(rng.normal(scale=2, size=(rows, CLASSES)), dtype=dtype),
        targets=torch.tensor(observed[rng.integers(len(observed), size=rows)]),
        counts=torch.tensor(counts, dtype=dtype),
        teacher=torch.tensor(rng.normal(scale=2, size=(rows, CLASSES)), dtype=dtype),
    )


def value_and_gradient(loss: Callable[[Client], Tensor], of: Client) -> tuple[Tensor, Tensor]:
    inputs = of.inputs.clone().requires_grad_()
    value = loss(of._replace(inputs=inputs))
    assert value.shape == ()
    assert value.requires_grad
    value.backward()
    assert inputs.grad is not None
    return value.detach(), inputs.grad


@every_loss
@every_client
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_value_and_gradient_are_finite_and_in_the_dtype_of_the_inputs(loss, counts, rows):
    for dtype in (torch.float32, torch.float64):
        value, gradient = value_and_gradient(loss, client(counts, rows, dtype=dtype))
        assert value.dtype == dtype
        assert value.isfinite()
        assert gradient.isfinite().all()


@every_loss
@every_client
def test_padded_rows_change_nothing_whatever_they_hold(loss, counts):
    real = client(counts, rows=4)
    padded = Client(
        inputs=torch.full((9, CLASSES), torch.nan, dtype=torch.float64),
        targets=torch.full((9,), -1),
        counts=real.counts,
        teacher=torch.full((9, CLASSES), torch.inf, dtype=torch.float64),
        mask=torch.tensor([True, False, True, True, False, False, True, False, False]),
    )
    for ours, theirs in ((padded.inputs, real.inputs), (padded.targets, real.targets), (padded.teacher, real.teacher)):
        ours[padded.mask] = theirs
    value, gradient = value_and_gradient(loss, padded)
    sliced_value, sliced_gradient = value_and_gradient(loss, real)
    torch.testing.assert_close(value, sliced_value)
    torch.testing.assert_close(gradient[padded.mask], sliced_gradient)
    assert (gradient[~padded.mask] == 0).all()


@every_loss
def test_a_full_mask_is_no_mask(loss):
    plain = client(COUNTS["two vacant classes"])
    masked = plain._replace(mask=torch.ones(7, dtype=torch.bool))
    torch.testing.assert_close(value_and_gradient(loss, masked), value_and_gradient(loss, plain))


@every_loss
@every_client_and_an_empty_one
def test_a_batch_of_padding_is_worth_nothing_and_moves_nothing(loss, counts):
    rows = client(COUNTS["no vacant class"], dtype=torch.float32)._replace(
        counts=torch.tensor(counts), mask=torch.zeros(7, dtype=torch.bool)
    )
    value, gradient = value_and_gradient(loss, rows)
    assert value == 0
    assert (gradient == 0).all()


@pytest.mark.slow
@every_loss
@every_client_and_an_empty_one
@pytest.mark.parametrize("mask", [None, torch.zeros(7, dtype=torch.bool)], ids=["real rows", "padding"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_no_step_of_the_backward_pass_meets_a_nan(loss, counts, mask):
    rows = client(COUNTS["all classes vacant but one"] if mask is None else COUNTS["no vacant class"])
    of = rows._replace(counts=torch.tensor(counts, dtype=torch.float64), mask=mask)
    with torch.autograd.detect_anomaly():
        value_and_gradient(loss, of)


@every_loss
def test_mapped_over_a_cohort_it_equals_one_client_after_another(loss):
    cohort = [client(counts, seed=at) for at, counts in enumerate(COUNTS.values())]
    masks = torch.tensor([[True] * 7, [True] * 5 + [False] * 2, [False] * 7, [True] + [False] * 6])
    cohort = [one._replace(mask=mask) for one, mask in zip(cohort, masks, strict=True)]
    stacked = Client(*(torch.stack(tensors) for tensors in zip(*cohort, strict=True)))

    def of_inputs(inputs: Tensor, rest: Client) -> Tensor:
        return loss(rest._replace(inputs=inputs))

    gradients, values = torch.func.vmap(torch.func.grad_and_value(of_inputs))(stacked.inputs, stacked)
    for at, one in enumerate(cohort):
        value, gradient = value_and_gradient(loss, one)
        torch.testing.assert_close(values[at], value)
        torch.testing.assert_close(gradients[at], gradient)


@pytest.mark.slow
@every_loss
@every_client
def test_the_gradient_is_the_derivative_of_the_value(loss, counts):
    of = client(counts, rows=5)._replace(mask=torch.tensor([True, True, False, True, True]))
    assert torch.autograd.gradcheck(lambda inputs: loss(of._replace(inputs=inputs)), of.inputs.requires_grad_())


@every_loss
@every_client
def test_extreme_logits_stay_finite(loss, counts):
    of = client(counts, dtype=torch.float32)
    extreme = of._replace(inputs=of.inputs.sign() * 1e4, teacher=-of.teacher.sign() * 1e4)
    value, gradient = value_and_gradient(loss, extreme)
    assert value.isfinite()
    assert gradient.isfinite().all()


@every_loss
@every_client
def test_the_order_of_rows_means_nothing(loss, counts):
    of = client(counts)
    order = torch.tensor([3, 1, 6, 0, 5, 2, 4])
    turned = of._replace(inputs=of.inputs[order], targets=of.targets[order], teacher=of.teacher[order])
    value, gradient = value_and_gradient(loss, of)
    turned_value, turned_gradient = value_and_gradient(loss, turned)
    torch.testing.assert_close(turned_value, value)
    torch.testing.assert_close(turned_gradient, gradient[order])


@losses_but(OF_FEATURES)
@every_client
def test_the_numbering_of_classes_means_nothing(loss, counts):
    of = client(counts)
    order = torch.tensor([3, 1, 4, 0, 2])
    new_id = order.argsort()
    renamed = of._replace(
        inputs=of.inputs[:, order], targets=new_id[of.targets], counts=of.counts[order], teacher=of.teacher[:, order]
    )
    value, gradient = value_and_gradient(loss, of)
    renamed_value, renamed_gradient = value_and_gradient(loss, renamed)
    torch.testing.assert_close(renamed_value, value)
    torch.testing.assert_close(renamed_gradient, gradient[:, order])


@losses_but(NOT_MEANS_OF_ROWS)
@every_client
def test_a_batch_is_the_mean_of_its_rows(loss, counts):
    of = client(counts)
    rows = [
        loss(Client(of.inputs[[at]], of.targets[[at]], of.counts, of.teacher[[at]])) for at in range(len(of.inputs))
    ]
    torch.testing.assert_close(loss(of), torch.stack(rows).mean())


@every_loss
def test_the_teacher_gets_no_gradient(loss):
    of = client(COUNTS["two vacant classes"])
    of.inputs.requires_grad_()
    of.teacher.requires_grad_()
    loss(of).backward()
    assert of.teacher.grad is None


# The components of the objective slot, and their weighted sum.

G = torch.Generator().manual_seed(0)
LOGITS, TEACHER, FEATURES = (
    torch.randn(6, 4, generator=G),
    torch.randn(6, 4, generator=G),
    torch.randn(6, 3, generator=G),
)
TARGETS, COMPONENTS_COUNTS = torch.tensor([0, 2, 2, 0, 0, 2]), torch.tensor([5.0, 0.0, 2.0, 0.0])
MASK = torch.tensor([True, True, True, True, False, True])
BATCH = Batch(FEATURES, LOGITS, TARGETS, MASK)
CONTEXT = Context(COMPONENTS_COUNTS, teacher=Outputs(FEATURES, TEACHER))


@pytest.mark.parametrize("name", INDEX)
def test_every_component_is_a_frozen_dataclass_that_says_what_it_is_and_what_it_reads(name):
    kind = INDEX[name]
    assert dataclasses.is_dataclass(kind)
    assert kind.role in ("classification", "term")
    assert kind.reads <= {"teacher", "previous", "broadcast"}
    component = kind()
    assert component == kind()
    assert component.value(BATCH, CONTEXT).shape == ()
    context = CONTEXT if "teacher" in kind.reads else Context(COMPONENTS_COUNTS)
    assert torch.equal(component.value(BATCH, context), component.value(BATCH, CONTEXT))


def test_an_objective_is_its_loss_plus_its_weighted_terms():
    objective = Objective(
        INDEX["fedvls_calibration"](), ((0.1, INDEX["vacant_distillation"]()), (0.005, INDEX["suppression"]()))
    )
    assert objective.reads == {"teacher"}
    torch.testing.assert_close(
        objective.value(BATCH, CONTEXT), functional.fedvls(LOGITS, TARGETS, TEACHER, COMPONENTS_COUNTS, mask=MASK)
    )
