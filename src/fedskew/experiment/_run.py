"""One seed of one config, from the untrained model to the summary: in memory, or in a folder that can be resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from fedskew import torchrun
from fedskew.data import Inputs, take
from fedskew.engine import (
    ClientStates,
    Evaluation,
    FedConcatState,
    Round,
    RoundRunner,
    ServerState,
    evaluation,
    predict,
)
from fedskew.errors import ConfigError, RunError
from fedskew.experiment import _checkpoint
from fedskew.experiment._backends import describe
from fedskew.experiment._client_evaluations import ClientEvaluations
from fedskew.experiment._config import Config, write
from fedskew.experiment._folder import RunFolder, plain_json, task_json, write_text
from fedskew.experiment._records import SeedRun
from fedskew.experiment._setup import Task, make_federation, make_task
from fedskew.experiment._summary import score, summarise, surroundings
from fedskew.experiment._trackers import make_trackers
from fedskew.models import FlatModel, ModelState
from fedskew.partition import Partition

NOBODY = np.zeros((0, 2), dtype=np.int64)

Progress = Callable[[Round], None]
"""Called with every record, as soon as its round is over."""

Played = tuple[Any, Round]
"""What comes of a round: the server's next state and the record."""

Play = Callable[[Sequence[RoundRunner], Sequence[Any]], list[Played]]
"""The next round of each course from its state."""


@dataclass(frozen=True)
class RunState:
    """What a run carries from round to round beside its records.

    `best_round` is -1 before the first validation. `clients`: which client's state is of which round, `(clients, 2)`.
    """

    server: ServerState | FedConcatState
    best: ModelState
    best_score: float
    best_round: int
    stale: int
    clients: NDArray[np.int64]


class Run:
    """One seed of one config; `folder` None keeps everything in memory."""

    def __init__(self, config: Config, seed: int, folder: Path | None = None) -> None:
        self.config = config.for_seed(seed)
        self.seed = seed
        self.folder = None if folder is None else RunFolder(folder)
        if config.output.trackers and folder is None:
            raise ConfigError("output.trackers: trackers write beside the run's files; give the run a folder (out=...)")
        self.device = choose_device(config.engine.device)
        self.task: Task = make_task(self.config, seed)
        self._clients = ClientStates(None if folder is None else folder / "checkpoint" / "clients")
        dataset, held = self.task.dataset, torch.from_numpy(self.task.validation)
        self._test = dataset.test_inputs.to(self.device), dataset.test_targets.to(self.device)
        self._validation = take(dataset.inputs, held).to(self.device), dataset.targets[held].to(self.device)
        observe = ClientEvaluations(config, *self._test, self.task.counts) if config.evaluation.clients else None
        self.federation, self._untrained, self.model = make_federation(
            self.config, seed, self.task, self.device, self._clients, observe
        )
        self.records: list[Round] = []

    def go(self, resume: bool = False, progress: Progress | None = None) -> SeedRun:
        """Train to the end.

        An interrupt, or a client that can't be trained, leaves a checkpoint: of the last whole round, or the one before
        it.
        """
        return go_on([self], one_by_one, resume, progress)[0]

    def rounds(self, resume: bool, progress: Progress | None) -> Generator[Any, Played, SeedRun]:
        """The run without its training: gives the state before each round, and takes what comes of it."""
        listeners = [progress] if progress else []
        state = self._begin(resume)
        for record in self.records:
            for listen in listeners:
                listen(record)
        trackers = make_trackers(self.config.output.trackers, self.folder.path) if self.folder else []
        for tracker in trackers:
            tracker.start(self.config.tree())
            listeners.append(tracker.log)
        try:
            while not self._is_over(state):
                state, record = self._round(state, *(yield state.server))
                for listen in listeners:
                    listen(record)
                if state.server.round % self.config.output.checkpoint_every == 0 or self._is_over(state):
                    self._save(state)
        except (KeyboardInterrupt, RunError):
            # Inside a round clients may be ahead of the server's state; the last checkpoint is whole.
            if self._clients.newest <= state.server.round:
                self._save(state)
            raise
        finished = self._finish(state)
        for tracker in trackers:
            tracker.finish(finished.summary)
        return finished

    def _begin(self, resume: bool) -> RunState:
        """The state to go on from: the folder's checkpoint, or the untrained model, evaluated."""
        server = self.federation.start(self._untrained)
        state = RunState(server, best=server.model, best_score=-1.0, best_round=-1, stale=0, clients=NOBODY)
        if self.folder is not None:
            self._open(self.folder, resume)
            kept = _checkpoint.load(self.folder.path, state) if resume else None
            if kept is not None:
                self.records = self.folder.keep_rounds(kept.server.round)
                self._clients.restore(kept.clients)
                return cast(RunState, kept)
            self.folder.keep_rounds(-1)
        state, record = self._evaluated(state, _untrained_round(self.seed))
        self._keep(record)
        self._save(state)
        return state

    def _open(self, folder: RunFolder, resume: bool) -> None:
        """Make the folder, or check that it holds this very run."""
        path = folder.path
        if path.exists() and any(path.iterdir()) and not resume:
            raise RunError(
                f"{path}: this run is there already; add --resume to go on with it (a finished one is only read), "
                "or write elsewhere with --out"
            )
        path.mkdir(parents=True, exist_ok=True)
        self._keep_division(path)
        write(self.config, path / "config.toml")
        write_text(path / "task.json", task_json(self._seed_run({})))

    def _keep_division(self, folder: Path) -> None:
        """Write who holds what, or check that the folder's is this very run's."""
        stored = folder / "partition.npz"
        if stored.exists() and Partition.load(stored).hash != self.task.partition.hash:
            raise RunError(f"{stored}: not the partition that this config makes now; the data or the code has changed")
        self.task.partition.save(stored)

    def _is_over(self, state: RunState) -> bool:
        patience = self.config.evaluation.patience
        return state.server.round >= self.config.training.rounds or 0 < patience <= state.stale

    def _round(self, state: RunState, server: Any, record: Round) -> tuple[RunState, Round]:
        """What comes of one round, its evaluation where one is due, and its line on disk."""
        state = dataclasses.replace(state, server=server)
        if self.config.is_evaluated(record["round"]):
            state, record = self._evaluated(state, record)
        self._keep(record)
        return state, record

    def _evaluated(self, state: RunState, record: Round) -> tuple[RunState, Round]:
        """The record with its evaluations, and the state with the best model by validation so far."""
        model = self.federation.evaluated(state.server)
        if model is None:
            return state, record
        self.model.write_state(model)
        record["evaluation"], record["validation"] = self._evaluate_both(record["round"])
        validation = record["validation"]
        if validation is None:
            return state, record
        if score(validation) > state.best_score:
            return dataclasses.replace(
                state, best=model, best_score=score(validation), best_round=record["round"], stale=0
            ), record
        return dataclasses.replace(state, stale=state.stale + 1), record

    def _evaluate_both(self, round: int) -> tuple[Evaluation | None, Evaluation | None]:
        """The model in memory on test and validation set, each None where there is none."""
        return self._evaluate(*self._test), self._evaluate(*self._validation) if len(self.task.validation) else None

    def _evaluate(self, inputs: Inputs, targets: Tensor) -> Evaluation:
        confusion, loss = predict(self.model.module, inputs, targets, self.task.dataset.num_classes)
        return evaluation(confusion, loss, self.task.target)

    def _keep(self, record: Round) -> None:
        self.records.append(record)
        if self.folder is not None:
            self.folder.append(record)

    def _save(self, state: RunState) -> None:
        if self.folder is not None:
            _checkpoint.save(self.folder.path, dataclasses.replace(state, clients=self._clients.save()))
            self._clients.drop_stale()

    def _finish(self, state: RunState) -> SeedRun:
        """The summary, and the models on disk; leaves the final model in memory."""
        final = self.federation.evaluated(state.server)
        assert final is not None, "a run ends with a model"
        best_round = state.best_round if state.best_round >= 0 else None
        summary = summarise(self.records, best_round) | surroundings(self.config.engine.threads, self.device)
        summary["backend"] = describe(self.federation)
        if self.folder is not None:
            if best_round is not None:
                _save_model(self.model, state.best, self.folder.path / "best.safetensors")
            _save_model(self.model, final, self.folder.path / "model.safetensors")
            write_text(self.folder.summary, plain_json(summary))
        self.model.write_state(final)
        return self._seed_run(summary)

    def _seed_run(self, summary: dict[str, Any]) -> SeedRun:
        return SeedRun(
            label=self.config.name,
            seed=self.seed,
            config=self.config.tree(),
            rounds=self.records,
            counts=self.task.counts.astype(np.int64),
            client_names=self.task.client_names,
            class_names=self.task.dataset.classes,
            target=self.task.target,
            summary=summary,
        )


def go_on(runs: Sequence[Run], play: Play, resume: bool = False, progress: Progress | None = None) -> list[SeedRun]:
    """Train runs of one config to the end, in step; those that are further than others, after an interrupt, wait."""
    finished: dict[Run, SeedRun] = {}
    with threads(runs[0].config.engine.threads), ExitStack() as stack:
        for run in runs:
            stack.enter_context(closing(run.federation)).open()
        going = {run: run.rounds(resume, progress) for run in runs}
        states: dict[Run, Any] = {}
        due, played = list(runs), cast(list[Played], [None] * len(runs))  # None starts a generator
        try:
            while due:
                for run, outcome in zip(due, played, strict=True):
                    try:
                        states[run] = going[run].send(outcome)
                    except StopIteration as end:
                        finished[run] = end.value
                        states.pop(run, None)
                round = min((state.round for state in states.values()), default=0)
                due = [run for run, state in states.items() if state.round == round]
                played = play([run.federation for run in due], [states[run] for run in due]) if due else []
        except (KeyboardInterrupt, RunError) as error:
            for run in runs:
                with suppress(type(error)):
                    going[run].throw(error)
            raise
    return [finished[run] for run in runs]


def one_by_one(courses: Sequence[RoundRunner], states: Sequence[Any]) -> list[Played]:
    """The next round of each."""
    return [course.run_round(state) for course, state in zip(courses, states, strict=True)]


def choose_device(name: str) -> torch.device:
    """The device of a config: `auto` is a GPU where there is one. On a GPU, TF32 is off."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("engine.device: no CUDA device here; use 'cpu' or 'auto'")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", torchrun.local_rank()) if torchrun.launched() else torch.device("cuda")


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with this many threads; the process's own number is put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _save_model(model: FlatModel, state: ModelState, path: Path) -> None:
    model.write_state(state)
    aside = path.with_suffix(".part")
    save_file(model.state_dict(), aside)
    aside.replace(path)


def _untrained_round(seed: int) -> Round:
    return {
        "seed": seed,
        "round": 0,
        "cohort": [],
        "answered": [],
        "dropped": [],
        "diverged": [],
        "weights": [],
        "steps": [],
        "loss": None,
        "entropy": None,
        "kl": None,
        "ess": None,
        "ess_share": None,
        "target_distance": None,
        "drift": None,
        "seconds": 0.0,
        "bytes_up": 0,
        "bytes_down": 0,
        "evaluation": None,
        "validation": None,
        "clients": None,
    }
