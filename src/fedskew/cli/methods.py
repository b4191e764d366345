"""`fedskew methods`: list the methods, or explain one of them."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedskew.cli.console import Console
from fedskew.cli.page import AsJson

WIDEST = 100


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="A preset, presets joined by +, or a component of a slot.", show_default=False),
    ] = None,
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
