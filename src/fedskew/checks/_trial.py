"""What is tried, the components that a user's own file defines, and on what: a federation that trains in a moment.

It has what breaks components: vacant classes, an empty and a tiny client.
"""

import importlib
import inspect
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew import methods
from fedskew.data import Dataset
from fedskew.errors import ConfigError, FedskewError, in_one_line
from fedskew.experiment import Config, TrainingLoop, load_dataset, make_training_loop, resolve
from fedskew.report import SeedRun


@dataclass(frozen=True)
class FoundComponent:
    """A component that a file defines.

    Attributes:
        name: Its name in a config, `module:Class`.
    """

    slot: str
    name: str
    kind: type

    @staticmethod
    def in_file(path: Path) -> "list[FoundComponent]":
        """Import a file, and return the components that it defines: classes that have the main function of a slot.

        A name that begins with `_` is that of a part of one, not of a component. The file's folder is put in front of
        Python's search path, so that the file can import its neighbours.
        """
        if path.suffix != ".py" or not path.is_file():
            raise ConfigError(f"{path}: is no Python file; give the file that defines your components, such as own.py")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            module = importlib.import_module(path.stem)
        except FedskewError as error:
            raise ConfigError(f"{path}: can't be imported: {error}") from error
        except Exception as error:
            raise ConfigError(f"{path}: can't be imported: {in_one_line(error)}") from error
        if Path(str(module.__file__)).resolve() != path.resolve():
            raise ConfigError(f"{path}: another module is called {path.stem!r} ({module.__file__}); rename the file")
        own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
        return [
            FoundComponent(slot, f"{module.__name__}:{kind.__qualname__}", kind)
            for kind in own
            for slot in (*methods.SLOTS, "finish", "personal")
            if methods.fills(slot, kind) and not inspect.isabstract(kind) and not kind.__name__.startswith("_")
        ]


CLASSES, FEATURES, ROUNDS, STOPPED, MOMENTUM = 4, 5, 3, 2, 0.5
COUNTS = np.array([[12, 0, 3, 0], [0, 9, 0, 0], [5, 5, 5, 5], [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 22]])
"""Label counts, `(clients, classes)`: a client with a single class, one without a sample, one with a single sample."""


class Shapes(NamedTuple):
    """What samples and network are like: tiny, or as the user's config has them; `tokens` are ids of texts, if any."""

    classes: int = CLASSES
    inputs: tuple[int, ...] = (FEATURES,)
    model: str = json.dumps({"name": "mlp3", "width": 6})
    tokens: tuple[int, ...] = ()

    @staticmethod
    def of(config: Config) -> "Shapes":
        """Return the shapes of a config's samples, and its network."""
        dataset = load_dataset(config, config.seeds[0])
        some = dataset.inputs.index_select(0, torch.arange(min(100, len(dataset.inputs))))
        ids = () if some.is_floating_point() else tuple(np.unique(some.numpy()).tolist())
        return Shapes(dataset.num_classes, dataset.in_shape, json.dumps(config.tree()["model"]), ids)


@cache
def tiny_data(shapes: Shapes = Shapes()) -> Dataset:  # noqa: B008
    """Return the samples of these clients, and a test part with five of every class."""
    rng, classes, width = np.random.default_rng(0), shapes.classes, math.prod(shapes.inputs)
    targets = np.concatenate([np.repeat(np.arange(CLASSES) % classes, row) for row in COUNTS])
    test = np.repeat(np.arange(classes), 5)

    def drawn(labels: NDArray[np.int64]) -> Tensor:  # of texts every second word is of its class
        if not shapes.tokens:
            values = rng.normal(size=(len(labels), width)) + 2 * np.eye(classes, width)[labels]
            return torch.from_numpy(values.astype("float32"))
        words = rng.choice(shapes.tokens, size=(len(labels), width))
        words[:, 1::2] = np.resize(shapes.tokens, classes)[labels, None]
        return torch.from_numpy(words)

    inputs, test_inputs = map(drawn, (targets, test))
    return Dataset(
        name="tiny",
        inputs=inputs.view(-1, *shapes.inputs),
        targets=torch.from_numpy(targets),
        test_inputs=test_inputs.view(-1, *shapes.inputs),
        test_targets=torch.from_numpy(test),
        classes=tuple("abcd") if classes == CLASSES else tuple(f"class {label}" for label in range(classes)),
        clients=np.repeat(np.arange(len(COUNTS)), COUNTS.sum(axis=1)),
        client_names=tuple(f"client {client}" for client in range(len(COUNTS))),
    )


def train(
    method: dict[str, Any],
    shapes: Shapes,
    validation: float = 0.0,
    backend: str = "sequential",
    stop: bool = False,
    freeze: tuple[str, ...] = (),
    **training: Any,
) -> tuple[SeedRun, Tensor]:
    """Train the tiny federation for three rounds by a `[method]`; `stop`: after the second, and resume. `validation` is
    the share of the samples that the server holds; what `freeze` names of the network stays as it is."""
    apart = {"client_test": 0.3, "held_out": 0.2} if "personal" in method else {}
    mix = np.arange(1, shapes.classes + 1) / (shapes.classes * (shapes.classes + 1) / 2)
    config = resolve(
        {
            "data": {"name": tiny_data(shapes), "validation": validation, **apart},
            "partition": {"rule": "natural"},
            "model": {**json.loads(shapes.model), **({"freeze": [*freeze]} if freeze else {})},
            "method": method,
            "training": {
                "rounds": ROUNDS,
                "participation": 1.0 if "aggregation" in method else 0.5,  # Krum needs five clients
                "epochs": 2,
                "batch_size": 8,
                "lr": 0.1,
                "momentum": MOMENTUM,
                "smallest_batch": 1 if shapes == Shapes() else 2,  # batch norm
                **training,
            },
            "target": {"mix": mix.tolist()},
            "engine": {"backend": backend, "device": "cpu"},
        }
    )
    with tempfile.TemporaryDirectory(prefix="fedskew-check-") as folder:
        loop = make_training_loop(config, 0, Path(folder) if stop else None)
        if not stop:
            return loop.run(), _parameters(loop)
        try:
            loop.run(progress=_interrupt)
        except KeyboardInterrupt:
            loop = make_training_loop(config, 0, Path(folder))
        return loop.run(resume=True), _parameters(loop)


def _parameters(loop: TrainingLoop) -> Tensor:
    """Return the final parameters: with a finish, those of the finished model."""
    return loop.model.read() if loop.finished is None else loop.finished.parameters


def _interrupt(record: dict[str, Any]) -> None:
    if record["round"] == STOPPED:
        raise KeyboardInterrupt
