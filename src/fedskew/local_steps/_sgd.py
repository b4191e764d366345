"""Steps along the gradient, the local step of FedAvg: SGD with momentum and weight decay, or another optimiser.

Which one it is, the training settings say (`_optimizers`). SGD is that of `torch.optim.SGD` (no dampening, no
Nesterov), with a fresh momentum buffer each round.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedskew.local_steps._optimizers import descend, descend_in_place, fresh
from fedskew.local_steps._protocol import Gradient, Named, StepSettings
from fedskew.parameters import component


@component
class SGD:
    """Steps along the gradient by the optimiser of the training settings, which is SGD unless they name another."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def init(self, settings: StepSettings) -> dict[str, Tensor]:
        """Return what the optimiser carries, zeros; nothing for SGD without momentum."""
        return fresh(settings)

    def step(
        self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings
    ) -> tuple[Tensor, Named]:
        """Take a step along the gradient at `parameters`; no argument is written to."""
        return descend(parameters, gradient(parameters), carried, settings)

    def step_in_place(self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings) -> None:
        """Take the same step in one pass over the parameters; see `InPlace`."""
        descend_in_place(parameters, gradient(parameters), carried, settings)
