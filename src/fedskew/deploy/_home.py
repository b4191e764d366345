"""What a site does for itself: models of its own, and a journal, all in its state folder.

<run>/<round>.safetensors has them beside what the method keeps, and "own.rounds", `(rounds, 2)`: each round that the
site took part in, and its client index there; apps/<app>/home the trained model and a line for each answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedskew.deploy import _wire as wire
from fedskew.deploy._log import utc_now
from fedskew.deploy._plan import Plan
from fedskew.engine import Assignment, LocalWork, SequentialBackend
from fedskew.engine.own import OwnModels
from fedskew.errors import ConfigError, RunError
from fedskew.experiment import make_own
from fedskew.files import append, load_tensors, private_folder, save_tensors, writing
from fedskew.models import ModelState
from fedskew.personal import OwnTraining

ROUNDS = "own.rounds"
HOME, COMMON, JOURNAL = "home", "common.safetensors", "journal.jsonl"


def own_models(
    plan: Plan, work: LocalWork, name: str, wanted: OwnTraining, first: ModelState | None = None
) -> OwnModels:
    """Make what trains a model of the site's own."""
    return make_own(f"own.{name}", wanted, plan.model, work, plan.some_samples, SequentialBackend, first=first)


@dataclass(frozen=True)
class Home:
    """What a site keeps for itself under one app; `ways` train own models in the rounds, where its terms allow that."""

    folder: Path
    ways: tuple[OwnModels, ...] = ()

    def beside(
        self, task: wire.TrainInstruction, samples: int, sent: ModelState, before: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Train own models in a round, from the model that was sent; return all that the site keeps for itself."""
        kept = {name: part for name, part in before.items() if name.startswith("own.")}
        rounds = kept.get(ROUNDS, torch.zeros(0, 2, dtype=torch.int64))
        kept[ROUNDS] = torch.cat([rounds, torch.tensor([[task.round, task.client]])])
        own = Assignment(task.client, task.epochs, steps=task.steps, samples=samples)
        for way in self.ways:
            for _, trained in way.train(task.round, [own], sent, lambda _: before):
                kept |= trained
        return kept

    def keep_common(
        self, model: ModelState, beside: Mapping[str, Tensor], task: wire.TrainInstruction, means: Mapping[str, Any]
    ) -> None:
        """Keep the trained model, what the server says of it, and the means and deviations that it told."""
        private_folder(self.folder)
        told = {f"told.{name}": part for name, part in beside.items()}
        tensors = {name: part.detach().cpu().contiguous() for name, part in model._asdict().items()}
        notes = {"run": task.run, "round": task.round, "client": task.client, "counted": task.counted, **means}
        save_tensors(self.folder / COMMON, {**tensors, **told}, notes)

    def common(self) -> tuple[ModelState, dict[str, Tensor], dict[str, Any]]:
        """Read the trained model, what the server said of it, and of which run and round it is."""
        try:
            tensors, notes = load_tensors(self.folder / COMMON)
        except RunError as error:
            raise ConfigError(
                f"{self.folder / COMMON}: {error}; the server leaves the trained model here after the last round, at "
                "the sites that are connected then"
            ) from None
        told = {name.removeprefix("told."): part for name, part in tensors.items() if name.startswith("told.")}
        return ModelState(**{name: tensors[name] for name in ModelState._fields}), told, notes

    def note(self, kind: str, size: int, **figures: Any) -> None:
        """Write a line about an answer into the journal."""
        private_folder(self.folder)
        line = {"at": utc_now(), "kind": kind, "bytes": size, **figures}
        with writing(self.folder / JOURNAL):
            append(self.folder / JOURNAL, (json.dumps(line) + "\n").encode())

    def journal(self) -> list[dict[str, Any]]:
        """Read the journal; a line that a kill cut short is left out."""
        try:
            lines = (self.folder / JOURNAL).read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                found.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                continue
        return found
