"""`fedskew list`: what the names in a config stand for, every key, and the schema that editors use."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fedskew.cli.console import Console
from fedskew.cli.page import AsJson
from fedskew.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fedskew.cli.config_keys import Entry, Key


class What(StrEnum):
    """The lists that `fedskew list` can print."""

    DATA = "data"
    PARTITIONS = "partitions"
    MODELS = "models"
    AUGMENTATIONS = "augmentations"
    TRACKERS = "trackers"
    KEYS = "keys"
    SCHEMA = "schema"


PLACES = {
    What.DATA: "data.name",
    What.PARTITIONS: "partition.rule",
    What.MODELS: "model.name",
    What.AUGMENTATIONS: "training.augmentation",
    What.TRACKERS: "output.trackers",
}
"""The key of a config that takes the names of a list."""


def listing(
    what: Annotated[What, typer.Argument(help="What to list; `fedskew methods` lists methods.", show_default=False)],
    name: Annotated[
        str | None, typer.Argument(help="One of them, to see its own keys; or a table, with keys.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the data sets, partition rules, networks, augmentations or trackers that a config may name, or its keys.

    Examples:

        fedskew list partitions

        fedskew list partitions dirichlet_by_class

        fedskew list keys training

        fedskew list schema > fedskew.schema.json      (for editors; see `fedskew new`)
    """
    from fedskew.cli.config_keys import choices, json_schema, tables

    if what is What.SCHEMA:
        typer.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))
        return
    entries = tables() if what is What.KEYS else choices()[PLACES[what]]
    if name is not None:
        names = [entry.name for entry in entries]
        if name not in names:
            raise ConfigError(f"{name}: nothing of this name among {what.value}{nearest(name, names)}")
        entries = tuple(entry for entry in entries if entry.name == name)
    if as_json:
        typer.echo(json.dumps([_plain(entry) for entry in entries], indent=1, ensure_ascii=False))
        return
    console = Console()
    wide = console.wide
    if what is What.KEYS or name is not None:
        for entry in entries:
            _print_entry(wide, entry, table=what is What.KEYS)
        return
    keyed = any(entry.keys for entry in entries)
    table = _table("name", *(["keys of its own"] if keyed else []), "what it is")
    for entry in entries:
        keys = [Text(", ".join(map(_written, entry.keys)))] if keyed else []
        table.add_row(entry.name, *keys, Text(entry.summary))
    wide.print(table)
    wide.print(f"A config names one as {PLACES[what]}. More: fedskew list {what.value} NAME", markup=False)


def _print_entry(console: Console, entry: Entry, table: bool) -> None:
    title = f"[{entry.name}]" if table and entry.name else entry.name or "top of the file"
    console.print(Text(title, style="bold"))
    console.print(Text(entry.summary))
    if entry.keys:
        shown = _table("key", "value", "meaning")
        for key in entry.keys:
            shown.add_row(_written(key), Text(key.kind), Text(key.meaning))
        console.print(shown)


def _written(key: Key) -> str:
    """Return a key with its default, as a config writes it."""
    return key.name if key.required or not key.value else f"{key.name} = {key.value}"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _plain(entry: Entry) -> dict[str, Any]:
    said = ("name", "required", "default", "meaning")
    keys = [{"value": key.kind} | {name: getattr(key, name) for name in said} for key in entry.keys]
    return {"name": entry.name, "summary": entry.summary, "keys": keys}
