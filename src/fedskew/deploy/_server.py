"""The server of a federation of real sites: a simulation's training loop, with sites as its backend."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from fedskew import methods
from fedskew.deploy._agreement import Agreement, check_config, check_target_file, read_agreement
from fedskew.deploy._announcing import ANNOUNCED_FILE, Announcing, samples_of
from fedskew.deploy._arrays import ModelLayout, Specs
from fedskew.deploy._assembly import Assembly, assemble
from fedskew.deploy._ending import recording_ending
from fedskew.deploy._evaluations import Together, together
from fedskew.deploy._finish import SiteFinisher
from fedskew.deploy._log import LOG, say_errors_in_one_line, utc_now
from fedskew.deploy._messages import CHANGED, counted_in
from fedskew.deploy._replies import ReplyRules, ReplyValidator, no_notes
from fedskew.deploy._roster import Roster
from fedskew.deploy._sites import Evaluations, Sites, TargetSite
from fedskew.deploy._sums import MaskedSums
from fedskew.deploy._target_site import in_words, tables_of
from fedskew.deploy._watch import Decisions, Watched, remedy, ruined, to_leave_out
from fedskew.engine import (
    Asked,
    ClientStates,
    EstimatedMix,
    Estimation,
    Evaluation,
    Federation,
    RoundRecord,
    RoundRunner,
    ServerState,
    evaluation,
    hooked,
)
from fedskew.errors import DivergedError, EndedEarlyError, StandstillError
from fedskew.experiment import (
    Config,
    ModelInfo,
    RunFolder,
    TaskInfo,
    TrainingLoop,
    local_training,
    read,
    read_runs,
    run_folder,
)
from fedskew.files import locked
from fedskew.finish import Source
from fedskew.models import ModelState
from fedskew.report import SeedRun, stands_still, still_rounds, why_still
from fedskew.weighting import BySums

PAUSE = 2.0
STILL = 2
"""Rounds in a row that may leave the model as it was before the run is stopped."""

PATIENCE = 90.0
"""Seconds to wait for the end of another run, since a ServerApp notices late that its SuperLink was killed."""

FloatArray = NDArray[np.float64]


def server_app(folder: str | Path) -> ServerApp:
    """Make the ServerApp of a federation's app folder.

    The app writes the same run folder as a simulation, with an additional file `deployment.json`, which lists the sites
    and their reports. If it is started again with the same config, for example by another `flwr run`, it resumes after
    the last finished round in that folder. Three keys of the app's config for Flower (`[tool.flwr.app.config]`) are
    read: `out`, the folder for run folders ("runs" by default), `target`, a file with the target mix (see
    `labels.read_target`), and `ended`, a file in which `fedskew deploy run` reads how the run ended.

    Args:
        folder: The app folder, which contains `run.toml` and `deploy.toml`.

    Returns:
        The ServerApp.
    """
    folder = Path(folder)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        given = {key: str(context.run_config.get(key) or "") for key in ("out", "target", "ended")}
        say_errors_in_one_line()
        with recording_ending(Path(given["ended"]) if given["ended"] else None) as still:
            config, agreement = read(folder / "run.toml"), read_agreement(folder / "deploy.toml")
            target = Path(given["target"]) if given["target"] else None
            still += still_rounds(serve(grid, config, agreement, Path(given["out"] or "runs"), target))

    return app


def serve(grid: Grid, config: Config, agreement: Agreement, out: Path, target: Path | None = None) -> SeedRun:
    """Train a federation to the end, and write its run folder and report.

    Args:
        grid: Flower's grid.
        config: The config that was simulated.
        agreement: What server and sites agree on.
        out: Folder in which the run folder is written.
        target: A file with the target mix; None: the config's target.

    Returns:
        The finished run.

    Raises:
        ConfigError: The config can't be deployed.
        DivergedError: The model was ruined too often; report and last good model are written.
        StandstillError: Two rounds in a row moved nothing, or none did; report and model are written.
        EndedEarlyError: No site was connected for too long.
        RunError: The run folder belongs to another run, or can't be written.
    """
    check_config(config, agreement, has_target=target is not None)
    check_target_file(config, target)
    # Sites keep the states of two rounds, so the server must not lose more than one.
    config = config.model_copy(update={"output": config.output.model_copy(update={"checkpoint_every": 1})})
    folder = run_folder(config, out)
    LOG.info("run folder: %s", folder.absolute())
    from fedskew.report import finish_in_words, write_report

    with only_writer(folder):
        loop = make_deployed_loop(config, agreement, grid, folder, target)
        try:
            finished = loop.run(resume=True, progress=_log_round)
        except (DivergedError, StandstillError):
            loop.save_model()  # the last good one
            LOG.info("report: %s", write_report(read_runs(folder), folder / "report.html", config.name).absolute())
            raise
    if (wrong := finish_in_words(finished)) is not None:
        LOG.warning("%s", wrong)
    elif (after := finished.summary.get("finished")) is not None:
        said = "not evaluated" if after["evaluation"] is None else f"accuracy {after['evaluation']['accuracy']:.4f}"
        LOG.info("after %s: %s (finished.safetensors)", after["name"], said)
    LOG.info("report: %s", write_report([finished], folder / "report.html", config.name).absolute())
    return finished


@contextmanager
def only_writer(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Lock a run folder against other processes that write to it.

    A second run can be started while the first goes on, because Ctrl-C at `flwr run --stream` ends only the display of
    the log.

    Args:
        folder: The run folder.
        patience: Seconds to wait for another run that writes to the folder.

    Raises:
        RunError: Another run still writes to the folder after that time.
    """
    with locked(folder, patience, lambda: LOG.warning("%s: another run is writing here; waiting for its end", folder)):
        yield


def make_deployed_loop(
    config: Config, agreement: Agreement, grid: Grid, folder: Path, target: Path | None = None
) -> TrainingLoop:
    """Query the sites' label counts, and make the training loop of a federation of real sites.

    Args:
        config: The config, with one seed.
        agreement: What server and sites agree on.
        grid: Flower's grid.
        folder: The run folder.
        target: A file with the target mix; None: the config's target.

    Returns:
        The training loop.

    Raises:
        ConfigError: The method does not fit the federation, or it needs a target and there is none.
        RunError: The folder belongs to another federation.
    """
    made = assemble(config, agreement, target)
    method, model, protection = made.method, made.model, made.protection
    roster = Roster(grid, agreement, folder)
    roster.gather()
    mix = made.mix(roster.counts)
    announced = _announced(grid, agreement, method, roster, mix, folder)
    rules = ReplyRules(
        norm_limit=agreement.norm_limit,
        norm_action=agreement.norm_action,
        max_reply=agreement.max_reply,
        training=local_training(config),
        slack=roster.slack,
        classes=len(agreement.classes),
        least_loss=least_loss(method),
        counts=(lambda: roster.counts) if agreement.label_counts == "exact" else None,
    )
    sites = Sites(
        grid=grid,
        run=roster.run,
        online=roster.online,
        validator=ReplyValidator(roster.names, ModelLayout(model), *made.returned, rules, hooked(method)),
        timeout=agreement.round_timeout,
        reported=roster.reported,
        connected=roster.connected,
        target=target_site(agreement, made.estimation),
        knows_labels=agreement.label_counts not in ("withheld", "summed"),
        masked=None if agreement.updates == "plain" else masked_sums(grid, made, roster),
        announced={name: torch.from_numpy(values) for name, values in (announced or {}).items()},
        noise=None if protection is None else protection.noise,
    )
    clients = ClientStates(folder / "checkpoint" / "clients")
    federation = made.federation(sites, roster.counts, clients, announced)

    def task() -> TaskInfo:
        classes, counts = roster.shown
        return TaskInfo(counts, roster.names, classes, mix)

    seed = config.seeds[0]
    runner = DeployedRunner(federation, roster, sites, agreement, folder, config.training.rounds, made.sums)
    finisher = (
        None
        if method.finish is None
        else SiteFinisher(method.finish, model, sites, agreement, mix, seed, runner.reported_samples)
    )
    return TrainingLoop(
        config=config.for_seed(seed),
        runner=runner,
        untrained=model.read_state(),
        model=model,
        info=ModelInfo(
            tuple(agreement.classes),
            tuple(agreement.shape),
            agreement.tokens,
            tuple(agreement.mean),
            tuple(agreement.std),
        ),
        evaluate=runner.evaluate,
        task=task,
        clients=clients,
        folder=RunFolder(folder),
        watch=runner,
        finisher=finisher,
    )


@dataclass(frozen=True)
class DeployedState:
    """The state of a federation of real sites between rounds.

    Attributes:
        server: The method's state.
        accepted: Sizes of the updates that were accepted, by what was measured (see `_plausible`).
        watch: What the server's watch over its model keeps.
    """

    server: ServerState
    accepted: dict[str, FloatArray]
    watch: Watched

    @property
    def round(self) -> int:
        """Number of the last round."""
        return self.server.round

    @property
    def model(self) -> ModelState:
        """The model in training."""
        return self.server.model


class DeployedRunner(RoundRunner):
    """Plays rounds at real sites, evaluates their models there, and undoes a round that ruins the model.

    A round begins once a site is connected. A site that connects late is queried for its label counts, and then joins.
    """

    def __init__(
        self,
        federation: Federation,
        roster: Roster,
        sites: Sites,
        agreement: Agreement,
        folder: Path,
        rounds: int,
        specs: Specs,
    ) -> None:
        self._federation, self._roster, self.sites = federation, roster, sites
        self._agreement, self._folder, self._rounds, self._specs = agreement, folder, rounds, specs
        self._evaluations: Evaluations | None = None
        self._reduced: tuple[int, float] | None = None
        self._summed: tuple[ModelState, Together] | None = None
        self._still: list[RoundRecord] = []  # the last rounds, if they moved nothing, since this server was started
        self._began = utc_now()

    def open(self) -> None:
        """See `RoundRunner.open`."""
        self._federation.open()

    def close(self) -> None:
        """See `RoundRunner.close`."""
        self._federation.close()

    def start(self, model: ModelState) -> DeployedState:
        """See `RoundRunner.start`."""
        state, accepted = self._federation.start(model), self.sites.validator.start(model)
        return DeployedState(state, accepted, Watched.start(state, accepted, len(self._roster.members)))

    def run_round(self, state: DeployedState) -> tuple[DeployedState, RoundRecord]:
        """See `RoundRunner.run_round`."""
        self._wait(state.round)
        self._began = utc_now()
        watch, round = self._readmitted(state.watch), state.round + 1
        sites, agreement = self.sites, self._agreement
        sites.validator.accepted = state.accepted
        sites.left_out, sites.skipped = watch.out(), watch.skipped(round)
        sites.asked.clear()
        sites.silent.clear()
        for name, reason in sites.validator.notes["failed"].items():
            if reason == CHANGED:
                self._roster.ask_again(name)
        timeout = min(agreement.start_timeout, agreement.round_timeout)
        if self._roster.query_newcomers(timeout, sites.left_out | sites.skipped):
            self._federation = dataclasses.replace(self._federation, counts=self._roster.counts)
        sites.asked.update(self._roster.silent)
        sites.silent.update(self._roster.silent)
        play = self._round_in_sums if self._federation.masked else self._federation.run_round
        following, record = play(state.server)
        record.deployment = dict(sites.validator.notes)
        log_aggregation(record, self._roster.names, self._federation.weight_limit)
        if agreement.label_counts in ("withheld", "summed"):  # spread evenly over classes, so skew is unknown
            record.entropy = record.kl = record.target_distance = None
        return self._judged_by_training(dataclasses.replace(state, watch=watch), following, record), record

    def _round_in_sums(self, state: ServerState) -> tuple[ServerState, RoundRecord]:
        """Play a round whose updates are masked: weights come first, and the server sees the sum."""
        began, federation = time.perf_counter(), self._federation
        cohort, following = federation.select_participants(state)
        sent, assignments = federation.instructions(following, cohort)
        own = federation.announced is not None  # each site weighs itself, and the server sees the sum of the weights
        asked = Asked.unknown(cohort.ids) if own else federation.ask(following, cohort)

        def weigh(clients: Sequence[int]) -> list[float]:
            nonlocal asked
            members = cohort.take(np.isin(cohort.ids, list(clients)))
            asked = federation.ask(following, members)
            found = asked.weights if len(asked.weights) else np.zeros(len(members.ids))
            weights = dict(zip(members.ids.tolist(), found.tolist(), strict=True))
            return [weights[client] for client in clients]

        taken = self.sites.train_in_sums(following.round, assignments, sent, None if own else weigh, self._specs)
        if own:
            asked = Asked.unknown(cohort.ids[np.isin(cohort.ids, list(taken.weights))])
        there = [client for client in asked.clients.tolist() if client in taken.weights]
        closed = taken.reason if taken.total is None else None
        following, outcome = federation.aggregate_sums(
            following, cohort, sent, asked, there, taken.total or {}, closed, taken.opened
        )
        for client in outcome.summed.clients if outcome.summed is not None else ():
            federation.clients.put(client, following.round, counted_in(following.round))
        record = federation.record(following.round, cohort, outcome)
        record.seconds = time.perf_counter() - began
        return following, record

    def evaluated_model(self, state: DeployedState) -> ModelState:
        """See `RoundRunner.evaluated_model`."""
        return self._federation.evaluated_model(state.server)

    def evaluate(self, round: int, model: ModelState) -> tuple[Evaluation | None, None]:
        """Evaluate a model at the sites (see `Evaluator`)."""
        if not self._agreement.evaluates:
            return None, None
        summed = self._ask_in_sums(round, model) if self.sites.masked else self._ask(round, model)
        if summed is None:
            return None, None
        return evaluation(summed.confusion, summed.loss, self._federation.target), None

    def reported_samples(self, source: Source, round: int, model: ModelState) -> dict[int, NDArray[np.float64]] | None:
        """Return the samples of each class that the sites reported, by client index; None where reports are not exact.

        Args:
            source: The kind of samples.
            round: Number of the last round.
            model: Its model, which the sites evaluate: their confusion matrices count their test samples.
        """
        counts = self._roster.counts
        if source == "held_out":
            found = self.sites.evaluate(round, model, counts)
            return {client: one.confusion.sum(axis=1).astype(np.float64) for client, one in found.valid.items()}
        if source == "training" and self._agreement.label_counts == "exact":
            return {client: counts[client] for client in np.flatnonzero(counts.sum(axis=1)).tolist()}
        return None

    def review(self, state: DeployedState, record: RoundRecord) -> DeployedState:
        """Judge a round's model by the sites' evaluations, and complete the round's record (see `Watch.review`)."""
        notes = record.deployment = record.deployment if record.deployment is not None else dict(no_notes())
        if self._evaluations is None and self._estimates(record.round):
            self._ask(record.round, self.evaluated_model(state))
        found = Evaluations({}, {}) if self._evaluations is None else self._evaluations
        losses = {client: one.loss for client, one in found.valid.items() if one.samples}
        judged = bool(losses) and "undone" not in notes
        reason = self._ruined(losses, state.watch) if judged else None
        if reason is not None:
            suspects = np.flatnonzero(state.watch.since).tolist()
            state = self._undone(state, record, reason, suspects)
        state = self._estimated(state, record, found)
        if judged and reason is None:
            good = state.watch.with_good(state.server, state.accepted, losses)
            state = dataclasses.replace(state, watch=good)
        watch = state.watch.with_answers(record.round, self.sites.asked, self.sites.silent)
        names = self._roster.names
        notes["evaluations"] = {names[client]: one.to_dict() for client, one in found.valid.items()}
        notes["unevaluated"] = {names[client]: reason for client, reason in found.missing.items()}
        if self._roster.unreported:
            notes["unreported"] = dict(self._roster.unreported)
        if self._reduced is not None:
            notes["reduced"] = {names[self._reduced[0]]: self._reduced[1]}
        notes["quarantine"] = {names[client]: int(watch.left_out[client]) for client in sorted(watch.out())}
        notes["began"], notes["ended"] = self._began, utc_now()
        self._evaluations, self._reduced = None, None
        self._still = [*self._still, record] if stands_still(record) else []
        return dataclasses.replace(state, watch=watch)

    def check(self, state: DeployedState) -> None:
        """Stop a run whose model was ruined too often, that stands still, or whose target fits no mix.

        See `Watch.check`.
        """
        estimation, known = self._federation.estimation, state.server.target
        if estimation is not None and isinstance(known, EstimatedMix):
            estimation.check(known)
        if state.round >= self._rounds and not (state.watch.counted.any() or state.watch.since.any()):
            raise StandstillError(
                f"no update of any site moved the model in {state.round} rounds; fedskew deploy status {self._folder} "
                "says why"
            )
        if len(self._still) >= STILL and state.round < self._rounds:
            first, last = self._still[-STILL], self._still[-1]
            raise StandstillError(
                f"rounds {first.round} and {last.round} left the model as it was: {why_still(last)}. To do: "
                f"{remedy(last.deployment or {}, self._folder)}; then start the run again, and it goes on after round "
                f"{last.round}"
            )
        undone = Decisions.read(self._folder).counting(state.watch.undone)
        if len(undone) < self._agreement.undone_limit:
            return
        out = [self._roster.names[client] for client in sorted(state.watch.out())]
        raise DivergedError(
            f"the model was ruined in rounds {', '.join(map(str, undone))}, and is again that of round "
            f"{state.watch.good.round}; left out: {', '.join(out) or 'nobody'}. Look at these sites, then: fedskew "
            f"deploy readmit {self._folder} NAME (or --nobody), and start again"
        )

    def _estimates(self, round: int) -> bool:
        """Return whether the target's mix is estimated after a round."""
        estimation = self._federation.estimation
        return estimation is not None and estimation.is_due(round)

    def _ask(self, round: int, model: ModelState) -> Together | None:
        """Have a model evaluated at the sites; return what they say together, None without a sample."""
        found = self.sites.evaluate(round, model, self._roster.counts, self._estimates(round))
        self._evaluations, summed = found, together(found.valid)
        if summed is None:
            LOG.warning("round %d: no site evaluated the model", round)
            return None
        self._reduced = summed.reduced
        if summed.reduced is not None:
            client, factor = summed.reduced
            LOG.warning(
                "round %d: %s has more test samples than all other sites; they count %.3g times in the accuracy of all",
                round,
                self._roster.names[client],
                factor,
            )
        return summed

    def _ask_in_sums(self, round: int, model: ModelState) -> Together | None:
        """Have a model evaluated at the sites, which tell the sum of their tables only, and once of each model."""
        if self._summed is not None and all(map(torch.equal, self._summed[0], model)):
            LOG.info("round %d: the model is still the one that was evaluated last", round)
            return self._summed[1]
        summed, missing = self.sites.evaluate_in_sums(round, model, len(self._agreement.classes))
        self._evaluations = Evaluations({}, missing)
        if summed is not None:
            self._summed = model, summed
        return summed

    def _estimated(self, state: DeployedState, record: RoundRecord, found: Evaluations) -> DeployedState:
        """Estimate the target's mix where that is due, and note it in the round's record."""
        estimation, known, target = self._federation.estimation, state.server.target, self.sites.target
        if estimation is None or target is None or not estimation.is_due(record.round):
            return state
        assert isinstance(known, EstimatedMix), "as the federation starts"
        tables = tables_of(found.valid, self._reduced)
        if record.deployment is not None and "undone" in record.deployment:
            known, said = estimation.skip(known, "the round is undone")
        elif found.cells is None:
            known, said = estimation.skip(known, found.no_cells)
        elif not tables:
            known, said = estimation.skip(known, "no site told what the model makes of its test samples")
        else:
            known, said = estimation.update(known, record.round, tables, found.cells)
        record.target = said
        level = LOG.warning if said["unused"] or said["mix"] is None or said["misfit"] else LOG.info
        level("round %d: %s", record.round, in_words(said, tuple(self._agreement.classes), target.name))
        return dataclasses.replace(state, server=dataclasses.replace(state.server, target=known))

    def _judged_by_training(self, before: DeployedState, following: ServerState, record: RoundRecord) -> DeployedState:
        """Take a round into account that is not evaluated yet.

        Where sites don't evaluate, their training losses judge the model that the round began with. It is undone only
        if two sites and half of the cohort reported a loss, and is good only if fewer than half of those say that it is
        ruined.
        """
        watch, notes = before.watch, record.deployment
        assert notes is not None, "made by run_round"
        accepted = dict(self.sites.validator.accepted)
        state = DeployedState(following, accepted, watch)
        if record.diverged and not record.answered:
            return self._undone(state, record, "the next model would not be finite", record.diverged)
        losses = self.sites.losses
        if not self._agreement.evaluates and losses:
            reason = self._ruined(losses, watch, evaluated=False)
            if reason is not None and 2 * len(losses) >= len(set(record.cohort) - watch.out()):
                return self._undone(state, record, reason, np.flatnonzero(watch.since).tolist())
            if reason is None and self._ruined(losses, watch) is None:
                watch = watch.with_good(before.server, before.accepted, losses)
        lengths = {client: self.sites.lengths[client] for client in record.answered}
        return DeployedState(following, accepted, watch.with_counted(record.round, lengths))

    def _ruined(self, losses: Mapping[int, float], watch: Watched, evaluated: bool = True) -> str | None:
        chance = math.log(max(len(self._agreement.classes), 2))
        return ruined(losses, watch.best, self._agreement.loss_limit, chance, evaluated)

    def _undone(
        self, state: DeployedState, record: RoundRecord, reason: str, suspects: Collection[int]
    ) -> DeployedState:
        """Go back to the last good state, and leave out who took part since then."""
        watch, round, names = state.watch, record.round, self._roster.names
        lengths = watch.lengths.copy()
        for client, length in self.sites.lengths.items():
            lengths[client] = max(lengths[client], length)
        active = [
            client for client in np.flatnonzero(self._roster.counts.sum(axis=1)).tolist() if client not in watch.out()
        ]
        out = to_leave_out(suspects, active, lengths)
        for client in np.flatnonzero(watch.since).tolist():
            self._federation.clients.put(client, round, counted_in(int(watch.counted[client])))
        said = ", ".join(names[client] for client in out) or "nobody"
        LOG.error(
            "round %d is undone: %s; the model is again that of round %d. Left out until readmitted: %s",
            round,
            reason,
            watch.good.round,
            said,
        )
        assert record.deployment is not None, "made by run_round"
        record.deployment["undone"] = {
            "reason": reason,
            "back_to": watch.good.round,
            "left_out": [names[c] for c in out],
        }
        server = dataclasses.replace(watch.good, round=round)
        return DeployedState(server, watch.accepted, watch.with_undone(round, out))

    def _readmitted(self, watch: Watched) -> Watched:
        """Let those sites take part again that the operator readmitted."""
        decided, left_out = Decisions.read(self._folder), watch.left_out.copy()
        for client in sorted(watch.out()):
            if decided.readmits(self._roster.names[client], int(left_out[client])):
                LOG.info("%s takes part again", self._roster.names[client])
                left_out[client] = 0
        return dataclasses.replace(watch, left_out=left_out)

    def _wait(self, round: int) -> None:
        """Wait until a site is connected.

        Raises:
            EndedEarlyError: None is for too long.
        """
        began, waiting = time.monotonic(), False
        while not self._roster.online():
            if not waiting:
                LOG.warning("no site is connected; waiting after round %d until one is", round)
                waiting = True
            if time.monotonic() - began >= self._agreement.idle_timeout:
                raise EndedEarlyError(
                    f"no site was connected for {self._agreement.idle_timeout:.0f} s; the run ends after round "
                    f"{round}, and goes on from there when it is started again"
                )
            time.sleep(PAUSE)
        if waiting:
            LOG.info("a site is connected again")


def _announced(
    grid: Grid,
    agreement: Agreement,
    method: methods.Method,
    roster: Roster,
    target: FloatArray | None,
    folder: Path,
) -> dict[str, FloatArray] | None:
    """Sum the label counts of sites that report them in no other way; return what is announced to all sites."""
    if not roster.is_summed:
        return None
    assert isinstance(method.weighting, BySums), "checked with the config"
    asking = Announcing(
        grid=grid,
        session=roster.session,
        names=roster.names,
        online=roster.online,
        timeout=agreement.round_timeout,
        patience=max(agreement.idle_timeout, agreement.start_timeout),
        path=folder / ANNOUNCED_FILE,
    )
    announced = asking.announce(method.weighting, target, len(agreement.classes))
    roster.samples = samples_of(announced, len(roster.names))
    return announced


def target_site(agreement: Agreement, estimation: Estimation | None) -> TargetSite | None:
    """Return the site by which the target's mix is estimated; None where it is not."""
    name = agreement.target_site
    if name is None or estimation is None:
        return None
    return TargetSite(name, agreement.members.index(name), estimation.bins)


def masked_sums(grid: Grid, made: Assembly, roster: Roster) -> MaskedSums:
    """Make what takes sums over the sites."""
    agreement, limit = made.agreement, made.config.training.weight_limit
    assert limit is not None, "checked with the config"
    return MaskedSums(
        grid=grid,
        session=roster.session,
        names=roster.names,
        timeout=agreement.round_timeout,
        least=made.fewest,
        limit=limit,
    )


def least_loss(method: methods.Method) -> float:
    """Return the lowest loss that a method's objective can have: 0, or unknown if a part of it is a user's own."""
    parts = [method.objective.loss, *(term for _, term in method.objective.terms)]
    ours = all(type(part).__module__.startswith("fedskew.") for part in parts)
    return 0.0 if ours and all(weight >= 0 for weight, _ in method.objective.terms) else -math.inf


def log_aggregation(record: RoundRecord, names: Sequence[str], limit: float | None) -> None:
    """Log whom the weight limit holds back in a round, and why the model stayed as it was."""
    if record.limited and limit is not None:
        held = ", ".join(names[client] for client in record.limited)
        LOG.warning("round %d: the weight limit (%g) binds: %s", record.round, limit, held)
    if record.unmoved is not None:
        LOG.warning("round %d: the model stays as it was: %s", record.round, record.unmoved)


def _log_round(record: Mapping[str, Any]) -> None:
    """Log a round in one line."""
    evaluated = record["evaluation"]
    accuracy = (
        ""
        if evaluated is None
        else f", accuracy {evaluated['accuracy']:.4f} (balanced {evaluated['balanced_accuracy']:.4f})"
    )
    if record["round"] == 0:
        LOG.info("untrained%s", accuracy or ": not evaluated")
        return
    loss = "" if record["loss"] is None else f", training loss {record['loss']:.4f}"
    LOG.info(
        "round %d: %d of %d sites counted%s%s, %.1f s",
        record["round"],
        len(record["answered"]),
        len(record["cohort"]),
        loss,
        accuracy,
        record["seconds"],
    )
