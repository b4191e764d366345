"""What an objective sees, and what every loss of this folder implements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from fedskew.hooks import Batch
from fedskew.models import Outputs


class Context(NamedTuple):
    """What stays the same during a client's local training, and the outputs of the models it is compared with.

    `counts`: the client's own label counts, `(classes,)`, in the logits' dtype. `teacher`: outputs of the model that
    the server sent, on the same rows, without gradient; None unless a loss reads it. `previous`: the same for the
    model that this client ended its last participation with. `broadcast`: what the server sent beside the model.
    """

    counts: Tensor
    teacher: Outputs | None = None
    previous: Outputs | None = None
    broadcast: Mapping[str, Tensor] = {}


class Loss(Protocol):
    """One component of the objective slot: a frozen dataclass of hyper-parameters.

    `role` is "classification" (exactly one in an objective) or "term" (any number, each with a weight). `reads` names
    what it needs of `Context` beside the counts: "teacher", "previous", or "broadcast".
    """

    role: ClassVar[str]
    reads: ClassVar[frozenset[str]]

    def value(self, batch: Batch, context: Context) -> Tensor:
        """The loss of one batch, 0-d: a mean over real rows, without outer weight and without a branch on values."""


@dataclass(frozen=True)
class Objective:
    """What a client minimises: one classification loss plus weighted terms."""

    loss: Loss
    terms: tuple[tuple[float, Loss], ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """What any of its losses reads."""
        return self.loss.reads.union(*(term.reads for _, term in self.terms))

    def value(self, batch: Batch, context: Context) -> Tensor:
        """The sum of the loss and its weighted terms, 0-d."""
        total = self.loss.value(batch, context)
        for weight, term in self.terms:
            total = total + weight * term.value(batch, context)
        return total
