"""CCVR: the last layer is trained again, on features drawn from one Gaussian per class.

Luo, Chen, Hu, Zhang, Liang and Feng, "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with
Non-IID Data", NeurIPS 2021. Of a class with n samples, whose features z are the last layer's inputs,

    mu    = sum z / n
    Sigma = (sum z z' - n mu mu') / (n - 1)

over the clients' training samples; `samples` features are drawn from N(mu, Sigma), and the last layer is trained on
those of all classes. The paper's clients send mean and covariance, from which its server computes the same two sums.

The paper does not say how the layer is trained. FL-bench and fluke take one epoch of SGD, whose result depends on the
scale of the features. Here it is the minimum of

    mean cross-entropy + ridge / 2 * sum of squared weights, for features divided by their standard deviations

found by L-BFGS started at the trained layer, which needs no learning rate. Towards a target, the mean is weighted by
its label mix, which has the expectation of drawing features by that mix, with less variance. A class that no client
holds, or that the target has no share of, is never predicted.

If a client has a single sample of a class, its sums for that class reveal that sample's features.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedskew.components import Cost
from fedskew.finish._moments import ClassSums, class_shares, refuse_many, refused_products, sums_by_class
from fedskew.finish._protocol import Ask, Finished, Head, Known, Observed
from fedskew.hooks import Named
from fedskew.labels import NEVER
from fedskew.parameters import Count, NonNegative, Switch, component

JITTER = 1e-6
"""Added to a covariance's diagonal, as a share of the diagonal's mean: with few samples the matrix is singular."""

LEAST_SPREAD = 1e-3
"""Smallest standard deviation by which a feature is divided, as a share of the largest: some features never vary."""

STEPS = 200
"""Most iterations of L-BFGS."""


@component
class CCVR(ClassSums):
    """The last layer trained on features that are drawn from one Gaussian per class.

    Attributes:
        samples: Number of features drawn for each class.
        target: Whether to weigh classes by the target's label mix (needs `[target] mix`); otherwise all count alike.
        ridge: Penalty of the layer's weights.
    """

    paper: ClassVar[str] = "Luo et al., NeurIPS 2021"
    cost: ClassVar[Cost] = Cost(numbers=("C(1 + d + d^2) up once (d: features)",))
    most_questions: ClassVar[int] = 2

    samples: Count = 200
    target: Switch = False
    ridge: NonNegative = 1e-3

    def statistics(self, question: Named, observed: Observed) -> dict[str, Tensor]:
        """Return numbers of samples, sums of features and of their products by class; see `Finish.statistics`."""
        features, found = observed.features.double(), sums_by_class(observed)
        classes, dim = found["sums"].shape
        refuse_many("ccvr", classes, dim)
        products = features.new_zeros(classes, dim, dim)
        for label in range(classes):
            own = features[observed.targets == label]
            products[label] = own.T @ own
        return {**found, "products": products}

    def refuse_products(self, question: Named, sizes: Tensor, means: Tensor, products: Tensor) -> str | None:
        """See `ClassSums.refuse_products`."""
        held = sizes > 0
        if products[~held].any():
            return "it has sums for classes of which it has no samples"
        return refused_products(products[held], means[held][:, None], sizes[held, None])

    def finish(self, head: Head, ask: Ask, known: Known) -> Finished:
        """Draw features and train the layer; see `Finish.finish`."""
        mix, notes = self.mix(known)
        found = ask("training")
        sizes, sums, products = (found[name].cpu() for name in ("sizes", "sums", "products"))
        shares = class_shares((sizes > 0).double(), mix)
        classes = torch.nonzero(shares)[:, 0].tolist()
        drawn = [self._draw(sizes[c], sums[c], products[c], known) for c in classes]
        old = Head(head.weight.cpu()[classes], head.bias.cpu()[classes])
        new = self._trained(old, torch.stack(drawn), shares[classes])
        weight, bias = torch.zeros_like(head.weight), torch.full_like(head.bias, NEVER)
        weight[classes], bias[classes] = new.weight.to(weight), new.bias.to(bias)
        return Finished(Head(weight, bias), {"sizes": sizes.long().tolist(), **notes})

    def _draw(self, size: Tensor, total: Tensor, products: Tensor, known: Known) -> Tensor:
        """Features of one class, `(samples, dim)`."""
        mean = total / size
        covariance = (products - size * torch.outer(mean, mean)) / (size - 1).clamp(min=1)
        jitter = JITTER * covariance.diagonal().clamp(min=0).mean() + torch.finfo(torch.float32).tiny
        floor = torch.finfo(torch.float64).eps * products.diagonal().max()  # what rounding leaves of large means
        root = torch.linalg.cholesky(covariance + (jitter + 10 * floor) * torch.eye(len(mean), dtype=torch.float64))
        normal = torch.from_numpy(known.generator.standard_normal((self.samples, len(mean))))
        drawn: Tensor = mean + normal @ root.T
        return drawn

    def _trained(self, head: Head, features: Tensor, shares: Tensor) -> Head:
        """Return the layer trained on `features`, `(classes, samples, dim)`; each class has a share of the loss."""
        classes, samples, dim = features.shape
        flat, labels = features.reshape(-1, dim), torch.arange(classes).repeat_interleave(samples)
        centre = flat.mean(0)
        spread = flat.std(0, correction=0)
        spread = spread.clamp(min=float(LEAST_SPREAD * spread.max())) if spread.any() else torch.ones_like(spread)
        inputs = (flat - centre) / spread
        weight = (head.weight.double() * spread).requires_grad_()
        bias = (head.bias.double() + head.weight.double() @ centre).requires_grad_()
        optimiser = torch.optim.LBFGS(
            [weight, bias], max_iter=STEPS, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimiser.zero_grad()
            each = cross_entropy(inputs @ weight.T + bias, labels, reduction="none").reshape(classes, samples)
            value = shares @ each.mean(1) + self.ridge / 2 * weight.square().sum()
            value.backward()
            return value

        optimiser.step(loss)
        scaled = weight.detach() / spread
        return Head(scaled, bias.detach() - scaled @ centre)
