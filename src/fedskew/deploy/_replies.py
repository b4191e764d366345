"""Validation of replies: what differs from the agreement is refused, so that no reply can crash the server.

The `check_*` functions are pure, and raise only RefusedError, whatever a site sends. A finite update of the agreed
shape is accepted whatever its values are: validation is no defence against sites that send plausible but wrong updates.
"""

from __future__ import annotations

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
from fedskew.deploy._log import LOG
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

MOST = 10**12
"""Upper limit of a site's number of samples and of a network's integer counters."""


class ExpectedReply(NamedTuple):
    """The form that the reply to a training instruction must have.

    Attributes:
        client: Client index in the instruction.
        round: Round in the instruction.
        arrays: Shapes and dtypes of the model's arrays.
        returned: Shapes and dtypes of the arrays that the method's components return beside the model.
        idle: `returned` for a client that took no local step.
        most_steps: Largest number of local steps that the site can have taken.
        max_bytes: Largest size of the whole reply, in bytes.
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
        steps: Number of local steps taken.
        loss: Mean training loss.
        returned: Arrays that the method's components return beside the model.
    """

    arrays: dict[str, AnyArray]
    steps: int
    loss: float
    returned: dict[str, AnyArray]


def bytes_needed(*arrays: Specs) -> int:
    """Compute an upper limit of the size of a reply.

    Args:
        *arrays: Shapes and dtypes of the reply's arrays.

    Returns:
        The limit, in bytes.
    """
    return 2**20 + sum(spec.bytes + HEADER for part in arrays for spec in part.values())


def check_size(content: RecordDict, max_bytes: int) -> None:
    """Raise RefusedError for a reply of more than `max_bytes` bytes."""
    size = sum(map(_size, content.values()))
    if size > max_bytes:
        raise RefusedError(f"the reply has {size} bytes; expected {max_bytes} at most")


def check_reply(content: RecordDict, expected: ExpectedReply) -> Reply:
    """Validate the reply of a fedskew site to a training instruction.

    Args:
        content: The reply's records.
        expected: The form that the reply must have.

    Returns:
        The reply's values, finite and of the expected shapes.

    Raises:
        RefusedError: The reply differs from what was expected; the message says how.
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
    """Validate a model's arrays: all values must be finite, and all counters in range."""
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
        RefusedError: The counts are missing, of another length, negative, too large, or not finite.
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
    """Validate the number of samples that a site reports among other metrics."""
    samples = metrics.get(SAMPLES)
    if not isinstance(samples, int | float) or not 0 <= samples <= MOST or samples != int(samples):
        raise RefusedError(f"its number of samples is {short(samples)}; expected a whole number from 0 to {MOST}")
    return int(samples)


def check_only_samples(content: RecordDict, max_bytes: int = 2**24) -> int:
    """Validate the number of samples of a site that withholds its label counts.

    Args:
        content: The reply's records.
        max_bytes: Largest size of the reply, in bytes.

    Returns:
        The number of samples.

    Raises:
        RefusedError: The number is missing, negative, too large, or not whole.
    """
    check_size(content, max_bytes)
    return check_samples(only_metrics(content))


def check_confusion(content: RecordDict, classes: int, round: int) -> tuple[NDArray[np.int64], float]:
    """Validate a site's evaluation.

    Args:
        content: The reply's records.
        classes: Number of classes.
        round: The round whose model the site was asked to evaluate.

    Returns:
        The confusion matrix, shape `(classes, classes)`, with a row for each true class; and the mean loss.

    Raises:
        RefusedError: The matrix or the loss is missing or not valid, or the evaluation is of another round.
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
    """Return the only ArrayRecord of a stock Flower client's reply, whatever its key."""
    found = [record for record in content.values() if isinstance(record, ArrayRecord)]
    if len(found) != 1:
        raise RefusedError(f"the reply has {len(found)} ArrayRecords; expected one, the trained model's")
    return found[0]


def only_metrics(content: RecordDict) -> MetricRecord:
    """Return the only MetricRecord of a stock Flower client's reply, whatever its key."""
    found = [record for record in content.values() if isinstance(record, MetricRecord)]
    if len(found) != 1:
        raise RefusedError(f"the reply has {len(found)} MetricRecords; expected one")
    return found[0]


class Answers(NamedTuple):
    """The replies to a set of messages, by node id or by client index (see `by`).

    Attributes:
        contents: Records of each reply.
        failures: Error messages of nodes that replied with an error or that could not be sent the message.
        silent: Nodes that did not reply in time.
    """

    contents: dict[int, RecordDict]
    failures: dict[int, str]
    silent: tuple[int, ...] = ()

    def by(self, keys: Mapping[int, int]) -> Answers:
        """Replace each key, such as a node id, by another, such as a client index."""
        return Answers(
            {keys[key]: content for key, content in self.contents.items()},
            {keys[key]: reason for key, reason in self.failures.items()},
            tuple(keys[key] for key in self.silent),
        )


class RoundNotes(TypedDict):
    """Problems of a round, by site: the value of `deployment` in a line of `rounds.jsonl`.

    Attributes:
        refused: Reasons of the replies that were refused, by site.
        failed: Error messages of the sites that replied with an error, by site.
        offline: Sites of the cohort that were not connected.
        silent: Sites of the cohort that did not reply in time.
        out_of_line: Norm of the update divided by the cohort's median, by site, for updates above the limit.
    """

    refused: dict[str, str]
    failed: dict[str, str]
    offline: list[str]
    silent: list[str]
    out_of_line: dict[str, float]


def no_notes() -> RoundNotes:
    """Return the notes of a round without problems."""
    return {"refused": {}, "failed": {}, "offline": [], "silent": [], "out_of_line": {}}


@dataclass(frozen=True)
class ReplyRules:
    """Limits for replies.

    Attributes:
        norm_limit: See `Agreement`.
        norm_action: See `Agreement`.
        max_reply: See `Agreement`.
        batch_size: The clients' batch size, from which the largest possible number of steps follows.
        slack: Number of samples that a site may have beyond the number that it reported.
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
        returned: Shapes and dtypes of the arrays that the method's components return beside the model.
        idle: `returned` for a client that took no local step.
        rules: Limits for replies.
        notes: Problems of the current round.
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
        self._own_rows.clear()  # the buffer is free only once nothing refers to its rows
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
        """Return the form that the reply to an assignment must have."""
        batches = math.ceil((task.samples + self.rules.slack) / self.rules.batch_size)
        most = math.ceil(task.epochs * batches)
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
        """Validate the replies of a round, note problems, and return the updates to aggregate.

        Args:
            round: Number of the round.
            answers: Replies by client index.
            sent: The model that was sent to the clients.
            validate: A function of a reply's records and the client's index that validates the reply, or raises
                RefusedError.

        Returns:
            Updates in the order of arrival; with `norm_action` "leave_out", without updates above the norm limit.
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
    """Compute the size of a record's keys and values, in bytes."""
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
