"""`fedskew target`: the label mix of unlabelled samples, from predictions that were made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
import typer
from rich.padding import Padding

from fedskew.cli.console import Console
from fedskew.cli.counts import AsJson, DecimalSign
from fedskew.cli.page import bullet, empty_table, escaped, heading, print_json, print_note, some_of
from fedskew.errors import ArgumentError
from fedskew.files import write_text, writing
from fedskew.labels import MixMethod
from fedskew.tables import counted, csv_text

if TYPE_CHECKING:
    from fedskew.labels import MixEstimate, Outcomes

CLASSES_SHOWN = 20
LEAST_SAMPLES = 8
"""Fewest samples of a target whose mix is estimated; what intervals are worth from there: docs/label-counts.md."""
DEFAULT_FIGURE = Path("target-mix.png")


def target(
    predictions: Annotated[
        Path,
        typer.Argument(
            metavar="PREDICTIONS.CSV",
            help="A model's predictions on the target's unlabelled samples, a row each: its probability of every class "
            "in columns named by the classes; or columns predicted and confidence.",
            show_default=False,
        ),
    ],
    tables: Annotated[
        Path,
        typer.Option(
            "--tables",
            metavar="TABLES.CSV",
            help="Its predictions on labelled samples that it was not trained on: the same columns and label; or "
            "counts: a row for each class, a column for each outcome.",
            show_default=False,
        ),
    ],
    method: Annotated[
        str, typer.Option("--method", help="gls, em-cells, bbse or em (which needs all probabilities).")
    ] = "gls",
    bins: Annotated[
        str, typer.Option("--bins", help="Where the samples of a predicted class are divided by their confidence.")
    ] = "0.5,0.8,0.95",
    decimal: DecimalSign = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="TARGET.CSV", help="Write the mix, for --target of other commands.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", help=f"Where to draw it (.png, .svg, .pdf).  [default: {DEFAULT_FIGURE}; none with --json]"
        ),
    ] = None,
    no_picture: Annotated[bool, typer.Option("--no-picture", help="Draw nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate which labels a target's unlabelled samples have, how sure that is, and whether it can be trusted.

    Takes a second or two; nothing is trained, and the model may be anybody's. It assumes label shift: classes occur
    more or less often than in the held-out samples, but each looks the same; a test says whether that holds.

    Example: fedskew target predictions.csv --tables held-out.csv --out target.csv
    """
    if picture is not None and no_picture:
        raise ArgumentError("--no-picture: contradicts --picture; give only one of them")
    from fedskew.labels import read_outcomes

    outcomes = read_outcomes(predictions, tables, _edges(bins), None if decimal is None else decimal.value)
    estimate = outcomes.estimate(mix_method(method))
    samples = int(outcomes.cells.sum())
    check_samples(samples, predictions)
    drawn = None if no_picture else picture if picture is not None or as_json else DEFAULT_FIGURE
    if drawn is not None:
        _draw(outcomes, estimate, drawn)
    if out is not None:
        _write(out, outcomes, estimate)
    if as_json:
        more = {"samples": samples, "held_out": _held_out(outcomes).tolist()}
        print_json(mix_values(estimate, outcomes.classes) | more)
        return
    console, held_out = Console(highlight=False), int(outcomes.tables.sum())
    heading(console, f"Label mix of {counted(samples, 'sample')}")
    for sentence in sentences(estimate, outcomes.classes):
        console.print(Padding(bullet(sentence), (0, 0, 0, 1)))
    heading(console, f"Classes ({counted(held_out, 'held-out sample')})")
    _print_classes(console, outcomes, estimate)
    if out is not None:
        console.say(f"\nThe mix: {out}")
    if drawn is not None:
        console.say(f"\nThe mix with its intervals: {drawn}")


def _edges(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ArgumentError(f"--bins: must be numbers between 0 and 1, such as 0.5,0.8,0.95, not {text!r}") from None


def mix_method(name: str) -> MixMethod:
    """Return the method of that name; ArgumentError if there is none."""
    methods: dict[str, MixMethod] = {method: method for method in get_args(MixMethod)}
    if name not in methods:
        raise ArgumentError(f"--method: must be one of {', '.join(methods)}, not {name!r}")
    return methods[name]


def check_samples(number: int, path: Path) -> None:
    """Refuse to estimate a mix from fewer than `LEAST_SAMPLES` of the target."""
    if number < LEAST_SAMPLES:
        raise ArgumentError(
            f"{path}: {counted(number, 'sample')} of the target can't show its label mix; give {LEAST_SAMPLES} at the "
            "least, and some 100 for shares to within 10 to 15 points"
        )


def _held_out(outcomes: Outcomes) -> np.ndarray:
    shares: np.ndarray = outcomes.tables.sum(axis=1) / outcomes.tables.sum()
    return shares


def sentences(estimate: MixEstimate, classes: Sequence[str]) -> list[str]:
    """Describe an estimate in sentences, the verdict first."""
    chance = f"p = {estimate.p_value:.2g}, {counted(estimate.dof, 'degree')} of freedom"
    points = f"{max(0.0, 100 * estimate.excess):.1f} points"
    if estimate.dof == 0:
        said = [
            "Whether the held-out classes look like the target's can't be tested: one outcome for each class leaves "
            "nothing over. Give the predictions' confidence too, or more samples."
        ]
    elif estimate.misfit:
        said = [
            f"Don't trust this mix. The target's samples look like no mix of the held-out classes ({chance}): beyond "
            f"chance, {points} of them lie where every mix would have fewer. The images may differ (another device, "
            "another population), or the target has a class that the held-out samples lack."
        ]
    elif estimate.p_value < 0.01:
        said = [f"The held-out classes and the target's differ, but little ({chance}; {points} beyond chance)."]
    else:
        said = [f"The target's samples look like a mix of the held-out classes ({chance})."]
    low, high = estimate.interval().T
    widest = int(np.argmax(high - low))
    said.append(f"Least sure is the share of {classes[widest]}: 95 % interval {low[widest]:.1%} to {high[widest]:.1%}.")
    if estimate.unseen:
        names = ", ".join(classes[label] for label in estimate.unseen)
        said.append(f"No held-out sample of {names}: whether the target has any is not known, and 0 is assumed.")
    return said


def _print_classes(console: Console, outcomes: Outcomes, estimate: MixEstimate) -> None:
    """Print every class, or those whose share changes most."""
    held_out, ends = _held_out(outcomes), estimate.interval()
    table = empty_table(("class", "left"), ("target", "right"), ("95 % interval", "right"), ("held out", "right"))
    listed = some_of(np.argsort(-np.abs(estimate.mix - held_out), kind="stable"), CLASSES_SHOWN)
    for label in listed:
        low, high = ends[label]
        interval = f"{low:.1%} to {high:.1%}"
        table.add_row(
            escaped(outcomes.classes[label]), f"{estimate.mix[label]:.1%}", interval, f"{held_out[label]:.1%}"
        )
    console.print(table)
    print_note(
        console, listed, len(held_out), f"the {len(listed)} that differ most from the held-out samples; all with --json"
    )


def mix_values(estimate: MixEstimate, classes: Sequence[str]) -> dict[str, Any]:
    """Return an estimate as plain values, for JSON."""
    tested = estimate.dof > 0
    return {
        "classes": list(classes),
        "mix": estimate.mix.tolist(),
        "interval": estimate.interval().tolist(),
        "standard_errors": estimate.upper_errors.tolist(),
        "statistic": estimate.statistic if tested else None,
        "dof": estimate.dof,
        "p_value": estimate.p_value if tested else None,
        "misfit": estimate.misfit,
        "unseen": [classes[label] for label in estimate.unseen],
    }


def _write(path: Path, outcomes: Outcomes, estimate: MixEstimate) -> None:
    rows = [("class", "share"), *zip(outcomes.classes, (repr(share) for share in estimate.mix.tolist()), strict=True)]
    with writing(path):
        write_text(path, csv_text(rows))


def _draw(outcomes: Outcomes, estimate: MixEstimate, path: Path) -> None:
    from fedskew.report import drawing

    with drawing.figure(path, width=11, height=5) as figure:
        axes, held_out = figure.add_subplot(), _held_out(outcomes)
        drawing.mix_with_intervals(axes, estimate.mix, estimate.interval(), held_out, outcomes.classes)
