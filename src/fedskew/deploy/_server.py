"""The server of a federation: the run of a simulation, with sites in place of a data set."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from fedskew import methods
from fedskew.deploy._agreement import Agreement, check_config, read_agreement
from fedskew.deploy._alone import alone
from fedskew.deploy._layout import ModelLayout
from fedskew.deploy._returned import returned_forms
from fedskew.deploy._roster import Roster
from fedskew.deploy._sites import ReplyValidator, Rules, Sites
from fedskew.engine import ClientStates, Evaluation, Federation, Round, RoundRunner, ServerState, evaluation
from fedskew.errors import ArgumentError, ConfigError
from fedskew.experiment._config import Config, read
from fedskew.experiment._folder import RunFolder
from fedskew.experiment._records import SeedRun
from fedskew.experiment._run import Run
from fedskew.experiment._simulate import run_folder
from fedskew.experiment._work import make_network
from fedskew.labels import read_target
from fedskew.models import FlatModel, ModelState

LOG = logging.getLogger("flwr")
PAUSE = 2.0

FloatArray = NDArray[np.float64]


def server_app(folder: str | Path) -> ServerApp:
    """The ServerApp of an app folder, which holds `run.toml` and `deploy.toml`.

    It writes the same run folder as a simulation, below `out` of the app's config for Flower (`[tool.flwr.app.config]`;
    "runs" where there is none), with `deployment.json` beside it: which sites there are and what they told. Started
    again with the same config, as by another `flwr run`, it goes on from that folder at the round where it stood.
    `target` of the same config names a file with the target mix (see `labels.read_target`).
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
    """Train a federation to the end, and write its folder below `out`; `target`: a file with the target mix.

    Raises ConfigError for what can't be deployed, RunError for a folder of another run.
    """
    check_config(config, agreement, has_target=target is not None)
    # A round must not be believed at the server and forgotten by it, as sites keep two rounds only.
    config = config.model_copy(update={"output": config.output.model_copy(update={"checkpoint_every": 1})})
    folder = run_folder(config, out)
    LOG.info("run folder: %s", folder.absolute())
    with alone(folder):
        finished = DeployedRun(config, agreement, grid, folder, target).go(resume=True, progress=_tell)
    from fedskew.experiment import write_report

    LOG.info("report: %s", write_report([finished], folder / "report.html", config.name).absolute())
    return finished


class DeployedRun(Run):
    """A run whose clients are sites, and whose evaluation is the sum of theirs."""

    def __init__(self, config: Config, agreement: Agreement, grid: Grid, folder: Path, target: Path | None) -> None:
        self.seed = config.seeds[0]
        self.config = config.for_seed(self.seed)
        self.folder = RunFolder(folder)
        self.device = torch.device("cpu")  # the server only adds
        self.records: list[Round] = []
        self.agreement = agreement
        self._clients = ClientStates(folder / "checkpoint" / "clients")

        self.roster = Roster(grid, agreement, folder)
        self.roster.gather()
        self.target = _target(config, agreement, self.roster.counts, target)
        training = config.training
        method = methods.build(config.method, training.momentum)
        network = make_network(config, self.seed, method, len(agreement.classes), tuple(agreement.shape))
        self.model = FlatModel(network)
        layout = ModelLayout(self.model)
        returned, idle = returned_forms(config, agreement, method)
        rules = Rules(
            agreement.norm_limit,
            agreement.norm_action,
            agreement.max_reply,
            training.batch_size,
            self.roster.slack,
        )
        self.sites = Sites(
            grid=grid,
            run=self.roster.run,
            online=self.roster.online,
            validator=ReplyValidator(self.roster.names, layout, returned, idle, rules),
            timeout=agreement.round_timeout,
        )
        try:
            federation = Federation(
                method=method,
                backend=self.sites,
                counts=self.roster.counts,
                target=self.target,
                participation=training.participation,
                seed=self.seed,
                epochs=training.epochs,
                clients=self._clients,
            )
        except ArgumentError as error:
            raise ConfigError(f"method: {error}") from None
        self.federation = DeployedRunner(federation, self.roster, self.sites, agreement.label_counts == "withheld")
        self._untrained = self.model.read_state()

    def _evaluate_both(self, round: int) -> tuple[Evaluation | None, Evaluation | None]:
        if not self.agreement.evaluates:
            return None, None
        summed = self.sites.evaluate(round, self.model.read_state(), len(self.agreement.classes))
        if summed is None:
            LOG.warning("round %d: no site evaluated the model", round)
            return None, None
        confusion, loss, _ = summed
        return evaluation(confusion, loss, self.target), None

    def _keep_division(self, folder: Path) -> None:
        """Nothing: who holds what is in the roster's own file."""

    def _seed_run(self, summary: dict[str, Any]) -> SeedRun:
        classes, counts = self.roster.shown
        return SeedRun(
            label=self.config.name,
            seed=self.seed,
            config=self.config.tree(),
            rounds=self.records,
            counts=counts,
            client_names=self.roster.names,
            class_names=classes,
            target=self.target,
            summary=summary,
        )


class DeployedRunner(RoundRunner):
    """Rounds with sites: none is played while nobody is there, and a site that comes late is asked for its counts."""

    def __init__(self, federation: Federation, roster: Roster, sites: Sites, withheld: bool) -> None:
        self._federation, self._roster, self._sites, self._withheld = federation, roster, sites, withheld

    def open(self) -> None:
        """See `RoundRunner.open`."""
        self._federation.open()

    def close(self) -> None:
        """See `RoundRunner.close`."""
        self._federation.close()

    def start(self, model: ModelState) -> ServerState:
        """See `RoundRunner.start`."""
        return self._federation.start(model)

    def run_round(self, state: ServerState) -> tuple[ServerState, Round]:
        """See `RoundRunner.play`."""
        self._wait(state.round)
        if self._roster.ask_newcomers():
            self._federation = dataclasses.replace(self._federation, counts=self._roster.counts)
        following, record = self._federation.run_round(state)
        record["deployment"] = dict(self._sites.validator.notes)
        if self._withheld:  # the counts are made up of sizes: what they say of classes is nothing
            record["entropy"] = record["kl"] = record["target_distance"] = None
        return following, record

    def evaluated(self, state: ServerState) -> ModelState:
        """See `RoundRunner.evaluated`."""
        return self._federation.evaluated(state)

    def _wait(self, round: int) -> None:
        """Until a site is there."""
        waiting = False
        while not self._roster.online():
            if not waiting:
                LOG.warning("no site is there; the model stays as after round %d until one comes", round)
                waiting = True
            time.sleep(PAUSE)
        if waiting:
            LOG.info("a site is there again")


def _target(config: Config, agreement: Agreement, counts: FloatArray, file: Path | None) -> FloatArray | None:
    """The target label mix, `(classes,)`, sum 1; None where there is none."""
    mix, classes = config.target.mix, len(agreement.classes)
    if file is not None:
        return read_target(file, agreement.classes)
    if mix is None:
        return None
    if mix == "uniform":
        return np.full(classes, 1.0 / classes)
    values = counts.sum(axis=0) if mix == "pooled" else np.asarray(mix, dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any() or not values.sum():
        raise ConfigError(f"target.mix: expected {classes} shares, none negative and not all 0; got {values.tolist()}")
    shares: FloatArray = values / values.sum()
    return shares


def _tell(record: Round) -> None:
    """One line of progress."""
    judged = record["evaluation"]
    accuracy = (
        "" if judged is None else f", accuracy {judged['accuracy']:.4f} (balanced {judged['balanced_accuracy']:.4f})"
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
