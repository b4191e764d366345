"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.text import Text
from typer import Argument, Option

from fedskew.cli.page import Console, table_of
from fedskew.errors import ArgumentError, ConfigError
from fedskew.tables import counted, duration
from fedskew.trees import parse_change, read_tree

if TYPE_CHECKING:
    from fedskew.experiment import Config

Value = TypeVar("Value")
SourcePath = Annotated[
    Path,
    Argument(
        metavar="SOURCE",
        help="Label counts in a table (a column client and one for each class, or client,class,count); or what to "
        "count: a folder of images, an .npz file, CSV or Parquet files of samples, a folder of Hugging Face, a config, "
        "a run.",
    ),
]
ClientColumn = Annotated[
    str | None, Option(metavar="COLUMN", help="The column of clients.  [default: as it is called]")
]
LabelColumn = Annotated[
    str | None,
    Option(
        metavar="COLUMN",
        help="The column of labels, where each row is one sample; or columns of 0 and 1, such as Edema,Effusion.",
    ),
]
Separator = Annotated[
    str | None, Option(metavar="SIGN", help="What is between the labels of a cell, where samples may have several.")
]
DecimalSign = Annotated[
    Literal[".", ","] | None, Option(help="The decimal sign of the table's numbers.  [default: as they show]")
]
TotalsAre = Annotated[
    Literal["drop", "keep"] | None,
    Option(help="Drop or keep rows and columns of totals and means.  [default: drop totals that fit]"),
]
TargetPath = Annotated[
    Path | None,
    Option(
        metavar="TARGET.CSV",
        help="The label mix that the model will serve: columns class,share, or class names over one row of shares.  "
        "[default: that of a config or run]",
    ),
]
Participation = Annotated[
    float | None,
    Option(
        help="For advice: share of the clients that takes part in a round.  [default: that of a config or run, or 1]"
    ),
]
Epochs = Annotated[
    float | None, Option(help="For advice: local epochs of a round.  [default: those of a config or run, or 1]")
]
ConfigFile = Annotated[
    Path, Argument(help="The TOML file; or @NAME, one that comes with fedskew (`fedskew recipes` lists them).")
]
Estimate = Annotated[
    bool, Option("--estimate", help="Only estimate how long it takes here, from a few measured steps.")
]
Changes = Annotated[
    list[str] | None,
    Option(
        "--set", metavar="KEY=VALUE", help="Change one key of the config, such as training.lr=0.05; may be repeated."
    ),
]
Seeds = Annotated[str | None, Option(help="Seeds, such as 0,1,2.")]
Quick = Annotated[
    bool,
    Option(
        "--quick", help="Apply the [quick] table of the file: few rounds, to see that all works. It proves nothing."
    ),
]
Out = Annotated[Path, Option(help="The folder to write run folders, tables and reports to.")]
Fresh = Annotated[
    bool,
    Option(
        "--fresh",
        help="Train anew what was made by other code, of other data or by another fedskew; the old run folders are "
        "moved to earlier/.",
    ),
]
Processes = Annotated[
    int | None, Option(help="How many runs to train at a time.  [default: cores / engine.threads; 1 on a GPU]")
]
On = Annotated[
    str | None,
    Option(
        metavar="ADDRESS",
        help="Train on the workers of a Dask scheduler, such as tcp://10.0.0.1:8786 (pip install 'fedskew[dask]').",
    ),
]
SkipBroken = Annotated[
    bool, Option("--skip-broken", help="Leave out pictures that can't be read, and say which; else they are refused.")
]
TrustCode = Annotated[
    bool,
    Option("--trust-code", help="Import the code that came with the folder, which then runs as you. Read it before."),
]
Device = Annotated[str | None, Option(help="Where to train: auto, cpu or cuda.")]
DataRoot = Annotated[Path | None, Option(help="The folder of the data sets (otherwise FEDSKEW_DATA).")]

_A_MINUTE = 60


def quick_note(path: Path, changes: Mapping[str, Any]) -> str:
    """Return what `--quick` made smaller in a file, beside other changes, and what its figures are good for."""
    whole, small = (read_tree(path, "config", changes, quick)[0] for quick in (False, True))
    rounds, fewer = (tree.get("training", {}).get("rounds", 0) for tree in (whole, small))
    seeds, left = (len(tree.get("seeds", [0])) for tree in (whole, small))
    made = [f"{counted(fewer, 'round')} of {rounds:,}"] if fewer != rounds else []
    made += [f"{counted(left, 'seed')} of {seeds:,}"] if left != seeds else []
    smaller = f"--quick: {' and '.join(made)}" if made else "--quick"
    return (
        f"{smaller}. This shows that everything works, and proves nothing: expect accuracies well below those of the "
        "whole run, and differences between methods that it may turn round."
    )


def changed_keys(
    changes: list[str] | None, seeds: str | None, device: str | None, data_root: Path | None, skip_broken: bool = False
) -> dict[str, Any]:
    """Return the dotted keys and values that `--set` and other options change."""
    changed = dict(parse_change(change) for change in changes or [])
    if seeds is not None:
        changed["seeds"] = several("--seeds", seeds, int, "whole numbers, such as 0,1,2")
    if device is not None:
        changed["engine.device"] = device
    if data_root is not None:
        changed["data.root"] = str(data_root)
    if skip_broken:
        changed["data.skip_broken"] = True
    return changed


def several(option: str, text: str, kind: Callable[[str], Value], what: str) -> list[Value]:
    """Return the values that an option has, separated by commas."""
    try:
        return [kind(part.strip()) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: expected {what}, separated by commas") from None


def named(text: str) -> str:
    """Return a name; ValueError where there is none."""
    if not text:
        raise ValueError
    return text


def config_file(path: Path) -> Path:
    """Return the file that a command's argument names: itself, or the one that comes with fedskew where it is @NAME."""
    if not str(path).startswith("@"):
        return path
    from fedskew import papers

    return papers.config_file(str(path)[1:])


def print_estimate(console: Console, configs: Sequence[Config], only: bool, times: Sequence[int] | None = None) -> None:
    """Say how long configs take, where that is more than a minute or nothing else is wanted (`only`). `times` is how
    many like it are trained, for each config; None: one."""
    from fedskew.experiment import shared_data
    from fedskew.papers import estimate

    with console.status("measuring a few steps; the first ones of a network on a computer take longer"), shared_data():
        found = [estimate(config) for config in configs]
    counts = times or [1] * len(found)
    seconds = sum(one * count for one, count in zip(found, counts, strict=True) if not isinstance(one, str))
    unknown = next((one for one in found if isinstance(one, str)), None)
    if unknown is not None:
        console.say(f"Time: unknown; {unknown}.")
    elif seconds >= _A_MINUTE:
        console.say(
            f"Time: about {duration(seconds)}, one run after another on this machine's CPU (from some measured steps; "
            "clients and seeds that train together take less)."
        )
    elif only:
        console.print("Time: about a minute at most." if found else "Time: nothing is missing.")


def check_processes(processes: int | None, on: str | None) -> None:
    """Refuse `--processes` beside `--on`, and fewer than one."""
    if processes is not None and (on is not None or processes < 1):
        reason = "is for this machine, and --on for others; give one of them" if on else "must be at least 1"
        raise ArgumentError(f"--processes: {reason}")


def finish(
    title: str,
    table: tuple[Sequence[str], Sequence[Sequence[str]], int],
    notes: Iterable[str],
    quick: str,
    made: Iterable[str],
    failures: Sequence[str],
    refused: Sequence[str] = (),
) -> None:
    """Print what many runs gave: a table (headings, rows, how many columns are labels), notes, which files were made;
    then each run that failed and combination that was not run, for which the exit status is 1."""
    console, (headings, rows, labels) = Console(), table
    if rows:
        headings = [f">{heading}" if at >= labels else heading for at, heading in enumerate(headings)]
        # numbers may take two lines
        cells = ((Text(cell) if at >= labels else cell for at, cell in enumerate(row)) for row in rows)
        console.wide.print(table_of(headings, cells, title))
    for note in notes:
        console.wide.note(note)
    if quick:
        console.wide.note(quick, style="yellow")
    for line in made:
        console.say(line)
    errors = Console(stderr=True, soft_wrap=True)
    for line in (*(f"refused: {text}" for text in refused), *(f"failed: {text}" for text in failures)):
        errors.say(line, style="red")
    if failures or refused:
        raise typer.Exit(1)
