"""A site's book: what must not happen twice, and what adds up over all federations that name the same state folder.

All of it is one table in an SQLite file, and whatever belongs together is written in one transaction before the answer
leaves: a process that is killed in between has done nothing, or all of it. An entry is the whole site's, or that of an
app, or of an agreement (to agree to the same app once more is another):

    kind              whose       key                                  value
    release           site        number                               label counts (see `Release`)
    opened            site        name of a sum                        multiplier of its noise, if it had any
    told              site        hash of an answer opened in a sum    hash of the sum's sites and weights
    share             app         "", or "moments"                     what stands for the site in sums over all sites
    masked            app         purpose                              the sum masked last, and what opens it
    closed            agreement   purpose and round                    of a round, one sum of a purpose is opened
    train, ...        agreement   hash of a question                   questions are answered so often, and no more

Two sums of the same answers over different sites tell their difference: what was opened without noise, the site adds to
no sum over other sites.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic
from numpy.typing import NDArray

from fedskew.deploy._log import LOG
from fedskew.deploy.terms import ROUNDING, Budget, CountsRequest, Release, Releases, Terms, explain, refuse_unless
from fedskew.errors import RunError, placed
from fedskew.files import locked, private_folder, replacing, writing
from fedskew.labels import privatize
from fedskew.privacy import Protection, epsilon, together

FILE = "book.db"
FORMAT = 2
PATIENCE = 30.0
"""Seconds to wait for another process that writes."""

_TABLE = f"""
CREATE TABLE entry (whose TEXT, kind TEXT, key TEXT, value TEXT NOT NULL, until REAL, PRIMARY KEY (whose, kind, key));
PRAGMA user_version = {FORMAT};
"""
SITE = ""
"""Whose the entries of the whole site are."""

FINISHED_MODELS = 2
"""Most models that a site answers a finish's questions about: a server that was killed may finish another one."""

EVALUATED_AGAIN = 10
"""Further models that a site evaluates: a server that was killed may aggregate the round anew, from other replies."""

AboutLabels = Literal["counts", "announced", "labels", "weights"]
Kind = Literal["train", "evaluate", "finish", "models", "moments", "means", "profile", "sites"] | AboutLabels

_KINDS: dict[Kind, tuple[str, str]] = {
    "train": ("rounds", "rounds that it trained in"),
    "evaluate": ("rounds", "models that it evaluated"),
    "finish": ("most_questions", "questions after the last round"),
    "models": ("finish", "models of a finish"),
    "counts": ("most_questions", "questions about sums of label counts"),
    "labels": ("class_weights", "question about label counts for class weights"),
    "weights": ("class_weights", "set of class weights"),
    "moments": ("moments", "question about sums of its numbers"),
    "means": ("moments", "set of means and deviations"),
    "profile": ("input_profile", "question about what its inputs look like"),
    "announced": ("label_counts", "announcement of sums of label counts"),
    "sites": ("own_figures", "trained model to have figures of"),
}
"""The kinds of questions that are counted: the term that each is refused by, and what its limit is of."""


class MaskedSum(NamedTuple):
    """A sum that a site masks an answer for: named as a request to open it does, with hashes of answer and sites."""

    purpose: str
    round: int
    name: str
    answer: str = ""
    among: str = ""


class Book:
    """A site's book, a file of mode 0600 in its state folder, which is made when something is written."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.path = folder, folder / FILE

    @property
    def releases(self) -> Releases:
        """All releases of label counts."""
        with self._opened() as db:
            return _releases(db)

    def release(self, request: CountsRequest, counts: NDArray[np.float64], budget: Budget) -> Release:
        """Answer a query of label counts with a release in the book; NotAgreedError where the budget has none left."""
        is_noisy = request.label_counts == "noisy"
        with self._changed() as db:
            releases = _releases(db)
            if (last := releases.answering(request, counts, budget)) is not None:
                if is_noisy:
                    explain(self.path, last, request, counts)
                return last
            released = request.plain(counts)
            if is_noisy:
                releases.check_affordable(request, budget)
                assert request.epsilon is not None, "of noisy counts"
                drawn = privatize(counts[None], request.epsilon, neighbours=request.neighbours, each=request.each)
                released = drawn[0].tolist()
            new = Release.of(request, counts, released, budget.data)
            _charge(db, SITE, "release", str(len(releases)), new.model_dump_json(exclude_none=True))
        if is_noisy:
            spent = Releases([*releases, new]).spent(request.neighbours)
            said = "label counts are released with epsilon %g (%s); all releases together: %g"
            LOG.info(said, request.epsilon, request.neighbours, spent)
        return new

    def share(
        self, terms: Terms, counts: Callable[[], NDArray[Any]], of: str = "", dtype: type[np.generic] = np.float64
    ) -> NDArray[Any]:
        """Return what stands for this site in sums `of` something: what it was when first asked under this app."""
        with self._opened() as db:
            share = _entries(db, terms.app, "share").get(of)
        if share is None:
            new = json.dumps(counts().tolist())
            with self._changed() as db:
                share = _charge(db, terms.app, "share", of, new)
        return np.array(json.loads(share), dtype=dtype)

    def count(self, terms: Terms, kind: Kind, question: str, most: int) -> None:
        """Write down that a question is answered, before it is; the same question again is not counted twice.

        A server that was killed asks the questions of a round once more, and gets the same answers. `question` is a
        hash of what the answer depends on. Raises NotAgreedError for one more than the site agreed to (`most`).
        """
        term, what = _KINDS[kind]
        with self._changed() as db:
            known = _entries(db, terms.agreement, kind)
            is_agreed = question in known or len(known) < most
            refuse_unless(is_agreed, term, f"this site agreed to {most} {what}, and has answered them all since then")
            _charge(db, terms.agreement, kind, question)

    def rounds(self, terms: Terms) -> int:
        """Return the number of rounds that the site has trained in since it agreed."""
        with self._opened() as db:
            return len(_entries(db, terms.agreement, "train"))

    @property
    def noises(self) -> tuple[float, ...]:
        """The noise multiplier of each sum of updates that was opened, the oldest first."""
        with self._opened() as db:
            return _noises(db)

    def check_affordable(self, protection: Protection) -> None:
        """Raise NotAgreedError for a sum with noise that the site could not open within its budget."""
        _check_affordable(self.noises, protection)

    def check_open(self, terms: Terms, purpose: str, round: int) -> None:
        """Raise NotAgreedError for a round of which the site has opened a sum for this purpose."""
        with self._opened() as db:
            _check_open(db, terms, purpose, round)

    def mask(self, terms: Terms, sum: MaskedSum, own: bytes, deadline: float, noisy: bool = False) -> None:
        """Write down what opens a sum, before the masked answer leaves; what was masked before it opens no more.

        After the deadline, in seconds since 1970, the site opens it no more. Where the answer is `noisy`, the noise is
        drawn anew for each sum. Raises NotAgreedError where the site has opened a sum of this round, or the same answer
        in one over other sites.
        """
        with self._changed() as db:
            _check_open(db, terms, sum.purpose, sum.round)
            if not noisy:
                _check_told(db, sum)
            _forget(db, terms.app, sum.purpose)
            _charge(db, terms.app, "masked", sum.purpose, json.dumps([*sum, own.hex()]), deadline)

    def open(self, terms: Terms, sum: MaskedSum, protection: Protection | None = None, closes: bool = True) -> bytes:
        """Open a sum, once: write down that it is open, charge its noise, delete what opens it, and return that.

        `closes`: whether the round is over with it, for this purpose. Raises NotAgreedError where the site has masked
        nothing for it, has opened it, has masked for another one since, or its noise is beyond the budget, which
        changes nothing.
        """
        with self._changed() as db:
            _forget(db)
            *found, own = json.loads(_entries(db, terms.app, "masked").get(sum.purpose, '["", 0, "", ""]'))
            masked, noises = MaskedSum(*found), _noises(db)
            refuse_unless(
                masked.name == sum.name,
                "opened",
                "asked to open a sum that this site has not masked, has opened, has masked another one after, or that "
                "is too old",
            )
            is_new = masked.name not in _entries(db, SITE, "opened")
            refuse_unless(is_new, "opened", "this site has opened this sum before it agreed once more")
            noise = "" if protection is None else repr(protection.noise.noise)
            _charge(db, SITE, "opened", masked.name, noise)
            _forget(db, terms.app, sum.purpose)
            if closes:
                _charge(db, terms.agreement, "closed", f"{sum.purpose} {sum.round}")
            if closes and protection is None:
                _check_told(db, masked)
                _charge(db, SITE, "told", masked.answer, masked.among)
            if protection is not None:
                _check_affordable(noises, protection)
        return bytes.fromhex(own)

    def forget_masked(self, app: str) -> None:
        """Delete what would open the sums that the site masked under an app and has not opened."""
        if self.path.exists():
            with self._changed() as db:
                _forget(db, app)

    @contextmanager
    def _changed(self) -> Iterator[sqlite3.Connection]:
        """Give a transaction, which is written whole at the end of the block, or not at all if an error is raised."""
        if not self.path.exists():
            self._make()
        with self._opened(is_there=True) as db:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")

    @contextmanager
    def _opened(self, is_there: bool = False) -> Iterator[sqlite3.Connection]:
        is_there = is_there or self.path.exists()
        place = f"{self.path.absolute().as_uri()}?mode=rw" if is_there else ":memory:"
        try:
            with closing(sqlite3.connect(place, PATIENCE, isolation_level=None, uri=True)) as db:
                if not is_there:
                    db.executescript(_TABLE)
                if db.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
                    raise sqlite3.DatabaseError("it has another format")
                db.execute("PRAGMA secure_delete = ON")
                db.execute("PRAGMA synchronous = EXTRA")  # a power cut brings no state of before a commit back
                yield db
        except (sqlite3.Error, pydantic.ValidationError) as error:
            reason = str(error).partition("\n")[0]
            raise RunError(
                f"{self.path}: can't be read or written ({reason}), so nothing leaves this site; restore it. Without "
                "it, what was released, spent and opened is forgotten"
            ) from None

    def _make(self) -> None:
        private_folder(self._folder)
        unwritten = placed(f"{self.path}: can't be written: ", RunError, of=sqlite3.Error)
        with locked(self._folder, PATIENCE), writing(self.path):
            if not self.path.exists():
                with unwritten, replacing(self.path, private=True) as part, closing(sqlite3.connect(part)) as db:
                    db.executescript(_TABLE)


def cost(noises: Sequence[float], delta: float) -> float:
    """Compute the epsilon of several sums with these noise multipliers together."""
    return epsilon(together(noises), 1, delta) if noises else 0.0


def _entries(db: sqlite3.Connection, whose: str, kind: str) -> dict[str, str]:
    return dict(db.execute("SELECT key, value FROM entry WHERE (whose, kind) = (?, ?) ORDER BY rowid", (whose, kind)))


def _charge(
    db: sqlite3.Connection, whose: str, kind: str, key: str, value: str = "", until: float | None = None
) -> str:
    db.execute("INSERT OR IGNORE INTO entry VALUES (?, ?, ?, ?, ?)", (whose, kind, key, value, until))
    return _entries(db, whose, kind)[key]


def _forget(db: sqlite3.Connection, app: str = "", purpose: str = "%") -> None:
    """Delete what is past its time, and what would open the sums that were masked under an app."""
    db.execute("DELETE FROM entry WHERE until < ? OR until AND whose = ? AND key LIKE ?", (time.time(), app, purpose))


def _releases(db: sqlite3.Connection) -> Releases:
    return Releases(map(Release.model_validate_json, _entries(db, SITE, "release").values()))


def _noises(db: sqlite3.Connection) -> tuple[float, ...]:
    return tuple(float(noise) for noise in _entries(db, SITE, "opened").values() if noise)


def _check_affordable(noises: Sequence[float], protection: Protection) -> None:
    noise, delta = protection.noise.noise, protection.delta
    following = cost([*noises, noise], delta)
    refuse_unless(
        following <= protection.epsilon * ROUNDING,
        "updates_epsilon",
        f"with one more sum of updates with noise {noise:g} this site would have spent {following:.4g}, and it agreed "
        f"to {protection.epsilon:.4g} (delta {delta:g}); it has opened {len(noises)}, for {cost(noises, delta):.4g}",
    )


def _check_open(db: sqlite3.Connection, terms: Terms, purpose: str, round: int) -> None:
    refuse_unless(
        f"{purpose} {round}" not in _entries(db, terms.agreement, "closed"),
        "opened",
        f"this site has opened a sum to {purpose} of round {round}, and opens one of a round; to begin a run anew, "
        "agree once more: fedskew deploy site --check data.toml",
    )


def _check_told(db: sqlite3.Connection, sum: MaskedSum) -> None:
    refuse_unless(
        _entries(db, SITE, "told").get(sum.answer, sum.among) == sum.among,
        "members",
        "this site has opened its evaluation of this model, or the same training of it, in a sum over other sites or "
        "with other weights; two such sums would tell single sites' parts",
    )
