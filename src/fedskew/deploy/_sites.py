"""The server's side of the connection: messages to nodes and their replies, and the sites as an engine backend."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx
import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedskew import __version__
from fedskew.deploy._arrays import RefusedError
from fedskew.deploy._evaluations import SiteEvaluation, check_plausible, mix_distance
from fedskew.deploy._log import LOG
from fedskew.deploy._messages import (
    ARRAYS,
    CELLS,
    CONFIG,
    CONFUSION,
    OUTCOMES,
    REPORTED,
    ROUND,
    VERSION,
    TrainInstruction,
)
from fedskew.deploy._replies import (
    Answers,
    Reply,
    ReplyValidator,
    check_cells,
    check_confusion,
    check_outcomes,
    check_reply,
)
from fedskew.engine import Assignment, Backend, Sent, Update
from fedskew.models import ModelState

PAUSE = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
LEEWAY = 60.0
"""Seconds for which a message stays valid after its timeout; Flower answers an expired one with an error."""


def exchange(
    grid: Grid, questions: Mapping[int, RecordDict], message_type: str, timeout: float, group: str = ""
) -> Answers:
    """Send a message to each of several nodes, and wait until all have replied or the timeout has passed.

    A reply is attributed to the node that the message with the reply's message id was sent to. Flower's SuperLink
    accepts a reply only from that node, whereas the sender named inside a message could be forged. Each reply is pulled
    by a thread of its own: one that Flower can't decode does not affect others, and one that a node announces and then
    does not send, for which Flower waits minutes, is left to its thread at the deadline. Messages expire some time
    after the timeout, and later replies are never used.

    Args:
        grid: Flower's grid.
        questions: Content of each message, by node id.
        message_type: Flower's message type, such as "train".
        timeout: Seconds to wait.
        group: Flower's group id of the messages.

    Returns:
        The replies, by node id.
    """
    for content in questions.values():
        config = content.get(CONFIG)
        if isinstance(config, ConfigRecord):
            config[VERSION] = __version__
    messages = [
        Message(content, node, message_type, ttl=timeout + LEEWAY, group_id=group)
        for node, content in questions.items()
    ]
    pushed = list(grid.push_messages(messages)) if messages else []
    pending = dict(zip(pushed, questions, strict=True)) if len(pushed) == len(messages) else {}
    failures = {node: "the SuperLink did not take its message" for node in questions if node not in pending.values()}
    failures |= {node: "the SuperLink did not take its message" for sent, node in pending.items() if not sent}
    pending = {sent: node for sent, node in pending.items() if sent}
    contents: dict[int, RecordDict] = {}
    deadline, over = time.monotonic() + timeout, threading.Event()
    found: queue.SimpleQueue[tuple[str, Message | Exception]] = queue.SimpleQueue()
    for sent in pending:
        threading.Thread(target=_pull, args=(grid, sent, found, over), daemon=True).start()
    try:
        while pending:
            sent, reply = found.get(timeout=max(0.0, deadline - time.monotonic()))
            node = pending.pop(sent)
            if isinstance(reply, httpx.HTTPError):
                raise reply  # the SuperLink has ended, and with it this run
            if isinstance(reply, Exception):
                failures[node] = f"Flower can't decode its reply ({type(reply).__name__})"
            elif reply.has_content():
                contents[node] = reply.content
            else:
                failures[node] = error_line(reply)
    except queue.Empty:
        pass
    finally:
        over.set()
    return Answers(contents, failures, tuple(pending.values()))


def _pull(
    grid: Grid, sent: str, found: queue.SimpleQueue[tuple[str, Message | Exception]], over: threading.Event
) -> None:
    """Pull the reply to a message until it is there, or the exchange is over."""
    pause = FIRST_PAUSE
    while not over.is_set():
        try:
            pulled = list(grid.pull_messages([sent]))
        except Exception as error:  # the sender chose these bytes, and they can raise anything
            return found.put((sent, error))
        if pulled:
            return found.put((sent, pulled[0]))
        over.wait(pause)
        pause = min(pause * 1.3, LONGEST_PAUSE)
    return None


def error_line(message: Message) -> str:
    """Return the reason that an error reply gives, in one line."""
    line = " ".join((message.error.reason or "no reason given").split())
    return line if len(line) <= 200 else f"{line[:197]}..."


class TargetSite(NamedTuple):
    """The site whose samples without labels the target's mix is estimated from.

    Attributes:
        name: Its name.
        place: Its client index; one more than the last, if it does not train.
        bins: Number of outcome cells of a predicted class.
    """

    name: str
    place: int
    bins: int


class Evaluations(NamedTuple):
    """What came of an evaluation at the sites.

    Attributes:
        valid: The valid evaluations, by client index.
        missing: Why there is none, by client index.
        cells: The target site's samples by outcome cell, `(classes * bins,)`; None: not asked for, or none came.
        no_cells: Why none came.
    """

    valid: dict[int, SiteEvaluation]
    missing: dict[int, str]
    cells: NDArray[np.int64] | None = None
    no_cells: str = ""


@dataclass
class Sites(Backend):
    """Trains a cohort at its sites, which are nodes of a Flower federation.

    Attributes:
        grid: Flower's grid.
        run: Identifier of the federation's run, in hex digits.
        online: Returns the node id of every connected site, by client index.
        validator: Validates replies and notes a round's problems.
        timeout: Seconds to wait for the replies of a round, and of an evaluation.
        reported: Returns the hash of the label counts that the server has of a site, by client index (see
            `fingerprint`).
        connected: Returns the same of every member, by its place among these (see `Roster`).
        target: The target site, where the target's mix is estimated.
        left_out: Clients that are not asked for anything.
        skipped: Clients that are not asked, unless nobody else of the cohort is there.
        asked: Clients that were asked for something in this round.
        silent: Those of them that did not answer in time.
        lengths: Norms of the updates of the last cohort, by client.
        losses: The training losses of the last cohort, by client; infinite for a reply that was refused as it was not
            finite.
        knows_labels: Whether the sites report label counts, and not only their numbers of samples.
        own_seconds: Seconds that the server itself computed in the last round, without waiting for sites.
    """

    grid: Grid
    run: str
    online: Callable[[], Mapping[int, int]]
    validator: ReplyValidator
    timeout: float
    reported: Callable[[int], str]
    connected: Callable[[], Mapping[int, int]]
    target: TargetSite | None = None
    left_out: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    asked: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    lengths: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    knows_labels: bool = True
    own_seconds: float = 0.0
    _doubted: set[int] = field(default_factory=set)

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """Train a cohort at its sites; return the updates of sites that sent a valid reply in time."""
        validator = self.validator
        tasks = {task.client: task for task in cohort}
        validator.begin(cohort, sent)
        out = [client for client in tasks if client in self.left_out]
        skipped = [client for client in tasks if client in self.skipped and client not in out]
        if len(out) + len(skipped) == len(tasks):
            skipped = []
        validator.missing(round, "left_out", out)
        validator.missing(round, "skipped", skipped)
        tasks = {client: task for client, task in tasks.items() if client not in {*out, *skipped}}
        self.lengths, self.losses = {}, {}
        if not tasks:
            return []
        online = self._wait_for_some(round, list(tasks))
        validator.missing(round, "offline", [client for client in tasks if client not in online])
        arrays = validator.layout.to_record(sent.model)
        contents = {
            online[client]: TrainInstruction.of(self.run, round, task).content(
                arrays, sent.broadcast, {REPORTED: self.reported(client)} | validator.refusal(client)
            )
            for client, task in tasks.items()
            if client in online
        }
        answers = exchange(self.grid, contents, MessageType.TRAIN, self.timeout, str(round))
        began = time.perf_counter()

        def validate(content: RecordDict, client: int) -> Reply:
            return check_reply(content, validator.expected(round, client))

        clients = {node: client for client, node in online.items()}
        updates = validator.updates(round, answers.by(clients), validate)
        self._heard(answers.by(clients))
        self.lengths = {update.client: float(update.norm) for update in updates}
        self.losses = {update.client: update.loss for update in updates} | dict.fromkeys(validator.not_finite, math.inf)
        self.own_seconds = time.perf_counter() - began
        return updates

    def _heard(self, answers: Answers) -> None:
        """Take down which clients were asked, and which did not answer."""
        self.asked.update(answers.contents, answers.failures, answers.silent)
        self.silent.update(answers.silent)

    def _wait_for_some(self, round: int, clients: Sequence[int]) -> Mapping[int, int]:
        """Wait until a site of the cohort is connected, or for `timeout` seconds; return the connected sites.

        Without waiting, rounds without participants would follow one another until a site of a cohort connects.
        """
        deadline, said = time.monotonic() + self.timeout, False
        while not (online := self.online()).keys() & set(clients) and time.monotonic() < deadline:
            if not said:
                LOG.warning("round %d: none of its %d sites is connected; waiting", round, len(clients))
                said = True
            time.sleep(PAUSE)
        return online

    def evaluate(
        self, round: int, model: ModelState, counts: NDArray[np.float64], estimates: bool = False
    ) -> Evaluations:
        """Evaluate a model on the test samples of all connected sites that answered in this round.

        Args:
            round: Number of the round.
            model: The model.
            counts: Label counts that the sites reported, `(sites, classes)`.
            estimates: Whether the target's mix is estimated from the answers; then sites send tables of outcomes, and
                the target site its cells.
        """
        unasked = self.left_out | self.skipped - self.asked | self.silent
        target = self.target if estimates else None
        online = self.online() if target is None else self.connected()
        nodes = {node: client for client, node in online.items() if client not in unasked}
        arrays = self.validator.layout.to_record(model)
        questions = {
            node: RecordDict({ARRAYS: arrays, CONFIG: self._asked_of(client, round, len(counts), target)})
            for node, client in nodes.items()
        }
        answers = exchange(self.grid, questions, MessageType.EVALUATE, self.timeout, str(round)).by(nodes)
        self._heard(answers)
        cells, no_cells = None, ""
        if target is not None:
            cells, no_cells = self._cells(answers, target, round, counts.shape[1], unasked)
            answers = answers.only(range(len(counts)))
        found: dict[int, SiteEvaluation] = {}
        missing = dict.fromkeys(answers.silent, "no reply in time") | answers.failures
        for client, reply in answers.contents.items():
            try:
                if target is None:
                    evaluation = SiteEvaluation(*check_confusion(reply, counts.shape[1], round))
                else:
                    evaluation = check_outcomes(reply, counts.shape[1], target.bins, round)
                check_plausible(evaluation, float(counts[client].sum()) + self.validator.rules.slack(client))
            except RefusedError as error:
                missing[client] = f"refused: {error}"
                self.validator.refuse(client, f"evaluation of round {round}: {error}")
            else:
                found[client] = evaluation
                self._compare_mixes(client, evaluation, counts[client])
        for client, reason in missing.items():
            LOG.warning("round %d: no evaluation by %s: %s", round, self.validator.names[client], reason)
        return Evaluations(found, missing, cells, no_cells)

    def _asked_of(self, client: int, round: int, clients: int, target: TargetSite | None) -> ConfigRecord:
        """What a member is asked about a model: for its evaluation if it trains, for cells if it is the target site."""
        asked: dict[str, int | str] = {ROUND: round}
        if client < clients:
            asked |= {CONFUSION: 1} if target is None else {OUTCOMES: target.bins}
        else:
            asked |= self.validator.refusal(client)
        if target is not None and client == target.place:
            asked[CELLS] = target.bins
        return ConfigRecord(dict(asked))

    def _cells(
        self, answers: Answers, target: TargetSite, round: int, classes: int, unasked: frozenset[int]
    ) -> tuple[NDArray[np.int64] | None, str]:
        """Return the target site's cells; or why there are none."""
        if target.place in answers.contents:
            try:
                return check_cells(answers.contents[target.place], classes, target.bins, round), ""
            except RefusedError as error:
                self.validator.refuse(target.place, f"evaluation of round {round}: {error}")
                reason = f"its answer is refused: {error}"
        elif target.place in answers.failures:
            reason = answers.failures[target.place]
        elif target.place in answers.silent:
            reason = "no reply in time"
        elif target.place in self.left_out:
            reason = "left out, as a round that it took part in was undone"
        else:
            reason = "not asked, as no reply came before" if target.place in unasked else "not connected"
        return None, f"{target.name}: {reason}"

    def _compare_mixes(self, client: int, evaluation: SiteEvaluation, counts: NDArray[np.float64]) -> None:
        """Say once of a site that its test samples have another label mix than it reported."""
        distance = mix_distance(evaluation, counts) if self.knows_labels and client not in self._doubted else None
        if distance is not None:
            self._doubted.add(client)
            LOG.warning(
                "%s: %.0f %% of its test samples would need other labels to have the label mix that it reported for "
                "training; ask whether its test set is another one, as its reported counts may be made up",
                self.validator.names[client],
                100 * distance,
            )
