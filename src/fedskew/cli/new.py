"""`fedskew new`: a config to begin with, with a comment on every key, that runs as it is written; `fedskew schema`."""

from __future__ import annotations

import json
import math
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import Argument, Option

from fedskew.cli.options import Changes, ClientColumn, DecimalSign, LabelColumn, Separator, SkipBroken
from fedskew.cli.page import Console, check_apart
from fedskew.errors import ArgumentError, ConfigError, DataError
from fedskew.files import writing
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew.cli.config_keys import Key
    from fedskew.data import Dataset, Proposal

T = TypeVar("T", str, int)
SCHEMA = "fedskew.schema.json"
WIDTH = 110

LOCAL_STEPS = 1000
"""Local steps, over all rounds, of a client that takes part in all of them."""

EPOCHS = 2
FEWEST_ROUNDS = 20

RATES: Mapping[str, float] = {"logistic": 0.1, "mlp3": 0.1, "table": 0.05, "lenet5": 0.1, "fasttext": 1.0}
"""Learning rates to begin with; of other networks 0.05."""

MEASURED = ("logistic", "mlp3", "table", "lenet5", "cnn_mnist")
"""Networks that learn with these rates and so many steps: docs/runs.md."""

OFF = ("tune", "privacy")
"""Tables that a config begins without, as they change what a run does by being there."""


def new(
    path: Annotated[Path, Argument(help="The file to write.")],
    data: Annotated[str | None, Option(help="The data set: `fedskew list data`.  [default: digits]")] = None,
    root: Annotated[Path | None, Option(help="Your folder or file, for folder, npz, csv, huggingface.")] = None,
    rule: Annotated[
        str | None, Option(help="Who holds what: `fedskew list partitions`.  [default: dirichlet_by_class]")
    ] = None,
    clients: Annotated[
        int | None, Option(help="Number of clients.  [default: 10; fewer where there are few samples]")
    ] = None,
    model: Annotated[
        str | None,
        Option(help="The network: `fedskew list models`.  [default: mlp3; table for tables, fasttext for texts]"),
    ] = None,
    method: Annotated[str | None, Option(help="The method: `fedskew methods`.  [default: fedavg]")] = None,
    rounds: Annotated[int | None, Option(help="Number of rounds.  [default: as the data need]")] = None,
    schema: Annotated[
        bool, Option("--schema", help=f"Also write {SCHEMA}, by which editors complete and check the file.")
    ] = False,
    changes: Changes = None,
    skip_broken: SkipBroken = False,
    force: Annotated[bool, Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a config with every key, its default and what it means, ready to run.

    On a terminal it asks for what no option says; elsewhere it takes the defaults. Clients, rounds, batch size and
    learning rate follow from the data, so that FedAvg learns them; where that is not known, it says so.

    Examples:

        fedskew new my.toml
        fedskew new my.toml --data csv --root patients.csv --set data.label=diagnosis     (and my.schema.toml)
        fedskew new my.toml --data folder --root images --rule natural --model lenet5 --method fedvls --schema
        fedskew run my.toml
    """
    from fedskew import methods
    from fedskew.cli.config_keys import choices, json_schema
    from fedskew.data import INDEX, OWN
    from fedskew.experiment import resolve, shared_data

    check_apart(path)
    if path.suffix != ".toml":
        raise ConfigError(f"{path}: a config is a .toml file; write to one, such as {path.name}.toml")
    if path.exists() and not force:
        raise ConfigError(f"{path}: is there already; write elsewhere, or add --force to replace it")
    known = {place: [entry.name for entry in entries] for place, entries in choices().items()}
    data = _answer("Data set", data, "digits", known["data.name"])
    if root is None and data in OWN:
        if not sys.stdin.isatty():
            raise ConfigError(f"--root: data set {data!r} is a folder or file of yours; say which, such as --root mine")
        root = Path(_answer("Folder or file of the data", None, "data"))
    rule = _answer("Partition rule", rule, "dirichlet_by_class", known["partition.rule"])
    with_clients = [name for name, reader in INDEX.items() if hasattr(reader, "names_clients")]
    if rule == "natural" and data not in with_clients:
        raise ConfigError(
            f"--rule natural: data set {data!r} names no clients; take another rule (fedskew list partitions), or data "
            f"that do: {', '.join(with_clients)}"
        )
    chosen: dict[str, Any] = {
        "name": _run_name(path),
        "seeds": [0],
        "data": {"name": data} | ({} if root is None else {"root": str(root)}),
        "partition": {"rule": rule},
    }
    if data == "folder" and rule == "natural":  # only folders CLIENT/CLASS name clients
        chosen["data"]["client_level"] = True
    if skip_broken:
        chosen["data"]["skip_broken"] = True
    _change(chosen, changes)
    proposal = None
    if data == "csv" and "schema" not in chosen["data"]:
        proposal = _propose(chosen["data"])
        chosen["data"]["schema"] = proposal.schema.plain()
    with shared_data():
        found = _at_hand(chosen["data"])
        size = _Size.of(found, chosen["data"].get("rows"), rule)
        clients = chosen["partition"].get("clients", clients)
        if clients is None and rule != "natural":
            clients = _answer("Clients", None, size.clients)
        size = replace(size, clients=clients or size.clients)
        usual = "fasttext" if size.is_text else "table" if data == "csv" else "mlp3"
        model = _answer("Network", model, usual, known["model.name"])
        method = _answer("Method, or methods joined by +", method, "fedavg", list(methods.PRESETS))
        rounds = _answer("Rounds", rounds, size.rounds)
        own: tuple[Key, ...] = next((one.keys for one in choices()["partition.rule"] if one.name == rule), ())
        values = {
            "beta": 0.3,
            "labels_per_client": min(2, size.classes),
            "per_client": 2,
            "classes_per_client": min(2, size.classes),
            "exclusive_share": 0.2,
            "samples_per_client": max(size.samples // (2 * size.clients), 1),
        }
        chosen["partition"] |= {"clients": clients} | {key.name: values[key.name] for key in own if key.required}
        chosen |= {"model": {"name": model}, "method": {"preset": method}}
        if model == "fasttext" and found is not None and (words := getattr(found.encoder, "words", ())):
            chosen["model"]["vocabulary"] = len(words) + 2  # a padding and an unknown word; others are only sent
        chosen["training"] = {
            "rounds": rounds,
            "participation": 0.5 if size.clients >= 4 else 1.0,
            "epochs": EPOCHS,
            "batch_size": size.batch,
            "lr": RATES.get(model, 0.05),
        }
        for table, keys in _needed(method, rule).items():
            chosen[table] = keys | chosen.get(table, {})
        _change(chosen, changes)
        for key in ("label", "client") if proposal is not None else ():  # the schema has them
            chosen["data"].pop(key, None)
        doubts = _doubts(chosen, size, is_there=found is not None)
        if found is not None:
            chosen, about_labels = _that_runs(chosen)
            doubts += about_labels
    if proposal is not None:
        place = path.with_suffix(".schema.toml")
        if place.exists() and not force:
            raise ConfigError(f"{place}: is there already; take it by --set data.schema={place}, or add --force")
        with writing(place):
            place.write_text(proposal.text(), encoding="utf-8")
        chosen["data"]["schema"] = str(place)
        doubts += [f"{place}: {line}" for line in proposal.unclear]
    text = _text(chosen, schema)
    resolve(tomllib.loads(text))
    with writing(path):
        path.write_text(text, encoding="utf-8")
        if schema:
            path.with_name(SCHEMA).write_text(json.dumps(json_schema(), ensure_ascii=False, indent=1), encoding="utf-8")
    console = Console()
    console.say(f"written: {path}")
    console.warn(doubts)
    console.say(f"train it: fedskew run {shlex.quote(str(path))}")


@dataclass(frozen=True)
class _Size:
    """How large the data are: samples, classes, clients that share them, and whether samples are texts."""

    samples: int
    classes: int
    clients: int
    is_text: bool

    @classmethod
    def of(cls, data: Dataset | None, rows: int | None, rule: str) -> _Size:
        """Return the size of data at hand, or else of a guess, with the number of clients to begin with."""
        from torch import Tensor

        if data is None:
            return cls(1000, 10, 10, False)
        samples, classes = min(len(data.targets), rows or sys.maxsize), data.num_classes
        clients = len(data.client_names) if rule == "natural" else min(max(samples // 40, 2), 10)
        is_text = isinstance(data.inputs, Tensor) and not data.inputs.is_floating_point()
        return cls(samples, classes, clients, is_text)

    @property
    def batch(self) -> int:
        """About an eighth of a client's samples, a power of two from 8 to 64."""
        return 1 << min(max(round(math.log2(max(self.samples / self.clients, 1) / 8)), 3), 6)

    @property
    def rounds(self) -> int:
        """Rounds in which a client that always takes part takes `LOCAL_STEPS`, and not fewer than `FEWEST_ROUNDS`."""
        steps = EPOCHS * math.ceil(self.samples / self.clients / self.batch)
        return max(math.ceil(LOCAL_STEPS / steps), FEWEST_ROUNDS)


def _change(chosen: dict[str, Any], changes: list[str] | None) -> None:
    from fedskew.trees import parse_change, put

    for key, value in map(parse_change, changes or []):
        put(chosen, key, value)


def _at_hand(table: Mapping[str, Any]) -> Dataset | None:
    """Load the data; None where they are not there."""
    from fedskew.data import OWN
    from fedskew.experiment import load_dataset, resolve

    tree = {"data": table, "partition": {"rule": "iid", "clients": 1}, "model": "logistic", "training": {"rounds": 0}}
    try:
        return load_dataset(resolve(tree), 0)
    except DataError as error:
        if table["name"] not in OWN or not Path(table["root"]).exists():
            return None
        options = f"options go here as --set data.KEY=VALUE (fedskew list data {table['name']})"
        raise DataError(f"{error}; {options}") from None


def _propose(table: dict[str, Any]) -> Proposal:
    """Propose a schema of a table, which takes the place of its options for labels and clients."""
    from fedskew.data import Proposal

    root = Path(table["root"])
    label = table.pop("label", None)
    label = tuple(label) if isinstance(label, list) else label
    client, more = table.pop("client", None), (table.get("decimal"), table.get("separator"))
    proposal = Proposal.of_files([root], label, client, *more)
    if not proposal.schema.labelled:
        columns = ", ".join(proposal.schema.columns)
        raise DataError(f"{root}: no column is called label; say which it is: --set data.label=NAME (of {columns})")
    return proposal


def _that_runs(chosen: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the config with as many clients in a round as its method allows, and what its labels say of the run."""
    from fedskew.experiment import make_training_loop, resolve

    reasons = []
    for share in dict.fromkeys([chosen["training"]["participation"], 0.5, 1.0]):
        tree = chosen | {"training": chosen["training"] | {"participation": share}}
        try:
            return tree, make_training_loop(resolve(tree), 0).task().notes
        except ArgumentError as error:
            reasons.append(error)
    raise reasons[0]


def _needed(method: str, rule: str) -> dict[str, dict[str, Any]]:
    """Return what a method needs beside data, as tables of a config: a target's label mix, held-out samples."""
    from fedskew import components, methods, partition

    built = methods.build(methods.expand({"preset": method}), 0.0)
    asks: frozenset[str] = getattr(built.finish, "asks", frozenset())
    needed: dict[str, dict[str, Any]] = {}
    has_target = getattr(partition.INDEX.get(rule), "target_client", False)
    if not has_target and (
        "held_out" in asks or any(components.has(part, "needs_target") for _, part in built.components())
    ):
        needed["target"] = {"mix": "uniform"}
    if "held_out" in asks:
        needed["data"] = {"held_out": 0.1}
    return needed


def _doubts(chosen: Mapping[str, Any], size: _Size, is_there: bool) -> list[str]:
    name, model, training, notes = chosen["data"]["name"], chosen["model"]["name"], chosen["training"], list[str]()
    if not is_there:
        notes.append(f"data set {name!r} is not there, so clients, rounds and batches are guesses; write it again then")
    elif training["rounds"] < size.rounds:
        notes.append(f"{counted(training['rounds'], 'round')} won't do: these data take about {size.rounds}")
    if chosen["partition"]["rule"] == "sparsity":
        notes.append(
            "the test set has classes that the few labels of these clients leave out; expect less than pooled data"
        )
    if model == "fasttext":
        notes.append("texts learn slowly with fasttext: AG News had 60 % of what pooled data reach; take more rounds")
    elif model not in MEASURED:
        notes.append(
            f"{model} was never measured with such rounds and rate, so it may not learn; compare a few rates: "
            "fedskew run ... --set training.lr=0.01"
        )
    return notes


def _answer(question: str, given: T | None, default: T, known: Sequence[str] = ()) -> T:
    """Return the value of an option; without one the answer of the user on a terminal, or else the default."""
    if given is not None:
        return given
    if not sys.stdin.isatty():
        return default
    if known:
        typer.echo(textwrap.fill(f"  ({', '.join(known)})", WIDTH, subsequent_indent="   "))
    answer: T = typer.prompt(question, default=default)
    return answer.strip() if isinstance(answer, str) else answer


def _run_name(path: Path) -> str:
    """Return a run's name, of the characters that one may have, from the file's."""
    kept = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "._+-") else "-" for sign in path.stem)
    return kept.lstrip("._+-")[:80] or "run"


def _text(chosen: Mapping[str, Any], schema: bool) -> str:
    """Return the file: keys that were chosen, and all others behind a comment sign, each with its meaning."""
    from fedskew.cli.config_keys import choices, tables

    lines = [f"#:schema ./{SCHEMA}"] if schema else []
    lines += ["# A config of fedskew, for `fedskew run`. A key behind # has the value that is shown; behind ..., none."]
    named = {"data": "name", "partition": "rule", "model": "name"}
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
        if key_name := named.get(table.name):
            entries = choices()[f"{table.name}.{key_name}"]
            lines += [_line(key, values) for one in entries if one.name == values[key_name] for key in one.keys]
    return "\n".join(lines) + "\n"


def _line(key: Key, values: Mapping[str, Any]) -> str:
    """Return one key with its meaning, as a comment above where that is long."""
    given = values.get(key.name)
    written = f"{key.name} = {json.dumps(given)}" if given is not None else f"# {key.name} = {key.value or '...'}"
    if len(written) + len(key.meaning) + 4 <= WIDTH:
        return f"{written}  # {key.meaning}"
    return "\n".join([*textwrap.wrap(key.meaning, WIDTH, initial_indent="# ", subsequent_indent="# "), written])


def schema(
    files: Annotated[
        list[Path], Argument(help="CSV or Parquet files that are to be read as one table, or a folder of them.")
    ],
    label: LabelColumn = None,
    separator: Separator = None,
    client: ClientColumn = None,
    decimal: DecimalSign = None,
) -> None:
    """Propose a schema for tables: what each column holds, its categories, what may be missing, and the numbers' range.

    The schema is printed, as TOML; what is unclear is said beside it, on standard error: row numbers and identifiers,
    columns that never vary, dates, numbers that may be codes, columns that only some files have. Read it through, and
    correct it. Data, sites, models and exports share it: set data.schema to the file.

    Examples:

        fedskew schema patients.csv > schema.toml
        fedskew schema sites/*.csv --label diagnosis > schema.toml
        fedskew new my.toml --data csv --root 'sites/*.csv' --rule natural --set data.schema=schema.toml
    """
    from fedskew.data import Proposal

    if label is None and sys.stdin.isatty():
        label = typer.prompt("Column of the labels", default="", err=True).strip() or None
    proposal = Proposal.of_files(files, label, client, decimal, separator)
    typer.echo(proposal.text(), nl=False)
    console = Console(stderr=True)
    console.warn(proposal.unclear)
    if not proposal.unclear:
        console.say("Nothing in it is unclear; read it through all the same.")
