"""Stochastic gradient descent with momentum and weight decay, the local step of FedAvg.

The semantics are those of `torch.optim.SGD` (no dampening, no Nesterov), with a fresh momentum buffer each round:

    d = g + weight_decay * theta        b = momentum * b + d        theta = theta - lr * b
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.local_steps._protocol import Gradient, Named, StepSettings
from fedskew.parameters import component


def descend(parameters: Tensor, direction: Tensor, carried: Named, settings: StepSettings) -> tuple[Tensor, Named]:
    """Return the parameters, and the momentum buffer, after one SGD step along a gradient, `(parameters,)`."""
    if settings.weight_decay:
        direction = torch.add(direction, parameters, alpha=settings.weight_decay)
    if settings.momentum:
        # Two roundings, as PyTorch has it: the same trajectory to the bit is worth 10 microseconds.
        direction = (carried["momentum"] * settings.momentum).add(direction)
        carried = {"momentum": direction}
    if isinstance(settings.lr, Tensor):
        return parameters - settings.lr * direction, carried
    return torch.sub(parameters, direction, alpha=settings.lr), carried


@component
class SGD:
    """Stochastic gradient descent; learning rate, momentum and weight decay come from the training settings."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def init(self, settings: StepSettings) -> dict[str, Tensor]:
        """Return a momentum buffer of zeros; nothing without momentum."""
        return {"momentum": torch.zeros_like(settings.start)} if settings.momentum else {}

    def step(
        self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings
    ) -> tuple[Tensor, Named]:
        """Take a step along the gradient at `parameters`; no argument is written to."""
        return descend(parameters, gradient(parameters), carried, settings)

    def step_in_place(self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings) -> None:
        """Take the same step in one pass over the parameters; see `InPlace`."""
        buffers = [carried["momentum"]] if settings.momentum else []
        torch._fused_sgd_(
            [parameters], [gradient(parameters)], buffers, weight_decay=settings.weight_decay,
            momentum=settings.momentum, lr=float(settings.lr), dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
