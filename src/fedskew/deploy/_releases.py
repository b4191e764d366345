"""Releases of a site's label counts: what a query is answered with, and when that takes another release.

If every query were answered with new noise, the noise would average out. A site therefore draws noise once for its
data. Queried again with another epsilon, other neighbours, another order of classes, or fewer of them, it answers from
the release that it has: to reorder a release, or to leave out a part, costs no privacy. A new release is drawn only for
classes that none covers, or if the site has said that its data changed, and only within the total that it agreed to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fedskew.deploy._log import LOG
from fedskew.errors import RunError
from fedskew.labels import SENSITIVITY

if TYPE_CHECKING:
    from fedskew.deploy._agreement import Agreement

ROUNDING = 1 + 1e-9
"""A sum of epsilons may exceed a limit by this factor, since 0.1 + 0.2 > 0.3 in floating point."""

NOISIEST = 10.0
"""How many times noisier than agreed a release may be, if a site answers from an earlier one."""

ReleaseMode = Literal["exact", "noisy", "withheld", "summed"]
Neighbours = Literal["add-remove", "replace"]


class NotAgreedError(RunError):
    """A site refuses what goes beyond what it agreed to.

    Attributes:
        kind: One word for the server: which of the terms.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class CountsRequest(NamedTuple):
    """A server's request for a site's label counts, with the classes in the order of the reply (see `Agreement`)."""

    label_counts: ReleaseMode
    classes: tuple[str, ...]
    epsilon: float | None = None
    neighbours: Neighbours = "add-remove"

    @classmethod
    def of(cls, agreement: Agreement) -> CountsRequest:
        """Return the request that servers make under an agreement."""
        return cls(agreement.label_counts, tuple(agreement.classes), agreement.epsilon, agreement.neighbours)


class Budget(NamedTuple):
    """A site's limits on the release of its label counts.

    Attributes:
        epsilon: Largest epsilon of one release.
        total: Largest sum of epsilons of all releases.
        neighbours: What both protect.
        data: Mark of the data, which changes when the site says that they changed.
    """

    epsilon: float
    total: float
    neighbours: Neighbours
    data: str = ""


class Release(BaseModel):
    """A release of label counts.

    Attributes:
        at: When it was made, UTC.
        label_counts: Which kind of release it is.
        classes: Class names.
        exact: Number of training samples of each class.
        released: The numbers that were released: one for each class, or the number of samples.
        epsilon: Privacy parameter, if it is noisy.
        neighbours: What epsilon protects, if it is noisy.
        data: Mark of the data at that time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: str
    label_counts: ReleaseMode
    classes: list[str]
    exact: list[int]
    released: list[float]
    epsilon: float | None = None
    neighbours: Neighbours | None = None
    data: str = ""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Release:
        noisy = self.label_counts == "noisy"
        if noisy != (self.epsilon is not None and self.neighbours is not None):
            raise ValueError("a noisy release has epsilon and neighbours, and no other has")
        if len(self.released) != (1 if self.label_counts == "withheld" else len(self.classes)):
            raise ValueError("a release has a number for each class")
        return self

    def of(self, classes: Sequence[str]) -> list[float]:
        """Return the released numbers of these classes, in this order."""
        released = dict(zip(self.classes, self.released, strict=True))
        return [released[name] for name in classes]

    def has(self, classes: Sequence[str], counts: NDArray[np.float64]) -> bool:
        """Return whether this release holds exactly these counts."""
        before = {name: count for name, count in zip(self.classes, self.exact, strict=True) if count}
        return before == {name: int(count) for name, count in zip(classes, counts, strict=True) if count}

    def epsilon_for(self, neighbours: Neighbours) -> float | None:
        """Return the release's epsilon for these neighbours; None if it has no noise."""
        if self.epsilon is None or self.neighbours is None:
            return None
        return converted(self.epsilon, self.neighbours, neighbours)


def converted(epsilon: float, neighbours: Neighbours, wanted: Neighbours) -> float:
    """Convert an epsilon of noisy counts between kinds of neighbours.

    Laplace noise of scale b gives the epsilon `SENSITIVITY / b`: one sample more or less changes the counts by 1 in
    total, one sample replaced by 2.
    """
    return epsilon * SENSITIVITY[wanted] / SENSITIVITY[neighbours]


def is_too_noisy(epsilon: float, agreed: float) -> bool:
    """Return whether a release is so much noisier than agreed, for the same neighbours, that the server refuses it."""
    return epsilon * NOISIEST * ROUNDING < agreed


def plain(request: CountsRequest, counts: NDArray[np.float64]) -> list[float]:
    """Return exact counts, or the number of samples."""
    return [float(counts.sum())] if request.label_counts == "withheld" else counts.astype(float).tolist()


def spent(releases: Sequence[Release], neighbours: Neighbours) -> float:
    return math.fsum(release.epsilon_for(neighbours) or 0.0 for release in releases)


def covering(releases: Sequence[Release], classes: Sequence[str]) -> Release | None:
    noisy = (release for release in reversed(releases) if release.label_counts == "noisy")
    return next((release for release in noisy if set(classes) <= set(release.classes)), None)


def is_due(last: Release, releases: Sequence[Release], request: CountsRequest, budget: Budget | None) -> bool:
    """Return whether the site has said that its data changed since a release, and may make another."""
    return budget is not None and last.data != budget.data and is_affordable(releases, request, budget)


def is_affordable(releases: Sequence[Release], request: CountsRequest, budget: Budget) -> bool:
    assert request.epsilon is not None, "of noisy counts"
    epsilon = converted(request.epsilon, request.neighbours, budget.neighbours)
    total = spent(releases, budget.neighbours) + epsilon
    return epsilon <= budget.epsilon * ROUNDING and total <= budget.total * ROUNDING


def explain(
    place: Path, last: Release, request: CountsRequest, counts: NDArray[np.float64], budget: Budget | None
) -> None:
    """Log why a query is answered with a release of other data or of another epsilon."""
    if not last.has(request.classes, counts):
        how = "" if budget is None else "; fedskew deploy site --check data.toml releases new ones, if you agree"
        LOG.warning("%s: the data have changed since %s; the old release is reported%s", place, last.at, how)
    if (last.epsilon, last.neighbours) != (request.epsilon, request.neighbours):
        LOG.warning(
            "%s: the server asks for epsilon %g (%s); the release of %s with epsilon %g (%s) is reported",
            place,
            request.epsilon,
            request.neighbours,
            last.at,
            last.epsilon,
            last.neighbours,
        )


def refuse_beyond(place: Path, releases: Sequence[Release], request: CountsRequest, budget: Budget | None) -> None:
    assert request.epsilon is not None, "of noisy counts"
    if budget is None:
        if any(release.epsilon for release in releases):
            raise NotAgreedError(
                "epsilon",
                f"{place}: label counts of other classes were released; these would be a second release",
            )
    elif not is_affordable(releases, request, budget):
        raise NotAgreedError(
            "epsilon",
            "epsilon: the server asks for a release with "
            f"{converted(request.epsilon, request.neighbours, budget.neighbours):g}; this site agreed to "
            f"{budget.epsilon:g} in one release and {budget.total:g} in all ({budget.neighbours}), and has spent "
            f"{spent(releases, budget.neighbours):g}",
        )
