"""FedBABU: only the body is trained; the last layer stays as it was drawn, the same at all clients.

Oh, Kim & Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

The authors' clients train with a learning rate of 0 for the last layer, which is also not aggregated; here it is frozen
and not sent in a simulation, which is the same. Their clients then train a last layer, or the whole model, for
themselves; fedskew evaluates the model of all clients, with the layer that was drawn.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Generator, nn

from fedskew.hooks import Hooks
from fedskew.local_steps._optimizers import SGD
from fedskew.models import with_fixed_head
from fedskew.parameters import component


@component
class FedBABU(SGD, Hooks):
    """SGD on all layers but the last, which stays as it was drawn."""

    paper: ClassVar[str] = "Oh et al., ICLR 2022"
    keeps_state: ClassVar[bool] = False
    fixes_last_layer: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {
        "objective.fixes_last_layer": "this objective puts a last layer there that is not trained either; take sgd, "
        "fedprox or fedsam as local step"
    }

    def adapt(self, module: nn.Module, generator: Generator) -> nn.Module:
        """Return the network with its head frozen; ArgumentError where it has none."""
        return with_fixed_head(module)
