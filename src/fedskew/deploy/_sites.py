"""The sites as an engine's backend: what they are asked in a round, and for an evaluation of its model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from torch import Tensor

from fedskew.deploy import _replies
from fedskew.deploy import _wire as wire
from fedskew.deploy._arrays import COUNTER, VARIANCE, ArraySpec, FloatArray, IntArray
from fedskew.deploy._ask import Members
from fedskew.deploy._log import LOG
from fedskew.deploy._plan import LEEWAY, Plan
from fedskew.deploy._roster import Roster
from fedskew.deploy._sums import MaskedSums, Taken, Weigh
from fedskew.deploy._validator import ReplyValidator
from fedskew.engine import Assignment, Backend, ClientStates, Sent, Update
from fedskew.engine.sums import decode_sums, whole_weight
from fedskew.models import ModelState
from fedskew.sums.fixed_point import COUNTS, NUMBERS, UPDATES

ROUNDING = 1e-6
DEVIATIONS = 9
"""Noise of so many standard deviations is in no coordinate of any model: once in 10^18 draws."""


class Evaluations(NamedTuple):
    """The valid evaluations at the sites, and why others are missing, by client index; the target site's samples by
    outcome cell, `(classes * bins,)`, or why there are none."""

    valid: dict[int, _replies.SiteEvaluation]
    missing: dict[int, str]
    cells: IntArray | str = ""


@dataclass
class Sites(Backend):
    """Trains a cohort at its sites, which are nodes of a Flower federation. Without `masked` the server sees each
    update. Who is `left_out` is asked nothing, and who is `skipped` only where too few others of a cohort are
    connected. What was `announced` to sites that compute their own weights travels beside each model. Of the last
    cohort there are norms of updates (`lengths`) and training `losses`, infinite for a reply that was refused as it was
    not finite."""

    plan: Plan
    roster: Roster
    validator: ReplyValidator
    masked: MaskedSums | None
    announced: Mapping[str, FloatArray] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    lengths: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    _doubted: set[int] = field(default_factory=set)

    @property
    def members(self) -> Members:
        """The sites' nodes."""
        return self.roster.members

    def begin(self, accepted: Mapping[str, FloatArray], left_out: frozenset[int], skipped: frozenset[int]) -> None:
        """Begin a round: who is not asked, and which sizes of updates were accepted before."""
        self.validator.accepted, self.left_out, self.skipped = accepted, left_out, skipped
        self.members.begin()

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """Train a cohort at its sites; return the updates of sites that sent a valid reply in time."""
        validator = self.validator
        validator.begin(cohort, sent)
        contents = self._instructions(round, cohort, sent)
        replies = self.members.ask(
            MessageType.TRAIN, contents, lambda reply, client: validator.read(reply, client, round), f"round {round}"
        )
        updates = validator.updates(round, replies)
        self.lengths = {update.client: float(update.norm) for update in updates}
        self.losses = {update.client: update.loss for update in updates} | dict.fromkeys(validator.not_finite, math.inf)
        return updates

    def train_in_sums(self, round: int, cohort: Sequence[Assignment], sent: Sent, weigh: Weigh | None) -> Taken:
        """Train a cohort, and open the sum of what they add; without `weigh` each weighs itself."""
        assert self.masked is not None, "as the federation has a form"
        self.validator.begin((), sent)
        contents = self._instructions(round, cohort, sent)
        taken = self.masked.take(wire.TRAIN, round, contents, self.plan.sums, weigh)
        if taken.total is not None and (reason := self._impossible(taken, cohort, sent)):
            taken.total, taken.weights, taken.reason = None, {}, f"the sum is refused: {reason}"
        self.validator.note(taken.replies)
        self.lengths, self.losses = dict.fromkeys(taken.weights, 0.0), {}
        return taken

    def _impossible(self, taken: Taken, cohort: Sequence[Assignment], sent: Sent) -> str:
        """Say why no honest sites' answers can have the sum that was opened; empty: they can."""
        assert taken.total is not None, "by the caller"
        layout, members = self.validator.layout, len(taken.weights)
        ranges = [self.validator.steps_of(task) for task in cohort if task.client in taken.weights]
        fewest_steps, most_steps = (sum(steps) for steps in zip(*ranges, strict=True))
        weight = whole_weight(taken.total, sum(taken.weights.values()))
        if not 0 < weight <= 1 + ROUNDING:
            return f"the sum of the sites' weights is {weight:.4g}"
        opened = decode_sums(taken.total, weight, members, members, sent.model)
        largest = float(opened.change.abs().max()) if opened.change.numel() else 0.0
        clip, around = UPDATES.limit, UPDATES.error(members, weight)
        if self.plan.protection is not None:
            noise = self.plan.protection.noise
            shares = math.sqrt(members / (noise.answers or members))
            deviation = shares * noise.deviation(opened.change.numel()) * 2.0**-UPDATES.fraction / weight
            clip, around = noise.clip, around + DEVIATIONS * deviation
        if largest > clip + around:
            return f"the mean update reaches {largest:.4g}, and each was clipped to {clip:g}"
        rounding, most = NUMBERS.error(members, weight), NUMBERS.limit * (1 + 2**-20)
        extras = [(name, value, -most) for name, value in opened.extras.items()]
        for what, value, least in (("loss", opened.loss, self.validator.least_loss), *extras):
            if value is not None and not least - rounding <= value <= most:
                return f"the mean {what} is {value:.4g}"
        if opened.steps is not None and not fewest_steps <= opened.steps <= most_steps:
            return f"there are {opened.steps} local steps in all; expected {fewest_steps} to {most_steps}"
        found = sent.model._replace(buffers=opened.buffers, integers=opened.integers)
        for name, values in layout.statistics(found).items():
            if values.numel() and float(values.abs().max()) > most:
                return f"the mean of {name} reaches {float(values.abs().max()):.4g}"
            if name.endswith(VARIANCE) and values.numel() and float(values.min()) < -rounding:
                return f"the mean of {name}, a variance, is below 0"
        before = layout.counters(sent.model)
        for name, values in layout.counters(found).items():
            if name.endswith(COUNTER) and bool((values < before[name]).any()):
                return f"the counter {name} fell"
            if not name.endswith(COUNTER) and not torch.equal(values, before[name]):
                return f"the integers of {name} are not what was sent"
        return ""

    def _instructions(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> dict[int, RecordDict]:
        """Return the message to each client of a cohort that is asked in a round; note the others."""
        validator, online = self.validator, self.members.online()
        cohort_ids = [task.client for task in cohort]
        out = [client for client in cohort_ids if client in self.left_out]
        skipped = [client for client in cohort_ids if client in self.skipped and client not in out]
        if len(online.keys() & {*cohort_ids} - {*out, *skipped}) < (1 if self.masked is None else self.masked.least):
            skipped = []
        validator.missing(round, "left_out", out)
        validator.missing(round, "skipped", skipped)
        self.lengths, self.losses = {}, {}
        tasks = [task for task in cohort if task.client not in {*out, *skipped}]
        asked = {task.client for task in tasks}
        # Without waiting, rounds without participants would follow one another until a site of a cohort connects.
        warning = f"round {round}: none of its {len(asked)} sites is connected; waiting"
        online = self.members.wait(lambda online: not asked or online.keys() & asked, self.members.timeout, warning)
        validator.missing(round, "offline", [task.client for task in tasks if task.client not in online])
        arrays = validator.layout.to_record(sent.model)
        announced = {wire.ANNOUNCED + name: torch.from_numpy(values) for name, values in self.announced.items()}
        beside = {**sent.broadcast, **announced}
        return {
            task.client: wire.TrainInstruction.of(self.roster.run, round, task).content(
                arrays, beside, {wire.REPORTED: self.roster.reported(task.client)}
            )
            for task in tasks
            if task.client in online
        }

    def evaluate(self, round: int, model: ModelState, estimates: bool = False) -> Evaluations:
        """Evaluate a model on the test samples of all connected sites that answered in this round. Where the target's
        mix is estimated, sites send tables of outcomes, and the target site its cells."""
        counts, estimation = self.roster.counts, self.plan.estimation if estimates else None
        (sites, classes), tally, sizes = counts.shape, self.plan.agreement.tally, self.roster.sizes
        place, bins = (-1, 0) if estimation is None else (self.plan.target_place, estimation.bins)
        online = self.members.online() if estimation is None else self.members.connected()
        table, contents = {wire.OUTCOMES: bins} if bins else {wire.CONFUSION: 1}, {}
        arrays = self.validator.layout.to_record(model)
        for client in sorted(online.keys() - self._unasked()):
            asked = (table if client < sites else {}) | ({wire.CELLS: bins} if client == place else {})
            contents[client] = _question(round, arrays, asked)

        def read(reply: RecordDict, client: int) -> tuple[_replies.SiteEvaluation | None, IntArray | None]:
            cells = _replies.check_cells(reply, classes, bins, round) if client == place else None
            if client >= sites:
                return None, cells
            evaluation = _replies.check_outcomes(reply, tally, bins, round)
            _replies.check_plausible(evaluation, float(sizes[client]) + self.validator.slack(client))
            return evaluation, cells

        replies = self.members.ask(MessageType.EVALUATE, contents, read, f"evaluation of round {round}")
        valid = {client: one for client, (one, _) in replies.valid.items() if one is not None}
        for client, one in valid.items():
            self._compare_mixes(client, one, counts[client])
        missing = {client: reason for client, reason in replies.missing.items() if client < sites}
        _, found = replies.valid.get(place, (None, None))
        if found is not None:
            return Evaluations(valid, missing, found)
        reason = replies.missing.get(place, "not connected")
        if place in self.left_out:
            reason = "left out, as a round that it took part in was undone"
        elif place in self._unasked() and place not in replies.missing:
            reason = "not asked, as no reply came before"
        return Evaluations(valid, missing, f"{self.plan.agreement.target_site}: {reason}")

    def evaluate_in_sums(self, round: int, model: ModelState) -> tuple[_replies.Together | None, dict[int, str]]:
        """Open the sum of the sites' confusion matrices; return what it tells, if anything, and who is missing."""
        assert self.masked is not None, "as sites are asked for sums"
        tally = self.plan.agreement.tally
        arrays, asked = self.validator.layout.to_record(model), self.members.online().keys() - self._unasked()
        contents = {client: _question(round, arrays, {wire.CONFUSION: 1}) for client in sorted(asked)}
        specs = {"counts": ArraySpec((tally.size,), "int64"), "losses": ArraySpec((1,), "int64")}
        taken = self.masked.take(wire.EVALUATE, round, contents, specs)
        missing = taken.replies.missing
        if taken.total is None:
            LOG.warning("round %d: not evaluated: %s", round, taken.reason)
            return None, missing
        counts = np.rint(COUNTS.decode(taken.total["counts"])).astype(np.int64)
        if tally.refuse(counts) is not None or tally.samples(counts) < 1:
            LOG.warning("round %d: not evaluated: the sum of the sites' confusion matrices can't be one", round)
            return None, missing
        loss = float(wire.LOSSES.decode(taken.total["losses"])[0]) / tally.samples(counts)
        return _replies.Together(tally, counts, loss, None), missing

    def leave(
        self, round: int, model: ModelState, told: Mapping[str, Tensor], clients: ClientStates
    ) -> dict[int, RecordDict]:
        """Leave the trained model, and what is told of it, at all connected sites that answered last; return that."""
        arrays, contents = self.validator.layout.to_record(model), {}
        for client in sorted(self.members.online().keys() - self._unasked()):
            task = Assignment(client, self.plan.config.training.most_epochs, clients.get(client) or {})
            contents[client] = wire.TrainInstruction.of(self.roster.run, round, task).content(arrays, told)

        def read(reply: RecordDict, client: int) -> None:
            _replies.check_size(reply, LEEWAY)

        self.members.ask(f"query.{wire.KEEP}", contents, read, "the trained model", in_round=False)
        return contents

    def figures_in_sums(self, round: int, left: Mapping[int, RecordDict]) -> dict[str, Any]:
        """Open the sum of what the sites' models are worth to them, once; say what it tells, and who is in it. All are
        asked with the model that was `left` at them, or masks don't cancel. `models[name][figure]` has `mean` and
        `better`: at how many sites it is better than the model alone."""
        assert self.masked is not None, "checked with the agreement"
        models = self.plan.site_models
        names = self.plan.agreement.summed_figures
        specs = {wire.FIGURES: ArraySpec((2, len(models), len(names)), "int64")}
        taken = self.masked.take(wire.SITES, round, left, specs)
        if taken.total is None:
            return {"reason": taken.reason}
        values, better = wire.FIGURES_FORM.decode(taken.total[wire.FIGURES]) / len(taken.weights)
        shares = np.append(values[:, : names.index("loss")], values / wire.FIGURES_FORM.limit)
        if min(values.min(), better.min()) < -ROUNDING or max(shares.max(), better.max()) > 1 + ROUNDING:
            return {"reason": "no honest sites' figures have this sum"}
        better = np.rint(better * len(taken.weights)).astype(int)
        return {
            "sites": [self.members.names[client] for client in sorted(taken.weights)],
            "models": {
                model: {
                    figure: {"mean": values[row, column], "better": int(better[row, column])}
                    for column, figure in enumerate(names)
                }
                for row, model in enumerate(models)
            },
        }

    def _unasked(self) -> frozenset[int]:
        return self.left_out | self.skipped - self.members.asked | self.members.silent

    def _compare_mixes(self, client: int, evaluation: _replies.SiteEvaluation, counts: FloatArray) -> None:
        """Say once of a site that its test samples have another label mix than it reported."""
        agreement = self.plan.agreement
        knows_labels = agreement.label_counts not in ("withheld", "summed") and not agreement.multi_label
        distance = _replies.mix_distance(evaluation, counts) if knows_labels and client not in self._doubted else None
        if distance is not None:
            self._doubted.add(client)
            said = (
                f"{distance:.0%} of its test samples would need other labels to have the label mix that it reported "
                "for training; ask whether its test set is another one, as its reported counts may be made up"
            )
            LOG.warning("%s: %s", self.validator.names[client], said)


def _question(round: int, arrays: ArrayRecord, asked: Mapping[str, int]) -> RecordDict:
    return RecordDict({wire.ARRAYS: arrays, wire.CONFIG: ConfigRecord({wire.ROUND: round, **asked})})
