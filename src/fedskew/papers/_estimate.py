"""How long runs take on this machine, estimated from a measured step and a measured evaluation."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from fedskew import components, methods
from fedskew.data import Dataset
from fedskew.errors import in_one_line
from fedskew.experiment import Config, load_dataset, simulate
from fedskew.papers._datasets import DATASETS, DatasetFacts, facts_of
from fedskew.papers._recipe import RecipeRow

_VALUES_AT_ONCE = 100_000  # of a batch: larger ones are measured in part
_STEPS = {True: 2, False: 10}  # of large samples, and of small ones
_LARGE = 50_000
_WORTH_IT = 1_000  # local steps of a run: the measurement takes some 40


def estimate(rows: Iterable[RecipeRow]) -> float:
    """Estimate the seconds of training and evaluation of these rows, all seeds, one run at a time.

    For every network, shape of sample and batch a few real steps on random samples are timed, on this machine and with
    the row's threads; a method's further passes are counted (a backward pass as two forward). The number of steps
    follows from the data set's published size, as if all of it were given to clients.

    Args:
        rows: The rows.

    Returns:
        The seconds.
    """
    return sum(_estimated(row.config(), facts_of(row.tree["data"])) for row in rows)


def estimate_run(config: Config) -> float | str:
    """Estimate the seconds that a config's seeds take, one after another; see `estimate`.

    Data whose size is not known are loaded for it. What else goes wrong makes the time unknown, and stops no run.

    Args:
        config: The config.

    Returns:
        The seconds, 0 where so few steps are taken that measuring them would take as long; or why they are not known.

    Raises:
        FedskewError: The data can't be loaded.
    """
    if torch.cuda.is_available() and config.engine.device != "cpu":
        return "a GPU trains, and steps are measured on the CPU"
    known = config.data.name in DATASETS
    facts = facts_of(config.tree()["data"]) if known else _facts(load_dataset(config, config.seeds[0]))
    try:
        return _of_seeds(config, facts)
    except Exception as error:
        return f"measuring a few steps failed: {in_one_line(error)}"


def _of_seeds(config: Config, facts: DatasetFacts) -> float:
    """Return the seconds of a config's seeds; 0 where there are few steps."""
    clients, samples = _clients_and_samples(config, facts)
    passes = min(config.training.participation * clients, clients) / clients * samples * config.training.epochs
    steps = passes / config.training.batch_size * config.training.rounds * len(config.seeds)
    if config.training.steps is None and steps < _WORTH_IT and math.prod(facts.shape) < _LARGE:
        return 0.0
    seconds = _estimated(config, facts)
    return seconds / max(1, min(config.engine.number_of_processes(), config.training.participation * clients))


def _facts(dataset: Dataset) -> DatasetFacts:
    train, test = len(dataset.targets), len(dataset.test_targets)
    tokens = isinstance(dataset.inputs, torch.Tensor) and not dataset.inputs.is_floating_point()
    return DatasetFacts(dataset.name, (), dataset.in_shape, train, test, dataset.num_classes, tokens)


def _clients_and_samples(config: Config, facts: DatasetFacts) -> tuple[int, float]:
    """Return how many clients train, and on how many samples together, if all of the data were given to clients."""
    rule = config.partition
    target = bool(rule.parameters.get("target_client", rule.rule == "sparsity"))
    clients = max((rule.clients or 2) - target, 1)
    share = config.data.validation if isinstance(config.data.validation, float) else 0.0  # "own" takes no training data
    left = (1 - share) * (1 - config.data.held_out)
    samples = min(facts.train, config.data.rows or math.inf) * left * clients / (clients + target)
    return clients, min(samples, clients * rule.parameters.get("samples_per_client", math.inf))


def _estimated(config: Config, facts: DatasetFacts) -> float:
    training = config.training
    clients, samples = _clients_and_samples(config, facts)
    participants = training.participation * clients  # a share, where the number of clients is the data set's own
    if config.partition.clients is not None:
        participants = max(1, math.floor(participants + 1e-9))
    batches = math.ceil(samples / clients / training.batch_size)
    per_client = training.epochs * batches if training.steps is None else training.steps
    step, evaluated = _measured(
        config.model.name,
        json.dumps(config.model.parameters, sort_keys=True),
        facts.shape,
        facts.classes,
        facts.tokens,
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
    share = config.data.validation if isinstance(config.data.validation, float) else 0.0
    tests = facts.test + min(facts.train, config.data.rows or math.inf) * share
    if config.evaluation.clients:
        tests += facts.test * participants
    evaluating = (training.rounds / config.evaluation.every) * tests * evaluated
    values = 1 if config.tune is None else len(config.tune.values)
    return float((trained + evaluating) * values * len(config.seeds))


@cache
def _measured(
    model: str,
    options: str,
    shape: tuple[int, ...],
    classes: int,
    tokens: bool,
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
                "name": components.keep(random_samples, "noise", "estimate"),
                "shape": list(shape),
                "classes": classes,
                "tokens": tokens,
                "samples": steps * batch,
            },
            "partition": {"rule": "natural"},
            "model": {"name": model, **json.loads(options)},
            "training": {"rounds": 2, "batch_size": batch, "augmentation": augmentation},
            "engine": {"threads": threads, "device": "cpu"},
        },
        progress=lambda record: ends.append((time.perf_counter(), record)),
    )
    before, (after, last) = ends[-2][0], ends[-1]
    step = last["seconds"] / steps
    return step * batch_size / batch, max(after - before - last["seconds"], 0.0) / (steps * batch)


def random_samples(shape: list[int], classes: int, tokens: bool, samples: int) -> Dataset:
    """Return noise in the shape of another data set, all at one client.

    Args:
        shape: Shape of a sample.
        classes: Number of classes.
        tokens: Whether samples are token ids.
        samples: Number of samples.
    """
    rng = np.random.Generator(np.random.Philox(0))
    size = (samples, *shape)
    if tokens:
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
    """Describe a duration in the unit that fits, rounded.

    Args:
        seconds: The number of seconds.
    """
    for unit, length in (("years", 31_557_600), ("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} s"
