"""FedGF: step along the gradient at a point between the client's worst neighbour and the server's.

Lee & Yoon, "Rethinking the Flat Minima Searching in Federated Learning", ICML 2024.

    client   p = theta + rho g / ||g||                          the client's own ascent, as in FedSAM
             theta <- SGD(theta, gradient(c w_p + (1 - c) p))
    server   w_p = w + rho_g (w_old - w) / ||w_old - w||        back along the last move
             c = share of the last W rounds in which mean_k ||y_k - w_old|| > T_D

Where clients drift far apart, c rises and the point moves towards the server's; before the first move c is 0, and the
step is FedSAM's. This follows the authors' code, whose grid for T_D is 0.2 and 0.3 and whose launcher calls it `c_o`.
The mean over the clients that replied is unweighted. The norms are those of all trainable parameters. The authors train
10,000 rounds with one local epoch, lr 0.01, weight decay 0.0004 and no momentum.
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.components import Cost
from fedskew.hooks import Hooks, RoundEnd
from fedskew.local_steps._fedsam import ascend
from fedskew.local_steps._optimizers import SGD, descend
from fedskew.local_steps._protocol import Gradient, Named, Stepped, StepSettings
from fedskew.parameters import Count, NonNegative, component

PERTURBED, SHARE, WINDOW = "fedgf.perturbed", "fedgf.share", "fedgf.window"


@component
class FedGF(SGD, Hooks):
    """SGD along the gradient at a point between the client's ascent and the server's.

    Attributes:
        rho: Length of the client's ascent; 0.02, 0.05 or 0.1 in the authors' scripts.
        server_rho: Length of the server's ascent; `rho` where None.
        window: Number of rounds that c looks back (W).
        threshold: Mean distance from the sent model above which a round counts as divergent (T_D).
    """

    paper: ClassVar[str] = "Lee & Yoon, ICML 2024"
    takes_rows: ClassVar[bool] = True
    cost: ClassVar[Cost] = Cost(forward=1, backward=1, models_down=1)

    rho: NonNegative = 0.05
    server_rho: NonNegative | None = None
    window: Count = 30
    threshold: NonNegative = 0.3

    def step(self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings) -> Stepped:
        """Take a step along the gradient at the interpolated point; no argument is written to."""
        ascended = ascend(parameters, gradient, self.rho)
        point = torch.lerp(ascended, settings.broadcast[PERTURBED], settings.broadcast[SHARE])
        return descend(parameters, gradient(point), carried, settings)

    def init_server(self, parameters: Tensor, clients: int) -> dict[str, Tensor]:
        """Return the model itself and an empty window, so that the first round is FedSAM's."""
        return {PERTURBED: parameters.clone(), WINDOW: parameters.new_zeros(0)}

    def broadcast(self, state: Named) -> dict[str, Tensor]:
        """Return the perturbed model, `(parameters,)`, and c, 0-d."""
        window = state[WINDOW]
        return {PERTURBED: state[PERTURBED], SHARE: window.mean() if len(window) else window.new_zeros(())}

    def end_round(self, state: Named, end: RoundEnd) -> dict[str, Tensor]:
        """Return the new model, perturbed, and the window with this round's indicator, 1 or 0."""
        divergent = torch.linalg.vector_norm(end.changes, dim=1).mean() > self.threshold
        window = torch.cat([state[WINDOW], divergent.to(state[WINDOW].dtype).reshape(1)])[-self.window :]
        uphill = end.old - end.new
        reach = (self.rho if self.server_rho is None else self.server_rho) / (torch.linalg.vector_norm(uphill) + 1e-7)
        return {PERTURBED: end.new + reach * uphill, WINDOW: window}
