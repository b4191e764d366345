"""A sweep: one task under several methods, values and seeds. Every cell and seed of the grid is an ordinary run.

The file is the config of a run with one more table:

    [sweep]
    accuracy = 0.8              # the table says after how many rounds this test accuracy is reached
    methods = [
        "fedavg",
        "fedentopt+fedprox",
        {label = "fedpals, half", weighting = {name = "fedpals", ess = 0.5}},
        {label = "fedprox, small steps", preset = "fedprox", set = {training.lr = 0.01}},
    ]

    [sweep.grid]                # every combination of these, with every method
    partition.beta = [0.1, 0.5]
    training.participation = [0.1, 0.25]

A method is a preset, or a table with a `label`, what `[method]` would hold, and `set` for keys that differ under it.
A key of the grid is any key of the config; a value that is a table replaces the whole table, and `label` names it:

    partition = [
        {label = "two labels each", rule = "quantity", clients = 20, labels_per_client = 2},
        {label = "Dir(0.1)", rule = "dirichlet_by_class", clients = 20, beta = 0.1},
    ]

An axis whose values change several keys together has any name of its own, and values with `label` and `set`:

    task = [
        {label = "digits", set = {data.name = "digits", training.lr = 0.1}},
        {label = "MNIST", set = {data.name = "mnist", data.rows = 2_000}},
    ]
"""

import copy
import hashlib
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedskew import methods
from fedskew.errors import CombinationError, ConfigError, FedskewError, nearest
from fedskew.experiment._config import Config, resolve
from fedskew.tables import flatten
from fedskew.trees import line_of, put, read_tree

_KEYS = ("methods", "grid", "accuracy")
_NO_AXIS = {
    "seeds": "seeds are no axis; give them as seeds = [0, 1, 2] at the top of the file, or with --seeds",
    "method": "methods are given as sweep.methods; keys below it, such as method.weighting.ess, may be here",
}
_LONGEST = 80
_FIXED = ("schema", "name", "output", "sweep", "quick")


@dataclass(frozen=True)
class Cell:
    """One combination of a sweep: its name, the label of its value on each axis, and the config with all its seeds."""

    label: str
    values: dict[str, str]
    config: Config


@dataclass(frozen=True)
class RefusedCell:
    """A combination of a sweep that makes no sense, so that it has no config, and the reason."""

    label: str
    values: dict[str, str]
    reason: str


@dataclass(frozen=True)
class Sweep:
    """A grid of runs, of which the first axis varies slowest, and combinations that make no sense; the test accuracy
    whose first round the table names, and the command line that runs it."""

    name: str
    cells: tuple[Cell, ...]
    accuracy: float | None
    command: str
    refused: tuple[RefusedCell, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of what the cells differ in: `method` and keys of the grid, shortened where that is unambiguous."""
        return tuple(self.cells[0].values)

    @property
    def hash(self) -> str:
        """Eight hex digits that change with anything that can change the tables."""
        cells = [
            *((cell.label, cell.config.hash) for cell in self.cells),
            *((cell.label, cell.reason) for cell in self.refused),
        ]
        return hashlib.sha256(json.dumps([cells, self.accuracy]).encode()).hexdigest()[:8]

    def folder(self, out: Path) -> Path:
        """Return the folder of the sweep's tables, beside the run folders in `out`."""
        return out / f"sweep-{self.name}-{self.hash}"

    @staticmethod
    def read(path: Path, changes: Mapping[str, Any] | None = None, quick: bool = False) -> "Sweep":
        """Read a sweep from a TOML file, and check every cell.

        What can't be read, such as an unknown name or a value out of range, is a mistake in the file and stops all
        (ConfigError). Components that don't go together are no mistake of the grid: the sweep has the other cells, and
        names those; CombinationError where there is no other.
        """
        changes = dict(changes or {})
        tree, text, changed = read_tree(path, "sweep", changes, quick)
        quoted = shlex.quote(str(path))
        if "arena" in tree:
            raise ConfigError(f"{path}: it has an [arena] table, so use: fedskew arena {quoted}")
        if "sweep" not in tree:
            raise ConfigError(f"{path}: it has no [sweep] table, so it is one run: fedskew run {quoted}")
        return Sweep.of(tree, text, path, changes, quick, changed, "sweep")

    @staticmethod
    def of(
        tree: dict[str, Any],
        text: str,
        path: Path,
        changes: Mapping[str, Any],
        quick: bool,
        changed: Collection[str],
        command: str,
        only: Mapping[str, str] | None = None,
    ) -> "Sweep":
        """Check the cells of a sweep that `command` read by `read_tree`, those with labels in `only`; see `read`."""
        source = _Source(path, text, frozenset(changed))
        tree = copy.deepcopy(tree)
        section = tree.pop("sweep")
        try:
            axes = _axes(section, tree)
            accuracy = _accuracy(section)
        except FedskewError as error:
            raise source.located(error) from None
        axes |= {axis: _chosen(axis, labels, axes, path) for axis, labels in (only or {}).items()}
        cells: list[Cell] = []
        refused: list[RefusedCell] = []
        errors: list[CombinationError] = []
        for combination in itertools.product(*axes.values()):
            label, values = _label_of(combination, axes)
            try:
                cells.append(_cell(combination, label, values, tree, source))
            except CombinationError as error:
                refused.append(RefusedCell(label, values, str(error)))
                errors.append(error)
        if not cells:
            is_of_file = str(errors[0]).startswith("sweep.") or not refused[0].label
            raise source.located(errors[0], "" if is_of_file else f"cell {refused[0].label!r}: ")
        _check_distinct(cells, path)
        name = str(tree.get("name", "run"))
        return Sweep(name, tuple(cells), accuracy, _command_line(command, path, changes, quick), tuple(refused))


@dataclass(frozen=True)
class _Value:
    """One value of an axis, and the dotted keys that it sets; or why it makes no sense with anything."""

    label: str
    changes: dict[str, Any]
    refused: CombinationError | None = None


@dataclass(frozen=True)
class _Source:
    """The file, its text, and the dotted keys that were changed on the command line."""

    path: Path
    text: str
    given: frozenset[str]

    def located(self, error: FedskewError, cell: str = "", changed: Mapping[str, Any] | None = None) -> FedskewError:
        """Add file, line of the key where it has one, and cell to an error; `changed`: the keys that the cell sets."""
        key = re.split(r"[\[:]", str(error), maxsplit=1)[0]
        written = f"sweep.grid.{key}" if key in (changed or {}) else key
        line = None if written in self.given else line_of(self.text, written)
        return type(error)(f"{self.path}{'' if line is None else f', line {line}'}: {cell}{error}")


def _axes(section: Any, tree: dict[str, Any]) -> dict[str, list[_Value]]:
    """Return the values of every axis; methods have all their keys, so that the grid can change single ones."""
    if not isinstance(section, dict):
        raise ConfigError(f"sweep: expected a table [sweep], got {section!r}")
    for key in section:
        if key == "seeds":
            raise ConfigError(f"sweep.{key}: {_NO_AXIS[key]}")
        if key not in _KEYS:
            raise ConfigError(f"sweep.{key}: no such key{nearest(key, _KEYS)}")
    grid = _grid(section.get("grid", {}))
    axes: dict[str, list[_Value]] = {}
    if "methods" in section:
        if "method" in tree:
            raise ConfigError(
                "method: sweep.methods replaces it, so it would be lost; give it there, or for every method "
                "as sweep.grid, such as method.server_update = ['fedexp']"
            )
        axes["method"] = _methods(section["methods"], set(grid))
    elif any(key.startswith("method.") for key in grid) and isinstance(own := tree.get("method", {}), (str, dict)):
        tree["method"] = methods.expand({"preset": own} if isinstance(own, str) else own)
    short = {key: key.rpartition(".")[2] for key in grid}
    taken = Counter([*short.values(), *axes])
    return axes | {short[key] if taken[short[key]] == 1 else key: values for key, values in grid.items()}


def _chosen(axis: str, labels: str, axes: Mapping[str, list[_Value]], path: Path) -> list[_Value]:
    """Return the values of an axis that have one of the labels, which are joined by `|`."""
    if axis not in axes:
        raise ConfigError(f"--only {axis}: {path} has no such axis{nearest(axis, axes)}")
    wanted, known = {label.strip() for label in labels.split("|")}, {value.label: value for value in axes[axis]}
    for label in wanted - known.keys():
        raise ConfigError(f"--only {axis}={label}: no such label{nearest(label, known)}")
    return [value for label, value in known.items() if label in wanted]


def _methods(entries: Any, gridded: set[str]) -> list[_Value]:
    where = "sweep.methods"
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: expected a list of presets and tables, such as ['fedavg', 'fedvls']")
    values = []
    for at, entry in enumerate(entries):
        table = {"label": entry, "preset": entry} if isinstance(entry, str) else entry
        if not isinstance(table, dict):
            raise ConfigError(f"{where}[{at}]: expected a preset or a table, got {entry!r}")
        label = _label(table.get("label"), f"{where}[{at}]")
        changes = _set(table, f"{where}[{at}].set")
        for key in changes:
            if key in gridded:
                raise ConfigError(f"{where}[{at}].set.{key}: sweep.grid sets it too; leave it to one of them")
        try:
            method = methods.expand({key: value for key, value in table.items() if key not in {"label", "set"}})
        except CombinationError as error:
            values.append(_Value(label, {"method": {}, **changes}, type(error)(f"{where}[{at}] ({label}): {error}")))
            continue
        except FedskewError as error:
            raise type(error)(f"{where}[{at}] ({label}): {error}") from None
        values.append(_Value(label, {"method": method, **changes}))
    _check_labels(values, where)
    return values


def _grid(table: Any) -> dict[str, list[_Value]]:
    if not isinstance(table, dict):
        raise ConfigError("sweep.grid: expected a table of lists, such as partition.beta = [0.1, 0.5]")
    axes = {}
    for key, given in flatten(table).items():
        where = f"sweep.grid.{key}"
        _check_key(key, "sweep.grid")
        if not isinstance(given, list) or not given:
            raise ConfigError(f"{where}: expected a list of values, such as [0.1, 0.5] (got {given!r})")
        axes[key] = [_grid_value(key, value, f"{where}[{at}]") for at, value in enumerate(given)]
        _check_labels(axes[key], where)
    return axes


def _grid_value(key: str, value: Any, where: str) -> _Value:
    if not isinstance(value, dict) or "label" not in value:
        return _Value(_text(value), {key: value})
    label = _label(value["label"], where)
    if set(value) == {"label", "set"}:
        return _Value(label, _set(value, f"{where}.set"))
    return _Value(label, {key: {name: own for name, own in value.items() if name != "label"}})


def _set(table: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the keys that a method or value sets, flat."""
    changes = table.get("set", {})
    if not isinstance(changes, dict):
        raise ConfigError(f"{where}: expected a table of keys, such as {{training.lr = 0.01}}")
    for key in (flat := flatten(changes)):
        _check_key(key, where)
    return flat


def _text(value: Any) -> str:
    """Return a value as a table of results shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return " ".join(f"{key}={_text(own)}" for key, own in value.items())
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def _label(label: Any, where: str) -> str:
    if label is None:
        raise ConfigError(f"{where}.label: missing; it names the table's rows in the results and its run folders")
    if not isinstance(label, str) or not label.strip() or not label.isprintable():
        raise ConfigError(f"{where}.label: expected a few words on one line, got {label!r}")
    return label.strip()


def _accuracy(section: dict[str, Any]) -> float | None:
    accuracy = section.get("accuracy")
    if accuracy is None:
        return None
    if isinstance(accuracy, bool) or not isinstance(accuracy, (int, float)) or not 0 < accuracy <= 1:
        raise ConfigError(f"sweep.accuracy: expected a share above 0 and up to 1, such as 0.8 (got {accuracy!r})")
    return float(accuracy)


def _check_key(key: str, where: str) -> None:
    if key in _NO_AXIS:
        raise ConfigError(f"{where}.{key}: {_NO_AXIS[key]}")
    if key.split(".")[0] in _FIXED:
        raise ConfigError(f"{where}.{key}: it is the same for all cells; set it at the top of the file")


def _check_labels(values: list[_Value], where: str) -> None:
    label, times = Counter(value.label for value in values).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"{where}: {label!r} occurs {times} times; drop one, or give it another label")


def _label_of(combination: tuple[_Value, ...], axes: dict[str, list[_Value]]) -> tuple[str, dict[str, str]]:
    """Return a cell's name, and the label of its value on each axis."""
    values = dict(zip(axes, combination, strict=True))
    label = ", ".join(
        value.label if any(isinstance(own, dict) for own in value.changes.values()) else f"{axis}={value.label}"
        for axis, value in values.items()
    )
    return label, {axis: value.label for axis, value in values.items()}


def _cell(
    combination: tuple[_Value, ...], label: str, values: dict[str, str], tree: dict[str, Any], source: _Source
) -> Cell:
    for value in combination:
        if value.refused is not None:
            raise value.refused
    changes = {key: own for value in combination for key, own in value.changes.items()}
    whole = copy.deepcopy(tree)
    try:
        for key in sorted(changes, key=lambda key: key.count(".")):  # a table before what stands in it
            put(whole, key, copy.deepcopy(changes[key]))
        config = resolve(whole)
    except CombinationError:
        raise
    except FedskewError as error:
        raise source.located(error, f"cell {label!r}: " if label else "", changes) from None
    named = values or {"run": config.name}
    return Cell(label or config.name, named, config.model_copy(update={"name": _name(config.name, label)}))


def _name(run: str, label: str) -> str:
    """Return a cell's run name, of the characters that one may have; where it is cut, digits tell it from its like."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", f"{run}-{label}").rstrip("-")
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9].rstrip('-')}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def _check_distinct(cells: list[Cell], path: Path) -> None:
    labels: dict[str, str] = {}
    for cell in cells:
        other = labels.setdefault(cell.config.digest, cell.label)
        if other != cell.label:
            raise ConfigError(f"{path}: cells {other!r} and {cell.label!r} are one and the same run; drop one of them")
    label, times = Counter(cell.label for cell in cells).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"{path}: {times} cells are called {label!r}; give their values other labels")


def _command_line(command: str, path: Path, changes: Mapping[str, Any], quick: bool) -> str:
    """Return the command line that runs a file, without the folder of the data sets, which is of this machine only."""
    words = ["fedskew", command, str(path), *(["--quick"] if quick else [])]
    for key, value in changes.items():
        if key != "data.root":
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)
