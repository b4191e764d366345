"""A function run again and again: itself on the CPU, a graph on a GPU."""

from __future__ import annotations

import pytest
import torch

from fedskew.engine._capture import WARM_UPS, Captured

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_a_gpu)]


@pytest.mark.parametrize("name", DEVICES)
def test_every_call_runs_the_function_on_the_same_tensors(name):
    device = torch.device(name)
    total, one = torch.zeros(3, device=device), torch.ones(3, device=device)
    captured = Captured(lambda: total.add_(one), device)
    captured.capture()
    assert 1 <= total[0] <= WARM_UPS + 1
    total.fill_(10)
    captured()
    one.fill_(5)
    captured()
    assert total.tolist() == [16, 16, 16]


@pytest.mark.parametrize("name", DEVICES)
def test_an_error_of_the_function_is_raised_when_it_is_captured(name):
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Captured(fail, torch.device(name)).capture()


@needs_a_gpu
def test_gradients_are_captured_too():
    weight, gradient = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def differentiate() -> None:
        leaf = weight.detach().requires_grad_()
        gradient.copy_(torch.autograd.grad(leaf.square().sum(), leaf)[0])

    captured = Captured(differentiate, torch.device("cuda"))
    captured.capture()
    weight.fill_(3)
    captured()
    assert gradient.tolist() == [6, 6, 6, 6]


@needs_a_gpu
def test_a_function_that_waits_for_the_gpu_is_refused_and_leaves_everything_in_place():
    number = torch.zeros((), device="cuda")
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    with pytest.raises(RuntimeError, match="synchronizing"):
        Captured(lambda: number.add_(number.item()), torch.device("cuda")).capture()
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == mode
    assert float(number + 1) == 1
