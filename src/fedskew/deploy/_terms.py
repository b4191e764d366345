"""The terms that a site agreed to: `agreed.toml` beside its `data.toml`, written by `fedskew deploy site --check`.

The app's hash and fedskew's version fix what the site computes and sends (see `Plan`); the other terms are how often it
does, and what that may cost. The site refuses whatever goes beyond them, whatever the server sends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pydantic
import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from fedskew import __version__
from fedskew.deploy.app_files import app_hash, read_app
from fedskew.deploy.releases import Budget, Neighbours, NotAgreedError, refuse_unless
from fedskew.errors import ConfigError
from fedskew.files import write_text
from fedskew.parameters import Count, Positive, first_mistake
from fedskew.sums import SumContext
from fedskew.trees import read_tree

FILE = "agreed.toml"
APPS = "apps"
"""Folder in a site's state folder, with one for each app that it agreed to."""

ABOUT = """\
# What this site agreed to, as `fedskew deploy site --check data.toml` showed it. The site refuses what goes beyond it.
# Smaller numbers, a larger sum_sites and either own_models (whether models are trained here that never leave the site)
# and own_figures (whether figures of these are in one masked sum over sites) may be written here at any time, and hold
# from the next message on; for everything else, check again.
"""


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

    schema_: Literal[1] = Field(1, alias="schema")
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
        if self.fedskew != __version__:
            raise NotAgreedError(
                "version",
                f"this site agreed under fedskew {self.fedskew}, and {__version__} may send other things; look, and "
                "agree anew: fedskew deploy site --check data.toml",
            )
        is_agreed = app_hash(read_app(folder)) == self.app
        refuse_unless(is_agreed, "app", "the server's app is not the one that this site agreed to")

    @staticmethod
    def read(path: Path) -> Terms:
        """Read an `agreed.toml`; NotAgreedError where there is none: the site has not agreed to anything."""
        if not path.exists():
            look = f"look, and agree: fedskew deploy site --check {path.with_name('data.toml')}"
            raise NotAgreedError("nothing", f"this site has agreed to nothing yet, as there is no {path}; {look}")
        tree, _, _ = read_tree(path, "agreed terms", None, False)
        try:
            return Terms.model_validate(tree)
        except pydantic.ValidationError as error:
            raise ConfigError(
                f"{path}: {first_mistake(error, fields=Terms)}; if an earlier fedskew wrote it, move it away, and "
                f"agree anew: fedskew deploy site --check {path.with_name('data.toml')}"
            ) from None


def terms_path(data: Path) -> Path:
    """Return the place of a site's `agreed.toml`: beside its `data.toml`."""
    return data.parent / FILE
