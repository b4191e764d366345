"""Linear layers far wider than a batch; the gradient of their weight is kept as a product of two thin matrices.

With millions of weights and small batches, memory bandwidth limits a step. Not writing the gradient to memory saves two
passes over the weight (measured in `docs/performance.md`). Only `FlatModel.descend` uses this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedskew.models._added import is_plain

WIDE = 2**20
"""Weights from which on a layer is wide: 4 MB, more than a core's own caches hold."""


class Product(NamedTuple):
    """The gradient of a weight, `(out, in)`: the transpose of `left`, `(batch, out)`, times `right`, `(batch, in)`."""

    left: Tensor
    right: Tensor

    def descend(self, weight: Tensor, velocity: Tensor | None, lr: float, momentum: float, weight_decay: float) -> None:
        """Take one SGD step of the weight, and of its momentum buffer if there is one, in place."""
        if velocity is None:
            weight.addmm_(self.left.t(), self.right, beta=1 - lr * weight_decay, alpha=-lr)
            return
        velocity.mul_(momentum).addmm_(self.left.t(), self.right)
        if weight_decay:
            velocity.add_(weight, alpha=weight_decay)
        weight.sub_(velocity, alpha=lr)


def wide_layers(module: nn.Module) -> list[nn.Linear]:
    """Return the layers of a network whose weight is wide and trainable, and to which nobody has added hooks."""
    return [
        layer
        for layer in module.modules()
        if type(layer) is nn.Linear and layer.weight.numel() >= WIDE and layer.weight.requires_grad and is_plain(layer)
    ]


def gradients(
    objective: Callable[[], Tensor], parameters: Sequence[nn.Parameter], layers: Sequence[nn.Linear]
) -> list[Tensor | Product]:
    """Differentiate the 0-d result of `objective` with respect to each parameter.

    A gradient is zero if the result does not depend on the parameter. The gradient of the weight of one of `layers` is
    a `Product` if the result depends on the weight by one use of the layer only, on inputs `(batch, in)`.
    """
    seen: dict[Tensor, list[tuple[Tensor, Tensor]]] = {}

    def keep(weight: Tensor, layer: nn.Module, inputs: tuple[Any, ...], outputs: Tensor) -> None:
        seen.setdefault(weight, []).append((inputs[0].detach(), outputs))

    hooks = [layer.register_forward_hook(partial(keep, layer.weight)) for layer in layers]
    try:
        value = objective()
    finally:
        for hook in hooks:
            hook.remove()
    reads = _reads(value) if seen else Counter()
    once = {
        weight: uses[0]
        for weight, uses in seen.items()
        if len(uses) == 1 and uses[0][0].dim() == 2 and reads[weight] == 1
    }
    whole = [parameter for parameter in parameters if parameter not in once]
    found = torch.autograd.grad(value, [*whole, *(outputs for _, outputs in once.values())], allow_unused=True)
    known: dict[Tensor, Tensor | Product | None] = dict(zip(whole, found, strict=False))
    for (weight, (inputs, _)), left in zip(once.items(), found[len(whole) :], strict=True):
        known[weight] = None if left is None else Product(left, inputs)
    return [
        torch.zeros_like(parameter) if (gradient := known[parameter]) is None else gradient for parameter in parameters
    ]


def _reads(value: Tensor) -> Counter[Tensor]:
    """Return how many operations, of those that a value depends on, read each parameter."""
    counts: Counter[Tensor] = Counter()
    seen: set[Any] = {value.grad_fn}
    waiting = [value.grad_fn] if value.grad_fn is not None else []
    while waiting:
        for operation, _ in waiting.pop().next_functions:
            parameter = getattr(operation, "variable", None)
            if parameter is not None:
                counts[parameter] += 1
            elif operation is not None and operation not in seen:
                seen.add(operation)
                waiting.append(operation)
    return counts
