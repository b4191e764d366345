"""FedCOF: the last layer from the clients' class means alone, by how these differ between clients.

Goswami et al., "Covariances for Free", NeurIPS 2025 (arXiv 2412.14326). Client k holds n_kc samples of class c, whose
features have the mean mu_kc, and sends both; K_c clients hold the class. Where a class's samples are spread over the
clients at random, the class has the covariance, without bias,

    S_c = sum over k of n_kc (mu_kc - mu_c) (mu_kc - mu_c)' / (K_c - 1)      mu_c = sum over k of n_kc mu_kc / n_c

and 0 where one client holds it. The layer has no bias, and its rows, of length 1, have the directions of

    G^-1 mu_c         G = sum over c of (n_c - 1) (S_c + shrinkage I) + n mu mu'        mu = sum over c of n_c mu_c / n

Scatter between classes is not in G, which the paper found to be better. Towards a target, each class counts by its mix.
A class that no client holds, or that the target has no share of, is never predicted.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedskew.components import Cost
from fedskew.finish._moments import ClassSums, class_shares, refuse_many, sums_by_class
from fedskew.finish._protocol import Ask, Finished, Head, Known, Observed
from fedskew.hooks import Named
from fedskew.labels import NEVER
from fedskew.parameters import NonNegative, Switch, component


@component
class FedCOF(ClassSums):
    """The last layer from every client's class means; nothing is trained.

    Attributes:
        shrinkage: Variance that is added to every class's in each direction, in the features' own units.
        target: Whether classes count by the target's label mix (needs `[target] mix`), not by that of the clients.
    """

    paper: ClassVar[str] = "Goswami et al., NeurIPS 2025"
    cost: ClassVar[Cost] = Cost(numbers=("C(1 + d) up once (d: features)",))
    most_questions: ClassVar[int] = 2

    shrinkage: NonNegative = 1.0
    target: Switch = False

    def statistics(self, question: Named, observed: Observed) -> dict[str, Tensor]:
        """Return numbers of samples and sums of features by class; see `Finish.statistics`."""
        return sums_by_class(observed)

    def summand(self, question: Named, answer: Named) -> dict[str, Tensor]:
        """Add products of a client's means, and who holds a class; see `Finish.summand`."""
        sizes, sums = answer["sizes"].double(), answer["sums"].double()
        refuse_many("fedcof", *sums.shape)
        means = sums / torch.where(sizes > 0, sizes, 1)[:, None]
        return {**answer, "holders": (sizes > 0).double(), "products": sums[:, :, None] * means[:, None]}

    def finish(self, head: Head, ask: Ask, known: Known) -> Finished:
        """Compute the layer; see `Finish.finish`."""
        mix, notes = self.mix(known)
        found = ask("training")
        sizes, sums, products = (found[name].cpu() for name in ("sizes", "sums", "products"))
        shares = class_shares(sizes, mix)
        means = sums / torch.where(sizes > 0, sizes, 1)[:, None]
        apart = (found["holders"].cpu() - 1).clamp(min=1)
        covariances = (products - sums[:, :, None] * means[:, None]) / apart[:, None, None]
        weights = shares * (1 - 1 / sizes.clamp(min=1))
        centre = shares @ means
        gram = torch.einsum("c,cde->de", weights, covariances) + torch.outer(centre, centre)
        gram += self.shrinkage * weights.sum() * torch.eye(len(gram), dtype=torch.float64)
        weight = normalize((torch.linalg.pinv(gram, hermitian=True) @ means.T).T) * (shares > 0)[:, None]
        bias = torch.zeros_like(shares)
        bias[shares == 0] = NEVER
        return Finished(Head(weight, bias), {"sizes": sizes.long().tolist(), **notes})
