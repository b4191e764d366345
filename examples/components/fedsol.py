"""FedSOL: the loss's gradient, taken where the proximal term's gradient leads.

Lee et al., "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated Learning", CVPR 2024. With p
the proximal term, here the divergence of predictions from the sent model's (`fedkd`), and l the classification loss:

    g_p = gradient of p at w    w' = w + rho g_p / (|g_p| + 0.0001)    w <- SGD(w, gradient of l at w')

The term is not descended; a step avoids directions in which it rises. Where g_p is 0, as in a round's first step, it is
plain SGD: by the 0.0001 what rounding leaves of g_p leads nowhere. The paper's scaling of g_p by each parameter's
distance from the sent model is left out. In a config:

    [method]
    local_step.name = "fedsol:FedSOL"
    objective.terms = [{ name = "fedkd" }]
"""

from typing import ClassVar

from fedskew.components import Cost
from fedskew.local_steps import SGD
from fedskew.parameters import NonNegative, component


@component
class FedSOL(SGD):
    """Asks for gradients of parts: `gradient(w, 0)` of the objective's first term, `gradient(w, "loss")`."""

    cost: ClassVar[Cost] = Cost(forward=1, backward=1)

    rho: NonNegative = 2.0

    def step(self, parameters, gradient, carried, settings):
        uphill = gradient(parameters, 0)
        direction = gradient(parameters + self.rho / (uphill.norm() + 1e-4) * uphill, "loss")
        return super().step(parameters, lambda at: direction, carried, settings)
