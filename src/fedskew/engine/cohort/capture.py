"""Training of stacks by captured steps (CUDA graphs): fixed shapes, and tensors that stay in place between rounds.

A step is captured once for each number of clients, its width. Clients that have finished stay in the stack, without
change, until half of the stack has finished; then the step of half the width takes over, on the same tensors. Batches
are padded to the batch size, with a mask. The number of the step is counted on the device, so that a step needs nothing
from the host. Other files use captured steps only through `CapturedTrainer`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_

from fedskew.engine._local_work import ClientSamples, LocalWork
from fedskew.engine._sequential import ClientResult
from fedskew.engine.cohort._stack import Stack, StackedClient, StackTrainer, split_clients
from fedskew.engine.cohort._step import StackData, Step, StepInputs
from fedskew.hooks import Hooks, Named
from fedskew.local_steps import StepSettings
from fedskew.models import ModelState

WARM_UPS = 3
KINDS = 4
"""Largest number of kinds of stacks that have tensors at a time. Kinds differ, for example, in clients' states."""

Tensors = dict[str, dict[str, Any]]
"""The tensors of a stack, in groups with equal first dimensions: "samples" `(samples, ...)`, "schedule" `(steps,
clients, ...)`, "clients" `(clients, ...)`, and "shared" by all clients."""


class CapturedFunction:
    """A function without arguments that reads and writes tensors at fixed places in memory.

    After `capture`, a call on a GPU replays the recorded graph, with a single launch. On other devices a call runs the
    function.
    """

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self.function, self._device = function, device
        self._graph: Any = None

    def capture(self, pool: Any = None) -> None:
        """Run the function, at most `WARM_UPS` + 1 times, and on a GPU record its launches.

        The runs change the function's tensors. Keep this object even if an error is raised: PyTorch may still access
        the graph.

        Args:
            pool: Memory pool of the graph on a GPU; None: a new one.

        Raises:
            RuntimeError: The function waits for the GPU, or can't be captured for another reason. Errors of the
                function itself are raised unchanged.
        """
        if self._device.type != "cuda":
            self.function()
            return
        with torch.cuda.device(self._device):
            self._warm_up()
            current = torch.cuda.current_stream()
            # Kept also if the capture fails, since PyTorch may ask the graph for its stream later.
            self._graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self._graph, pool=pool):
                    self.function()
            finally:
                torch.cuda.set_stream(current)  # a failed capture may leave its own stream current

    def __call__(self) -> None:
        """Run the function."""
        if self._graph is None:
            self.function()
        else:
            self._graph.replay()

    def _warm_up(self) -> None:
        """Run the function before the capture, so that it creates what must not be part of a graph.

        These are, for example, handles of libraries and cached constants. The last run raises RuntimeError if the
        function waits for the GPU; a capture would fail with a harder error.
        """
        own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        own.wait_stream(current)
        with torch.cuda.stream(own):
            for _ in range(WARM_UPS):
                self.function()
            with _waits_refused():
                self.function()
        current.wait_stream(own)


@contextmanager
def _waits_refused() -> Iterator[None]:
    """Raise RuntimeError at operations that make the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that it detects only some of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class CapturedTrainer(StackTrainer):
    """Trains stacks by captured steps; by plain steps if that is impossible, with the reason in `not_captured`."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._static: dict[Any, _StaticStack] = {}

    def train(self, clients: Sequence[StackedClient]) -> list[ClientResult]:
        """See `StackTrainer.train`."""
        self.not_captured = self.not_captured or _why_not(self.step.work, clients[0].setup.samples)
        if self.not_captured is None and clients[0].steps:
            try:
                stack = Stack(self.step, clients, apart=True)
                static = self._prepare(stack)
            except Exception as error:  # plain steps either raise it too or do not need what failed
                self.not_captured = " ".join(f"capture failed: {error}".split())
            else:
                return static.train(stack)
        return super().train(clients)

    def _prepare(self, stack: Stack) -> _StaticStack:
        """Copy the stack into static tensors, and capture the steps that it needs."""
        contents, capacity = _contents(stack), _Capacity.of(stack)
        smallest = 1 if stack.smallest == 1 and self.step.networks.train.has_batch_norm else 2  # batch norm refuses one
        kind = smallest, _kind(contents)
        static = self._static.get(kind)
        if static is None or not static.capacity.holds(capacity):
            if static is not None:
                capacity = capacity.union(self._static.pop(kind).capacity)
            elif len(self._static) == KINDS:
                self._static.pop(next(iter(self._static)))
            static = self._static[kind] = _StaticStack(self.step, stack.settings, smallest, contents, capacity)
        static.prepare(stack, contents)
        return static


def _why_not(work: LocalWork, samples: ClientSamples) -> str | None:
    """Return why steps on such samples can't be captured, for the run's records; None if they may be."""
    for hooks in work.hooks.values():
        if type(hooks).gather is not Hooks.gather:
            return f"{type(hooks).__name__} gathers tensors from each client's batches, one client after another"
    if not isinstance(samples.inputs, Tensor):
        return "the inputs are not a tensor in memory; they are read batch by batch"
    return None


class _Capacity(NamedTuple):
    """Numbers of clients, steps and samples for which tensors are allocated."""

    clients: int
    steps: int
    samples: int

    @classmethod
    def of(cls, stack: Stack) -> Self:
        """Return the capacity for a stack, rounded up, so that a slightly larger stack needs no new tensors."""
        steps = max(len(stack.active), WARM_UPS + 1)
        return cls(len(stack.clients), _power_of_two(steps), _power_of_two(len(stack.data.targets)))

    def holds(self, other: _Capacity) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def union(self, other: _Capacity) -> Self:
        return type(self)(*map(max, self, other))


class _StaticStack:
    """Static tensors for stacks of one kind, and the captured steps that read and write them."""

    def __init__(
        self, step: Step, settings: StepSettings, smallest: int, contents: Tensors, capacity: _Capacity
    ) -> None:
        self.capacity = capacity
        self._device = settings.start.device
        sizes = {
            "samples": (capacity.samples,),
            "schedule": (capacity.steps, capacity.clients),
            "clients": (capacity.clients,),
            "shared": (),
        }
        self._tensors = {group: tree_map(partial(_allocate, sizes[group]), tree) for group, tree in contents.items()}
        self._take = partial(static_step, step, settings, smallest, self._tensors)
        self._captured: dict[int, CapturedFunction] = {}
        # Steps run one after another and keep only what they write to static tensors, so they share one memory pool.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def prepare(self, stack: Stack, contents: Tensors) -> None:
        """Capture the steps that the stack needs and that are not captured yet, and copy the stack's contents in."""
        for width in sorted(set(map(self._width, stack.active)) - self._captured.keys(), reverse=True):
            self._fill(contents)
            self._captured[width] = CapturedFunction(partial(self._take, width), self._device)
            self._captured[width].capture(self._pool)
        self._fill(contents)

    def train(self, stack: Stack) -> list[ClientResult]:
        """Take all steps of the stack that was prepared last."""
        for active in stack.active:
            self._captured[self._width(active)]()
        clients = {
            name: tree_map(lambda part: part[: len(stack.clients)].clone(), self._tensors["clients"][name])
            for name in ("model", "carried", "totals")
            if name in self._tensors["clients"]
        }
        nothing: list[dict[str, Named]] = [{name: {} for name in stack.work.hooks} for _ in stack.clients]
        finished = split_clients(clients["model"], clients.get("carried"), slice(0, len(stack.clients)))
        return stack.results(finished, clients["totals"], nothing)

    def _width(self, active: int) -> int:
        """Return the width of the step for `active` clients: the whole capacity, half of it, a quarter, ..."""
        width = self.capacity.clients
        while width > 1 and -(-width // 2) >= active:
            width = -(-width // 2)
        return width

    def _fill(self, contents: Tensors) -> None:
        """Copy a stack's contents in; unused places for clients and steps count as finished."""
        self._tensors["schedule"]["lengths"].zero_()
        tree_map_(_copy, self._tensors, contents)


def static_step(step: Step, settings: StepSettings, smallest: int, tensors: Tensors, width: int) -> None:
    """Take one step of the first `width` clients, in place.

    The step's number is read from `tensors` and incremented.
    """
    schedule = tree_map(lambda part: part[:, :width], tensors["schedule"])
    clients = tree_map(lambda part: part[:width], tensors["clients"])
    samples, shared = tensors["samples"], tensors["shared"]
    now = tree_map(lambda part: part.index_select(0, shared["number"]).squeeze(0), schedule)
    lengths, batch_size = now["lengths"], now["rows"].shape[1]
    trains = lengths > 0
    # All rows of a finished client count as real: its step is computed like the others', and the result is dropped.
    mask = torch.arange(batch_size, device=lengths.device) < torch.where(trains, lengths, batch_size).unsqueeze(1)
    result = step.take(
        StackData(samples["inputs"], samples["targets"], shared["sent"], clients["own"], clients.get("augmentation")),
        StepInputs(shared["number"], now["rows"], mask, smallest, now.get("dropout")),
        settings._replace(lr=shared["lr"]),
        clients["model"],
        clients.get("carried"),
    )
    after: dict[str, Any] = {"model": result.model}
    if result.carried is not None:
        after["carried"] = result.carried
    tree_map_(partial(_overwrite, trains), {name: clients[name] for name in after}, after)
    clients["totals"] += torch.where(trains, result.values * lengths, 0)
    shared["number"] += 1


def _contents(stack: Stack) -> Tensors:
    """Return the tensors of a stack before its first step."""
    model, carried = stack.start()
    inputs, targets, sent, own, augmentation = stack.data
    device, clients = targets.device, len(stack.clients)
    groups: Tensors = {
        "samples": {"inputs": inputs, "targets": targets},
        "schedule": {"rows": stack.rows, "lengths": stack.lengths, "dropout": stack.dropout},
        "clients": {
            "own": own,
            "augmentation": augmentation,
            "model": ModelState(*model),
            "carried": carried,
            "totals": torch.zeros(clients, device=device),
        },
        "shared": {
            "sent": sent._replace(broadcast=dict(sent.broadcast)),
            "lr": torch.full((), float(stack.settings.lr), device=device),
            "number": torch.zeros(1, dtype=torch.int64, device=device),
        },
    }
    return {group: {name: part for name, part in tree.items() if part is not None} for group, tree in groups.items()}


def _kind(contents: Tensors) -> Any:
    """Return a key of contents that can share tensors: all but the numbers of clients, steps and samples."""
    parts = []
    for group, leading in (("samples", 1), ("schedule", 2), ("clients", 1), ("shared", 0)):
        tensors, names = tree_flatten(contents[group])
        parts.append((repr(names), *((part.shape[leading:], part.dtype) for part in tensors)))
    return tuple(parts)


def _allocate(sizes: tuple[int, ...], value: Tensor) -> Tensor:
    """Return zeros like `value`, but with these sizes in the first dimensions."""
    return value.new_zeros((*sizes, *value.shape[len(sizes) :]))


def _copy(target: Tensor, value: Tensor) -> None:
    """Copy a value to the beginning of every dimension of a tensor."""
    target[tuple(slice(size) for size in value.shape)].copy_(value)


def _overwrite(trains: Tensor, target: Tensor, value: Tensor) -> None:
    """Copy the values, `(clients, ...)`, of the clients that the mask `trains`, `(clients,)`, selects."""
    target.copy_(torch.where(trains.view(-1, *[1] * (target.dim() - 1)), value, target))


def _power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << max(0, least - 1).bit_length()
