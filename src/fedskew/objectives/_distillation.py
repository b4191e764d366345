"""Distillation from the sent model: over all classes (FedKD), or over the classes that the client holds (FedEKD).

Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; the two names are FedVLS's (its table 13).

    L = T^2 mean_n KL( q^g_n || q_n ),    q = softmax(f / T) over the given classes
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context, Distillation
from fedskew.parameters import Positive, component


@component
class FedKD(Distillation):
    """Distillation from the sent model over all classes. The FedVLS comparison has weight 0.1 and temperature 1.

    Attributes:
        temperature: Divides both models' logits.
    """

    temperature: Positive = 1.0

    paper: ClassVar[str] = "Hinton et al., 2015"

    def classes(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """See `Distillation.classes`."""
        every = torch.ones_like(batch.logits, dtype=torch.bool)
        return every, every


@component
class FedEKD(Distillation):
    """Distillation from the sent model over the classes that the client holds. Weight and temperature as for FedKD.

    Attributes:
        temperature: Divides both models' logits.
    """

    temperature: Positive = 1.0

    paper: ClassVar[str] = "Guo et al., AAAI 2025"

    def classes(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """See `Distillation.classes`."""
        held = context.counts > 0
        return held, held
