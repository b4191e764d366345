"""The sites as a backend: where a cohort trains is somewhere else."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

import numpy as np
import torch
from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedskew.deploy._arrays import AnyArray, Form
from fedskew.deploy._check import CONFUSION, Expected, Reply, bytes_needed, check_confusion, check_reply
from fedskew.deploy._exchange import Answers, exchange
from fedskew.deploy._instruction import ARRAYS, CONFIG, ROUND, Task, instruction
from fedskew.deploy._layout import Layout
from fedskew.deploy._refusal import RefusedError
from fedskew.engine import Assignment, Backend, Sent, Update, UpdateBuffer
from fedskew.models import ModelState

LOG = logging.getLogger("flwr")
PAUSE = 2.0
COUNTED = "deployed.counted"
"""What the server keeps of a client: the last round that it counted (see `_site_state`)."""


class Notes(TypedDict):
    """What happened in a round beside training, by site: a line of `rounds.jsonl` has it under `deployment`.

    `refused`: replies that were not believed, and why; `failed`: sites that answered with an error; `offline`,
    `silent`: sites of the cohort that were not there, or said nothing in time; `out_of_line`: norms of updates over the
    cohort's median, where that is over the limit.
    """

    refused: dict[str, str]
    failed: dict[str, str]
    offline: list[str]
    silent: list[str]
    out_of_line: dict[str, float]


def no_notes() -> Notes:
    """Nothing happened."""
    return {"refused": {}, "failed": {}, "offline": [], "silent": [], "out_of_line": {}}


@dataclass(frozen=True)
class Rules:
    """How updates are judged: see `Agreement`. `slack`: samples that a site may have beyond those it told of."""

    norm_limit: float = 10.0
    norm_action: Literal["report", "leave_out"] = "report"
    max_reply: int | None = None
    batch_size: int = 1
    slack: float = 0.0


@dataclass
class ReplyValidator:
    """Turns replies into updates, or refuses them; the same for a server of ours and in a user's own.

    `names`: of the clients; `returned`, `idle`: what the method's components return beside the model.
    """

    names: Sequence[str]
    layout: Layout
    returned: Mapping[str, Form]
    idle: Mapping[str, Form]
    rules: Rules
    notes: Notes = field(default_factory=no_notes)

    def __post_init__(self) -> None:
        self._rows = UpdateBuffer()
        self._own_rows: dict[int, torch.Tensor] = {}  # by client

    def begin(self, cohort: Sequence[int], sent: ModelState) -> None:
        """A round of these clients begins: nothing is noted of it yet."""
        self.notes = no_notes()
        self._own_rows.clear()  # or their memory is not free to be used again
        rows = self._rows.acquire(len(cohort), sent.parameters.numel())
        if rows is not None:
            self._own_rows.update(zip(cohort, rows, strict=True))

    def refuse(self, client: int, round: int, reason: str) -> None:
        """Note that a reply is not believed, in one line of the log."""
        LOG.warning("round %d: refused the reply of %s: %s", round, self.names[client], reason)
        self.notes["refused"][self.names[client]] = reason

    def expected(self, round: int, task: Assignment) -> Expected:
        """What the reply to a task has to be."""
        batches = math.ceil((task.samples + self.rules.slack) / self.rules.batch_size)
        most = task.epochs * batches
        largest = self.rules.max_reply or bytes_needed(self.layout.forms, self.returned)
        return Expected(
            client=task.client,
            round=round,
            arrays=self.layout.forms,
            returned=self.returned,
            idle=self.idle,
            most_steps=most if task.steps is None else min(most, task.steps),
            max_bytes=largest,
        )

    def update(self, reply: Reply, client: int, round: int, sent: ModelState) -> Update:
        """The update that a believed reply is."""
        trained = self.layout.flat(reply.arrays, self._own_rows.get(client))
        change = trained.parameters.sub_(sent.parameters)
        return Update(
            client=client,
            change=change,
            norm=torch.linalg.vector_norm(change),
            buffers=trained.buffers,
            integers=trained.integers,
            steps=reply.steps,
            loss=reply.loss,
            reply={name: _tensor(array) for name, array in reply.returned.items()},
            state={COUNTED: torch.tensor([round], dtype=torch.int64)},
        )

    def in_line(self, round: int, updates: list[Update]) -> list[Update]:
        """The updates without those whose norm is out of line, where the rules leave these out."""
        norms = [float(update.norm) for update in updates]
        median = float(np.median(norms)) if norms else 0.0
        kept = []
        for update, norm in zip(updates, norms, strict=True):
            if norm <= self.rules.norm_limit * median:
                kept.append(update)
                continue
            name, ratio = self.names[update.client], norm / median if median else math.inf
            self.notes["out_of_line"][name] = min(ratio, 1e308)
            leaves = self.rules.norm_action == "leave_out"
            LOG.warning(
                "round %d: the update of %s is %.3g times as long as the cohort's median%s",
                round,
                name,
                ratio,
                "; it is left out" if leaves else "",
            )
            if not leaves:
                kept.append(update)
        return kept


@dataclass
class Sites(Backend):
    """Trains a cohort at its sites, which are nodes of a Flower federation.

    `online`: which client is which node now; `run`: the federation's own name for this run, in hex.
    """

    grid: Grid
    run: str
    online: Callable[[], Mapping[int, int]]
    validator: ReplyValidator
    timeout: float
    own_seconds: float = 0.0

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`; of those that answered in time with what was expected."""
        validator, names = self.validator, self.validator.names
        validator.begin([task.client for task in cohort], sent.model)
        online = self._there(round, [task.client for task in cohort])
        arrays = validator.layout.record(sent.model)
        tasks = {online[task.client]: task for task in cohort if task.client in online}
        validator.notes["offline"] = [names[task.client] for task in cohort if task.client not in online]
        questions = {
            node: instruction(Task.of(self.run, round, task, _counted(task)), arrays, sent.broadcast)
            for node, task in tasks.items()
        }
        answers = exchange(self.grid, questions, MessageType.TRAIN, self.timeout, str(round))
        began = time.perf_counter()
        self._note(round, answers, {node: names[task.client] for node, task in tasks.items()})
        updates = []
        for node, content in answers.contents.items():
            task = tasks[node]
            try:
                reply = check_reply(content, validator.expected(round, task))
            except RefusedError as error:
                validator.refuse(task.client, round, str(error))
            else:
                updates.append(validator.update(reply, task.client, round, sent.model))
        kept = validator.in_line(round, updates)
        self.own_seconds = time.perf_counter() - began
        return kept

    def _there(self, round: int, clients: Sequence[int]) -> Mapping[int, int]:
        """Who is there: at once where some of a cohort are, else when one of them comes, or the round's time is over.

        So rounds don't fly by while only others are there.
        """
        deadline, said = time.monotonic() + self.timeout, False
        while not (online := self.online()).keys() & set(clients) and time.monotonic() < deadline:
            if not said:
                LOG.warning("round %d: none of its %d sites is there; waiting", round, len(clients))
                said = True
            time.sleep(PAUSE)
        return online

    def evaluate(self, round: int, model: ModelState, classes: int) -> tuple[NDArray[np.int64], float, int] | None:
        """The summed confusion matrix of all sites that answer, `(classes, classes)`, rows truth; the mean loss of
        their samples; and how many sites these are. None where there is no sample.
        """
        online = self.online()
        names = {node: self.validator.names[client] for client, node in online.items()}
        content = RecordDict(
            {ARRAYS: self.validator.layout.record(model), CONFIG: ConfigRecord({ROUND: round, CONFUSION: 1})}
        )
        answers = exchange(
            self.grid, dict.fromkeys(online.values(), content), MessageType.EVALUATE, self.timeout, str(round)
        )
        total, loss, sites = np.zeros((classes, classes), dtype=np.int64), 0.0, 0
        for node, reply in answers.contents.items():
            try:
                confusion, mean = check_confusion(reply, classes, round)
            except RefusedError as error:
                LOG.warning("round %d: refused the evaluation of %s: %s", round, names[node], error)
                continue
            total += confusion
            loss += mean * float(confusion.sum())
            sites += 1
        for node, reason in answers.failures.items():
            LOG.warning("round %d: %s could not evaluate: %s", round, names[node], reason)
        samples = int(total.sum())
        return (total, loss / samples, sites) if samples else None

    def _note(self, round: int, answers: Answers, names: Mapping[int, str]) -> None:
        notes = self.validator.notes
        for node, reason in answers.failures.items():
            notes["failed"][names[node]] = reason
            LOG.warning("round %d: %s failed: %s", round, names[node], reason)
        notes["silent"] = [names[node] for node in answers.silent]
        for absent, what in ((notes["silent"], "said nothing in time"), (notes["offline"], "not there")):
            if absent:
                LOG.warning("round %d: %s: %s", round, what, ", ".join(absent))


def _counted(task: Assignment) -> int:
    return int(task.state[COUNTED]) if COUNTED in task.state else 0


def _tensor(array: AnyArray) -> torch.Tensor:
    return torch.from_numpy(array.copy())
