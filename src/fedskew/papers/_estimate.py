"""How long a recipe takes on this machine, estimated from a measured step and a measured evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from fedskew import methods
from fedskew.data import Dataset
from fedskew.experiment import simulate
from fedskew.papers._datasets import facts_of
from fedskew.papers._recipe import RecipeRow

_VALUES_AT_ONCE = 100_000  # of a batch: larger ones are measured in part
_STEPS = {True: 2, False: 10}  # of large samples, and of small ones
_LARGE = 50_000


def estimate(rows: Iterable[RecipeRow]) -> float:
    """Estimate the seconds of training and evaluation of these rows, all seeds, one run at a time.

    For every network, shape of sample and batch a few real steps on random samples are timed, on this machine and with
    the row's threads; a method's further passes are counted (a backward pass as two forward). The number of steps
    follows from the data set's published size, as if all of it were given to clients.

    Args:
        rows: The rows.
    """
    return sum(_seconds(row) for row in rows)


def _seconds(row: RecipeRow) -> float:
    config = row.config()
    facts = facts_of(row.tree["data"])
    training, rule = config.training, config.partition
    has_target = rule.parameters.get("target_client", rule.rule == "sparsity")
    clients = (rule.clients or 2) - bool(has_target)
    share = config.data.validation if isinstance(config.data.validation, float) else 0.0  # "own" takes no training data
    samples = facts.train * (1 - share) * clients / (clients + bool(has_target))
    samples = min(samples, clients * rule.parameters.get("samples_per_client", math.inf))
    participants = max(1, math.floor(training.participation * clients + 1e-9))
    batches = math.ceil(samples / clients / training.batch_size)
    per_client = training.epochs * batches if training.steps is None else training.steps
    step, evaluated = _measured(
        config.model.name,
        tuple(sorted((key, str(value)) for key, value in config.model.parameters.items() if key == "stem")),
        facts.shape,
        facts.classes,
        training.batch_size,
        training.augmentation,
        config.engine.threads,
    )
    method = methods.build(config.method, training.momentum)
    cost = methods.cost(method)
    rounds = float(training.rounds)
    if method.pipeline is not None:
        encoders = method.pipeline.split(training.rounds)
        rounds = encoders + (training.rounds - encoders) * method.pipeline.batches / max(per_client, 1)
    trained = rounds * participants * per_client * step * (3 + cost.forward + 2 * cost.backward) / 3
    tests = facts.test + facts.train * share
    if config.evaluation.clients:
        tests += facts.test * participants
    evaluating = (training.rounds / config.evaluation.every) * tests * evaluated
    values = 1 if config.tune is None else len(config.tune.values)
    return float((trained + evaluating) * values * len(config.seeds))


@cache
def _measured(
    model: str,
    options: tuple[tuple[str, str], ...],
    shape: tuple[int, ...],
    classes: int,
    batch_size: int,
    augmentation: str | None,
    threads: int,
) -> tuple[float, float]:
    """Measure the seconds of one step of this batch, and of the evaluation of one sample."""
    batch = max(2, min(batch_size, _VALUES_AT_ONCE // math.prod(shape)))
    steps = _STEPS[math.prod(shape) > _LARGE]
    ends: list[tuple[float, Mapping[str, Any]]] = []
    simulate(
        {
            "data": {
                "name": "fedskew.papers._estimate:random_samples",
                "shape": list(shape),
                "classes": classes,
                "samples": steps * batch,
            },
            "partition": {"rule": "natural"},
            "model": {"name": model, **dict(options)},
            "training": {"rounds": 2, "batch_size": batch, "augmentation": augmentation},
            "engine": {"threads": threads, "device": "cpu"},
        },
        progress=lambda record: ends.append((time.perf_counter(), record)),
    )
    before, (after, last) = ends[-2][0], ends[-1]
    step = last["seconds"] / steps
    return step * batch_size / batch, max(after - before - last["seconds"], 0.0) / (steps * batch)


def random_samples(shape: list[int], classes: int, samples: int) -> Dataset:
    """Return noise in the shape of another data set, all at one client; token ids where the shape is one large number.

    Args:
        shape: Shape of a sample.
        classes: Number of classes.
        samples: Number of samples.
    """
    rng = np.random.Generator(np.random.Philox(0))
    size = (samples, *shape)
    if len(shape) == 1 and shape[0] > 2:
        inputs = torch.from_numpy(rng.integers(1, 90_000, size))
    else:
        inputs = torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
    targets = torch.from_numpy(rng.integers(0, classes, samples))
    channels = shape[0] if len(shape) > 1 else 0
    return Dataset(
        name="random",
        inputs=inputs,
        targets=targets,
        test_inputs=inputs,
        test_targets=targets,
        classes=tuple(map(str, range(classes))),
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        clients=np.zeros(samples, dtype=np.int64),
        client_names=("0",),
    )


def in_words(seconds: float) -> str:
    """Return a number of seconds in the unit that fits, rounded."""
    for unit, length in (("years", 31_557_600), ("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} s"
