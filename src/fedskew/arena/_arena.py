"""An arena: methods compared in many situations, each tuned there under one budget, on the same partitions and seeds.

The file is a sweep with one more table; its grid holds the situations.

    [arena]
    partitions = [0, 1]                 # partition seeds: each situation is partitioned once with each
    rates = [0.01, 0.03, 0.1, 0.3]      # learning rates that every method tries
    budget = 6                          # values that every method may try in its tuning, the rates included
    widen = true                        # values go on beyond an end of a grid while the best one is there
    beyond = 4                          # once the budget is spent, of the method's own values for 4 values more
    tuning = {partitions = [5, 6], seeds = [7, 8, 9], rounds = 50}  # each value is tried on these, for 50 rounds
    last = 5                            # a run's score is the mean of its last 5 evaluations
    together = 32                       # with engine.seeds_together: runs of a situation that train at a time

    [sweep]
    methods = [
        "fedavg",
        {label = "fedprox", preset = "fedprox", own = {method.local_step.mu = [0.001, 0.1]}},
    ]

`own` names one parameter of the method and the values to try besides its default; the rest of the budget goes to
learning rates near the best one. With `widen` a rate is not taken where the next higher one that was tried diverged.
Situations that differ in the target's label mix (a list of shares) alone train a method that does not read it once; its
models are scored on each mix. `blocks = "task"` names an axis whose labels intervals and tests take for a sample, too,
of all that there could be.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pydantic
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from fedskew import components, methods
from fedskew.errors import ConfigError, FedskewError, nearest, placed
from fedskew.experiment import Config, Sweep
from fedskew.parameters import Seed, one_mistake
from fedskew.tables import flatten
from fedskew.trees import read_tree

TUNING_SEED = 1_000_003
"""Seed of the tuning runs and of the partition that they train on; no compared run has it."""


class _Table(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Tuning(_Table):
    partitions: list[Seed] = pydantic.Field(default=[TUNING_SEED], min_length=1)
    seeds: list[Seed] = pydantic.Field(default=[TUNING_SEED], min_length=1)
    rounds: PositiveInt | None = None


class Settings(_Table):
    """The table `[arena]`; `reference` is the label of the method that the others are compared with."""

    partitions: list[Seed] = pydantic.Field([0], min_length=1)
    rates: list[PositiveFloat] = []
    budget: NonNegativeInt = 0
    widen: bool = False
    beyond: NonNegativeInt = 0
    tuning: _Tuning = _Tuning()
    blocks: str | None = None
    last: PositiveInt = 5
    reference: str = "fedavg"
    together: PositiveInt = 32

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Settings":
        if len(set(self.partitions)) < len(self.partitions):
            raise ValueError(f"partitions: expected different seeds, such as [0, 1] (got {self.partitions})")
        if sorted(set(self.rates)) != self.rates:
            raise ValueError(f"rates: expected learning rates, rising, such as [0.01, 0.1] (got {self.rates})")
        if len(self.rates) == 1:
            raise ValueError("rates: a single rate leaves nothing to tune; give two or more, or set training.lr")
        if self.budget < len(self.rates) or (self.budget and not self.rates):
            raise ValueError(
                f"budget: {self.budget}, and arena.rates has {len(self.rates)}: expected some, and one for each"
            )
        if self.beyond and not self.widen:
            raise ValueError("beyond: goes on where a grid is widened; set widen = true, or leave it out")
        if both := sorted({*self.partitions} & {*self.tuning.partitions}):
            raise ValueError(f"tuning.partitions: {both[0]} is compared, too; tune on partitions of its own")
        return self


def without_target(config: Config) -> Config:
    """Return a config without the target's label mix."""
    return config.model_copy(update={"target": config.target.model_copy(update={"mix": None})})


@dataclass(frozen=True)
class ArenaEntry:
    """A method in one situation, which is the label on each axis; `own` holds values of the method's own to try."""

    situation: dict[str, str]
    method: str
    config: Config  # `partition.seed` and the tuned values are yet to be set
    own: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def default(self) -> Any:
        """Value of the method's own parameter in its config; None where it has none to try."""
        return flatten(self.config.tree()).get(self.own[0][0]) if self.own else None

    @cached_property
    def is_view(self) -> bool:
        """Whether the target's label mix is only what its models are scored by: it trains as without a target."""
        mix = self.config.target.mix
        method = methods.build(self.config.method, self.config.training.momentum)
        parts = [part for _, part in method.components()]
        return not (
            isinstance(mix, str)
            or self.config.has_target_client
            or self.config.evaluation.patience
            or any(components.has(part, "needs_target") or getattr(part, "target", False) for part in parts)
            or "held_out" in getattr(method.finish, "asks", ())
        )

    def trained(self, config: Config) -> Config:
        """Return what trains of a config of this entry: the config, without the mix that its models are scored by."""
        return without_target(config) if self.is_view else config

    @cached_property
    def training(self) -> str:
        """The digest of what it trains, the same in situations that are views of one training."""
        return self.trained(self.config).digest

    @property
    def name(self) -> str:
        """Name in messages."""
        place = ", ".join(f"{axis}={label}" for axis, label in self.situation.items())
        return f"{self.method} in {place or 'the one situation'}"


@dataclass(frozen=True)
class Arena:
    """An arena as `Arena.read` reads it.

    Attributes:
        axes: Names of what situations differ in.
        entries: Every method in every situation, one situation after another.
        refused: Combinations that make no sense, and why, a line each.
    """

    name: str
    axes: tuple[str, ...]
    entries: tuple[ArenaEntry, ...]
    settings: Settings
    command: str
    refused: tuple[str, ...]

    @cached_property
    def trainings(self) -> dict[tuple[str, ...], str]:
        """For each situation, a name that it shares with those that differ from it in the target's label mix alone."""
        found = {}
        for entry in self.entries:
            if entry.method == self.settings.reference:
                config = entry.config if entry.config.target.is_estimated else without_target(entry.config)
                found[tuple(entry.situation.values())] = config.digest
        return found

    def folder(self, out: Path) -> Path:
        """Return the arena's folder, which stays the same when methods or situations are added."""
        return out / f"arena-{self.name}"

    @staticmethod
    def read(
        path: Path, changes: Mapping[str, Any] | None = None, quick: bool = False, only: Mapping[str, str] | None = None
    ) -> "Arena":
        """Read an arena from a TOML file, and check everything in it that `only` leaves.

        Args:
            changes: Dotted keys to change, `arena.*` and `sweep.*` included, and their values.
            quick: Whether the `[quick]` table of the file applies.
            only: Labels by axis (or `method`), several joined by `|`: keep only the entries that have one of them.

        Raises:
            ConfigError: Something is wrong; the message names file, line, key. CombinationError: nothing makes sense.
        """
        changes, only = dict(changes or {}), only or {}
        tree, text, changed = read_tree(path, "arena", changes, quick)
        section, sweep = tree.pop("arena", None), tree.get("sweep")
        if not isinstance(section, dict) or not isinstance(sweep, dict) or "methods" not in sweep:
            raise ConfigError(
                f"{path}: an arena needs a table [arena], and a table [sweep] with methods; see fedskew arena --help"
            )
        with placed(f"{path}: ", None, of=ConfigError):
            settings = _settings(section)
            own = _own(sweep)
        if isinstance(evaluation := tree.setdefault("evaluation", {}), dict):
            evaluation.setdefault("intervals", False)  # nobody looks at a single run's
        whole = Sweep.of(tree, text, path, changes, quick, changed, "arena", only)
        axes = tuple(axis for axis in whole.axes if axis != "method")
        if settings.blocks is not None and settings.blocks not in axes:
            raise ConfigError(f"{path}: arena.blocks: no axis {settings.blocks!r}{nearest(settings.blocks, axes)}")
        by_situation: dict[tuple[str, ...], list[ArenaEntry]] = {}  # one that is stopped early has complete comparisons
        for cell in whole.cells:
            situation, method = {axis: cell.values[axis] for axis in axes}, cell.values["method"]
            entry = ArenaEntry(situation, method, cell.config, own.get(method, ()))
            by_situation.setdefault(tuple(situation.values()), []).append(entry)
        entries = [entry for group in by_situation.values() for entry in group]
        labels = [entry["label"].strip() if isinstance(entry, dict) else entry for entry in sweep["methods"]]
        if settings.reference not in labels:
            similar = nearest(settings.reference, labels)
            raise ConfigError(f"{path}: arena.reference: no method is labelled {settings.reference!r}{similar}")
        _check(path, settings, entries)
        command = " ".join([whole.command, *(f"--only {axis}={label}" for axis, label in only.items())])
        refused = tuple(f"{cell.label}: {cell.reason}" for cell in whole.refused)
        return Arena(whole.name, axes, tuple(entries), settings, command, refused)


def _settings(section: dict[str, Any]) -> Settings:
    rates = section.get("rates")
    with one_mistake("arena.", Settings):
        return Settings(**{"budget": len(rates) if isinstance(rates, list) else 0} | section)


def _check(path: Path, settings: Settings, entries: list[ArenaEntry]) -> None:
    for entry in {entry.method: entry for entry in reversed(entries)}.values():
        where = f"{path}: own values of {entry.method}"
        for key, value in entry.own:
            with placed(f"{where}: ", of=FedskewError):
                entry.config.with_value(key, value)
        if settings.rates and entry.config.data.validation == 0:
            raise ConfigError(f"{path}: data.validation: is 0, and rates are chosen on validation samples; set 0.2")
        if entry.config.tune is not None:
            raise ConfigError(f"{path}: tune: an arena tunes by arena.rates and own; leave it out")
        if settings.rates and len(settings.rates) + len(entry.own) > settings.budget:
            raise ConfigError(
                f"{where}: {len(entry.own)} and {len(settings.rates)} rates are more than arena.budget = "
                f"{settings.budget}"
            )


def _own(sweep: dict[str, Any]) -> dict[str, tuple[tuple[str, Any], ...]]:
    """Remove `own` from the methods of a sweep, and return the values to try by the method's label."""
    found: dict[str, tuple[tuple[str, Any], ...]] = {}
    if not isinstance(sweep["methods"], list):
        return found
    sweep["methods"] = [dict(entry) if isinstance(entry, dict) else entry for entry in sweep["methods"]]
    for at, entry in enumerate(sweep["methods"]):
        if not isinstance(entry, dict) or "own" not in entry:
            continue
        where, table = f"sweep.methods[{at}].own", entry.pop("own")
        flat = flatten(table) if isinstance(table, dict) else {}
        if len(flat) != 1 or not isinstance(values := next(iter(flat.values())), list) or not values:
            raise ConfigError(f"{where}: expected one key with values to try, such as {{method.local_step.mu = [0.1]}}")
        key = next(iter(flat))
        if key.split(".")[0] not in {"method", "training"} or key == "training.lr":
            raise ConfigError(f"{where}.{key}: not a parameter of the method's own, such as method.local_step.mu")
        found[str(entry.get("label"))] = tuple((key, value) for value in values)
    return found
