"""Stacks that train by captured steps: at fixed shapes, over tensors that stay where they are from round to round.

A step is captured once for a number of places. Clients that have finished keep their place until half of the places are
free, and nothing of theirs changes; then the step for half as many places takes over, on the same tensors. Batches are
as wide as the batch size, with a mask. Which step it is is counted on the device, so a step needs nothing of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_

from fedskew.engine._capture import WARM_UPS, Captured
from fedskew.engine._sequential import ClientResult
from fedskew.engine.cohort._rules import why_not_captured
from fedskew.engine.cohort._stack import Member, Stack, left
from fedskew.engine.cohort._step import Held, Step, StepInputs
from fedskew.hooks import Named
from fedskew.local_steps import StepSettings
from fedskew.models import ModelState

KINDS = 4
"""How many kinds of stacks have tensors of their own at a time: with and without states of a first participation."""

Tensors = dict[str, dict[str, Any]]
"""What a stack trains on, in groups whose first dimensions are alike: "samples" `(samples, ...)`, "schedule" `(steps,
clients, ...)`, "clients" `(clients, ...)`, and "shared" by all."""


class Captures:
    """The captured steps of one backend.

    `refused`: why its stacks aren't trained by captured steps, in words; None as long as there is no reason.
    """

    def __init__(self, step: Step) -> None:
        self.refused: str | None = None
        self._step = step
        self._arenas: dict[Any, _Arena] = {}

    def train(self, members: Sequence[Member]) -> list[ClientResult] | None:
        """Every step of clients of one kind, as `Stack.train`; None where nothing is captured."""
        self.refused = self.refused or why_not_captured(self._step.work, members[0].started.samples)
        if self.refused is not None or not members[0].steps:
            return None
        try:
            stack = Stack(self._step, members, apart=True)
            arena = self._arena(stack)
        except Exception as error:  # whatever it is: the steps that aren't captured raise it too, or do without
            self.refused = " ".join(f"capture failed: {error}".split())
            return None
        return arena.train(stack)

    def _arena(self, stack: Stack) -> _Arena:
        """Tensors that hold the stack, and the steps that it needs, captured."""
        contents, room = _contents(stack), Room.of(stack)
        fewest = 1 if stack.fewest == 1 and self._step.networks.train.has_batch_norm else 2  # it refuses a single value
        kind = fewest, _kind(contents)
        arena = self._arenas.get(kind)
        if arena is None or not arena.room.holds(room):
            if arena is not None:
                room = room.beside(self._arenas.pop(kind).room)
            elif len(self._arenas) == KINDS:
                self._arenas.pop(next(iter(self._arenas)))
            arena = self._arenas[kind] = _Arena(self._step, stack.settings, fewest, contents, room)
        arena.prepare(stack, contents)
        return arena


class Room(NamedTuple):
    """For how many clients, steps and samples tensors are made."""

    clients: int
    steps: int
    samples: int

    @classmethod
    def of(cls, stack: Stack) -> Self:
        """That of a stack, with some to spare, so that it need not be made anew for every slightly larger one."""
        steps = max(len(stack.active), WARM_UPS + 1)
        return cls(len(stack.members), _power_of_two(steps), _power_of_two(len(stack.held.targets)))

    def holds(self, other: Room) -> bool:
        """Whether it is as large in every way."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def beside(self, other: Room) -> Self:
        """One that holds both."""
        return type(self)(*map(max, self, other))


class _Arena:
    """Tensors for stacks of one kind, and steps over them."""

    def __init__(self, step: Step, settings: StepSettings, fewest: int, contents: Tensors, room: Room) -> None:
        self.room = room
        self._device = settings.start.device
        sizes = {
            "samples": (room.samples,),
            "schedule": (room.steps, room.clients),
            "clients": (room.clients,),
            "shared": (),
        }
        self._tensors = {group: tree_map(partial(_space, sizes[group]), tree) for group, tree in contents.items()}
        self._take = partial(fixed_step, step, settings, fewest, self._tensors)
        self._captured: dict[int, Captured] = {}
        # Steps never run side by side and leave nothing in memory but what they write, so they share it.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def prepare(self, stack: Stack, contents: Tensors) -> None:
        """Capture what isn't yet of the stack's steps, and lay out its tensors."""
        for places in sorted(set(map(self._places, stack.active)) - self._captured.keys(), reverse=True):
            self._fill(contents)
            self._captured[places] = Captured(partial(self._take, places), self._device)
            self._captured[places].capture(self._pool)
        self._fill(contents)

    def train(self, stack: Stack) -> list[ClientResult]:
        """Every step of the stack that was prepared last."""
        for active in stack.active:
            self._captured[self._places(active)]()
        clients = {
            name: tree_map(lambda part: part[: len(stack.members)].clone(), self._tensors["clients"][name])
            for name in ("model", "carried", "totals")
            if name in self._tensors["clients"]
        }
        nothing: list[dict[str, Named]] = [{name: {} for name in stack.work.hooks} for _ in stack.members]
        models = left(clients["model"], clients.get("carried"), slice(0, len(stack.members)))
        return stack.ended(models, clients["totals"], nothing)

    def _places(self, active: int) -> int:
        """For how many places a step of so many clients is captured: all of them, half, a quarter, ..."""
        places = self.room.clients
        while places > 1 and -(-places // 2) >= active:
            places = -(-places // 2)
        return places

    def _fill(self, contents: Tensors) -> None:
        """The contents in the first places; the other clients, and steps beyond the last, have finished."""
        self._tensors["schedule"]["lengths"].zero_()
        tree_map_(_copy, self._tensors, contents)


def fixed_step(step: Step, settings: StepSettings, fewest: int, tensors: Tensors, places: int) -> None:
    """One step of the first `places` clients, in place: the step that "number" says, which then is the next."""
    schedule = tree_map(lambda part: part[:, :places], tensors["schedule"])
    clients = tree_map(lambda part: part[:places], tensors["clients"])
    samples, shared = tensors["samples"], tensors["shared"]
    now = tree_map(lambda part: part.index_select(0, shared["number"]).squeeze(0), schedule)
    lengths, width = now["lengths"], now["rows"].shape[1]
    trains = lengths > 0
    # All rows of a client that has finished count as real: it is computed like the others, and not heeded.
    mask = torch.arange(width, device=lengths.device) < torch.where(trains, lengths, width).unsqueeze(1)
    taken = step.take(
        Held(samples["inputs"], samples["targets"], shared["sent"], clients["own"], clients.get("augmentation")),
        StepInputs(shared["number"], now["rows"], mask, fewest, now.get("dropout")),
        settings._replace(lr=shared["lr"]),
        clients["model"],
        clients.get("carried"),
    )
    after: dict[str, Any] = {"model": taken.model}
    if taken.carried is not None:
        after["carried"] = taken.carried
    tree_map_(partial(_renew, trains), {name: clients[name] for name in after}, after)
    clients["totals"] += torch.where(trains, taken.values * lengths, 0)
    shared["number"] += 1


def _contents(stack: Stack) -> Tensors:
    """What a stack trains on, before its first step."""
    model, carried = stack.begin()
    inputs, targets, sent, own, augmentation = stack.held
    device, clients = targets.device, len(stack.members)
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


def _space(sizes: tuple[int, ...], value: Tensor) -> Tensor:
    """Zeros like `value`, but of these sizes in the first dimensions."""
    return value.new_zeros((*sizes, *value.shape[len(sizes) :]))


def _copy(space: Tensor, value: Tensor) -> None:
    """Copy a value into the first places of every dimension."""
    space[tuple(slice(size) for size in value.shape)].copy_(value)


def _renew(trains: Tensor, held: Tensor, value: Tensor) -> None:
    """Copy the values, `(clients, ...)`, of those who train, `(clients,)`."""
    held.copy_(torch.where(trains.view(-1, *[1] * (held.dim() - 1)), value, held))


def _power_of_two(least: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << max(0, least - 1).bit_length()
