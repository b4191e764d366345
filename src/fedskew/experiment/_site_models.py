"""The models that a simulation has at each client: trained alone, common, personal; and one of all samples pooled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedskew import engine, methods
from fedskew.engine.contracts import called, checked_moved, checked_trainings
from fedskew.engine.own import OwnModels
from fedskew.engine.target import logits_of
from fedskew.errors import ConfigError
from fedskew.experiment._config import Config
from fedskew.experiment._task import FloatArray, Task, held_out_rows, some_samples
from fedskew.metrics import SiteRow, finding_figures
from fedskew.models import FlatModel, ModelState, with_added_head
from fedskew.personal import HeldOut, Names, OwnTraining, Personal

Named = Mapping[str, Tensor]


@dataclass(eq=False)
class SiteModels:
    """Trains models of clients' own beside the common one, and evaluates all of them on the clients' test samples.
    `states` are what clients keep of their own models (the last one's is the pooled model's), `clients` of the
    federation's rounds. `beside` are trainings in the rounds, by row; of several personal ones the best on held-out
    samples counts. `after` is one from the common model whenever personal ones are asked for."""

    task: Task
    model: FlatModel
    states: engine.ClientStates
    clients: engine.ClientStates
    personal: Personal | None
    private: engine.Private | None
    beside: Mapping[str, tuple[OwnModels, ...]]
    after: tuple[OwnModels, int] | None
    work: Callable[[int], engine.Assignment]

    @property
    def _pooled(self) -> int:
        return len(self.task.counts)

    def advance(self, round: int, sent: ModelState, answered: list[int]) -> None:
        """Train own models of the clients whose updates counted in a round, from the model that was sent in it."""
        tasks = [self.work(client) for client in answered]
        for row, ways in self.beside.items() if tasks else ():
            own = [self._pooled_work(tasks)] if row == "pooled" else tasks
            for way in ways:
                self._keep(round, way.train(round, own, sent, self.kept))

    def complete(self, records: Iterable[engine.RoundRecord]) -> None:
        """Train alone who never took part, for as many rounds as the others took part in, in the mean."""
        took = np.zeros(self._pooled, dtype=np.int64)
        for record in records:
            took[record.answered] += 1
        missing = [self.work(client) for client in np.flatnonzero(took == 0).tolist() if self.task.sizes[client]]
        times = round(float(took[took > 0].mean())) if took.any() and missing else 0
        for way in self.beside.get("alone", ()):
            assert way.first is not None, "who trains alone begins with the untrained model"
            for number in range(1, times + 1):
                before = self.kept if number > 1 else lambda client: {}  # begun anew after an interrupt
                self._keep(number, way.train(number, missing, way.first, before))

    def __call__(self, common: ModelState, round: int) -> tuple[SiteRow, ...]:
        """Make the rows of a round's common model, and of the other models as they are then."""
        found = {"common": self._of_one("common", common)}
        if ways := self.beside.get("alone"):
            found["alone"] = self._rows("alone", self._logits_of_own(ways, common))
        if ways := self.beside.get("pooled"):
            found["pooled"] = self._of_one("pooled", ways[0].of(common, self.kept(self._pooled)))
        if self.personal is not None:
            found["personal"] = self._rows("personal", self._personal(self.personal, common, round))
        return tuple(one for row in SiteRow.ROWS for one in found.get(row, ()))

    def close(self) -> None:
        """Release what trains own models."""
        for way in [*chain(*self.beside.values()), *([] if self.after is None else [self.after[0]])]:
            way.backend.close()

    def kept(self, client: int) -> Named:
        """Return what a client keeps of its own models."""
        return self.states.get(client) or {}

    def _pooled_work(self, tasks: list[engine.Assignment]) -> engine.Assignment:
        """Return the pooled model's training in a round: as many steps as these clients take in the mean."""
        settings = self.beside["pooled"][0].settings
        steps = [settings.steps(task.epochs, task.samples, task.steps) for task in tasks]
        return engine.Assignment(self._pooled, epochs=max(steps), steps=round(sum(steps) / len(steps)))

    def _keep(self, round: int, trained: Iterable[tuple[int, Named]]) -> None:
        for client, own in trained:
            self.states.put(client, round, {**self.kept(client), **own})

    def _personal(self, personal: Personal, common: ModelState, round: int) -> Callable[[int], FloatArray]:
        """Return what gives a client's personal logits for its test samples."""
        told = self._told(common) if personal.reads_held_out else None
        own = self._own_logits(common, round)

        def logits(client: int) -> FloatArray:
            before = own(client)
            if personal.reads_held_out and told is None:
                return np.full_like(before, np.nan)
            given, where = (before, told, self.task.counts[client]), f"client {client}: "
            return checked_moved(personal, called("personal", personal, "moved", *given, where=where), before, where)

        return logits

    def _own_logits(self, common: ModelState, round: int) -> Callable[[int], FloatArray]:
        """Return the same before what becomes of logits."""
        if ways := self.beside.get("personal"):
            return self._logits_of_own(ways, common)
        if self.after is not None:
            tuned = self._finetuned(*self.after, common, round)
            return lambda client: tuned[client] if client in tuned else self._logits(self.model, client, common)
        start, kept = (lambda sent, _: sent) if self.private is None else self.private.start, self.clients.get
        return lambda client: self._logits(self.model, client, start(common, kept(client) or {}))

    def _told(self, common: ModelState) -> HeldOut | None:
        """Return what the clients' held-out samples say of the common model; None where its outputs are not finite."""
        rows, dataset = np.concatenate(held_out_rows(self.task)), self.task.dataset
        self.model.write_state(common)
        logits = logits_of(self.model.network, dataset.inputs, rows, finite=False)
        return HeldOut.of(logits, dataset.targets.numpy()[rows]) if np.isfinite(logits).all() else None

    def _finetuned(self, way: OwnModels, epochs: int, common: ModelState, round: int) -> dict[int, FloatArray]:
        """Train from the common model at each client, and return its logits; those that diverge are left out."""
        tested = [client for client, rows in enumerate(self.task.client_test) if len(rows)]
        tasks = [engine.Assignment(client, epochs, samples=self.work(client).samples) for client in tested]
        return {
            client: self._logits(way.model, client, way.of(common, own))
            for client, own in way.train(round + 1, tasks, common, lambda client: {})
        }

    def _logits_of_own(self, ways: tuple[OwnModels, ...], common: ModelState) -> Callable[[int], FloatArray]:
        def logits(client: int) -> FloatArray:
            own = [(way.model, way.of(common, self.kept(client))) for way in ways]
            scores = [score(self.task, model, client, state) or 0.0 for model, state in own] if len(own) > 1 else [0.0]
            model, state = own[int(np.argmax(scores))]
            return self._logits(model, client, state)

        return logits

    def _of_one(self, row: str, state: ModelState) -> tuple[SiteRow, ...]:
        """Make the rows of one model at all clients, whose samples go through the network together."""
        self.model.write_state(state)
        own = self.task.client_test
        together = logits_of(self.model.network, self.task.dataset.inputs, np.concatenate(own), finite=False)
        apart = np.split(together, np.cumsum([len(rows) for rows in own])[:-1])
        return self._rows(row, apart.__getitem__)

    def _rows(self, row: str, logits: Callable[[int], FloatArray]) -> tuple[SiteRow, ...]:
        """Make a row for every client that has test samples, of which `logits(client)` returns the logits."""
        dataset, targets = self.task.dataset, self.task.dataset.targets.numpy()
        return SiteRow.of(row, [targets[own] for own in self.task.client_test], logits, dataset.multi_label)

    def _logits(self, model: FlatModel, client: int, state: ModelState) -> FloatArray:
        """Compute the logits of one client's test samples."""
        model.write_state(state)
        return logits_of(model.network, self.task.dataset.inputs, self.task.client_test[client], finite=False)

    @staticmethod
    def of(
        config: Config,
        task: Task,
        model: FlatModel,
        work: engine.LocalWork,
        untrained: ModelState,
        clients: engine.ClientStates,
        folder: Path | None,
        backend: Callable[[FlatModel, engine.LocalWork], engine.Backend],
    ) -> SiteModels | None:
        """Make them as a config wants them, before the first round; None where clients have no test samples."""
        method, training = methods.build(config.method, config.training.momentum), config.training
        personal, baselines = method.personal, config.evaluation.baselines
        if personal is not None and not config.data.client_test:
            raise ConfigError("method.personal: clients have no samples to test it on; set data.client_test = 0.3")
        if personal is not None and personal.reads_held_out and not held_out_rows(task):
            raise ConfigError(
                f"method.personal: {type(personal).__name__} needs labelled samples that no client trains on; set "
                "data.held_out = 0.2"
            )
        if not config.data.client_test:
            return None

        def way(name: str, wanted: OwnTraining, work: engine.LocalWork = work, **more: Any) -> OwnModels:
            train = engine.SequentialBackend if name == "pooled" else backend
            return make_own(name, wanted, model, work, some_samples(task.dataset), train, **more)

        beside: dict[str, tuple[OwnModels, ...]] = {}
        in_rounds = OwnTraining("rounds")
        if "alone" in baselines:
            beside["alone"] = (way("alone", in_rounds, first=untrained, score=partial(score, task, model)),)
        if "pooled" in baselines:
            each = task.partition.indices[: len(task.counts)]
            rows = [*each, np.concatenate(each)]
            counts = np.concatenate([task.counts, task.counts.sum(axis=0, keepdims=True)])
            assert isinstance(work.data, engine.PartitionedData), "in a simulation"
            pooled = replace(work, data=replace(work.data, rows=rows, counts=counts))
            beside["pooled"] = (way("pooled", in_rounds, pooled, first=untrained),)
        trainings = () if personal is None else checked_trainings(personal, called("personal", personal, "trainings"))
        if ways := [way(f"personal.{at}", one) for at, one in enumerate(trainings) if one.when == "rounds"]:
            beside["personal"] = tuple(ways)
        after = [(way("personal", one), one.epochs or 1) for one in trainings if one.when == "end"]
        epochs = engine.Conditions(stragglers=config.conditions.stragglers).epochs(
            len(task.counts), training.most_epochs, config.seeds[0]
        )
        sizes = task.sizes.tolist()

        def assignment(client: int) -> engine.Assignment:
            return engine.Assignment(client, epochs[client].item(), steps=training.steps, samples=sizes[client])

        states = engine.ClientStates(None if folder is None else folder / "checkpoint" / "own")
        return SiteModels(
            task, model, states, clients, personal, work.private, beside, after[0] if after else None, assignment
        )


def make_own(
    name: str,
    wanted: OwnTraining,
    model: FlatModel,
    work: engine.LocalWork,
    samples: Tensor,
    backend: Callable[[FlatModel, engine.LocalWork], engine.Backend],
    **more: Any,
) -> OwnModels:
    """Make what trains clients' own models, by the common one's network and training; `samples` show the last layer."""
    network, trained = model, None
    beside = None if wanted.layers == "all" else with_added_head(model.module, samples)
    classes = 0 if beside is None else len(beside.get_parameter("added.bias"))
    names = Names.of(model.module, model.names, model.buffer_names, classes)
    private = engine.Private.of(model, frozenset((*names.trained, *names.buffers)))
    if beside is not None:
        trained = engine.Private.of(model, names.head).parameters
        if wanted.layers == "added" or not trained.any():  # beside one that is frozen it is the same
            constant = [f"network.{name}" for name in model.constant]
            network = FlatModel(beside, channels_last=model.channels_last, constant=constant)
            trained = torch.arange(len(network.vector), device=network.vector.device) >= len(model.vector)
        private = engine.Private(trained, torch.zeros_like(private.buffers))
    own = OwnModels.work(work, private, wanted.pull, trained is not None)
    return OwnModels(name, network, backend(network, own), private, own.training, trained, **more)


def score(task: Task, model: FlatModel, client: int, state: ModelState) -> float | None:
    """Return an own model's accuracy on held-out samples (of several labels minus its loss); None without any."""
    rows, dataset = task.held_out[client], task.dataset
    if not len(rows):
        return None
    model.write_state(state)
    logits, targets = logits_of(model.network, dataset.inputs, rows, finite=False), dataset.targets.numpy()[rows]
    if dataset.multi_label:
        return -float(np.nan_to_num(finding_figures(logits, targets)["loss"], nan=np.inf))
    return float((logits.argmax(axis=1) == targets).mean())
