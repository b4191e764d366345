"""The terms that a site agreed to: `agreed.toml` beside its `data.toml`, written by `fedskew deploy site --check`.

The site refuses whatever goes beyond it, whatever the server sends: another app, more epochs or rounds, a larger reply,
label counts or evaluations that were not agreed on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
import tomli_w
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field

from fedskew.deploy._app_files import app_hash, read_app
from fedskew.deploy._ledger import Budget, Neighbours, NotAgreedError, ReleaseMode
from fedskew.errors import ConfigError, RunError, nearest
from fedskew.files import private_folder, write_text, writing
from fedskew.parameters import Count, Positive
from fedskew.sums import LEAST
from fedskew.trees import read_tree

if TYPE_CHECKING:
    from fedskew.deploy._agreement import Agreement

FILE = "agreed.toml"
APPS = "apps"
"""Folder in a site's state folder, with one for each app that it agreed to."""

USED = "used.json"
FINISHED_MODELS = 2
"""Most models that a site answers a finish's questions about: a server that was killed may finish another one."""

EVALUATED_AGAIN = 10
"""Further models that a site evaluates: a server that was killed may aggregate the round anew, from other replies."""

ABOUT = """\
# What this site agreed to, as `fedskew deploy site --check data.toml` showed it. The site refuses what goes beyond it.
# Smaller numbers, and a larger sum_sites, may be written here at any time, and hold from the next message on; for
# everything else, check again.
"""


class Terms(BaseModel):
    """The contents of `agreed.toml`.

    Attributes:
        agreed: When the site agreed, UTC. Rounds are counted from then on.
        app: Hash of the app's files, by `app_hash`.
        label_counts: What the site reports of its label counts (see `Agreement`).
        evaluation: Whether the site reports the confusion matrix of its test samples; "outcomes": also with its columns
            divided by how sure the model is.
        cells: Whether the site, as the target site, reports what the model makes of its samples without labels.
        returns: Names of the arrays that a reply may have beside the model.
        finish: The method's finish, whose questions the site answers after the last round; empty: none.
        questions: What these questions are: of which samples, and of what they consist.
        most_questions: Most of them that the site answers; or with label counts that are only ever summed, of the
            questions about these.
        rounds: Most models that the site trains, and, plus one and `EVALUATED_AGAIN`, that it evaluates. The same
            question again is the same answer, and is not counted twice.
        epochs: Most local epochs in a round.
        bytes: Largest reply, in bytes; 0 while that is unknown, which is never written.
        updates: "masked": the site's updates and evaluations leave it in masked sums only.
        sum_sites: Fewest sites that such a sum may be over.
        updates_epsilon: Largest epsilon of all sums together that its updates are in, with noise; the site opens no sum
            beyond that. None: its updates have no noise.
        updates_delta: The delta that it goes with.
        data: Mark of the data: when the site last said that they changed.
        epsilon: Largest epsilon of one release of noisy label counts.
        epsilon_total: Largest sum of the epsilons of all releases, those before this agreement included.
        neighbours: What both protect (see `Agreement`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_: Literal[1] = Field(1, alias="schema")
    agreed: str
    app: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    label_counts: ReleaseMode
    evaluation: Literal["outcomes", "confusion", "none"]
    cells: bool = False
    returns: list[str] = []
    finish: str = ""
    questions: list[str] = []
    most_questions: Annotated[int, Field(ge=0)] = 0
    rounds: Count
    epochs: Positive
    bytes: Annotated[int, Field(ge=0)]
    updates: Literal["plain", "masked"] = "plain"
    sum_sites: Annotated[int, Field(ge=LEAST)] = LEAST
    updates_epsilon: Positive | None = None
    updates_delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    data: str
    epsilon: Positive | None = None
    epsilon_total: Positive | None = None
    neighbours: Neighbours = "add-remove"

    @property
    def budget(self) -> Budget:
        """The site's limits on the release of its label counts."""
        return Budget(self.epsilon or 0.0, self.epsilon_total or 0.0, self.neighbours, self.data)

    def folder(self, state: Path) -> Path:
        """Return the folder for what a site counts and keeps under its agreement to this app, and to no other.

        Several federations may name one state folder; what they share there are the ledgers alone.

        Args:
            state: The site's state folder.
        """
        return state / APPS / self.app[:32]

    def write(self, path: Path) -> None:
        """Write the terms as TOML.

        Args:
            path: The file to write.
        """
        assert self.bytes, "worked out before it is agreed to"
        tree = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        if self.epsilon is None:
            del tree["neighbours"]
        if self.updates == "plain":
            del tree["updates"], tree["sum_sites"]
        if not self.finish:
            del tree["finish"], tree["questions"]
        if not self.most_questions:
            del tree["most_questions"]
        with writing(path):
            write_text(path, ABOUT + tomli_w.dumps(tree), private=True)

    def check_app(self, folder: Path) -> None:
        """Check that an app folder is the one that the site agreed to.

        Args:
            folder: The app folder.

        Raises:
            NotAgreedError: It is another.
        """
        if app_hash(read_app(folder)) != self.app:
            raise NotAgreedError("app", "app: the server's app is not the one that this site agreed to")

    def check_agreement(self, agreement: Agreement) -> None:
        """Check that a server asks for label counts in the way that the site agreed to.

        Args:
            agreement: The server's agreement.

        Raises:
            NotAgreedError: It asks in another way.
        """
        if agreement.label_counts != self.label_counts:
            raise NotAgreedError(
                "label_counts",
                f"label_counts: the server asks for {agreement.label_counts} ones; this site agreed to "
                f"{self.label_counts} ones",
            )
        if agreement.updates != self.updates:
            raise NotAgreedError(
                "updates",
                f"updates: the server asks for {agreement.updates} ones; this site agreed to {self.updates} ones",
            )


def terms_path(data: Path) -> Path:
    """Return the place of a site's `agreed.toml`: beside its `data.toml`.

    Args:
        data: The site's `data.toml`.
    """
    return data.parent / FILE


def read_terms(path: Path) -> Terms:
    """Read an `agreed.toml`.

    Args:
        path: The file.

    Returns:
        The terms.

    Raises:
        NotAgreedError: There is no such file: the site has not agreed to anything.
        ConfigError: The file can't be read, or a key or value is wrong.
    """
    if not path.exists():
        raise NotAgreedError(
            "nothing",
            f"{path}: this site has agreed to nothing yet; look, and agree: fedskew deploy site --check "
            f"{path.with_name('data.toml')}",
        )
    tree, _, _ = read_tree(path, "agreed terms", None, False)
    try:
        return Terms.model_validate(tree)
    except pydantic.ValidationError as error:
        first = min(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
        key = ".".join(map(str, first["loc"]))
        fields = [field.alias or name for name, field in Terms.model_fields.items()]
        said = f"no such key{nearest(key, fields)}" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(f"{path}: {key}: {said}") from None


_KINDS = {
    "train": "rounds that it trained in",
    "evaluate": "models that it evaluated",
    "finish": "questions after the last round",
    "counts": "questions about sums of label counts",
    "announced": "announcement of sums of label counts",
    "models": "models of a finish",
    "masked": "the last answer of each purpose that it masked",
    "opened": "rounds of which it opened a sum",
}


class Used:
    """The questions that a site has answered since it agreed, in a file in the folder of its terms (`Terms.folder`).

    A question is known by the hash of what the answer depends on. A server that was killed asks the questions of a
    round once more, and gets the same answers; only the model that it then has evaluated may be another. A round of
    which a sum is opened is over.
    """

    def __init__(self, state: Path, terms: Terms) -> None:
        self._path, self._terms = terms.folder(state) / USED, terms

    def count(
        self, kind: Literal["train", "evaluate", "finish", "models", "counts", "announced"], question: str
    ) -> None:
        """Write down that a question is answered, before it is.

        Args:
            kind: The kind of question.
            question: Hash of what the answer depends on.

        Raises:
            NotAgreedError: It would be one more than the site agreed to.
            RunError: The file can't be read or written.
        """
        rounds = self._terms.rounds
        term, most = {
            "models": ("finish", FINISHED_MODELS),
            "train": ("rounds", rounds),
            "evaluate": ("rounds", rounds + 1 + EVALUATED_AGAIN),
            "finish": ("most_questions", self._terms.most_questions),
            "counts": ("most_questions", self._terms.most_questions),
            "announced": ("label_counts", 1),
        }[kind]
        with self._changing() as used:
            if question in used[kind]:
                return
            if len(used[kind]) >= most:
                raise NotAgreedError(
                    term, f"{term}: this site agreed to {most} {_KINDS[kind]}, and has answered them all since then"
                )
            used[kind].append(question)

    def check_closed(self, purpose: str, round: int) -> None:
        """Refuse a round of which a sum for this purpose is opened.

        Args:
            purpose: What is summed.
            round: Number of the round.

        Raises:
            NotAgreedError: It is.
            RunError: The file can't be read.
        """
        _check_closed(self._read(), purpose, round)

    def masked(self, purpose: str, round: int, sum: str, answer: str, among: str) -> None:
        """Write down which answer is masked for which sum, before it is; the site opens no earlier one then.

        Args:
            purpose: What is summed.
            round: Number of the round.
            sum: Hash that names the sum.
            answer: Hash of the answer.
            among: Hash of the sites and weights of the sum.

        Raises:
            NotAgreedError: See `check_closed`.
            RunError: The file can't be read or written.
        """
        with self._changing() as used:
            _check_closed(used, purpose, round)
            others = [entry for entry in used["masked"] if entry.split()[0] != purpose]
            used["masked"] = [*others, f"{purpose} {sum} {answer} {among}"]

    def opened(self, purpose: str, round: int, sum: str) -> tuple[str, str]:
        """Write down that the site opens a sum, before the answer leaves: one of each round and purpose.

        Args:
            purpose: What is summed.
            round: Number of the round.
            sum: Hash that names the sum.

        Returns:
            Hashes of the answer, and of the sites and weights, as `masked` was told.

        Raises:
            NotAgreedError: It has opened it, or it has masked another answer since.
            RunError: The file can't be read or written.
        """
        with self._changing() as used:
            for entry in used["masked"]:
                if entry.split()[:2] == [purpose, sum]:
                    used["masked"].remove(entry)
                    used["opened"].append(f"{purpose} {round}")
                    return entry.split()[2], entry.split()[3]
            raise NotAgreedError(
                "opened", "opened: asked to open a sum, and this site has masked for another one since"
            )

    def rounds(self) -> int:
        """Return the number of rounds that the site has trained in since it agreed."""
        return len(self._read()["train"])

    @contextmanager
    def _changing(self) -> Iterator[dict[str, list[str]]]:
        """Give what is written down, and write it anew unless an error is raised or nothing has changed."""
        private_folder(self._path.parent)
        with FileLock(self._path.with_name(f"{USED}.lock"), mode=0o600):
            used = self._read()
            before = json.dumps(used)
            yield used
            if json.dumps(used) != before:
                with writing(self._path):
                    write_text(self._path, json.dumps({"agreed": self._terms.agreed, **used}), private=True)

    def _read(self) -> dict[str, list[str]]:
        if not self._path.exists():
            return {kind: [] for kind in _KINDS}
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["agreed"] != self._terms.agreed:
                return {kind: [] for kind in _KINDS}
            return {kind: [str(question) for question in kept[kind]] for kind in _KINDS}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self._path}: can't be read ({type(error).__name__}); restore it, or delete it and agree once "
                "more: fedskew deploy site --check data.toml"
            ) from None


def _check_closed(used: dict[str, list[str]], purpose: str, round: int) -> None:
    if f"{purpose} {round}" in used["opened"]:
        raise NotAgreedError(
            "opened",
            f"opened: this site has opened a sum to {purpose} of round {round}, and opens one of a round; to begin a "
            "run anew, agree once more: fedskew deploy site --check data.toml",
        )
