"""The target in a simulation: its label mix, the mix that the server knows, and its unlabelled samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew import components, methods, partition
from fedskew.data import Dataset, Inputs, take, unlabelled
from fedskew.errors import ArgumentError, ConfigError, DataError
from fedskew.experiment._config import Config, target_mix
from fedskew.experiment._model_info import ModelInfo
from fedskew.experiment._sections import TargetSection

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def targets(
    section: TargetSection, dataset: Dataset, counts: FloatArray, has_target_client: bool
) -> tuple[FloatArray | None, FloatArray | None]:
    """Return the target's label mix, `(classes,)`, and the mix that the server knows; None where there is none.

    Args:
        section: What the config says.
        dataset: The data set.
        counts: Label counts of the clients, `(clients, classes)`; those of a target client last.
        has_target_client: Whether there is one.

    Raises:
        ConfigError: There is no such mix, or no target whose mix could be estimated.
    """
    if not section.is_estimated:
        if section.mix == "truth" and section.truth is None:
            raise ConfigError(
                "target.mix: 'truth' tells the server target.truth, which is not set; set it, or give shares"
            )
        mix = section.truth if section.mix == "truth" else section.mix
        truth = server_target = _target(mix, "target.mix", dataset, counts, has_target_client)
        if section.truth is not None:
            truth = _target(section.truth, "target.truth", dataset, counts, has_target_client)
        return truth, server_target
    own = isinstance(section.unlabelled, str)
    if has_target_client and (own or section.truth is not None):
        key, what = ("unlabelled", "whose samples are the unlabelled ones") if own else ("truth", "whose mix it is")
        raise ConfigError(f"target.{key}: the partition has a target client, {what}; leave it out")
    if not has_target_client and section.truth is None:
        if own:
            return None, None
        raise ConfigError(
            "target.mix: 'estimate' needs a target's unlabelled samples: say where yours are (target.unlabelled), take "
            "a partition rule with a target client, such as sparsity, or simulate a target by its shares "
            "(target.truth, and data.validation = 0.1)"
        )
    return _target(section.truth, "target.truth", dataset, counts, has_target_client), None


def _target(
    mix: str | list[float] | None, key: str, dataset: Dataset, counts: FloatArray, has_target_client: bool
) -> FloatArray | None:
    """Return the target label mix that a key stands for, `(classes,)`, sum 1; None where the task has none."""
    if mix is None:
        mix = "client" if has_target_client else "data" if dataset.target is not None else None
    if mix == "data" and dataset.target is not None:
        return dataset.target
    return target_mix(
        mix,
        dataset.num_classes,
        known={"client": counts[-1], "pooled": counts[:-1].sum(axis=0)}
        if has_target_client
        else {"pooled": counts.sum(axis=0)},
        unknown={
            "client": "needs a partition rule with a target client, such as sparsity",
            "data": f"is the data set's own mix, and {dataset.name!r} defines no target; give the shares as a list",
        },
        key=key,
    )


def check_held_out(share: float, held_out: Sequence[IntArray]) -> None:
    """Refuse to estimate a mix where clients hold no sample out.

    Args:
        share: The share that they are to hold out.
        held_out: The samples of each.

    Raises:
        ConfigError: They hold none out.
    """
    if not share:
        raise ConfigError(
            "data.held_out: the target's mix is estimated by labelled samples that clients don't train on, and none "
            "are held out; set it to a share such as 0.2"
        )
    if not sum(map(len, held_out)):
        raise ConfigError(f"data.held_out: {share:g} of each client is not one sample; set a larger share")


def unlabelled_samples(
    config: Config,
    dataset: Dataset,
    target_client: IntArray | None,
    validation: IntArray,
    mix: FloatArray | None,
    rng: np.random.Generator,
) -> Inputs:
    """Return the samples of a target whose mix is estimated, as networks take them.

    Args:
        config: The config.
        dataset: The data set.
        target_client: Rows of the partition's target client; None: it has none.
        validation: Rows that nobody trains on.
        mix: The target's label mix, `(classes,)`, where one is simulated.
        rng: Source of all random draws.

    Raises:
        ConfigError: There are none, or they don't fit the data set.
        DataError: The user's own can't be read.
    """
    given = config.target.unlabelled
    if isinstance(given, str):
        return _own_samples(config.place(given), dataset)
    rows = target_client
    if rows is None:
        assert mix is not None, "checked by `targets`"
        rows = draw_target(dataset.targets.numpy(), validation, mix, given, rng)
    return take(dataset.inputs, torch.from_numpy(rows))


def _own_samples(path: str, dataset: Dataset) -> Tensor:
    tokens = isinstance(dataset.inputs, Tensor) and not dataset.inputs.is_floating_point()
    info = ModelInfo(dataset.classes, dataset.in_shape, tokens, dataset.mean, dataset.std)
    try:
        read = torch.cat([some.inputs for some in unlabelled([Path(path).expanduser()], dataset.in_shape)])
    except DataError as error:
        raise DataError(f"target.unlabelled: {error}") from None
    try:
        return info.normalise(read)
    except ArgumentError as error:
        raise ConfigError(f"target.unlabelled: {path}: {error}") from None


def draw_target(
    labels: IntArray,
    free: IntArray,
    mix: FloatArray,
    size: int,
    rng: np.random.Generator,
) -> IntArray:
    """Draw samples with the target's label mix from those that nobody trains on, in ascending order.

    Args:
        labels: Class ids of the whole data set, `(samples,)`.
        free: Samples that nobody trains on.
        mix: The label mix, `(classes,)`, sum 1.
        size: Number of samples; fewer are drawn where a class runs short.
        rng: Source of all random draws.

    Raises:
        ConfigError: There are none, or none of a class that the mix has.
    """
    if not len(free):
        raise ConfigError(
            "target.truth: unlabelled samples of the target are drawn from the validation samples, and there are none; "
            "set data.validation to a share such as 0.1"
        )
    held = np.bincount(labels[free], minlength=len(mix))
    wanted = mix > 0
    if (missing := np.flatnonzero(wanted & (held == 0))).size:
        raise ConfigError(
            f"target.truth: no validation sample is of class {missing[0]}; set a larger data.validation, or its share "
            "to 0"
        )
    most = min(size, math.floor((held[wanted] / mix[wanted]).min()))
    counts = np.minimum(np.rint(most * mix).astype(np.int64), held)
    drawn = [rng.permutation(free[labels[free] == label])[:count] for label, count in enumerate(counts)]
    rows = np.sort(np.concatenate(drawn))
    if not len(rows):
        raise ConfigError(
            "target.unlabelled: not one sample can be drawn in these shares; set a larger data.validation"
        )
    return rows


def target_in_words(config: Config) -> str | None:
    """Say which target a config has; None where it names none.

    Args:
        config: The config.
    """
    section, weighting = config.target, methods.build(config.method, config.training.momentum).weighting
    reads = components.has(weighting, "needs_target")
    if section.is_estimated:
        said = (
            f"target: its label mix is estimated from unlabelled samples, after round {section.warmup} and every "
            f"{section.every} rounds"
        )
        until = "; until an estimate is sure enough, clients are weighed as FedAvg does"
        return said + (until if reads else "; the weighting does not use it")
    mix = section.truth if section.mix == "truth" else section.mix
    if mix is None and _has_target_client(config):
        mix = "client"
    if mix is None:
        return None
    if isinstance(mix, list):
        shares = np.array(mix) / max(sum(mix), 1e-12)
        said = "target: shares of " + ", ".join(f"{share:.3g}" for share in shares[:_NAMED])
        said += f" and {len(mix) - _NAMED} more classes" if len(mix) > _NAMED else ""
    else:
        said = f"target: {_MIXES[mix]}"
    switch = " (weighting.target = false)" if getattr(weighting, "target", True) is False else ""
    return said if reads else f"{said}; the weighting does not use it{switch}"


_NAMED = 10
_MIXES = {
    "uniform": "all classes alike",
    "pooled": "the label mix of all clients together",
    "client": "the label mix of the partition's target client",
    "data": "the label mix that the data set defines",
}


def _has_target_client(config: Config) -> bool:
    section = config.partition
    if section.rule in ("file", "natural"):
        return bool(section.parameters.get("target_client", False))
    rule = components.make_component(partition.INDEX, {"name": section.rule, **section.parameters}, "partition")
    return bool(rule.target_client)
