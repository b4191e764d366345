"""A site's book: what must not happen twice, and what adds up over all federations that name the same state folder.

It has each release of label counts, each sum that the site opened and what its noise cost, and the questions that it
answered since it agreed. All of it is one SQLite file, and whatever belongs together is written in one transaction
before the answer leaves: a process that is killed in between has done nothing, or all of it.

Of each round a site opens one sum of updates and one of evaluations, the one that it masked last. Two sums of the same
answers over different sites tell their difference: what it opened without noise, it adds to no sum over other sites.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np
import pydantic
from numpy.typing import NDArray

from fedskew.deploy._log import LOG
from fedskew.deploy._releases import (
    NOISIEST,
    ROUNDING,
    Budget,
    CountsRequest,
    Neighbours,
    NotAgreedError,
    Release,
    covering,
    explain,
    is_due,
    is_too_noisy,
    plain,
    refuse_beyond,
    spent,
)
from fedskew.errors import RunError
from fedskew.files import locked, private_folder, replacing, writing
from fedskew.labels import privatize
from fedskew.privacy import Protection, epsilon, together

if TYPE_CHECKING:
    from fedskew.deploy._terms import Terms

FILE = "book.db"
FORMAT = 1
BEFORE = ("label-counts.json", "updates.json", "opened.json")
"""Files of an earlier fedskew in place of the book: releases, what updates with noise cost, and opened answers."""

PATIENCE = 30.0
"""Seconds to wait for another process that writes."""

_TABLES = f"""
CREATE TABLE release (entry TEXT NOT NULL);
CREATE TABLE noise (at TEXT NOT NULL, sum TEXT NOT NULL, noise REAL NOT NULL CHECK (noise > 0));
CREATE TABLE question (agreement TEXT, kind TEXT, question TEXT, PRIMARY KEY (agreement, kind, question));
CREATE TABLE share (app TEXT PRIMARY KEY, counts TEXT NOT NULL);
CREATE TABLE masked (app TEXT, purpose TEXT, name TEXT, digest TEXT, answer TEXT, among TEXT, own BLOB, deadline REAL,
    PRIMARY KEY (app, purpose));
CREATE TABLE closed (agreement TEXT, purpose TEXT, round INTEGER, PRIMARY KEY (agreement, purpose, round));
CREATE TABLE opened (digest TEXT PRIMARY KEY);
CREATE TABLE told (answer TEXT PRIMARY KEY, among TEXT NOT NULL);
PRAGMA user_version = {FORMAT};
"""

FINISHED_MODELS = 2
"""Most models that a site answers a finish's questions about: a server that was killed may finish another one."""

EVALUATED_AGAIN = 10
"""Further models that a site evaluates: a server that was killed may aggregate the round anew, from other replies."""

Result = TypeVar("Result")
Kind = Literal["train", "evaluate", "finish", "models", "counts", "announced"]

_KINDS: dict[Kind, tuple[str, str]] = {
    "train": ("rounds", "rounds that it trained in"),
    "evaluate": ("rounds", "models that it evaluated"),
    "finish": ("most_questions", "questions after the last round"),
    "models": ("finish", "models of a finish"),
    "counts": ("most_questions", "questions about sums of label counts"),
    "announced": ("label_counts", "announcement of sums of label counts"),
}
"""The kinds of questions that are counted: the term that each is refused by, and what its limit is of."""


class Spent(NamedTuple):
    """What a site has spent on sums with noise on updates: their number, their epsilon, and that with one more."""

    sums: int
    epsilon: float
    following: float


class MaskedSum(NamedTuple):
    """A sum that a site masks an answer for.

    Attributes:
        purpose: What is summed.
        round: Number of the round.
        name: Names the sum as a request to open it does.
        digest: Hash of all that its masks follow from.
        answer: Hash of the answer.
        among: Hash of the sites and weights of the sum.
    """

    purpose: str
    round: int
    name: str
    digest: str = ""
    answer: str = ""
    among: str = ""


class Book:
    """A site's book, a file of mode 0600 in its state folder.

    Args:
        folder: The state folder; it is made when something is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.path = folder, folder / FILE

    @property
    def releases(self) -> tuple[Release, ...]:
        """All releases of label counts, the oldest first."""
        return self._read(_releases, ())

    def spent(self, neighbours: Neighbours) -> float:
        """Return the sum of the epsilons of all noisy releases, for these neighbours."""
        return spent(self.releases, neighbours)

    def covering(self, classes: Sequence[str]) -> Release | None:
        """Return the newest noisy release that has all of these classes."""
        return covering(self.releases, classes)

    def why_another(self, request: CountsRequest, counts: NDArray[np.float64]) -> str:
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

    def current(self, request: CountsRequest, counts: NDArray[np.float64], budget: Budget | None) -> list[float] | None:
        """Return what a query would be answered with now, or None if it takes a new release."""
        if request.label_counts != "noisy":
            return plain(request, counts)
        releases = self.releases
        last = covering(releases, request.classes)
        return None if last is None or is_due(last, releases, request, budget) else last.of(request.classes)

    def release(
        self, request: CountsRequest, counts: NDArray[np.float64], budget: Budget | None
    ) -> tuple[list[float], Release]:
        """Answer a query of label counts, with a release that is in the book.

        Args:
            request: What the server asks for.
            counts: The site's exact label counts, shape `(classes,)`.
            budget: What the site may release; None: one noisy release.

        Returns:
            The numbers to report: one for each class, or the number of samples if the counts are withheld; and the
            release that they are from.

        Raises:
            NotAgreedError: It takes a new release, which goes beyond the budget.
            RunError: The book can't be read or written.
        """
        with self._changing() as db:
            releases = _releases(db)
            if request.label_counts != "noisy":
                values = plain(request, counts)
                last = next((one for one in reversed(releases) if one.label_counts == request.label_counts), None)
                if last is None or not last.has(request.classes, counts):
                    last = _add(db, request, counts, values, budget)
                return values, last
            last = covering(releases, request.classes)
            if last is not None and not is_due(last, releases, request, budget):
                explain(self.path, last, request, counts, budget)
                return last.of(request.classes), last
            refuse_beyond(self.path, releases, request, budget)
            assert request.epsilon is not None, "of noisy counts"
            noisy: list[float] = privatize(counts[None], request.epsilon, neighbours=request.neighbours)[0].tolist()
            entry = _add(db, request, counts, noisy, budget)
        LOG.info(
            "label counts are released with epsilon %g (%s); all releases together: %g",
            request.epsilon,
            request.neighbours,
            spent([*releases, entry], request.neighbours),
        )
        return noisy, entry

    def share(self, terms: Terms, counts: Callable[[], NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return what stands for this site in sums of label counts: what it was when first asked under this app."""
        query = "SELECT counts FROM share WHERE app = ?"
        rows = self._read(lambda db: db.execute(query, (terms.app,)).fetchall(), list[tuple[str]]())
        if not rows:
            values = counts()
            with self._changing() as db:
                db.execute("INSERT OR IGNORE INTO share VALUES (?, ?)", (terms.app, json.dumps(values.tolist())))
                rows = db.execute(query, (terms.app,)).fetchall()
        return np.array(json.loads(rows[0][0]), dtype=np.float64)

    def count(self, terms: Terms, kind: Kind, question: str, most: int) -> None:
        """Write down that a question is answered, before it is; the same question again is not counted twice.

        A server that was killed asks the questions of a round once more, and gets the same answers.

        Args:
            terms: What the site agreed to; questions are counted since then.
            kind: The kind of question.
            question: Hash of what the answer depends on.
            most: How many the site agreed to.

        Raises:
            NotAgreedError: It would be one more than the site agreed to.
            RunError: The book can't be read or written.
        """
        with self._changing() as db:
            known = _questions(db, terms, kind)
            if question in known:
                return
            if len(known) >= most:
                term, what = _KINDS[kind]
                raise NotAgreedError(
                    term, f"{term}: this site agreed to {most} {what}, and has answered them all since then"
                )
            db.execute("INSERT INTO question VALUES (?, ?, ?)", (_of(terms), kind, question))

    def rounds(self, terms: Terms) -> int:
        """Return the number of rounds that the site has trained in since it agreed."""
        return len(self._read(lambda db: _questions(db, terms, "train"), set[str]()))

    @property
    def noises(self) -> tuple[float, ...]:
        """The noise multiplier of each sum of updates that was opened, the oldest first."""
        return self._read(_noises, ())

    def spending(self, noise: float, delta: float) -> Spent:
        """Compute what the site has spent on sums with noise, and what one more with this multiplier would make of it.

        Raises:
            MissingPackageError: dp-accounting is not installed.
            RunError: The book can't be read.
        """
        return _spending(self.noises, noise, delta)

    def check_affordable(self, protection: Protection) -> None:
        """Raise NotAgreedError for a sum with noise that the site could not open within its budget."""
        _check_affordable(self.noises, protection)

    def check_open(self, terms: Terms, purpose: str, round: int) -> None:
        """Raise NotAgreedError for a round of which the site has opened a sum for this purpose."""
        self._read(lambda db: _check_open(db, terms, purpose, round), None)

    def mask(self, terms: Terms, sum: MaskedSum, own: bytes, deadline: float, noisy: bool = False) -> None:
        """Write down what opens a sum, before the masked answer leaves; what was masked before it opens no more.

        Args:
            terms: What the site agreed to.
            sum: The sum.
            own: Seed of the site's own mask.
            deadline: The time after which the site opens it no more, in seconds since 1970.
            noisy: Whether the answer has noise, which is drawn anew for each sum.

        Raises:
            NotAgreedError: The site has opened a sum of this round, or the same answer in one over other sites.
            RunError: The book can't be read or written.
        """
        with self._changing() as db:
            _check_open(db, terms, sum.purpose, sum.round)
            if not noisy:
                _check_told(db, sum.answer, sum.among)
            db.execute("DELETE FROM masked WHERE deadline < ?", (time.time(),))
            row = (terms.app, sum.purpose, sum.name, sum.digest, sum.answer, sum.among, own, deadline)
            db.execute("REPLACE INTO masked VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def open(self, terms: Terms, sum: MaskedSum, protection: Protection | None = None, closes: bool = True) -> bytes:
        """Open a sum, once: write down that it is open, delete what opens it, and charge its noise.

        Args:
            terms: What the site agreed to.
            sum: The sum: purpose, round and name.
            protection: The noise of the answer, and the budget that the site agreed to; None: it has none.
            closes: Whether the round is over with it, for this purpose.

        Returns:
            The seed of the site's own mask.

        Raises:
            NotAgreedError: The site has masked nothing for it, has opened it, has masked for another one since, or its
                noise is beyond the budget. The last changes nothing.
            RunError: The book can't be read or written.
        """
        with self._changing() as db:
            row = db.execute(
                "SELECT digest, answer, among, own FROM masked "
                "WHERE (app, purpose, name) = (?, ?, ?) AND deadline >= ?",
                (terms.app, sum.purpose, sum.name, time.time()),
            ).fetchone()
            if row is None:
                raise NotAgreedError(
                    "opened",
                    "opened: asked to open a sum that this site has not masked, has opened, has masked another one "
                    "after, or that is too old",
                )
            digest, answer, among, own = row
            if db.execute("SELECT 1 FROM opened WHERE digest = ?", (digest,)).fetchone():
                raise NotAgreedError("opened", "opened: this site has opened this sum before it agreed once more")
            db.execute("INSERT INTO opened VALUES (?)", (digest,))
            db.execute("DELETE FROM masked WHERE (app, purpose) = (?, ?)", (terms.app, sum.purpose))
            if closes:
                db.execute("INSERT INTO closed VALUES (?, ?, ?)", (_of(terms), sum.purpose, sum.round))
            if closes and protection is None:
                _check_told(db, answer, among)
                db.execute("INSERT OR IGNORE INTO told VALUES (?, ?)", (answer, among))
            if protection is not None:
                _check_affordable(_noises(db), protection)
                name = f"round {sum.round}, {sum.name}"
                db.execute("INSERT INTO noise VALUES (?, ?, ?)", (now(), name, protection.noise.noise))
        return bytes(own)

    def forget_masked(self, app: str) -> None:
        """Delete what would open the sums that the site masked under an app and has not opened."""
        if self.path.exists():
            with self._changing() as db:
                db.execute("DELETE FROM masked WHERE app = ?", (app,))

    def _read(self, reader: Callable[[sqlite3.Connection], Result], nothing: Result) -> Result:
        self._check_before()
        if not self.path.exists():
            return nothing
        with self._connected() as db:
            return reader(db)

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Give a transaction, which is written whole at the end of the block, or not at all if an error is raised."""
        self._check_before()
        if not self.path.exists():
            self._make()
        with self._connected() as db:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")

    def _check_before(self) -> None:
        """Refuse a state folder with what an earlier fedskew wrote down, which no book has."""
        if name := next((name for name in BEFORE if (self._folder / name).exists()), ""):
            raise RunError(
                f"{self._folder / name}: an earlier fedskew wrote it, and this one does not read what was released, "
                "spent or opened then, so nothing leaves this site; go on with that version, or move the file away to "
                "have it forgotten"
            )

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        place = f"{self.path.absolute().as_uri()}?mode=rw"
        try:
            with closing(sqlite3.connect(place, PATIENCE, isolation_level=None, uri=True)) as db:
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
        """Make an empty book, whole or not at all."""
        private_folder(self._folder)
        with locked(self._folder, PATIENCE), writing(self.path):
            if not self.path.exists():
                try:
                    with replacing(self.path, private=True) as part, closing(sqlite3.connect(part)) as db:
                        db.executescript(_TABLES)
                except sqlite3.Error as error:
                    raise RunError(f"{self.path}: can't be written: {error}") from None


def cost(noises: Sequence[float], delta: float) -> float:
    """Compute the epsilon of several sums with these noise multipliers together."""
    return epsilon(together(noises), 1, delta) if noises else 0.0


def now() -> str:
    """Return the time, UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _of(terms: Terms) -> str:
    """Name an agreement: to agree to the same app once more is another."""
    return f"{terms.app} {terms.agreed}"


def _questions(db: sqlite3.Connection, terms: Terms, kind: Kind) -> set[str]:
    query = "SELECT question FROM question WHERE (agreement, kind) = (?, ?)"
    return {question for (question,) in db.execute(query, (_of(terms), kind))}


def _noises(db: sqlite3.Connection) -> tuple[float, ...]:
    return tuple(noise for (noise,) in db.execute("SELECT noise FROM noise ORDER BY rowid"))


def _spending(noises: Sequence[float], noise: float, delta: float) -> Spent:
    return Spent(len(noises), cost(noises, delta), cost([*noises, noise], delta))


def _check_affordable(noises: Sequence[float], protection: Protection) -> None:
    noise = protection.noise.noise
    total = _spending(noises, noise, protection.delta)
    if total.following > protection.epsilon * ROUNDING:
        raise NotAgreedError(
            "updates_epsilon",
            f"updates_epsilon: with one more sum of updates with noise {noise:g} this site would have spent "
            f"{total.following:.4g}, and it agreed to {protection.epsilon:.4g} (delta {protection.delta:g}); it has "
            f"opened {total.sums}, for {total.epsilon:.4g}",
        )


def _check_open(db: sqlite3.Connection, terms: Terms, purpose: str, round: int) -> None:
    query = "SELECT 1 FROM closed WHERE (agreement, purpose, round) = (?, ?, ?)"
    if db.execute(query, (_of(terms), purpose, round)).fetchone():
        raise NotAgreedError(
            "opened",
            f"opened: this site has opened a sum to {purpose} of round {round}, and opens one of a round; to begin a "
            "run anew, agree once more: fedskew deploy site --check data.toml",
        )


def _check_told(db: sqlite3.Connection, answer: str, among: str) -> None:
    if db.execute("SELECT 1 FROM told WHERE answer = ? AND among != ?", (answer, among)).fetchone():
        raise NotAgreedError(
            "members",
            "members: this site has opened its evaluation of this model, or the same training of it, in a sum over "
            "other sites or with other weights; two such sums would tell single sites' parts",
        )


def _releases(db: sqlite3.Connection) -> tuple[Release, ...]:
    rows = db.execute("SELECT entry FROM release ORDER BY rowid")
    return tuple(Release.model_validate_json(entry) for (entry,) in rows)


def _add(
    db: sqlite3.Connection,
    request: CountsRequest,
    counts: NDArray[np.float64],
    values: list[float],
    budget: Budget | None,
) -> Release:
    noisy = request.label_counts == "noisy"
    entry = Release(
        at=now(),
        label_counts=request.label_counts,
        classes=list(request.classes),
        exact=counts.astype(int).tolist(),
        released=values,
        epsilon=request.epsilon if noisy else None,
        neighbours=request.neighbours if noisy else None,
        data="" if budget is None else budget.data,
    )
    db.execute("INSERT INTO release VALUES (?)", (entry.model_dump_json(exclude_none=True),))
    return entry
