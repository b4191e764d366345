"""The loss of samples that may have several labels: PyTorch's own, its gradient, and rows of padding."""

import pytest
import torch
from torch.func import grad, vmap

from common import as_bits
from fedskew.objectives import INDEX, Batch, Context

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
