"""Configs: read from TOML or keyword arguments, checked before anything runs.

A resolved config has every default filled in, so its `config.toml` alone replays the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import tomli_w
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from fedskew import components, data, methods, models, own_code, partition
from fedskew.errors import ArgumentError, ConfigError, FedskewError, nearest
from fedskew.experiment._given import digest_of_code, given_network
from fedskew.experiment._toml import DEEPEST, is_deep, put, read_tree
from fedskew.files import write_text
from fedskew.labels import MixMethod, as_target, check_shares
from fedskew.parameters import plain as plain_number
from fedskew.privacy import most_rounds, noise_for

FloatArray = NDArray[np.float64]

IDENTITY = "identity.json"
"""Where a run was made, and from what, as its folder records it: see `_identity.py`."""

ESTIMATES = ("unlabelled", "warmup", "every", "estimator", "bins", "on_misfit", "ask")
"""Keys of `[target]` that say how its mix is estimated."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]


class Section(BaseModel):
    """A table of a config; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class Named(BaseModel):
    """A table that names a component; its further keys are parameters, checked when the component is made."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, ser_json_inf_nan="constants")

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the named component."""
        return dict(self.model_extra or {})


class DataSection(Named):
    """The data set, with the parameters of its reader.

    Attributes:
        name: Name of a reader, or `module:function` for one of your own.
        root: Folder of its files; None: the environment variable `FEDSKEW_DATA`.
        validation: Share of the training samples of each class that is held out, for early stopping and for choosing
            values; "own": the samples that the data set itself sets aside, which are never trained on in any case.
        held_out: Share of each client's samples that it does not train on, drawn at random by class: it calibrates on
            them, and with them the label mix of a target is estimated. Label counts are those of the other samples.
        rows: Use only so many of the training samples, drawn at random with the same share of every class (and the
            validation samples among them); None: all.
    """

    name: str
    root: str | None = None
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] | Literal["own"] = 0.0
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    rows: Annotated[int, Field(ge=1)] | None = None


class PartitionSection(Named):
    """How the training samples are divided among clients, with the rule's parameters.

    Attributes:
        rule: A partition rule; "natural": the data set's own clients; "file": a saved partition, whose parameters are
            `path` and `target_client`, whether its last client is the target.
        clients: Number of clients, including a target client where the rule has one. "natural" merges whole clients
            until so many are left (None: it keeps all); "file" has its own number.
        seed: Seed of all that decides who holds what: samples that are held out or left out, and the rule's draws. With
            it, runs of different `seeds` train on one and the same federation; None: a run's own seed.
        oracle: Deal the clients that train as many samples once more, from all training samples but a target client's,
            so that each has the target mix (the Oracle of FedPALS).
    """

    rule: str
    clients: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    oracle: bool = False


class ModelSection(Named):
    """The network, with its options.

    Attributes:
        name: Name of a network, or `module:function` for one of your own.
    """

    name: str


class TrainingSection(Section):
    """Rounds, and the local training of each client in a round.

    Attributes:
        rounds: Number of rounds.
        participation: Share of the clients that is selected in each round.
        weight_limit: No client's update counts for more than this share, whatever the weighting says; what is cut off
            goes to the others by their weights. None: no limit.
        epochs: Local epochs; a fraction such as 0.5 trains on as many of an epoch's batches, at least one.
        steps: Local steps, the same at every client, in place of `epochs`; None: as `epochs` says.
        batch_size: Samples in a batch.
        smallest_batch: A last batch of an epoch with fewer samples is left out.
        lr: Learning rate of the first round.
        lr_decay: Factor of the learning rate from round to round.
        momentum: Momentum of SGD.
        weight_decay: L2 penalty, added to the gradient.
        persist_momentum: Each client keeps its momentum buffer between participations, as FedVLS's public code does for
            its baselines.
        teacher_train_mode: The teacher's batch norm uses batch statistics, as FedVLS's public code does for itself.
        augmentation: Random changes of a batch's inputs, by name; None: none.
    """

    rounds: Annotated[int, Field(ge=0)]
    participation: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    weight_limit: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    epochs: Annotated[int | Annotated[float, Field(allow_inf_nan=False)], Field(ge=0)] = 1
    steps: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 64
    smallest_batch: Annotated[int, Field(ge=1)] = 1
    lr: Positive = 0.01
    lr_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    persist_momentum: bool = False
    teacher_train_mode: bool = False
    augmentation: str | None = None

    @pydantic.field_validator("epochs")
    @classmethod
    def _whole(cls, epochs: float) -> float:
        """Return a whole number of epochs as one, so that 5.0 and 5 are the same config."""
        return int(epochs) if epochs == int(epochs) else epochs

    @property
    def most_epochs(self) -> float:
        """Local epochs, or more than a client can need for `steps`."""
        return self.epochs if self.steps is None else self.steps


class TargetSection(Section):
    """The label mix that the model is trained for.

    Attributes:
        mix: Shares by class, sum 1, or percentages, or counts; "uniform"; "pooled": that of all clients that train;
            "client": that of the partition's target client; "data": the one that the data set defines; "truth":
            `truth`; "estimate": estimated in the run, from the target's unlabelled samples and those that clients hold
            out (`data.held_out`); None: "client" or "data", whichever there is.
        truth: The mix by which accuracy on the target is measured, where the server is told another or estimates it;
            None: `mix`, or where that is estimated, the target client's. With "estimate" and no target client,
            unlabelled samples of this mix are drawn from the validation samples.
        unlabelled: Number of unlabelled samples of a simulated target; fewer are drawn where a class runs short. Or
            where your own unlabelled samples of the target are: a folder of images, or an .npz file with an array x;
            `truth` may then be left out.
        noise: The server is given the mix plus noise * max(0, a standard normal draw) in each class, normalised
            (FedPALS, appendix A.4); accuracy on the target is measured with the exact mix.
        warmup: With "estimate": the round after which the first estimate is made. Until then, and while none is sure
            enough, weightings that need a target give way to FedAvg's.
        every: With "estimate": rounds from one estimate to the next; the newest that is sure enough is used.
        estimator: How the mix is estimated (see `fedskew.labels.estimate_mix`).
        bins: Confidence classes into which the samples of a predicted class are divided. With 1 nothing tests whether
            the target looks like a mix of the clients' classes.
        on_misfit: What to do where the target looks like no mix of the clients' classes: "fedavg", weigh as FedAvg
            until another estimate fits; "warn", use the estimate in spite of that; "stop" the run.
        ask: Held-out samples that an estimate is made from, about; where clients hold more, some clients are asked,
            drawn anew for each estimate.
    """

    mix: Literal["uniform", "pooled", "client", "data", "truth", "estimate"] | list[float] | None = None
    truth: Literal["uniform", "pooled", "data"] | list[float] | None = None
    unlabelled: Annotated[int, Field(ge=1)] | Annotated[str, Field(min_length=1)] = 1000
    noise: Annotated[float, Field(ge=0.0)] = 0.0
    warmup: Annotated[int, Field(ge=0)] = 10
    every: Annotated[int, Field(ge=1)] = 5
    estimator: MixMethod = "gls"
    bins: Annotated[int, Field(ge=1, le=4)] = 4
    on_misfit: Literal["warn", "fedavg", "stop"] = "fedavg"
    ask: Annotated[int, Field(ge=1)] = 10_000

    @property
    def is_estimated(self) -> bool:
        """Whether the mix is estimated in the run."""
        return self.mix == "estimate"


class ConditionsSection(Section):
    """Clients that drop out or do less work, and noise on the label counts.

    Attributes:
        dropout: Share of each cohort that drops out after selection.
        dropout_rule: "exact": that share, rounded down, and never the whole cohort; "bernoulli": each client on its
            own with this probability.
        stragglers: Share of the clients that do fewer local epochs: from 1 to `epochs`, drawn once.
        count_epsilon: Label counts carry Laplace noise of scale 1 / epsilon, drawn once; None: they are exact. Numbers
            of samples stay exact.
        count_use: What noisy counts are used for: "selection", which includes FedConcat's clusters, or "all", weights
            too.
    """

    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    dropout_rule: Literal["exact", "bernoulli"] = "exact"
    stragglers: Share = 0.0
    count_epsilon: Positive | None = None
    count_use: Literal["selection", "all"] = "selection"


class PrivacySection(Section):
    """Differential privacy of what clients send in training; it needs masked updates (`engine.updates`).

    It protects a client with all of its samples (see `fedskew.privacy`). Label counts are apart:
    `conditions.count_epsilon`.

    Attributes:
        clip: Largest Euclidean norm of an update; longer ones are scaled down.
        noise: Noise multiplier: standard deviation of the noise in the weighted sum of a round, divided by the most
            that one client can change that sum, which is about `training.weight_limit` times `clip`.
        epsilon: What a client may spend over the whole run. It takes part in no round beyond that.
        delta: The delta that epsilon goes with; below 1 divided by the number of clients.
        answers: Number of clients whose shares of noise are that of a round; with fewer the model stays as it was, and
            with more the noise is larger, so that the others may tell theirs to the server. None: those that reply.
    """

    clip: Annotated[float, Field(gt=0.0, le=8.0)]
    noise: Positive
    epsilon: Positive
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    answers: Annotated[int, Field(ge=3)] | None = None


class EvaluationSection(Section):
    """When and what to evaluate.

    Attributes:
        every: Rounds from one evaluation to the next; the last round is always evaluated.
        clients: Also evaluate each client's model after its local training.
        patience: Stop after so many evaluations without a better validation accuracy; 0: never.
        summary: What stands for a run in tables, on pages and in tests of differences. "final": the model after the
            last round. "last 10": the mean over the evaluations of the last 10 rounds. "best on validation": the model
            that is best on the validation samples. Beside it stands the mean over the last tenth of the rounds.
    """

    every: Annotated[int, Field(ge=1)] = 1
    clients: bool = False
    patience: Annotated[int, Field(ge=0)] = 0
    summary: Literal["final", "last 10", "best on validation"] = "final"


class TuneSection(Section):
    """A key whose value is chosen by validation accuracy.

    Attributes:
        key: The dotted key.
        values: The values to try.
    """

    key: str
    values: Annotated[list[Any], Field(min_length=1)]


class EngineSection(Section):
    """Where and how a cohort trains.

    Attributes:
        backend: "sequential": one client after another. "processes": several at a time, with the same bits. "cohort":
            all at once, equal to floating-point tolerance. "auto": "cohort" where that is known to be faster
            (`engine.faster_together`), else "sequential". The run's summary names the backend.
        chunk: How many clients the backend "cohort" stacks at a time, at most; None: as many as memory allows.
        seeds_together: With "cohort": the clients of all seeds train as one cohort; where a method draws a last layer
            that nobody trains, which differs between seeds, those of each seed.
        processes: Number of processes of the backend "processes", which does not change the result; None: as many as
            the cores allow.
        device: "auto": a GPU where there is one.
        updates: "plain": the server gets each client's update. "masked": it gets sums over the clients of a round, in
            fixed point and clipped, as where masks hide each update on real sites (`fedskew.sums`); the bits are those
            of real sites. Clients' weights are then those of the whole cohort, renormalised over the clients that
            replied.
        label_counts: With masked updates: "reported": the server gets each client's label counts, exact or noisy
            (`conditions.count_epsilon`). "summed": it gets sums over all clients only, once before the first round, and
            each client computes its own weight from these (FedAvg, uniform, FedLA, FedPALS); with
            `conditions.count_epsilon` from noisy counts.
        threads: Threads of every process. They are part of the result, as sums inside a convolution depend on them.
    """

    backend: Literal["auto", "sequential", "processes", "cohort"] = "auto"
    chunk: Annotated[int, Field(ge=1)] | None = None
    seeds_together: bool = False
    processes: Annotated[int, Field(ge=1)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    updates: Literal["plain", "masked"] = "plain"
    label_counts: Literal["reported", "summed"] = "reported"
    threads: Annotated[int, Field(ge=1)] = 1

    def number_of_processes(self) -> int:
        """Return the number of clients that train at a time: 1, except with the backend "processes"."""
        if self.backend != "processes":
            return 1
        return self.processes or max(1, cores() // self.threads)


class OutputSection(Section):
    """Files that a run writes in addition to its records.

    Attributes:
        checkpoint_every: Rounds from one checkpoint to the next.
        trackers: Experiment trackers that get every record.
    """

    checkpoint_every: Annotated[int, Field(ge=1)] = 1
    trackers: list[Literal["tensorboard", "mlflow", "wandb"]] = []


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the run was made whose folder a config is from; its own relative paths lead from there.

    Attributes:
        directory: The folder that the command was given in.
        data: The folder of the data sets, where the config names none.
    """

    directory: Path
    data: Path | None

    @classmethod
    def of_folder(cls, folder: Path) -> Origin | None:
        """Return the origin that a run folder names; None where it is no run folder, or of a federation of real sites.

        Args:
            folder: The folder of a run, of one seed or several.
        """
        for path in sorted(
            path for pattern in ("", "seed-*/", "seed-*/*/") for path in folder.glob(f"{pattern}{IDENTITY}")
        ):
            try:
                said = json.loads(path.read_text(encoding="utf-8"))
                origin = cls(Path(said["directory"]), None if said["data_root"] is None else Path(said["data_root"]))
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
            return origin
        return None


class Config(Section):
    """The config of a run: everything that determines its result.

    Attributes:
        schema_: Version of this format; the key is `schema`.
        name: The run's name; its folder is `<name>-<hash>`.
        seeds: Seeds; the run is repeated for each of them.
        data: The data set.
        partition: How the training samples are divided among clients.
        model: The network.
        method: `preset`, the name of a method, and tables that replace its components slot by slot.
        training: Rounds and local training.
        target: The label mix that the model is trained for.
        conditions: Dropouts, stragglers, noise on the label counts.
        privacy: Differential privacy of what clients send in training; None: there is none.
        evaluation: When and what to evaluate.
        tune: A key whose value is chosen by validation accuracy; None: no key.
        engine: Where and how a cohort trains.
        output: What a run writes beside its records.
    """

    schema_: Literal[1] = Field(1, alias="schema")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)] = "run"
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    data: DataSection
    partition: PartitionSection
    model: ModelSection
    method: dict[str, Any] = {}
    training: TrainingSection
    target: TargetSection = TargetSection()
    conditions: ConditionsSection = ConditionsSection()
    privacy: PrivacySection | None = None
    evaluation: EvaluationSection = EvaluationSection()
    tune: TuneSection | None = None
    engine: EngineSection = EngineSection()
    output: OutputSection = OutputSection()
    _origin: Origin | None = PrivateAttr(None)

    @property
    def origin(self) -> Origin | None:
        """Where the run was made whose folder this config was read from; None for other configs."""
        return self._origin

    def of(self, origin: Origin | None) -> Config:
        """Return this config as that of a run made elsewhere.

        Args:
            origin: Where it was made.

        Returns:
            The config with that origin.
        """
        own = self.model_copy()
        own._origin = origin
        return own

    def place(self, path: str) -> str:
        """Find where a path of this config leads.

        Args:
            path: The path.

        Returns:
            The path in the run's own folder if it exists there, else from the current folder.
        """
        made = None if self.origin is None else self.origin.directory / Path(path).expanduser()
        return str(made) if made is not None and made.exists() else path

    def tree(self) -> dict[str, Any]:
        """Return the config in plain values, with every default; keys that are None are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @property
    def hash(self) -> str:
        """Eight hex digits that differ whenever the run's model or records can differ, but for `smallest_batch`."""
        tree = {key: value for key, value in self.tree().items() if key not in {"name", "output"}}
        del tree["evaluation"]["summary"]  # what is said of a run changes nothing in it
        tree["training"]["smallest_batch"] = 1  # its change is the cure of a run that can't go on (see `_batches`)
        if tree["method"].get("aggregation") == methods.DEFAULTS["aggregation"]:  # as before there were others
            del tree["method"]["aggregation"]
        if self.data.held_out == 0:  # as before it was a key
            del tree["data"]["held_out"]
        if not self.target.is_estimated:
            for key in ESTIMATES:
                del tree["target"][key]
        if tree["partition"].get("covered") is False:  # as before it was a parameter
            del tree["partition"]["covered"]
        if self.partition.oracle:  # it is dealt otherwise than it once was, so these are other runs
            tree["partition"]["oracle"] = "free rows"
        if self.engine.updates == "plain":  # as before it was a key
            del tree["engine"]["updates"]
        if self.engine.label_counts == "reported":
            del tree["engine"]["label_counts"]
        tree["engine"].pop("processes", None)
        if tree["engine"]["backend"] == "processes":  # the same bits as "sequential"
            tree["engine"]["backend"] = "sequential"
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]

    def with_value(self, key: str, value: Any) -> Config:
        """Return this config with one dotted key changed.

        Args:
            key: The dotted key.
            value: Its new value.

        Returns:
            The changed config.

        Raises:
            ConfigError: The changed config is not valid.
        """
        tree = self.tree()
        put(tree, key, value)
        return resolve(tree).of(self.origin)

    def with_method(self, preset: str) -> Config:
        """Return this config with another method, whose name is added to the config's own.

        A `tune` section for a key of the method is dropped.

        Args:
            preset: The method's name.

        Returns:
            The changed config.

        Raises:
            ConfigError: The method does not go with the rest of the config.
        """
        tree = self.tree()
        if self.tune is not None and self.tune.key.startswith("method."):
            del tree["tune"]
        name = f"{self.name}-{preset}".replace(":", "-")  # of a class, which is refused by what it is, not by its name
        return resolve({**tree, "method": {"preset": preset}, "name": name}).of(self.origin)

    def is_evaluated(self, round: int) -> bool:
        """Return whether a round ends with an evaluation.

        Args:
            round: Number of the round; 0 is the untrained model.
        """
        return round % self.evaluation.every == 0 or round == self.training.rounds

    def for_seed(self, seed: int) -> Config:
        """Return this config with a single seed.

        Args:
            seed: The seed.
        """
        return self.model_copy(update={"seeds": [seed]})


def cores() -> int:
    """Return the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read(path: Path, changes: Mapping[str, Any] | None = None, quick: bool = False, trust_code: bool = False) -> Config:
    """Read a config from a TOML file.

    Args:
        path: The file.
        changes: Values for dotted keys, in place of the file's.
        quick: First apply the file's own `[quick]` table, of dotted keys for a short run.
        trust_code: If it is the config of a run folder: import the code that the folder brings, too.

    Returns:
        The resolved config.

    Raises:
        ConfigError: The file can't be read or the config is not valid; the message names file, line and key.
    """
    tree, text, changed = read_tree(path, "config", changes, quick)
    if "sweep" in tree:
        raise ConfigError(f"{path}: this file is a sweep of many runs; use: fedskew sweep {path}")
    origin = Origin.of_folder(path.parent) if path.name == "config.toml" and "data.root" not in changed else None
    try:
        with own_code.of_run(path.parent, trust_code) if own_code.is_run(path) else nullcontext():
            return resolve(tree).of(origin)
    except ConfigError as error:
        key = str(error).split(":", 1)[0]
        line = None if key in changed else line_of(text, key)
        where = ", as the command line changes it" if key in changed else "" if line is None else f", line {line}"
        raise type(error)(f"{path}{where}: {error}") from None


def outline(path: Path) -> Config:
    """Read the keys of a config that is only looked at: nothing that it names is imported, opened or checked.

    Args:
        path: The file.

    Returns:
        The config, whose methods and parameters stand as they are written.

    Raises:
        ConfigError: The file can't be read, or a key or value is wrong.
    """
    tree, _, _ = read_tree(path, "config", None, False)
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{path}: {_message(error)}") from None


def write(config: Config, path: Path) -> None:
    """Write a config as TOML, with every default.

    Args:
        config: The config.
        path: The file, which is replaced whole.
    """
    write_text(path, tomli_w.dumps(config.tree()))


def resolve(tree: Mapping[str, Any]) -> Config:
    """Check a config and fill in every default.

    Args:
        tree: The config's tables. A component, class or function may stand where a name may.

    Returns:
        The config.

    Raises:
        ConfigError: The config is not valid; the message begins with the dotted key.
    """
    try:
        config = Config.model_validate(_named(tree))
    except pydantic.ValidationError as error:
        raise ConfigError(_message(error)) from None
    config = config.model_copy(
        update={"method": methods.expand(config.method), "partition": _with_rule_defaults(config.partition)}
    )
    _check(config)
    return config


def _with_rule_defaults(section: PartitionSection) -> PartitionSection:
    """Complete a section with the defaults of its rule's parameters."""
    if section.rule == "file":
        if not {"path"} <= set(section.parameters) <= {"path", "target_client"}:
            raise ConfigError(
                "partition: rule 'file' takes path, and target_client = true where its last client is the target"
            )
        return section
    if section.clients is None and section.rule != "natural":
        raise ConfigError("partition.clients: missing")
    index = {**partition.INDEX, "file": None}
    components.find(index, section.rule, "partition.rule")
    rule = components.make_component(partition.INDEX, {"name": section.rule, **section.parameters}, "partition", "rule")
    return PartitionSection(
        rule=section.rule, clients=section.clients, seed=section.seed, oracle=section.oracle, **dataclasses.asdict(rule)
    )


def target_mix(
    mix: str | list[float] | None,
    classes: int,
    known: Mapping[str, FloatArray],
    unknown: Mapping[str, str],
    key: str = "target.mix",
) -> FloatArray | None:
    """Return the target label mix that a config's `target.mix` or `target.truth` stands for.

    Args:
        mix: The key's value.
        classes: Number of classes.
        known: What the names "pooled", "client" and "data" stand for, as far as there is such a thing: non-negative
            amounts, shape `(classes,)`.
        unknown: For the other names, why there is no such mix and what to do.
        key: The key.

    Returns:
        The mix, shape `(classes,)`, sum 1; None where the config has none.

    Raises:
        ConfigError: There is no such mix, or its shares are not valid.
    """
    if mix is None:
        return None
    if isinstance(mix, str) and mix not in {"uniform", *known}:
        raise ConfigError(f"{key}: {mix!r} {unknown[mix]}")
    amounts = np.ones(classes) if mix == "uniform" else known[mix] if isinstance(mix, str) else np.array(mix, float)
    try:
        found = as_target(amounts, classes, key)
        if isinstance(mix, list):
            check_shares(amounts, key)
        return found
    except ArgumentError as error:
        raise ConfigError(str(error)) from None


def parse_change(text: str) -> tuple[str, Any]:
    """Parse a change given on the command line.

    Args:
        text: `a.b=value`; the value is read as TOML, or as a plain string where it is not TOML.

    Returns:
        The dotted key and the value.

    Raises:
        ConfigError: The text has another form.
    """
    key, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError(f"--set {text!r}: expected key=value with a dotted key, such as training.lr=0.1")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
    except RecursionError:
        parsed = None
    if parsed is None or is_deep(parsed):
        raise ConfigError(f"--set {key}: lists and tables in its value are nested more than {DEEPEST} deep")
    return key, parsed


def line_of(text: str, key: str) -> int | None:
    """Find the line of a dotted key in TOML text.

    Args:
        text: The TOML text.
        key: The dotted key.

    Returns:
        The key's line, from 1; its table's where the text has no such key; None where it has neither.
    """
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    table, found = "", None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?([^\]]+)\]", line):
            table = header[1].strip()
            if key == table or key.startswith(table + "."):
                found = number
        elif (entry := re.match(r"\s*([\w.-]+)\s*=", line)) and f"{table}.{entry[1]}".strip(".") == ".".join(parts):
            return number
    return found


def _check(config: Config) -> None:
    """Check what depends on several sections."""
    backend = config.engine.backend
    if config.engine.seeds_together and backend != "cohort":
        raise ConfigError(
            f"engine.seeds_together: seeds train together as one cohort; set engine.backend to 'cohort' (it is "
            f"{backend!r})"
        )
    validated = {
        "tune.key": config.tune is not None,
        "evaluation.patience": config.evaluation.patience > 0,
        "evaluation.summary": config.evaluation.summary == "best on validation",
    }
    if any(validated.values()) and config.data.validation == 0:
        key = next(key for key, asks in validated.items() if asks)
        raise ConfigError(f"{key}: there is no validation set; set data.validation to a share such as 0.1")
    training = config.training
    if training.steps is not None and training.epochs != 1:
        raise ConfigError("training.steps: stands in place of epochs; set only one of them")
    if config.conditions.stragglers and (training.steps is not None or 0 < training.epochs < 1):
        raise ConfigError("conditions.stragglers: train fewer epochs than others; set training.epochs to 1 or more")
    if len(set(config.seeds)) != len(config.seeds):
        raise ConfigError(f"seeds: {config.seeds} names a seed twice")
    method = methods.build(config.method, config.training.momentum)
    pipeline = method.pipeline
    if config.engine.updates == "masked" and (refused := methods.masks_refused(method)) is not None:
        raise ConfigError(f"engine.updates: {refused}")
    if config.engine.label_counts == "summed":
        _check_summed(config, method)
    if config.privacy is not None:
        _check_privacy(config, config.privacy, method)
    for index, name, key in (
        (data.INDEX, config.data.name, "data.name"),
        (models.INDEX, config.model.name, "model.name"),
    ):
        if not name.startswith(f"{components.GIVEN}:"):  # an object is asked for where it is used
            components.find(index, name, key)
    if config.training.augmentation is not None:
        components.find(data.AUGMENTATIONS, config.training.augmentation, "training.augmentation")
    if config.engine.seeds_together and (pipeline is not None or config.tune is not None):
        raise ConfigError(
            "engine.seeds_together: not possible with a pipeline, nor where a key is tuned; set it to false"
        )
    if config.target.is_estimated and config.target.noise:
        raise ConfigError("target.noise: is added to a mix that is given, and this one is estimated; set it to 0")
    if config.target.is_estimated and pipeline is not None:
        raise ConfigError(
            "target.mix: can't be estimated with a pipeline, which trains several models; give the shares as a list"
        )
    if pipeline is not None:
        if config.training.persist_momentum:
            raise ConfigError("training.persist_momentum: not possible with a pipeline, which trains several models")
        try:
            pipeline.split(config.training.rounds)
        except FedskewError as error:
            raise ConfigError(f"method.pipeline.{error}") from None
    if config.tune is not None:
        if config.tune.key.split(".")[0] in {"tune", "seeds", "name", "output", "schema", "data"}:
            raise ConfigError(f"tune.key: {config.tune.key!r} can't be tuned; name a key such as method.weighting.ess")
        for value in config.tune.values:
            try:
                config.model_copy(update={"tune": None}).with_value(config.tune.key, value)
            except FedskewError as error:
                raise ConfigError(f"tune.values: {value!r} is not valid: {error}") from None


def _check_summed(config: Config, method: methods.Method) -> None:
    """Refuse what can't be trained where label counts are only ever summed."""
    key = "engine.label_counts"
    if config.engine.updates != "masked":
        raise ConfigError(f'{key}: updates show the counts that sums hide; set engine.updates = "masked"')
    if (reason := methods.summed_counts_refused(method, config.training.participation)) is not None:
        raise ConfigError(f"{key}: {reason}")
    if config.conditions.count_epsilon is not None and config.conditions.count_use != "all":
        raise ConfigError(
            f'{key}: summed counts are weights alone; with count_epsilon set conditions.count_use = "all"'
        )
    if config.target.is_estimated:
        raise ConfigError(f"{key}: weights are fixed before the first round, and an estimate comes later; give the mix")
    if config.privacy is not None:
        raise ConfigError(f"{key}: each client would send its own weight, without noise; take counts that are reported")


def _check_privacy(config: Config, section: PrivacySection, method: methods.Method) -> None:
    """Refuse what would send anything without noise, or can't be accounted for."""
    if config.engine.updates != "masked":
        raise ConfigError(
            'privacy: each client adds a share of the noise, which hides little alone; set engine.updates = "masked"'
        )
    if config.training.weight_limit is None:
        raise ConfigError(
            "privacy: the noise is made for the largest weight of a client; set training.weight_limit, such as 2 "
            "divided by the number of clients in a round"
        )
    if (reason := methods.noise_refused(method)) is not None:
        raise ConfigError(f"privacy: {reason}")
    if config.target.is_estimated:
        raise ConfigError("privacy: an estimated target.mix asks clients for counts without noise; give the mix")
    most = most_rounds(section.noise, section.epsilon, section.delta)
    mean = max(
        min(config.training.rounds, 1), math.floor(config.training.participation * config.training.rounds + 1e-9)
    )
    if most < mean:
        enough = noise_for(section.epsilon, mean, section.delta)
        raise ConfigError(
            f"privacy.epsilon: {section.epsilon:g} pays for {most} rounds of a client with noise = {section.noise:g}, "
            f"and the mean client takes part in {mean}; set noise = {math.ceil(10 * enough) / 10:g}, fewer rounds, or "
            "a larger epsilon"
        )


def _named(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with classes, functions and components that were given from Python replaced by their names."""
    plain = {key: _plain(dict(value)) if _is_table(value) else _plain(value) for key, value in tree.items()}
    for section, key in (("data", "name"), ("partition", "rule"), ("model", "name")):
        table = plain.get(section)
        if section in tree and not _is_table(table):
            table = plain[section] = {key: table}
        if isinstance(table, dict) and table.get(key) is not None and not isinstance(table[key], str):
            plain[section] = _with_name(section, key, table)
    if isinstance(plain.get("method"), str):
        plain["method"] = {"preset": plain["method"]}
    elif dataclasses.is_dataclass(plain.get("method")):
        method = plain["method"]
        filled = {place: getattr(method, place) for place in methods.PLACES}
        plain["method"] = {place: component for place, component in filled.items() if component is not None}
    if isinstance(plain.get("seeds"), int):
        plain["seeds"] = [plain["seeds"]]
    return plain


def _plain(value: Any) -> Any:
    """Return a value as TOML has it: Python's numbers for NumPy's, a list for a tuple or a range."""
    value = list(value) if isinstance(value, tuple | range) and not hasattr(value, "_fields") else value
    if type(value) is dict:
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if type(value) is list else plain_number(value)


def _is_table(value: Any) -> bool:
    """Return whether it is a table of a config; a `DatasetDict` of the package `datasets` is a mapping too."""
    return isinstance(value, Mapping) and type(value).__module__.partition(".")[0] != "datasets"


def _with_name(section: str, key: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with a name in place of an object, and of a test part that is one."""
    value = table[key]
    if isinstance(value, type | FunctionType) and value.__qualname__.isidentifier():
        return table | {key: components.name_of(value, f"{section}.{key}")}
    if section == "model":
        return table | {key: given_network(value)}
    if section == "partition" or isinstance(value, bool | int | float):
        return table if not callable(value) else table | {key: components.name_of(value, f"{section}.{key}")}
    if isinstance(value, type | FunctionType):
        return table | {key: components.keep(value, value.__name__.strip("<>"), digest_of_code(value))}
    given = data.from_object(value, table.get("test"))
    return {name: part for name, part in table.items() if name != "test"} | {
        key: components.keep(given.read, given.label, given.digest)
    }


def _message(error: pydantic.ValidationError) -> str:
    """Return one line for the first mistake; unknown keys come first, as they often explain the others."""
    errors = error.errors()
    first = next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])
    section: type[BaseModel] = Config
    path: list[str] = []
    for part in map(str, first["loc"]):
        fields = {field.alias or name: field for name, field in section.model_fields.items()}
        path.append(part)
        if part not in fields:
            break
        kinds = [fields[part].annotation, *typing.get_args(fields[part].annotation)]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            break
        section = inner[0]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        return f"{key}: no such key{nearest(path[-1], fields)}"
    if first["type"] == "missing":
        return f"{key}: missing"
    if key == "target.mix":
        return (
            f"{key}: expected a list of shares, or 'uniform', 'pooled', 'client', 'data', 'truth' or 'estimate' "
            f"(got {first['input']!r})"
        )
    if key == "target.truth":
        return f"{key}: expected a list of shares, or 'uniform', 'pooled' or 'data' (got {first['input']!r})"
    return f"{key}: {first['msg'][0].lower()}{first['msg'][1:]} (got {first['input']!r})"
