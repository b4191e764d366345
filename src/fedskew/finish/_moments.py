"""Sums of features that several finishes ask for, and checks that samples can have such sums."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fedskew.components import Cost
from fedskew.errors import ArgumentError
from fedskew.finish._protocol import MOST, Finish, Known, Observed, not_counts
from fedskew.hooks import Named
from fedskew.parameters import FloatArray, Switch

MOST_NUMBERS = 1 << 28
"""Most numbers in a sum: 2 GiB."""

ROUNDING = 1e-9
"""Tolerance for the checks of a site's products, as a share of their largest number."""


def refuse_many(name: str, classes: int, dim: int) -> None:
    """Raise ArgumentError where a covariance for each class takes too much memory."""
    if classes * dim**2 > MOST_NUMBERS:
        raise ArgumentError(
            f"{name} needs {classes} x {dim} x {dim} numbers for each client, more than {MOST_NUMBERS:,}; take a "
            "network with fewer features, or the finish gaussian, which needs one covariance for all classes"
        )


def sums_by_class(observed: Observed) -> dict[str, Tensor]:
    """Return numbers of samples, `(classes,)`, and sums of features, `(classes, dim)`, float64."""
    assert observed.targets is not None, "training samples have labels"
    features, classes = observed.features.double(), observed.logits.shape[1]
    sums = features.new_zeros(classes, features.shape[1]).index_add_(0, observed.targets, features)
    return {"sizes": torch.bincount(observed.targets, minlength=classes).double(), "sums": sums}


def refused_products(products: Tensor, means: Tensor, weights: Tensor) -> str | None:
    """Return why products, `(..., dim, dim)`, can't be those of samples around means, `(..., k, dim)`, with so much
    weight, `(..., k)`, around each; None if they can."""
    off = ROUNDING * products.abs().amax((-2, -1), keepdim=True) + torch.finfo(torch.float32).tiny
    if ((products - products.mT).abs() > off).any():
        return "its products are not symmetric"
    within = products - (means * weights[..., None]).mT @ means
    failed = torch.linalg.cholesky_ex(within + off * torch.eye(means.shape[-1], dtype=torch.float64)).info
    return "no samples have such products and sums" if failed.any() else None


def class_shares(sizes: Tensor, mix: FloatArray | None) -> Tensor:
    """Return the share of every class that somebody holds, in the clients' label mix or another; 0 for the others."""
    shares = sizes if mix is None else (sizes > 0) * torch.from_numpy(mix)
    if not shares.any():
        raise ArgumentError("target: no client holds a class that its mix has a share of")
    return shares / shares.sum()


class ClassSums(Finish):
    """Base of finishes that ask for `sums_by_class` and products, and can go by the target's label mix.

    Attributes:
        target: Whether they do (needs `[target] mix`).
    """

    reveals_label_counts: ClassVar[bool] = True

    target: Switch = False

    def lacks(self, known: Known) -> str | None:
        """See `Finish.lacks`."""
        if self.target and known.target is None and not known.is_estimated:
            return "weighs classes by the target's label mix, and there is none; set target.mix, or target = false"
        return super().lacks(known)

    def mix(self, known: Known) -> tuple[FloatArray | None, dict[str, Any]]:
        """Return the target's label mix, None where another counts, and what the run's summary says of it."""
        mix = known.target if self.target else None
        unsure = "no estimate is sure enough, so the target's label mix is not used"
        return mix, {"mix": unsure if mix is None else mix.tolist()} if self.target else {}

    def refuse(self, question: Named, answer: Named, samples: FloatArray | None) -> str | None:
        """See `Finish.refuse`."""
        sizes, sums, *products = (answer[name].double() for name in ("sizes", "sums", "products") if name in answer)
        if (reason := not_counts(sizes, samples)) is not None:
            return f"its sizes {reason}"
        if max(float(part.abs().max()) for part in (sums, *products)) > MOST:
            return f"a number is above {MOST:g}"
        if sums[sizes == 0].any():
            return "it has sums for classes of which it has no samples"
        return (
            self.refuse_products(question, sizes, sums / sizes.clamp(min=1)[:, None], *products) if products else None
        )

    def refuse_products(self, question: Named, sizes: Tensor, means: Tensor, products: Tensor) -> str | None:
        """Return why samples of these sizes and means by class can't have such products; None if they can."""
        raise NotImplementedError


class PooledMoments(ClassSums):
    """Base of finishes that ask for sums by class, and for one sum of products of all classes, `(dim, dim)`, in which
    samples count by the question's `weights`, `(classes,)`, if it has these."""

    cost: ClassVar[Cost] = Cost(numbers=("C(1 + d) + d^2 up once (d: features)",))
    most_questions: ClassVar[int] = 3

    def statistics(self, question: Named, observed: Observed) -> dict[str, Tensor]:
        """Return numbers of samples and sums of features by class, and products; see `Finish.statistics`."""
        found, features = sums_by_class(observed), observed.features.double()
        weights = question.get("weights", torch.ones(len(found["sizes"]), dtype=torch.float64)).double()
        return {**found, "products": features.T @ (features * weights.to(features.device)[observed.targets, None])}

    def refuse_products(self, question: Named, sizes: Tensor, means: Tensor, products: Tensor) -> str | None:
        """See `ClassSums.refuse_products`."""
        weights = question.get("weights", torch.ones_like(sizes)).double()
        return refused_products(products, means, weights * sizes)
