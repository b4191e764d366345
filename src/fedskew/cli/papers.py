"""The papers: `fedskew recipes` lists tables and figures, `reproduce` runs them, `demo` shows their methods."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from typer import Argument, Option

from fedskew.cli.options import Changes, DataRoot, Device, Fresh, Out, Processes, changed_keys, finish
from fedskew.cli.page import Console, table_of
from fedskew.cli.run import run
from fedskew.errors import ConfigError
from fedskew.tables import counted, duration, flatten

if TYPE_CHECKING:
    from fedskew.papers import Recipe, RecipeRow

METHODS = ("fedavg", "fedentopt", "fedvls", "fedla", "fedpals")

SETTING = (
    "1,352 handwritten digits on 20 clients under strong label skew: each digit is divided by Dir(0.1), so a client "
    "holds many of a few digits and none of others. 5 clients train in a round. The model is for a place where digits "
    "5 to 9 are nine times as frequent as 0 to 4: that is the target mix, which FedPALS knows and the others don't.\n"
)

READING = (
    "Few clients a round under strong skew is where the choice of clients (FedEntOpt) and weights by label variety "
    "(FedLA) should show; classes that clients lack are what FedVLS is made for; the target mix is what FedPALS is "
    "made for. Differences no larger than the spreads may be chance: these are 3 seeds.\n"
)


def recipes(
    name: Annotated[str | None, Argument(help="A recipe, to see its rows.")] = None,
    rows: Annotated[str | None, Option(help="Only rows with these labels.", metavar="LABELS")] = None,
    config: Annotated[bool, Option("--config", help="Print the config of the first row, for `fedskew run`.")] = False,
    estimate: Annotated[
        bool, Option("--estimate", help="Time a few steps, for some seconds a recipe, and estimate its time here.")
    ] = False,
    data_root: DataRoot = None,
) -> None:
    """List the papers' tables and figures with the data they need; or show one with its rows, settings and deviations.

    Example: fedskew recipes --data-root DATA

    Example: fedskew recipes fedentopt-table1 --estimate

    Example: fedskew recipes fedentopt-table1 --rows cifar10,dir0.1,fedentopt --config > my.toml
    """
    from fedskew.papers import Recipe, names

    wide = Console().wide
    if name is None:
        if rows is not None or config:
            raise ConfigError(
                "--rows, --config: need the name of a recipe, as in: fedskew recipes fedvls-table1 --rows mnist"
            )
        _list(wide, [Recipe.read(one) for one in names()], estimate, data_root)
        return
    recipe = Recipe.read(name)
    if config:
        import tomli_w

        chosen = recipe.rows if rows is None else recipe.choose(rows)
        typer.echo(tomli_w.dumps(chosen[0].config().tree()), nl=False)
        return
    _show(wide, recipe, rows, estimate, data_root)


def _list(console: Console, found: list[Recipe], with_cost: bool, root: Path | None) -> None:
    from fedskew.papers import config_names

    rows = []
    with console.status("measuring" if with_cost else "reading"):
        for recipe in found:
            cost = [_time(recipe.rows)] if with_cost else []
            runs = sum(len(row.tree["seeds"]) for row in recipe.rows)
            rows.append([recipe.name, _data(recipe, root), recipe.title, str(runs), *cost])
    console.print(table_of(["recipe", "data", "content", ">runs", *([">time"] if with_cost else [])], rows))
    console.print("Data: ✓ present, ✗ missing (see --data-root). Runs: rows times seeds.")
    if with_cost:
        console.print("Time: all runs one after another on this machine's CPU, estimated from a few measured steps.")
    else:
        console.print("How long one would take here: fedskew recipes NAME --estimate (for all of them, some minutes).")
    configs = ", ".join(f"@{name}" for name in config_names())
    console.note(f"Configs for fedskew run and fedskew sweep: {configs}")
    console.print("Show one: fedskew recipes NAME. Run it: fedskew reproduce NAME.", markup=False)


def _show(console: Console, recipe: Recipe, labels: str | None, with_cost: bool, root: Path | None) -> None:
    rows = recipe.rows if labels is None else recipe.choose(labels)
    console.print(Text(f"{recipe.paper}: {recipe.title}", style="bold"))
    if (printed := recipe.printed) is not None:
        where = "Printed" if printed.source == "as printed" else f"Published, {printed.source}"
        console.note(f"{where}: {printed.metric}; {printed.unit}.")
    axes = [axis for axis in recipe.axes if axis not in recipe.readings]
    seeds = sorted({len(row.tree["seeds"]) for row in rows})
    of_seeds = " or ".join([*map(str, seeds[:-1]), counted(seeds[-1], "seed")])
    console.print(f"{counted(len(rows), 'row')} of {of_seeds}. Labels, for --rows:", highlight=False)
    for axis in axes:
        names = dict.fromkeys(row.labels[axis] for row in rows if axis in row.labels)
        console.say(f"  {axis}: {', '.join(names)}")
    for axis, read in recipe.readings.items():
        console.note(f"  read for {axis}: {', '.join(read)}")
    console.note(f"Data: {_data(recipe, root)}")
    if with_cost:
        console.print(f"Time: about {_time(rows)}, one run after another on this machine's CPU.", markup=False)
    for text in recipe.deviating(rows):
        console.note(f"Differs from the paper: {text}")
    console.note(f"Settings of the first row ({rows[0].name}):")
    for key, value in flatten(rows[0].config().tree()).items():
        if not key.startswith(("schema", "name", "output.", "engine.")):
            console.say(f"  {key} = {value}")
    console.note(f"Run it: fedskew reproduce {recipe.name}")


def _data(recipe: Recipe, root: Path | None) -> str:
    rows = {row.data: row for row in recipe.rows}
    return ", ".join(f"{title} {'✗' if row.missing(root) else '✓'}" for title, row in rows.items())


def _time(rows: Iterable[RecipeRow]) -> str:
    from fedskew.papers import estimate

    found = [estimate(row.config(), alone=True) for row in rows]
    return next((one for one in found if isinstance(one, str)), None) or duration(sum(map(float, found)))


def reproduce(
    name: Annotated[str, Argument(help="A recipe, such as fedentopt-table1; `fedskew recipes` lists them.")],
    rows: Annotated[
        str | None,
        Option(help="Only rows with these labels, such as 'cifar10,dir0.1,fedavg,fedentopt'.", metavar="LABELS"),
    ] = None,
    seeds: Annotated[str | None, Option(help="Seeds, such as 0,1,2.  [default: as many as the paper has]")] = None,
    rounds: Annotated[int | None, Option(help="Run at most this many rounds, for a quick look.")] = None,
    changes: Changes = None,
    out: Out = Path("runs"),
    fresh: Fresh = False,
    processes: Processes = None,
    device: Device = None,
    data_root: DataRoot = None,
) -> None:
    """Run a table or figure of a paper, and print ours, theirs and the difference.

    Most take hours to days: `fedskew recipes NAME --estimate` says how long. --rows, --seeds and --rounds make it less.

    Runs are ordinary run folders: finished ones are read, interrupted ones continue. A figure is drawn as PNG and SVG.
    Notes under the table say what was made smaller than in the paper, and what deviates from it.

    Examples:

        fedskew reproduce fedentopt-table1 --rows cifar10 --seeds 0
        fedskew reproduce fedvls-table1 --rows mnist,dir0.05,fedavg,fedvls --rounds 10
    """
    from fedskew.cli.progress import SweepProgressBar, stoppable
    from fedskew.papers import Recipe
    from fedskew.papers import reproduce as run_recipe

    recipe = Recipe.read(name)
    chosen = recipe.rows if rows is None else recipe.choose(rows)
    changed = changed_keys(changes, seeds, device, data_root)
    console = Console()
    with stoppable(SweepProgressBar(console)) as bar:
        done = run_recipe(
            recipe,
            chosen,
            out,
            changes=changed,
            rounds=rounds,
            processes=processes,
            fresh=fresh,
            progress=bar,
            command=_command(),
        )
    console.wide.print(Text(f"{recipe.paper}: {recipe.title}", style="bold"))
    finish("", done.table(), done.notes, "", [f"written: {file}" for file in done.files], done.failures, done.refused)


def _command() -> str:
    """Return the command line as typed, without the folder of the data sets, which differs between machines."""
    words = [word for word in sys.argv[1:] if not word.startswith("--data-root=")]
    while "--data-root" in words:
        at = words.index("--data-root")
        del words[at : at + 2]
    return shlex.join(["fedskew", *words])


def demo(out: Out = Path("runs")) -> None:
    """Train FedAvg and the four papers' methods on digits, 20 clients under strong label skew, 3 seeds: two minutes.

    Example:

        fedskew demo
    """
    console = Console()
    console.print(SETTING)
    run(Path("@demo"), method=[*METHODS], fresh=True, out=out)
    console.print(READING)
