"""Gaussian head: the last layer that is optimal where each class's features are Gaussian, of one covariance.

"GH-OFL", arXiv 2602.01186, a head for federated learning in one round; elsewhere it is the linear discriminant. Of n
samples, n_c of class c, whose features z have the mean mu_c,

    S     = sum over c of (sum z z' - n_c mu_c mu_c') / n         Sigma = (1 - shrinkage) S + shrinkage tr(S) / d I
    w_c   = Sigma^-1 mu_c                                         b_c   = log pi_c - mu_c' w_c / 2

where pi is the label mix of all clients together, or the target's. A class that no client holds, or that the target has
no share of, is never predicted.
"""

from typing import ClassVar

import torch

from fedskew.finish._moments import PooledMoments, class_shares
from fedskew.finish._protocol import Ask, Finished, Head, Known
from fedskew.labels import NEVER
from fedskew.parameters import Share, Switch, component

JITTER = 1e-6
"""Least shrinkage: with fewer samples than features the covariance is singular."""


@component
class GaussianHead(PooledMoments):
    """The last layer from one mean for each class, and one covariance for all; nothing is trained.

    Attributes:
        shrinkage: Share of the covariance that is replaced by its mean variance in every direction.
        target: Whether classes have the target's label mix (needs `[target] mix`), not that of the clients.
    """

    paper: ClassVar[str] = "arXiv 2602.01186"

    shrinkage: Share = 0.1
    target: Switch = False

    def finish(self, head: Head, ask: Ask, known: Known) -> Finished:
        """Compute the layer; see `Finish.finish`."""
        mix, notes = self.mix(known)
        found = ask("training")
        sizes, sums, products = (found[name].cpu() for name in ("sizes", "sums", "products"))
        shares = class_shares(sizes, mix)
        classes = torch.nonzero(shares)[:, 0]
        means = sums / sizes.clamp(min=1)[:, None]
        spread = (products - (means * sizes[:, None]).T @ means) / sizes.sum()
        floor = torch.finfo(torch.float64).eps * products.diagonal().max()  # what rounding leaves of large means
        even = (spread.diagonal().mean() + 10 * floor) * torch.eye(len(spread), dtype=torch.float64)
        least = max(self.shrinkage, JITTER)
        own = torch.linalg.solve((1 - least) * spread + least * even, means[classes].T).T
        weight, bias = torch.zeros_like(head.weight), torch.full_like(head.bias, NEVER)
        weight[classes] = own
        bias[classes] = shares[classes].log() - (own * means[classes]).sum(1) / 2
        return Finished(Head(weight, bias), {"sizes": sizes.long().tolist(), **notes})
