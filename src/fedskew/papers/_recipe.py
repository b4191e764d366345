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
    measure = "last10.accuracy"         # see `_values.value_of`
    [axes]                              # every combination is a row
    dataset = ["CIFAR-10", "CIFAR-100"]
    [[rows]]                            # or several such products, each beside what [axes] says
    partition = "C=3"
    [relative]                          # the figure is the difference from the row with another label of `method`
    "FedProx + FedEntOpt" = "FedProx"
    [readings]                          # one run gives several values: an axis and its labels
    rounds = ["40", "60", "80"]
    [[figure]]                          # see `FigurePart`
"""

import copy
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pydantic

from fedskew.errors import ConfigError, FedskewError, nearest, placed
from fedskew.experiment import Config, resolve
from fedskew.methods import DEFAULTS
from fedskew.papers._estimate import facts_of
from fedskew.papers._published import PublishedTable, published
from fedskew.parameters import one_mistake
from fedskew.report import SeedRun
from fedskew.tables import flatten
from fedskew.trees import put, read_tree

Labels = dict[str, str]
"""A row's label on each axis."""

_PLACES = (Path(__file__).parent / "recipes", Path(__file__).parents[3] / "recipes")  # in a wheel, in a checkout
_KEYS = {
    "settings": {"title", "config", "values", "where", "deviations"},
    "item": {
        "title", "measure", "published", "config", "values", "where", "deviations",
        "axes", "rows", "relative", "readings", "figure",
    },
}  # fmt: skip


@dataclass(frozen=True)
class RecipeRow:
    """One row of a recipe: its label on each axis, and a config with all its seeds as the recipe says, unchecked."""

    labels: Labels
    tree: dict[str, Any]

    @property
    def name(self) -> str:
        """Labels in one line."""
        return ", ".join(self.labels.values())

    @property
    def data(self) -> str:
        """Title of its data set."""
        return facts_of(self.tree["data"]).title

    def missing(self, root: str | os.PathLike[str] | None = None) -> str | None:
        """Return the first file or folder of its data set that is missing below a root; None where all are present."""
        place = root or os.environ.get("FEDSKEW_DATA")
        folder = Path(place).expanduser() if place else None
        for file in facts_of(self.tree["data"]).places:
            if folder is None or not any(folder.glob(file)):
                plain = file.removesuffix("*")
                return plain if folder is None else str(folder / plain)
        return None

    def number(self, axis: str) -> float:
        """Return the first number of its label on an axis: 0.1 of "Dir(0.1)", 5 of "5 %"."""
        found = re.search(r"\d+(\.\d+)?", self.labels[axis])
        assert found is not None, f"{self.labels[axis]!r} holds no number"
        return float(found[0])

    def config(self, changes: Mapping[str, Any] | None = None, rounds: int | None = None) -> Config:
        """Return its config, with other values for some dotted keys, and no more rounds than these, checked."""
        if rounds is not None and rounds < 1:
            raise ConfigError(f"rounds: must be at least 1, not {rounds}")
        tree = copy.deepcopy(self.tree)
        whole = tree["training"]["rounds"]
        own: dict[str, Any] = {}
        if rounds is not None and rounds < whole:
            own["training.rounds"] = rounds
            if first := tree.get("method", {}).get("pipeline", {}).get("encoder_rounds"):
                own["method.pipeline.encoder_rounds"] = max(1, first * rounds // whole)  # both parts in proportion
        with placed(f"row {self.name!r}: ", None, of=FedskewError):
            for key, value in {**(changes or {}), **own}.items():
                put(tree, key, value)
            config = resolve(tree)
        return config.model_copy(update={"name": _run_name(config)})


Kind = Literal["curves", "against", "bars", "classes", "confusion", "weights", "mixes"]


class FigurePart(pydantic.BaseModel):
    """One part of a figure, such as (a) of (a) to (c).

    Attributes:
        kind: What is drawn:

            - "curves": `value` of the records over rounds, a line for each label of `lines`;
            - "against": `value` of a run against `x`, an axis whose labels hold numbers or another value of a run;
            - "bars": `value` of a run, a group of bars for each label of `x`, a bar for each label of `lines`;
            - "classes": accuracy by class of the clients that `clients` names (none: the mean of all) and of the
              global model;
            - "confusion": a client's confusion matrix, rows truth;
            - "weights": the weight of each client against FedAvg's;
            - "mixes": label mixes of clients and target.
        value: What is read, as in `_values.value_of`; for "curves" a key of a record, such as "entropy" or
            "evaluation.accuracy".
        x: What it is drawn against, an axis or a value.
        lines: The axis whose labels have a colour each.
        panels: Axes; each combination of their labels has a panel.
        where: The rows that are shown.
        clients: Ids of the clients that are shown.
        reference: A level to draw as a dashed line.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    title: str
    value: str = ""
    x: str = ""
    lines: str = "method"
    panels: tuple[str, ...] = ()
    where: dict[str, str | list[str]] = {}
    clients: tuple[int, ...] = ()
    reference: float | None = None

    def shows(self, labels: Labels) -> bool:
        """Return whether a row with these labels is shown."""
        return _matches(self.where, labels)


@dataclass(frozen=True)
class Recipe:
    """One table or figure of a paper.

    Attributes:
        name: "<paper>-<item>".
        measure: What is read from a run.
        published: Name of the table with the paper's own values, where it prints any.
        relative: For a label of `method`, the label from which its value is the change.
        readings: Axes for which one run gives several values, with their labels.
        parts: The parts of the figure, where it is one.
        deviations: What differs from the paper: what it `says`, and the labels of the rows that it concerns.
    """

    name: str
    paper: str
    title: str
    measure: str
    published: str | None
    rows: tuple[RecipeRow, ...]
    relative: Mapping[str, str] = field(default_factory=dict)
    readings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parts: tuple[FigurePart, ...] = ()
    deviations: tuple[Mapping[str, Any], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of its rows, in order of first use, then those of its readings."""
        return tuple(dict.fromkeys([*itertools.chain(*(row.labels for row in self.rows)), *self.readings]))

    @property
    def printed(self) -> PublishedTable | None:
        """The table with the paper's own values; None where it prints none."""
        return None if self.published is None else published(self.published)

    def deviating(self, rows: Iterable[RecipeRow]) -> list[str]:
        """Return what differs from the paper in any of these rows."""
        labels = [row.labels for row in rows]
        return [one["says"] for one in self.deviations if any(_matches(one, row) for row in labels)]

    def choose(self, words: str) -> tuple[RecipeRow, ...]:
        """Return the rows that have these labels.

        The words are labels, separated by commas; labels of one axis are alternatives. Case, spaces and signs are
        ignored: "cifar10" is "CIFAR-10", "dir0.1" is "Dir(0.1)". A row from which another is the change comes with it.
        """
        pairs = [(axis, row.labels[axis]) for axis in self.axes for row in self.rows if axis in row.labels]
        known = {_plain(label): (axis, label) for axis, label in pairs}
        wanted: dict[str, set[str]] = {}
        for word in filter(None, map(str.strip, words.split(","))):
            if _plain(word) not in known:
                if close := nearest(_plain(word), known):
                    close = close.replace("known", "one of")
                raise ConfigError(f"--rows: {self.name} has no row {word!r}{close}")
            axis, label = known[_plain(word)]
            wanted.setdefault(axis, set()).add(label)
        if "method" in wanted:
            wanted["method"] |= {self.relative[label] for label in wanted["method"] if label in self.relative}
        chosen = tuple(row for row in self.rows if all(row.labels.get(axis) in wanted[axis] for axis in wanted))
        if not chosen:
            raise ConfigError(f"--rows: {self.name} has no row with all of {words!r}")
        return chosen

    @staticmethod
    def read(name: str) -> "Recipe":
        """Read a recipe; `names` has the names."""
        if name not in names():
            raise ConfigError(f"no recipe is called {name!r}{nearest(name, names())}")
        paper, _, item = name.partition("-")
        path = folder() / paper / f"{item}.toml"
        settings, own = _tables(path.with_name("settings.toml"), "settings"), _tables(path, "item")
        with placed(f"{path}: ", None, of=FedskewError):
            return _recipe(name, paper, settings, own)


def _plain(label: str) -> str:
    """Return a label in the form that users type: lower case, without spaces and signs other than "." and "+"."""
    return re.sub(r"[^a-z0-9.+]", "", label.lower())


def names() -> tuple[str, ...]:
    """Return the names of all recipes: the papers in order, each with its tables, then its figures, by number."""

    def order(name: str) -> tuple[Any, ...]:
        paper, _, item = name.partition("-")
        found = re.fullmatch(r"(table|fig)(\d+)", item)
        return (paper, "xt"[found[1] == "table"] != "t", int(found[2])) if found else (paper, True, 1000)

    files = folder().glob("*/*.toml")
    return tuple(sorted((f"{f.parent.name}-{f.stem}" for f in files if f.stem != "settings"), key=order))


@cache
def folder() -> Path:
    """Return where the recipes are: in the package, or in the checkout that it runs from."""
    for place in _PLACES:
        if any(place.glob("*/settings.toml")):
            return place
    raise ConfigError(f"the recipes are missing: there are none in {' or '.join(map(str, _PLACES))}")


def config_names() -> tuple[str, ...]:
    """Return the names of the configs and sweeps that come with fedskew, for `fedskew run @NAME`."""
    return tuple(sorted(path.stem for path in folder().glob("*.toml")))


def config_file(name: str) -> Path:
    """Return the file of a config or sweep that comes with fedskew; `config_names` has the names."""
    if name in names():
        raise ConfigError(f"@{name}: is a table or figure of a paper; use: fedskew reproduce {name}")
    if name not in config_names():
        raise ConfigError(f"@{name}: no config of this name comes with fedskew{nearest(name, config_names())}")
    return folder() / f"{name}.toml"


def _recipe(name: str, paper: str, settings: dict[str, Any], own: dict[str, Any]) -> Recipe:
    relative = own.get("relative", {})
    order = list(dict.fromkeys([*settings.get("values", {}), *own.get("values", {})]))
    rows = [RecipeRow(labels, _tree(labels, settings, own)) for labels in _combinations(own, relative, order)]
    with one_mistake("figure."):
        parts = tuple(FigurePart(**table) for table in own.get("figure", []))
    return Recipe(
        name=name,
        paper=settings["title"],
        title=own["title"],
        measure=own["measure"],
        published=own.get("published"),
        rows=tuple(rows),
        relative=relative,
        readings={axis: tuple(map(str, labels)) for axis, labels in own.get("readings", {}).items()},
        parts=parts,
        deviations=(*settings.get("deviations", []), *own.get("deviations", [])),
    )


def _tree(labels: Labels, settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merge the config of these labels from the paper's settings and the item; the item's meaning of a label wins."""
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
                raise ConfigError(f"axes.{axis}: {label!r} has no entry in [values]{nearest(label, known)}")
        changes += [rule["set"] for rule in table.get("where", []) if _matches(rule, labels)]
    moment = own["measure"].partition(".")[0]  # a run's own tables show what the paper's table does
    changes = [{"evaluation.summary": kind} for kind, named in SeedRun.MOMENTS.items() if named == moment] + changes
    tree: dict[str, Any] = {}
    for change in changes:
        for key, value in flatten(change).items():
            put(tree, key, copy.deepcopy(value))
    return tree


def _combinations(own: dict[str, Any], relative: Mapping[str, str], order: Sequence[str]) -> list[Labels]:
    """Return the labels of every row, each once, axes in this order; a row comes before those relative to it."""
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


def _matches(where: Mapping[str, Any], labels: Labels) -> bool:
    """Return whether a row has the labels of a table, which names one or several of an axis."""
    return all(
        labels.get(axis) in ([allowed] if isinstance(allowed, str) else allowed)
        for axis, allowed in where.items()
        if axis not in ("set", "says")
    )


def _tables(path: Path, kind: str) -> dict[str, Any]:
    tree, _, _ = read_tree(path, "recipe")
    for key in tree:
        if key not in _KEYS[kind]:
            raise ConfigError(f"{path}: {key}: no such key{nearest(key, _KEYS[kind])}")
    return tree


def _run_name(config: Config) -> str:
    """Name a run by its config, not by the recipe, so that recipes share runs."""
    method = config.method
    usual = {slot: table["name"] for slot, table in DEFAULTS.items()}
    chosen = {slot: table["name"] for slot, table in method.items() if table["name"] != usual.get(slot)}
    loss, pipeline = ([chosen.pop(slot)] if slot in chosen else [] for slot in ("objective", "pipeline"))
    named = [*chosen.values(), *loss, *(term["name"] for term in method["objective"]["terms"]), *pipeline]
    rule = config.partition.rule.rpartition(":")[2]
    text = "-".join([config.data.name.rpartition(":")[2], rule, config.model.name.rpartition(":")[2], *named])
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text if named else f"{text}-fedavg")[:80]
