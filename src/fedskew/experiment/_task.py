"""The task of a run: data, partition, label counts, and the target with its mix and its unlabelled samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew import components, data, partition
from fedskew.data import Dataset, Inputs, take
from fedskew.engine import PartitionedData
from fedskew.errors import ConfigError, DataError, placed
from fedskew.experiment._config import Config
from fedskew.experiment._identity import Loaded, data_seed, loaded
from fedskew.experiment._model_info import ModelInfo
from fedskew.experiment._sections import DataSection, TargetSection
from fedskew.labels import as_target
from fedskew.partition import Partition
from fedskew.randomness import Purpose, generator

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """The partitioned data of one run, which do not depend on the method.

    Attributes:
        partition: The rows of every client; a target client is the last.
        counts: Label counts of the clients that train, `(clients, classes)`.
        target: Target label mix, `(classes,)`, sum 1, or None: what accuracy on the target is measured with.
        server_target: The mix that the server knows, `(classes,)`; None: there is none, or it is estimated.
        validation: Rows of the training data that are held out.
        held_out: Rows that each client which trains holds and does not train on, to calibrate by.
        client_test: Rows that each client which trains holds and is tested on by itself.
        unlabelled: The target's samples, whose labels nobody knows; None where its mix is not estimated.
    """

    loaded: Loaded
    partition: Partition
    counts: FloatArray
    client_names: tuple[str, ...]
    target: FloatArray | None
    server_target: FloatArray | None
    validation: IntArray
    held_out: tuple[IntArray, ...]
    client_test: tuple[IntArray, ...]
    unlabelled: Inputs | None = None

    @property
    def dataset(self) -> Dataset:
        """The data set."""
        return self.loaded.dataset

    @property
    def sizes(self) -> IntArray:
        """Training samples of the clients that train, `(clients,)`; label counts of several labels sum to others."""
        return self.partition.sizes[: len(self.counts)]


def make_task(config: Config, seed: int) -> Task:
    """Load the data of a config and partition them; DataError, PartitionError or ConfigError where that fails."""
    run, seed = seed, data_seed(config, seed)
    source = loaded(config, seed)
    dataset, strata = source.dataset, source.dataset.strata
    if dataset.multi_label:
        _check_several(config)
    usable = _usable(dataset, strata, config.data.rows, generator(seed, Purpose.ROWS))
    kept, validation = _hold_out(dataset, strata, usable, config.data.validation, generator(seed, Purpose.VALIDATION))
    divided = _divide(config, dataset, strata, kept, seed)
    training = len(divided.indices) - config.has_target_client
    target, server_target = _targets(config.target, dataset, divided.counts.astype(np.float64), training)
    if config.partition.oracle:
        divided = _oracle(divided, training, kept, strata, target, seed)
    if config.partition.baseline is not None:
        held, place = divided.indices, generator(seed, Purpose.BASELINE).permutation(training)[run % training]
        own = [np.concatenate(held[:training])] if config.partition.baseline == "pooled" else [held[place]]
        rule = f"{divided.rule}, {config.partition.baseline}"
        divided = Partition.of([*own, *held[training:]], dataset.labels, dataset.num_classes, rule)
        training = 1
    divided = _set_apart(divided, training, dataset.labels, strata, config.data, seed)
    nothing = (np.empty(0, dtype=np.int64),) * training
    held_out, client_test = divided.held_out[:training] or nothing, divided.test[:training] or nothing
    if config.data.client_test and not sum(map(len, client_test)):
        raise ConfigError(
            f"data.client_test: {config.data.client_test:g} of each client is not one sample; set a larger share, or "
            "fewer clients"
        )
    counts = divided.counts[:training].astype(np.float64)
    if not divided.sizes[:training].any():
        raise ConfigError("partition.clients: no client that trains has a sample; set fewer clients")
    own_names = config.partition.rule == "natural" and training == len(dataset.client_names)
    names = dataset.client_names if own_names else tuple(map(str, range(training)))
    task = Task(source, divided, counts, names, target, server_target, validation, held_out, client_test)
    if config.target.is_estimated:
        _check_held_out(config.data.held_out, held_out)
        task = replace(task, unlabelled=_unlabelled(config, task, seed))
    return task


def some_samples(dataset: Dataset) -> Tensor:
    """Return two samples, the same where there is but one."""
    return dataset.inputs.index_select(0, torch.arange(2, device=dataset.inputs.device) % len(dataset.targets))


def _check_several(config: Config) -> None:
    """Refuse what is for samples of one class."""
    refused = (
        ("target.mix", config.target.is_estimated, "a mix is estimated of classes that exclude each other"),
        ("partition.oracle", config.partition.oracle, "samples with several labels can't be dealt to a label mix"),
        ("evaluation.clients", config.evaluation.clients, "accuracies by majority and minority are of one class"),
    )
    for key, is_set, why in refused:
        if is_set:
            raise ConfigError(f"{key}: {why}, and samples of these data have several labels, or none; leave it out")


def held_out_rows(task: Task) -> list[IntArray]:
    """Return the labelled samples that nobody trains on, by holder: the clients' own, else the validation samples."""
    own = [rows for rows in task.held_out if len(rows)]
    return own or [rows for rows in [task.validation] if len(rows)]


def held_out_data(task: Task) -> PartitionedData:
    """Return the samples that clients hold and do not train on, as engines take the data of clients."""
    rows, dataset = task.held_out, task.dataset
    labels = dataset.targets.numpy()
    counts = np.array([np.bincount(labels[own], minlength=dataset.num_classes) for own in rows], dtype=np.float64)
    return PartitionedData(dataset.inputs, dataset.targets, rows, counts)


def _usable(dataset: Dataset, labels: IntArray, size: int | None, rng: np.random.Generator) -> IntArray:
    """Return the training rows that a config uses, without those that the data set itself sets aside."""
    rows = np.arange(len(labels))
    free = rows if dataset.validation is None else np.setdiff1d(rows, dataset.validation)
    if size is None:
        return free
    if size > len(free):
        raise ConfigError(f"data.rows: {size:,} are more than {dataset.name!r} has training samples ({len(free):,})")
    return free[partition.stratified(labels[free], size, rng)]


def _hold_out(
    dataset: Dataset, labels: IntArray, free: IntArray, share: float | Literal["own"], rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Rows to train on and rows held out: the data set's own, or the same share of every class, rounded down."""
    own = dataset.validation
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


def _set_apart(
    divided: Partition, training: int, labels: IntArray, strata: IntArray, section: DataSection, seed: int
) -> Partition:
    """Set apart what clients are tested on and hold out, unless it is stored so; a target client keeps all."""
    kept, rule = list(divided.indices), divided.rule
    apart: dict[str, tuple[IntArray, ...]] = {"test": (), "held_out": ()}
    for name, share, of, purpose, what in (
        ("test", section.client_test, 1.0, Purpose.CLIENT_TEST, "it is tested on"),
        ("held_out", section.held_out, 1 - section.client_test, Purpose.HELD_OUT, "are held out"),
    ):
        if share and not (stored := getattr(divided, name)):
            parts = [
                partition.hold_out(
                    rows, strata, share / of, generator(seed, purpose, 0, client), every_class=section.client_test > 0
                )
                for client, rows in enumerate(kept[:training])
            ]
            kept[:training] = [own for own, _ in parts]
            apart[name] = (*(own for _, own in parts), *(rows[:0] for rows in kept[training:]))
            rule = f"{rule}, without the {share:.3g} of each client's samples that {what}"
        elif share:
            apart[name] = stored
    made = Partition.of(kept, labels, divided.num_classes, rule)
    return replace(made, held_out=apart["held_out"], test=apart["test"])


def _divide(config: Config, dataset: Dataset, strata: IntArray, kept: IntArray, seed: int) -> Partition:
    """Return the partition of the kept rows of the data set; where there is a target client, it is the last."""
    section, labels, classes = config.partition, dataset.labels, dataset.num_classes
    if section.rule == "file":
        stored = Partition.load(config.place(section.parameters["path"]))
        stored.check(labels)
        if not np.isin(np.concatenate([*stored.indices, *stored.held_out, *stored.test]), kept).all():
            raise ConfigError(
                "partition.path: some of its samples are held out or left out; set data.validation to 0, no data.rows"
            )
        return stored
    rule: Any = "natural"
    if section.rule == "natural":
        if dataset.clients is None:
            raise ConfigError(f"partition.rule: data set {dataset.name!r} defines no clients; choose another rule")
        shares = partition.natural_split(dataset.clients[kept], len(dataset.client_names))
        if section.clients not in (None, len(shares)):
            shares = partition.grouped(shares, section.clients)
    else:
        rule = config.rule()
        own, rng = strata[kept], generator(seed, Purpose.PARTITION)
        known = max(classes, int(own.max(initial=0)) + 1)  # one more for samples without any of several labels
        if components.covers(rule, "split_domains", "split") and dataset.domains is not None:
            shares = rule.split_domains(own, dataset.domains[kept], section.clients, rng, num_classes=known)
        else:
            shares = rule.split(own, section.clients, rng, num_classes=known)
    return Partition.of([kept[rows] for rows in shares], labels, classes, rule)


def _oracle(
    divided: Partition, training: int, kept: IntArray, labels: IntArray, target: FloatArray | None, seed: int
) -> Partition:
    """Return the partition with the target mix at every client that trains, dealt from `kept` but a target client's."""
    if target is None:
        raise ConfigError("partition.oracle: clients get the target mix, and there is none; set target.mix")
    others = divided.indices[training:]
    sizes = [len(rows) for rows in divided.indices[:training]]
    dealt = partition.oracle(sizes, np.setdiff1d(kept, others), labels, target, generator(seed, Purpose.ORACLE))
    rule = f"{divided.rule}, dealt again with the target's mix"
    return Partition.of([*dealt, *others], labels, divided.num_classes, rule)


def target_mix(
    mix: str | list[float] | None, classes: int, known: Mapping[str, FloatArray], unknown: Mapping[str, str], key: str
) -> FloatArray | None:
    """Return the label mix, `(classes,)`, sum 1, that a key such as `target.mix` stands for; None where it is None.
    `known` are amounts for names that there is a mix for, `unknown` why there is none for others (ConfigError)."""
    if mix is None:
        return None
    if isinstance(mix, str) and mix not in {"uniform", *known}:
        raise ConfigError(f"{key}: {mix!r} {unknown[mix]}")
    amounts = np.ones(classes) if mix == "uniform" else known[mix] if isinstance(mix, str) else np.array(mix, float)
    with placed(""):
        return as_target(amounts, classes, key, written=isinstance(mix, list))


def _targets(
    section: TargetSection, dataset: Dataset, counts: FloatArray, training: int
) -> tuple[FloatArray | None, FloatArray | None]:
    """Return the target's label mix, `(classes,)`, and the mix that the server knows; None where there is none."""
    if not section.is_estimated:
        if section.mix == "truth" and section.truth is None:
            raise ConfigError(
                "target.mix: 'truth' tells the server target.truth, which is not set; set it, or give shares"
            )
        mix = section.truth if section.mix == "truth" else section.mix
        truth = server_target = _target(mix, "target.mix", dataset, counts, training)
        if section.truth is not None:
            truth = _target(section.truth, "target.truth", dataset, counts, training)
        return truth, server_target
    own, has_target_client = isinstance(section.unlabelled, str), training < len(counts)
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
    return _target(section.truth, "target.truth", dataset, counts, training), None


def _target(
    mix: str | list[float] | None, key: str, dataset: Dataset, counts: FloatArray, training: int
) -> FloatArray | None:
    """Return the target label mix that a key stands for, `(classes,)`, sum 1; None where the task has none."""
    own = {"client": counts[-1]} if training < len(counts) else {}
    if mix is None:
        mix = "client" if own else "data" if dataset.target is not None else None
    if mix == "data" and dataset.target is not None:
        return dataset.target
    return target_mix(
        mix,
        dataset.num_classes,
        known={**own, "pooled": counts[:training].sum(axis=0)},
        unknown={
            "client": "needs a partition rule with a target client, such as sparsity",
            "data": f"is the data set's own mix, and {dataset.name!r} defines no target; give the shares as a list",
        },
        key=key,
    )


def _check_held_out(share: float, held_out: Sequence[IntArray]) -> None:
    """Refuse to estimate a mix where clients hold no sample out."""
    if not share:
        raise ConfigError(
            "data.held_out: the target's mix is estimated by labelled samples that clients don't train on, and none "
            "are held out; set it to a share such as 0.2"
        )
    if not sum(map(len, held_out)):
        raise ConfigError(f"data.held_out: {share:g} of each client is not one sample; set a larger share")


def _unlabelled(config: Config, task: Task, seed: int) -> Inputs:
    """Return the samples of a target whose mix is estimated, as networks take them."""
    given, dataset, rows = config.target.unlabelled, task.dataset, task.partition.indices[-1]
    if isinstance(given, str):
        path, form = config.place(given), (dataset.in_shape, dataset.window)
        with placed("target.unlabelled: ", DataError, of=DataError):
            found = data.unlabelled([Path(path).expanduser()], *form, encoder=dataset.encoder)
            read = torch.cat([some.inputs for some in found])
        with placed(f"target.unlabelled: {path}: "):
            return ModelInfo.of(dataset).normalise(read)
    if len(task.partition.indices) == len(task.counts):  # no target client
        assert task.target is not None, "checked by `_targets`"
        rng = generator(seed, Purpose.UNLABELLED)
        rows = _draw_target(dataset.targets.numpy(), task.validation, task.target, given, rng)
    return take(dataset.inputs, torch.from_numpy(rows))


def _draw_target(labels: IntArray, free: IntArray, mix: FloatArray, size: int, rng: np.random.Generator) -> IntArray:
    """Draw samples with a label mix from `free` ones, ascending; fewer than `size` where a class runs short."""
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
