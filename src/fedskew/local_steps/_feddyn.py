"""FedDyn: local objectives that change with what each client has learnt, so that their optima become the common one.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, algorithm 1. Client k finds

    y_k = argmin_y L_k(y) - <g_k, y> + (alpha / 2) ||y - w||^2          g_k <- g_k - alpha (y_k - w)

by local steps. Where it succeeds, g_k is the gradient of L_k at y_k. Here, as in the authors' code, a client keeps the
sum of its changes, r_k, instead of g_k = -alpha r_k:

    g <- gradient + alpha (r_k + y - w)                                 r_k <- r_k + (y_k - w)

The server's half is the server update `feddyn`; neither is FedDyn without the other, and the preset `feddyn` has both
and the paper's equal weights. The authors' code gives a client with fewer samples a larger alpha, in inverse
proportion; in the paper and here alpha is the same for all. It also clips gradients to norm 10; here nothing is
clipped. Two public libraries compute something else: FL-bench leaves alpha y out of the gradient unless the weight
decay is alpha too, and fluke multiplies a g_k that contains alpha by alpha once more.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.components import Cost
from fedskew.hooks import Hooks, LocalEnd
from fedskew.local_steps._optimizers import SGD
from fedskew.local_steps._protocol import Correction, StepSettings
from fedskew.parameters import Positive, component

DRIFT = "feddyn.drift"


@component
class FedDyn(SGD, Hooks):
    """SGD on the objective with FedDyn's linear and quadratic terms.

    Attributes:
        alpha: Strength of both; 0.01 in the paper for CIFAR-10 and CIFAR-100, from a grid of 0.001, 0.01 and 0.1.
    """

    paper: ClassVar[str] = "Acar et al., ICLR 2021"
    takes_rows: ClassVar[bool] = True
    cost: ClassVar[Cost] = Cost(client_models=1)
    corrects_gradients: ClassVar[bool] = True
    is_dynamic: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {
        "server_update.not is_dynamic": "it is one half of FedDyn, and without the server's half the model comes to "
        "rest between where it began and the optimum; take the preset feddyn, which has both, or fedprox"
    }
    warns: ClassVar[Mapping[str, str]] = {
        "weighting.not weighs_equally": "FedDyn's terms lead every client to the optimum of the plain mean of all "
        "clients' objectives, so weights don't move where it ends; its paper weighs uniformly"
    }

    alpha: Positive = 0.01

    def correction(self, settings: StepSettings) -> Correction:
        """Return the gradient of FedDyn's two terms."""
        return Correction(settings.client[DRIFT] * self.alpha, self.alpha)

    def init_client(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the sum of the client's changes, zeros, `(parameters,)`."""
        return {DRIFT: torch.zeros_like(parameters)}

    def end_local(self, end: LocalEnd) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sum of the client's changes; the server adds up the updates itself."""
        return {DRIFT: end.client[DRIFT] + (end.parameters - end.start)}, {}
