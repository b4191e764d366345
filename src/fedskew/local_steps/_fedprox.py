"""FedProx: a pull towards the parameters that the server sent.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020: the local objective gains the proximal term

    (mu / 2) ||theta - w||^2        so that        g <- g + mu (theta - w)

over all trainable parameters, before momentum. Some federated benchmarks don't square the norm (a pull of constant
size, undefined at the start); the paper and this implementation do.
"""

from typing import ClassVar

import torch

from fedskew.local_steps._optimizers import SGD
from fedskew.local_steps._protocol import Correction, StepSettings
from fedskew.parameters import NonNegative, component


@component
class FedProx(SGD):
    """SGD on the objective plus `mu / 2` times the squared distance from the sent parameters.

    Attributes:
        mu: Strength of the pull; 0.01 in the FedVLS paper and 0.0001 in FedEntOpt's; the original searches 0.001 to 1.
    """

    paper: ClassVar[str] = "Li et al., MLSys 2020"
    takes_rows: ClassVar[bool] = True

    mu: NonNegative = 0.01

    def correction(self, settings: StepSettings) -> Correction:
        """Return the gradient of the proximal term."""
        return Correction(torch.zeros_like(settings.start), self.mu)
