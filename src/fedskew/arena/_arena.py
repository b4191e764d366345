"""An arena: methods compared in many situations, each tuned there under one budget, on the same partitions and seeds.

The file is a sweep with one more table; its grid holds the situations.

    [arena]
    partitions = [0, 1]                 # partition seeds: each situation is partitioned once with each
    rates = [0.01, 0.03, 0.1, 0.3]      # learning rates that every method tries
    budget = 6                          # runs that every method may spend on its tuning, those of the rates included
    last = 5                            # a run's score is the mean of its last 5 evaluations
    together = 32                       # with engine.seeds_together: runs of a situation that train at a time

    [sweep]
    methods = [
        "fedavg",
        {label = "fedprox", preset = "fedprox", own = {method.local_step.mu = [0.001, 0.1]}},
    ]

`own` names one parameter of the method and the values to try besides its default; without it, the rest of the budget
goes to learning rates near the best one. Situations may be drawn at random instead (see `_draw.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedskew.arena._draw import draw
from fedskew.errors import ConfigError, FedskewError, nearest
from fedskew.experiment import Config, command_line, read_tree, sweep_of
from fedskew.tables import flatten

_KEYS = ("partitions", "rates", "budget", "last", "reference", "together", "draw")
TUNING_SEED = 1_000_003
"""Seed of the tuning runs and of the partition that they train on; no compared run has it."""


@dataclass(frozen=True)
class ArenaEntry:
    """A method in one situation.

    Attributes:
        situation: The label of the situation on each axis.
        method: Label of the method.
        config: The config, with the training seeds; `partition.seed` and the tuned values are yet to be set.
        own: Values of the method's own parameter to try, each as a key of the config and the value.
    """

    situation: dict[str, str]
    method: str
    config: Config
    own: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.method} in {in_words(self.situation)}"


@dataclass(frozen=True)
class Arena:
    """An arena as `read_arena` reads it.

    Attributes:
        name: Its name.
        axes: Names of what situations differ in.
        methods: Labels of the methods.
        entries: Every method in every situation, one situation after another.
        partitions: Partition seeds.
        rates: Learning rates that every method tries; empty: nothing is tuned.
        budget: Runs that every method may spend on its tuning.
        last: Number of evaluations at the end of a run whose mean is its score.
        reference: Label of the method that the others are compared with.
        together: Number of runs that train at a time, as one cohort where they can; those of one config always do.
        command: The command line that runs it.
        refused: Combinations that make no sense, and why, a line each.
    """

    name: str
    axes: tuple[str, ...]
    methods: tuple[str, ...]
    entries: tuple[ArenaEntry, ...]
    partitions: tuple[int, ...]
    rates: tuple[float, ...]
    budget: int
    last: int
    reference: str
    together: int
    command: str
    refused: tuple[str, ...]

    @cached_property
    def trainings(self) -> dict[tuple[str, ...], str]:
        """For each situation, a name that it shares with those whose models are trained alike and scored otherwise.

        Such situations differ in the target's label mix alone.
        """
        found = {}
        for entry in self.entries:
            if entry.method == self.reference:
                config = entry.config
                if not config.target.is_estimated:
                    config = config.model_copy(update={"target": config.target.model_copy(update={"mix": None})})
                found[tuple(entry.situation.values())] = config.hash
        return found

    def folder(self, out: Path) -> Path:
        """Return the arena's folder, which stays the same when methods or situations are added.

        Args:
            out: The folder of all runs, such as `runs`.
        """
        return out / f"arena-{self.name}"


def in_words(situation: Mapping[str, str]) -> str:
    """Name a situation.

    Args:
        situation: Its label on each axis.
    """
    return ", ".join(f"{axis}={label}" for axis, label in situation.items()) or "the one situation"


def read_arena(
    path: Path, changes: Mapping[str, Any] | None = None, quick: bool = False, only: Mapping[str, str] | None = None
) -> Arena:
    """Read an arena from a TOML file, and check everything in it.

    Args:
        path: The file.
        changes: Dotted keys to change, `arena.*` and `sweep.*` included, and their values.
        quick: Whether the `[quick]` table of the file applies.
        only: Labels by axis (or `method`), several joined by `|`: keep only the entries that have one of them.

    Returns:
        The arena.

    Raises:
        ConfigError: Something is wrong; the message names file, line and key.
        CombinationError: None of its combinations makes sense.
    """
    changes = dict(changes or {})
    tree, text, changed = read_tree(path, "arena", changes, quick)
    section, sweep = tree.pop("arena", None), tree.get("sweep")
    if not isinstance(section, dict) or not isinstance(sweep, dict) or "methods" not in sweep:
        raise ConfigError(
            f"{path}: an arena needs a table [arena], and a table [sweep] with methods; see fedskew arena --help"
        )
    try:
        settings = _Settings.of(section)
        own = _own(sweep)
        if "draw" in section:
            grid = sweep.setdefault("grid", {})
            if not isinstance(grid, dict) or "point" in grid:
                raise ConfigError("sweep.grid.point: the points of [arena.draw] go there; leave it out")
            grid["point"] = draw(section["draw"])
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None
    whole = sweep_of(tree, path, text, changed, command_line("arena", path, changes, quick))
    axes = tuple(axis for axis in whole.axes if axis != "method")
    entries = [
        ArenaEntry(
            {axis: cell.values[axis] for axis in axes},
            cell.values["method"],
            cell.config,
            own.get(cell.values["method"], ()),
        )
        for cell in whole.cells
    ]
    methods = tuple(dict.fromkeys(entry.method for entry in entries))
    settings.check(path, entries, methods)
    chosen = _only(entries, only or {}, path)
    return Arena(
        name=whole.name,
        axes=axes,
        methods=methods,
        entries=tuple(by_situation(chosen)),
        partitions=settings.partitions,
        rates=settings.rates,
        budget=settings.budget,
        last=settings.last,
        reference=settings.reference,
        together=settings.together,
        command=" ".join([whole.command, *(f"--only {axis}={label}" for axis, label in (only or {}).items())]),
        refused=tuple(f"{cell.label}: {cell.reason}" for cell in whole.refused),
    )


def by_situation(entries: Sequence[ArenaEntry]) -> list[ArenaEntry]:
    """Order entries by situation, so that an arena that is stopped early has complete comparisons."""
    order: dict[str, list[ArenaEntry]] = {}
    for entry in entries:
        order.setdefault(in_words(entry.situation), []).append(entry)
    return [entry for group in order.values() for entry in group]


@dataclass(frozen=True)
class _Settings:
    """The table `[arena]`."""

    partitions: tuple[int, ...]
    rates: tuple[float, ...]
    budget: int
    last: int
    reference: str
    together: int

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> _Settings:
        for key in section:
            if key not in _KEYS:
                raise ConfigError(f"arena.{key}: no such key{nearest(key, _KEYS)}")
        partitions = _numbers(section, "partitions", [0], int)
        rates = _numbers(section, "rates", [], float)
        if len(set(partitions)) < len(partitions) or not partitions or min(partitions) < 0:
            raise ConfigError(f"arena.partitions: expected different seeds, such as [0, 1] (got {partitions})")
        if sorted(set(rates)) != rates or (rates and rates[0] <= 0):
            raise ConfigError(f"arena.rates: expected learning rates, rising, such as [0.01, 0.1] (got {rates})")
        budget = _whole(section, "budget", len(rates))
        if budget < len(rates) or (budget and not rates):
            raise ConfigError(
                f"arena.budget: {budget} runs for {len(rates)} rates: expected some arena.rates, and a run for each"
            )
        if len(rates) == 1:
            raise ConfigError(
                "arena.rates: a single rate leaves nothing to tune; give two or more, or set training.lr instead"
            )
        reference = str(section.get("reference", "fedavg"))
        last = _whole(section, "last", 5)
        if last < 1:
            raise ConfigError(f"arena.last: expected at least 1 (got {last})")
        together = _whole(section, "together", 32)
        if together < 1:
            raise ConfigError(f"arena.together: expected at least 1 (got {together})")
        return cls(tuple(partitions), tuple(rates), budget, last, reference, together)

    def check(self, path: Path, entries: Sequence[ArenaEntry], methods: Collection[str]) -> None:
        if self.reference not in methods:
            raise ConfigError(
                f"{path}: arena.reference: no method is labelled {self.reference!r}{nearest(self.reference, methods)}"
            )
        first = {entry.method: entry for entry in reversed(entries)}
        for entry in first.values():
            for key, value in entry.own:
                try:
                    entry.config.with_value(key, value)
                except FedskewError as error:
                    raise ConfigError(f"{path}: own values of {entry.method}: {error}") from None
            if self.rates and entry.config.data.validation == 0:
                raise ConfigError(f"{path}: data.validation: is 0, and rates are chosen on validation samples; set 0.2")
            if entry.config.tune is not None:
                raise ConfigError(f"{path}: tune: an arena tunes by arena.rates and own; leave it out")
            if self.rates and len(self.rates) + len(entry.own) > self.budget:
                raise ConfigError(
                    f"{path}: own values of {entry.method}: {len(entry.own)} and {len(self.rates)} rates are more "
                    f"than arena.budget = {self.budget}"
                )


def _numbers(section: Mapping[str, Any], key: str, default: list[Any], kind: type) -> list[Any]:
    values = section.get(key, default)
    right = int if kind is int else (int, float)
    if not isinstance(values, list) or any(isinstance(one, bool) or not isinstance(one, right) for one in values):
        raise ConfigError(f"arena.{key}: expected a list of numbers (got {values!r})")
    return [kind(value) for value in values]


def _whole(section: Mapping[str, Any], key: str, default: int) -> int:
    value = section.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"arena.{key}: expected a whole number (got {value!r})")
    return value


def _own(sweep: dict[str, Any]) -> dict[str, tuple[tuple[str, Any], ...]]:
    """Remove `own` from the methods of a sweep, and return the values to try by the method's label."""
    found: dict[str, tuple[tuple[str, Any], ...]] = {}
    entries = sweep["methods"] if isinstance(sweep["methods"], list) else []
    for at, entry in enumerate(entries):
        if not isinstance(entry, dict) or "own" not in entry:
            continue
        where = f"sweep.methods[{at}].own"
        table = entry["own"]
        flat = flatten(table) if isinstance(table, dict) else {}
        if len(flat) != 1 or not isinstance(values := next(iter(flat.values())), list) or not values:
            raise ConfigError(f"{where}: expected one key with values to try, such as {{method.local_step.mu = [0.1]}}")
        key = next(iter(flat))
        if key.split(".")[0] not in {"method", "training"} or key == "training.lr":
            raise ConfigError(f"{where}.{key}: not a parameter of the method's own, such as method.local_step.mu")
        found[str(entry.get("label"))] = tuple((key, value) for value in values)
    sweep["methods"] = [
        {key: value for key, value in entry.items() if key != "own"} if isinstance(entry, dict) else entry
        for entry in entries
    ] or sweep["methods"]
    return found


def _only(entries: Sequence[ArenaEntry], only: Mapping[str, str], path: Path) -> list[ArenaEntry]:
    chosen = list(entries)
    for axis, labels in only.items():
        wanted = {label.strip() for label in labels.split("|")}
        known = {_label(entry, axis) for entry in entries}
        if None in known:
            axes = ["method", *entries[0].situation]
            raise ConfigError(f"--only {axis}: {path} has no such axis{nearest(axis, axes)}")
        for label in wanted - known:
            names = [name for name in known if name is not None]
            raise ConfigError(f"--only {axis}={label}: no such label{nearest(label, names)}")
        chosen = [entry for entry in chosen if _label(entry, axis) in wanted]
    if not chosen:
        raise ConfigError("--only: nothing is left")
    return chosen


def _label(entry: ArenaEntry, axis: str) -> str | None:
    return entry.method if axis == "method" else entry.situation.get(axis)
