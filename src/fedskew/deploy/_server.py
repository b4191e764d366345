"""The server of a federation of real sites: a simulation's training loop, with sites as its backend."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from fedskew import methods
from fedskew.deploy._agreement import Agreement, check_config, read_agreement
from fedskew.deploy._arrays import ModelLayout
from fedskew.deploy._disclosures import returned_specs
from fedskew.deploy._log import LOG
from fedskew.deploy._messages import CHANGED
from fedskew.deploy._replies import ReplyRules, ReplyValidator
from fedskew.deploy._roster import Roster
from fedskew.deploy._sites import Sites
from fedskew.engine import (
    ClientStates,
    Evaluation,
    Federation,
    RoundRecord,
    RoundRunner,
    ServerState,
    evaluation,
    hooked,
)
from fedskew.errors import ArgumentError, ConfigError
from fedskew.experiment import (
    Config,
    ModelInfo,
    RunFolder,
    TaskInfo,
    TrainingLoop,
    local_training,
    make_network,
    read,
    run_folder,
    target_mix,
)
from fedskew.files import locked
from fedskew.labels import read_target
from fedskew.models import FlatModel, ModelState
from fedskew.report import SeedRun

PAUSE = 2.0
PATIENCE = 90.0
"""Seconds to wait for the end of another run, since a ServerApp notices late that its SuperLink was killed."""

FloatArray = NDArray[np.float64]


def server_app(folder: str | Path) -> ServerApp:
    """Make the ServerApp of a federation's app folder.

    The app writes the same run folder as a simulation, with an additional file `deployment.json`, which lists the sites
    and their reports. If it is started again with the same config, for example by another `flwr run`, it resumes after
    the last finished round in that folder. Two keys of the app's config for Flower (`[tool.flwr.app.config]`) are read:
    `out`, the folder for run folders ("runs" by default), and `target`, a file with the target mix (see
    `labels.read_target`).

    Args:
        folder: The app folder, which contains `run.toml` and `deploy.toml`.

    Returns:
        The ServerApp.
    """
    folder = Path(folder)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config, agreement = read(folder / "run.toml"), read_agreement(folder / "deploy.toml")
        out, target = context.run_config.get("out") or "runs", context.run_config.get("target")
        serve(grid, config, agreement, Path(str(out)), Path(str(target)) if target else None)

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
        RunError: The run folder belongs to another run.
    """
    check_config(config, agreement, has_target=target is not None)
    # Sites keep the states of two rounds, so the server must not lose more than one.
    config = config.model_copy(update={"output": config.output.model_copy(update={"checkpoint_every": 1})})
    folder = run_folder(config, out)
    LOG.info("run folder: %s", folder.absolute())
    with only_writer(folder):
        finished = make_deployed_loop(config, agreement, grid, folder, target).run(resume=True, progress=_log_round)
    from fedskew.report import write_report

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
    seed = config.seeds[0]
    roster = Roster(grid, agreement, folder)
    roster.gather()
    mix = (
        target_mix(config.target.mix, len(agreement.classes), {"pooled": roster.counts.sum(axis=0)}, {})
        if target is None
        else read_target(target, agreement.classes)
    )
    training = config.training
    method = methods.build(config.method, training.momentum)
    model = FlatModel(make_network(config, seed, method, len(agreement.classes), tuple(agreement.shape)))
    returned, idle = returned_specs(config, agreement, method)
    rules = ReplyRules(
        norm_limit=agreement.norm_limit,
        norm_action=agreement.norm_action,
        max_reply=agreement.max_reply,
        training=local_training(config),
        slack=roster.slack,
        classes=len(agreement.classes),
    )
    sites = Sites(
        grid=grid,
        run=roster.run,
        online=roster.online,
        validator=ReplyValidator(roster.names, ModelLayout(model), returned, idle, rules, hooked(method)),
        timeout=agreement.round_timeout,
        reported=roster.reported,
    )
    clients = ClientStates(folder / "checkpoint" / "clients")
    try:
        federation = Federation(
            method=method,
            backend=sites,
            counts=roster.counts,
            target=mix,
            participation=training.participation,
            seed=seed,
            epochs=training.most_epochs,
            steps=training.steps,
            clients=clients,
            weight_limit=training.weight_limit,
        )
    except ArgumentError as error:
        raise ConfigError(f"method: {error}") from None

    def task() -> TaskInfo:
        classes, counts = roster.shown
        return TaskInfo(counts, roster.names, classes, mix)

    def evaluate(round: int, state: ModelState) -> tuple[Evaluation | None, Evaluation | None]:
        if not agreement.evaluates:
            return None, None
        summed = sites.evaluate(round, state, len(agreement.classes))
        if summed is None:
            LOG.warning("round %d: no site evaluated the model", round)
            return None, None
        confusion, loss = summed
        return evaluation(confusion, loss, mix), None

    return TrainingLoop(
        config=config.for_seed(seed),
        runner=DeployedRunner(federation, roster, sites, agreement.label_counts == "withheld"),
        untrained=model.read_state(),
        model=model,
        info=ModelInfo(
            tuple(agreement.classes),
            tuple(agreement.shape),
            agreement.tokens,
            tuple(agreement.mean),
            tuple(agreement.std),
        ),
        evaluate=evaluate,
        task=task,
        clients=clients,
        folder=RunFolder(folder),
    )


@dataclass(frozen=True)
class DeployedState:
    """The state of a federation of real sites between rounds.

    Attributes:
        server: The method's state.
        accepted: Sizes of the updates that were accepted, by what was measured (see `_plausible`).
    """

    server: ServerState
    accepted: dict[str, FloatArray]

    @property
    def round(self) -> int:
        """Number of the last round."""
        return self.server.round

    @property
    def model(self) -> ModelState:
        """The model in training."""
        return self.server.model


class DeployedRunner(RoundRunner):
    """Plays rounds at real sites.

    A round begins once a site is connected. A site that connects late is queried for its label counts, and then joins.
    """

    def __init__(self, federation: Federation, roster: Roster, sites: Sites, withheld: bool) -> None:
        self._federation, self._roster, self.sites, self._withheld = federation, roster, sites, withheld

    def open(self) -> None:
        """See `RoundRunner.open`."""
        self._federation.open()

    def close(self) -> None:
        """See `RoundRunner.close`."""
        self._federation.close()

    def start(self, model: ModelState) -> DeployedState:
        """See `RoundRunner.start`."""
        return DeployedState(self._federation.start(model), self.sites.validator.start(model))

    def run_round(self, state: DeployedState) -> tuple[DeployedState, RoundRecord]:
        """See `RoundRunner.run_round`."""
        self._wait(state.round)
        self.sites.validator.accepted = state.accepted
        for name, reason in self.sites.validator.notes["failed"].items():
            if reason == CHANGED:
                self._roster.ask_again(name)
        if self._roster.query_newcomers():
            self._federation = dataclasses.replace(self._federation, counts=self._roster.counts)
        following, record = self._federation.run_round(state.server)
        record.deployment = dict(self.sites.validator.notes)
        log_aggregation(record, self._roster.names, self._federation.weight_limit)
        if self._withheld:  # samples are spread evenly over classes, so skew is unknown
            record.entropy = record.kl = record.target_distance = None
        return DeployedState(following, dict(self.sites.validator.accepted)), record

    def evaluated_model(self, state: DeployedState) -> ModelState:
        """See `RoundRunner.evaluated_model`."""
        return self._federation.evaluated_model(state.server)

    def _wait(self, round: int) -> None:
        """Wait until a site is connected."""
        waiting = False
        while not self._roster.online():
            if not waiting:
                LOG.warning("no site is connected; waiting after round %d until one is", round)
                waiting = True
            time.sleep(PAUSE)
        if waiting:
            LOG.info("a site is connected again")


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
