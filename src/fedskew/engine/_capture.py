"""A function that is run again and again over the same tensors, on a GPU as one launch: a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

WARM_UPS = 3


class Captured:
    """A function without arguments that reads and writes tensors which stay where they are.

    Once `capture` has been called, a call costs one launch on a GPU. On other devices a call is the function itself.
    """

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function, self._device = function, device
        self._graph: Any = None

    def capture(self, pool: Any = None) -> None:
        """Run the function, at most `WARM_UPS` + 1 times, and keep what it does on a GPU; `pool`: its memory there.

        Its tensors then hold what these runs made of them. Raises what the function does, and RuntimeError where it
        waits for the GPU, or cannot be captured for another reason; this object must not be let go of even so.
        """
        if self._device.type != "cuda":
            self._function()
            return
        with torch.cuda.device(self._device):
            self._warm_up()
            current = torch.cuda.current_stream()
            # PyTorch may ask a graph that failed for its stream later on, so it is kept.
            self._graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self._graph, pool=pool):
                    self._function()
            finally:
                torch.cuda.set_stream(current)  # a capture that failed may have left its own in place

    def __call__(self) -> None:
        """Run the function."""
        if self._graph is None:
            self._function()
        else:
            self._graph.replay()

    def _warm_up(self) -> None:
        """Runs that make what must not be part of a graph: handles of libraries, constants that are kept.

        The last one tells whether the function waits for the GPU, more gently than a capture would.
        """
        own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        own.wait_stream(current)
        with torch.cuda.stream(own):
            for _ in range(WARM_UPS):
                self._function()
            with _waits_refused():
                self._function()
        current.wait_stream(own)


@contextmanager
def _waits_refused() -> Iterator[None]:
    """RuntimeError from what makes the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # PyTorch says that it doesn't notice all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
