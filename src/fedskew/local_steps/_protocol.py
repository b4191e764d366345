"""What a local step receives and returns.

Parameters travel as one flat vector, `(parameters,)`; a step is a pure function of it, so that it serves one client
and, mapped, a whole cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from fedskew.models import Product

Gradient = Callable[[Tensor], Tensor]
"""The gradient of this batch's objective at any parameters: `(parameters,)` to `(parameters,)`.

The vector it returns may be overwritten by the next call, and is not to be written to.
"""


class StepSettings(NamedTuple):
    """What stays the same during a client's local training.

    `start`: the parameters that the server sent; `lr`: a 0-d tensor where one captured step serves all rounds;
    `broadcast`: what the server sent beside them; `client`: what the client kept (see `fedskew.hooks`).
    """

    start: Tensor
    lr: float | Tensor
    momentum: float = 0.0
    weight_decay: float = 0.0
    broadcast: Mapping[str, Tensor] = {}
    client: Mapping[str, Tensor] = {}


class LocalStep(Protocol):
    """One component of the local-step slot: a frozen dataclass of hyper-parameters."""

    def init(self, settings: StepSettings) -> Tensor | None:
        """What is carried from step to step, fresh at the start of every round (a momentum buffer); None: nothing."""

    def step(
        self, parameters: Tensor, gradient: Gradient, carried: Tensor | None, settings: StepSettings
    ) -> tuple[Tensor, Tensor | None]:
        """The next parameters, and what is carried to the next step."""


@runtime_checkable
class InPlace(Protocol):
    """A local step that takes one gradient, at the parameters themselves, can also write over what it is given.

    For a large model with small batches, where memory is what a step waits for, that saves a fifth of the time.
    """

    def step_in_place(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor | Product],
        carried: list[Tensor],
        settings: StepSettings,
    ) -> None:
        """Make of `parameters` the next ones, and of `carried` what is carried to the next step.

        All are parts of the vectors, one for each of the network's parameters; `carried` is empty where nothing is.
        `gradients`, which may share memory with each other, are not to be written to; those of wide layers are products
        (see `fedskew.models.WideLinear`).
        """
