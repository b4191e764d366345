"""The protocol of a local step, and the settings that it receives.

Parameters travel as one flat vector, `(parameters,)`; a step is a pure function of it, so that it serves one client
and, mapped, a whole cohort. One that says `takes_rows = True` is given one row for each client, which is faster: its
norms are along the last axis.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from fedskew.components import SEEN, covers, has, takes

Named = Mapping[str, Tensor]
Gradient = Callable[..., Tensor]
"""The gradient of this batch's objective at any parameters: `(parameters,)` to `(parameters,)`.

With a second argument, that of a part of it, without its weight: "loss", the classification loss, or the number of a
term, from 0. The next call may overwrite the returned vector; do not write to it.
"""
Stepped = tuple[Tensor, Named]


class Adam(NamedTuple):
    """The optimiser Adam (see `_optimizers`); `decoupled`: AdamW, whose weight decay is apart from the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = False


class Correction(NamedTuple):
    """What a local step adds to every gradient of a client: `shift`, `(parameters,)`, and `pull` times the way from the
    sent parameters, which is exactly 0 where nothing has moved: Adam would make a step of what rounding leaves."""

    shift: Tensor
    pull: float = 0.0


class StepSettings(NamedTuple):
    """Settings that all local steps of a client share.

    Attributes:
        start: The parameters that the server sent.
        lr: Learning rate; a 0-d tensor if clients with different rates train as one cohort.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty; AdamW's own decay.
        broadcast: Tensors that the server sent beside the parameters (see `fedskew.hooks`).
        client: Tensors that the client kept (see `fedskew.hooks`).
        adam: The optimiser, if it is Adam or AdamW; None: SGD.
        clip_norm: Longer gradients are scaled down to this norm before the optimiser gets them; None: they are not.
        rates: Factors of the learning rate, where parameters have their own, `(parameters,)`; None: all are alike.
        decays: In place of `weight_decay`, where there are `rates`, `(parameters,)`.
        spans: Where parameters of one rate and decay begin and end.
        correction: The step's own, computed once for all steps; None: it has none, or computes it in each.
    """

    start: Tensor
    lr: float | Tensor
    momentum: float = 0.0
    weight_decay: float = 0.0
    broadcast: Mapping[str, Tensor] = {}
    client: Mapping[str, Tensor] = {}
    adam: Adam | None = None
    clip_norm: float | None = None
    rates: Tensor | None = None
    decays: Tensor | None = None
    spans: tuple[tuple[int, int], ...] = ()
    correction: Correction | None = None

    @property
    def is_sgd(self) -> bool:
        """Whether the optimiser is SGD, whole gradients move by one rate, and decay is added to them."""
        return all(one is None for one in (self.adam, self.clip_norm, self.rates))

    def plain_rate(self) -> float | None:
        """Return by how much a step of SGD moves against the gradient; None if that is not all that it does."""
        return float(self.lr) if self.is_sgd and not (self.momentum or self.weight_decay) else None


class LocalStep(Protocol):
    """One component of the local-step slot: a frozen dataclass of hyper-parameters."""

    def init(self, settings: StepSettings) -> Named | None:
        """Return what the first step is given as carried: tensors by name of any shape, such as a momentum buffer."""

    def step(
        self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings
    ) -> tuple[Tensor, Named | None]:
        """Take a step; return the next parameters, `(parameters,)`, and what is carried to the next step.

        Args:
            parameters: The model, shape `(parameters,)`; not to be written to.
            gradient: The gradient of this batch's objective at any parameters.
            carried: What `init` or the last step returned to be carried.
        """


class InPlace(Protocol):
    """A local step that can also update the model in place, as it needs one gradient, at its own parameters: of a large
    model with small batches, where memory bandwidth limits a step, that saves a fifth of the time."""

    def step_in_place(self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings) -> None:
        """Take the step that `step` takes, up to rounding, and write it to `parameters` and to what is carried.

        Args:
            parameters: The model's own vector; where clients train together, one for each, `(clients, parameters)`.
            gradient: The gradient of this batch's objective at these parameters, which may be written to.
            carried: What `init` returned.
        """


def steps_in_place(step: Any, rows: bool = False) -> InPlace | None:
    """Return a local step as one that updates the model in place, with `rows` those of clients that train together;
    None if it can't, overrides `step` alone, or, of rows, has a `direction` and does not take them."""
    fits = covers(step, "step_in_place", "step") and not any(takes(step, "step", name) for name in SEEN["step"])
    if rows and hasattr(step, "direction"):
        fits = fits and takes_rows(step)
    return cast(InPlace, step) if fits else None


def takes_rows(step: Any) -> bool:
    """Return whether a local step takes a row for each client: it says so where it defines its functions, or below."""
    return has(step, "takes_rows") and all(
        covers(step, "takes_rows", one) for one in ("step", "direction", "correction")
    )
