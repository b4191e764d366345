"""`fedskew new`: a config to begin with, with a comment on every key, that runs as it is written."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.console import Console
from fedskew.errors import ConfigError

if TYPE_CHECKING:
    from fedskew.experiment import Entry, Key

SCHEMA = "fedskew.schema.json"
WIDTH = 110

TYPICAL: Mapping[str, Any] = {
    "beta": 0.3,
    "labels_per_client": 2,
    "per_client": 2,
    "classes_per_client": 2,
    "exclusive_share": 0.2,
    "samples_per_client": 50,
}
"""Values to begin with, of a rule's parameters that have no default."""

OFF = ("tune", "privacy")
"""Tables that a config begins without, as they change what a run does by being there."""


def new(
    path: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    data: Annotated[str | None, typer.Option(help="The data set: `fedskew list data`.  [default: digits]")] = None,
    root: Annotated[Path | None, typer.Option(help="Your folder or file, for folder, npz, csv, huggingface.")] = None,
    rule: Annotated[
        str | None, typer.Option(help="Who holds what: `fedskew list partitions`.  [default: dirichlet_by_class]")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.  [default: 10]")] = None,
    model: Annotated[str | None, typer.Option(help="The network: `fedskew list models`.  [default: mlp3]")] = None,
    method: Annotated[str | None, typer.Option(help="The method: `fedskew methods`.  [default: fedavg]")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.  [default: 20]")] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help=f"Also write {SCHEMA}, by which editors complete and check the file.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a config with every key, its default and what it means, ready to run.

    On a terminal it asks for what no option says; elsewhere it takes the defaults.

    Examples:

        fedskew new my.toml

        fedskew new my.toml --data folder --root images --rule natural --model lenet5 --method fedvls --schema

        fedskew run my.toml
    """
    from fedskew import methods
    from fedskew.data import OWN, WITH_CLIENTS
    from fedskew.experiment import choices, json_schema, resolve

    if path.exists() and not force:
        raise ConfigError(f"{path}: is there already; write elsewhere, or add --force to replace it")
    known = {place: [entry.name for entry in entries] for place, entries in choices().items()}
    data = _answer("Data set", data, "digits", known["data.name"])
    if root is None and data in OWN:
        if not sys.stdin.isatty():
            raise ConfigError(f"--root: data set {data!r} is a folder or file of yours; say which, such as --root mine")
        root = Path(_answer("Folder or file of the data", None, "data", []))
    rule = _answer("Partition rule", rule, "dirichlet_by_class", known["partition.rule"])
    if rule == "natural" and data not in WITH_CLIENTS:
        raise ConfigError(
            f"--rule natural: data set {data!r} names no clients; take another rule (fedskew list partitions), or data "
            f"that do: {', '.join(WITH_CLIENTS)}"
        )
    if clients is None and rule != "natural":
        clients = _number("Clients", None, "10")
    model = _answer("Network", model, "mlp3", known["model.name"])
    method = _answer("Method, or methods joined by +", method, "fedavg", list(methods.PRESETS))
    rounds = _number("Rounds", rounds, "20")
    chosen = {
        "name": _run_name(path),
        "seeds": [0],
        "data": {"name": data, "root": None if root is None else str(root)},
        "partition": {"rule": rule, "clients": clients},
        "model": {"name": model},
        "method": {"preset": method},
        "training": {"rounds": rounds},
    }
    if data == "folder" and rule == "natural":  # only folders CLIENT/CLASS name clients
        chosen["data"] |= {"client_level": True}  # type: ignore[operator]
    for entry in choices()["partition.rule"]:
        if entry.name == rule:
            chosen["partition"] |= {key.name: TYPICAL[key.name] for key in entry.keys if key.required}  # type: ignore[operator]
    text = _text(chosen, schema)
    resolve(tomllib.loads(text))
    try:
        path.write_text(text, encoding="utf-8")
        if schema:
            path.with_name(SCHEMA).write_text(json.dumps(json_schema(), ensure_ascii=False, indent=1), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}") from None
    console = Console()
    console.print(f"written: {path}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"train it: fedskew run {shlex.quote(str(path))}", soft_wrap=True, markup=False, highlight=False)


def _answer(question: str, given: str | None, default: str, known: list[str]) -> str:
    """Return the value of an option; without one the answer of the user on a terminal, or else the default."""
    if given is not None or not sys.stdin.isatty():
        return given or default
    if known:
        typer.echo(textwrap.fill(f"  ({', '.join(known)})", WIDTH, subsequent_indent="   "))
    return str(typer.prompt(question, default=default)).strip()


def _number(question: str, given: int | None, default: str) -> int:
    """Return a whole number that an option gives, or else the user, or else the default."""
    answer = _answer(question, None if given is None else str(given), default, [])
    if not answer.isdecimal():
        raise ConfigError(f"{question}: expected a whole number, not {answer!r}")
    return int(answer)


def _run_name(path: Path) -> str:
    """Return a run's name, of the characters that one may have, from the file's."""
    kept = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "._+-") else "-" for sign in path.stem)
    return kept.lstrip("._+-")[:80] or "run"


def _text(chosen: Mapping[str, Any], schema: bool) -> str:
    """Return the file: keys that were chosen, and all others behind a comment sign, each with its meaning."""
    from fedskew.experiment import choices, tables

    lines = [f"#:schema ./{SCHEMA}"] if schema else []
    lines += ["# A config of fedskew, for `fedskew run`. A key behind # has the value that is shown; behind ..., none."]
    own = {
        "data": ("data.name", "name"),
        "partition": ("partition.rule", "rule"),
        "model": ("model.name", "name"),
    }
    for table in tables():
        values = chosen if not table.name else chosen.get(table.name, {})
        if table.name in OFF:
            lines += ["", f"# [{table.name}]  {table.summary}"]
            lines += [_line(key, {}) for key in table.keys]
            continue
        lines += ["", f"# {table.summary}", f"[{table.name}]"] if table.name else [""]
        if table.name == "method":
            lines += [f"preset = {json.dumps(values['preset'])}"]
            lines += ["# weighting = {name = ...}  # or another component for a slot: fedskew methods"]
        lines += [_line(key, values) for key in table.keys]
        if table.name in own:
            place, key_name = own[table.name]
            entry: Entry | None = next((one for one in choices()[place] if one.name == values[key_name]), None)
            lines += [] if entry is None else [_line(key, values) for key in entry.keys]
    return "\n".join(lines) + "\n"


def _line(key: Key, values: Mapping[str, Any]) -> str:
    """Return one key with its meaning, as a comment above where that is long."""
    given = values.get(key.name)
    written = f"{key.name} = {json.dumps(given)}" if given is not None else f"# {key.name} = {key.value or '...'}"
    if len(written) + len(key.meaning) + 4 <= WIDTH:
        return f"{written}  # {key.meaning}"
    return "\n".join([*textwrap.wrap(key.meaning, WIDTH, initial_indent="# ", subsequent_indent="# "), written])
