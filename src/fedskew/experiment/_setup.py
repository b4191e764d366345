"""Builds a simulation from a config and a seed: data, partition, label counts, target, federation, training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew import components, methods, models, partition, torchrun
from fedskew.data import Dataset, Inputs, take
from fedskew.engine import (
    ClientSamples,
    ClientStates,
    Conditions,
    FedConcatRunner,
    Federation,
    LocalWork,
    Observer,
    PartitionedData,
    RoundRunner,
    answers_in_sum,
    cohort_size,
    summable,
)
from fedskew.errors import ArgumentError, ConfigError, RunError
from fedskew.experiment._backends import make_backend
from fedskew.experiment._batches import changed_batches, check_batches, refuses_one
from fedskew.experiment._config import Config
from fedskew.experiment._dataset import content_of, data_seed, load_dataset
from fedskew.experiment._evaluations import ClientEvaluations, LabelledData, LocalEvaluator
from fedskew.experiment._finish import LocalFinisher
from fedskew.experiment._folder import RunFolder, TaskInfo
from fedskew.experiment._identity import Identity
from fedskew.experiment._loop import TrainingLoop
from fedskew.experiment._model_info import ModelInfo
from fedskew.experiment._notes import label_notes, network_notes, sums_notes
from fedskew.experiment._target import TargetWatch, make_estimation
from fedskew.experiment._target_samples import check_held_out, targets, unlabelled_samples
from fedskew.experiment._trackers import make_trackers
from fedskew.experiment._work import make_network, make_protection, make_work
from fedskew.labels import privatize
from fedskew.models import FlatModel, ModelState
from fedskew.partition import Partition
from fedskew.pipelines import FedConcat
from fedskew.randomness import Purpose, generator, stream_key
from fedskew.server_updates import Plain
from fedskew.weighting import BySums, Facts, Uniform

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """The partitioned data of one run, which do not depend on the method.

    Attributes:
        dataset: The data set.
        partition: The rows of every client; a target client is the last.
        counts: Label counts of the clients that train, `(clients, classes)`.
        client_names: Their names.
        target: Target label mix, `(classes,)`, sum 1, or None: what accuracy on the target is measured with.
        server_target: The mix that the server knows, `(classes,)`; None: there is none, or it is estimated.
        validation: Rows of the training data that are held out.
        held_out: Rows that each client which trains holds and does not train on; none of them are in `partition`.
        unlabelled: The target's samples, whose labels nobody knows; None where its mix is not estimated.
    """

    dataset: Dataset
    partition: Partition
    counts: FloatArray
    client_names: tuple[str, ...]
    target: FloatArray | None
    server_target: FloatArray | None
    validation: NDArray[np.int64]
    held_out: tuple[NDArray[np.int64], ...]
    unlabelled: Inputs | None


def make_task(config: Config, seed: int) -> Task:
    """Load the data of a config and partition them.

    Args:
        config: The config.
        seed: The seed, in place of the config's; `partition.seed` comes before it.

    Returns:
        The task.

    Raises:
        DataError: The data can't be loaded.
        PartitionError: The rule can't divide them.
        ConfigError: The config does not fit the data.
    """
    seed = data_seed(config, seed)
    dataset = load_dataset(config, seed)
    labels = dataset.targets.numpy()
    usable = _usable(dataset, config.data.rows, generator(seed, Purpose.ROWS))
    kept, validation = _hold_out(dataset, usable, config.data.validation, generator(seed, Purpose.VALIDATION))
    divided, names, has_target_client = _divide(config, dataset, labels, kept, seed)
    target, server_target = targets(config.target, dataset, divided.counts.astype(np.float64), has_target_client)
    if config.partition.oracle:
        divided = _oracle(divided, kept, labels, target, has_target_client, generator(seed, Purpose.ORACLE))
    divided, held_out = _hold_out_of_clients(divided, labels, config.data.held_out, has_target_client, seed)
    counts = divided.counts.astype(np.float64)
    if has_target_client:
        counts, names = counts[:-1], names[:-1]
    if counts.sum() == 0:
        raise ConfigError("partition.clients: no client that trains has a sample; set fewer clients")
    unlabelled = None
    if config.target.is_estimated:
        check_held_out(config.data.held_out, held_out)
        last = divided.indices[-1] if has_target_client else None
        unlabelled = unlabelled_samples(config, dataset, last, validation, target, generator(seed, Purpose.UNLABELLED))
    return Task(dataset, divided, counts, names, target, server_target, validation, held_out, unlabelled)


def held_out_rows(task: Task) -> list[NDArray[np.int64]]:
    """Return the labelled samples that nobody trains on, by holder: the clients' own, else the validation samples.

    Args:
        task: The task.
    """
    own = [rows for rows in task.held_out if len(rows)]
    return own or [rows for rows in [task.validation] if len(rows)]


def held_out_data(task: Task) -> PartitionedData:
    """Return the samples that clients hold and do not train on, as engines take the data of clients.

    Args:
        task: The task.
    """
    rows, dataset = task.held_out, task.dataset
    labels = dataset.targets.numpy()
    counts = np.array([np.bincount(labels[own], minlength=dataset.num_classes) for own in rows], dtype=np.float64)
    return PartitionedData(dataset.inputs, dataset.targets, rows, counts)


def make_training_loop(config: Config, seed: int, folder: Path | None = None, task: Task | None = None) -> TrainingLoop:
    """Make the training loop of a simulation: one seed of one config on this machine.

    Args:
        config: The config; its `seeds` are ignored.
        seed: The seed.
        folder: Where the run is written; None: it stays in memory.
        task: The data, if it has been made already.

    Returns:
        The loop.

    Raises:
        DataError, PartitionError, ConfigError: The data can't be loaded or divided, or the parts don't fit together.
    """
    config = config.for_seed(seed)
    device = choose_device(config.engine.device)
    task = task or make_task(config, seed)
    dataset, held_out = task.dataset, torch.from_numpy(task.validation)
    test = LabelledData(dataset.test_inputs.to(device), dataset.test_targets.to(device))
    validation = (
        LabelledData(take(dataset.inputs, held_out).to(device), dataset.targets[held_out].to(device))
        if len(held_out)
        else None
    )
    clients = ClientStates(None if folder is None else folder / "checkpoint" / "clients")
    observe = ClientEvaluations(config, test, task.counts) if config.evaluation.clients else None
    runner, untrained, model = _make_runner(config, seed, task, device, clients, observe)
    one_fails = refuses_one(model.module, dataset.inputs.index_select(0, torch.tensor([0])))
    if one_fails:
        check_batches(config, task.client_names, task.counts.sum(axis=1).astype(np.int64))
    if folder is not None and (found := changed_batches(folder, config, one_fails)):
        raise RunError(
            f"{folder}: since this run, {found[0]}; start over with --fresh, which keeps the old folder, or write "
            "elsewhere with --out"
        )
    method = methods.build(config.method, config.training.momentum)
    tested = np.bincount(dataset.test_targets[dataset.test_targets >= 0].numpy(), minlength=dataset.num_classes)
    notes = label_notes(method, task.counts, dataset.classes, task.target, tested)
    notes += network_notes(method, model.module)
    notes += sums_notes(config, method)
    info = TaskInfo(task.counts.astype(np.int64), task.client_names, dataset.classes, task.target, notes)
    files = None
    if folder is not None:
        files = RunFolder(folder, task.partition, Identity.of(config, content_of(config, dataset)))
    return TrainingLoop(
        config=config,
        runner=runner,
        untrained=untrained,
        model=model,
        info=ModelInfo(dataset.classes, dataset.in_shape, _is_tokens(dataset.inputs), dataset.mean, dataset.std),
        evaluate=LocalEvaluator(model, test, validation, dataset.num_classes, task.target, task.server_target),
        task=lambda: info,
        clients=clients,
        folder=files,
        watch=_watch(seed, runner, model, task),
        finisher=_finisher(config, seed, task, model),
    )


def _finisher(config: Config, seed: int, task: Task, model: FlatModel) -> LocalFinisher | None:
    """Make the finisher of the trained model; None if the method has no finish."""
    component = methods.build(config.method, config.training.momentum).finish
    if component is None:
        return None
    dataset, clients, rows = task.dataset, len(task.counts), task.partition.indices
    if "held_out" in component.asks:
        _check_held_out_classes(task, config.method["finish"]["name"])

    def held_by(some: Sequence[NDArray[np.int64]]) -> list[ClientSamples]:
        unused = np.zeros(dataset.num_classes)  # counts, of which a finish has its own
        return [ClientSamples(dataset.inputs, dataset.targets, own, unused) for own in some if len(own)]

    target = held_by(rows[clients:])
    if task.unlabelled is not None:
        size = len(task.unlabelled)
        none = torch.zeros(size, dtype=torch.int64)
        target = [ClientSamples(task.unlabelled, none, np.arange(size), np.zeros(dataset.num_classes))]
    return LocalFinisher(
        component=component,
        model=model,
        holders={
            "training": held_by(rows[:clients]),
            "held_out": held_by(held_out_rows(task)),
            "target": target,
        },
        samples=dataset.inputs.index_select(0, torch.zeros(2, dtype=torch.int64)),
        target=_noisy_target(task.server_target, config.target.noise, seed),
        is_estimated=config.target.is_estimated,
        seed=seed,
    )


def _check_held_out_classes(task: Task, name: str) -> None:
    """Refuse a finish whose held-out samples can't tell it anything; that there are some is checked elsewhere."""
    held = held_out_rows(task)
    if not held:
        return
    classes = np.unique(task.dataset.targets.numpy()[np.concatenate(held)])
    if len(classes) < 2:
        raise ConfigError(
            f"method.finish: {name} compares classes, and all samples that are held out are of class {classes[0]}; set "
            "a larger data.held_out or data.validation"
        )
    has_samples = task.unlabelled is not None or len(task.partition.indices) > len(task.counts)
    if task.server_target is not None and not has_samples and not task.server_target[classes].any():
        raise ConfigError(
            f"method.finish: {name} moves the model to target.mix, which has no share of a class that is held out; set "
            "a larger data.held_out or data.validation, or another mix"
        )


def _watch(seed: int, runner: RoundRunner, model: FlatModel, task: Task) -> TargetWatch | None:
    """Make the watch that estimates the target's mix after a round; None if it is not estimated."""
    if task.unlabelled is None:
        return None
    assert isinstance(runner, Federation), "the config has been checked"
    return TargetWatch(runner, model, held_out_data(task), task.unlabelled, seed)


def try_out(config: Config, seed: int, folder: Path, task: Task | None = None) -> None:
    """Set a run up as far as its first round, on the CPU and without writing, to raise now for what can't be made.

    Args:
        config: The config; its `seeds` are ignored.
        seed: The seed.
        folder: Where the run is going to be written.
        task: The data, if it has been made already.

    Raises:
        DataError, PartitionError, ConfigError: The data can't be loaded or divided, or the parts don't fit together.
        MissingPackageError: An optional package is missing.
    """
    choose_device(config.engine.device)
    make_trackers(config.output.trackers, folder)
    engine = config.engine.model_copy(update={"device": "cpu"})
    loop = make_training_loop(config.model_copy(update={"engine": engine}), seed, folder, task)
    loop.runner.start(loop.untrained)  # where an optional package is missing, a component says so here


def _is_tokens(inputs: Inputs) -> bool:
    """Return whether samples are token ids; what is stored on disk are images."""
    return isinstance(inputs, torch.Tensor) and not inputs.is_floating_point()


def choose_device(name: str) -> torch.device:
    """Return the device of a config: `auto` is a GPU where there is one. On a GPU, TF32 is off.

    Raises:
        ConfigError: The config asks for a GPU, and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("engine.device: this machine has no CUDA device; use 'cpu' or 'auto'")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", torchrun.local_rank()) if torchrun.launched() else torch.device("cuda")


def _make_runner(
    config: Config, seed: int, task: Task, device: torch.device, clients: ClientStates, observe: Observer | None
) -> tuple[RoundRunner, ModelState, FlatModel]:
    """Return the runner of a method's rounds, the untrained model, and the network for evaluated models."""
    training, dataset = config.training, task.dataset
    method = methods.build(config.method, training.momentum)
    some = dataset.inputs.index_select(0, torch.arange(2, device=dataset.inputs.device) % len(dataset.targets))
    network = make_network(config, seed, method, dataset.num_classes, dataset.in_shape, some.cpu())
    model = FlatModel(network.to(device))
    model.network.train().program(some.to(device))  # what is done to the network stands in the run's record
    samples = PartitionedData(
        dataset.inputs.to(device), dataset.targets.to(device), task.partition.indices, task.counts
    )
    work = make_work(config, seed, method, samples, dataset.mean, dataset.std)
    conditions = config.conditions
    noisy = (
        None
        if conditions.count_epsilon is None
        else privatize(task.counts, conditions.count_epsilon, rng=generator(seed, Purpose.NOISE))
    )
    weighed = noisy if conditions.count_use == "all" else None
    if weighed is not None and config.engine.label_counts == "summed":
        weighed = summable(weighed)
    size = cohort_size(training.participation, len(task.counts))
    target = task.target if config.target.is_estimated else _noisy_target(task.server_target, config.target.noise, seed)
    if method.pipeline is not None:
        size //= method.pipeline.clusters  # each cluster's part of a cohort trains by itself
    federation = Federation(
        method=method,
        backend=make_backend(config.engine, model, work, observe, size),
        counts=task.counts,
        target=target,
        participation=training.participation,
        seed=seed,
        epochs=training.most_epochs,
        steps=training.steps,
        conditions=Conditions(conditions.dropout, conditions.dropout_rule, conditions.stragglers),
        seen=noisy,
        weighed=weighed,
        clients=clients,
        weight_limit=training.weight_limit,
        estimation=make_estimation(config, dataset.num_classes),
        masked=config.engine.updates == "masked",
        protection=make_protection(config, model, len(task.counts)),
        announced=_announced(config, method, task.counts if weighed is None else weighed, target),
        constant_bytes=model.constant_bytes(some.to(device)),
    )
    if method.pipeline is not None:
        runner = _fedconcat(method.pipeline, config, federation, model, work, observe)
        return runner, model.read_state(), runner.whole
    return federation, model.read_state(), model


def _announced(config: Config, method: methods.Method, counts: FloatArray, target: FloatArray | None) -> Facts | None:
    """Return the sums that all clients are told if label counts are only summed; None if clients report them."""
    if config.engine.label_counts == "reported":
        return None
    weighting = method.weighting
    assert isinstance(weighting, BySums), "the config has been checked"
    try:
        return weighting.announce(lambda question: answers_in_sum(weighting, counts, question), target, len(counts))
    except ArgumentError as error:
        raise ConfigError(f"engine.label_counts: {error}") from None


def _fedconcat(
    pipeline: FedConcat,
    config: Config,
    federation: Federation,
    network: FlatModel,
    work: LocalWork,
    observe: Observer | None,
) -> FedConcatRunner:
    """Return the runner of a pipeline, around a federation that trains the config's network."""
    seed = federation.seed
    counts = federation.counts if federation.seen is None else federation.seen
    try:
        cluster_of = pipeline.divide(counts, generator(seed, Purpose.CLUSTERS))
    except ArgumentError as error:
        raise ConfigError(f"method.pipeline.{error}") from None
    drawn = torch.Generator().manual_seed(stream_key(seed, Purpose.MODEL_ADAPT))
    try:
        whole = models.Concatenated(network.module, pipeline.clusters, drawn)
    except ArgumentError as error:
        raise ConfigError(f"model.name: FedConcat can't use {config.model.name}: {error}") from None
    whole_model = FlatModel(whole, buffers=False)
    head = replace(
        federation,
        method=replace(federation.method, weighting=Uniform(), server_update=Plain(), pipeline=None),
        backend=make_backend(config.engine, whole_model, replace(work, hooks={}), observe, federation.cohort_size),
        epochs=pipeline.batches,  # even a client with a single batch can take all its steps
        steps=pipeline.batches,
        conditions=replace(federation.conditions, stragglers=0.0),
        constant_bytes=0,  # its encoders' buffers are no part of the state
    )
    return FedConcatRunner(
        pipeline=pipeline,
        encoder_rounds=pipeline.split(config.training.rounds),
        cluster_of=cluster_of,
        encoders=federation,
        head=head,
        network=network,
        whole=whole_model,
    )


def _noisy_target(target: FloatArray | None, noise: float, seed: int) -> FloatArray | None:
    """Return the target mix that the server is given (see `TargetSection.noise`)."""
    if target is None or noise == 0:
        return target
    noisy = target + noise * np.maximum(generator(seed, Purpose.TARGET).standard_normal(len(target)), 0)
    shares: FloatArray = noisy / noisy.sum()
    return shares


def _usable(dataset: Dataset, size: int | None, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the training rows that a config uses, without those that the data set itself sets aside."""
    labels = dataset.targets.numpy()
    rows = np.arange(len(labels))
    free = rows if dataset.validation is None else np.setdiff1d(rows, dataset.validation)
    if size is None:
        return free
    if size > len(free):
        raise ConfigError(f"data.rows: {size:,} are more than the {len(free):,} training samples of {dataset.name!r}")
    return free[partition.stratified(labels[free], size, rng)]


def _hold_out(
    dataset: Dataset, free: NDArray[np.int64], share: float | Literal["own"], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train on and rows held out: the data set's own, or the same share of every class, rounded down."""
    own, labels = dataset.validation, dataset.targets.numpy()
    if share == "own":
        if own is None:
            raise ConfigError(
                f"data.validation: data set {dataset.name!r} has no validation samples; give a share, as 0.1"
            )
        return free, np.sort(own)
    held = [np.empty(0, dtype=np.int64)]
    if share > 0:
        for label in np.unique(labels[free]):
            rows = free[labels[free] == label]
            held.append(rng.permutation(rows)[: int(share * len(rows))])
    validation = np.sort(np.concatenate(held))
    return np.setdiff1d(free, validation), validation


def _hold_out_of_clients(
    divided: Partition, labels: NDArray[np.int64], share: float, has_target_client: bool, seed: int
) -> tuple[Partition, tuple[NDArray[np.int64], ...]]:
    """Return the partition without what clients don't train on, and that; a target client holds out nothing."""
    training = len(divided.indices) - has_target_client
    if not share:
        return divided, (np.empty(0, dtype=np.int64),) * training
    parts = [
        partition.hold_out(rows, labels, share, generator(seed, Purpose.HELD_OUT, 0, client))
        for client, rows in enumerate(divided.indices[:training])
    ]
    kept = [*(own for own, _ in parts), *divided.indices[training:]]
    rule = f"{divided.rule}, without the {share:.3g} of each client's samples that are held out"
    return Partition.of(kept, labels, divided.num_classes, rule), tuple(held for _, held in parts)


def _divide(
    config: Config, dataset: Dataset, labels: NDArray[np.int64], kept: NDArray[np.int64], seed: int
) -> tuple[Partition, tuple[str, ...], bool]:
    """Return the partition of the kept rows (of the data set), client names, whether the last is a target client."""
    section, classes = config.partition, dataset.num_classes
    if section.rule == "file":
        stored = Partition.load(config.place(section.parameters["path"]))
        stored.check(labels)
        if not np.isin(np.concatenate(stored.indices), kept).all():
            raise ConfigError(
                "partition.path: some of its samples are held out or left out; set data.validation to 0, no data.rows"
            )
        names = tuple(map(str, range(len(stored.indices))))
        return stored, names, bool(section.parameters.get("target_client", False))
    if section.rule == "natural":
        if dataset.clients is None:
            raise ConfigError(f"partition.rule: data set {dataset.name!r} defines no clients; choose another rule")
        names = dataset.client_names
        shares = partition.natural_split(dataset.clients[kept], len(names))
        if section.clients not in (None, len(names)):
            shares, names = partition.grouped(shares, section.clients), tuple(map(str, range(section.clients)))
        return Partition.of([kept[rows] for rows in shares], labels, classes, "natural"), names, False
    assert section.clients is not None, "the config has been checked"
    rule = components.make_component(partition.INDEX, {"name": section.rule, **section.parameters}, "partition")
    rng = generator(seed, Purpose.PARTITION)
    names = tuple(map(str, range(section.clients)))
    by_domain = isinstance(rule, partition.DomainRule) and components.covers(rule, "split_domains", "split")
    if by_domain and dataset.domains is not None:
        shares = rule.split_domains(labels[kept], dataset.domains[kept], section.clients, rng, num_classes=classes)
    else:
        shares = rule.split(labels[kept], section.clients, rng, num_classes=classes)
    return Partition.of([kept[rows] for rows in shares], labels, classes, rule), names, rule.target_client


def _oracle(
    divided: Partition,
    kept: NDArray[np.int64],
    labels: NDArray[np.int64],
    target: FloatArray | None,
    has_target_client: bool,
    rng: np.random.Generator,
) -> Partition:
    """Return the partition with the target mix at every client that trains, dealt from `kept` but a target client's."""
    if target is None:
        raise ConfigError("partition.oracle: clients get the target mix, and there is none; set target.mix")
    training = len(divided.indices) - has_target_client
    sizes = [len(rows) for rows in divided.indices[:training]]
    free = np.setdiff1d(kept, divided.indices[-1]) if has_target_client else kept
    dealt = partition.oracle(sizes, free, labels, target, rng)
    rule = f"{divided.rule}, dealt again with the target's mix"
    return Partition.of([*dealt, *divided.indices[training:]], labels, divided.num_classes, rule)
