"""A round's replies, turned into updates; what was refused, out of line or missing is noted."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from fedskew.deploy import _plausible as plausible
from fedskew.deploy import _wire as wire
from fedskew.deploy._arrays import AnyArray, FloatArray, ModelLayout, NotFiniteError, RefusedError, Specs, decode, short
from fedskew.deploy._ask import SILENT, Replies
from fedskew.deploy._log import LOG
from fedskew.deploy._replies import arrays_of, bytes_needed, check_arrays, check_loss, check_size, figures_of
from fedskew.engine import Assignment, LocalTraining, Sent, Update
from fedskew.hooks import Hooks, Returned
from fedskew.models import ModelState

MOST_STEPS = 10**7
"""Upper limit of the local steps that a client may report to a server that does not know its batch size."""

LARGEST_BATCH = 4096
"""Largest batch of a client whose batch size the server does not know."""

PASSES = 4
"""Most times that a local step may show its batch to the network; no step of ours does so more than twice."""


RoundNotes = dict[str, Any]
"""Problems of a round, by site: the value of `deployment` in a line of `rounds.jsonl`.

Reasons of replies that were `refused` and that `failed`; sites of the cohort that were `offline`, `silent`, `skipped`
(as they did not answer before) or `left_out` (as a round that they took part in was undone); how many times as large as
is likely an update is, if it is `out_of_line`; the mean agreement of `contrary` sites.
"""

WHY_MISSING = {
    "offline": "not connected",
    "silent": SILENT,
    "skipped": "not asked, as no reply came before",
    "left_out": "left out",
}
"""Why a site of the cohort sent no reply, in words."""


def no_notes() -> RoundNotes:
    """Return the notes of a round without problems."""
    by_name, names = ("refused", "failed", "out_of_line", "contrary"), [*WHY_MISSING]
    return {**{what: {} for what in by_name}, **{what: [] for what in names}}


@dataclass
class ReplyValidator:
    """Turns a round's replies into updates, and notes what was refused, out of line, failed or missing. For
    `norm_limit`, `norm_action` and `max_reply` see `Agreement`. The components (`hooks`) check what they were
    `returned` beside the model, `idle` by a client without a step; `refuse` tells a client, by its index, why its reply
    is not used. The server knows clients' settings of `training` (None: it doesn't), by how many samples one may differ
    from its report (`slack`), the lowest training loss that there can be, and label counts, `(clients, classes)` (None:
    directions are not compared, as these are not exact). `accepted` are sizes of accepted updates, and agreements of
    all (see `_plausible`), and `not_finite` who sent NaN or infinity in this round."""

    names: Sequence[str]
    layout: ModelLayout
    returned: Specs
    idle: Specs
    hooks: Mapping[str, Hooks] = field(default_factory=dict)
    refuse: Callable[[int, str], None] = lambda client, reason: None
    norm_limit: float = 10.0
    norm_action: Literal["report", "leave_out"] = "leave_out"
    max_reply: int | None = None
    training: LocalTraining | None = None
    slack: Callable[[int], float] = lambda client: 0.0
    classes: int = 2
    least_loss: float = 0.0
    counts: Callable[[], FloatArray] | None = None
    notes: RoundNotes = field(default_factory=no_notes, init=False)
    accepted: plausible.Sizes = field(default_factory=dict, init=False)
    not_finite: set[int] = field(default_factory=set, init=False)
    _own_rows: dict[int, Tensor] = field(default_factory=dict, init=False)  # by client
    _tasks: dict[int, Assignment] = field(default_factory=dict, init=False)
    _counters: dict[str, Tensor] = field(default_factory=dict, init=False)
    _sent: Sent = field(init=False)

    def start(self, model: ModelState) -> dict[str, FloatArray]:
        """Return the sizes of accepted updates before the first round: none."""
        names = [plausible.UPDATE, plausible.STEPS, plausible.DIRECTION, *self.layout.statistics(model), *self.returned]
        self.accepted = {name: np.full((len(self.names), plausible.KEPT), np.nan) for name in names}
        return dict(self.accepted)

    def begin(self, cohort: Sequence[Assignment], sent: Sent) -> None:
        """Begin a round: clear the notes and prepare memory for the cohort's updates."""
        self.notes, self.not_finite = no_notes(), set()
        self._tasks = {task.client: task for task in cohort}
        self._sent = sent
        self._counters = self.layout.counters(sent.model)
        self._own_rows = dict(zip(self._tasks, torch.empty(len(cohort), sent.model.parameters.numel()), strict=True))

    def missing(self, round: int, what: str, clients: Sequence[int]) -> None:
        """Note clients of the cohort that sent no reply, and why: a key of `WHY_MISSING`."""
        self.notes[what] = [self.names[client] for client in clients]
        if clients:
            LOG.warning("round %d: %s: %s", round, WHY_MISSING[what], ", ".join(self.notes[what]))

    def note(self, replies: Replies[Any]) -> None:
        """Note why replies of a round are not used."""
        self.notes["silent"] = [self.names[client] for client in sorted(replies.silent)]
        self.notes["failed"] |= {self.names[client]: reason for client, reason in replies.failed.items()}
        self.notes["refused"] |= {self.names[client]: reason for client, reason in replies.refused.items()}

    def read(self, content: RecordDict, client: int, round: int) -> Update:
        """Read the reply of a fedskew site; raise RefusedError where it can't be used."""
        try:
            return self._read(content, client, round)
        except NotFiniteError:
            self.not_finite.add(client)
            raise

    def trained(
        self,
        client: int,
        round: int,
        record: ArrayRecord,
        steps: int,
        loss: float,
        returned: Mapping[str, AnyArray] | None = None,
        most_counted: int = MOST_STEPS,
    ) -> Update:
        """Return a client's update; its trained vector becomes the change. RefusedError where it can't be true."""
        arrays = check_arrays(record, self.layout.specs, self._counters, most_counted)
        trained = self.layout.to_state(arrays, self._own_rows.get(client))
        change = trained.parameters.sub_(self._sent.model.parameters)
        update = Update(
            client=client,
            change=change,
            norm=torch.linalg.vector_norm(change),
            buffers=trained.buffers,
            integers=trained.integers,
            steps=steps,
            loss=loss,
            reply={name: torch.from_numpy(array.copy()) for name, array in (returned or {}).items()},
            state=wire.counted_in(round),
        )
        self._check_truth(update, round)
        return update

    def steps_of(self, task: Assignment) -> tuple[int, int]:
        """Return the fewest and the most local steps that a task can take, by the samples that its client reported."""
        if self.training is None:
            return 0, MOST_STEPS
        known = task.samples if task.quota is None else int(sum(map(int, task.quota)))
        slack = self.slack(task.client)
        fewest, largest = math.floor(max(0.0, known - slack)), math.ceil(known + slack)
        least, most = (self.training.steps(task.epochs, samples, task.steps) for samples in (fewest, largest))
        return least, most

    def _read(self, content: RecordDict, client: int, round: int) -> Update:
        check_size(content, self.max_reply or bytes_needed(self.layout.specs, self.returned))
        figures = figures_of(content, client=client, round=round)
        steps, (least, most) = figures.get(wire.STEPS), self.steps_of(self._tasks[client])
        if not isinstance(steps, int) or not least <= steps <= most:
            numbers = str(most) if least == most else f"a whole number from {least} to {most}"
            raise RefusedError(
                f"its steps are {short(steps)}; expected {numbers}, by its samples, epochs and batch size"
            )
        loss = check_loss(figures.get(wire.LOSS), "training loss", self.least_loss)
        expected = self.returned if steps else self.idle
        known = {wire.ARRAYS, wire.METRICS, wire.REPLY} if expected else {wire.ARRAYS, wire.METRICS}
        if set(content) != known:
            raise RefusedError(f"the reply has the records {short(sorted(content))}, not {sorted(known)}")
        returned = decode(arrays_of(content, wire.REPLY), expected, "its reply") if expected else {}
        counted = steps * PASSES * (LARGEST_BATCH if self.training is None else self.training.batch_size)
        return self.trained(client, round, arrays_of(content, wire.ARRAYS), steps, loss, returned, counted)

    def _check_truth(self, update: Update, round: int) -> None:
        training = self.training
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
            if (reason := component.refuse(update.reply, seen)) is not None:
                raise RefusedError(reason)

    def updates(self, round: int, replies: Replies[Update]) -> list[Update]:
        """Note problems of a round's replies; return the updates that the rules keep, in the order of arrival."""
        self.note(replies)
        steps = {client: update.steps for client, update in replies.valid.items() if update.steps}
        most = plausible.most_steps(steps, self.accepted)
        updates = [update._replace(steps=min(update.steps, most)) for update in replies.valid.values()]
        measured = {update.client: self._measured(update, round) for update in updates}
        worst = plausible.excess(measured, self.accepted)
        out = {client: found for client, found in worst.items() if not found[1] <= self.norm_limit}
        for client, (what, ratio) in out.items():
            name = self.names[client]
            self.notes["out_of_line"][name] = min(ratio, 1e308)
            subject = f"the update of {name} is" if what == plausible.UPDATE else f"{what!r} of {name} is"
            self._leave_out(round, client, f"{subject} {ratio:.3g} times as large as is likely")
        if len(out) * 2 > len(updates):
            LOG.warning(
                "round %d: most updates are out of line; if nothing is wrong at these sites, raise norm_limit", round
            )
        fine = {
            update.client: measured[update.client] | {plausible.STEPS: plausible.Measured(update.steps, math.inf, 0)}
            for update in updates
            if update.client not in out and plausible.UPDATE in measured[update.client]
        }
        self.accepted = plausible.with_accepted(self.accepted, fine)
        against = self._contrary(round, [update for update in updates if update.client not in out])
        leaves_out = self.norm_action == "leave_out"
        return [update for update in updates if not leaves_out or update.client not in out.keys() | against]

    def _contrary(self, round: int, updates: Sequence[Update]) -> set[int]:
        if self.counts is None:
            return set()
        told, mixes = self.counts(), {}
        for update in updates:
            quota = self._tasks[update.client].quota
            mixes[update.client] = told[update.client] if quota is None else quota
        changes = {
            update.client: update.change
            for update in updates
            if float(update.norm) and math.isfinite(float(update.norm)) and mixes[update.client].any()
        }
        agreements, out = plausible.contrary(changes, mixes, self.accepted[plausible.DIRECTION])
        kept = {client: {plausible.DIRECTION: plausible.Measured(value, 0, 0)} for client, value in agreements.items()}
        self.accepted = plausible.with_accepted(self.accepted, kept)
        for client, mean in out.items():
            name = self.names[client]
            self.notes["contrary"][name] = mean
            said = f"the update of {name} goes against those of sites with its labels (agreement {mean:.2f})"
            self._leave_out(round, client, said)
        return set(out)

    def _leave_out(self, round: int, client: int, said: str) -> None:
        """Say what is wrong with an update, and to its client that it is left out, if it is."""
        if self.norm_action == "leave_out":
            LOG.warning("round %d: %s; its update is left out", round, said)
            self.refuse(client, f"round {round}: {said}, and is left out")
        else:
            LOG.warning("round %d: %s", round, said)

    def _measured(self, update: Update, round: int) -> dict[str, plausible.Measured]:
        """Measure an update; of one without a step, whose model is the one that was sent, only what came beside it."""
        sent = self._sent
        of_server = self.layout.statistics(sent.model)
        bounded = {name for component in self.hooks.values() for name in component.bounded_returns}
        beside = {
            name: plausible.returned(values, sent.broadcast.values(), self.classes)
            for name, values in update.reply.items()
            if name not in bounded
        }
        if self.training is not None and not update.steps:
            return beside
        norm, parameters = float(update.norm), sent.model.parameters
        statistics = self.layout.statistics(sent.model._replace(buffers=update.buffers))
        return {
            plausible.UPDATE: plausible.length(norm, update.steps, parameters, self.training, round, self.classes),
            **{name: plausible.statistic(name, values, of_server[name]) for name, values in statistics.items()},
            **beside,
        }
