"""What a run is, as a tree that can be written down: read from TOML or keyword arguments, checked before anything runs.

A resolved config has every default filled in, so its `config.toml` alone replays the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from fedskew import components, data, methods, models, partition
from fedskew.errors import ConfigError, FedskewError, nearest

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]


class Section(BaseModel):
    """A table of the config; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Named(BaseModel):
    """A table with a name and that name's own parameters, checked where the name is looked up."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def parameters(self) -> dict[str, Any]:
        """The keys that are not this section's own."""
        return dict(self.model_extra or {})


class DataSection(Named):
    """Which data set; `validation`: share of the training samples held out, for early stop and choices, or "own", those
    that the data set itself sets aside (which are never trained on, whatever this says)."""

    name: str
    root: str | None = None
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] | Literal["own"] = 0.0


class PartitionSection(Named):
    """How the training samples are divided: a rule and its parameters, or rule "file" with the `path` of a saved
    one (and `target_client`, whether its last client is the target).

    `clients` counts a target client too, where the rule has one; rules "natural" and "file" bring their own number
    ("natural" puts whole clients together to fewer, where a number is given).
    `oracle`: the samples of those that train are dealt again, so that each has the target's mix (FedPALS's Oracle).
    """

    rule: str
    clients: Annotated[int, Field(ge=1)] | None = None
    oracle: bool = False


class ModelSection(Named):
    """Which network."""

    name: str


class TrainingSection(Section):
    """Rounds, and what each client does in one.

    A last batch of an epoch with fewer samples than `smallest_batch` is left out. `persist_momentum`,
    `teacher_train_mode`: habits of public code, to compare with it (see `engine.LocalTraining`).
    """

    rounds: Annotated[int, Field(ge=0)]
    participation: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    epochs: Annotated[int, Field(ge=0)] = 1
    batch_size: Annotated[int, Field(ge=1)] = 64
    smallest_batch: Annotated[int, Field(ge=1)] = 1
    lr: Positive = 0.01
    lr_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    persist_momentum: bool = False
    teacher_train_mode: bool = False
    augmentation: str | None = None


class TargetSection(Section):
    """The label mix that the model is for: shares by class, or where to take them from.

    `noise`: what the server is told is the mix plus noise * max(0, a standard normal draw) in each class, normalised
    (FedPALS, appendix A.4); accuracy on the target is measured with the true one.
    """

    mix: Literal["uniform", "pooled", "client", "data"] | list[float] | None = None
    noise: Annotated[float, Field(ge=0.0)] = 0.0


class ConditionsSection(Section):
    """What goes wrong, and how well the server knows the label counts.

    `count_epsilon`: counts carry Laplace noise of scale 1 / epsilon, drawn once (None: exact); the server uses them for
    selection and FedConcat's clusters, and with `count_use = "all"` for weights too. Sizes stay exact.
    """

    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    dropout_rule: Literal["exact", "bernoulli"] = "exact"
    stragglers: Share = 0.0
    count_epsilon: Positive | None = None
    count_use: Literal["selection", "all"] = "selection"


class EvaluationSection(Section):
    """When to evaluate; `clients`: also each client's model after its local training; `patience`: stop after so many
    evaluations without a better validation accuracy (0: never)."""

    every: Annotated[int, Field(ge=1)] = 1
    clients: bool = False
    patience: Annotated[int, Field(ge=0)] = 0


class TuneSection(Section):
    """A key whose value is chosen by validation accuracy, from a list."""

    key: str
    values: Annotated[list[Any], Field(min_length=1)]


class EngineSection(Section):
    """Where the cohort trains.

    `backend`: "sequential", one client after another; "processes", several at a time, the same bits; "cohort", all at
    once, equal to floating-point tolerance, at most `chunk` of them stacked (None: by their memory), with
    `seeds_together` those of all seeds, on a GPU with `capture` by a step that is captured once as a CUDA graph; "auto"
    is "cohort" where that is known to be faster (`engine.faster_together`), and "sequential" elsewhere. The summary
    says which, and why a step was not captured.
    `threads`, in every process, are part of the result: sums inside a convolution depend on them. `processes`, for the
    backend of that name, are not (None: as many as the cores allow).
    """

    backend: Literal["auto", "sequential", "processes", "cohort"] = "auto"
    chunk: Annotated[int, Field(ge=1)] | None = None
    seeds_together: bool = False
    capture: bool = False
    processes: Annotated[int, Field(ge=1)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1)] = 1

    def number_of_processes(self) -> int:
        """How many train at a time: 1, but for the backend `processes`."""
        if self.backend != "processes":
            return 1
        return self.processes or max(1, cores() // self.threads)


class OutputSection(Section):
    """What is written beside the records: a checkpoint every so many rounds, and trackers."""

    checkpoint_every: Annotated[int, Field(ge=1)] = 1
    trackers: list[Literal["tensorboard", "mlflow", "wandb"]] = []


class Config(Section):
    """The whole tree."""

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
    evaluation: EvaluationSection = EvaluationSection()
    tune: TuneSection | None = None
    engine: EngineSection = EngineSection()
    output: OutputSection = OutputSection()

    def tree(self) -> dict[str, Any]:
        """The config in plain values, every default included, None left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @property
    def hash(self) -> str:
        """Eight hex digits that change with anything that can change the run's model or records."""
        tree = {key: value for key, value in self.tree().items() if key not in {"name", "output"}}
        tree["engine"].pop("processes", None)
        if tree["engine"]["backend"] == "processes":  # the same bits
            tree["engine"]["backend"] = "sequential"
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]

    def with_value(self, key: str, value: Any) -> Config:
        """This config with one dotted key changed, checked again."""
        tree = self.tree()
        put(tree, key, value)
        return resolve(tree)

    def with_method(self, preset: str) -> Config:
        """This config with another method, named after it; a choice of a method's key is dropped."""
        tree = self.tree()
        if self.tune is not None and self.tune.key.startswith("method."):
            del tree["tune"]
        return resolve({**tree, "method": {"preset": preset}, "name": f"{self.name}-{preset}"})

    def is_evaluated(self, round: int) -> bool:
        """Whether a round ends with an evaluation: every so many, and the last."""
        return round % self.evaluation.every == 0 or round == self.training.rounds

    def for_seed(self, seed: int) -> Config:
        """This config for one seed."""
        return self.model_copy(update={"seeds": [seed]})


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read(path: Path, changes: Mapping[str, Any] | None = None, quick: bool = False) -> Config:
    """The config in a TOML file, with dotted keys changed; `quick` first applies the file's own `[quick]` table.

    Raises ConfigError naming file, line and key.
    """
    tree, text, changed = read_tree(path, "config", changes, quick)
    if "sweep" in tree:
        raise ConfigError(f"{path}: it describes many runs; use: fedskew sweep {path}")
    try:
        return resolve(tree)
    except ConfigError as error:
        key = str(error).split(":", 1)[0]
        line = None if key in changed else line_of(text, key)
        raise type(error)(f"{path}{'' if line is None else f', line {line}'}: {error}") from None


def read_tree(
    path: Path, what: str, changes: Mapping[str, Any] | None, quick: bool
) -> tuple[dict[str, Any], str, set[str]]:
    """A TOML file as a tree with dotted keys changed, its text, and the keys that were changed from outside the tables.

    `what` it is, for the message of an error; `quick` first applies its `[quick]` table, which is no part of the tree.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: the {what} can't be read: {reason}") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    smaller = tree.pop("quick", None)
    if quick and not isinstance(smaller, dict):
        raise ConfigError(f"{path}: it has no [quick] table of dotted keys, so --quick means nothing here")
    changed = {**(smaller if quick else {}), **(changes or {})}
    for key, value in changed.items():
        put(tree, key, value)
    return tree, text, set(changed)


def write(config: Config, path: Path) -> None:
    """The config as TOML, defaults included."""
    path.write_text(tomli_w.dumps(config.tree()), encoding="utf-8")


def resolve(tree: Mapping[str, Any]) -> Config:
    """A checked config with every default filled in. Raises ConfigError whose message begins with the dotted key."""
    try:
        config = Config.model_validate(_named(tree))
    except pydantic.ValidationError as error:
        raise ConfigError(_message(error)) from None
    config = config.model_copy(
        update={"method": methods.expand(config.method), "partition": _whole_partition(config.partition)}
    )
    _check(config)
    return config


def _whole_partition(section: PartitionSection) -> PartitionSection:
    """The section with every parameter of its rule, defaults included."""
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
    rule = components.make_component(partition.INDEX, {"name": section.rule, **section.parameters}, "partition")
    return PartitionSection(
        rule=section.rule, clients=section.clients, oracle=section.oracle, **dataclasses.asdict(rule)
    )


def parse_change(text: str) -> tuple[str, Any]:
    """`a.b=value` of the command line; the value is read as TOML, and as a string where it is none."""
    key, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError(f"--set {text!r}: expected key=value with a dotted key, such as training.lr=0.1")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def line_of(text: str, key: str) -> int | None:
    """The line (from 1) on which a dotted key stands in TOML text, or its table where the key itself is absent."""
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
    """What no single section can see."""
    if config.engine.seeds_together and config.engine.backend != "cohort":
        raise ConfigError(
            f"engine.seeds_together: seeds train together as one cohort; set engine.backend to 'cohort' (it is "
            f"{config.engine.backend!r})"
        )
    if config.engine.capture and config.engine.backend != "cohort":
        raise ConfigError(
            f"engine.capture: a cohort's steps are captured; set engine.backend to 'cohort' (it is "
            f"{config.engine.backend!r})"
        )
    validated = config.tune is not None or config.evaluation.patience > 0
    if validated and config.data.validation == 0:
        key = "tune.key" if config.tune is not None else "evaluation.patience"
        raise ConfigError(f"{key}: needs a validation set; set data.validation to a share such as 0.1")
    if len(set(config.seeds)) != len(config.seeds):
        raise ConfigError(f"seeds: {config.seeds} names a seed twice")
    pipeline = methods.build(config.method, config.training.momentum).pipeline
    components.find(data.INDEX, config.data.name, "data.name")
    components.find(models.INDEX, config.model.name, "model.name")
    if config.training.augmentation is not None:
        components.find(data.AUGMENTATIONS, config.training.augmentation, "training.augmentation")
    if config.engine.seeds_together and (pipeline is not None or config.tune is not None):
        raise ConfigError("engine.seeds_together: not with a pipeline, nor where a key is tuned")
    if pipeline is not None:
        if config.training.persist_momentum:
            raise ConfigError("training.persist_momentum: a pipeline trains several models, each with its own momentum")
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
                raise ConfigError(f"tune.values: {value!r} is refused: {error}") from None


def _named(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with the user's own classes, functions and components (given from Python) replaced by their names."""
    plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    for section, key in (("data", "name"), ("partition", "rule"), ("model", "name")):
        table = plain.get(section)
        if isinstance(table, str) or callable(table):
            table = plain[section] = {key: table}
        if isinstance(table, dict) and callable(table.get(key)):
            table[key] = components.name_of(table[key], f"{section}.{key}")
    if isinstance(plain.get("method"), str):
        plain["method"] = {"preset": plain["method"]}
    elif dataclasses.is_dataclass(plain.get("method")):
        method = plain["method"]
        filled = {place: getattr(method, place) for place in methods.PLACES}
        plain["method"] = {place: component for place, component in filled.items() if component is not None}
    if isinstance(plain.get("seeds"), int):
        plain["seeds"] = [plain["seeds"]]
    return plain


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a tree, in place. Raises ConfigError where a table is expected and a value stands."""
    *tables, last = key.split(".")
    for name in tables:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{key}: {name!r} is a value, not a table")
    tree[last] = value


def _message(error: pydantic.ValidationError) -> str:
    """One line for the first mistake; an unknown key before others, as it often explains them."""
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
        return f"{key}: expected a list of shares, or 'uniform', 'pooled', 'client' or 'data' (got {first['input']!r})"
    return f"{key}: {first['msg'][0].lower()}{first['msg'][1:]} (got {first['input']!r})"
