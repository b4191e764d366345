"""The terms that a site agreed to, `agreed.toml` beside its `data.toml`, and its releases of label counts within them.

The app's hash and fedskew's version fix what the site computes and sends (see `Plan`); the other terms are how often it
does, and what that may cost. The site refuses whatever goes beyond them, whatever the server sends.

If every query were answered with new noise, the noise would average out. A site therefore draws noise once for its
data. Queried again with another epsilon, other neighbours, another order of classes, or fewer of them, it answers from
the release that it has: to reorder a release, or to leave out a part, costs no privacy. A new release is drawn only for
classes that none covers, or if the site has said that its data changed, and only within the total that it agreed to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import pydantic
import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from fedskew import __version__
from fedskew.deploy._log import LOG, utc_now
from fedskew.deploy.app_files import app_hash, read_app
from fedskew.errors import ConfigError, RunError
from fedskew.files import write_text
from fedskew.labels import SENSITIVITY
from fedskew.parameters import Count, Positive, first_mistake
from fedskew.sheets import FloatArray
from fedskew.sums import SumContext
from fedskew.trees import read_tree

if TYPE_CHECKING:
    from fedskew.deploy._agreement import Agreement

ROUNDING = 1 + 1e-9
"""A sum of epsilons may exceed a limit by this factor, since 0.1 + 0.2 > 0.3 in floating point."""

NOISIEST = 10.0
"""How many times noisier than agreed a release may be, if a site answers from an earlier one."""

ALL = ""
"""Stands in the place of a class, after all of them, for the number of samples, where these may have several labels."""

ReleaseMode = Literal["exact", "noisy", "withheld", "summed"]
Neighbours = Literal["add-remove", "replace"]

FILE = "agreed.toml"
APPS = "apps"
"""Folder in a site's state folder, with one for each app that it agreed to."""

ABOUT = """\
# What this site agreed to, as `fedskew deploy site --check data.toml` showed it. The site refuses what goes beyond it.
# Smaller numbers, a larger sum_sites and either own_models (whether models are trained here that never leave the site)
# and own_figures (whether figures of these are in one masked sum over sites) may be written here at any time, and hold
# from the next message on; for everything else, check again.
"""


class NotAgreedError(RunError):
    """A site refuses what goes beyond what it agreed to; `kind` tells the server in a word which of the terms."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def refuse_unless(is_agreed: bool, kind: str, message: str) -> None:
    """Raise NotAgreedError for what is not agreed to."""
    if not is_agreed:
        raise NotAgreedError(kind, message)


class CountsRequest(NamedTuple):
    """A server's request for a site's label counts, with the classes in the order of the reply (see `Agreement`)."""

    label_counts: ReleaseMode
    classes: tuple[str, ...]
    epsilon: float | None = None
    neighbours: Neighbours = "add-remove"

    @classmethod
    def of(cls, agreement: Agreement) -> CountsRequest:
        """Return the request that servers make under an agreement."""
        classes = (*agreement.classes, ALL) if agreement.multi_label else tuple(agreement.classes)
        return cls(agreement.label_counts, classes, agreement.epsilon, agreement.neighbours)

    @property
    def each(self) -> int:
        """To how many of the numbers one sample may add 1: of several labels to all, that of samples too."""
        return len(self.classes) if ALL in self.classes else 1

    @property
    def once(self) -> Budget:
        """The budget of this release, and of no other."""
        return Budget(self.epsilon or 0.0, self.epsilon or 0.0, self.neighbours)

    def plain(self, counts: FloatArray) -> list[float]:
        """Return exact counts, or the number of samples."""
        samples = counts[-1] if ALL in self.classes else counts.sum()
        return [float(samples)] if self.label_counts == "withheld" else counts.astype(float).tolist()


class Budget(NamedTuple):
    """A site's limits: the epsilon of one release and the sum of all, for these neighbours; the mark of its data."""

    epsilon: float
    total: float
    neighbours: Neighbours
    data: str = ""


class Release(BaseModel):
    """A release of label counts: the exact ones, what was released, and of noisy ones epsilon and what it protects."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: str
    label_counts: ReleaseMode
    classes: list[str]
    exact: list[int]
    released: list[float]
    epsilon: float | None = None
    neighbours: Neighbours | None = None
    data: str = ""

    @classmethod
    def of(cls, request: CountsRequest, counts: FloatArray, released: list[float], data: str = "") -> Release:
        """Make the release that answers a request with these numbers."""
        noisy = request.label_counts == "noisy"
        return cls(
            at=utc_now(),
            label_counts=request.label_counts,
            classes=list(request.classes),
            exact=counts.astype(int).tolist(),
            released=released,
            epsilon=request.epsilon if noisy else None,
            neighbours=request.neighbours if noisy else None,
            data=data,
        )

    def values(self, classes: Sequence[str]) -> list[float]:
        """Return the released numbers of these classes, in this order, or the number of samples."""
        if self.label_counts == "withheld":
            return self.released
        released = dict(zip(self.classes, self.released, strict=True))
        return [released.get(name, 0.0) for name in classes]

    def has(self, classes: Sequence[str], counts: FloatArray) -> bool:
        """Return whether this release holds exactly these counts."""
        before = {name: count for name, count in zip(self.classes, self.exact, strict=True) if count}
        return before == {name: int(count) for name, count in zip(classes, counts, strict=True) if count}

    def epsilon_for(self, neighbours: Neighbours) -> float | None:
        """Return the release's epsilon for these neighbours; None if it has no noise."""
        if self.epsilon is None or self.neighbours is None:
            return None
        return converted(self.epsilon, self.neighbours, neighbours)


class Releases(tuple[Release, ...]):
    """All releases of a site, the oldest first."""

    def spent(self, neighbours: Neighbours) -> float:
        """Return the sum of the epsilons of all noisy releases, for these neighbours."""
        return math.fsum(release.epsilon_for(neighbours) or 0.0 for release in self)

    def covering(self, classes: Sequence[str]) -> Release | None:
        """Return the newest noisy release that has all of these classes."""
        noisy = (release for release in reversed(self) if release.label_counts == "noisy")
        return next((release for release in noisy if set(classes) <= set(release.classes)), None)

    def answering(self, request: CountsRequest, counts: FloatArray, budget: Budget) -> Release | None:
        """Return the release that a query is answered with; None if it takes another one."""
        if request.label_counts == "noisy":
            last = self.covering(request.classes)
            is_due = last is not None and last.data != budget.data and not self._excess(request, budget)
            return None if is_due else last
        last = next((one for one in reversed(self) if one.label_counts == request.label_counts), None)
        return None if last is None or not last.has(request.classes, counts) else last

    def why_another(self, request: CountsRequest, counts: FloatArray) -> str:
        """Say why the site should release noisy counts once more; empty if it need not, or has not released any."""
        last = self.covering(request.classes)
        epsilon = None if last is None else last.epsilon_for(request.neighbours)
        if last is None or epsilon is None or request.epsilon is None:
            return ""
        if not last.has(request.classes, counts):
            return "The data have changed since the last one"
        if request.label_counts == "summed" and epsilon > request.epsilon * ROUNDING:
            return "The last one has less noise than is asked for in what is summed"
        if is_too_noisy(epsilon, request.epsilon):
            return f"The last one is over {NOISIEST:g} times noisier than this server asks for"
        return ""

    def check_affordable(self, request: CountsRequest, budget: Budget) -> None:
        """Raise NotAgreedError for a noisy release beyond what the site agreed to."""
        if excess := self._excess(request, budget):
            raise NotAgreedError("epsilon", excess)

    def _excess(self, request: CountsRequest, budget: Budget) -> str:
        """Say how a noisy release goes beyond what the site agreed to; empty if it does not."""
        assert request.epsilon is not None, "of noisy counts"
        epsilon = converted(request.epsilon, request.neighbours, budget.neighbours)
        before = self.spent(budget.neighbours)
        if epsilon <= budget.epsilon * ROUNDING and before + epsilon <= budget.total * ROUNDING:
            return ""
        return (
            f"the server asks for a release with {epsilon:g}; this site agreed to {budget.epsilon:g} in one release "
            f"and {budget.total:g} in all ({budget.neighbours}), and has spent {before:g}"
        )


def converted(epsilon: float, neighbours: Neighbours, wanted: Neighbours) -> float:
    """Convert an epsilon of noisy counts between kinds of neighbours: Laplace noise of scale b gives `SENSITIVITY / b`,
    as one sample more or less changes counts by 1 in total, one replaced by 2."""
    return epsilon * SENSITIVITY[wanted] / SENSITIVITY[neighbours]


def is_too_noisy(epsilon: float, agreed: float) -> bool:
    """Return whether a release is so much noisier than agreed, for the same neighbours, that the server refuses it."""
    return epsilon * NOISIEST * ROUNDING < agreed


def explain(place: Path, last: Release, request: CountsRequest, counts: FloatArray) -> None:
    """Log why a query is answered with a release of other data or of another epsilon."""
    is_old, asked = not last.has(request.classes, counts), (request.epsilon, request.neighbours)
    if is_old or asked != (last.epsilon, last.neighbours):
        old = "; the data have changed since: fedskew deploy site --check releases them anew, if you agree"
        said = (place, *asked, last.at, last.epsilon, last.neighbours, old if is_old else "")
        LOG.warning("%s: asked for epsilon %g (%s), and reports the release of %s with epsilon %g (%s)%s", *said)


class Terms(BaseModel):
    """The contents of `agreed.toml`.

    Attributes:
        agreed: When the site agreed, UTC. Rounds are counted from then on.
        app: Hash of the app's files, by `app_hash`.
        fedskew: The version that showed what would leave; another one may send more.
        rounds: Most models that the site trains, and, plus one and `EVALUATED_AGAIN`, that it evaluates. The same
            question again is the same answer, and is not counted twice.
        sum_sites: Fewest sites that a masked sum may be over.
        updates_epsilon: Largest epsilon of all sums together that its updates are in, with noise; the site opens no sum
            beyond that. None: its updates have no noise.
        updates_delta: The delta that it goes with.
        own_models: Whether the site trains models for itself: those of `[method.personal]`, and for its report one
            alone. Nothing of them leaves it; they cost time in its rounds, and stay on its disk.
        own_figures: Whether figures of these models and of the common one, on the site's test samples, are added to a
            masked sum over sites after the last round, once.
        data: Mark of the data: when the site last said that they changed.
        epsilon: Largest epsilon of one release of noisy label counts.
        epsilon_total: Largest sum of the epsilons of all releases, those before this agreement included.
        neighbours: What both protect (see `Agreement`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_: Literal[1] = Field(default=1, alias="schema")
    agreed: str
    app: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    fedskew: str
    rounds: Count
    sum_sites: Annotated[int, Field(ge=SumContext.LEAST)] = SumContext.LEAST
    updates_epsilon: Positive | None = None
    updates_delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    own_models: bool = False
    own_figures: bool = False
    data: str
    epsilon: Positive | None = None
    epsilon_total: Positive | None = None
    neighbours: Neighbours = "add-remove"

    @property
    def agreement(self) -> str:
        """Names this agreement: to agree to the same app once more is another."""
        return f"{self.app} {self.agreed}"

    @property
    def budget(self) -> Budget:
        """The site's limits on the release of its label counts."""
        return Budget(self.epsilon or 0.0, self.epsilon_total or 0.0, self.neighbours, self.data)

    def folder(self, state: Path) -> Path:
        """Return the folder, in a site's state folder, for what it keeps under its agreement to this app alone."""
        return state / APPS / self.app[:32]

    def write(self, path: Path) -> None:
        """Write the terms as TOML."""
        tree = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        if self.epsilon is None:
            del tree["neighbours"]
        write_text(path, ABOUT + tomli_w.dumps(tree), private=True)

    def check_app(self, folder: Path) -> None:
        """Raise NotAgreedError unless an app folder, and fedskew, are those that the site agreed to."""
        why = f"this site agreed under fedskew {self.fedskew}, and {__version__} may send other things; "
        why += "look, and agree anew: fedskew deploy site --check data.toml"
        refuse_unless(self.fedskew == __version__, "version", why)
        is_agreed = app_hash(read_app(folder)) == self.app
        refuse_unless(is_agreed, "app", "the server's app is not the one that this site agreed to")

    @staticmethod
    def read(path: Path) -> Terms:
        """Read an `agreed.toml`; NotAgreedError where there is none: the site has not agreed to anything."""
        if not path.exists():
            look = f"look, and agree: fedskew deploy site --check {path.with_name('data.toml')}"
            raise NotAgreedError("nothing", f"this site has agreed to nothing yet, as there is no {path}; {look}")
        again = f"move it away, and agree anew: fedskew deploy site --check {path.with_name('data.toml')}"
        try:
            return Terms.model_validate(read_tree(path, "agreed terms", None, False)[0])
        except ConfigError as error:
            raise ConfigError(f"{error}; if that can't be mended, {again}") from None
        except pydantic.ValidationError as error:
            wrong = first_mistake(error, fields=Terms)
            raise ConfigError(f"{path}: {wrong}; if an earlier fedskew wrote it, {again}") from None


def terms_path(data: Path) -> Path:
    """Return the place of a site's `agreed.toml`: beside its `data.toml`."""
    return data.parent / FILE
