"""A table or figure of a paper as a file: its rows, and the paper's own settings for each.

    recipes/<paper>/settings.toml       what holds for the whole paper
    recipes/<paper>/<item>.toml         one table or figure; its name is "<paper>-<item>"

`settings.toml` says once what each word of the paper's tables means, as keys of a config (see `fedskew.simulate`):

    [config]                            # the defaults of all runs
    [values.method]                     # an axis, and its labels as the paper prints them
    FedProx = {method = {preset = "fedprox", local_step = {mu = 1e-4}}}
    [[where]]                           # what only some rows have; `set` wins over the above
    partition = ["C=2", "C=3"]
    method = "FedEntOpt"
    set = {method.selection.buffer = 0.7}
    [[deviations]]                      # what differs from the paper, for the rows that it names (none: for all)
    says = "..."

An item names its rows by these labels. It may have tables of its own of each kind, which come after all of the paper's
(a label that it explains itself is not looked up there):

    title = "..."
    measure = "last10.accuracy"         # see `fedskew.papers.value_of`
    [axes]                              # every combination is a row
    dataset = ["CIFAR-10", "CIFAR-100"]
    [[rows]]                            # or several such products, each beside what [axes] says
    partition = "C=3"
    [relative]                          # the figure is the difference from the row with another label of `method`
    "FedProx + FedEntOpt" = "FedProx"
    [readings]                          # one run is read several times: an axis and its labels
    rounds = ["40", "60", "80"]
    [[figure]]                          # see `fedskew.papers.Drawing`
"""

from __future__ import annotations

import copy
import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedskew.errors import ConfigError, FedskewError, nearest
from fedskew.experiment import Config, flatten, put, resolve
from fedskew.papers._datasets import facts_of
from fedskew.papers._drawing import Drawing

Labels = dict[str, str]
"""What a row has on each axis."""

_PLACES = (Path(__file__).parent / "recipes", Path(__file__).parents[3] / "recipes")  # in a wheel, in a checkout
_KEYS = {
    "settings": {"title", "config", "values", "where", "deviations"},
    "item": {
        "title", "measure", "published", "config", "values", "where", "deviations",
        "axes", "rows", "relative", "readings", "figure",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One run of a recipe, each seed of it. `tree`: its config as the recipe says, not checked yet."""

    labels: Labels
    tree: dict[str, Any]

    @property
    def name(self) -> str:
        """Its labels in one line."""
        return ", ".join(self.labels.values())

    @property
    def data(self) -> str:
        """Its data set, as people call it."""
        return facts_of(self.tree["data"]).title

    def config(self, changes: Mapping[str, Any] | None = None) -> Config:
        """Its config, checked, with dotted keys changed. Raises ConfigError naming the row."""
        tree = copy.deepcopy(self.tree)
        try:
            for key, value in (changes or {}).items():
                put(tree, key, value)
            config = resolve(tree)
        except FedskewError as error:
            raise type(error)(f"row {self.name!r}: {error}") from None
        return config.model_copy(update={"name": _run_name(config)})


@dataclass(frozen=True)
class Deviation:
    """What differs from the paper, and for which labels; none named means every row."""

    where: Mapping[str, Sequence[str]]
    says: str

    def concerns(self, labels: Labels) -> bool:
        """Whether a row with these labels is meant."""
        return _matches(self.where, labels)


@dataclass(frozen=True)
class Recipe:
    """One table or figure of a paper.

    `rows` in the order of the file. `measure`: what is read from a run. `published`: under which name the paper's own
    values stand, where it prints any. `relative`: label of `method` to the label that its figure is the change from.
    `readings`: axes that one run is read for.
    """

    name: str
    paper: str
    title: str
    measure: str
    published: str | None
    rows: tuple[Row, ...]
    relative: Mapping[str, str] = field(default_factory=dict)
    readings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    drawings: tuple[Drawing, ...] = ()
    deviations: tuple[Deviation, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of its rows, in order of first use, and those that it is read for."""
        return tuple(dict.fromkeys([*itertools.chain(*(row.labels for row in self.rows)), *self.readings]))

    @property
    def data(self) -> tuple[str, ...]:
        """The data sets that its rows need."""
        return tuple(dict.fromkeys(row.data for row in self.rows))

    def deviating(self, rows: Iterable[Row]) -> list[str]:
        """What differs from the paper in any of these rows."""
        kept = list(rows)
        return [one.says for one in self.deviations if any(one.concerns(row.labels) for row in kept)]

    def choose(self, words: str) -> tuple[Row, ...]:
        """The rows that have these labels: words separated by commas, alternatives where they are of one axis.

        Case, spaces and signs don't matter: "cifar10" is "CIFAR-10", "dir0.1" is "Dir(0.1)". A row that another is
        relative to comes with it. Raises ConfigError for a word that is no label.
        """
        by_axis: dict[str, list[str]] = {}
        for axis in self.axes:
            for row in self.rows:
                if axis in row.labels and row.labels[axis] not in by_axis.setdefault(axis, []):
                    by_axis[axis].append(row.labels[axis])
        known = {plain(label): (axis, label) for axis, labels in by_axis.items() for label in labels}
        wanted: dict[str, set[str]] = {}
        for word in filter(None, map(str.strip, words.split(","))):
            if plain(word) not in known:
                if close := nearest(plain(word), known):
                    close = close.replace("known", "one of")
                raise ConfigError(f"--rows: {self.name} has no row {word!r}{close}")
            axis, label = known[plain(word)]
            wanted.setdefault(axis, set()).add(label)
        if "method" in wanted:
            wanted["method"] |= {self.relative[label] for label in wanted["method"] if label in self.relative}
        chosen = tuple(row for row in self.rows if all(row.labels.get(axis) in wanted[axis] for axis in wanted))
        if not chosen:
            raise ConfigError(f"--rows: {self.name} has no row with all of {words!r}")
        return chosen


def plain(label: str) -> str:
    """A label as it is typed: lower case, without spaces and signs other than "." and "+"."""
    return re.sub(r"[^a-z0-9.+]", "", label.lower())


def names() -> tuple[str, ...]:
    """Every recipe: the papers in order, each with its tables, then its figures, by number."""

    def order(name: str) -> tuple[Any, ...]:
        paper, _, item = name.partition("-")
        found = re.fullmatch(r"(table|fig)(\d+)", item)
        return (paper, "xt"[found[1] == "table"] != "t", int(found[2])) if found else (paper, True, 1000)

    files = folder().glob("*/*.toml")
    return tuple(sorted((f"{f.parent.name}-{f.stem}" for f in files if f.stem != "settings"), key=order))


@cache
def folder() -> Path:
    """Where the recipes are: in the package, or in the checkout that it runs from."""
    for place in _PLACES:
        if any(place.glob("*/settings.toml")):
            return place
    raise ConfigError(f"the recipes are missing: there are none in {' or '.join(map(str, _PLACES))}")


def read_recipe(name: str) -> Recipe:
    """A recipe by its name. Raises ConfigError for an unknown name, naming the nearest, and for a damaged file."""
    if name not in names():
        raise ConfigError(f"no recipe is called {name!r}{nearest(name, names())}")
    paper, _, item = name.partition("-")
    path = folder() / paper / f"{item}.toml"
    settings, own = _tables(path.with_name("settings.toml"), "settings"), _tables(path, "item")
    try:
        return _recipe(name, paper, settings, own)
    except FedskewError as error:
        raise type(error)(f"{path}: {error}") from None


def _recipe(name: str, paper: str, settings: dict[str, Any], own: dict[str, Any]) -> Recipe:
    relative = own.get("relative", {})
    order = list(dict.fromkeys([*settings.get("values", {}), *own.get("values", {})]))
    rows = [Row(labels, _tree(labels, settings, own)) for labels in _combinations(own, relative, order)]
    return Recipe(
        name=name,
        paper=settings["title"],
        title=own["title"],
        measure=own["measure"],
        published=own.get("published"),
        rows=tuple(rows),
        relative=relative,
        readings={axis: tuple(map(str, labels)) for axis, labels in own.get("readings", {}).items()},
        drawings=tuple(Drawing.of(table) for table in own.get("figure", [])),
        deviations=tuple(
            Deviation(_listed(table, "says"), table["says"])
            for table in [*settings.get("deviations", []), *own.get("deviations", [])]
        ),
    )


def _tree(labels: Labels, settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What the paper says of these labels, then what the item says; its own meaning of a label replaces the paper's."""
    own_values = own.get("values", {})
    changes = []
    for table in (settings, own):
        changes.append(table.get("config", {}))
        for axis, label in labels.items():
            own_label = label in own_values.get(axis, {})
            if own_label == (table is own) and label in table.get("values", {}).get(axis, {}):
                changes.append(table["values"][axis][label])
            elif not own_label and table is settings:
                known = [*table.get("values", {}).get(axis, {}), *own_values.get(axis, {})]
                raise ConfigError(f"axes.{axis}: {label!r} is not explained{nearest(label, known)}")
        changes += [rule["set"] for rule in table.get("where", []) if _matches(_listed(rule, "set"), labels)]
    tree: dict[str, Any] = {}
    for change in changes:
        for key, value in flatten(change).items():
            put(tree, key, copy.deepcopy(value))
    return tree


def _combinations(own: dict[str, Any], relative: Mapping[str, str], order: Sequence[str]) -> list[Labels]:
    """The labels of every row, each once, axes in this order; a method that others are relative to before them."""
    found: dict[tuple[tuple[str, str], ...], Labels] = {}
    common = own.get("axes", {})
    for block in own.get("rows", [{}]):
        axes = {axis: [labels] if isinstance(labels, str) else labels for axis, labels in (common | block).items()}
        if unknown := [axis for axis in axes if axis not in order]:
            raise ConfigError(f"axes.{unknown[0]}: no such axis{nearest(unknown[0], order)}")
        axes = {axis: axes[axis] for axis in order if axis in axes}
        if "method" in axes:
            needed = [relative[label] for label in axes["method"] if label in relative]
            axes["method"] = list(dict.fromkeys([*needed, *axes["method"]]))
        for combination in itertools.product(*axes.values()):
            labels = dict(zip(axes, map(str, combination), strict=True))
            found.setdefault(tuple(sorted(labels.items())), labels)
    return list(found.values())


def _listed(table: Mapping[str, Any], but: str) -> dict[str, list[str]]:
    return {
        axis: [labels] if isinstance(labels, str) else list(labels) for axis, labels in table.items() if axis != but
    }


def _matches(where: Mapping[str, Sequence[str]], labels: Labels) -> bool:
    return all(labels.get(axis) in allowed for axis, allowed in where.items())


def _tables(path: Path, kind: str) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: the recipe can't be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for key in tree:
        if key not in _KEYS[kind]:
            raise ConfigError(f"{path}: {key}: no such key{nearest(key, _KEYS[kind])}")
    return tree


def _run_name(config: Config) -> str:
    """A run's name, which says what it is whichever recipe asks for it, so that recipes share runs."""
    method = config.method
    parts = [method[slot]["name"] for slot in method if slot not in {"objective", "pipeline"}]
    parts += [method["objective"]["name"], *(term["name"] for term in method["objective"]["terms"])]
    usual = {"uniform", "sgd", "fedavg", "plain", "cross_entropy"}
    named = [part for part in parts if part not in usual]
    named += [table["name"] for slot, table in method.items() if slot == "pipeline"]
    rule = config.partition.rule.rpartition(":")[2]
    text = "-".join([config.data.name.rpartition(":")[2], rule, config.model.name.rpartition(":")[2], *named])
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text if named else f"{text}-fedavg")[:80]
