"""`fedskew advise`: the simulated federations that are most like label counts, and what each method gained there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.console import Console
from fedskew.cli.counts import (
    ClientColumn,
    DecimalSign,
    LabelColumn,
    Source,
    SourcePath,
    TargetPath,
    TotalsAre,
    read_source,
)
from fedskew.cli.options import DataRoot
from fedskew.cli.page import AsJson, escaped, print_heading, print_json, print_sentences, table_of

if TYPE_CHECKING:
    from fedskew.arena import Advice

LIMITS = (
    "Small networks, digits and clothes, tens of rounds, methods with their papers' parameters, clients that differ "
    "only in labels: that is the evidence. docs/advice.md says what it is worth."
)
GAIN = ("{ahead} of {of}", "{median:+.1f}", "{low:+.1f} to {high:+.1f}")
_SHOWN = 5

Participation = Annotated[
    float | None,
    typer.Option(
        help="For advice: share of the clients that takes part in a round.  [default: that of a config or run, or 1]",
        show_default=False,
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option(
        help="For advice: local epochs of a round.  [default: those of a config or run, or 1]", show_default=False
    ),
]
TablePath = Annotated[
    Path | None,
    typer.Option(
        "--table",
        metavar="EVIDENCE.CSV.GZ",
        help="A table of your own, evidence.csv.gz of `fedskew arena`.  [default: the one that comes with fedskew]",
        show_default=False,
    ),
]


def advise(
    path: SourcePath,
    target: TargetPath = None,
    participation: Participation = None,
    epochs: Epochs = None,
    without: Annotated[
        str | None, typer.Option("--without", help="Methods that can't be used, such as fedentopt,ccvr.")
    ] = None,
    table: TablePath = None,
    client: ClientColumn = None,
    label: LabelColumn = None,
    decimal: DecimalSign = None,
    totals: TotalsAre = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Show what each method gained over FedAvg in the simulated federations that are most like yours.

    Takes seconds; nothing is trained.

    Federations are compared by skew, sizes, participation, epochs and target. For one unlike all simulated ones no
    method is named. Leave out methods that need what clients won't give, such as their label counts: fedskew methods
    NAME says what a method needs and reveals.

    Examples:

        fedskew advise counts.csv --target target.csv --participation 0.2 --epochs 5

        fedskew advise counts.csv --without fedentopt,ccvr
    """
    source = read_source(path, client, label, decimal, totals, data_root, target)
    left_out = [name.strip() for name in without.split(",")] if without else []
    found = advice_for(source, participation, epochs, left_out, table)
    if as_json:
        print_json(found.to_dict())
        return
    console = Console(highlight=False)
    print_advice(console, found)
    if found.supported:
        print_heading(console, "What each method gained there, in points")
        gains = ([escaped(one["method"]), *(text.format(**one) for text in GAIN)] for one in found.methods)
        console.print(table_of(["method", ">ahead in", ">median gain", ">80 %"], gains))
    print_heading(console, "The nearest simulated federations")
    near = (
        [escaped(one["federation"]), f"{one['distance']:.2f}", f"{one['best']} {one['gain']:+.1f}"]
        for one in found.neighbours[:_SHOWN]
    )
    console.print(table_of(["federation", ">distance", "best there"], near))
    console.say(f"\n{LIMITS}")


def advice_for(
    source: Source,
    participation: float | None,
    epochs: float | None,
    without: Collection[str] = (),
    table: Path | None = None,
) -> Advice:
    """Return the advice for label counts; participation and epochs are those of their config or run if not given."""
    from fedskew.arena import advise as look_up

    share = source.participation if participation is None else participation
    times = source.epochs if epochs is None else epochs
    share, times = (1.0 if one is None else one for one in (share, times))
    return look_up(source.counts, source.target, share, times, without, table)


def print_advice(console: Console, found: Advice) -> None:
    """Print advice in sentences below a heading."""
    sentences = [found.sentence()]
    if found.method not in (None, "fedavg"):
        sentences.append("fedskew methods NAME says what a method asks of clients and reveals.")
    print_sentences(console, "Which method", sentences)
