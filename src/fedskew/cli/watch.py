"""`fedskew watch`: whether new samples still look like those that a model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fedskew.cli.options import TrustCode
from fedskew.cli.page import RULED, AsJson, Console, print_json, table_of, write_csv
from fedskew.cli.target import HeldOutData, mix_values, print_mix, sentences, unlabelled_samples
from fedskew.errors import ArgumentError, FedskewError, RunError
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew.data import Change
    from fedskew.experiment import Adaptation

LEVEL = 0.01
"""A column has changed where p is below this."""
SHOWN = 12


def watch(
    run: Annotated[Path, Argument(help="The run folder.")],
    files: Annotated[list[Path], Argument(metavar="FILES...", help="New samples without labels, as for predict.")],
    held_out: HeldOutData = None,
    seed: Annotated[int | None, Option(help="The seed whose model is used.  [default: the first]")] = None,
    csv_path: Annotated[Path | None, Option("--csv", help="Write every test to this file.")] = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
) -> None:
    """Say whether new samples still look like those that a model was trained on: inputs, label mix, and the rest.

    Inputs are compared by what the run kept of them (inputs.json): each column's cells, missing values and categories,
    and how each two numbers go together; p values are Holm's over all tests. The label mix is estimated as by `fedskew
    adapt`, from held-out samples; its test finds samples that look like no mix of the known classes. Takes seconds.

    Examples:

        fedskew watch runs/my-1a2b3c4d new.csv
        fedskew watch runs/my-1a2b3c4d new-images/ --json
    """
    from fedskew import data, load

    model = load(run, seed=seed, trust_code=trust_code)
    profile = model.profile()
    samples = unlabelled_samples(model, files)
    changes = profile.changes(data.Profile.columns(samples, model.schema))
    move, why = _move(model, samples, held_out)
    if csv_path is not None:
        write_csv(csv_path, [changes[0]._fields, *changes])
    found = [change for change in changes if change.p < LEVEL]
    if as_json:
        tests = [one._asdict() for one in changes]
        values = None if move is None else mix_values(move.estimate, model.classes)
        print_json({"samples": len(samples), "changed": len(found), "tests": tests, "label_mix": values})
        return
    console = Console(highlight=False)
    console.sentences(f"Inputs of {counted(len(samples), 'sample')}", [_verdict(found, changes)])
    shown = sorted(found or changes, key=lambda one: one.unit == "correlation")[:SHOWN]  # columns first
    rows = [[one.what, one.unit, f"{one.before:.4g}", f"{one.now:.4g}", _p(one.p)] for one in shown]
    caption = f"p: Holm's, of {len(changes)} tests; changed is what has p below {LEVEL:g}"
    title = "What has changed most" if found else "What comes nearest to a change"
    console.print(table_of(["what", "figure", ">in training", ">now", ">p"], rows, title, caption=caption, **RULED))
    if move is None:
        console.sentences("Label mix", [why])
        return
    console.sentences("Label mix", sentences(move.estimate, model.classes))
    print_mix(console, move.estimate, move.held_out, model.classes, "now")


def _verdict(found: list[Change], changes: list[Change]) -> str:
    if not found:
        return f"None of {counted(len(changes), 'test')} finds a change from the training samples."
    alone = [one for one in found if one.unit != "correlation"]
    names = ", ".join(one.what for one in (alone or found)[:4])
    what = counted(len(alone), "column has", "columns have") if alone else "no column by itself has"
    pairs = counted(len(found) - len(alone), "pair of numbers no longer goes", "pairs of numbers no longer go")
    return f"Not the samples of training: {what} changed, and {pairs} together as before ({names})."


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-6 else "< 1e-6"


def _move(model: Any, samples: Any, held_out: Path | None) -> tuple[Adaptation | None, str]:
    """Return what `adapt` would make of the samples; or why that is not known."""
    from fedskew.experiment import Adaptation

    try:
        labelled = model.held_out() if held_out is None else Adaptation.read_labelled(held_out, model)
        return Adaptation.of(model, samples, labelled, normalised=(False, held_out is None)), ""
    except FedskewError as error:
        if held_out is not None and not isinstance(error, ArgumentError | RunError):
            raise
        return None, f"It is not known: {error}."
