"""A function run again and again: itself on the CPU, a graph on a GPU."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

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


class Pretended:
    """What a capture asks of PyTorch on a GPU, told in order; `fails`: the capture ends in an error, as CUDA's do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        self.fails = False
        for name, stand_in in {
            "device": lambda device: nullcontext(),
            "Stream": lambda: self,
            "stream": lambda stream: nullcontext(),
            "current_stream": lambda: self,
            "set_stream": lambda stream: self.told.append("stream put back"),
            "get_sync_debug_mode": lambda: 0,
            "set_sync_debug_mode": lambda mode: self.told.append(("waits", mode)),
            "CUDAGraph": lambda: self,
            "graph": self.graph,
        }.items():
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def wait_stream(self, other: object) -> None:
        self.told.append("streams in order")

    def replay(self) -> None:
        self.told.append("replayed")

    @contextmanager
    def graph(self, graph: object, pool: object):
        self.told.append(("captures into", pool))
        yield
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.told.append("captured")

    def captured(self) -> Captured:
        return Captured(lambda: self.told.append("run"), torch.device("cuda"))


def test_a_function_is_run_to_warm_up_and_once_without_waits_before_it_is_captured(monkeypatch):
    gpu = Pretended(monkeypatch)
    captured = gpu.captured()
    captured.capture("a pool")
    captured()
    assert gpu.told == [
        "streams in order",
        *["run"] * WARM_UPS,
        *[("waits", "error"), "run", ("waits", 0)],
        "streams in order",
        *[("captures into", "a pool"), "run", "captured"],
        "stream put back",
        "replayed",
    ]


def test_a_capture_that_fails_leaves_the_stream_as_it_was_and_its_graph_alive(monkeypatch):
    gpu = Pretended(monkeypatch)
    gpu.fails, captured = True, gpu.captured()
    with pytest.raises(RuntimeError, match="not permitted"):
        captured.capture()
    assert gpu.told[-1] == "stream put back"
    assert captured._graph is gpu


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
