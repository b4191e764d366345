"""Stochastic gradient descent with momentum and weight decay, the local step of FedAvg.

The semantics are those of `torch.optim.SGD` (no dampening, no Nesterov), with a fresh momentum buffer each round:

    d = g + weight_decay * theta        b = momentum * b + d        theta = theta - lr * b
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.local_steps._protocol import Gradient, StepSettings
from fedskew.models import Product
from fedskew.parameters import component


def descend(
    parameters: Tensor, direction: Tensor, carried: Tensor | None, settings: StepSettings
) -> tuple[Tensor, Tensor | None]:
    """The parameters and the momentum buffer after one SGD step along a gradient, `(parameters,)`."""
    if settings.weight_decay:
        direction = torch.add(direction, parameters, alpha=settings.weight_decay)
    if settings.momentum:
        assert carried is not None, "momentum needs the buffer that init() gives"
        # Two roundings, as PyTorch has it: the same trajectory to the bit is worth 10 microseconds.
        carried = direction = (carried * settings.momentum).add(direction)
    if isinstance(settings.lr, Tensor):
        return parameters - settings.lr * direction, carried
    return torch.sub(parameters, direction, alpha=settings.lr), carried


def momentum_buffer(settings: StepSettings) -> Tensor | None:
    """A momentum buffer of zeros, `(parameters,)`; None without momentum."""
    return torch.zeros_like(settings.start) if settings.momentum else None


@component
class SGD:
    """Stochastic gradient descent; learning rate, momentum and weight decay come from the training settings."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def init(self, settings: StepSettings) -> Tensor | None:
        """See `momentum_buffer`."""
        return momentum_buffer(settings)

    def step(
        self, parameters: Tensor, gradient: Gradient, carried: Tensor | None, settings: StepSettings
    ) -> tuple[Tensor, Tensor | None]:
        """One step along the gradient at `parameters`; no argument is written to."""
        return descend(parameters, gradient(parameters), carried, settings)

    def step_in_place(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor | Product],
        carried: list[Tensor],
        settings: StepSettings,
    ) -> None:
        """`step` without a new vector, to the bit but for products, which round otherwise; see `InPlace`."""
        whole, places = [], []
        for place, gradient in enumerate(gradients):
            if isinstance(gradient, Product):
                _descend_along(parameters[place], gradient, carried[place] if carried else None, settings)
            else:
                whole.append(gradient)
                places.append(place)
        if not whole:  # which PyTorch's operations on lists refuse
            return
        parameters = [parameters[place] for place in places]
        if settings.weight_decay:
            whole = list(torch._foreach_add(whole, parameters, alpha=settings.weight_decay))
        if settings.momentum:
            carried = [carried[place] for place in places]
            torch._foreach_mul_(carried, settings.momentum)
            torch._foreach_add_(carried, whole)
            whole = carried
        torch._foreach_sub_(parameters, whole, alpha=float(settings.lr))


def _descend_along(weight: Tensor, gradient: Product, carried: Tensor | None, settings: StepSettings) -> None:
    """One SGD step of a weight, `(out, in)`, and of its momentum, in place, whose gradient is never written down."""
    lr, decay = float(settings.lr), settings.weight_decay
    if settings.momentum:
        assert carried is not None, "momentum needs the buffer that init() gives"
        carried.mul_(settings.momentum).addmm_(gradient.left.t(), gradient.right)
        if decay:
            carried.add_(weight, alpha=decay)
        weight.sub_(carried, alpha=lr)
    else:
        weight.addmm_(gradient.left.t(), gradient.right, beta=1 - lr * decay, alpha=-lr)
