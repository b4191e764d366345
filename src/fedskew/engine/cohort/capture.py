"""Stacks that train by captured steps (CUDA graphs): at fixed shapes, over tensors that stay from round to round.

A step is captured once for a number of clients, its width. Clients that have finished stay in the stack until half of
it is finished, and nothing of theirs changes; then the step of half the width takes over, on the same tensors. Batches
are as wide as the batch size, with a mask. The number of the step is counted on the device, so a step needs nothing of
the host. No other file knows of captured steps but through `CapturedTrainer`.
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
"""How many kinds of stacks have tensors of their own at a time: with and without states of a first participation."""

Tensors = dict[str, dict[str, Any]]
"""What a stack trains on, in groups whose first dimensions are alike: "samples" `(samples, ...)`, "schedule" `(steps,
clients, ...)`, "clients" `(clients, ...)`, and "shared" by all."""


class CapturedFunction:
    """A function without arguments that reads and writes tensors which stay where they are.

    Once `capture` has been called, a call costs one launch on a GPU. On other devices a call is the function itself.
    """

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self.function, self._device = function, device
        self._graph: Any = None

    def capture(self, pool: Any = None) -> None:
        """Run the function, at most `WARM_UPS` + 1 times, and record its launches on a GPU; `pool`: its memory there.

        Its tensors then contain what these runs made of them. Raises what the function does, and RuntimeError where it
        waits for the GPU, or cannot be captured for another reason; even then this object must be kept.
        """
        if self._device.type != "cuda":
            self.function()
            return
        with torch.cuda.device(self._device):
            self._warm_up()
            current = torch.cuda.current_stream()
            # PyTorch may ask a graph that failed for its stream later on, so it is kept.
            self._graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self._graph, pool=pool):
                    self.function()
            finally:
                torch.cuda.set_stream(current)  # a capture that failed may have left its own in place

    def __call__(self) -> None:
        """Run the function."""
        if self._graph is None:
            self.function()
        else:
            self._graph.replay()

    def _warm_up(self) -> None:
        """Runs that make what must not be part of a graph: handles of libraries, constants that are kept.

        The last one reports whether the function waits for the GPU, more gently than a capture would.
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
    """Raise RuntimeError at what makes the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that it doesn't notice all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class CapturedTrainer(StackTrainer):
    """Trains stacks by captured steps, or as they are where that can't be done, for the reason in `not_captured`."""

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
            except Exception as error:  # whatever it is: the steps that aren't captured raise it too, or do without
                self.not_captured = " ".join(f"capture failed: {error}".split())
            else:
                return static.train(stack)
        return super().train(clients)

    def _prepare(self, stack: Stack) -> _StaticStack:
        """Static tensors that contain the stack, with the steps that it needs captured."""
        contents, capacity = _contents(stack), _Capacity.of(stack)
        smallest = 1 if stack.smallest == 1 and self.step.networks.train.has_batch_norm else 2  # it refuses one value
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
    """Why steps on such samples are not captured, for a run's record; None where they may be."""
    for hooks in work.hooks.values():
        if type(hooks).gather is not Hooks.gather:
            return f"{type(hooks).__name__} gathers something from every client's batch in turn"
    if not isinstance(samples.inputs, Tensor):
        return "the inputs are stored elsewhere, and read batch by batch"
    return None


class _Capacity(NamedTuple):
    """For how many clients, steps and samples tensors are allocated."""

    clients: int
    steps: int
    samples: int

    @classmethod
    def of(cls, stack: Stack) -> Self:
        """That of a stack, rounded up, so that a slightly larger one does not need new tensors."""
        steps = max(len(stack.active), WARM_UPS + 1)
        return cls(len(stack.clients), _power_of_two(steps), _power_of_two(len(stack.data.targets)))

    def holds(self, other: _Capacity) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def union(self, other: _Capacity) -> Self:
        return type(self)(*map(max, self, other))


class _StaticStack:
    """Tensors for stacks of one kind, and captured steps over them."""

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
        # Steps never run side by side and leave nothing in memory but what they write, so they share it.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def prepare(self, stack: Stack, contents: Tensors) -> None:
        """Capture those of the stack's steps that aren't yet, and copy its contents in."""
        for width in sorted(set(map(self._width, stack.active)) - self._captured.keys(), reverse=True):
            self._fill(contents)
            self._captured[width] = CapturedFunction(partial(self._take, width), self._device)
            self._captured[width].capture(self._pool)
        self._fill(contents)

    def train(self, stack: Stack) -> list[ClientResult]:
        """All steps of the stack that was prepared last."""
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
        """The width of the step for so many active clients: the whole capacity, half, a quarter, ..."""
        width = self.capacity.clients
        while width > 1 and -(-width // 2) >= active:
            width = -(-width // 2)
        return width

    def _fill(self, contents: Tensors) -> None:
        """Copy a stack's contents in; the clients and steps beyond them count as finished."""
        self._tensors["schedule"]["lengths"].zero_()
        tree_map_(_copy, self._tensors, contents)


def static_step(step: Step, settings: StepSettings, smallest: int, tensors: Tensors, width: int) -> None:
    """Take one step of the first `width` clients, in place: the step whose number is in `tensors`, and count it up."""
    schedule = tree_map(lambda part: part[:, :width], tensors["schedule"])
    clients = tree_map(lambda part: part[:width], tensors["clients"])
    samples, shared = tensors["samples"], tensors["shared"]
    now = tree_map(lambda part: part.index_select(0, shared["number"]).squeeze(0), schedule)
    lengths, batch_size = now["lengths"], now["rows"].shape[1]
    trains = lengths > 0
    # All rows of a client that has finished count as real: it is computed like the others, and its result dropped.
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
    """What a stack trains on, before its first step."""
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
    """What must be the same for contents to share tensors: all but the numbers of clients, steps and samples."""
    parts = []
    for group, leading in (("samples", 1), ("schedule", 2), ("clients", 1), ("shared", 0)):
        tensors, names = tree_flatten(contents[group])
        parts.append((repr(names), *((part.shape[leading:], part.dtype) for part in tensors)))
    return tuple(parts)


def _allocate(sizes: tuple[int, ...], value: Tensor) -> Tensor:
    """Zeros like `value`, but of these sizes in the first dimensions."""
    return value.new_zeros((*sizes, *value.shape[len(sizes) :]))


def _copy(target: Tensor, value: Tensor) -> None:
    """Copy a value to the beginning of every dimension of a tensor."""
    target[tuple(slice(size) for size in value.shape)].copy_(value)


def _overwrite(trains: Tensor, target: Tensor, value: Tensor) -> None:
    """Copy the values, `(clients, ...)`, of the clients that train, `(clients,)`."""
    target.copy_(torch.where(trains.view(-1, *[1] * (target.dim() - 1)), value, target))


def _power_of_two(least: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << max(0, least - 1).bit_length()
