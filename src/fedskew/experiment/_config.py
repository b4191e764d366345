"""Configs: read from TOML or keyword arguments, checked before anything runs.

A resolved config has every default filled in, so its `config.toml` alone replays the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tomli_w
from pydantic import Field, PrivateAttr

from fedskew import components, data, methods, models, own_code, partition
from fedskew.data import TableSchema
from fedskew.errors import ConfigError, FedskewError, in_one_line, placed
from fedskew.experiment import _sections as sections
from fedskew.experiment._own import with_names
from fedskew.files import file_hash, write_text
from fedskew.parameters import Seed, first_mistake
from fedskew.privacy import most_rounds, noise_for
from fedskew.tables import filled, flatten
from fedskew.trees import line_of, put, read_tree

TEXTS = "transformers:"
IDENTITY = "identity.json"
"""Where a run was made, and from what, as its folder records it: see `_identity.py`."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a run was made, which its relative paths lead from, and the folder of data sets that no config names."""

    directory: Path
    data: Path | None

    @classmethod
    def of_folder(cls, folder: Path) -> Origin | None:
        """Return the origin that a run folder names; None if it is none, or of a federation of real sites."""
        for path in (folder / IDENTITY, *sorted(folder.glob(f"seed-*/{IDENTITY}"))):
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                return cls.of_notes(json.loads(path.read_text(encoding="utf-8")))
        return None

    @classmethod
    def of_notes(cls, notes: Mapping[str, Any]) -> Origin:
        """Return the origin that an `identity.json` holds."""
        root = notes["data_root"]
        return cls(Path(notes["directory"]), None if root is None else Path(root))


class Config(sections.Section):
    """The config of a run: everything that determines its result."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    """Version of this format."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)] = "run"
    """The run's name; its folder is `<name>-<hash>`."""
    seeds: list[Seed] = Field([0], min_length=1)
    """Seeds; the run is repeated for each of them."""
    data: sections.DataSection
    partition: sections.PartitionSection
    model: sections.ModelSection
    method: dict[str, Any] = Field({})
    """`preset`, the name of a method, and tables that replace its components slot by slot."""
    training: sections.TrainingSection
    target: sections.TargetSection = sections.TargetSection()
    conditions: sections.ConditionsSection = sections.ConditionsSection()
    privacy: sections.PrivacySection | None = None
    evaluation: sections.EvaluationSection = sections.EvaluationSection()
    tune: sections.TuneSection | None = None
    engine: sections.EngineSection = sections.EngineSection()
    output: sections.OutputSection = sections.OutputSection()
    _origin: Origin | None = PrivateAttr(None)

    @property
    def origin(self) -> Origin | None:
        """Where the run was made whose folder this config was read from; None for other configs."""
        return self._origin

    def of(self, origin: Origin | None) -> Config:
        """Return this config as that of a run made elsewhere."""
        own = self.model_copy()
        own._origin = origin
        return own

    def place(self, path: str) -> str:
        """Return where a path of this config leads: into the run's own folder if it exists there, else as it is."""
        made = None if self.origin is None else self.origin.directory / os.path.expanduser(path)
        return str(made) if made is not None and os.path.exists(made) else path

    def weights_in(self, folder: Path | None) -> Config:
        """Return this config with the file of the first weights in a folder; None: without it."""
        name = self.model.weights
        place = None if folder is None or name is None else str(folder.absolute() / Path(name).name)
        return self.model_copy(update={"model": self.model.model_copy(update={"weights": place})})

    def tree(self) -> dict[str, Any]:
        """Return the config in plain values, with every default; keys that are None are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @property
    def hash(self) -> str:
        """Eight digits of `digest`, for names of folders."""
        return self.digest[:8]

    @property
    def digest(self) -> str:
        """Sixteen hex digits that differ whenever the run's model or records can differ."""
        tree = {key: value for key, value in self.tree().items() if key not in {"name", "output"}}
        unused = ("measure",) if not self.data.validation or self.evaluation.measure == "auto" else ()
        for key in ("summary", "intervals", *unused):  # what is said of a run changes nothing in it
            del tree["evaluation"][key]
        if not self.target.is_estimated:  # how an estimate would be made changes nothing
            tree["target"] = {key: tree["target"][key] for key in ("mix", "truth", "noise") if key in tree["target"]}
        training = tree["training"]
        training["persist_momentum"] = training.pop("keep_optimizer")  # as it was called when hashes were first made
        if self.training.optimizer == "sgd":
            for key in ("optimizer", "betas", "eps"):
                del training[key]
        if isinstance(schema := tree["data"].get("schema"), dict) and "columns" in schema:
            schema["columns"] = list(schema["columns"].items())  # whose order is that of the inputs
        tree["model"].pop("weights", None)  # their hash stands for them
        if self.model.architecture is not None:
            tree["model"].pop("name")
        tree["engine"].pop("processes", None)
        if tree["engine"]["backend"] == "processes":  # the same bits as "sequential"
            tree["engine"]["backend"] = "sequential"
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]

    def with_value(self, key: str, value: Any) -> Config:
        """Return this config with one dotted key changed; ConfigError if it is not valid then."""
        tree = self.tree()
        put(tree, key, value)
        if key in ("model.weights", "model.name"):
            for filled_in in ("weights_hash", *(("architecture",) if key == "model.name" else ())):
                tree["model"].pop(filled_in, None)
        return resolve(tree).of(self.origin)

    def tuned(self, value: Any) -> Config:
        """Return this config with a value of the key that it tunes; as it is where it tunes none."""
        if self.tune is None:
            return self
        return self.model_copy(update={"tune": None}).with_value(self.tune.key, value)

    def parts(self) -> dict[str, Config]:
        """Return the config of each single run by its folder's name in the run folder; "" where there is one alone."""
        if self.tune is None and len(self.seeds) == 1:
            return {"": self}
        if self.tune is None:
            return {f"seed-{seed}": self.for_seed(seed) for seed in self.seeds}
        key, values = self.tune.key.rpartition(".")[2], self.tune.values
        return {
            f"seed-{seed}-{key}-{value}": self.for_seed(seed).tuned(value) for seed in self.seeds for value in values
        }

    def with_method(self, preset: str) -> Config:
        """Return this config with another method, added to its name, and without `tune` for a key of the method."""
        tree = self.tree()
        if self.tune is not None and self.tune.key.startswith("method."):
            del tree["tune"]
        name = f"{self.name}-{preset}".replace(":", "-")  # of a class, which is refused by what it is, not by its name
        return resolve({**tree, "method": {"preset": preset}, "name": name}).of(self.origin)

    def rule(self) -> Any:
        """Return the partition rule, where it is one of the index or the user's own."""
        named = {"name": self.partition.rule, **self.partition.parameters}
        return components.make_component(partition.INDEX, named, "partition")

    @property
    def has_target_client(self) -> bool:
        """Whether the last client of the partition is the target."""
        if self.partition.rule in ("file", "natural"):
            return bool(self.partition.parameters.get("target_client", False))
        return bool(self.rule().target_client)

    def target_in_words(self) -> str | None:
        """Say which target there is; None where the config names none."""
        method = methods.build(self.method, self.training.momentum)
        mix = self.target.truth if self.target.mix == "truth" else self.target.mix
        said = filled(
            "fedskew.experiment",
            "target.txt",
            {},
            target=self.target,
            mix="client" if mix is None and self.has_target_client else mix,
            reads=any(components.has(part, "needs_target") for part in (method.selection, method.weighting)),
            off=getattr(method.weighting, "target", True) is False,
        )
        return said.strip() or None

    @property
    def most_rounds(self) -> int:
        """The largest number of rounds that it takes, with all its seeds and values that are tried."""
        return self.training.rounds * len(self.seeds) * (1 if self.tune is None else len(self.tune.values))

    def is_evaluated(self, round: int) -> bool:
        """Return whether a round ends with an evaluation; round 0 is the untrained model."""
        return round % self.evaluation.every == 0 or round == self.training.rounds

    def for_seed(self, seed: int) -> Config:
        """Return this config with a single seed."""
        return self.model_copy(update={"seeds": [seed]})

    def folder(self, out: Path) -> Path:
        """Return the run folder of this config in the folder of all run folders."""
        return out / f"{self.name}-{self.hash}"

    def write(self, path: Path) -> None:
        """Write a config as TOML, with every default; a file that is there is replaced whole."""
        write_text(path, tomli_w.dumps(self.tree()))

    @staticmethod
    def outline(path: Path) -> Config:
        """Read the keys of a config that is only looked at: nothing that it names is imported, opened or checked."""
        tree, _, _ = read_tree(path, "config", None, False)
        with placed(f"{path}: ", of=ConfigError):
            return _validated(tree)


def read(path: Path, changes: Mapping[str, Any] | None = None, quick: bool = False, trust_code: bool = False) -> Config:
    """Read a config from a TOML file.

    Args:
        changes: Values for dotted keys, in place of the file's.
        quick: First apply the file's own `[quick]` table, of dotted keys for a short run.
        trust_code: If it is the config of a run folder: import the code that the folder brings, too.

    Raises:
        ConfigError: The file can't be read or the config is not valid; the message names file, line and key.
    """
    tree, text, changed = read_tree(path, "config", changes, quick)
    if "sweep" in tree:
        raise ConfigError(f"{path}: this file is a sweep of many runs; use: fedskew sweep {path}")
    origin = Origin.of_folder(path.parent) if path.name == "config.toml" and "data.root" not in changed else None
    try:
        with own_code.of_run(path.parent, trust_code) if own_code.is_run(path) else nullcontext():
            return resolve(_with_weights(_with_schema(tree, path.parent), path.parent)).of(origin)
    except ConfigError as error:
        key = str(error).split(":", 1)[0]
        line = None if key in changed else line_of(text, key)
        where = ", as the command line changes it" if key in changed else "" if line is None else f", line {line}"
        raise type(error)(f"{path}{where}: {error}") from None


def resolve(tree: Mapping[str, Any]) -> Config:
    """Check a config's tables, where objects may stand for names, and fill in defaults; ConfigError names the key."""
    for key, value in flatten(tree).items():
        if isinstance(value, int) and value >= 2**63 and key != "partition.seed":
            raise ConfigError(f"{key}: {value} is too large; a whole number is below 2**63")
    config = _validated(_with_weights(_with_schema(with_names(tree))))
    config = config.model_copy(
        update={"method": methods.expand(config.method), "partition": _with_rule_defaults(config.partition)}
    )
    _check(config)
    return config


def _with_schema(tree: dict[str, Any], beside: Path = Path()) -> dict[str, Any]:
    """Return a tree with the schema of a table in place of the file that holds it, here or else beside its config."""
    table = tree.get("data")
    schema = table.get("schema") if isinstance(table, dict) else None
    if not isinstance(table, dict) or schema is None or table.get("name") != "csv":
        return tree
    with placed("data.schema: ", of=(FedskewError, TypeError)):
        if isinstance(schema, str):
            place = Path(schema).expanduser()
            schema = TableSchema.read_toml(place if place.exists() else beside / place)
        made = schema if isinstance(schema, TableSchema) else TableSchema.of_plain(schema)
    return tree | {"data": table | {"schema": made.plain()}}


def _with_architecture(table: dict[str, Any], beside: Path) -> dict[str, Any]:
    """Return the table of a network of a local folder with what its config.json says, and the file of its weights."""
    folder = Path(str(table["name"]).removeprefix(TEXTS)).expanduser()
    folder = folder if folder.exists() else beside / folder
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = {name: value for name, value in said.items() if value is not None}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"model.name: {folder / 'config.json'}: can't be read ({in_one_line(error)}); give a local folder of "
            "transformers' files, as save_pretrained() writes it"
        ) from None
    weights = folder / "model.safetensors"
    given = {"weights": str(weights)} if weights.exists() else {}
    return given | table | {"architecture": architecture}


def _with_weights(tree: dict[str, Any], beside: Path = Path()) -> dict[str, Any]:
    """Return a tree with the place of the network's weights, here or else beside its config, and their hash."""
    table = tree.get("model")
    if isinstance(table, dict) and str(table.get("name")).startswith(TEXTS) and "architecture" not in table:
        table = _with_architecture(table, beside)
        tree = tree | {"model": table}
    weights = table.get("weights") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(weights, str | Path) or "weights_hash" in table:
        return tree
    place = Path(weights).expanduser()
    place = place if place.exists() else beside / place
    try:
        return tree | {"model": table | {"weights": str(place), "weights_hash": file_hash(place)}}
    except OSError as error:
        raise ConfigError(f"model.weights: {place}: {error.strerror}") from None


def _validated(tree: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        said = first_mistake(error, fields=Config)
        homes = {field.name: "partition" for rule in partition.INDEX.values() for field in dataclasses.fields(rule)}
        homes |= dict.fromkeys(("preset", *methods.PLACES), "method")
        key = said.partition(": no such key")[0]
        if "." in key and key in tree:
            said = f"{key}: keys with dots are tables in tables here, such as {{'training': {{'lr': 0.1}}}}"
        elif (name := key.rpartition(".")[2]) in homes and f".{name}'" not in said:
            said = f"{key}: no such key (did you mean '{homes[name]}.{name}'?)"
        if said.startswith(("target.mix: ", "target.truth: ")):
            said = said.replace(": input should be ", ": expected a list of shares, or ")
        raise ConfigError(said) from None


def _with_rule_defaults(section: sections.PartitionSection) -> sections.PartitionSection:
    """Complete a section with the defaults of its rule's parameters."""
    if section.rule == "file":
        if not {"path"} <= set(section.parameters) <= {"path", "target_client"}:
            raise ConfigError(
                "partition: rule 'file' takes path, and target_client = true where its last client is the target"
            )
        return section
    if section.clients is None and section.rule != "natural":
        raise ConfigError("partition.clients: missing")
    components.find({**partition.INDEX, "file": None}, section.rule, "partition.rule")
    rule = components.make_component(partition.INDEX, {"name": section.rule, **section.parameters}, "partition", "rule")
    return section.model_copy(update=dataclasses.asdict(rule))


def _check(config: Config) -> None:
    """Check what depends on several sections."""
    engine, training, tune = config.engine, config.training, config.tune
    method = methods.build(config.method, training.momentum)
    with placed("training."):
        methods.check(method, training.local())
    if engine.seeds_together and engine.backend != "cohort":
        raise ConfigError(
            "engine.seeds_together: seeds train together as one cohort; set engine.backend to 'cohort' (it is "
            f"{engine.backend!r})"
        )
    if training.precision is not None and engine.backend == "cohort":
        raise ConfigError("training.precision: the backend 'cohort' computes in float32 only; take 'sequential'")
    for asking, by_validation in (
        ("tune.key", tune is not None),
        ("evaluation.patience", config.evaluation.patience > 0),
        ("evaluation.summary", config.evaluation.summary == "best on validation"),
    ):
        if by_validation and config.data.validation == 0:
            raise ConfigError(f"{asking}: there is no validation set; set data.validation to a share such as 0.1")
    if config.data.client_test + config.data.held_out >= 1:
        raise ConfigError("data.client_test: with data.held_out nothing is left to train on; set smaller shares")
    _check_sites(config, method)
    _check_balance(training, method)
    if training.steps is not None and training.epochs != 1:
        raise ConfigError("training.steps: stands in place of epochs; set only one of them")
    if config.conditions.stragglers and (training.steps is not None or 0 < training.epochs < 1):
        raise ConfigError("conditions.stragglers: train fewer epochs than others; set training.epochs to 1 or more")
    if len(set(config.seeds)) != len(config.seeds):
        raise ConfigError(f"seeds: {config.seeds} names a seed twice")
    if config.target.is_estimated and config.target.noise:
        raise ConfigError("target.noise: is added to a mix that is given, and this one is estimated; set it to 0")
    if engine.updates == "masked" and (reason := methods.masks_refused(method)) is not None:
        raise ConfigError(f"engine.updates: {reason}")
    if engine.label_counts == "summed":
        _check_summed(config, method)
    if config.privacy is not None:
        _check_privacy(config, config.privacy, method)
    names: tuple[tuple[Mapping[str, Any], str | None, str], ...] = (
        (data.INDEX, config.data.name, "data.name"),
        (models.INDEX, config.model.name, "model.name"),
        (data.AUGMENTATIONS, training.augmentation, "training.augmentation"),
        (data.SAMPLERS, training.sampler, "training.sampler"),
    )
    for index, name, key in names:
        given = (f"{components.GIVEN}:", *(f"{source}:" for source in own_code.SOURCES))
        if name is not None and not name.startswith(given):  # an object is asked for where it is used
            components.find(index, name, key)
    if engine.seeds_together and (method.pipeline is not None or tune is not None):
        raise ConfigError("engine.seeds_together: not possible with a pipeline, nor with [tune]; set it to false")
    if method.pipeline is not None:
        several = "with a pipeline, which trains several models"
        if config.target.is_estimated:
            raise ConfigError(f"target.mix: can't be estimated {several}; give the shares as a list")
        if training.keep_optimizer:
            raise ConfigError(f"training.keep_optimizer: not possible {several}")
        with placed("method.pipeline.", of=FedskewError):
            method.pipeline.split(training.rounds)
    if tune is not None and tune.key.split(".")[0] in {"tune", "seeds", "name", "output", "schema", "data"}:
        raise ConfigError(f"tune.key: {tune.key!r} can't be tuned; name a key such as method.weighting.ess")
    for value in [] if tune is None else tune.values:
        with placed(f"tune.values: {value!r} is not valid: ", of=FedskewError):
            config.tuned(value)


def _check_balance(training: sections.TrainingSection, method: methods.Method) -> None:
    """Refuse weights of classes, or a sampler, beside what makes up for the shares of classes already."""
    wanted = [key for key in ("class_weights", "sampler") if getattr(training, key) is not None]
    loss = method.objective.loss
    name, reason, key = type(loss).__name__, None, next(iter(wanted), "")
    if len(wanted) == 2 and training.class_weights == training.sampler == "balanced":
        reason = "with sampler = 'balanced' rare classes would count twice; leave out one of them"
    elif components.has(loss, "balances_classes"):
        reason = f"{name} makes up for the shares of a client's classes by itself; leave it out, or take cross_entropy"
    elif "class_weights" in wanted and not components.covers(loss, "weighs_classes", "value"):
        reason = f"{name} does not weigh classes (weighs_classes); take cross_entropy, or sampler = 'balanced'"
    elif "sampler" in wanted and components.has(method.selection, "assigns_quotas"):
        key, chooses = "sampler", type(method.selection).__name__
        reason = f"{chooses} says itself how many samples of each class clients train on; leave it out"
    if wanted and reason is not None:
        raise ConfigError(f"training.{key}: {reason}")


def _check_sites(config: Config, method: methods.Method) -> None:
    """Refuse models at clients that could not be made or evaluated."""
    for key in ("sites", "baselines"):
        if getattr(config.evaluation, key) and not config.data.client_test:
            raise ConfigError(f"evaluation.{key}: no client has test samples of its own; set data.client_test = 0.3")
    if config.evaluation.baselines and method.pipeline is not None:
        raise ConfigError("evaluation.baselines: not possible with a pipeline, which trains several networks")
    if method.personal is not None and method.personal.head_epochs and config.training.keep_optimizer:
        raise ConfigError("method.personal.head_epochs: not possible with training.keep_optimizer")


def _check_summed(config: Config, method: methods.Method) -> None:
    """Refuse what can't be trained where label counts are only ever summed."""
    conditions, reason = config.conditions, methods.summed_counts_refused(method, config.training.participation)
    if config.engine.updates != "masked":
        reason = 'updates show the counts that sums hide; set engine.updates = "masked"'
    elif conditions.count_epsilon is not None and conditions.count_use != "all":
        reason = reason or 'summed counts are weights alone; with count_epsilon set conditions.count_use = "all"'
    elif config.target.is_estimated:
        reason = reason or "weights are fixed before the first round, and an estimate comes later; give the mix"
    elif config.privacy is not None:
        reason = reason or "each client would send its own weight, without noise; take counts that are reported"
    if reason is not None:
        raise ConfigError(f"engine.label_counts: {reason}")


def _check_privacy(config: Config, section: sections.PrivacySection, method: methods.Method) -> None:
    """Refuse what would send anything without noise, or can't be accounted for."""
    training, reason = config.training, methods.noise_refused(method)
    if config.engine.updates != "masked":
        reason = 'each client adds a share of the noise, which hides little alone; set engine.updates = "masked"'
    elif training.weight_limit is None:
        reason = (
            "the noise is made for the largest weight of a client; set training.weight_limit, such as 2 divided by the "
            "number of clients in a round"
        )
    elif config.target.is_estimated:
        reason = reason or "an estimated target.mix asks clients for counts without noise; give the mix"
    if reason is not None:
        raise ConfigError(f"privacy: {reason}")
    most = most_rounds(section.noise, section.epsilon, section.delta)
    mean = max(min(training.rounds, 1), math.floor(training.participation * training.rounds + 1e-9))
    if most < mean:
        enough = noise_for(section.epsilon, mean, section.delta)
        raise ConfigError(
            f"privacy.epsilon: {section.epsilon:g} pays for {most} rounds of a client with noise = {section.noise:g}, "
            f"and the mean client takes part in {mean}; set noise = {math.ceil(10 * enough) / 10:g}, fewer rounds, or "
            "a larger epsilon"
        )
