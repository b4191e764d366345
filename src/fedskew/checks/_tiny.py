"""A federation that trains in a moment, with what breaks components: vacant classes, an empty and a tiny client."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedskew.data import Dataset
from fedskew.experiment import TrainingLoop, make_training_loop, resolve
from fedskew.report import SeedRun

CLASSES, FEATURES, ROUNDS, STOPPED, MOMENTUM = 4, 5, 3, 2, 0.5
COUNTS = np.array([[12, 0, 3, 0], [0, 9, 0, 0], [5, 5, 5, 5], [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 22]])
"""Label counts, `(clients, classes)`: a client with a single class, one without a sample, one with a single sample."""


@cache
def tiny_data() -> Dataset:
    """Return the samples of these clients, and a test part with five of every class."""
    rng = np.random.default_rng(0)
    targets = np.concatenate([np.repeat(np.arange(CLASSES), row) for row in COUNTS])
    test = np.repeat(np.arange(CLASSES), 5)
    inputs, test_inputs = (
        torch.from_numpy((rng.normal(size=(len(ids), FEATURES)) + 2 * np.eye(CLASSES, FEATURES)[ids]).astype("float32"))
        for ids in (targets, test)
    )
    return Dataset(
        name="tiny",
        inputs=inputs,
        targets=torch.from_numpy(targets),
        test_inputs=test_inputs,
        test_targets=torch.from_numpy(test),
        classes=tuple("abcd"),
        clients=np.repeat(np.arange(len(COUNTS)), COUNTS.sum(axis=1)),
        client_names=tuple(f"client {client}" for client in range(len(COUNTS))),
    )


def train(method: dict[str, Any], backend: str = "sequential", stop: bool = False) -> tuple[SeedRun, Tensor]:
    """Train the tiny federation for three rounds by a `[method]`; `stop`: after the second round, and resume."""
    config = resolve(
        {
            "data": tiny_data(),
            "partition": {"rule": "natural"},
            "model": {"name": "mlp3", "width": 6},
            "method": method,
            "training": {
                "rounds": ROUNDS,
                "participation": 1.0 if "aggregation" in method else 0.5,  # Krum needs five clients
                "epochs": 2,
                "batch_size": 8,
                "lr": 0.1,
                "momentum": MOMENTUM,
            },
            "target": {"mix": [0.1, 0.2, 0.3, 0.4]},
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
