"""`fedskew advise`: the simulated federations nearest to label counts, and what each method gained there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.padding import Padding

from fedskew.cli.console import Console
from fedskew.cli.counts import (
    AsJson,
    ClientColumn,
    DecimalSign,
    LabelColumn,
    Source,
    TargetPath,
    TotalsAre,
    read_source,
    target_of,
)
from fedskew.cli.options import DataRoot
from fedskew.cli.page import bullet, empty_table, escaped, heading, print_json
from fedskew.errors import ArgumentError

if TYPE_CHECKING:
    from fedskew.advice import Advice, Evidence

LIMITS = (
    "Small networks, digits and clothes, tens of rounds, methods with their papers' parameters, clients that differ "
    "only in labels: that is the evidence. docs/advice.md says how good advice was on tasks left out of it."
)
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
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="SOURCE",
            help="Label counts in a table, or whatever `fedskew counts` takes: images, a config, a run folder.",
            show_default=False,
        ),
    ] = None,
    target: TargetPath = None,
    participation: Participation = None,
    epochs: Epochs = None,
    without: Annotated[
        str | None, typer.Option("--without", help="Methods that can't be used, such as fedentopt,ccvr.")
    ] = None,
    table: TablePath = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Measure how good advice is on tasks and rules left out of the table.")
    ] = False,
    client: ClientColumn = None,
    label: LabelColumn = None,
    decimal: DecimalSign = None,
    totals: TotalsAre = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Advise on a method: what each gained over FedAvg in the simulated federations that are nearest to yours.

    Takes seconds (--validate: a minute); nothing is trained.

    Federations are compared by figures of their label counts, the target, the participation and the epochs. For one
    unlike all simulated ones nothing is recommended. Leave out methods that need what clients won't give, such as
    their label counts: fedskew methods NAME says what a method needs and reveals.

    Examples:

        fedskew advise counts.csv --target target.csv --participation 0.2 --epochs 5

        fedskew advise counts.csv --without fedentopt,ccvr

        fedskew advise --validate
    """
    from fedskew.advice import read_evidence

    evidence = None if table is None else read_evidence(table)
    if validate:
        if path is not None:
            raise ArgumentError("--validate: looks at the whole table; leave out the label counts")
        _validate(evidence or read_evidence(), as_json)
        return
    if path is None:
        raise ArgumentError("SOURCE: give label counts, such as counts.csv, or --validate")
    source = read_source(path, client, label, decimal, totals, data_root)
    left_out = [name.strip() for name in without.split(",")] if without else []
    mix = target_of(source, target, decimal)
    found = advice_for(source, mix, participation, epochs, left_out, evidence)
    if as_json:
        print_json(found.to_dict())
        return
    console = Console(highlight=False)
    print_advice(console, found)
    if found.supported:
        heading(console, "What each method gained there, in points")
        _print_methods(console, found)
    heading(console, "The nearest simulated federations")
    near = empty_table(("federation", "left"), ("distance", "right"), ("best there", "left"))
    for one in found.neighbours[:_SHOWN]:
        near.add_row(escaped(one.federation), f"{one.distance:.2f}", f"{one.best[0]} {one.best[1]:+.1f}")
    console.print(near)
    console.print(f"\n{LIMITS}", soft_wrap=True, markup=False)


def advice_for(
    source: Source,
    mix: np.ndarray | None,
    participation: float | None,
    epochs: float | None,
    without: Collection[str] = (),
    evidence: Evidence | None = None,
) -> Advice:
    """Return the advice for label counts; participation and epochs are those of their config or run if not given.

    Args:
        source: The label counts.
        mix: The target's label mix; None: there is none.
        participation: Share of the clients that takes part in a round.
        epochs: Local epochs of a round.
        without: Methods that can't be taken.
        evidence: The table; None: the one that comes with fedskew.
    """
    from fedskew.advice import advise as advise_on

    share = source.participation if participation is None else participation
    times = source.epochs if epochs is None else epochs
    return advise_on(
        source.counts, mix, 1.0 if share is None else share, 1.0 if times is None else times, without, evidence
    )


def print_advice(console: Console, found: Advice) -> None:
    """Print advice in sentences below a heading.

    Args:
        console: Where to print.
        found: The advice.
    """
    sentences = found.sentences()
    if found.method not in (None, "fedavg"):
        sentences.append("fedskew methods NAME says what a method asks of clients and reveals.")
    heading(console, "Which method")
    for sentence in sentences:
        console.print(Padding(bullet(sentence), (0, 0, 0, 1)))


def _print_methods(console: Console, found: Advice) -> None:
    table = empty_table(
        ("method", "left"),
        *((name, "right") for name in ("median gain", "80 %", "gained", "worst class", "federations")),
    )
    for one in found.methods:
        table.add_row(
            escaped(one.method),
            f"{one.median:+.1f}",
            f"{one.low:+.1f} to {one.high:+.1f}",
            f"{one.gained:.0%}",
            "-" if np.isnan(one.worst_class) else f"{one.worst_class:+.1f}",
            str(one.federations),
        )
    console.print(table)


def _validate(evidence: Evidence, as_json: bool) -> None:
    from fedskew.advice import validate, validation_text

    found = validate(evidence)
    if as_json:
        print_json({"validation": [vars(one) for one in found]})
        return
    console = Console(highlight=False)
    table = empty_table(
        *(("left out", "left"), ("predictor", "left"), ("federations", "right"), ("Spearman", "right")),
        *((name, "right") for name in ("80 % holds", "advised", "rule", "best fixed", "oracle", "harmed", "by rule")),
        ("accepted", "left"),
    )
    for one in found:
        table.add_row(
            *(one.left_out, one.predictor, str(one.federations), f"{one.spearman:.2f}", f"{one.coverage:.0%}"),
            *(f"{value:+.1f}" for value in (one.advised, one.rule, one.best_fixed, one.oracle)),
            *(f"{value:.0%}" for value in (one.harmed, one.harmed_by_rule)),
            "yes" if one.accepted else "no",
        )
    wide = console if console.is_terminal else Console(width=160)
    wide.print(table)
    wide.print(
        "Mean gains over FedAvg in points; harmed: more than a point behind it. Accepted: at least the rule's gain "
        "less 0.3 points, harm at most half as often, intervals of 80 % that hold at least 70 %.\nAs CSV:\n",
        markup=False,
    )
    typer.echo(validation_text(found), nl=False)
