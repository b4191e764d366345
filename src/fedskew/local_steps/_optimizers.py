"""Optimisers: what a local step does with its direction. SGD with momentum, Adam and AdamW, as `torch.optim` has them.

    SGD      d = g + decay w      b = momentum b + d           w <- w - lr b
    Adam     d = g + decay w      m = b1 m + (1 - b1) d        v = b2 v + (1 - b2) d^2
                                  w <- w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
    AdamW    d = g                the same, after w <- (1 - lr decay) w

Before that, g is scaled down to a norm of `clip_norm`, as by `clip_grad_norm_`. With groups of parameters lr and decay
are vectors. No dampening, Nesterov or AMSGrad. What is carried starts at zero in each round, unless clients keep it
(`training.keep_optimizer`).

Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015. Loshchilov & Hutter, "Decoupled Weight Decay
Regularization", ICLR 2019.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fedskew.errors import ComponentError
from fedskew.local_steps._protocol import Adam, Correction, Gradient, Named, Stepped, StepSettings
from fedskew.parameters import component

MEAN, SQUARE, STEPS = "adam.mean", "adam.square", "adam.steps"
"""What Adam carries: m and v, `(parameters,)`, and t, 0-d."""


def descend(parameters: Tensor, direction: Tensor, carried: Named, settings: StepSettings) -> Stepped:
    """Return the parameters, and what the optimiser carries, after one step along a gradient, `(parameters,)`."""
    lr: float | Tensor = settings.lr
    decay: float | Tensor = settings.weight_decay
    direction = _clipped(direction, settings)
    if settings.rates is not None and settings.decays is not None:
        lr, decay = lr * settings.rates, settings.decays
    if settings.adam is not None:
        return _by_adam(parameters, direction, carried, settings.adam, lr, decay)
    direction = _decayed(direction, parameters, decay)
    if settings.momentum:
        # Two roundings, as PyTorch has it: the same trajectory to the bit is worth 10 microseconds.
        direction = (carried["momentum"] * settings.momentum).add(direction)
        carried = {"momentum": direction}
    if isinstance(lr, Tensor):
        return parameters - lr * direction, carried
    return torch.sub(parameters, direction, alpha=lr), carried


def _clipped(direction: Tensor, settings: StepSettings) -> Tensor:
    """Return a gradient, or one for each client, whose norm is `clip_norm` at most."""
    if settings.clip_norm is None:
        return direction
    norms = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    return torch.mul(direction, (settings.clip_norm / (norms + 1e-6)).clamp(max=1.0))


def _decayed(direction: Tensor, parameters: Tensor, decay: float | Tensor) -> Tensor:
    """Return a gradient with that of the L2 penalty."""
    if isinstance(decay, Tensor):
        return torch.addcmul(direction, parameters, decay)
    return torch.add(direction, parameters, alpha=decay) if decay else direction


def _by_adam(
    parameters: Tensor, direction: Tensor, carried: Named, adam: Adam, lr: float | Tensor, decay: float | Tensor
) -> Stepped:
    first, second = adam.betas
    if not adam.decoupled:
        direction = _decayed(direction, parameters, decay)
    elif isinstance(decay, Tensor) or decay:
        parameters = parameters * (1 - lr * decay)
    mean = torch.lerp(carried[MEAN], direction, 1 - first)
    square = torch.addcmul(carried[SQUARE] * second, direction, direction, value=1 - second)
    steps = carried[STEPS] + 1
    # In double precision: of 1 - 0.999^t float32 would keep five digits.
    count = steps.double().unsqueeze(-1)  # of one client, or of each
    of_mean, of_square = ((1 - beta**count).to(parameters.dtype) for beta in (first, second))
    size = torch.sqrt(square) / torch.sqrt(of_square) + adam.eps
    return parameters - lr / of_mean * (mean / size), {MEAN: mean, SQUARE: square, STEPS: steps}


def descend_in_place(parameters: Tensor, direction: Tensor, carried: Named, settings: StepSettings) -> None:
    """Take the same step in one pass over memory; of clients that train together, `(clients, parameters)`."""
    direction, lr, decay = _clipped(direction, settings), settings.lr, settings.weight_decay
    if STEPS in carried:
        carried[STEPS].add_(1)
    if settings.rates is None or settings.decays is None:
        _move(parameters, direction, carried, settings, lr, decay)
        return
    for start, stop in settings.spans:
        part = {name: one if name == STEPS else one[..., start:stop] for name, one in carried.items()}
        own = lr * float(settings.rates[start]), float(settings.decays[start])
        _move(parameters[..., start:stop], direction[..., start:stop], part, settings, *own)


def _move(
    parameters: Tensor, direction: Tensor, carried: Named, settings: StepSettings, lr: float | Tensor, decay: float
) -> None:
    """Take a step in place, of parameters that have one rate and decay."""
    if settings.adam is None:
        vectors = (parameters, direction, *([carried["momentum"]] if settings.momentum else []))
        ours, theirs, *kept = ([one] if parameters.is_contiguous() else list(one.unbind()) for one in vectors)
        torch._fused_sgd_(
            ours, theirs, kept[0] if kept else [], weight_decay=decay, momentum=settings.momentum,
            lr=lr, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
        return
    vectors = (parameters, direction, carried[MEAN], carried[SQUARE])
    ours, theirs, means, squares = (list(part.reshape(-1, part.shape[-1]).unbind()) for part in vectors)
    update = torch._fused_adamw_ if settings.adam.decoupled else torch._fused_adam_
    update(
        ours, theirs, means, squares, [], list(carried[STEPS].view(-1).unbind()), lr=lr, beta1=settings.adam.betas[0],
        beta2=settings.adam.betas[1], weight_decay=decay, eps=settings.adam.eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


@component
class SGD:
    """Steps along the gradient by the optimiser of the training settings, which is SGD unless they name another."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    takes_rows: ClassVar[bool] = True

    def init(self, settings: StepSettings) -> dict[str, Tensor]:
        """Return what the optimiser carries, zeros; nothing for SGD without momentum."""
        start = settings.start
        if settings.adam is not None:
            steps = torch.zeros((), device=start.device)
            return {MEAN: torch.zeros_like(start), SQUARE: torch.zeros_like(start), STEPS: steps}
        return {"momentum": torch.zeros_like(start)} if settings.momentum else {}

    def correction(self, settings: StepSettings) -> Correction | None:
        """Return what is added to every gradient. With `takes_rows = True` beside it, tensors that the client keeps
        have a row for each client of a cohort."""
        return None

    def direction(self, gradient: Tensor, parameters: Tensor, settings: StepSettings) -> Tensor:
        """Return what a step goes along, `(..., parameters)`, from the gradient at `parameters`; neither is written to.
        With `takes_rows = True` beside it, it is given a row for each client of a cohort."""
        added = settings.correction or self.correction(settings)
        if added is None:
            return gradient
        found = gradient + added.shift
        return found.add_(parameters - settings.start, alpha=added.pull) if added.pull else found

    def step(self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings) -> Stepped:
        """Take a step along `direction`; no argument is written to."""
        return descend(parameters, self._direction(parameters, gradient, settings), carried, settings)

    def step_in_place(self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings) -> None:
        """Take the same step in one pass over the parameters; see `InPlace`."""
        added = settings.correction
        if added is not None and not added.pull:  # no vector is made
            found = gradient(parameters).contiguous().add_(added.shift)
        else:
            found = self._direction(parameters, gradient, settings)
        descend_in_place(parameters, found, carried, settings)

    def _direction(self, parameters: Tensor, gradient: Gradient, settings: StepSettings) -> Tensor:
        found: Any = self.direction(gradient(parameters), parameters, settings)
        if isinstance(found, Tensor) and (found.shape, found.dtype) == (parameters.shape, parameters.dtype):
            return found.contiguous()  # fused steps read memory as if it were
        got = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ComponentError(
            f"{type(self).__name__}: direction() must return {parameters.dtype} {tuple(parameters.shape)}, a number "
            f"for each parameter, not {got}"
        )


def corrected(step: Any, settings: StepSettings) -> StepSettings:
    """Return a client's settings, or those of a row for each, with the correction of a step that adds it as SGD does. A
    pull is a part of the decay where both are added to the same gradient."""
    if any(getattr(type(step), one, None) is not getattr(SGD, one) for one in ("direction", "step", "step_in_place")):
        return settings
    added: Correction | None = step.correction(settings)
    if added is None or not settings.is_sgd:
        return settings._replace(correction=added)
    shift = torch.sub(added.shift, settings.start, alpha=added.pull) if added.pull else added.shift
    return settings._replace(correction=Correction(shift), weight_decay=settings.weight_decay + added.pull)
