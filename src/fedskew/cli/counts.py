"""`fedskew counts`: who holds which labels, counted in any data, as the table that the other commands read."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import typer

from fedskew.cli.options import DataRoot, config_file
from fedskew.errors import ArgumentError, DataWarning, FedskewError
from fedskew.labels import LabelCounts, lists_samples, read_target

SourcePath = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="Label counts in a table (a column client and one for each class, or client,class,count); or what to "
        "count: a folder of images, an .npz file, a CSV file of samples, a folder of Hugging Face, a config, a run.",
        show_default=False,
    ),
]
ClientColumn = Annotated[
    str | None, typer.Option("--client", metavar="COLUMN", help="The column of clients.  [default: as it is called]")
]
LabelColumn = Annotated[
    str | None,
    typer.Option("--label", metavar="COLUMN", help="The column of labels, where each row is one sample."),
]
DecimalSign = Annotated[
    Literal[".", ","] | None,
    typer.Option("--decimal", help="The decimal sign of the table's numbers.  [default: as they show]"),
]
TotalsAre = Annotated[
    Literal["drop", "keep"] | None,
    typer.Option("--totals", help="Drop or keep rows and columns that sum up the others.  [default: drop if they fit]"),
]

TargetPath = Annotated[
    Path | None,
    typer.Option(
        "--target",
        metavar="TARGET.CSV",
        help="The label mix that the model will serve: columns class,share, or class names over one row of shares.  "
        "[default: that of a config or run]",
    ),
]


def counts(
    path: SourcePath,
    client: ClientColumn = None,
    label: LabelColumn = None,
    decimal: DecimalSign = None,
    totals: TotalsAre = None,
    form: Annotated[
        Literal["wide", "long"], typer.Option("--form", help="A row for each client, or for each client and class.")
    ] = "wide",
    out: Annotated[Path | None, typer.Option("--out", help="The file to write.  [default: print]")] = None,
    data_root: DataRoot = None,
) -> None:
    """Count who holds which labels, and print the table that `fedskew describe` and `fedskew weights` read.

    All samples count but those of a test part; in a config, those that its clients train on with its first seed. A
    table of counts is printed as it was understood. Takes seconds: nothing is trained.

    Examples:

        fedskew counts hospitals > counts.csv      (a folder HOSPITAL/CLASS/*.png)

        fedskew counts patients.csv --client hospital --label diagnosis > counts.csv

        fedskew counts my.toml
    """
    found = read_source(path, client, label, decimal, totals, data_root)
    found.counts.to_csv(out or sys.stdout, form)


class Source(NamedTuple):
    """Label counts; the target's label mix, in words too where it is of a config or run, and how that trains."""

    counts: LabelCounts
    target: np.ndarray | None = None
    said: str | None = None
    participation: float | None = None
    epochs: float | None = None


def read_source(
    path: Path,
    client: str | None,
    label: str | None,
    decimal: DecimalSign,
    totals: TotalsAre,
    data_root: Path | None,
    target: Path | None = None,
) -> Source:
    """Return the label counts that a file or folder holds, whatever it is, and the target mix of a file, or its own."""
    source = _read(path, client, label, decimal, totals, data_root)
    if target is None:
        return source
    return source._replace(target=_read_mix(target, source.counts.classes, decimal), said=None)


def _read(
    path: Path,
    client: str | None,
    label: str | None,
    decimal: DecimalSign,
    totals: TotalsAre,
    data_root: Path | None,
) -> Source:
    if path.suffix.lower() == ".toml" or str(path).startswith("@"):
        return _of_config(path, data_root)
    if (path / "config.toml").exists():
        return _of_run(path)
    if not path.is_dir() and path.suffix.lower() != ".npz" and label is None and not lists_samples(path):
        return Source(LabelCounts.read_csv(path, client=client, decimal=decimal, totals=totals))
    return Source(_of_samples(path, label, client))


def _of_samples(path: Path, label: str | None, client: str | None) -> LabelCounts:
    from fedskew.data import holdings

    found = holdings(path, label, client)
    if found.clients is None:
        warnings.warn(
            f"{path}: names no clients, so that all samples are counted as those of one", DataWarning, stacklevel=2
        )
    row = {name: place for place, name in enumerate(found.client_names)}
    column = {name: place for place, name in enumerate(found.class_names)}
    table = np.zeros((len(row), len(column)))
    owners = found.clients or [found.client_names[0]] * len(found.labels)
    pairs = [row[owner] for owner in owners], [column[name] for name in found.labels]
    np.add.at(table, pairs, 1)
    return LabelCounts(table, found.client_names, found.class_names)


def _of_config(path: Path, data_root: Path | None) -> Source:
    from fedskew.experiment import make_task, read, target_in_words

    config = read(config_file(path), {} if data_root is None else {"data.root": str(data_root)})
    task = make_task(config, config.seeds[0])
    counts = LabelCounts(task.counts, task.client_names, task.dataset.classes)
    training = config.training
    return Source(counts, task.target, target_in_words(config), training.participation, training.epochs)


def _of_run(folder: Path) -> Source:
    from fedskew.experiment import read, read_runs, target_in_words

    said = None
    with suppress(FedskewError):  # components of one's own need not be importable here
        said = target_in_words(read(folder / "config.toml"))
    run = read_runs(folder)[0]
    counts = LabelCounts(run.counts, run.client_names, run.class_names)
    training = run.config["training"]
    return Source(counts, run.target, said, training["participation"], training["epochs"])


def _read_mix(path: Path, classes: Sequence[str], decimal: DecimalSign) -> np.ndarray:
    """Return the target mix; the decimal sign given is that of the counts, and this file may have the other."""
    if not path.exists():
        raise ArgumentError(f"--target {path}: no such file; give a CSV of columns class,share, or of a column a class")
    if decimal is not None:
        with suppress(ArgumentError):
            return read_target(path, classes, decimal)
    return read_target(path, classes)
