"""What a component may do around a round, beside its slot's own function.

A component that keeps something between rounds, sends something beside the model, or returns something beside its
update
inherits from `Hooks` and replaces what it needs; every default does nothing. All states are named tensors, so that they
can be checkpointed, sent and stacked. Names are shared by all components of a method, so a component's own are
distinct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # so that weighing clients from the command line need not wait for PyTorch
    from torch import Generator, Tensor, nn

Named: TypeAlias = "Mapping[str, Tensor]"


class Batch(NamedTuple):
    """One batch of a client, after the forward pass.

    Attributes:
        features: What the last linear layer receives, `(batch, dim)`.
        logits: What it returns, `(batch, classes)`.
        targets: Class ids, `(batch,)` int64.
        mask: True at real rows, `(batch,)` bool; None where every row is real.
    """

    features: Tensor
    logits: Tensor
    targets: Tensor
    mask: Tensor | None = None


class LocalEnd(NamedTuple):
    """A client's local training, just over.

    `start`, `parameters`: what was sent and what came out, `(parameters,)`; `buffers`: what came out, `(buffers,)`;
    `steps`: local steps taken; `lr`, `momentum`: of this round; `client`: the client's state before; `broadcast`: what
    was sent beside the model; `gathered`: what `gather` made of the batches; `full_gradient`, `full_loss`: gradient,
    `(parameters,)`, and mean, 0-d, of the objective over all of the client's samples, at any parameters, with the sent
    model's buffers.
    """

    start: Tensor
    parameters: Tensor
    buffers: Tensor
    steps: int
    lr: float
    momentum: float
    client: Named
    broadcast: Named
    gathered: Named
    full_gradient: Callable[[Tensor], Tensor]
    full_loss: Callable[[Tensor], Tensor]


class RoundEnd(NamedTuple):
    """A round, just over, as the server sees it.

    `old`, `new`: the model sent and the next one, `(parameters,)`; `changes`, `(answered, parameters)`, `ids` and
    `weights`, `(answered,)`: of those who answered; `replies`: what each returned beside its update; `clients`: how
    many there are in all.
    """

    old: Tensor
    new: Tensor
    changes: Tensor
    ids: NDArray[np.int64]
    weights: NDArray[np.float64]
    replies: Sequence[Named]
    clients: int


class Hooks:
    """Base of components that act around a round; every hook does nothing until it is overridden.

    Attributes:
        keeps_state: The property that combination rules read, see `fedskew.components.PROPERTIES`.
    """

    keeps_state: ClassVar[bool] = True

    def adapt(self, module: nn.Module, generator: Generator) -> nn.Module:
        """The network that is trained in place of `module`, its new weights drawn from `generator`, both on the CPU.

        Raises ArgumentError where it can't be adapted.
        """
        return module

    def init_server(self, parameters: Tensor, clients: int) -> dict[str, Tensor]:
        """What the server keeps between rounds, before the first."""
        return {}

    def broadcast(self, state: Named) -> dict[str, Tensor]:
        """What the server sends to every client of the cohort beside the model."""
        return {}

    def init_client(self, parameters: Tensor) -> dict[str, Tensor]:
        """What a client keeps between its participations, before its first; `parameters`: the model sent."""
        return {}

    def gather(self, gathered: Named, batch: Batch, last_epoch: bool) -> Named:
        """What is made of a batch, as the first pass of its step saw it, without gradient; empty before the first."""
        return gathered

    def end_local(self, end: LocalEnd) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The client's next state, and what it returns beside its update."""
        return {}, {}

    def end_round(self, state: Named, end: RoundEnd) -> dict[str, Tensor]:
        """What the server keeps next."""
        return dict(state)

    def evaluated(self, state: Named, parameters: Tensor) -> Tensor:
        """The parameters that are evaluated and saved, where they aren't those that training goes on from."""
        return parameters
