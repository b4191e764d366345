"""The server of a federation of real sites: a simulation's training loop, with sites as its backend."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedskew import methods
from fedskew.deploy._agreement import Agreement
from fedskew.deploy._ask import Members
from fedskew.deploy._finish import SiteFinisher, TrainedModel
from fedskew.deploy._log import LOG, recording_ending, say_errors_in_one_line
from fedskew.deploy._moments import balanced, profiled, standardised
from fedskew.deploy._plan import Plan
from fedskew.deploy._roster import Roster
from fedskew.deploy._round import DeployedRunner, SiteSums
from fedskew.deploy._sites import Sites
from fedskew.deploy._sums import MaskedSums, announced_from
from fedskew.deploy._validator import ReplyValidator
from fedskew.engine import ClientStates
from fedskew.engine.contracts import hooked, is_own
from fedskew.engine.sums import FixedPoint
from fedskew.errors import DivergedError, StandstillError
from fedskew.experiment import Config, RunFolder, TaskInfo, TrainingLoop, read
from fedskew.files import locked
from fedskew.metrics import Tally
from fedskew.report import SeedRun, SiteActivity

PATIENCE = 90.0
"""Seconds to wait for the end of another run, since a ServerApp notices late that its SuperLink was killed."""


BINNED = (
    f"AUROC and PR-AUC are from {Tally.BINS} bins of scores, added up over the sites; deployment.scores in "
    "rounds.jsonl says how far off AUROC may be."
)


def server_app(folder: str | Path) -> ServerApp:
    """Make the ServerApp of a federation's app folder, which contains `run.toml` and `deploy.toml`.

    The app writes the same run folder as a simulation, with an additional file `deployment.json`, which lists the sites
    and their reports. If it is started again with the same config, for example by another `flwr run`, it resumes after
    the last finished round in that folder. Four keys of the app's config for Flower (`[tool.flwr.app.config]`) are
    read: `out`, the folder for run folders ("runs" by default), `target`, a file with the target mix (see
    `labels.read_target`), `weights`, the file that the first weights are from, and `ended`, a file in which `fedskew
    deploy run` reads how the run ended.
    """
    folder = Path(folder)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        keys = ("out", "target", "ended", "weights")
        out, target, ended, weights = (str(context.run_config.get(key) or "") for key in keys)
        say_errors_in_one_line()
        with recording_ending(Path(ended) if ended else None) as still:
            config, agreement = read(folder / "run.toml"), Agreement.read(folder / "deploy.toml")
            place = Path(target) if target else None
            config = config.weights_in(Path(weights).parent) if weights else config
            still += SiteActivity.still_rounds(serve(grid, config, agreement, Path(out or "runs"), place))

    return app


def serve(grid: Grid, config: Config, agreement: Agreement, out: Path, target: Path | None = None) -> SeedRun:
    """Train a federation to the end, and write its run folder, in `out`, and report; `target` is a file with the mix.
    DivergedError where the model was ruined too often, StandstillError where two rounds in a row moved nothing, or none
    did (with report and last good model); EndedEarlyError where no site was connected for too long; RunError where the
    folder is another run's."""
    agreement.check_config(config, target)
    # Sites keep the states of two rounds, so the server must not lose more than one.
    config = config.model_copy(update={"output": config.output.model_copy(update={"checkpoint_every": 1})})
    folder = config.folder(out)
    LOG.info("run folder: %s", folder.absolute())
    from fedskew.report import write_report

    # Ctrl-C at `flwr run --stream` ends only the display of the log, so a second run may be started beside the first.
    with locked(folder, PATIENCE, lambda: LOG.warning("%s: another run is writing here; waiting for its end", folder)):
        if (folder / "summary.json").exists():  # a run that is finished is only read
            LOG.info("it was trained to its end before; report: %s", folder.absolute() / "report.html")
            return RunFolder.read_runs(folder)[0]
        loop = make_deployed_loop(config, agreement, grid, folder, target)
        try:
            finished = loop.run(resume=True, progress=_log_round)
        except (DivergedError, StandstillError):
            loop.save_model()  # the last good one
            page = write_report(RunFolder.read_runs(folder), folder / "report.html", config.name)
            LOG.info("report: %s", page.absolute())
            raise
    if (wrong := finished.finish_note) is not None:
        LOG.warning("%s", wrong)
    elif (after := finished.summary.get("finished")) is not None:
        result = "not evaluated" if after["evaluation"] is None else f"accuracy {after['evaluation']['accuracy']:.4f}"
        LOG.info("after %s: %s (finished.safetensors)", after["name"], result)
    LOG.info("report: %s", write_report([finished], folder / "report.html", config.name).absolute())
    return finished


def make_deployed_loop(
    config: Config, agreement: Agreement, grid: Grid, folder: Path, target: Path | None = None
) -> TrainingLoop:
    """Query the sites' label counts, and make the training loop of a federation of real sites; ConfigError where the
    method does not fit them, or needs a target; RunError where the folder is another federation's."""
    plan = Plan.of(config, agreement, target)
    members = Members(grid, agreement.members, len(agreement.names), agreement.round_timeout)
    roster = Roster(members, agreement, folder)
    roster.gather()
    agreement = standardised(agreement, roster, folder)
    plan, members.told = dataclasses.replace(plan, agreement=agreement), agreement.means
    profiled(plan, roster, folder)
    mix = plan.mix(roster.counts, target)
    announced = announced_from(plan, roster, mix, folder)
    members.told = {**members.told, **balanced(plan, roster, folder)}
    members.begin()
    masked, limit = None, config.training.weight_limit
    if plan.is_masked:
        assert limit is not None, "checked with the config"
        masked = MaskedSums(members, roster.session, plan.fewest, limit)
    validator = ReplyValidator(
        roster.names,
        plan.layout,
        plan.returned,
        plan.returned_idle,
        hooked(plan.method),
        members.refuse,
        norm_limit=agreement.norm_limit,
        norm_action=agreement.norm_action,
        max_reply=agreement.max_reply,
        training=config.training.local(),
        slack=roster.slack,
        classes=len(agreement.classes),
        least_loss=least_loss(plan.method),
        counts=(lambda: roster.counts) if agreement.label_counts == "exact" else None,
    )
    sites = Sites(plan, roster, validator, masked, announced or {})
    clients = ClientStates(folder / "checkpoint" / "clients")
    sizes = roster.sizes if agreement.multi_label else None
    federation = plan.federation(sites, roster.counts, clients, mix, announced, sizes)
    if isinstance(federation.codec, FixedPoint):
        codec = SiteSums(plan.protection, federation.codec.announced, sites=sites)
        federation = dataclasses.replace(federation, codec=codec)
    runner = DeployedRunner(federation, sites, folder)

    def task() -> TaskInfo:
        classes, counts = roster.shown
        sizes = roster.sizes.astype(np.int64) if agreement.multi_label else None
        notes = (BINNED,) if agreement.tally.scores else ()
        return TaskInfo(counts, roster.names, classes, mix, notes, sizes)

    finisher = None if plan.method.finish is None else SiteFinisher(plan, sites, mix)
    has_own = "finish" in config.method  # else it calibrates alone, which changes nothing of the model
    loop = TrainingLoop(
        config=config.for_seed(config.seeds[0]),
        runner=runner,
        untrained=plan.model.read_state(),
        model=plan.model,
        info=agreement.info,
        evaluate=runner.evaluate,
        task=task,
        clients=clients,
        folder=RunFolder(folder, frozen=plan.model.frozen() if config.model.freezes else None),
        watch=runner,
        at_sites=TrainedModel(sites, clients, lambda: loop.server, None if has_own else finisher, folder),
        finisher=finisher if has_own else None,
    )
    return loop


def least_loss(method: methods.Method) -> float:
    """Return the lowest loss that a method's objective can have: 0, or unknown if a part of it is a user's own."""
    ours = not any(map(is_own, method.objective.losses))
    return 0.0 if ours and all(weight >= 0 for weight, _ in method.objective.terms) else -math.inf


def _log_round(record: Mapping[str, Any]) -> None:
    evaluated, accuracy = record["evaluation"], ""
    if evaluated is not None:
        balanced = evaluated["balanced_accuracy"]
        more = "" if balanced is None else f" (balanced {balanced:.4f})"
        accuracy = f", accuracy {evaluated['accuracy']:.4f}{more}"
    if record["round"] == 0:
        LOG.info("untrained%s", accuracy or ": not evaluated")
        return
    loss = "" if record["loss"] is None else f", training loss {record['loss']:.4f}"
    counted = f"{len(record['answered'])} of {len(record['cohort'])} sites counted"
    LOG.info("round %d: %s%s%s, %.1f s", record["round"], counted, loss, accuracy, record["seconds"])
