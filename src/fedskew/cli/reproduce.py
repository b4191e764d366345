"""`fedskew reproduce`: a table or figure of a paper, ours beside theirs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fedskew.papers import Reproduction


def reproduce(
    name: Annotated[str, typer.Argument(help="A recipe, such as fedentopt-table1; `fedskew recipes` lists them.")],
    rows: Annotated[
        str | None,
        typer.Option(help="Only rows with these labels, such as 'cifar10,dir0.1,fedavg,fedentopt'.", metavar="LABELS"),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, such as 0,1,2.  [default: as many as the paper has]")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="At most so many rounds, to see something soon.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key of every run.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where run folders and the comparison go.")] = Path("runs"),
    processes: Annotated[
        int | None,
        typer.Option(help="Runs at a time.  [default: cores / engine.threads; 1 on a GPU]", show_default=False),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where the data sets are (else FEDSKEW_DATA).")] = None,
) -> None:
    """Run a table or figure of a paper, and print ours, theirs and the difference.

    Runs are ordinary run folders: those that are there already are read, half ones go on. A figure is drawn as PNG and
    SVG. What was made smaller than in the paper, and what deviates from it, is said under the table.

    Examples:

        fedskew reproduce fedentopt-table1 --rows cifar10 --seeds 0

        fedskew reproduce fedvls-table1 --rows mnist,dir0.05,fedavg,fedvls --rounds 10
    """
    from fedskew.cli.changes import changed_keys
    from fedskew.cli.sweep import SweepWatch
    from fedskew.papers import read_recipe
    from fedskew.papers import reproduce as run_recipe

    recipe = read_recipe(name)
    chosen = recipe.rows if rows is None else recipe.choose(rows)
    changed = changed_keys(changes, seeds, device, data_root)
    console = Console()
    with SweepWatch(console) as watch:
        try:
            done = run_recipe(
                recipe,
                chosen,
                out,
                changes=changed,
                rounds=rounds,
                processes=processes,
                progress=watch,
                command=_command(),
            )
        except KeyboardInterrupt:
            watch.stop()
            console.print("stopped; the same command goes on from here")
            raise typer.Exit(130) from None
    wide = console if console.is_terminal else Console(width=160)  # a log has no edge to keep to
    wide.print(Text(f"{recipe.paper}: {recipe.title}", style="bold"))
    wide.print(comparison_table(done))
    for note in done.notes:
        wide.print(note, markup=False, highlight=False)
    for file in done.files:
        console.print(f"written: {file}", soft_wrap=True, markup=False, highlight=False)
    for failure in done.failures:
        Console(stderr=True, soft_wrap=True).print(f"failed: {failure}", markup=False, highlight=False, style="red")
    if done.failures:
        raise typer.Exit(1)


def comparison_table(done: Reproduction) -> Table:
    """Ours, theirs and the difference, a line a row."""
    from fedskew.papers import text_lines

    headings, body, labels = text_lines(done)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for at, heading in enumerate(headings):
        number = at >= labels
        table.add_column(Text(heading), justify="right" if number else "left", no_wrap=number, overflow="fold")
    for cells in body:
        table.add_row(*map(Text, cells))
    return table


def _command() -> str:
    """What was typed, without what is of this machine only."""
    words = [word for word in sys.argv[1:] if not word.startswith("--data-root=")]
    while "--data-root" in words:
        at = words.index("--data-root")
        del words[at : at + 2]
    return shlex.join(["fedskew", *words])
