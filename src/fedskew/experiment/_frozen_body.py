"""Trains what comes after a network's frozen body on features that are computed once a client."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import NamedTuple

from torch import Tensor, nn

from fedskew.data.features import MOST_BYTES, Features
from fedskew.errors import in_one_line
from fedskew.experiment._config import Config
from fedskew.experiment._task import Task
from fedskew.methods import Method
from fedskew.models.body import cut, quickened


class Training(NamedTuple):
    """The network that trains, on a task whose inputs it takes; `note` says for the run what its features are."""

    module: nn.Module
    task: Task
    note: str = ""


def behind_body(config: Config, method: Method, task: Task, module: nn.Module, samples: Tensor) -> Training:
    """Cut a network behind its frozen body and make the body's features the task's inputs, where that can be done."""
    if all(parameter.requires_grad for parameter in module.parameters()):
        return Training(module, task)
    kept = "The features of the frozen layers are computed anew in every step: "
    for reason, holds in (
        ("engine.keep_features is off", not config.engine.keep_features),
        ("training.augmentation changes the samples", config.training.augmentation is not None),
        ("FedConcat trains a network for each cluster", method.pipeline is not None),
    ):
        if holds:
            return Training(module, task, kept + reason)
    try:
        body, rest = cut(module, samples)
        shape = tuple(quickened(body)(samples).shape[1:])
    except Exception as error:  # whatever a network of the user's raises where it is computed in parts
        return Training(module, task, kept + in_one_line(error))
    dataset, unlabelled, device = task.dataset, task.unlabelled, samples.device
    number = len(dataset.targets) + len(dataset.test_targets) + (0 if unlabelled is None else len(unlabelled))
    if number * prod(shape) * 4 > MOST_BYTES:
        return Training(module, task, f"{kept}{prod(shape):,} numbers for each of {number:,} samples are too many")
    groups = [*task.partition.indices, *task.held_out, *task.client_test, task.validation]
    seen = replace(
        dataset,
        inputs=Features(dataset.inputs.to(device), body, [rows for rows in groups if len(rows)]),
        test_inputs=Features(dataset.test_inputs.to(device), body, []),
        mean=(),
        std=(),
    )
    if unlabelled is not None:
        unlabelled = Features(unlabelled.to(device), body, [])
    numbers = " x ".join(map(str, shape))
    note = f"The features of the frozen layers, {numbers} numbers a sample, are computed once at each client"
    return Training(rest, replace(task, loaded=replace(task.loaded, dataset=seen), unlabelled=unlabelled), note)
