"""Batches of one sample, which batch norm can't train on: found before the first round, and cured without a new run.

`training.smallest_batch` leaves short batches out. It is no part of a config's hash, so the cure goes on with the same
run folder; what it would change in finished rounds is looked up there.
"""

from __future__ import annotations

import copy
import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedskew import components, methods
from fedskew.errors import ConfigError, FedskewError
from fedskew.experiment._config import Config
from fedskew.experiment._sections import TrainingSection
from fedskew.partition import Partition

_BatchNorm = nn.modules.batchnorm._BatchNorm


def refuses_one(module: nn.Module, sample: Tensor) -> bool:
    """Find whether a network can't be trained on a single sample, as batch norm then sees one value for a channel.

    Args:
        module: The network; it is left as it is.
        sample: One sample, `(1, *in_shape)`.

    Returns:
        Whether it can't.
    """
    if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        return False
    tried = copy.deepcopy(module).cpu().eval()
    for layer in tried.modules():
        if isinstance(layer, _BatchNorm):
            layer.train()
    try:
        with torch.no_grad():
            tried(sample.cpu())
    except ValueError as error:
        return "more than 1 value per channel" in str(error)
    return False


def check_batches(config: Config, names: Sequence[str], sizes: NDArray[np.int64]) -> None:
    """Refuse batches of one sample, for a network that can't be trained on them.

    Args:
        config: The config.
        names: Names of the clients that train.
        sizes: Their samples, `(clients,)`.

    Raises:
        ConfigError: Some client has such a batch; the message names the cure.
    """
    training = config.training
    if _by_quotas(config):
        return  # a client's samples differ from round to round
    found = [name for name, size in zip(names, sizes.tolist(), strict=True) if _has_batch_of_one(training, size)]
    if not found:
        return
    who = f"client {found[0]} has" if len(found) == 1 else f"{len(found)} clients, such as {found[0]}, have"
    cure = (
        "set training.batch_size to 2 or more"
        if training.batch_size == 1
        else "set training.smallest_batch = 2, which leaves it out (a run that was begun goes on with --resume), or "
        "another batch_size"
    )
    raise ConfigError(
        f"training.smallest_batch: {who} a batch of one sample, on which the batch norm of {config.model.name} can't "
        f"be trained; {cure}"
    )


def changed_batches(folder: Path, config: Config, one_fails: bool = False) -> list[str]:
    """Describe what another `training.smallest_batch` would have changed in the finished rounds of a folder.

    Args:
        folder: The folder of one run.
        config: The run's config now.
        one_fails: Whether the network can't be trained on a single sample, so that no finished round had such a batch.

    Returns:
        What would have changed, a line each.
    """
    now = config.training.smallest_batch
    try:
        stored = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        before = int(stored["training"]["smallest_batch"])
        if before == now or (one_fails and max(before, now) <= 2):
            return []
        records = [json.loads(line) for line in (folder / "rounds.jsonl").read_bytes().split(b"\n")[:-1]]
        trained = sorted({client for record in records for client in record["answered"]})
        last = Partition.load(folder / "partition.npz").counts.sum(axis=1)[trained] % config.training.batch_size
    except (OSError, ValueError, KeyError, TypeError, IndexError, FedskewError):
        return []  # what is damaged is said elsewhere
    if trained and (_by_quotas(config) or ((last < before) != (last < now)).any()):
        return [f"training.smallest_batch was {before} and is {now}, which finished rounds depend on"]
    return []


def _by_quotas(config: Config) -> bool:
    return components.has(methods.build(config.method, config.training.momentum).selection, "assigns_quotas")


def _has_batch_of_one(training: TrainingSection, size: int) -> bool:
    batches = math.ceil(size / training.batch_size)
    if training.batch_size == 1:
        return size > 0 and training.epochs > 0
    steps = math.ceil(training.epochs * batches - 1e-9) if training.steps is None else training.steps
    reached = 0 < batches <= steps
    return reached and training.smallest_batch == 1 and size % training.batch_size == 1
