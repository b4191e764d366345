"""The protocol of a loss, the context that it may read, and the objective that combines losses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from fedskew.components import covers, has, seen_by, takes
from fedskew.errors import ArgumentError, ComponentError
from fedskew.hooks import Batch
from fedskew.models import Outputs
from fedskew.objectives._tensors import Out, distilled, distilled_slope

T = TypeVar("T")


class Context(NamedTuple):
    """Data that a loss may read in addition to the batch.

    Attributes:
        counts: The client's own label counts, shape `(classes,)`, in the logits' dtype; of a stack of clients
            `(clients, 1, classes)`.
        teacher: Outputs of the model that the server sent, on the same rows, without gradient; None unless it is read.
        previous: The same of the model with which this client's last participation ended.
        broadcast: What the server sent beside the model.
        log: Notes a figure; for a `value` with a parameter `log`.
        kept: What `of_counts` has computed, of one client alone; None: it keeps nothing, as where losses are mapped.
    """

    counts: Tensor
    teacher: Outputs | None = None
    previous: Outputs | None = None
    broadcast: Mapping[str, Tensor] = {}
    log: Callable[[str, Any], None] = lambda name, value: None
    kept: dict[Any, Any] | None = None

    def of_counts(self, function: Callable[[Tensor], T]) -> T:
        """Return what a function that has a name (no lambda) makes of the counts: once for all steps of a client."""
        kept = {} if self.kept is None else self.kept
        if function not in kept:
            kept[function] = function(self.counts)
        return cast(T, kept[function])

    @property
    def sent(self) -> Outputs:
        """The teacher's outputs; ArgumentError if the caller gave none."""
        if self.teacher is None:
            raise ArgumentError(
                "context.teacher: this loss reads the outputs of the sent model on the same rows, got None"
            )
        return self.teacher


class Loss(Protocol):
    """A component of the objective slot: a frozen dataclass of hyper-parameters.

    Attributes:
        role: "classification" (exactly one in an objective) or "term" (any number, each with a weight).
        reads: What it needs of `Context` beside the counts: "teacher", "previous", "broadcast".
    """

    role: ClassVar[str]
    reads: ClassVar[frozenset[str]]

    def value(self, batch: Batch, context: Context) -> Tensor:
        """Compute the loss of a batch, without a Python branch on values, so that it can be mapped over a cohort.

        Where the class says `takes_stacks = True`, batch and context may be of several clients, with a first dimension
        more, which is faster than mapping; then one number is returned for each.

        Args:
            batch: Outputs of the client's model on a batch, its labels, and which rows are real.
            context: What else the loss may read.

        Returns:
            The mean over the real rows, 0-d, without the weight that an objective gives a term.
        """


class Sloped(Protocol):
    """A loss that also knows its gradient: autograd would take as long as a small network's step."""

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
        """Compute a batch's value, its gradient by the logits and, if it reads them, that by the features; None: it is
        0. Of a stack of batches, one for each. Batch and context are not written to, and autograd does not look on."""


class Classification:
    """Base class of classification losses that read the batch and the counts alone."""

    role: ClassVar[str] = "classification"
    reads: ClassVar[frozenset[str]] = frozenset()


class Term:
    """Base class of terms that read the batch and the counts alone."""

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset()


class Distillation(Term):
    """Base class of terms that compare with the sent model's outputs on the same rows, by a mean divergence."""

    takes_stacks: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"teacher"})
    default_weight: ClassVar[float] = 0.1
    temperature: float = 1.0

    def left_out(self, batch: Batch, context: Context) -> Out:
        """Return which classes the client's softmax leaves out, and which the sent model's: the same, or more; none."""
        return None, None

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`."""
        return distilled(batch, context.sent.logits, self.left_out(batch, context), self.temperature)

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """See `Sloped.slope`."""
        return distilled_slope(batch, context.sent.logits, self.left_out(batch, context), self.temperature)


@dataclass(frozen=True)
class Objective:
    """The function that a client minimises.

    Attributes:
        loss: The classification loss.
        terms: Further losses, each with its weight.
        class_weights: What a sample of each class counts for in the classification loss; empty: the same.
    """

    loss: Loss
    terms: tuple[tuple[float, Loss], ...] = ()
    class_weights: tuple[float, ...] = ()

    @property
    def losses(self) -> list[Loss]:
        """The classification loss, and the terms without their weights."""
        return [self.loss, *(term for _, term in self.terms)]

    @property
    def reads(self) -> frozenset[str]:
        """All parts of the context that its losses read."""
        return frozenset().union(*(loss.reads for loss in self.losses))

    @property
    def is_sloped(self) -> bool:
        """Whether all losses know their gradients."""
        seen = covers(type(self), "slope", "value")  # who looks at values wants to see them
        return seen and all(covers(loss, "slope", "value") for loss in self.losses)

    @property
    def takes_stacks(self) -> bool:
        """Whether all losses take the batches of several clients at once; none that logs, or reads the broadcast."""
        seen = covers(type(self), "takes_stacks", "value")  # who looks at values looks at one client's
        return (
            seen
            and "broadcast" not in self.reads
            and all(
                covers(loss, "takes_stacks", "value") and has(loss, "takes_stacks") and not takes(loss, "value", "log")
                for loss in self.losses
            )
        )

    def value(self, batch: Batch, context: Context) -> Tensor:
        """Return the sum of the loss and its weighted terms, 0-d; of a stack, one for each client.

        Raises:
            ComponentError: One of them returns something else than a number, 0-d.
        """
        total = self.valued(self.loss, self.weighed(batch), context)
        for weight, term in self.terms:
            total = total + weight * self.valued(term, batch, context)
        return total

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the same and its gradients by logits and by features, of losses that know theirs; None: it is 0."""
        total, *gradients = cast(Sloped, self.loss).slope(self.weighed(batch), context)
        for weight, term in self.terms:
            value, *own = cast(Sloped, term).slope(batch, context)
            total = torch.add(total, value, alpha=weight)
            gradients = [_plus(*pair, weight) for pair in zip_longest(gradients, own)]
        by_logits, by_features = (*gradients, None)[:2]
        return total, by_logits, by_features

    def part(self, which: str | int | None) -> "Objective":
        """Return a part as an objective: "loss" alone, or a term by its number, without its weight; None: the whole."""
        if which is None:
            return self
        if which == "loss":
            return replace(self, terms=())
        if not isinstance(which, int) or not 0 <= which < len(self.terms):
            there = f"terms 0 to {len(self.terms) - 1}" if self.terms else "no terms"
            raise ComponentError(f"gradient(..., {which!r}): the objective has its 'loss' and {there}")
        return replace(self, loss=self.terms[which][1], terms=(), class_weights=())

    @staticmethod
    def valued(loss: Loss, batch: Batch, context: Context) -> Tensor:
        """Return the value of a loss, of which the shape is looked at, not its content."""
        value = loss.value(batch, context, **seen_by(loss.value, {"log": context.log}))
        if isinstance(value, Tensor) and value.shape == batch.logits.shape[:-2]:
            return value
        kind = type(loss)
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ComponentError(
            f"objective {kind.__module__}:{kind.__qualname__}: value() must return one number, a 0-d tensor, the mean "
            f"over the real rows, or with takes_stacks one for each client; got {got} for logits of shape "
            f"{tuple(batch.logits.shape)}"
        )

    def weighed(self, batch: Batch) -> Batch:
        """Return a batch with the weights of classes, if there are any."""
        if not self.class_weights:
            return batch
        weights = torch.tensor(self.class_weights, dtype=batch.logits.dtype, device=batch.logits.device)
        return batch._replace(class_weights=weights)


def _plus(total: Tensor | None, own: Tensor | None, weight: float) -> Tensor | None:
    """Return a sum of gradients, in which the first is overwritten; None is 0."""
    if own is None:
        return total
    return own * weight if total is None else total.add_(own, alpha=weight)
