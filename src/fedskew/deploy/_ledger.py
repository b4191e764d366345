"""The ledger of a site's label counts: each release is on the site's disk before it is sent.

If every query were answered with new noise, the noise would average out. A site therefore draws noise once for its
data. Queried again with another epsilon, other neighbours, another order of classes, or fewer of them, it answers from
the release that it has: to reorder a release, or to leave out a part, costs no privacy. A new release is drawn only for
classes that none covers, or if the site has said that its data changed, and only within the total that it agreed to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pydantic
from filelock import FileLock
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fedskew.deploy._log import LOG
from fedskew.errors import RunError
from fedskew.files import private_folder, write_text, writing
from fedskew.labels import SENSITIVITY, privatize

FILE = "label-counts.json"
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


class CountsAsked(NamedTuple):
    """A server's request for a site's label counts.

    Attributes:
        label_counts: See `Agreement`.
        classes: Class names, in the order of the reply.
        epsilon: See `Agreement`.
        neighbours: See `Agreement`.
    """

    label_counts: ReleaseMode
    classes: tuple[str, ...]
    epsilon: float | None = None
    neighbours: Neighbours = "add-remove"


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
    """A release of label counts, as the ledger has it.

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
        """Return the released numbers of these classes, in this order.

        Args:
            classes: Names of the classes.
        """
        released = dict(zip(self.classes, self.released, strict=True))
        return [released[name] for name in classes]

    def has(self, classes: Sequence[str], counts: NDArray[np.float64]) -> bool:
        """Return whether this release holds exactly these counts.

        Args:
            classes: Names of the classes.
            counts: The site's counts, `(classes,)`.
        """
        before = {name: count for name, count in zip(self.classes, self.exact, strict=True) if count}
        return before == {name: int(count) for name, count in zip(classes, counts, strict=True) if count}


def converted(epsilon: float, given: Neighbours, wanted: Neighbours) -> float:
    """Convert an epsilon of noisy counts between kinds of neighbours.

    Laplace noise of scale b gives the epsilon `SENSITIVITY / b`: one sample more or less changes the counts by 1 in
    total, one sample replaced by 2.

    Args:
        epsilon: Privacy parameter of a release.
        given: What it protects.
        wanted: What the result is to protect.

    Returns:
        The epsilon for the other kind of neighbours.
    """
    return epsilon * SENSITIVITY[wanted] / SENSITIVITY[given]


def is_too_noisy(epsilon: float, agreed: float) -> bool:
    """Return whether a release is so much noisier than agreed that the server refuses it.

    Args:
        epsilon: Privacy parameter of the release.
        agreed: That of the agreement, for the same neighbours.
    """
    return epsilon * NOISIEST * ROUNDING < agreed


class Ledger:
    """The releases of a site's label counts, in a file of mode 0600 in its state folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.path = folder, folder / FILE

    @property
    def releases(self) -> tuple[Release, ...]:
        """All releases, the oldest first."""
        if not self.path.exists():
            return ()
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            return tuple(Release.model_validate(entry) for entry in kept["releases"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.path}: can't be read ({type(error).__name__}); restore it. Without it, the next release costs "
                "its epsilon in addition to those that it had"
            ) from None

    def spent(self, neighbours: Neighbours) -> float:
        """Return the sum of the epsilons of all noisy releases.

        Args:
            neighbours: What the sum is to protect.
        """
        return _spent(self.releases, neighbours)

    def covering(self, classes: Sequence[str]) -> Release | None:
        """Return the newest noisy release that has all of these classes.

        Args:
            classes: Names of the classes.
        """
        return _covering(self.releases, classes)

    def why_another(self, asked: CountsAsked, counts: NDArray[np.float64]) -> str:
        """Say why the site should release noisy counts once more; empty if it need not, or has not released any.

        Args:
            asked: What the server asks for.
            counts: The site's exact label counts, shape `(classes,)`.
        """
        kept = self.covering(asked.classes)
        if kept is None or kept.epsilon is None or kept.neighbours is None or asked.epsilon is None:
            return ""
        if not kept.has(asked.classes, counts):
            return "The data have changed since the last one"
        epsilon = converted(kept.epsilon, kept.neighbours, asked.neighbours)
        if asked.label_counts == "summed" and epsilon > asked.epsilon * ROUNDING:
            return "The last one has less noise than is asked for in what is summed"
        if is_too_noisy(epsilon, asked.epsilon):
            return f"The last one is over {NOISIEST:g} times noisier than this server asks for"
        return ""

    def current(self, asked: CountsAsked, counts: NDArray[np.float64], budget: Budget | None) -> list[float] | None:
        """Return what a query would be answered with now, or None if it takes a new release.

        Args:
            asked: What the server asks for.
            counts: The site's exact label counts, shape `(classes,)`.
            budget: What the site may release; None: one noisy release.
        """
        if asked.label_counts != "noisy":
            return _plain(asked, counts)
        releases = self.releases
        kept = _covering(releases, asked.classes)
        return None if kept is None or _is_due(kept, releases, asked, budget) else kept.of(asked.classes)

    def release(
        self, asked: CountsAsked, counts: NDArray[np.float64], budget: Budget | None
    ) -> tuple[list[float], Release]:
        """Answer a query of label counts, with a release that is in the ledger.

        Args:
            asked: What the server asks for.
            counts: The site's exact label counts, shape `(classes,)`.
            budget: What the site may release; None: one noisy release.

        Returns:
            The numbers to report: one for each class, or the number of samples if the counts are withheld; and the
            release that they are from.

        Raises:
            NotAgreedError: It takes a new release, which goes beyond the budget.
            RunError: The ledger can't be read or written.
        """
        private_folder(self._folder)
        # Flower may handle several messages at once, each in a process of its own.
        with FileLock(self._folder / f"{FILE}.lock", mode=0o600):
            releases = self.releases
            if asked.label_counts != "noisy":
                values = _plain(asked, counts)
                last = next((entry for entry in reversed(releases) if entry.label_counts == asked.label_counts), None)
                if last is None or not last.has(asked.classes, counts):
                    last = self._add(releases, asked, counts, values, budget)
                return values, last
            kept = _covering(releases, asked.classes)
            if kept is not None and not _is_due(kept, releases, asked, budget):
                self._explain(kept, asked, counts, budget)
                return kept.of(asked.classes), kept
            self._refuse_beyond(releases, asked, budget)
            assert asked.epsilon is not None, "of noisy counts"
            noisy: NDArray[np.float64] = privatize(counts[None], asked.epsilon, neighbours=asked.neighbours)[0]
            return noisy.tolist(), self._add(releases, asked, counts, noisy.tolist(), budget)

    def _add(
        self,
        releases: Sequence[Release],
        asked: CountsAsked,
        counts: NDArray[np.float64],
        values: list[float],
        budget: Budget | None,
    ) -> Release:
        noisy = asked.label_counts == "noisy"
        entry = Release(
            at=now(),
            label_counts=asked.label_counts,
            classes=list(asked.classes),
            exact=counts.astype(int).tolist(),
            released=values,
            epsilon=asked.epsilon if noisy else None,
            neighbours=asked.neighbours if noisy else None,
            data="" if budget is None else budget.data,
        )
        kept = [release.model_dump(exclude_none=True) for release in (*releases, entry)]
        with writing(self.path):
            write_text(self.path, json.dumps({"releases": kept}, indent=1), private=True)
        if noisy:
            spent = _spent([*releases, entry], asked.neighbours)
            LOG.info(
                "label counts are released with epsilon %g (%s); all releases together: %g",
                asked.epsilon,
                asked.neighbours,
                spent,
            )
        return entry

    def _explain(self, kept: Release, asked: CountsAsked, counts: NDArray[np.float64], budget: Budget | None) -> None:
        """Log why a query is answered with a release of other data or of another epsilon."""
        if not kept.has(asked.classes, counts):
            how = "" if budget is None else "; fedskew deploy site --check data.toml releases new ones, if you agree"
            LOG.warning("%s: the data have changed since %s; the old release is reported%s", self.path, kept.at, how)
        if (kept.epsilon, kept.neighbours) != (asked.epsilon, asked.neighbours):
            LOG.warning(
                "%s: the server asks for epsilon %g (%s); the release of %s with epsilon %g (%s) is reported",
                self.path,
                asked.epsilon,
                asked.neighbours,
                kept.at,
                kept.epsilon,
                kept.neighbours,
            )

    def _refuse_beyond(self, releases: Sequence[Release], asked: CountsAsked, budget: Budget | None) -> None:
        assert asked.epsilon is not None, "of noisy counts"
        if budget is None:
            if any(release.epsilon for release in releases):
                raise NotAgreedError(
                    "epsilon",
                    f"{self.path}: label counts of other classes were released; these would be a second release",
                )
            return
        if _is_affordable(releases, asked, budget):
            return
        epsilon = converted(asked.epsilon, asked.neighbours, budget.neighbours)
        raise NotAgreedError(
            "epsilon",
            f"epsilon: the server asks for a release with {epsilon:g}; this site agreed to {budget.epsilon:g} in one "
            f"release and {budget.total:g} in all ({budget.neighbours}), and has spent "
            f"{_spent(releases, budget.neighbours):g}",
        )


def now() -> str:
    """Return the time, UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(asked: CountsAsked, counts: NDArray[np.float64]) -> list[float]:
    """Return exact counts, or the number of samples."""
    return [float(counts.sum())] if asked.label_counts == "withheld" else counts.astype(float).tolist()


def _spent(releases: Sequence[Release], neighbours: Neighbours) -> float:
    return math.fsum(
        converted(entry.epsilon, entry.neighbours, neighbours)
        for entry in releases
        if entry.epsilon is not None and entry.neighbours is not None
    )


def _covering(releases: Sequence[Release], classes: Sequence[str]) -> Release | None:
    noisy = (entry for entry in reversed(releases) if entry.label_counts == "noisy")
    return next((entry for entry in noisy if set(classes) <= set(entry.classes)), None)


def _is_due(kept: Release, releases: Sequence[Release], asked: CountsAsked, budget: Budget | None) -> bool:
    """Return whether the site has said that its data changed since a release, and may make another."""
    return budget is not None and kept.data != budget.data and _is_affordable(releases, asked, budget)


def _is_affordable(releases: Sequence[Release], asked: CountsAsked, budget: Budget) -> bool:
    assert asked.epsilon is not None, "of noisy counts"
    epsilon = converted(asked.epsilon, asked.neighbours, budget.neighbours)
    spent = _spent(releases, budget.neighbours)
    return epsilon <= budget.epsilon * ROUNDING and spent + epsilon <= budget.total * ROUNDING
