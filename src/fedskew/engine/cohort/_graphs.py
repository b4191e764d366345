"""Steps of a stack as CUDA graphs: what a step launches on a GPU is recorded once and then started by one call.

A GPU computes a small network's step faster than Python launches it. A graph reads and writes tensors that stay where
they are, so a stack's are copied into those of the first stack with as many clients. Clients that have finished stay in
it, and what they compute is dropped, until half of it has finished; then the graph for half as many takes over.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedskew.engine.cohort._stack import Stack, StackLog, of_first
from fedskew.hooks import Hooks

_WARM_UPS = 3  # runs before a recording, so that libraries prepare what must not be part of it
_KINDS = 16  # of stacks that have tensors at a time
_SPARED = 0.5  # share of the memory that stays free, else all are released


class Graphs:
    """The graphs of a backend's steps.

    Attributes:
        failed: Why steps are launched one by one; None while they are not.
    """

    def __init__(self) -> None:
        self.failed: str | None = None
        self._held: dict[Any, HeldStack] = {}

    def hold(self, stack: Stack) -> "HeldStack | None":
        """Copy a stack's tensors to where graphs read them, and record what is missing; None: it can't be recorded."""
        gather = any(type(hooks).gather is not Hooks.gather for hooks in stack.work.hooks.values())
        if self.failed is not None or gather or not stack.active or not isinstance(stack.inputs, Tensor):
            return None
        contents = _contents(stack)
        shapes = tuple(part.shape for part in tree_leaves(contents) if isinstance(part, Tensor))
        smallest = min(int(stack.sizes[stack.sizes > 0].min()), 2)  # batch norm refuses one
        kind = id(stack.inputs), smallest, stack.clients[0].kind[1:], shapes
        try:
            if kind not in self._held:
                if len(self._held) == _KINDS or _is_scarce(stack.own.counts.device):
                    self._held.clear()
                self._held[kind] = HeldStack(stack, contents, smallest)
            self._held[kind].load(stack.active, contents)
        except Exception as error:  # steps launched one by one either raise it, too, or do not need what failed
            self.failed, self._held = " ".join(str(error).split()), {}
            return None
        return self._held[kind]


class HeldStack:
    """A stack whose tensors stay where they are, and the graphs of its steps by their numbers of clients.

    Attributes:
        start: The models and what they carry, written to by each step.
    """

    def __init__(self, stack: Stack, contents: Any, smallest: int) -> None:
        self._stack, self._contents = stack, tree_map(_own, contents)
        (self.start, stack.own), stack.log = self._contents, StackLog(len(stack.clients))
        device = stack.own.counts.device
        moment = tree_map(_own, stack.moment(0, len(stack.clients), padded=True))
        self._moment = moment._replace(number=torch.zeros((), dtype=torch.int64, device=device), smallest=smallest)
        self._values = torch.zeros(len(stack.clients), device=device)
        self._steps: dict[int, Callable[[], None]] = {}
        # Graphs run one after another and keep only what they write to held tensors, so they share their memory.
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def load(self, active: Sequence[int], contents: Any) -> None:
        """Copy a stack's tensors in, after recording the steps that its numbers of `active` clients need."""
        for width in sorted(set(map(self._width, active)) - self._steps.keys(), reverse=True):
            self._copy(contents)
            self._steps[width] = self._recorded(partial(self._take, width))
        self._copy(contents)

    def step(self, stack: Stack, number: int, active: int) -> Tensor:
        """Take a step of the `active` first clients; return their objectives."""
        moment = stack.moment(number, active, padded=True)
        self._moment.number.fill_(number)
        for name in ("rows", "lengths", "key"):
            if (held := getattr(self._moment, name)) is not None:
                held[:active].copy_(getattr(moment, name))
        self._steps[self._width(active)]()
        return self._values[:active]

    def _width(self, active: int) -> int:
        """Return the number of clients of the graph for `active` ones: all, half of them, a quarter, ..."""
        width = len(self._stack.clients)
        while width > 1 and -(-width // 2) >= active:
            width = -(-width // 2)
        return width

    def _copy(self, contents: Any) -> None:
        for held, value in zip(tree_leaves(self._contents), tree_leaves(contents), strict=True):
            if isinstance(held, Tensor):
                held.copy_(value)

    def _take(self, width: int) -> None:
        """Take a step of the first `width` clients on the held tensors."""
        moment, state = tree_map(partial(of_first, width), (self._moment, self.start))
        objective, *after = self._stack.step(moment, self._stack.reads(width), *state)
        if self._stack.log:
            raise RuntimeError("figures are logged")
        for held, value in zip(tree_leaves(state), tree_leaves(after), strict=True):
            if held is not value:
                held.copy_(value)
        self._values[:width].copy_(objective.values)

    def _recorded(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays what one launches; on a CPU the function itself."""
        if self._pool is None:
            function()
            return function
        own, current = torch.cuda.Stream(), torch.cuda.current_stream()
        own.wait_stream(current)
        with torch.cuda.stream(own):
            for _ in range(_WARM_UPS):
                function()
        current.wait_stream(own)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph.replay


def _is_scarce(device: torch.device) -> bool:
    """Return whether a GPU's memory is."""
    if device.type == "cpu":
        return False
    free, whole = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) < _SPARED * whole


def _contents(stack: Stack) -> Any:
    """Return the tensors of a stack before its first step, the learning rate among them."""
    lr = torch.as_tensor(stack.own.lr, dtype=torch.float32, device=stack.own.counts.device)
    return stack.start(), stack.own._replace(lr=lr)


def _own(part: Any) -> Any:
    return part.clone(memory_format=torch.contiguous_format) if isinstance(part, Tensor) else part
