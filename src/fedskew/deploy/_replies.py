"""Validation of replies: what differs from the agreement is refused, so that no reply can crash the server.

The `check_*` functions are pure, and raise only RefusedError, whatever a site sends. What can't be true is refused;
what is not plausible (`_plausible`) is out of line, and reported or left out as agreed. Neither is a defence against
sites that send plausible but wrong updates.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedskew.deploy._arrays import (
    COUNTER,
    HEADER,
    RUNNING_VARIANCE,
    AnyArray,
    Layout,
    NotFiniteError,
    RefusedError,
    Specs,
    decode,
    short,
)
from fedskew.deploy._direction import DIRECTION, contrary
from fedskew.deploy._evaluations import SiteEvaluation
from fedskew.deploy._log import LOG
from fedskew.deploy._messages import (
    ARRAYS,
    CELLS,
    CLIENT,
    CONFUSION,
    COUNTS,
    EVALUATION_LOSS,
    LOSS,
    METRICS,
    OUTCOMES,
    REFUSED,
    REPLY,
    ROUND,
    SAMPLES,
    STEPS,
    counted_in,
)
from fedskew.deploy._plausible import STEPS as TAKEN
from fedskew.deploy._plausible import (
    UPDATE,
    FloatArray,
    Measured,
    Sizes,
    excess,
    length,
    most_steps,
    no_sizes,
    returned,
    statistic,
    with_accepted,
)
from fedskew.engine import Assignment, LocalTraining, Sent, Update, UpdateBuffer
from fedskew.hooks import Hooks, Returned
from fedskew.models import ModelState

MOST = 10**12
"""Upper limit of a network's integer counters."""

MOST_SAMPLES = 10**9
"""Upper limit of a site's number of samples of a class, and of all classes together."""

MOST_COUNT_BYTES = 2**24
"""Largest size of a reply with label counts, in bytes."""

MOST_STEPS = 10**7
"""Upper limit of the local steps that a client may report to a server that does not know its batch size."""

LARGEST_BATCH = 4096
"""Largest batch of a client whose batch size the server does not know."""

PASSES = 4
"""Most times that a local step may show its batch to the network; no step of ours does so more than twice."""

ROUNDING = 1e-3
"""How far a loss may be below its least, by rounding."""


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
        least_steps: Smallest number of local steps that the site can have taken.
        counters: The integers of the sent model, by name: batch norm's counters may rise, others must stay as they
            are. Of integers without a name here only the range is checked.
        most_counted: The most by which a local step can raise a counter.
        least_loss: The lowest training loss that the objective can have, but for rounding.
    """

    client: int
    round: int
    arrays: Specs
    returned: Specs
    idle: Specs
    most_steps: int
    max_bytes: int
    least_steps: int = 0
    counters: Mapping[str, torch.Tensor] = {}
    most_counted: int = 1
    least_loss: float = 0.0


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
    steps, least, most = metrics.get(STEPS), expected.least_steps, expected.most_steps
    if not isinstance(steps, int) or not least <= steps <= most:
        numbers = str(most) if least == most else f"a whole number from {least} to {most}"
        raise RefusedError(f"its steps are {short(steps)}; expected {numbers}, by its samples, epochs and batch size")
    loss = _not_below(_finite(metrics.get(LOSS), "training loss"), expected.least_loss, "training loss")
    returned = expected.returned if steps else expected.idle
    known = {ARRAYS, METRICS, REPLY} if returned else {ARRAYS, METRICS}
    if set(content) != known:
        raise RefusedError(f"the reply has the records {short(sorted(content))}, not {sorted(known)}")
    extra = decode(_arrays(content, REPLY), returned, "its reply") if returned else {}
    arrays = check_arrays(_arrays(content, ARRAYS), expected.arrays, expected.counters, steps * expected.most_counted)
    return Reply(arrays, steps, loss, extra)


def check_arrays(
    record: ArrayRecord, expected: Specs, counters: Mapping[str, torch.Tensor], most_counted: int
) -> dict[str, AnyArray]:
    """Validate a model's arrays: values are finite, variances not negative, counters as far on as they can be.

    Integers that are no counters, such as position ids, must be what was sent: nothing of ours trains them.

    Args:
        record: The arrays as they were received.
        expected: Their shapes and dtypes.
        counters: Integers of the sent model, by name.
        most_counted: The most by which counters can have risen since.
    """
    arrays = decode(record, expected, "its array")
    for name, array in arrays.items():
        if not array.size or expected[name].is_float:
            if name.endswith(RUNNING_VARIANCE) and array.size and array.min() < 0:
                raise RefusedError(f"its array {name!r} has a variance below 0")
            continue
        if not 0 <= int(array.min()) <= int(array.max()) <= MOST:
            raise RefusedError(f"its array {name!r} has a counter below 0 or above {MOST}")
        if name in counters:
            change = array.reshape(-1).astype(np.int64) - counters[name].numpy()
            if not name.endswith(COUNTER) and change.any():
                raise RefusedError(
                    f"its array {name!r} is not what was sent; of integers only batch norm's {COUNTER} may change"
                )
            risen = int(change.max())
            if risen > most_counted:
                raise RefusedError(
                    f"its array {name!r} has a counter {risen} above what was sent; {most_counted} at most"
                )
    return arrays


def check_counts(content: RecordDict, classes: int, whole: bool) -> NDArray[np.float64]:
    """Validate the label counts that a site reports.

    Args:
        content: The reply's records.
        classes: Number of classes.
        whole: Whether the counts are exact, so that fractions are refused.

    Returns:
        Label counts, shape `(classes,)`.

    Raises:
        RefusedError: The counts are missing, of another length, negative, too large, or not finite.
    """
    check_size(content, MOST_COUNT_BYTES)
    values = only_metrics(content).get(COUNTS)
    if not isinstance(values, list) or len(values) != classes:
        raise RefusedError(f"its label counts are {short(values)}; expected {classes} numbers, one per class")
    for value in values:
        if not 0 <= value <= MOST_SAMPLES:
            raise RefusedError(f"one of its label counts is {short(value)}; expected a number from 0 to {MOST_SAMPLES}")
        if whole and value != int(value):
            raise RefusedError(f"one of its label counts is {short(value)}; expected a whole number")
    if sum(values) > MOST_SAMPLES:
        raise RefusedError(f"its label counts are {short(sum(values))} samples in all; expected {MOST_SAMPLES} at most")
    return np.array(values, dtype=np.float64)


def check_samples(metrics: MetricRecord) -> int:
    """Validate the number of samples that a site reports among other metrics."""
    samples = metrics.get(SAMPLES)
    if not isinstance(samples, int | float) or not 0 <= samples <= MOST_SAMPLES or samples != int(samples):
        raise RefusedError(
            f"its number of samples is {short(samples)}; expected a whole number from 0 to {MOST_SAMPLES}"
        )
    return int(samples)


def check_only_samples(content: RecordDict) -> int:
    """Validate the number of samples of a site that withholds its label counts.

    Args:
        content: The reply's records.

    Returns:
        The number of samples.

    Raises:
        RefusedError: The number is missing, negative, too large, or not whole.
    """
    check_size(content, MOST_COUNT_BYTES)
    return check_samples(only_metrics(content))


def check_confusion(content: RecordDict, classes: int, round: int) -> tuple[NDArray[np.int64], float]:
    """Validate a site's evaluation.

    Args:
        content: The reply's records.
        classes: Number of classes.
        round: The round whose model the site was asked to evaluate.

    Returns:
        The confusion matrix, shape `(classes, classes)`, with a row for each true class; and the mean loss, infinite if
        it is not finite, as that of a ruined model is.

    Raises:
        RefusedError: The matrix or the loss is missing or not valid, such as a loss below 0, or the evaluation is of
            another round.
    """
    metrics = _evaluation(content, 16 * classes * classes, round)
    numbers = _amounts(metrics.get(CONFUSION), (classes, classes), "confusion matrix")
    return numbers, _test_loss(metrics)


def check_outcomes(content: RecordDict, classes: int, bins: int, round: int) -> SiteEvaluation:
    """Validate a site's evaluation where its test samples by true class and outcome cell were asked for.

    A site that has no test samples, or for which the model's outputs are not finite, sends a confusion matrix.

    Args:
        content: The reply's records.
        classes: Number of classes.
        bins: Number of outcome cells of a predicted class.
        round: The round whose model the site was asked to evaluate.

    Returns:
        The evaluation.

    Raises:
        RefusedError: As `check_confusion` does.
    """
    metrics = _evaluation(content, 16 * classes * (classes + 1) * bins, round)
    if OUTCOMES not in metrics:
        numbers = _amounts(metrics.get(CONFUSION), (classes, classes), "confusion matrix")
        return SiteEvaluation(numbers, _test_loss(metrics))
    numbers = _amounts(metrics.get(OUTCOMES), (classes, classes * bins), "table of outcomes")
    return SiteEvaluation.of_outcomes(numbers, _test_loss(metrics))


def check_cells(content: RecordDict, classes: int, bins: int, round: int) -> NDArray[np.int64]:
    """Validate what the target site counted of its samples without labels.

    Args:
        content: The reply's records.
        classes: Number of classes.
        bins: Number of outcome cells of a predicted class.
        round: The round whose model the site was asked about.

    Returns:
        Samples by outcome cell, `(classes * bins,)`.

    Raises:
        RefusedError: The numbers are missing, negative or too many, or are of another round.
    """
    metrics = _evaluation(content, 16 * classes * (classes + 1) * bins, round)
    return _amounts(metrics.get(CELLS), (classes * bins,), "count of its samples by outcome")


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

    def only(self, keys: Collection[int]) -> Answers:
        """Return the answers of these keys alone."""
        return Answers(
            {key: content for key, content in self.contents.items() if key in keys},
            {key: reason for key, reason in self.failures.items() if key in keys},
            tuple(key for key in self.silent if key in keys),
        )


class RoundNotes(TypedDict):
    """Problems of a round, by site: the value of `deployment` in a line of `rounds.jsonl`.

    Attributes:
        refused: Reasons of the replies that were refused, by site.
        failed: Error messages of the sites that replied with an error, by site.
        offline: Sites of the cohort that were not connected.
        silent: Sites of the cohort that did not reply in time.
        skipped: Sites of the cohort that were not asked, as they did not answer before.
        left_out: Sites of the cohort that were not asked, as a round that they took part in was undone.
        out_of_line: How many times as long or as large an update is as is likely, by site, for updates above the limit.
        contrary: Mean agreement of the sites whose updates go against those of sites with their labels (`_direction`).
    """

    refused: dict[str, str]
    failed: dict[str, str]
    offline: list[str]
    silent: list[str]
    skipped: list[str]
    left_out: list[str]
    out_of_line: dict[str, float]
    contrary: dict[str, float]


WHY_MISSING = {
    "offline": "not connected",
    "silent": "no reply in time",
    "skipped": "not asked, as no reply came before",
    "left_out": "left out",
}
"""Why a site of the cohort sent no reply, in words."""


def no_notes() -> RoundNotes:
    """Return the notes of a round without problems."""
    return RoundNotes(
        refused={},
        failed={},
        offline=[],
        silent=[],
        skipped=[],
        left_out=[],
        out_of_line={},
        contrary={},
    )


@dataclass(frozen=True)
class ReplyRules:
    """Limits for replies.

    Attributes:
        norm_limit: See `Agreement`.
        norm_action: See `Agreement`.
        max_reply: See `Agreement`.
        training: The clients' settings of local training, from which the number of steps and what is plausible follow;
            None: the server doesn't know them.
        slack: Returns the number of samples by which a client may differ from the number that it reported.
        classes: Number of classes, as far as the server knows.
        least_loss: See `ExpectedReply`.
        counts: Returns the label counts that clients told, `(clients, classes)`; None: directions are not compared, as
            these are not exact.
    """

    norm_limit: float = 10.0
    norm_action: Literal["report", "leave_out"] = "leave_out"
    max_reply: int | None = None
    training: LocalTraining | None = None
    slack: Callable[[int], float] = lambda client: 0.0
    classes: int = 2
    least_loss: float = 0.0
    counts: Callable[[], FloatArray] | None = None


@dataclass
class ReplyValidator:
    """Turns a round's replies into updates, and notes what was refused, out of line, failed or missing.

    Attributes:
        names: Names of the clients, by index.
        layout: Layout of the model.
        returned: Shapes and dtypes of the arrays that the method's components return beside the model.
        idle: `returned` for a client that took no local step.
        rules: Limits for replies.
        hooks: The method's components that check what they were returned.
        notes: Problems of the current round.
        accepted: Sizes of accepted updates (see `_plausible`), and agreements of all (see `_direction`); part of the
            server's state between rounds.
        not_finite: Clients whose replies of the current round were refused for NaN or infinity.
    """

    names: Sequence[str]
    layout: Layout
    returned: Specs
    idle: Specs
    rules: ReplyRules
    hooks: Mapping[str, Hooks] = field(default_factory=dict)
    notes: RoundNotes = field(default_factory=no_notes)
    accepted: Sizes = field(default_factory=dict)
    not_finite: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._buffer = UpdateBuffer()
        self._own_rows: dict[int, torch.Tensor] = {}  # by client
        self._tasks: dict[int, Assignment] = {}
        self._sent: Sent
        self._counters: dict[str, torch.Tensor] = {}
        self._refusals: dict[int, str] = {}  # by client, until the client has been told

    def start(self, model: ModelState) -> dict[str, FloatArray]:
        """Return the sizes of accepted updates before the first round: none."""
        self.accepted = no_sizes(
            [UPDATE, TAKEN, DIRECTION, *self.layout.statistics(model), *self.returned], len(self.names)
        )
        return dict(self.accepted)

    def begin(self, cohort: Sequence[Assignment], sent: Sent) -> None:
        """Begin a round: clear the notes and prepare memory for the cohort's updates."""
        self.notes, self.not_finite = no_notes(), set()
        self._own_rows.clear()  # the buffer is free only once nothing refers to its rows
        self._tasks = {task.client: task for task in cohort}
        self._sent = sent
        self._counters = self.layout.counters(sent.model)
        rows = self._buffer.acquire(len(cohort), sent.model.parameters.numel())
        if rows is not None:
            self._own_rows.update(zip(self._tasks, rows, strict=True))

    def refuse(self, client: int, reason: str) -> None:
        """Remember to tell a client why its reply is not used."""
        self._refusals[client] = reason

    def refusal(self, client: int) -> dict[str, str]:
        """Return an entry for the next message to a client, with the reason of its last refusal, if it was refused."""
        return {REFUSED: self._refusals.pop(client)} if client in self._refusals else {}

    def missing(
        self, round: int, what: Literal["offline", "silent", "skipped", "left_out"], clients: Sequence[int]
    ) -> None:
        """Note clients of the cohort that sent no reply, and why."""
        self.notes[what] = [self.names[client] for client in clients]
        if clients:
            LOG.warning("round %d: %s: %s", round, WHY_MISSING[what], ", ".join(self.notes[what]))

    def expected(self, round: int, client: int) -> ExpectedReply:
        """Return the form that the reply of a client of the cohort must have."""
        task, training = self._tasks[client], self.rules.training
        least, most, counted = 0, MOST_STEPS, PASSES * LARGEST_BATCH
        if training is not None:
            known = task.samples if task.quota is None else int(sum(map(int, task.quota)))
            slack = self.rules.slack(client)
            fewest, largest = math.floor(max(0.0, known - slack)), math.ceil(known + slack)
            least, most = (training.steps(task.epochs, samples, task.steps) for samples in (fewest, largest))
            counted = PASSES * training.batch_size
        return ExpectedReply(
            client=task.client,
            round=round,
            arrays=self.layout.specs,
            returned=self.returned,
            idle=self.idle,
            most_steps=most,
            max_bytes=self.rules.max_reply or bytes_needed(self.layout.specs, self.returned),
            least_steps=least,
            counters=self._counters,
            most_counted=counted,
            least_loss=self.rules.least_loss,
        )

    def stock_arrays(self, record: ArrayRecord) -> dict[str, AnyArray]:
        """Validate the model of a stock client, which need not say how many steps it took."""
        return check_arrays(record, self.layout.specs, self._counters, MOST_STEPS)

    def updates(self, round: int, answers: Answers, validate: Callable[[RecordDict, int], Reply]) -> list[Update]:
        """Validate the replies of a round, note problems, and return the updates to aggregate.

        Args:
            round: Number of the round.
            answers: Replies by client index.
            validate: A function of a reply's records and the client's index that validates the reply, or raises
                RefusedError.

        Returns:
            Updates in the order of arrival; with `norm_action` "leave_out", without updates that are out of line.
        """
        for client, reason in answers.failures.items():
            self.notes["failed"][self.names[client]] = reason
            LOG.warning("round %d: %s failed: %s", round, self.names[client], reason)
        self.missing(round, "silent", answers.silent)
        updates, statistics = [], {}
        for client, content in answers.contents.items():
            try:
                reply = validate(content, client)
                trained = self.layout.to_state(reply.arrays, self._own_rows.get(client))
                statistics[client] = self.layout.statistics(trained)
                update = self._update(reply, client, round, trained)
                self._check_truth(update, round)
            except RefusedError as error:
                if isinstance(error, NotFiniteError):
                    self.not_finite.add(client)
                self.notes["refused"][self.names[client]] = str(error)
                self.refuse(client, f"round {round}: {error}")
                LOG.warning("round %d: refused the reply of %s: %s", round, self.names[client], error)
            else:
                updates.append(update)
        return self.in_line(round, updates, statistics)

    def _update(self, reply: Reply, client: int, round: int, trained: ModelState) -> Update:
        """Return a client's update; the vector of its trained model becomes the change."""
        change = trained.parameters.sub_(self._sent.model.parameters)
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

    def _check_truth(self, update: Update, round: int) -> None:
        """Raise RefusedError if the update can't be what the site says that it is."""
        training = self.rules.training
        if training is not None and not update.steps:
            layout, model = self.layout, self._sent.model
            sent = layout.to_state({name: array.numpy() for name, array in layout.to_record(model).items()})
            same = torch.equal(update.buffers, sent.buffers) and torch.equal(update.integers, sent.integers)
            if bool(update.norm) or not same:
                raise RefusedError("it took no step, and yet its model is not the one that was sent")
        seen = Returned(
            change=update.change,
            steps=update.steps,
            samples=self._tasks[update.client].samples,
            lr=None if training is None else training.lr_of(round),
            momentum=0.0 if training is None else training.momentum,
            broadcast=self._sent.broadcast,
        )
        for component in self.hooks.values():
            reason = component.refuse(update.reply, seen)
            if reason is not None:
                raise RefusedError(reason)

    def in_line(
        self, round: int, updates: list[Update], statistics: Mapping[int, Mapping[str, torch.Tensor]]
    ) -> list[Update]:
        """Note updates that are out of line or contrary; return those that the rules keep, as `updates` does.

        Args:
            round: Number of the round.
            updates: Valid updates.
            statistics: What `Layout.statistics` returns of each client's trained model.
        """
        most = most_steps({update.client: update.steps for update in updates if update.steps}, self.accepted)
        updates = [update._replace(steps=min(update.steps, most)) for update in updates]
        measured = {update.client: self._measured(update, statistics[update.client], round) for update in updates}
        worst = excess(measured, self.accepted)
        out = {client: found for client, found in worst.items() if not found[1] <= self.rules.norm_limit}
        for client, (what, ratio) in out.items():
            name = self.names[client]
            self.notes["out_of_line"][name] = min(ratio, 1e308)
            subject = f"the update of {name} is" if what == UPDATE else f"{what!r} of {name} is"
            self._leave_out(round, client, f"{subject} {ratio:.3g} times as large as is likely")
        if len(out) * 2 > len(updates):
            LOG.warning(
                "round %d: most updates are out of line; if nothing is wrong at these sites, raise norm_limit", round
            )
        fine = {
            update.client: measured[update.client] | {TAKEN: Measured(update.steps, math.inf, 0)}
            for update in updates
            if update.client not in out and UPDATE in measured[update.client]
        }
        self.accepted = with_accepted(self.accepted, fine)
        against = self._contrary(round, [update for update in updates if update.client not in out])
        leaves_out = self.rules.norm_action == "leave_out"
        return [update for update in updates if not leaves_out or update.client not in out.keys() | against]

    def _contrary(self, round: int, updates: Sequence[Update]) -> set[int]:
        """Note the clients whose updates go against those of clients with their labels."""
        if self.rules.counts is None:
            return set()
        told, mixes = self.rules.counts(), {}
        for update in updates:
            quota = self._tasks[update.client].quota
            mixes[update.client] = told[update.client] if quota is None else quota
        changes = {
            update.client: update.change
            for update in updates
            if float(update.norm) and math.isfinite(float(update.norm)) and mixes[update.client].any()
        }
        agreements, out = contrary(changes, mixes, self.accepted[DIRECTION])
        kept = {client: {DIRECTION: Measured(value, 0, 0)} for client, value in agreements.items()}
        self.accepted = with_accepted(self.accepted, kept)
        for client, mean in out.items():
            self.notes["contrary"][self.names[client]] = mean
            said = (
                f"the update of {self.names[client]} goes against those of sites with its labels (agreement {mean:.2f})"
            )
            self._leave_out(round, client, said)
        return set(out)

    def _leave_out(self, round: int, client: int, said: str) -> None:
        """Say what is wrong with an update, and to its client that it is left out, if it is."""
        if self.rules.norm_action == "leave_out":
            LOG.warning("round %d: %s; its update is left out", round, said)
            self.refuse(client, f"round {round}: {said}, and is left out")
        else:
            LOG.warning("round %d: %s", round, said)

    def _measured(self, update: Update, statistics: Mapping[str, torch.Tensor], round: int) -> dict[str, Measured]:
        """Measure an update; of one without a step, whose model is the one that was sent, only what came beside it."""
        rules, sent = self.rules, self._sent
        of_server = self.layout.statistics(sent.model)
        bounded = {name for component in self.hooks.values() for name in component.bounded_returns}
        beside = {
            name: returned(values, sent.broadcast.values(), rules.classes)
            for name, values in update.reply.items()
            if name not in bounded
        }
        if rules.training is not None and not update.steps:
            return beside
        norm, parameters = float(update.norm), sent.model.parameters
        return {
            UPDATE: length(norm, update.steps, parameters, rules.training, round, rules.classes),
            **{name: statistic(name, values, of_server[name]) for name, values in statistics.items()},
            **beside,
        }


def _finite(value: object, what: str) -> float:
    if not isinstance(value, int | float) or not -sys.float_info.max <= value <= sys.float_info.max:
        kind = NotFiniteError if isinstance(value, float) else RefusedError
        raise kind(f"its {what} is {short(value)}; expected a finite number")
    return float(value)


def _not_below(loss: float, least: float, what: str) -> float:
    if loss < least - ROUNDING:
        raise RefusedError(f"its {what} is {short(loss)}; expected a number from {least:g}")
    return loss


def _evaluation(content: RecordDict, most: int, round: int) -> MetricRecord:
    check_size(content, 2**20 + most)
    metrics = only_metrics(content)
    if metrics.get(ROUND) != round:
        raise RefusedError(f"the evaluation is of {ROUND} {short(metrics.get(ROUND))}, not {round}")
    return metrics


def _amounts(values: object, shape: tuple[int, ...], what: str) -> NDArray[np.int64]:
    if (
        not isinstance(values, list)
        or len(values) != math.prod(shape)
        or not all(isinstance(value, int) and 0 <= value <= MOST_SAMPLES for value in values)
    ):
        raise RefusedError(f"its {what} is {short(values)}; expected {' x '.join(map(str, shape))} whole numbers")
    return np.array(values, dtype=np.int64).reshape(shape)


def _test_loss(metrics: MetricRecord) -> float:
    """Read the mean loss of an evaluation; infinite if it is not finite."""
    loss = metrics.get(EVALUATION_LOSS)
    if isinstance(loss, float) and not math.isfinite(loss):
        return math.inf
    return _not_below(_finite(loss, "loss"), 0.0, "loss")


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
