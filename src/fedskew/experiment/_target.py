"""In a simulation: the target's label mix is estimated after some rounds, and a finish moves the last model to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedskew import engine, labels, methods, torchrun
from fedskew.data import Inputs
from fedskew.engine.finish import FinishedModel, answer, check_finish, finish_model
from fedskew.engine.target import EstimatedMix, Estimation, logits_of
from fedskew.engine.workers import from_the_first
from fedskew.errors import ArgumentError, ConfigError, placed
from fedskew.experiment._config import Config
from fedskew.experiment._task import FloatArray, IntArray, Task, held_out_data, held_out_rows, some_samples
from fedskew.finish import Finish, Known, Source
from fedskew.labels import outcome_table
from fedskew.models import FlatModel, ModelState
from fedskew.randomness import Purpose, generator


def noisy_target(target: FloatArray | None, noise: float, seed: int) -> FloatArray | None:
    """Return the target mix that the server is given (see `TargetSection.noise`)."""
    if target is None or noise == 0:
        return target
    noisy = target + noise * np.maximum(generator(seed, Purpose.TARGET).standard_normal(len(target)), 0)
    shares: FloatArray = noisy / noisy.sum()
    return shares


def make_watch(seed: int, runner: engine.RoundRunner, model: FlatModel, task: Task) -> TargetWatch | None:
    """Make the watch that estimates the target's mix after a round; None if it is not estimated."""
    if task.unlabelled is None:
        return None
    assert isinstance(runner, engine.Federation), "the config has been checked"
    assert runner.aim is not None, "the mix is estimated"
    return TargetWatch(runner, runner.aim, model, held_out_data(task), task.unlabelled, seed)


@dataclass(frozen=True)
class TargetWatch:
    """Estimates the target's label mix after the rounds in which that is due, by held-out samples; a `Watch`."""

    federation: engine.Federation
    estimation: Estimation
    model: FlatModel
    held_out: engine.PartitionedData
    unlabelled: Inputs
    seed: int

    def review(self, server: engine.ServerState, record: engine.RoundRecord) -> engine.ServerState:
        """Estimate the mix where that is due, and complete the round's record (see `Watch.review`)."""
        if not self.estimation.is_due(record.round):
            return server
        self.model.write_state(self.federation.evaluated_model(server))
        before = EstimatedMix.of(server)
        assert before is not None, "as the federation starts"
        known, record.target = self._updated(before, record.round)
        if torchrun.launched():  # ranks may be unlike machines, and must go on with the same numbers
            known, record.target = from_the_first((known, record.target))
        return known.within(server)

    def check(self, server: engine.ServerState) -> None:
        """End a run whose target does not fit, if it is to end (see `Watch.check`)."""
        known = EstimatedMix.of(server)
        assert known is not None, "as the federation starts"
        self.estimation.check(known)

    def _updated(self, known: EstimatedMix, round: int) -> tuple[EstimatedMix, dict[str, Any]]:
        estimation, data = self.estimation, self.held_out
        asked = self._asked(round)
        rows = np.concatenate([data.rows[client] for client in asked])
        true = data.targets.numpy()[rows]
        try:
            ours = logits_of(self.model.network, data.inputs, rows)
            theirs = logits_of(self.model.network, self.unlabelled)
            said: FloatArray | IntArray
            if estimation.estimator == "em":
                said = labels.calibrate(ours, true).apply(theirs)
            else:
                said = np.bincount(estimation.outcomes(theirs), minlength=estimation.classes * estimation.bins)
        except ArgumentError as error:
            return estimation.skip(known, f"there is no estimate: {error}")
        cells, ends = estimation.outcomes(ours), np.cumsum([0, *(len(data.rows[client]) for client in asked)]).tolist()

        def tables() -> Iterator[tuple[int, FloatArray]]:  # one at a time: all of them may not fit into memory
            for client, start, end in zip(asked, ends, ends[1:], strict=False):
                yield client, outcome_table(true[start:end], cells[start:end], estimation.classes, estimation.bins)

        return estimation.update(known, round, tables, said)

    def _asked(self, round: int) -> list[int]:
        """Return the clients whose held-out samples an estimate is made from, ascending."""
        sizes = np.array([len(rows) for rows in self.held_out.rows])
        if sizes.sum() <= self.estimation.ask:
            return np.flatnonzero(sizes).tolist()
        order = generator(self.seed, Purpose.ASKED, round).permutation(len(sizes))
        before = np.cumsum(sizes[order]) - sizes[order]
        return sorted(order[(before < self.estimation.ask) & (sizes[order] > 0)].tolist())


def make_finisher(config: Config, seed: int, task: Task, model: FlatModel) -> LocalFinisher | None:
    """Make the finisher of the trained model; None if the method has no finish."""
    component = methods.build(config.method, config.training.momentum).finish
    if component is None:
        return None
    dataset, clients, rows = task.dataset, len(task.counts), task.partition.indices
    if "held_out" in component.asks:
        _check_held_out_classes(task, config.method["finish"]["name"])

    def held_by(some: Sequence[IntArray]) -> list[engine.ClientSamples]:
        unused = np.zeros(dataset.num_classes)  # counts, of which a finish has its own
        return [engine.ClientSamples(dataset.inputs, dataset.targets, own, unused) for own in some if len(own)]

    target = held_by(rows[clients:])
    if task.unlabelled is not None:
        size = len(task.unlabelled)
        none = torch.zeros(size, dtype=torch.int64)
        target = [engine.ClientSamples(task.unlabelled, none, np.arange(size), np.zeros(dataset.num_classes))]
    return LocalFinisher(
        component=component,
        model=model,
        holders={"training": held_by(rows[:clients]), "held_out": held_by(held_out_rows(task)), "target": target},
        samples=some_samples(dataset),
        target=noisy_target(task.server_target, config.target.noise, seed),
        is_estimated=config.target.is_estimated,
        seed=seed,
    )


def _check_held_out_classes(task: Task, name: str) -> None:
    """Refuse a finish whose held-out samples can't tell it anything; that there are some is checked elsewhere."""
    held = held_out_rows(task)
    if not held:
        return
    classes = np.unique(task.dataset.targets.numpy()[np.concatenate(held)])
    if len(classes) < 2:
        raise ConfigError(
            f"method.finish: {name} compares classes, and all samples that are held out are of class {classes[0]}; set "
            "a larger data.held_out or data.validation"
        )
    has_samples = task.unlabelled is not None or len(task.partition.indices) > len(task.counts)
    if task.server_target is not None and not has_samples and not task.server_target[classes].any():
        raise ConfigError(
            f"method.finish: {name} moves the model to target.mix, which has no share of a class that is held out; set "
            "a larger data.held_out or data.validation, or another mix"
        )


@dataclass(frozen=True)
class LocalFinisher:
    """Finishes models on this machine (see `Finisher`); ConfigError where the component can't do that here. `holders`
    are samples by kind; the last layer is found by `samples`; `target` is the mix that is known or estimated."""

    component: Finish
    model: FlatModel
    holders: Mapping[Source, Sequence[engine.ClientSamples]]
    samples: Tensor
    target: FloatArray | None
    is_estimated: bool
    seed: int

    def __post_init__(self) -> None:
        with placed(""):
            check_finish(self.component, self.model.module, self.samples, self._known(None))

    def _known(self, server: Any) -> Known:
        estimated = None if server is None else EstimatedMix.of(server)
        mix = self.target if estimated is None else estimated.used
        sources = frozenset(source for source, held in self.holders.items() if held)
        return Known(sources, mix, self.is_estimated, generator(self.seed, Purpose.FINISH))

    def __call__(self, model: ModelState, server: Any) -> FinishedModel:
        """Finish a model; the same one gives the same bits, however its rounds were played."""
        return finish_model(self.component, self.model, model, self.samples, self._answers, self._known(server))

    def _answers(self, source: Source, question: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for samples in self.holders[source]:
            yield answer(self.component, self.model.module, samples, question, labelled=source != "target")
