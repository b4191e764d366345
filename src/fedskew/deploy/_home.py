"""What a site does for itself: models of its own, and a journal, all in its state folder.

<run>/<round>.safetensors has them beside what the method keeps, and "own.rounds", `(rounds, 2)`: each round that the
site took part in, and its client index there; apps/<app>/home the trained model, a line for each answer, and
features of a frozen body.
"""

import copy
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedskew.data import ByteImages, Inputs
from fedskew.data.features import MOST_BYTES, Features
from fedskew.deploy import _wire as wire
from fedskew.deploy._log import LOG, utc_now
from fedskew.deploy._plan import Plan
from fedskew.deploy.site_data import SiteData
from fedskew.engine import Assignment, LocalWork, SequentialBackend
from fedskew.engine.own import OwnModels
from fedskew.errors import ConfigError, RunError
from fedskew.experiment import make_own
from fedskew.files import append, load_tensors, private_folder, save_tensors
from fedskew.models import FlatModel, ModelState
from fedskew.models.body import cut, quickened
from fedskew.personal import OwnTraining

ROUNDS = "own.rounds"
HOME, COMMON, JOURNAL = "home", "common.safetensors", "journal.jsonl"


def own_models(
    model: FlatModel, work: LocalWork, samples: Tensor, name: str, wanted: OwnTraining, first: ModelState | None = None
) -> OwnModels:
    """Make what trains a model of the site's own."""
    return make_own(f"own.{name}", wanted, model, work, samples, SequentialBackend, first=first)


def behind_body(plan: Plan, data: SiteData, folder: Path) -> tuple[FlatModel, SiteData, Tensor]:
    """Cut the network behind its frozen body, whose features are kept in a folder, in files named by body and samples;
    return the network that trains, its samples, and two of them. The plan's and the site's where none are kept."""
    whole, config, as_it_is = plan.model, plan.config, (plan.model, data, plan.some_samples)
    frozen = {id(one): one for one in whole.module.parameters() if not one.requires_grad}
    if not (frozen and config.engine.keep_features) or config.training.augmentation is not None:
        return as_it_is
    try:
        body, rest = cut(copy.deepcopy(whole.module, dict(frozen)), plan.some_samples)
        model = FlatModel(rest, channels_last=whole.channels_last, constant=whole.constant)
        with torch.no_grad():
            some: Tensor = quickened(body)(plan.some_samples)
    except Exception:  # whatever a network of the user's raises where it is computed in parts
        return as_it_is
    held, size = (data.inputs, data.test_inputs), (len(data.inputs) + len(data.test_inputs)) * some[:1].nbytes
    is_same = (model.names, model.buffer_names) == (whole.names, whole.buffer_names)
    if not is_same or size > MOST_BYTES or not all(isinstance(part, Tensor | ByteImages) for part in held):
        return as_it_is
    mark = sha256(torch.__version__.encode())
    for part in (*frozen.values(), *body.buffers()):
        _mark(mark, part)

    def kept(name: str, inputs: Inputs) -> Inputs:
        if not len(inputs):
            return some[:0]
        own = mark.copy()
        _mark(own, inputs)
        place = folder / f"{name}-{own.hexdigest()[:32]}"
        if not place.exists():
            LOG.info("the features of the frozen layers (%s samples) are computed once, into %s", name, folder)
            for old in folder.glob(f"{name}-*"):
                shutil.rmtree(old, ignore_errors=True)
        private_folder(place)
        return Features(inputs, body, [np.arange(len(inputs))] if name == "training" else [], place)

    seen = replace(data, inputs=kept("training", data.inputs), test_inputs=kept("test", data.test_inputs))
    if (read := data.unlabelled) is not None:
        seen = replace(seen, unlabelled=lambda: kept("unlabelled", read()))
    return model, seen, some


def _mark(digest: Any, values: Any) -> None:
    """Let a digest depend on a tensor, or on pictures in memory."""
    values = (values.pixels if isinstance(values, ByteImages) else values).detach().cpu().contiguous()
    digest.update(repr((values.shape, values.dtype)).encode())
    digest.update(values.numpy())


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
        notes = {"run": task.run, "round": task.round, "client": task.client, "counted": task.counted, **means}
        save_tensors(self.folder / COMMON, {**model._asdict(), **told}, notes)

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
        append(self.folder / JOURNAL, (json.dumps(line) + "\n").encode())

    def journal(self) -> list[dict[str, Any]]:
        """Read the journal; a line that a kill cut short is left out."""
        try:
            lines = (self.folder / JOURNAL).read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with suppress(ValueError, TypeError):
                found.append(dict(json.loads(line)))
        return found
