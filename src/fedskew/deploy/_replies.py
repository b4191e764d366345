"""Validation of replies: what was not agreed on is refused, so that no reply can crash the server or spoil the model.

The `check_*` functions are pure and raise nothing but RefusedError, whatever a site sends. A finite update of the
agreed shape is accepted whatever its values: this is no defence against sites that lie plausibly.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedskew.deploy._arrays import HEADER, AnyArray, Layout, RefusedError, Specs, decode, short
from fedskew.deploy._messages import (
    ARRAYS,
    CLIENT,
    CONFUSION,
    COUNTS,
    EVALUATION_LOSS,
    LOSS,
    METRICS,
    REPLY,
    ROUND,
    SAMPLES,
    STEPS,
    counted_in,
)
from fedskew.engine import Assignment, Update, UpdateBuffer
from fedskew.models import ModelState

LOG = logging.getLogger("flwr")
MOST = 10**12
"""Upper limit of a site's number of samples, and of a network's integer counters."""


class ExpectedReply(NamedTuple):
    """What the reply to a training instruction has to look like.

    Attributes:
        client: Client index of the instruction.
        round: Round of the instruction.
        arrays: The model's arrays.
        returned: Arrays that the method's components return beside the model.
        idle: The same, of a client that took no step.
        most_steps: Most local steps that the site can have taken.
        max_bytes: Largest size of the whole reply.
    """

    client: int
    round: int
    arrays: Specs
    returned: Specs
    idle: Specs
    most_steps: int
    max_bytes: int


class Reply(NamedTuple):
    """A validated reply.

    Attributes:
        arrays: The trained model's arrays.
        steps: Local steps taken.
        loss: Mean training loss.
        returned: Arrays that the method's components return beside the model.
    """

    arrays: dict[str, AnyArray]
    steps: int
    loss: float
    returned: dict[str, AnyArray]


def bytes_needed(*arrays: Specs) -> int:
    """Upper limit of the size of a reply, in bytes.

    Args:
        *arrays: Shapes and dtypes of its arrays.
    """
    return 2**20 + sum(spec.bytes + HEADER for part in arrays for spec in part.values())


def check_size(content: RecordDict, max_bytes: int) -> None:
    """Refuse a reply that is larger than agreed."""
    size = sum(map(_size, content.values()))
    if size > max_bytes:
        raise RefusedError(f"the reply has {size} bytes; agreed are {max_bytes} at the most")


def check_reply(content: RecordDict, expected: ExpectedReply) -> Reply:
    """Validate the reply of a fedskew site to a training instruction.

    Args:
        content: The reply's records.
        expected: What they have to be.

    Returns:
        The reply's values, all of the expected shapes and finite.

    Raises:
        RefusedError: Something differs from what was expected; the message says what.
    """
    check_size(content, expected.max_bytes)
    metrics = _metrics(content)
    for key, value in ((CLIENT, expected.client), (ROUND, expected.round)):
        if metrics.get(key) != value:
            raise RefusedError(f"the reply is of {key} {short(metrics.get(key))}, not {value}")
    steps = metrics.get(STEPS)
    if not isinstance(steps, int) or not 0 <= steps <= expected.most_steps:
        raise RefusedError(f"its steps are {short(steps)}; expected a whole number from 0 to {expected.most_steps}")
    loss = _finite(metrics.get(LOSS), "training loss")
    returned = expected.returned if steps else expected.idle
    known = {ARRAYS, METRICS, REPLY} if returned else {ARRAYS, METRICS}
    if set(content) != known:
        raise RefusedError(f"the reply has the records {short(sorted(content))}, not {sorted(known)}")
    extra = decode(_arrays(content, REPLY), returned, "its reply") if returned else {}
    return Reply(check_arrays(_arrays(content, ARRAYS), expected.arrays), steps, loss, extra)


def check_arrays(record: ArrayRecord, expected: Specs) -> dict[str, AnyArray]:
    """Validate a model's arrays: all finite, and no counter out of range."""
    arrays = decode(record, expected, "its array")
    for name, array in arrays.items():
        if not expected[name].is_float and array.size and not 0 <= int(array.min()) <= int(array.max()) <= MOST:
            raise RefusedError(f"its array {name!r} has a counter below 0 or above {MOST}")
    return arrays


def check_counts(content: RecordDict, classes: int, whole: bool, max_bytes: int = 2**24) -> NDArray[np.float64]:
    """Validate the label counts that a site reports.

    Args:
        content: The reply's records.
        classes: Number of classes.
        whole: Whether the counts are exact, so that fractions are refused.
        max_bytes: Largest size of the reply.

    Returns:
        Label counts, shape `(classes,)`.

    Raises:
        RefusedError: They are missing, of another length, negative, too large, or not finite.
    """
    check_size(content, max_bytes)
    values = only_metrics(content).get(COUNTS)
    if not isinstance(values, list) or len(values) != classes:
        raise RefusedError(f"its label counts are {short(values)}; expected {classes} numbers, one per class")
    for value in values:
        if not 0 <= value <= MOST:
            raise RefusedError(f"one of its label counts is {short(value)}; expected a number from 0 to {MOST}")
        if whole and value != int(value):
            raise RefusedError(f"one of its label counts is {short(value)}; expected a whole number")
    return np.array(values, dtype=np.float64)


def check_samples(metrics: MetricRecord) -> int:
    """Validate the number of samples that a site reports with other metrics."""
    samples = metrics.get(SAMPLES)
    if not isinstance(samples, int | float) or not 0 <= samples <= MOST or samples != int(samples):
        raise RefusedError(f"its number of samples is {short(samples)}; expected a whole number from 0 to {MOST}")
    return int(samples)


def check_only_samples(content: RecordDict, max_bytes: int = 2**24) -> int:
    """Validate the number of samples of a site that withholds its label counts.

    Args:
        content: The reply's records.
        max_bytes: Largest size of the reply.

    Raises:
        RefusedError: It is missing, negative, too large, or not a whole number.
    """
    check_size(content, max_bytes)
    return check_samples(only_metrics(content))


def check_confusion(content: RecordDict, classes: int, round: int) -> tuple[NDArray[np.int64], float]:
    """Validate a site's evaluation.

    Args:
        content: The reply's records.
        classes: Number of classes.
        round: The round that was asked for.

    Returns:
        The confusion matrix, shape `(classes, classes)`, rows truth; and the mean loss.

    Raises:
        RefusedError: One of them is missing or not valid, or the evaluation is of another round.
    """
    check_size(content, 2**20 + 16 * classes * classes)
    metrics = only_metrics(content)
    if metrics.get(ROUND) != round:
        raise RefusedError(f"the evaluation is of {ROUND} {short(metrics.get(ROUND))}, not {round}")
    values, loss = metrics.get(CONFUSION), metrics.get(EVALUATION_LOSS)
    if (
        not isinstance(values, list)
        or len(values) != classes * classes
        or not all(isinstance(value, int) and 0 <= value <= MOST for value in values)
    ):
        raise RefusedError(f"its confusion matrix is {short(values)}; expected {classes} x {classes} whole numbers")
    return np.array(values, dtype=np.int64).reshape(classes, classes), _finite(loss, "loss")


def only_arrays(content: RecordDict) -> ArrayRecord:
    """The one ArrayRecord of a stock Flower client's reply, whatever its key."""
    found = [record for record in content.values() if isinstance(record, ArrayRecord)]
    if len(found) != 1:
        raise RefusedError(f"the reply has {len(found)} ArrayRecords; expected one, the trained model's")
    return found[0]


def only_metrics(content: RecordDict) -> MetricRecord:
    """The one MetricRecord of a stock Flower client's reply, whatever its key."""
    found = [record for record in content.values() if isinstance(record, MetricRecord)]
    if len(found) != 1:
        raise RefusedError(f"the reply has {len(found)} MetricRecords; expected one")
    return found[0]


class Answers(NamedTuple):
    """What came back, by what was asked: node ids, or client indices (see `by`).

    Attributes:
        contents: Records of each reply.
        failures: Reasons of those that replied with an error or could not be asked.
        silent: Those that did not reply in time.
    """

    contents: dict[int, RecordDict]
    failures: dict[int, str]
    silent: tuple[int, ...] = ()

    def by(self, keys: Mapping[int, int]) -> Answers:
        """The same answers under other keys."""
        return Answers(
            {keys[key]: content for key, content in self.contents.items()},
            {keys[key]: reason for key, reason in self.failures.items()},
            tuple(keys[key] for key in self.silent),
        )


class RoundNotes(TypedDict):
    """What happened in a round beside training, by site: the key `deployment` of a line of `rounds.jsonl`.

    Attributes:
        refused: Replies that were refused, and why.
        failed: Sites that replied with an error, and which.
        offline: Sites of the cohort that were not connected.
        silent: Sites of the cohort that did not reply in time.
        out_of_line: Norms of updates divided by the cohort's median, where that is above the limit.
    """

    refused: dict[str, str]
    failed: dict[str, str]
    offline: list[str]
    silent: list[str]
    out_of_line: dict[str, float]


def no_notes() -> RoundNotes:
    """The notes of a round in which nothing happened."""
    return {"refused": {}, "failed": {}, "offline": [], "silent": [], "out_of_line": {}}


@dataclass(frozen=True)
class ReplyRules:
    """Limits that replies are held to.

    Attributes:
        norm_limit: See `Agreement`.
        norm_action: See `Agreement`.
        max_reply: See `Agreement`.
        batch_size: The clients' batch size, which limits their number of steps.
        slack: Samples that a site may have beyond the number it reported.
    """

    norm_limit: float = 10.0
    norm_action: Literal["report", "leave_out"] = "report"
    max_reply: int | None = None
    batch_size: int = 1
    slack: float = 0.0


@dataclass
class ReplyValidator:
    """Turns a round's replies into updates, and notes what was refused, failed or missing.

    Attributes:
        names: Names of the clients, by index.
        layout: Layout of the model.
        returned: Arrays that the method's components return beside the model.
        idle: The same, of a client that took no step.
        rules: Limits that replies are held to.
        notes: What happened in this round.
    """

    names: Sequence[str]
    layout: Layout
    returned: Specs
    idle: Specs
    rules: ReplyRules
    notes: RoundNotes = field(default_factory=no_notes)

    def __post_init__(self) -> None:
        self._buffer = UpdateBuffer()
        self._own_rows: dict[int, torch.Tensor] = {}  # by client

    def begin(self, cohort: Sequence[int], sent: ModelState) -> None:
        """Begin a round: clear the notes and prepare memory for the cohort's updates."""
        self.notes = no_notes()
        self._own_rows.clear()  # the last round's memory can be used again only when nobody refers to it
        rows = self._buffer.acquire(len(cohort), sent.parameters.numel())
        if rows is not None:
            self._own_rows.update(zip(cohort, rows, strict=True))

    def missing(self, round: int, what: Literal["offline", "silent"], clients: Sequence[int]) -> None:
        """Note clients that were not connected, or did not reply in time."""
        self.notes[what] = [self.names[client] for client in clients]
        if clients:
            said = "not connected" if what == "offline" else "no reply in time"
            LOG.warning("round %d: %s: %s", round, said, ", ".join(self.notes[what]))

    def expected(self, round: int, task: Assignment) -> ExpectedReply:
        """What the reply to an assignment has to be."""
        batches = math.ceil((task.samples + self.rules.slack) / self.rules.batch_size)
        most = task.epochs * batches
        return ExpectedReply(
            client=task.client,
            round=round,
            arrays=self.layout.specs,
            returned=self.returned,
            idle=self.idle,
            most_steps=most if task.steps is None else min(most, task.steps),
            max_bytes=self.rules.max_reply or bytes_needed(self.layout.specs, self.returned),
        )

    def updates(
        self, round: int, answers: Answers, sent: ModelState, validate: Callable[[RecordDict, int], Reply]
    ) -> list[Update]:
        """Validate the replies of a round, note what went wrong, and return the updates to aggregate.

        Args:
            round: The round.
            answers: Replies by client index.
            sent: The model that the clients started from.
            validate: Validates the records of a reply of a client; raises RefusedError.

        Returns:
            Updates in order of arrival, without those that the norm limit leaves out.
        """
        for client, reason in answers.failures.items():
            self.notes["failed"][self.names[client]] = reason
            LOG.warning("round %d: %s failed: %s", round, self.names[client], reason)
        self.missing(round, "silent", answers.silent)
        updates = []
        for client, content in answers.contents.items():
            try:
                reply = validate(content, client)
            except RefusedError as error:
                self.notes["refused"][self.names[client]] = str(error)
                LOG.warning("round %d: refused the reply of %s: %s", round, self.names[client], error)
            else:
                updates.append(self._update(reply, client, round, sent))
        return self._within_norm_limit(round, updates)

    def _update(self, reply: Reply, client: int, round: int, sent: ModelState) -> Update:
        trained = self.layout.to_state(reply.arrays, self._own_rows.get(client))
        change = trained.parameters.sub_(sent.parameters)
        return Update(
            client=client,
            change=change,
            norm=torch.linalg.vector_norm(change),
            buffers=trained.buffers,
            integers=trained.integers,
            steps=reply.steps,
            loss=reply.loss,
            reply={name: torch.from_numpy(array.copy()) for name, array in reply.returned.items()},
            state=counted_in(round),
        )

    def _within_norm_limit(self, round: int, updates: list[Update]) -> list[Update]:
        """Note updates whose norm exceeds the limit; return those that the rules keep."""
        norms = [float(update.norm) for update in updates]
        median = float(np.median(norms)) if norms else 0.0
        leaves_out = self.rules.norm_action == "leave_out"
        kept = []
        for update, norm in zip(updates, norms, strict=True):
            if norm <= self.rules.norm_limit * median:
                kept.append(update)
                continue
            name, ratio = self.names[update.client], norm / median if median else math.inf
            self.notes["out_of_line"][name] = min(ratio, 1e308)
            LOG.warning(
                "round %d: the update of %s is %.3g times as long as the cohort's median%s",
                round,
                name,
                ratio,
                "; it is left out" if leaves_out else "",
            )
            if not leaves_out:
                kept.append(update)
        return kept


def _finite(value: object, what: str) -> float:
    if not isinstance(value, int | float) or not -sys.float_info.max <= value <= sys.float_info.max:
        raise RefusedError(f"its {what} is {short(value)}; expected a finite number")
    return float(value)


def _metrics(content: RecordDict) -> MetricRecord:
    record = content.get(METRICS)
    if not isinstance(record, MetricRecord):
        raise RefusedError(f"the reply has no {METRICS}")
    return record


def _arrays(content: RecordDict, key: str) -> ArrayRecord:
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise RefusedError(f"the reply's {key!r} is no ArrayRecord")
    return record


def _size(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    """Size of a record's keys and values in bytes."""
    total = 0
    for name, value in record.items():
        total += len(name)
        if isinstance(value, Array):
            total += len(value.data) if isinstance(value.data, bytes) else 0
        elif isinstance(value, str | bytes):
            total += len(value)
        elif isinstance(value, list):
            total += sum(len(entry) if isinstance(entry, str | bytes) else 8 for entry in value)
        else:
            total += 8
    return total
