"""What a component may do around a round, beside its slot's own function.

A component that keeps something between rounds, sends something beside the model, or returns something beside its
update inherits from `Hooks` and overrides what it needs. All states are named tensors, so that they can be
checkpointed, sent and stacked. The components of a method share one name space, so each component prefixes its names.
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
    """What a client knows at the end of its local training.

    Attributes:
        start: The parameters that were sent, shape `(parameters,)`.
        parameters: The parameters after training, shape `(parameters,)`.
        buffers: The buffers after training, shape `(buffers,)`.
        steps: The number of local steps taken.
        lr: The learning rate of this round.
        momentum: The momentum of the client's SGD.
        client: The client's state before.
        broadcast: What was sent beside the model.
        gathered: What `gather` collected from the batches.
        full_gradient: The objective's gradient over all of the client's samples at given parameters, shape
            `(parameters,)`, with the sent model's buffers.
        full_loss: The same for the objective's mean, 0-d.
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
    """What the server knows at the end of a round.

    Attributes:
        old: The model that was sent, shape `(parameters,)`.
        new: The next model, shape `(parameters,)`.
        changes: Updates of the clients that replied, shape `(answered, parameters)`.
        ids: Their client ids, shape `(answered,)`.
        weights: Their weights, shape `(answered,)`.
        replies: What each returned beside its update.
        clients: The number of all clients.
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
        """Return the network to train in place of `module`, with new weights drawn from `generator`, all on the CPU.

        Raises:
            ArgumentError: The network can't be adapted.
        """
        return module

    def init_server(self, parameters: Tensor, clients: int) -> dict[str, Tensor]:
        """Return what the server keeps between rounds, before the first round."""
        return {}

    def broadcast(self, state: Named) -> dict[str, Tensor]:
        """Return what the server sends to every client of the cohort beside the model."""
        return {}

    def init_client(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return what a client keeps between its participations, before its first, given the model sent."""
        return {}

    def gather(self, gathered: Named, batch: Batch, last_epoch: bool) -> Named:
        """Return `gathered` (empty at first) with a batch added, as its step's first pass saw it, without gradient."""
        return gathered

    def end_local(self, end: LocalEnd) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the client's next state, and what it returns beside its update."""
        return {}, {}

    def end_round(self, state: Named, end: RoundEnd) -> dict[str, Tensor]:
        """Return the server's next state."""
        return dict(state)

    def evaluated(self, state: Named, parameters: Tensor) -> Tensor:
        """Return the parameters to evaluate and save, where training goes on from others."""
        return parameters
