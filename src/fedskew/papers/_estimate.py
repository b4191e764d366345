"""The papers' data sets (`datasets.toml`), and how long runs take on this machine: a measured step and evaluation."""

import json
import math
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import torch

from fedskew import components, methods, simulate
from fedskew.data import Dataset
from fedskew.errors import in_one_line
from fedskew.experiment import Config, load_dataset

_VALUES_AT_ONCE = 100_000  # of a batch: larger ones are measured in part
_STEPS = {True: 2, False: 10}  # of large samples, and of small ones
_LARGE = 50_000
_WORTH_IT = 1_000  # local steps of a run: the measurement takes some 40


@dataclass(frozen=True)
class DatasetFacts:
    """The facts about a data set that a recipe needs; see `datasets.toml`."""

    title: str
    places: tuple[str, ...]
    shape: tuple[int, ...]
    train: int
    test: int
    classes: int
    tokens: bool = False  # whether samples are texts, as token ids


@cache
def _facts() -> dict[str, DatasetFacts]:
    text = resources.files("fedskew.papers").joinpath("datasets.toml").read_text(encoding="utf-8")
    found = {}
    for name, table in tomllib.loads(text).items():
        found[name] = DatasetFacts(**table | {"places": tuple(table["places"]), "shape": tuple(table["shape"])})
    return found


def facts_of(table: Mapping[str, Any]) -> DatasetFacts:
    """Return the facts of the data set that the `[data]` table of a config names; KeyError if it is none of theirs."""
    return _facts()[f"{table['name']} subset" if table.get("subset") else table["name"]]


def estimate(config: Config, alone: bool = False) -> float | str:
    """Estimate the seconds that a config's seeds take, one after another; 0 where so few steps are taken that measuring
    them would take as long; or why they are not known.

    A few real steps on random samples of the same shape are timed; a method's further passes are counted (a backward
    pass as two forward). The number of steps follows from the data set's size, as if all of it were given to clients;
    data whose size is not known are loaded for it (FedskewError where they can't be). `alone`: in one process on the
    CPU, whatever the config says, and measured however short it is.
    """
    if not alone and torch.cuda.is_available() and config.engine.device != "cpu":
        return "a GPU trains, and steps are measured on the CPU"
    try:
        facts = facts_of(config.tree()["data"])
    except KeyError:
        data = load_dataset(config, config.seeds[0])
        train, test = len(data.targets), len(data.test_targets)
        tokens = isinstance(data.inputs, torch.Tensor) and not data.inputs.is_floating_point()
        facts = DatasetFacts(data.name, (), data.in_shape, train, test, data.num_classes, tokens)
    try:
        if alone:
            return _estimated(config, facts)
        training = config.training
        clients, samples = _clients_and_samples(config, facts)
        passes = min(training.participation * clients, clients) / clients * samples * training.epochs
        steps = passes / training.batch_size * training.rounds * len(config.seeds)
        if training.steps is None and steps < _WORTH_IT and math.prod(facts.shape) < _LARGE:
            return 0.0
        at_once = min(config.engine.number_of_processes(), training.participation * clients)
        return _estimated(config, facts) / max(1, at_once)
    except Exception as error:
        return f"measuring a few steps failed: {in_one_line(error)}"


def _validation_share(config: Config) -> float:
    return config.data.validation if isinstance(config.data.validation, float) else 0.0  # "own" takes no training data


def _clients_and_samples(config: Config, facts: DatasetFacts) -> tuple[int, float]:
    """Return how many clients train, and on how many samples together, if all of the data were given to clients."""
    rule = config.partition
    target = bool(rule.parameters.get("target_client", rule.rule == "sparsity"))
    clients = max((rule.clients or 2) - target, 1)
    left = (1 - _validation_share(config)) * (1 - config.data.held_out)
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
    options = json.dumps(config.model.parameters, sort_keys=True)
    shape = (training.batch_size, training.augmentation, config.engine.threads)
    step, evaluated = _measured(config.model.name, options, facts.shape, facts.classes, facts.tokens, *shape)
    method = methods.build(config.method, training.momentum)
    cost = methods.cost(method)
    rounds = float(training.rounds)
    if method.pipeline is not None:
        encoders = method.pipeline.split(training.rounds)
        rounds = encoders + (training.rounds - encoders) * method.pipeline.batches / max(per_client, 1)
    trained = rounds * participants * per_client * step * (3 + cost.forward + 2 * cost.backward) / 3
    tests = facts.test + min(facts.train, config.data.rows or math.inf) * _validation_share(config)
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
    noise = components.keep(_random_samples, "noise", "estimate")
    data = {"name": noise, "shape": list(shape), "classes": classes, "tokens": tokens, "samples": steps * batch}
    ends: list[tuple[float, Mapping[str, Any]]] = []
    simulate(
        {
            "data": data,
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


def _random_samples(shape: list[int], classes: int, tokens: bool, samples: int) -> Dataset:
    """Return noise in the shape of another data set, all at one client."""
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
