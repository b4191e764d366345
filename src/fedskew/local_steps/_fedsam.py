"""FedSAM: step along the gradient at the worst nearby point, to find flatter minima.

Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022.

    g = gradient(theta)        g' = gradient(theta + rho g / ||g||)        theta <- SGD(theta, g')

The norm is that of the whole parameter vector, plus 1e-7 as in FedVLS's code. Both gradients are of one batch, so a
step costs two. The momentum of 0.9 that is reported for FedSAM is SGD's own; mixing with the server's direction
(MoFedSAM) is another method. FedVLS's code clips g' to norm 5; here nothing is clipped.
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.components import Cost
from fedskew.local_steps._optimizers import SGD, descend
from fedskew.local_steps._protocol import Gradient, Named, Stepped, StepSettings
from fedskew.parameters import NonNegative, component


def ascend(parameters: Tensor, gradient: Gradient, rho: float) -> Tensor:
    """Return the parameters, or each client's row of them, moved by `rho` along the gradient where it is not zero."""
    uphill = gradient(parameters)
    reach: Tensor = rho / (torch.linalg.vector_norm(uphill, dim=-1, keepdim=True) + 1e-7)
    return parameters + reach * uphill


@component
class FedSAM(SGD):
    """SGD along the gradient at the point that lies a distance `rho` uphill.

    Attributes:
        rho: Length of the ascent; 0.1 in the FedVLS paper.
    """

    paper: ClassVar[str] = "Qu et al., ICML 2022"
    takes_rows: ClassVar[bool] = True
    cost: ClassVar[Cost] = Cost(forward=1, backward=1)

    rho: NonNegative = 0.1

    def step(self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings) -> Stepped:
        """Take a step along the gradient at the perturbed parameters; no argument is written to."""
        return descend(parameters, gradient(ascend(parameters, gradient, self.rho)), carried, settings)
