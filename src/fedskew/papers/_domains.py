"""Accuracy by domain of a finished run's last model, for data sets of several sources."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from fedskew.data import take
from fedskew.engine import predict
from fedskew.errors import ConfigError
from fedskew.experiment import Config, make_task, make_training_loop


def domain_accuracies(config: Config, seed: int, folder: Path) -> dict[str, float]:
    """Test accuracy (a share) of the model in a run folder, by the name of each domain, and their "average".

    It is kept in the folder as `domains.json`. Raises ConfigError where the data set has no domains.
    """
    kept = folder / "domains.json"
    if kept.exists():
        known: dict[str, float] = json.loads(kept.read_text(encoding="utf-8"))
        return known
    task = make_task(config, seed)
    dataset = task.dataset
    if dataset.test_domains is None:
        raise ConfigError(f"data.name: data set {dataset.name!r} has no domains")
    model = make_training_loop(config, seed, task=task).model
    model.load_state_dict(load_file(folder / "model.safetensors"))
    found = {}
    for number, name in enumerate(dataset.domain_names):
        rows = torch.from_numpy(np.flatnonzero(dataset.test_domains == number))
        inputs, targets = (
            take(dataset.test_inputs, rows).to(model.vector.device),
            dataset.test_targets[rows].to(model.vector.device),
        )
        confusion, _ = predict(model.module, inputs, targets, dataset.num_classes)
        found[name] = float(np.trace(confusion) / confusion.sum())
    found["average"] = statistics.fmean(found.values())
    kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found
