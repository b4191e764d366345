"""Ridge head: the last layer that comes nearest to the classes in squares, in closed form.

"AFL: analytic federated learning", arXiv 2405.16240. With features z and y, 1 at a sample's class and 0 elsewhere,

    W, b = argmin of the sum of |W z + b - y|^2 + alpha |W|^2

which needs sums of z z' and of z y' alone, and so does not depend on who holds which samples. The paper's head has no
bias; here b is not penalised, and alpha is `ridge` times the features' mean sum of squares around their means, so that
their scale does not matter. Towards a target, samples are weighed so that the classes have its label mix, which takes
a second question. A class that no client holds, or that the target has no share of, is never predicted.

Its outputs are between 0 and 1 for most samples: they rank classes, and are no logits of calibrated probabilities.
"""

from typing import ClassVar

import torch

from fedskew.finish._moments import PooledMoments, class_shares
from fedskew.finish._protocol import Ask, Finished, Head, Known
from fedskew.labels import NEVER
from fedskew.parameters import Positive, Switch, component


@component
class RidgeHead(PooledMoments):
    """The last layer by ridge regression on the classes; nothing is trained.

    Attributes:
        ridge: Penalty of the layer's weights, as a share of the features' mean variance.
        target: Whether classes count by the target's label mix (needs `[target] mix`), not by that of the clients.
    """

    paper: ClassVar[str] = "arXiv 2405.16240"

    ridge: Positive = 1e-3
    target: Switch = False

    def finish(self, head: Head, ask: Ask, known: Known) -> Finished:
        """Compute the layer; see `Finish.finish`."""
        mix, notes = self.mix(known)
        found = ask("training")
        sizes = found["sizes"].cpu()
        shares = class_shares(sizes, mix)
        weights = shares / sizes.clamp(min=1)
        if mix is None:
            products = found["products"].cpu() / sizes.sum()
        else:
            products = ask("training", weights=weights)["products"].cpu()
        sums = weights[:, None] * found["sums"].cpu()
        centre = sums.sum(0)
        spread = products - torch.outer(centre, centre)
        penalty = (self.ridge * spread.diagonal().mean()).clamp(min=torch.finfo(torch.float64).tiny)
        weight = torch.linalg.solve(
            spread + penalty * torch.eye(len(spread), dtype=torch.float64), (sums - torch.outer(shares, centre)).T
        ).T
        bias = shares - weight @ centre
        bias[shares == 0] = NEVER
        return Finished(Head(weight, bias), {"sizes": sizes.long().tolist(), **notes})
