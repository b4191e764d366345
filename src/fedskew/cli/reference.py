"""What there is: `fedskew list` of names in a config, `fedskew methods` of methods, `fedskew check` of your own."""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text
from typer import Argument, Option

from fedskew.cli.page import AsJson, Console, print_json, table_of
from fedskew.errors import ArgumentError, ConfigError, nearest
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew.cli.config_keys import Key


WIDEST = 100
PLACES = {
    "data": "data.name",
    "partitions": "partition.rule",
    "models": "model.name",
    "augmentations": "training.augmentation",
    "trackers": "output.trackers",
}
"""The key of a config that takes the names of a list."""

What = Literal["data", "partitions", "models", "augmentations", "trackers", "keys", "schema"]


def listing(
    what: Annotated[What, Argument(help="What to list; `fedskew methods` lists methods.")],
    name: Annotated[str | None, Argument(help="One of them, to see its own keys; or a table, with keys.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the data sets, partition rules, networks, augmentations or trackers that a config may name, or its keys.

    Example: fedskew list partitions

    Example: fedskew list partitions dirichlet_by_class

    Example: fedskew list keys training

    Example: fedskew list schema > fedskew.schema.json      (for editors; see `fedskew new`)
    """
    from fedskew.cli.config_keys import choices, json_schema, tables

    if what == "schema":
        typer.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))
        return
    entries = tables() if what == "keys" else choices()[PLACES[what]]
    if name is not None:
        names = [entry.name for entry in entries]
        if name not in names:
            raise ConfigError(f"{name}: nothing of this name among {what}{nearest(name, names)}")
        entries = tuple(entry for entry in entries if entry.name == name)
    if as_json:
        said = {"value": "kind"} | {name: name for name in ("name", "required", "default", "meaning")}
        keys = [[{word: getattr(key, name) for word, name in said.items()} for key in one.keys] for one in entries]
        plain = zip(entries, keys, strict=True)
        print_json([{"name": one.name, "summary": one.summary, "keys": own} for one, own in plain])
        return
    wide = Console().wide
    if what == "keys" or name is not None:
        for entry in entries:
            title = f"[{entry.name}]" if what == "keys" and entry.name else entry.name or "top of the file"
            wide.print(Text(title, style="bold"))
            wide.print(Text(entry.summary))
            if entry.keys:
                rows = [[_written(key), key.kind, key.meaning] for key in entry.keys]
                wide.print(table_of(["key", "value", "meaning"], rows))
            if what == "models":
                wide.print(f"layers, for patterns such as {_layers(entry.name)}", markup=False)
        return
    keyed = any(entry.keys for entry in entries)
    headings = ["name", *(["keys of its own"] if keyed else []), "what it is"]
    lines = [[one.name, *([", ".join(map(_written, one.keys))] if keyed else []), one.summary] for one in entries]
    wide.print(table_of(headings, lines))
    wide.print(f"A config names one as {PLACES[what]}. More: fedskew list {what} NAME", markup=False)


def _layers(name: str) -> str:
    """Name the layers of a network that have parameters, with patterns as model.freeze takes them."""
    from fedskew.models import build

    for shape in ((3, 32, 32), (1, 28, 28), (20,), (200,)):
        with suppress(ArgumentError):
            found = build(name, 10, shape).named_parameters()
            return ", ".join(dict.fromkeys(f'"{one.partition(".")[0]}.*"' for one, _ in found))
    return "none"


def _written(key: "Key") -> str:
    """Return a key with its default, as a config writes it."""
    return f"{key.name} = {key.value}" if key.value else key.name


def methods(
    name: Annotated[str | None, Argument(help="A preset, presets joined by +, or a component of a slot.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods with their papers, parameters, costs and compatibility; or explain one of them.

    Takes seconds.

    Example: fedskew methods

    Example: fedskew methods fedentopt+fedprox
    """
    from fedskew.methods import catalogue  # imports PyTorch

    console = Console()
    console.width = min(console.width, WIDEST)
    if as_json:
        tree = catalogue.listing() if name is None else catalogue.explanation(name)
        typer.echo(json.dumps(tree, indent=2, default=str))
    elif name is None:
        catalogue.print_listing(console)
    else:
        catalogue.print_page(console, name)


def check(
    file: Annotated[Path, Argument(help="The Python file that defines them.")],
    changes: Annotated[
        list[str] | None,
        Option("--set", metavar="CLASS.PARAMETER=VALUE", help="A component's parameter; may be repeated."),
    ] = None,
    config: Annotated[
        Path | None, Option(help="A config whose network, classes and shape of samples the tiny federation has.")
    ] = None,
) -> None:
    """Test your own components, of any slot, before you train with them.

    Every class of the file that has a slot's main function (select, value, step, weigh, combine, move, finish,
    trainings) is made, tested in corner cases, trained for three rounds of a tiny federation, repeated and resumed.
    Takes seconds for each. The exit status is 1 if a problem was found.

    Example: fedskew check my_method.py

    Example: fedskew check my_method.py --set Clipped.limit=2.0

    Example: fedskew check my_method.py --config own.toml
    """
    from fedskew import checks
    from fedskew.experiment import read
    from fedskew.trees import parse_change

    found = checks.FoundComponent.in_file(file)
    if not found:
        raise ConfigError(
            f"{file}: no class is a component (has select, value, step, weigh, combine, move, finish or trainings); a "
            "network or sampler isn't checked, but named in a config (see the tutorial 'Add a method of your own')"
        )
    names = {one.kind.__name__ for one in found}
    given: dict[str, dict[str, object]] = {}
    for change in changes or []:
        key, value = parse_change(change)
        name, _, parameter = key.partition(".")
        if name not in names or not parameter:
            raise ConfigError(
                f"--set {change}: expected CLASS.PARAMETER=VALUE with CLASS one of {', '.join(sorted(names))}"
            )
        given.setdefault(name, {})[parameter] = value
    console = Console(soft_wrap=True, highlight=False)
    problems, like = 0, None if config is None else read(config)
    for one in found:
        console.print(f"{one.name} ({one.slot})", style="bold", markup=False)
        for test, problem in checks.check(one, given.get(one.kind.__name__, {}), like):
            problems += problem is not None
            if problem is None:
                console.print(f"  ok      {test}", markup=False)
            else:
                console.print(f"  PROBLEM {test}:\n          {problem}", markup=False, style="red")
    result = counted(problems, "problem") if problems else "nothing found"
    console.print(f"{counted(len(found), 'component')}: {result}")
    if problems:
        raise typer.Exit(1)
