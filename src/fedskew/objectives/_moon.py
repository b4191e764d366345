"""MOON: pull a client's representation towards the sent model's and away from its own previous model's.

Li et al., "Model-Contrastive Federated Learning", CVPR 2021.

    L = mean_n  -log( e^{g / tau} / (e^{g / tau} + e^{p / tau}) )
        g = cos(z, z_global),    p = cos(z, z_previous)

z is the output of a projection head, encoder - linear d to d - ReLU - linear d to 256, which takes the place of the
network's last hidden layer and is averaged with the rest, as in the authors' code (FedVLS's has linear d to d/2, ReLU,
linear d/2 to 256). The sent and the previous model run in evaluation mode. At its first participation a client has no
previous model: the term is 0, as in the authors' code (FedVLS's takes the client's random initialisation).
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedskew.hooks import Batch, Hooks, LocalEnd
from fedskew.models import Outputs, Projected, lengths_of, unit_rows
from fedskew.objectives._protocol import Context, Term
from fedskew.objectives._tensors import by_rows, real_rows, row_mean
from fedskew.parameters import Positive, component


@component
class MOON(Term, Hooks):
    """MOON's term, on a network with a projection head.

    The weight is the paper's mu, 5 for CIFAR-10 and 1 for CIFAR-100 and TinyImageNet; the FedVLS comparison has 0.01.
    A client keeps the model that its last participation ended with.

    Attributes:
        temperature: Divides the cosines (tau).
    """

    temperature: Positive = 0.5

    reads: ClassVar[frozenset[str]] = frozenset({"teacher", "previous"})
    takes_findings: ClassVar[bool] = True
    takes_stacks: ClassVar[bool] = True
    paper: ClassVar[str] = "Li et al., CVPR 2021"
    default_weight: ClassVar[float] = 5.0

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`; 0 where the client has no previous model. A zero vector has cosine 0 with everything."""
        if context.previous is None:
            return batch.features[..., :0].sum((-2, -1))
        return self._parts(batch, context.sent, context.previous)[0]

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, None, Tensor | None]:
        """See `Sloped.slope`."""
        if context.previous is None:
            return self.value(batch, context), None, None
        value, own, length, away, gap = self._parts(batch, context.sent, context.previous)
        by_gap = by_rows(gap.sigmoid(), batch.mask)
        # Of features shorter than 1e-6, which have no direction, the second part is too small to matter.
        return value, None, torch.addcmul(away, gap, own, value=-1) * (by_gap / length)

    def _parts(self, batch: Batch, sent: Outputs, previous: Outputs) -> tuple[Tensor, ...]:
        mine, *others = (real_rows(rows, batch.mask) for rows in (batch.features, sent.features, previous.features))
        own = mine / (length := lengths_of(mine))
        near, far = (unit_rows(rows.detach()) for rows in others)
        away = (far - near) / self.temperature
        gap = (away * own).sum(-1, keepdim=True)
        return row_mean(F.softplus(gap.squeeze(-1)), batch.mask), own, length, away, gap

    def adapt(self, module: nn.Module, generator: Generator) -> nn.Module:
        """Return the network with a projection before its head; ArgumentError where it has no features and head."""
        return Projected(module, generator)

    def end_local(self, end: LocalEnd) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Keep the client's model, the previous model of its next participation."""
        return {"previous.parameters": end.parameters, "previous.buffers": end.buffers}, {}
