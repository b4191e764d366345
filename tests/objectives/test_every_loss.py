"""What holds for every loss, whatever labels the client holds and however its batch is padded."""

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from common import as_bits
from fedskew.components import covers, has
from fedskew.objectives import INDEX, Batch, Context
from losses import VACANT, Client, client, read_of, slope_of, value_by_name, value_of

CLASSES = 5
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


LOSSES: dict[str, tuple[str, partial[Tensor]]] = {
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


def clients(rows: int = 7, empty: bool = False, **options: Any) -> Iterator[Client]:
    """One with each kind of label counts, in a loop, as a thousand small tests take seconds to begin."""
    for counts in VACANT.values():
        yield client(counts, rows, **options)
    if empty:
        yield client(VACANT["no vacant class"], rows, **options)._replace(counts=torch.zeros(CLASSES).double())


def value_and_gradient(loss: partial[Tensor], of: Client) -> tuple[Tensor, Tensor]:
    inputs = of.inputs.clone().requires_grad_()
    value = loss(of._replace(inputs=inputs))
    assert value.shape == ()
    assert value.requires_grad
    value.backward()
    assert inputs.grad is not None
    found = value.detach(), inputs.grad
    if covers(component := loss.args[0], "slope", "value"):  # what training takes in place of autograd's
        exact = {"rtol": 1e-12, "atol": 1e-12} if of.inputs.dtype == torch.float64 else {}
        own, *gradients = slope_of(component, *read_of(of))
        torch.testing.assert_close((own, sum(gradients)), found, **exact)
    return found


def assert_finite(loss: partial[Tensor], of: Client) -> None:
    value, gradient = value_and_gradient(loss, of)
    assert value.dtype == of.inputs.dtype
    assert value.isfinite()
    assert gradient.isfinite().all()


@every_loss
def test_value_and_gradient_are_finite_and_in_the_dtype_of_the_inputs_also_of_extreme_logits(loss):
    for rows, dtype in itertools.product((1, 2, 7), (torch.float32, torch.float64)):
        for of in clients(rows, dtype=dtype):
            assert_finite(loss, of)
            assert_finite(loss, of._replace(inputs=of.inputs.sign() * 1e4, teacher=-of.teacher.sign() * 1e4))
            for factor, more in ((0, 0), (0, 1), (1e-20, 0)):  # rows that are equal, or next to nothing
                assert_finite(loss, of._replace(inputs=of.inputs * factor + more))


@every_loss
def test_padded_rows_change_nothing_whatever_they_hold(loss):
    mask = torch.tensor([True, False, True, False, False, False, True, False, False])
    for real in clients(rows=3):
        rows = torch.full((9, CLASSES), torch.nan, dtype=torch.float64)
        padded = Client(rows, torch.full((9,), -1), real.counts, rows + torch.inf, mask)
        for place in (0, 1, 3):
            padded[place][mask] = real[place]
        value, gradient = value_and_gradient(loss, padded)
        sliced_value, sliced_gradient = value_and_gradient(loss, real)
        torch.testing.assert_close(value, sliced_value)
        torch.testing.assert_close(gradient[mask], sliced_gradient)
        assert (gradient[~mask] == 0).all()


@every_loss
def test_a_full_mask_is_no_mask_and_the_teacher_gets_no_gradient(loss):
    plain = client(VACANT["two vacant classes"])
    plain.teacher.requires_grad_()
    masked = plain._replace(mask=torch.ones(7, dtype=torch.bool))
    torch.testing.assert_close(value_and_gradient(loss, masked), value_and_gradient(loss, plain))
    assert plain.teacher.grad is None


@every_loss
def test_a_batch_of_padding_is_worth_nothing_and_moves_nothing(loss):
    for of in clients(empty=True, dtype=torch.float64):
        value, gradient = value_and_gradient(loss, of._replace(mask=torch.zeros(7, dtype=torch.bool)))
        assert value == 0
        assert (gradient == 0).all()


@pytest.mark.slow
@every_loss
@pytest.mark.parametrize("mask", [None, torch.zeros(7, dtype=torch.bool)], ids=["real rows", "padding"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_no_step_of_the_backward_pass_meets_a_nan(loss, mask):
    rows = client(VACANT["all classes vacant but one"] if mask is None else VACANT["no vacant class"])
    for of in clients(empty=True):
        with torch.autograd.detect_anomaly():
            value_and_gradient(loss, rows._replace(counts=of.counts, mask=mask))


@every_loss
def test_mapped_over_a_cohort_it_equals_one_client_after_another(loss):
    masks = torch.tensor([[True] * 7, [True] * 5 + [False] * 2, [False] * 7, [True] + [False] * 6])
    cohort = [of._replace(inputs=of.inputs + at, mask=masks[at]) for at, of in enumerate(clients())]
    stacked = Client(*(torch.stack(tensors) for tensors in zip(*cohort, strict=True)))

    def of_inputs(inputs: Tensor, rest: Client) -> Tensor:
        return loss(rest._replace(inputs=inputs))

    gradients, values = torch.func.vmap(torch.func.grad_and_value(of_inputs))(stacked.inputs, stacked)
    for at, one in enumerate(cohort):
        torch.testing.assert_close((values[at], gradients[at]), value_and_gradient(loss, one))


@pytest.mark.slow
@every_loss
def test_the_gradient_is_the_derivative_of_the_value(loss):
    for plain in clients(rows=5):
        of = plain._replace(mask=torch.tensor([True, True, False, True, True]))
        inputs = of.inputs.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda inputs, of=of: loss(of._replace(inputs=inputs)), inputs)


@every_loss
def test_the_order_of_rows_means_nothing(loss):
    order = torch.tensor([3, 1, 6, 0, 5, 2, 4])
    for of in clients():
        turned = of._replace(inputs=of.inputs[order], targets=of.targets[order], teacher=of.teacher[order])
        value, gradient = value_and_gradient(loss, of)
        torch.testing.assert_close(value_and_gradient(loss, turned), (value, gradient[order]))


@losses_but(OF_FEATURES)
def test_the_numbering_of_classes_means_nothing(loss):
    order = torch.tensor([3, 1, 4, 0, 2])
    for of in clients():
        inputs, teacher, targets = of.inputs[:, order], of.teacher[:, order], order.argsort()[of.targets]
        renamed = of._replace(inputs=inputs, targets=targets, counts=of.counts[order], teacher=teacher)
        value, gradient = value_and_gradient(loss, of)
        torch.testing.assert_close(value_and_gradient(loss, renamed), (value, gradient[:, order]))


@losses_but(NOT_MEANS_OF_ROWS)
def test_a_batch_is_the_mean_of_its_rows(loss):
    for of in clients():
        rows = [Client(of.inputs[[at]], of.targets[[at]], of.counts, of.teacher[[at]]) for at in range(7)]
        torch.testing.assert_close(loss(of), torch.stack([loss(row) for row in rows]).mean())


@pytest.mark.parametrize("name", INDEX)
def test_every_component_is_a_frozen_dataclass_that_says_what_it_is_and_what_it_reads(name):
    kind = INDEX[name]
    assert dataclasses.is_dataclass(kind)
    assert kind.role in ("classification", "term")
    assert kind.reads <= {"teacher", "previous", "broadcast"}
    assert kind() == kind()
    if not kind.reads:  # nothing but the batch and the counts
        of = client(VACANT["two vacant classes"])
        assert torch.equal(value_by_name(name, of.inputs, of.targets, of.counts), value_of(kind(), of))


# Losses that compare only a client's own classes give a pair that no client holds together no gradient.

RELYING, OTHERS = ("fedvls_calibration", "fedlc", "fedrod"), ("cross_entropy", "fedrs")


def pulls(name: str, counts: list[int], held: list[int] | None = None) -> Tensor:
    """The gradient by each class's logit, at equal logits, of a batch that is all of a client's samples, or `held`."""
    targets = torch.repeat_interleave(torch.arange(3), torch.tensor(held or counts))
    logits = torch.zeros(len(targets), 3, dtype=torch.float64, requires_grad=True)
    value_by_name(name, logits, targets, torch.tensor(counts, dtype=torch.float64)).backward()
    return logits.grad.sum(dim=0)


@pytest.mark.parametrize("name", [*RELYING, *OTHERS])
def test_only_some_losses_pull_a_pair_of_classes_apart_that_a_client_does_not_hold_together(name: str):
    # At equal logits cross-entropy's gradient is (1/3 - 1, 1/3): a difference of 1; FedRS scales B's by alpha.
    expected = {"cross_entropy": 1, "fedrs": 2 / 3 + 1 / 6}.get(name, 0)
    for counts in ([40, 0, 0], [0, 40, 0]):
        of = pulls(name, counts)
        assert abs(of[0] - of[1]).item() == pytest.approx(expected, abs=1e-6)
    # Samples of class 0 push the logit of class 1, which is not held, only where the loss compares with it.
    pushed = pulls(name, [30, 0, 10], [5, 0, 0])[1]
    assert pushed < 1e-6 if name in RELYING else pushed > 0.1


def test_a_client_with_a_third_class_pulls_no_pair_apart_and_one_that_holds_both_does():
    # At equal logits the calibrated softmax is the client's prior, so that its samples' gradients add up to 0.
    three = pulls("fedvls_calibration", [30, 0, 10])
    assert abs(three[0] - three[1]) < 1e-6
    # Cross-entropy: (1/3 - 3/4, 1/3), a difference of -3/4.
    plain = pulls("cross_entropy", [30, 0, 10])
    assert (plain[0] - plain[1]).item() == pytest.approx(-3 / 4)
    assert pulls("fedvls_calibration", [30, 30, 0], [5, 0, 0]).tolist() == pytest.approx([-0.5, 0.5, 0], abs=1e-6)
    assert {name for name, kind in INDEX.items() if has(kind, "needs_colocation")} == set(RELYING)


def test_a_loss_that_takes_stacks_says_so_where_it_is_heeded_beside_its_value():
    said = {name for name, kind in INDEX.items() if has(kind, "takes_stacks")}
    assert {name for name in said if not covers(INDEX[name], "takes_stacks", "value")} == set()


# The loss of samples that may have several labels: PyTorch's own, its gradient, and rows of padding.


LOSS = INDEX["cross_entropy"].of_findings()
BCE = torch.nn.BCEWithLogitsLoss()


def batch(rows=7, labels=5, scale=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(rows, labels, generator=generator, dtype=dtype)
    table = torch.randint(2, (rows, labels), generator=generator)
    return logits, table, torch.from_numpy(as_bits(table.numpy()))


def value(logits, bits, mask=None):
    return LOSS.value(Batch(logits, logits, bits, mask), Context(torch.zeros(logits.shape[1])))


@pytest.mark.parametrize("labels", [2, 5, 62])
def test_it_is_pytorchs_loss(labels):
    logits, table, bits = batch(labels=labels)
    assert value(logits, bits).item() == pytest.approx(BCE(logits, table.double()).item(), rel=1e-12)


def test_rows_of_padding_change_nothing():
    logits, table, bits = batch()
    logits[4:] = torch.nan
    mask = torch.arange(7) < 4
    expected = BCE(logits[:4], table[:4].double())
    assert value(logits, bits, mask).item() == pytest.approx(expected.item(), rel=1e-12)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(value(logits, bits, mask), logits)
    assert gradient.isfinite().all()
    assert not gradient[4:].any()
    assert value(logits, bits, torch.zeros(7, dtype=torch.bool)).item() == 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_its_gradient_without_autograd_is_autograds(masked, scale):
    logits, _, bits = batch(scale=scale)
    mask = torch.arange(7) % 3 > 0 if masked else None
    leaf = logits.clone().requires_grad_()
    expected = value(leaf, bits, mask)
    found, gradient = LOSS.slope(Batch(logits, logits, bits, mask), Context(torch.zeros(1)))
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, leaf)[0], rtol=1e-9, atol=1e-12)
    assert gradient.isfinite().all()


def test_it_can_be_mapped_over_clients_and_a_stack_has_their_slopes():
    parts = [batch(), batch(scale=1.0)]
    logits, bits = torch.stack([one[0] for one in parts]), torch.stack([one[2] for one in parts])
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    mapped = vmap(grad(value))(logits, bits, mask)
    losses, slopes = LOSS.slope(Batch(logits, logits, bits, mask), Context(torch.zeros(1)))
    torch.testing.assert_close(slopes, mapped)
    torch.testing.assert_close(losses, vmap(value)(logits, bits, mask))
