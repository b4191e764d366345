"""The training loop: rounds, evaluations and checkpoints, from the untrained model to the summary."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedskew import engine, methods, torchrun
from fedskew.data import Profile
from fedskew.engine.cohort import CohortBackend
from fedskew.engine.finish import FinishedModel
from fedskew.errors import ComponentError, ConfigError, FinishError, RunError
from fedskew.experiment._config import Config
from fedskew.experiment._folder import FINISHED, RunFolder, RunState, TaskInfo
from fedskew.experiment._model_info import ModelInfo
from fedskew.experiment._progress import TRACKERS, Listen, Tracker
from fedskew.experiment._site_models import SiteModels
from fedskew.experiment._summary import FinalLook, Scoring, summarise, surroundings
from fedskew.metrics import SiteRow
from fedskew.models import FlatModel, ModelState
from fedskew.report import SeedRun

PlayedRound = tuple[Any, engine.RoundRecord]
"""The server's state after a round, and the round's record without evaluations."""

RunRounds = Callable[[Sequence[engine.RoundRunner], Sequence[Any]], Sequence[PlayedRound]]


Evaluator = Callable[[int, ModelState], tuple[engine.Evaluation | None, engine.Evaluation | None]]
"""Evaluates the model of a round on the test and on the validation set; None for a set that there isn't."""


Finisher = Callable[[ModelState, Any], FinishedModel]
"""Returns what becomes of the model of the last round, and of the server's last state."""


class Watch(Protocol):
    """Judges each round once it is evaluated, and may go back to an earlier state."""

    def review(self, server: Any, record: engine.RoundRecord, /) -> Any:
        """Return the state that the run continues from after a round, whose record this may complete."""

    def check(self, server: Any, /) -> None:
        """Raise RunError where the run must not go on from a state, which is saved."""


SiteEvaluator = Callable[[ModelState, int], tuple[SiteRow, ...]]
"""Evaluates all models of a round on the clients' own test samples, by the common one and the round."""


@dataclass(eq=False)
class TrainingLoop:
    """Trains one seed of one config: rounds, evaluations, records, checkpoints, trackers and the summary.

    It knows neither how a round is played nor where the data is: a simulation and a federation of real sites compose
    the same loop from different parts.

    Attributes:
        model: The network that evaluated models are written into; it holds the final one after `finish`.
        info: The model's classes, shape and normalisation, which its file names.
        task: Called for the label counts, names and target that the finished run shows.
        clients: What clients keep between their participations.
        folder: Where the run is written; None: it stays in memory.
        watch: Judges each round; None: none is undone.
        beside: Trains models of clients' own; None where there are none, or clients train them for themselves.
        at_sites: Evaluates models at each client, after the last round and where the config asks for it; None: nobody.
        finisher: Finishes the last round's model; None: it stays as it is.
        profile: Called for what the training samples look like, which is written beside the model; None: it is not.
        scores: Returns a model's logits of the test set, or of the validation set; None where they are not here.
        finished: The finished model after `finish`; None where the method has no finish.
    """

    config: Config
    runner: engine.RoundRunner
    untrained: ModelState
    model: FlatModel
    info: ModelInfo
    evaluate: Evaluator
    task: Callable[[], TaskInfo]
    clients: engine.ClientStates
    folder: RunFolder | None = None
    watch: Watch | None = None
    beside: SiteModels | None = None
    at_sites: SiteEvaluator | None = None
    finisher: Finisher | None = None
    profile: Callable[[], Profile] | None = None
    scores: Scoring | None = None
    records: list[engine.RoundRecord] = field(default_factory=list, init=False)
    finished: ModelState | None = field(default=None, init=False)
    _progress: Listen | None = field(default=None, init=False)
    _trackers: list[Tracker] = field(default_factory=list, init=False)
    _state: RunState = field(init=False)

    def __post_init__(self) -> None:
        if self.config.output.trackers and self.folder is None:
            raise ConfigError("output.trackers: trackers write beside the run's files; give the run a folder (out=...)")

    def run(self, resume: bool = False, progress: Listen | None = None) -> SeedRun:
        """Train to the end, from the folder's checkpoint where `resume` says so.

        An interrupt, or a client that can't be trained, leaves a checkpoint: of the last whole round, or of the one
        before it. `progress` is called with every record, those of a resumed run included.
        """
        return run_in_step([self], resume=resume, progress=progress)[0]

    @property
    def server(self) -> Any:
        """The server's state after the last round."""
        return self._state.server

    @property
    def is_over(self) -> bool:
        """Whether all rounds are played, or validation has not improved for too long."""
        patience = self.config.evaluation.patience
        return self.server.round >= self.config.training.rounds or 0 < patience <= self._state.stale

    def begin(self, resume: bool = False, progress: Listen | None = None) -> None:
        """Load the state to start from: the folder's checkpoint, or the untrained model, which is evaluated."""
        self._progress = progress
        server = self.runner.start(self.untrained)
        nobody = np.zeros((0, 2), dtype=np.int64)
        state = RunState(server, best=server.model, best_score=-1.0, best_round=-1, stale=0, clients=nobody, own=nobody)
        found = None
        if self.folder is not None:
            self.folder.open(self.config, self.task(), resume)
            found = self.folder.resume(state) if resume else None
        if found is None:
            self._state = self._evaluated(state, engine.RoundRecord(self.config.seeds[0], 0))
            self.save()
        else:
            self._state, self.records = found
            self.clients.restore(self._state.clients)
            if self.beside is not None:
                self.beside.states.restore(self._state.own)
        if progress is not None:
            for record in self.records:
                progress(record.to_dict())
        if self.folder is not None:
            self._trackers = [TRACKERS[name](self.folder.path) for name in self.config.output.trackers]
        for tracker in self._trackers:
            tracker.start(self.config.tree())
        if self.watch is not None:
            self.watch.check(self.server)

    def advance(self, server: Any, record: engine.RoundRecord) -> None:
        """Take over a round that was played: evaluate, record, report, and save a checkpoint where these are due."""
        if self.beside is not None:
            self.beside.advance(record.round, self.server.model, record.answered)
        self._state = self._evaluated(replace(self._state, server=server), record)
        if server.round % self.config.output.checkpoint_every == 0 or self.is_over:
            self.save()
        if self._progress is not None:
            self._progress(record.to_dict())
        for tracker in self._trackers:
            tracker.log(record)
        if self.watch is not None:
            self.watch.check(self.server)

    def save(self) -> None:
        """Save a checkpoint of the last whole round, unless clients are ahead of it, inside an interrupted one."""
        own = None if self.beside is None else self.beside.states
        kept = [states for states in (self.clients, own) if states is not None]
        if self.folder is not None and all(states.newest <= self.server.round for states in kept):
            rounds = self._state.own if own is None else own.save()
            self.folder.save_checkpoint(replace(self._state, clients=self.clients.save(), own=rounds))
            for states in kept:
                states.drop_stale()

    def finish(self) -> SeedRun:
        """Write the summary and the models; the final one is then in `model`."""
        state, folder = self._state, self.folder
        self._hold_final()  # first: the best of a head goes with the encoders that this puts in place
        best_round = state.best_round if state.best_round >= 0 else None
        summary = summarise(self.records, best_round, self.config.evaluation.summary)
        summary |= surroundings(self.config.engine.threads, self.model.vector.device)
        summary["backend"] = _backend_notes(self.runner)
        summary["objective"] = methods.objective_in_words(self.config.method)
        if folder is not None and best_round is not None:
            info = self._look.decided(self.info, state.best)
            self.model.write_state(state.best)
            folder.save_model("best.safetensors", self.model.state_dict(), info)
        info = self.save_model()
        with self._kept():
            summary |= self._look.summary(info, self.model.read_state(), self.records[-1].evaluation)
        if self.finisher is not None:
            with self._kept():
                summary["finished"] = self._finish(self.finisher, self.model.read_state())
        rows = self._evaluate_sites()
        if folder is not None:
            folder.write_summary(summary)
        for tracker in self._trackers:
            tracker.finish(summary)
        return SeedRun(
            label=self.config.name,
            seed=self.config.seeds[0],
            config=self.config.tree(),
            rounds=self.records,
            **vars(self.task()),
            summary=summary,
            sites=rows,
        )

    def _evaluate_sites(self) -> tuple[SiteRow, ...]:
        """Evaluate the models at each client, the common one as it was finished, and write their figures."""
        if self.at_sites is None:
            return ()
        common = self.model.read_state() if self.finished is None else self.finished
        with self._kept():
            if self.beside is not None:
                self.beside.complete(self.records)
            rows = self.at_sites(common, self.server.round)
        if self.folder is not None and rows:
            self.folder.write_sites(rows)
        return rows

    def save_model(self) -> ModelInfo:
        """Write the model as it is after the last round; it is then in `model` too. Return what its file notes."""
        self._hold_final()
        with self._kept():
            info = self._look.decided(self.info, self.model.read_state())
        if self.folder is not None:
            self.folder.save_model("model.safetensors", self.model.state_dict(), info)
            if self.profile is not None:
                self.folder.write_profile(self.profile())
        return info

    @property
    def _look(self) -> FinalLook:
        return FinalLook(self.config, self.scores, self.task().target)

    def finished_network(self) -> nn.Module | None:
        """Return a copy of the network with the finished model; None where the method has no finish."""
        if self.finished is None:
            return None
        with self._kept():
            self.model.write_state(self.finished)
            return copy.deepcopy(self.model.entire)

    def _hold_final(self) -> None:
        final = self.runner.evaluated_model(self.server)
        assert final is not None, "a run ends with a model"
        self.model.write_state(final)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Give `model` back its state after the block, which may write another into it."""
        state = self.model.read_state()
        try:
            yield
        finally:
            self.model.write_state(state)

    def _finish(self, finisher: Finisher, final: ModelState) -> dict[str, Any]:
        """Finish the model, evaluate it, write it beside the other; return what the summary says of it, or why not."""
        name, began = self.config.method["finish"]["name"], time.perf_counter()
        try:
            made = finisher(final, self.server)
        except (ComponentError, FinishError) as error:
            return {"name": name, "failed": str(error), "evaluation": None}
        seconds = time.perf_counter() - began
        self.finished = made.state
        evaluation, _ = self.evaluate(self.server.round, self.finished)
        said = self._look.summary(self.info, self.finished, evaluation)
        if self.folder is not None:
            self.model.write_state(self.finished)
            self.folder.save_model(FINISHED, self.model.state_dict(), self.info)
        return {
            "name": name,
            "evaluation": None if evaluation is None else dict(vars(evaluation)),
            "notes": made.notes,
            "clients": made.clients,
            "bytes_up": made.bytes_up,
            "bytes_down": made.bytes_down,
            "seconds": seconds,
            **said,
        }

    def _evaluated(self, state: RunState, record: engine.RoundRecord) -> RunState:
        """Evaluate the round where that is due, keep its record, and return the state with the best model so far."""
        model = self.runner.evaluated_model(state.server) if self.config.is_evaluated(record.round) else None
        if model is not None:
            record.evaluation, record.validation = self.evaluate(record.round, model)
            if self.at_sites is not None and self.config.evaluation.sites:
                record.sites = SiteRow.over_clients(self.at_sites(model, record.round))
            measure = self.config.evaluation.measure
            if record.validation is not None and (score := record.validation.judged(measure)) > state.best_score:
                state = replace(state, best=model, best_score=score, best_round=record.round, stale=0)
            elif record.validation is not None:
                state = replace(state, stale=state.stale + 1)
        if self.watch is not None:
            state = replace(state, server=self.watch.review(state.server, record))
        self.records.append(record)
        if self.folder is not None:
            self.folder.append(record)
        return state


def _backend_notes(runner: engine.RoundRunner) -> dict[str, Any]:
    """Describe a run's backend, and what it does to the network or the cohort, for its summary."""
    backend: Any = getattr(runner, "backend", None)
    notes: dict[str, Any] = {}
    if isinstance(backend, engine.RankBackend):
        backend, notes = backend.local, {"ranks": torchrun.ranks()}
    notes["name"] = getattr(backend, "name", type(backend).__name__.lower())
    if isinstance(backend, engine.SequentialBackend | engine.ProcessBackend):
        notes["network"] = dict(backend.model.network.rules)
        if (bf16 := backend.work.training.bf16_on(backend.model.vector.device)) is not None:
            notes["network"] = {"bf16": bf16}
    elif isinstance(backend, CohortBackend):
        notes |= {"stacked": backend.stack_size} if backend.not_mapped is None else {"not_mapped": backend.not_mapped}
        if backend.graphs is not None and backend.not_mapped is None:
            notes["steps"] = "graphs" if backend.graphs.failed is None else f"one by one: {backend.graphs.failed}"
    return notes


def one_after_another(runners: Sequence[engine.RoundRunner], states: Sequence[Any]) -> list[PlayedRound]:
    """Return the next round of each runner."""
    return [runner.run_round(state) for runner, state in zip(runners, states, strict=True)]


def run_in_step(
    loops: Sequence[TrainingLoop],
    run_rounds: RunRounds = one_after_another,
    resume: bool = False,
    progress: Listen | None = None,
) -> list[SeedRun]:
    """Train several loops to the end, a round of all at a time; after an interrupt, those behind catch up first."""
    finished: dict[TrainingLoop, SeedRun] = {}
    with compute_threads(loops[0].config.engine.threads), ExitStack() as stack:
        for loop in loops:
            stack.enter_context(closing(loop.runner)).open()
            if loop.beside is not None:
                stack.enter_context(closing(loop.beside))
        for loop in loops:
            loop.begin(resume, progress)
        try:
            while True:
                finished |= {loop: loop.finish() for loop in loops if loop.is_over and loop not in finished}
                going = [loop for loop in loops if loop not in finished]
                if not going:
                    return [finished[loop] for loop in loops]
                first = min(loop.server.round for loop in going)
                due = [loop for loop in going if loop.server.round == first]
                played = run_rounds([loop.runner for loop in due], [loop.server for loop in due])
                for loop, (server, record) in zip(due, played, strict=True):
                    loop.advance(server, record)
        except (KeyboardInterrupt, RunError):
            for loop in loops:
                if loop not in finished:
                    loop.save()
            raise


@contextmanager
def compute_threads(number: int) -> Iterator[None]:
    """Let PyTorch compute with this many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
