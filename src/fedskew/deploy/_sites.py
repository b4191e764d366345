"""The server's side of the connection: messages to nodes and their replies, and the sites as an engine backend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor

from fedskew.deploy._arrays import ArraySpec, RefusedError, Specs
from fedskew.deploy._evaluations import SiteEvaluation, Together, check_plausible, mix_distance
from fedskew.deploy._exchange import exchange
from fedskew.deploy._log import LOG
from fedskew.deploy._messages import (
    ANNOUNCED,
    ARRAYS,
    CELLS,
    CONFIG,
    CONFUSION,
    OUTCOMES,
    REPORTED,
    ROUND,
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
from fedskew.deploy._sum_checks import impossible
from fedskew.deploy._sum_messages import EVALUATE, LOSSES, TRAIN
from fedskew.deploy._sums import MaskedSums, Taken, Weigh
from fedskew.engine import Assignment, Backend, Sent, Update, whole_weight
from fedskew.models import ModelState
from fedskew.privacy import UpdateNoise
from fedskew.sums import COUNTS

PAUSE = 2.0
ROUNDING = 1e-6


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
    """The result of an evaluation at the sites.

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
        skipped: Clients that are not asked, unless too few others of the cohort are connected.
        asked: Clients that were asked for something in this round.
        silent: Those of them that did not answer in time.
        lengths: Norms of the updates of the last cohort, by client.
        losses: The training losses of the last cohort, by client; infinite for a reply that was refused as it was not
            finite.
        knows_labels: Whether the sites report label counts, and not only their numbers of samples.
        masked: Takes masked sums, where the server is to see no site's update; None: it sees each.
        announced: What was announced to all sites, where each computes its own weight; it travels beside each model.
        noise: The noise of the sites' updates; None: they have none.
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
    masked: MaskedSums | None = None
    announced: Mapping[str, Tensor] = field(default_factory=dict)
    noise: UpdateNoise | None = None
    own_seconds: float = 0.0
    _doubted: set[int] = field(default_factory=set)

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """Train a cohort at its sites; return the updates of sites that sent a valid reply in time."""
        validator = self.validator
        validator.begin(cohort, sent)
        tasks, online = self._asked(round, cohort)
        if not tasks:
            return []
        arrays = validator.layout.to_record(sent.model)
        contents = {
            online[client]: self._instruction(round, task, arrays, sent)
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

    def train_in_sums(
        self, round: int, cohort: Sequence[Assignment], sent: Sent, weigh: Weigh | None, specs: Specs
    ) -> Taken:
        """Train a cohort at its sites, and open the sum of what they add.

        Args:
            round: Number of the round.
            cohort: Who is asked.
            sent: What is sent to them.
            weigh: Weighs those who are there; None: each weighs itself.
            specs: Shapes and dtypes of what they add.
        """
        assert self.masked is not None, "as the federation has a form"
        validator = self.validator
        validator.begin((), sent)
        tasks, online = self._asked(round, cohort)
        arrays = validator.layout.to_record(sent.model)
        contents = {
            client: self._instruction(round, task, arrays, sent) for client, task in tasks.items() if client in online
        }
        nodes = {client: online[client] for client in contents}
        taken = self.masked.take(TRAIN, round, nodes, contents, specs, weigh)
        self._heard(taken.answers)
        if taken.total is not None and (reason := self._impossible(taken, tasks, sent)):
            taken.total, taken.weights, taken.reason = None, {}, f"the sum is refused: {reason}"
        for client, reason in taken.refused.items():
            validator.notes["refused"][validator.names[client]] = reason
            validator.refuse(client, f"round {round}: {reason}")
        validator.notes["failed"].update({validator.names[client]: reason for client, reason in taken.failed.items()})
        validator.missing(round, "silent", sorted(taken.silent))
        self.lengths, self.losses = dict.fromkeys(taken.weights, 0.0), {}
        return taken

    def _impossible(self, taken: Taken, tasks: Mapping[int, Assignment], sent: Sent) -> str:
        """Say why no honest sites' answers can have the sum that was opened; empty: they can."""
        assert taken.total is not None, "by the caller"
        rules = self.validator.rules
        assert rules.training is not None, "the server of a config knows it"
        least = most = 0
        for client in taken.weights:
            task, slack = tasks[client], rules.slack(client)
            least += rules.training.steps(task.epochs, math.floor(max(0.0, task.samples - slack)), task.steps)
            most += rules.training.steps(task.epochs, math.ceil(task.samples + slack), task.steps)
        whole = whole_weight(taken.total, sum(taken.weights.values()))
        if not 0 < whole <= 1 + ROUNDING:
            return f"the sum of the sites' weights is {whole:.4g}"
        layout, of = self.validator.layout, len(taken.weights)
        return impossible(taken.total, whole, of, sent.model, layout, (least, most), rules.least_loss, self.noise)

    def _instruction(self, round: int, task: Assignment, arrays: ArrayRecord, sent: Sent) -> RecordDict:
        client = task.client
        entries = {REPORTED: self.reported(client)} | self.validator.refusal(client)
        beside = {**sent.broadcast, **{ANNOUNCED + name: values for name, values in self.announced.items()}}
        return TrainInstruction.of(self.run, round, task).content(arrays, beside, entries)

    def _asked(self, round: int, cohort: Sequence[Assignment]) -> tuple[dict[int, Assignment], Mapping[int, int]]:
        """Return who of a cohort is asked in a round, and the nodes that are connected; note the others."""
        validator = self.validator
        tasks = {task.client: task for task in cohort}
        out = [client for client in tasks if client in self.left_out]
        skipped = [client for client in tasks if client in self.skipped and client not in out]
        needed = 1 if self.masked is None else self.masked.least
        if len(self.online().keys() & tasks.keys() - {*out, *skipped}) < needed:
            skipped = []
        validator.missing(round, "left_out", out)
        validator.missing(round, "skipped", skipped)
        tasks = {client: task for client, task in tasks.items() if client not in {*out, *skipped}}
        self.lengths, self.losses = {}, {}
        if not tasks:
            return {}, {}
        online = self._wait_for_some(round, list(tasks))
        validator.missing(round, "offline", [client for client in tasks if client not in online])
        return tasks, online

    def _heard(self, answers: Answers) -> None:
        """Record which clients were asked, and which did not answer."""
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

    def evaluate_in_sums(self, round: int, model: ModelState, classes: int) -> tuple[Together | None, dict[int, str]]:
        """Evaluate a model on the test samples of all connected sites, and open the sum of their confusion matrices.

        Args:
            round: Number of the round.
            model: The model.
            classes: Number of classes.

        Returns:
            What the sum tells, None where there is none; and why sites are not in it, by client index.
        """
        assert self.masked is not None, "as sites are asked for sums"
        unasked = self.left_out | self.skipped - self.asked | self.silent
        nodes = {client: node for client, node in self.online().items() if client not in unasked}
        arrays = self.validator.layout.to_record(model)
        asked = {ROUND: round, CONFUSION: 1}
        contents = {client: RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord(dict(asked))}) for client in nodes}
        specs = {"counts": ArraySpec((classes * classes,), "int64"), "losses": ArraySpec((1,), "int64")}
        taken = self.masked.take(EVALUATE, round, nodes, contents, specs)
        self._heard(taken.answers)
        missing = dict.fromkeys(taken.silent, "no reply in time") | taken.failed
        missing |= {client: f"refused: {reason}" for client, reason in taken.refused.items()}
        for client, reason in missing.items():
            LOG.warning("round %d: no evaluation by %s: %s", round, self.validator.names[client], reason)
        if taken.total is None:
            LOG.warning("round %d: not evaluated: %s", round, taken.reason)
            return None, missing
        confusion = np.rint(COUNTS.decode(taken.total["counts"])).astype(np.int64).reshape(classes, classes)
        if confusion.min() < 0 or not confusion.any():
            LOG.warning("round %d: not evaluated: the sum of the sites' confusion matrices can't be one", round)
            return None, missing
        return Together(
            confusion, float(LOSSES.decode(taken.total["losses"])[0]) / float(confusion.sum()), None
        ), missing

    def _asked_of(self, client: int, round: int, clients: int, target: TargetSite | None) -> ConfigRecord:
        """Ask a member about a model: for its evaluation if it trains, for cells if it is the target site."""
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
