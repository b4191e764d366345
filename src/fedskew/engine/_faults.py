"""Which updates are finite; and who is to blame where a client's training gave NaN or infinity.

The latter is found out by the same training once more, watched step by step.

Draws depend on seed, round and client only, so the same happens again. A component of a user's own, or a network, is to
blame if it is the first to return such a value, and what it was given was finite and below `LARGE`. Otherwise the
training diverged, as it does with too large a learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.components import seen_by
from fedskew.engine._backend import Assignment, LocalWork, Sent, Update
from fedskew.engine.contracts import LARGE, is_own, name_in
from fedskew.errors import ComponentError, RunError
from fedskew.hooks import Batch, Hooks, LocalEnd, Named
from fedskew.local_steps import Gradient, LocalStep, StepSettings
from fedskew.models import FlatModel
from fedskew.objectives import Context, Objective


def finite(updates: Sequence[Update]) -> list[Update]:
    """Return the updates without a NaN or infinite value. Waits for the GPU once, not once an update."""
    # a sum of norms is finite only if all of the update is, and far faster than a test of every element
    sums = [sum(map(torch.linalg.vector_norm, _beside(update)), start=update.norm) for update in updates]
    norms = torch.stack(sums).tolist() if updates else []
    return [
        update
        for update, norm in zip(updates, norms, strict=True)
        if math.isfinite(norm) or is_finite(update.change, *_beside(update))  # the norm alone may overflow
    ]


def stilled(update: Update) -> Update:
    """Return an update, or one of zeros in its place where a value is NaN or infinite.

    With differential privacy a client whose training diverged adds noise alone: that it diverged is told to nobody.
    """
    if finite([update]):
        return update
    return update._replace(change=torch.zeros_like(update.change), norm=torch.zeros_like(update.norm))


def find_fault(
    backend: Any, round: int, tasks: Sequence[Assignment], sent: Sent, replies: Sequence[Update], fine: set[int]
) -> None:
    """Find out whether a component of a user's own is to blame for an update or a loss that is not finite."""
    suspects = {update.client for update in replies if update.client not in fine or not math.isfinite(update.loss)}
    task = next((task for task in tasks if task.client in suspects), None)
    find = getattr(backend, "find_fault", None)  # a user's own backend may have none
    if task is not None and find is not None and (fault := find(round, task, sent)) is not None:
        raise fault


def _beside(update: Update) -> list[Tensor]:
    """Return the floating-point tensors of an update other than its change, without empty ones."""
    parts = (update.buffers, *update.reply.values(), *update.state.values())
    return [part for part in parts if part.is_floating_point() and part.numel()]


class _DivergedError(RunError):
    """Nobody is to blame."""


def watched(work: LocalWork, model: FlatModel) -> LocalWork:
    """Return the same local training with components that look at what goes through them."""
    network = own_network(model.module)
    return replace(
        work,
        objective=_Objective(**vars(work.objective), model=model, network=network),
        local_step=_Step(work.local_step, network),
        hooks={place: _Hooks(place, hooks) for place, hooks in work.hooks.items()},
    )


def own_network(module: nn.Module) -> str | None:
    """Return the name of a network that holds layers of a user's own; None for one of PyTorch's layers or of ours."""
    kinds = [type(layer) for layer in module.modules()]
    own = [kind for kind in kinds if not kind.__module__.startswith(("fedskew.", "torch.nn."))]
    return f"the network {own[0].__module__}:{own[0].__qualname__}" if own else None


def is_finite(*parts: Tensor | None) -> bool:
    """Return whether all of these tensors are finite; None and whole numbers count as finite."""
    return all(
        part is None or not part.is_floating_point() or not part.numel() or all(map(math.isfinite, part.aminmax()))
        for part in parts
    )


def is_moderate(*parts: Tensor | None) -> bool:
    """Return whether all values are finite and below `LARGE`."""
    return all(part is None or not part.numel() or float(part.abs().max()) < LARGE for part in parts)


def _check(
    values: Iterable[Tensor | None], name: str | None, given: Iterable[Tensor | None], what: str, cure: str
) -> None:
    """Raise the error that blames a component of a user's own (None: it is not) for values that are not finite, unless
    what it was given is not moderate."""
    if is_finite(*values):
        return
    if name is None or not is_moderate(*given):
        raise _DivergedError("diverged")
    raise ComponentError(f"{name} {what}, although all that it was given is finite; {cure}")


def _own_name(place: str, component: Any) -> str | None:
    return name_in(place, component) if is_own(component) else None


@dataclass(frozen=True)
class _Objective(Objective):
    """An objective that looks at each loss, and at the network's outputs."""

    model: FlatModel | None = None
    network: str | None = None

    def value(self, batch: Batch, context: Context) -> Tensor:
        assert self.model is not None
        seen = batch.features.detach(), batch.logits.detach()
        _check(
            seen, self.network, [self.model.vector], "returns a value that is NaN or infinite", "look at its forward()"
        )
        cure = "guard logarithms, roots and quotients (classes that the client lacks, rows that mask leaves out)"
        places = {"objective": self.loss, **{f"objective.terms[{at}]": loss for at, (_, loss) in enumerate(self.terms)}}
        for place, loss in places.items():
            name, value = _own_name(place, loss), self.valued(loss, self.weighed(batch), context)
            said = f"returns {float(value.detach()):g}"
            _check([value.detach()], name, seen, said, cure)
            leaves = [part for part in (batch.features, batch.logits) if part.requires_grad]
            if value.requires_grad and leaves:
                gradients = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
                _check(gradients, name, seen, f"{said} with a gradient that is NaN or infinite", cure)
        return super().value(batch, context)


@dataclass(frozen=True)
class _Step:
    """A local step that looks at the gradient, and at the parameters that it returns."""

    inner: LocalStep
    network: str | None

    def init(self, settings: StepSettings) -> Named | None:
        return self.inner.init(settings)

    def step(
        self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings, **seen: Any
    ) -> tuple[Tensor, Named | None]:
        given = [parameters, *carried.values()]

        def watched(at: Tensor, *part: Any) -> Tensor:
            found = gradient(at, *part)
            what, cure = "has a gradient that is NaN or infinite", "look at its forward(), at roots"
            _check([found], self.network, [at], what, cure)
            given.append(found)
            return found

        after, carries = self.inner.step(parameters, watched, carried, settings, **seen_by(self.inner.step, seen))
        name, what = _own_name("local_step", self.inner), "returns parameters that are NaN or infinite"
        _check([after, *(carries or {}).values()], name, given, what, "look at its step()")
        return after, carries


class _Hooks(Hooks):
    """Hooks that look at what the client keeps and returns."""

    def __init__(self, place: str, inner: Hooks) -> None:
        self._place, self._inner = place, inner

    def gather(self, gathered: Named, batch: Batch, last_epoch: bool) -> Named:
        return self._inner.gather(gathered, batch, last_epoch)

    def end_local(self, end: LocalEnd, **seen: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        kept, replied = self._inner.end_local(end, **seen_by(self._inner.end_local, seen))
        name, given = _own_name(self._place, self._inner), (end.parameters, *end.gathered.values())
        for key, value in [*kept.items(), *replied.items()]:
            _check([value], name, given, f"returns NaN or infinity as {key!r}", "look at its end_local()")
        return kept, replied
