"""Rounds at real sites: who takes part, what their evaluations say, and the undoing of a round that ruins the model."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedskew.deploy import _wire as wire
from fedskew.deploy._log import LOG, utc_now
from fedskew.deploy._plausible import Sizes
from fedskew.deploy._replies import Together, in_words, tables_of, together
from fedskew.deploy._sites import Evaluations, Sites
from fedskew.deploy._validator import no_notes
from fedskew.deploy._watch import Decisions, Watch, remedy, ruined, to_leave_out
from fedskew.engine import Assignment, Cohort, Evaluation, RoundRecord, RoundRunner, Sent, ServerState, Update
from fedskew.engine.round import Federation
from fedskew.engine.sums import FixedPoint
from fedskew.engine.target import EstimatedMix
from fedskew.engine.totals import Collected, Weights
from fedskew.errors import DivergedError, EndedEarlyError, StandstillError
from fedskew.models import ModelState
from fedskew.report import SiteActivity

STILL = 2
"""Rounds in a row that may leave the model as it was before the run is stopped."""


@dataclass(frozen=True, kw_only=True)
class SiteSums(FixedPoint):
    """Masked updates of real sites: weights come first, and the server opens the sum."""

    sites: Sites

    def collect(
        self, federation: Federation, state: ServerState, cohort: Cohort, sent: Sent, tasks: Sequence[Assignment]
    ) -> tuple[Collected, list[Update]]:
        """See `Floats.collect`; no update comes by itself."""
        own = self.announced is not None  # each site weighs itself, and the server sees the sum of the weights

        def weights_of(clients: Collection[int]) -> tuple[Cohort, Weights]:
            members = cohort.only(clients)
            return members, Weights() if own else self.weigh(federation, state, members)

        def weigh(clients: Sequence[int]) -> list[float]:
            members, weights = weights_of(clients)
            by_client = dict(zip(members.ids.tolist(), weights.values.tolist(), strict=False))
            return [by_client.get(client, 0.0) for client in clients]

        taken = self.sites.train_in_sums(state.round, tasks, sent, None if own else weigh)
        members, weights = weights_of(taken.weights)
        if not taken.weights:
            weights = weights._replace(fallback=weights_of(taken.members or cohort.ids.tolist())[1].fallback)
        closed = taken.reason if taken.total is None else None
        collected = self.opened(state.model, members, weights, taken.total or {}, closed)
        states = dict.fromkeys(members.ids.tolist(), wire.counted_in(state.round))
        return collected._replace(states=states, charged=taken.opened), []


class DeployedRunner(RoundRunner):
    """Plays rounds at real sites, evaluates their models there, and undoes a round that ruins the model. A round begins
    once a site is connected; who connects late is queried for its label counts, and then joins."""

    def __init__(self, federation: Federation, sites: Sites, folder: Path) -> None:
        self._federation, self.sites, self._folder = federation, sites, folder
        self._agreement, self._roster = sites.plan.agreement, sites.roster
        self._rounds = sites.plan.config.training.rounds
        self._estimation = federation.aim
        self._evaluations: Evaluations | None = None
        self._summed: tuple[ModelState, Together] | None = None
        self._scores: dict[str, Any] | None = None  # of the last evaluation: bins, and how far off its AUROC may be
        self._still: list[RoundRecord] = []  # the last rounds, if they moved nothing, since this server was started
        self._began = utc_now()

    def open(self) -> None:
        """See `RoundRunner.open`."""
        self._federation.open()

    def close(self) -> None:
        """See `RoundRunner.close`."""
        self._federation.close()

    def start(self, model: ModelState) -> ServerState:
        """See `RoundRunner.start`: with the sizes of accepted updates (see `_plausible`), and the watch's own."""
        state = _accepting(self._federation.start(model), self.sites.validator.start(model))
        return Watch.start(state, len(self.sites.members.names))

    def run_round(self, state: ServerState) -> tuple[ServerState, RoundRecord]:
        """See `RoundRunner.run_round`."""
        seconds, warning = self._agreement.idle_timeout, f"no site is connected; waiting after round {state.round}"
        if not self.sites.members.wait(bool, seconds, f"{warning} until one is"):
            raise EndedEarlyError(
                f"no site was connected for {seconds:.0f} s; the run ends after round {state.round}, and goes on from "
                "there when it is started again"
            )
        self._began = utc_now()
        watch, agreement, validator = Watch.of(state), self._agreement, self.sites.validator
        decisions = Decisions.read(self._folder)
        for client in sorted(watch.out()):
            if decisions.readmits(self._roster.names[client], int(watch.left_out[client])):
                LOG.info("%s takes part again", self._roster.names[client])
                watch.left_out[client] = 0
        state, failed = watch.within(state), validator.notes["failed"]
        accepted = {name: part.numpy() for name, part in state.of("accepted").items()}
        self.sites.begin(accepted, watch.out(), watch.skipped(state.round + 1))
        for name, reason in failed.items():
            if reason == wire.CHANGED:
                self._roster.ask_again(name)
        timeout = min(agreement.start_timeout, agreement.round_timeout)
        if self._roster.query_newcomers(timeout, self.sites.left_out | self.sites.skipped):
            sizes = self._roster.sizes if agreement.multi_label else None
            self._federation = dataclasses.replace(self._federation, counts=self._roster.counts, sizes=sizes)
        following, record = self._federation.run_round(state)
        record.deployment = dict(validator.notes)
        log_aggregation(record, self._roster.names, self._federation.weight_limit)
        if agreement.label_counts in ("withheld", "summed"):  # spread evenly over classes, so skew is unknown
            record.entropy = record.kl = record.target_distance = None
        return self._judged_by_training(state, _accepting(following, validator.accepted), record), record

    def evaluated_model(self, state: ServerState) -> ModelState:
        """See `RoundRunner.evaluated_model`."""
        return self._federation.evaluated_model(state)

    def evaluate(self, round: int, model: ModelState) -> tuple[Evaluation | None, None]:
        """Evaluate a model at the sites (see `Evaluator`)."""
        if not self._agreement.evaluates:
            return None, None
        if self.sites.masked:
            summed = self._ask_in_sums(round, model)
        elif (summed := together(self._ask(round, model).valid)) is None:
            LOG.warning("round %d: no site evaluated the model", round)
        elif summed.reduced is not None:
            client, factor = summed.reduced
            said = f"has more test samples than all other sites; they count {factor:.3g} times in the accuracy of all"
            LOG.warning("round %d: %s %s", round, self._roster.names[client], said)
        if summed is None:
            return None, None
        if (tally := summed.tally).scores:
            error = tally.auroc_error(summed.counts)
            self._scores = {"bins": tally.BINS, "auroc_error": None if math.isnan(error) else error}
        return Evaluation.of_tally(summed.tally, summed.counts, summed.loss, self._federation.target), None

    def review(self, state: ServerState, record: RoundRecord) -> ServerState:
        """Judge a round's model by the sites' evaluations, and complete the round's record (see `Watch.review`)."""
        notes = record.deployment = record.deployment if record.deployment is not None else no_notes()
        is_due = self._estimation is not None and self._estimation.is_due(record.round)
        if self._evaluations is None and is_due:
            self._ask(record.round, self.evaluated_model(state))
        evaluations = self._evaluations or Evaluations({}, {})
        summed = together(evaluations.valid)
        reduced = None if summed is None else summed.reduced
        losses = {client: one.loss for client, one in evaluations.valid.items() if one.samples}
        judged = bool(losses) and "undone" not in notes
        reason = self._ruined(losses, Watch.of(state)) if judged else None
        if reason is not None:
            state = self._undone(state, record, reason)
        if is_due:
            state = self._estimated(state, record, evaluations, reduced)
        if judged and reason is None:
            state = Watch.of(state).with_good(state, state, losses)
        watch, members = Watch.of(state), self.sites.members
        watch.answered(record.round, members.asked, members.silent)
        names = members.names
        notes["evaluations"] = {names[client]: one.to_dict() for client, one in evaluations.valid.items()}
        notes["unevaluated"] = {names[client]: reason for client, reason in evaluations.missing.items()}
        if self._roster.unreported:
            notes["unreported"] = dict(self._roster.unreported)
        if reduced is not None:
            notes["reduced"] = {names[reduced[0]]: reduced[1]}
        notes["quarantine"] = {names[client]: int(watch.left_out[client]) for client in sorted(watch.out())}
        notes["began"], notes["ended"] = self._began, utc_now()
        if self._scores is not None:
            notes["scores"] = self._scores
        self._evaluations = self._scores = None
        self._still = [*self._still, record] if SiteActivity.why_still(record) is not None else []
        return watch.within(state)

    def check(self, state: ServerState) -> None:
        """Stop a run whose model was ruined too often, that stands still, or whose target fits no mix."""
        watch, mix = Watch.of(state), EstimatedMix.of(state)
        if self._estimation is not None and mix is not None:
            self._estimation.check(mix)
        if state.round >= self._rounds and not (watch.counted.any() or watch.since.any()):
            raise StandstillError(
                f"no update of any site has moved the model up to round {state.round}; fedskew deploy status "
                f"{self._folder} says why"
            )
        if len(self._still) >= STILL and state.round < self._rounds:
            first, last = self._still[-STILL], self._still[-1]
            raise StandstillError(
                f"rounds {first.round} and {last.round} left the model as it was: {SiteActivity.why_still(last)}. "
                f"To do: {remedy(last.deployment or {}, self._folder)}; then start the run again, and it goes on after "
                f"round {last.round}"
            )
        undone = Decisions.read(self._folder).counting(watch.undone)
        if len(undone) >= self._agreement.undone_limit:
            raise DivergedError(
                f"the model was ruined in rounds {', '.join(map(str, undone))}, and is again that of round "
                f"{watch.good}; left out: {self._named(watch.out())}. Look at these sites, then: "
                f"fedskew deploy readmit {self._folder} NAME (or --nobody), and start again"
            )

    def _named(self, clients: Collection[int]) -> str:
        return ", ".join(self._roster.names[client] for client in sorted(clients)) or "nobody"

    def _ask(self, round: int, model: ModelState) -> Evaluations:
        is_due = self._estimation is not None and self._estimation.is_due(round)
        self._evaluations = self.sites.evaluate(round, model, is_due)
        return self._evaluations

    def _ask_in_sums(self, round: int, model: ModelState) -> Together | None:
        """Have a model evaluated at the sites, which tell the sum of their tables only, and once of each model."""
        if self._summed is not None and all(map(torch.equal, self._summed[0], model)):
            LOG.info("round %d: the model is still the one that was evaluated last", round)
            return self._summed[1]
        summed, missing = self.sites.evaluate_in_sums(round, model)
        self._evaluations = Evaluations({}, missing)
        if summed is not None:
            self._summed = model, summed
        return summed

    def _estimated(
        self, state: ServerState, record: RoundRecord, evaluations: Evaluations, reduced: tuple[int, float] | None
    ) -> ServerState:
        estimation, mix, target = self._estimation, EstimatedMix.of(state), self._agreement.target_site
        assert estimation is not None, "by the caller"
        assert mix is not None, "as the federation starts"
        assert target is not None, "checked with the config"
        tables = tables_of(evaluations.valid, reduced)
        if record.deployment is not None and "undone" in record.deployment:
            mix, note = estimation.skip(mix, "the round is undone")
        elif isinstance(evaluations.cells, str):
            mix, note = estimation.skip(mix, evaluations.cells)
        elif not tables:
            mix, note = estimation.skip(mix, "no site told what the model makes of its test samples")
        else:
            mix, note = estimation.update(mix, record.round, tables.items, evaluations.cells)
        record.target = note
        level = LOG.warning if note["unused"] or note["mix"] is None or note["misfit"] else LOG.info
        level("round %d: %s", record.round, in_words(note, tuple(self._agreement.classes), target))
        return mix.within(state)

    def _judged_by_training(self, before: ServerState, state: ServerState, record: RoundRecord) -> ServerState:
        """Take a round into account that is not evaluated yet. Where sites don't evaluate, their training losses judge
        the model that the round began with: it is undone only if two sites and half of the cohort reported a loss, and
        good only if fewer than half of those say that it is ruined."""
        watch, losses = Watch.of(state), self.sites.losses
        if record.diverged and not record.answered:
            return self._undone(state, record, "the next model would not be finite", record.diverged)
        if not self._agreement.evaluates and losses:
            reason = self._ruined(losses, watch, evaluated=False)
            if reason is not None and 2 * len(losses) >= len(set(record.cohort) - watch.out()):
                return self._undone(state, record, reason)
            if reason is None and self._ruined(losses, watch) is None:
                state = watch.with_good(state, before, losses)
        watch.count(record.round, {client: self.sites.lengths[client] for client in record.answered})
        return watch.within(state)

    def _ruined(self, losses: Mapping[int, float], watch: Watch, evaluated: bool = True) -> str | None:
        chance = math.log(2 if self._agreement.multi_label else max(len(self._agreement.classes), 2))
        return ruined(losses, watch.best, self._agreement.loss_limit, chance, evaluated)

    def _undone(
        self, state: ServerState, record: RoundRecord, reason: str, suspects: Collection[int] | None = None
    ) -> ServerState:
        """Go back to the last good state, and leave out suspects, by default who took part since then."""
        watch, names = Watch.of(state), self._roster.names
        since, lengths = np.flatnonzero(watch.since).tolist(), watch.lengths.copy()
        for client, length in self.sites.lengths.items():
            lengths[client] = max(lengths[client], length)
        active = set(np.flatnonzero(self._roster.sizes).tolist()) - watch.out()
        out = to_leave_out(since if suspects is None else suspects, active, lengths)
        for client in since:
            self._federation.clients.put(client, state.round, wire.counted_in(int(watch.counted[client])))
        then = f"the model is again that of round {watch.good}. Left out until readmitted: {self._named(out)}"
        LOG.error("round %d is undone: %s; %s", state.round, reason, then)
        assert record.deployment is not None, "made by run_round"
        left_out = [names[client] for client in out]
        record.deployment["undone"] = {"reason": reason, "back_to": int(watch.good), "left_out": left_out}
        return watch.with_undone(state, out)


def _accepting(state: ServerState, sizes: Sizes) -> ServerState:
    return state.having("accepted", {name: torch.from_numpy(size) for name, size in sizes.items()})


def log_aggregation(record: RoundRecord, names: Sequence[str], limit: float | None) -> None:
    """Log whom the weight limit holds back in a round, and why the model stayed as it was."""
    if record.limited and limit is not None:
        held = ", ".join(names[client] for client in record.limited)
        LOG.warning("round %d: the weight limit (%g) binds: %s", record.round, limit, held)
    if record.unmoved is not None:
        LOG.warning("round %d: the model stays as it was: %s", record.round, record.unmoved)
