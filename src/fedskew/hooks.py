"""Hooks: what a component can do around a round, in addition to the function of its slot.

A component that keeps a state between rounds, or sends tensors beside the model, or returns tensors beside its update,
inherits from `Hooks` and overrides the methods that it needs. All states are named tensors, so that they can be
checkpointed, sent and stacked. The components of a method share one name space, so each component prefixes its names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError

if TYPE_CHECKING:  # importing PyTorch would delay commands that do not need it, such as `fedskew weights`
    from torch import Generator, Tensor, nn

Named: TypeAlias = "Mapping[str, Tensor]"


class Batch(NamedTuple):
    """One batch of a client, after the forward pass; of losses that say `takes_stacks` one of each client, `(clients,
    batch, ...)`.

    Attributes:
        features: Input of the last linear layer, `(batch, dim)`.
        logits: Output of the last linear layer, `(batch, classes)`.
        targets: Class ids, `(batch,)` int64.
        mask: True at real rows, `(batch,)` bool; None if every row is real.
        class_weights: What a sample of each class counts for in the classification loss, `(classes,)`; None: 1.
    """

    features: Tensor
    logits: Tensor
    targets: Tensor
    mask: Tensor | None = None
    class_weights: Tensor | None = None


class LocalEnd(NamedTuple):
    """Data available to a client's hook at the end of its local training.

    Attributes:
        start: The parameters that were sent, shape `(parameters,)`.
        parameters: The parameters after training, shape `(parameters,)`.
        buffers: The buffers after training, shape `(buffers,)`.
        broadcast: Tensors that were sent beside the model, by name.
        gathered: Tensors that `gather` collected from the batches, by name.
        full_gradient: Function from parameters to the gradient of the mean objective over all of the client's samples,
            both of shape `(parameters,)`; it uses the sent model's buffers.
        full_loss: Function from parameters to the mean objective over all of the client's samples, 0-d; it uses the
            sent model's buffers.
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
    """Data available to a server's hook at the end of a round.

    Where masks hide what each client sends, or a round's updates are so large that they are added up as they come,
    `changes` is the weighted mean in one row, `weights` is 1, and `replies` holds one mapping, of the sums over those
    that replied; only components that declare `adds_up` have a hook `end_round` then.

    Attributes:
        old: The model that was sent, shape `(parameters,)`.
        new: The next model, shape `(parameters,)`.
        changes: Updates of the clients that replied, shape `(answered, parameters)`.
        ids: Ids of these clients, shape `(answered,)`.
        weights: Weights of their updates, shape `(answered,)`.
        replies: Tensors that each of them returned beside its update, by name.
        weight_limit: The largest share that a client's update may have, for hooks that weigh replies by what clients
            say of themselves; None: there is no limit.
    """

    old: Tensor
    new: Tensor
    changes: Tensor
    ids: NDArray[np.int64]
    weights: NDArray[np.float64]
    replies: Sequence[Named]
    clients: int
    weight_limit: float | None = None


class Returned(NamedTuple):
    """The server's knowledge when it checks what a client returned beside its update.

    Attributes:
        change: The client's update, shape `(parameters,)`.
        lr: Learning rate of the round; None: the server doesn't know it.
        broadcast: Tensors that were sent beside the model, by name.
    """

    change: Tensor
    steps: int
    samples: int
    lr: float | None
    momentum: float
    broadcast: Named


def fednova_normaliser(steps: int, momentum: float) -> float:
    """Compute how many gradients a local update by SGD with momentum amounts to, a(tau, rho).

        a = [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho)

    The momentum buffer is empty before the first step. FedNova divides updates by a, SCAFFOLD its control variates.
    """
    if not 0 <= momentum < 1:
        raise ArgumentError(f"momentum: must be in [0, 1), got {momentum}")
    if not (float(steps).is_integer() and steps >= 0):
        raise ArgumentError(f"steps: must be whole numbers, 0 or above, got {steps}")
    steps = int(steps)
    return float((steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum))


class Hooks:
    """Base class of components that act around a round. A hook that is not overridden does nothing.

    Attributes:
        keeps_state: A property for rules of compatibility; see `fedskew.components.PROPERTIES`.
        bounded_returns: Names of returned tensors that `refuse` bounds. The largest value of any other is compared with
            other sites'.
    """

    keeps_state: ClassVar[bool] = True
    bounded_returns: ClassVar[frozenset[str]] = frozenset()

    def adapt(self, module: nn.Module, generator: Generator) -> nn.Module:
        """Return the network to train in place of the method's; called once, before the first round.

        Args:
            generator: Draws the weights of new layers; on the CPU.
        """
        return module

    def init_server(self, parameters: Tensor, clients: int) -> dict[str, Tensor]:
        """Return the component's state at the server before the first round."""
        return {}

    def broadcast(self, state: Named) -> dict[str, Tensor]:
        """Return what the server sends to every client of the cohort beside the model."""
        return {}

    def init_client(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the component's state at a client before the client's first participation."""
        return {}

    def gather(self, gathered: Named, batch: Batch, last_epoch: bool) -> Named:
        """Collect tensors from a batch of local training.

        Args:
            gathered: Tensors collected so far in this round, by name; empty before the first batch.
            batch: The batch as the step's first forward pass saw it, without gradient.
            last_epoch: Whether the batch belongs to the last local epoch; where that is not trained to its end, whether
                it is one of the last batches, as many as an epoch has.
        """
        return gathered

    def end_local(self, end: LocalEnd) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Make the client's next state and its reply at the end of local training.

        Returns:
            The client's next state, and what the client returns beside its update; both tensors by name.
        """
        return {}, {}

    def refuse(self, returned: Named, seen: Returned) -> str | None:
        """Return why what a site returned can't be true, where the server can tell; None: nothing is wrong.

        Only a federation of real sites asks, whose sites could send anything. Shapes, dtypes and finite values have
        been checked before.

        Args:
            returned: Tensors that the client returned beside its update, by name; those of all components.
            seen: What the server knows of the client's local training.

        Returns:
            The reason, in one line that goes on "the reply is refused: ".
        """
        return None

    def next_model(self, end: RoundEnd) -> Tensor:
        """Return the next model, where the component sets some of its parameters itself; called before `end_round`.

        Args:
            end: Data about the round; `new` is the model that the server update made.
        """
        return end.new

    def end_round(self, state: Named, end: RoundEnd) -> dict[str, Tensor]:
        """Return the component's next state at the server."""
        return dict(state)

    def evaluated(self, state: Named, parameters: Tensor) -> Tensor:
        """Return the parameters to evaluate and to save, if training continues with other parameters."""
        return parameters
