"""`fedskew schema`: what the columns of tables hold, proposed by reading them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from fedskew.cli.counts import ClientColumn, DecimalSign, LabelColumn
from fedskew.cli.page import Console


def schema(
    files: Annotated[
        list[Path],
        Argument(
            help="CSV or Parquet files that are to be read as one table, or a folder of them.", show_default=False
        ),
    ],
    label: LabelColumn = None,
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
        label = typer.prompt("Column of the labels", default="", show_default=False, err=True).strip() or None
    proposal = Proposal.of_files(files, label, client, decimal)
    typer.echo(proposal.text(), nl=False)
    console = Console(stderr=True)
    for line in proposal.unclear:
        console.say(f"note: {line}", style="yellow")
    if not proposal.unclear:
        console.say("Nothing in it is unclear; read it through all the same.")
