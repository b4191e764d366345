"""The label mix of a target: `fedskew target` estimates it, `fedskew adapt` moves a trained model to it; and to that of
one site: `fedskew personal`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from typer import Argument, Option

from fedskew.cli.options import DecimalSign, TrustCode, several
from fedskew.cli.page import AsJson, Console, NoPicture, picture_path, print_json, shares, write_csv
from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts, MixMethod
from fedskew.tables import counted

if TYPE_CHECKING:
    from torch import Tensor

    from fedskew import TrainedModel
    from fedskew.experiment import Adaptation
    from fedskew.labels import MixEstimate

LEAST_SAMPLES = 8
"""Fewest samples of a target whose mix is estimated; what intervals are worth from there: docs/label-counts.md."""
DEFAULT_FIGURE = Path("target-mix.png")

HeldOutData = Annotated[
    Path | None,
    Option(
        help="Labelled samples that the model was not trained on: a folder with a folder for each class, or an "
        ".npz file of x and y.  [default: the run's own, of data.held_out or data.validation]"
    ),
]
MovedSeed = Annotated[int | None, Option(help="The seed whose model is moved.  [default: the first]")]
MovesBest = Annotated[bool, Option("--best", help="Move the model that was best on validation samples.")]
MovesFinished = Annotated[bool, Option("--finished", help="Move the model that the method's finish made.")]
Force = Annotated[
    bool, Option("--force", help="Write the moved model even from few samples, or if it is expected to lose.")
]
Fresh = Annotated[bool, Option("--fresh", help="Make it anew; a moved model that is there goes to earlier/ beside it.")]


def target(
    predictions: Annotated[
        Path,
        Argument(
            metavar="PREDICTIONS.CSV",
            help="A model's predictions on the target's unlabelled samples, a row each: its probability of every class "
            "in columns named by the classes; or columns predicted and confidence.",
        ),
    ],
    tables: Annotated[
        Path,
        Option(
            metavar="TABLES.CSV",
            help="Its predictions on labelled samples that it was not trained on: the same columns and label; or "
            "counts: a row for each class, a column for each outcome.",
        ),
    ],
    method: Annotated[MixMethod, Option(help="How it is estimated; em needs all probabilities.")] = "gls",
    bins: Annotated[
        str, Option(help="Where the samples of a predicted class are divided by their confidence.")
    ] = "0.5,0.8,0.95",
    decimal: DecimalSign = None,
    out: Annotated[
        Path | None, Option(metavar="TARGET.CSV", help="Write the mix, for --target of other commands.")
    ] = None,
    picture: Annotated[
        Path | None, Option(help=f"Where to draw it (.png, .svg, .pdf).  [default: {DEFAULT_FIGURE}; none with --json]")
    ] = None,
    no_picture: NoPicture = False,
    as_json: AsJson = False,
) -> None:
    """Estimate which labels a target's unlabelled samples have, how sure that is, and whether it can be trusted.

    Takes a second or two; nothing is trained, and the model may be anybody's. It assumes label shift: classes occur
    more or less often than in the held-out samples, but each looks the same; a test says whether that holds.

    Example: fedskew target predictions.csv --tables held-out.csv --out target.csv
    """
    drawn = picture_path(picture, no_picture, as_json, DEFAULT_FIGURE)
    if drawn is not None and out is not None and drawn.resolve() == out.resolve():
        raise ArgumentError(f"--out: {out} is where --picture draws; write to another file")
    from fedskew.labels import Outcomes

    outcomes = Outcomes.read(predictions, tables, several("--bins", bins, float, "numbers between 0 and 1"), decimal)
    estimate = outcomes.estimate(method)
    samples = int(outcomes.cells.sum())
    check_samples(samples, predictions)
    held_out = outcomes.tables.sum(axis=1) / outcomes.tables.sum()
    if drawn is not None:
        from fedskew.report import drawing

        with drawing.figure(drawn, width=11, height=5) as figure:
            axes = figure.add_subplot()
            drawing.mix_with_intervals(axes, estimate.mix, estimate.interval(), held_out, outcomes.classes)
    if out is not None:
        rows = zip(outcomes.classes, estimate.mix.tolist(), strict=True)
        write_csv(out, [("class", "share"), *rows], predictions, tables)
    if as_json:
        print_json(mix_values(estimate, outcomes.classes) | {"samples": samples, "held_out": held_out.tolist()})
        return
    console = Console(highlight=False)
    console.sentences(f"Label mix of {counted(samples, 'sample')}", sentences(estimate, outcomes.classes))
    print_mix(console, estimate, outcomes.tables.sum(axis=1), outcomes.classes, "target")
    if out is not None:
        console.say(f"\nThe mix: {out}")
    if drawn is not None:
        console.say(f"\nThe mix with its intervals: {drawn}")


def print_mix(console: Console, estimate: MixEstimate, held_out: np.ndarray, classes: Sequence[str], of: str) -> None:
    """Print a mix beside that of the held-out samples, whose number of each class is given."""
    before = held_out / held_out.sum()
    columns = {
        "class": classes,
        f">{of}": shares(estimate.mix),
        ">95 % interval": ["{:.1%} to {:.1%}".format(*ends) for ends in estimate.interval()],
        ">held out": shares(before),
    }
    order = np.argsort(-np.abs(estimate.mix - before), kind="stable")
    title = f"Classes ({counted(int(held_out.sum()), 'held-out sample')})"
    console.columns(title, columns, order, "that differ most from the held-out samples; all with --json")


def unlabelled_samples(model: TrainedModel, paths: list[Path]) -> Tensor:
    """Read samples of the target, and refuse too few."""
    import torch

    from fedskew import data

    read = data.unlabelled(paths, model.in_shape, model.info.window, encoder=model.encoder)
    samples = torch.cat([some.inputs for some in read])
    check_samples(len(samples), paths[0])
    return samples


def check_samples(number: int, path: Path) -> None:
    """Refuse to estimate a mix from fewer than `LEAST_SAMPLES` of the target."""
    if number < LEAST_SAMPLES:
        raise ArgumentError(
            f"{path}: {counted(number, 'sample')} of the target can't show its label mix; give {LEAST_SAMPLES} at the "
            "least, and some 100 for shares to within 10 to 15 points"
        )


def sentences(estimate: MixEstimate, classes: Sequence[str]) -> list[str]:
    """Describe an estimate in sentences, the verdict first."""
    chance = f"p = {estimate.p_value:.2g}, {counted(estimate.dof, 'degree')} of freedom"
    points = f"{max(0.0, 100 * estimate.excess):.1f} points"
    if estimate.dof == 0:
        said = [
            "Whether the held-out classes look like the target's can't be tested: one outcome for each class leaves "
            "nothing over. Give more samples, and the predictions' confidence where the files lack it."
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


def adapt(
    run: Annotated[Path, Argument(help="The run folder.")],
    target_data: Annotated[
        list[Path],
        Option(
            metavar="IMAGES",
            help="Unlabelled samples of the target: images, folders of images, .npz files with an array x. May be "
            "repeated.",
        ),
    ],
    held_out: HeldOutData = None,
    seed: MovedSeed = None,
    best: MovesBest = False,
    finished: MovesFinished = False,
    method: Annotated[MixMethod, Option(help="How the mix is estimated.")] = "gls",
    on_misfit: Annotated[
        Literal["stop", "warn"],
        Option(help="What to do where the target's samples are no mix of the held-out classes."),
    ] = "stop",
    trust_code: TrustCode = False,
    force: Force = False,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Move a trained model to the label mix of the place where it will be used, from unlabelled samples of that place.

    Takes seconds; no weight changes. The run's folder gets `adapted.safetensors`, and `fedskew predict RUN --adapted`
    uses it. What is printed says how many more of the target's samples the model should get right. From fewer than 30
    samples, or where it should get fewer right, nothing is written (exit status 2).

    Example: fedskew adapt runs/my-1a2b3c4d --target-data new-images/ --held-out labelled/

    In Python: result.adapt(samples), fedskew.load("runs/my-1a2b3c4d", adapted=True).
    """
    import fedskew

    model = fedskew.load(run, seed=seed, best=best, finished=finished, trust_code=trust_code)
    if model.before_move() is not model:
        raise ArgumentError(
            f"--finished: the finish of {run} was adapt, so that model is moved already; leave --finished out to move "
            "the one that was trained"
        )
    found = _fitting_move(model, target_data, held_out, method, on_misfit == "warn", "--on-misfit warn")
    _write_move(found, model, target_data[0], force, fresh, as_json)


def _fitting_move(
    model: TrainedModel, paths: list[Path], held_out: Path | None, method: MixMethod, misfits: bool, option: str
) -> Adaptation:
    """Return a model's move to the label mix of unlabelled samples; refuse those that are no mix unless `misfits`."""
    from fedskew.experiment import Adaptation

    labelled = model.held_out() if held_out is None else Adaptation.read_labelled(held_out, model)
    found = Adaptation.of(model, unlabelled_samples(model, paths), labelled, method, normalised=held_out is None)
    if found.estimate.misfit and not misfits:
        raise ArgumentError(
            f"{paths[0]}: {sentences(found.estimate, model.classes)[0]} Nothing was written; {option} moves the model "
            "in spite of that"
        )
    return found


def _write_move(
    found: Adaptation, model: TrainedModel, of: Path, force: bool, fresh: bool, as_json: bool, personal: bool = False
) -> None:
    """Write a move to a file beside the model's, unless there is a doubt, and print what it is worth."""
    path = None if found.doubt and not force else found.save(fresh=fresh, personal=personal)
    if as_json:
        print_json(_values(found, model, path))
    else:
        _print(found, model, path)
    if path is None:
        raise ArgumentError(f"{of}: {found.doubt}. Nothing was written; --force writes the moved model")


def _print(found: Adaptation, model: TrainedModel, path: Path | None) -> None:
    console = Console(highlight=False)
    plain, gain, low, high = found.expected()
    least, most = found.accuracy_interval()
    accuracy = (
        f"Expected accuracy there: {plain:.1%} as the model is (95 % interval {least:.1%} to {most:.1%}), "
        f"{plain + gain:.1%} when moved ({100 * gain:+.1f} points, 95 % interval "
        f"{100 * low:+.1f} to {100 * high:+.1f})."
    )
    if found.is_counted:
        names = ", ".join(model.classes[label] for label in found.estimate.unseen)
        said = [f"No held-out sample of {names}: the moved model never says so, and what it says was not tested."]
        title = f"What the site's {counted(found.samples, 'label says', 'labels say')}"
        console.sentences(title, [accuracy, *(said if names else [])])
    else:
        title = f"What the target's {counted(found.samples, 'sample says', 'samples say')}"
        console.sentences(title, [*sentences(found.estimate, model.classes), accuracy])
    columns: dict[str, Sequence[str]] = {
        "class": model.classes,
        ">site" if found.is_counted else ">target": shares(found.estimate.mix),
        ">right now": shares(found.plain),
        ">moved": shares(found.adapted),
        ">points": [f"{100 * gain:+.1f}" for gain, _, _ in found.gains],
        ">95 % interval": [f"{100 * low:+.1f} to {100 * high:+.1f}" for _, low, high in found.gains],
    }
    for heading, cells in [*columns.items()][1:]:
        missing = "not known" if heading in (">target", ">site") else "-"
        columns[heading] = [cell if there else missing for cell, there in zip(cells, found.held_out, strict=True)]
    title = f"Classes ({counted(int(found.held_out.sum()), 'held-out sample')})"
    order = np.argsort(-found.estimate.mix, kind="stable")
    console.columns(title, columns, order, "with the largest share; all with --json")
    if path is not None:
        console.say(f"\n{path.stem}: {path}")


def _values(found: Adaptation, model: TrainedModel, path: Path | None) -> dict[str, Any]:
    plain, gain, low, high = found.expected()

    def numbers(values: np.ndarray) -> list[float | None]:
        return [value if np.isfinite(value) else None for value in values.tolist()]

    return {
        "file": None if path is None else str(path),
        "doubt": found.doubt,
        **mix_values(found.estimate, model.classes),
        "samples": found.samples,
        "held_out": found.held_out.tolist(),
        "temperature": found.calibration.temperature if np.isfinite(found.calibration.temperature) else None,
        "biases": numbers(found.calibration.biases),
        "expected": {
            "accuracy": plain,
            "accuracy_interval": list(found.accuracy_interval()),
            "adapted_accuracy": plain + gain,
            "gain": gain,
            "gain_interval": [low, high],
        },
        "accuracy": numbers(found.plain),
        "adapted_accuracy": numbers(found.adapted),
        "gains": [numbers(gains) for gains in found.gains],
    }


def personal(
    run: Annotated[Path, Argument(help="The run folder.")],
    counts: Annotated[
        Path | None,
        Option(
            metavar="COUNTS.CSV",
            help="The site's samples of each class: columns class,count; class names over one row of counts; or a "
            "table of several clients, with --client.",
        ),
    ] = None,
    client: Annotated[str | None, Option(metavar="NAME", help="Whose counts, in a table of several clients.")] = None,
    unlabelled: Annotated[
        list[Path] | None,
        Option(
            metavar="IMAGES",
            help="In place of counts, unlabelled samples of the site: images, folders of images, .npz files with an "
            "array x. May be repeated.",
        ),
    ] = None,
    held_out: HeldOutData = None,
    seed: MovedSeed = None,
    best: MovesBest = False,
    finished: MovesFinished = False,
    decimal: DecimalSign = None,
    trust_code: TrustCode = False,
    force: Force = False,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Make a site's own model of the common one, from as many numbers as there are classes; nothing is trained.

    The site need not have taken part, and nothing leaves it: run this there, on a copy of the run folder. The folder
    gets `personal.safetensors`, and `fedskew predict RUN --personal` uses it. Takes seconds. What is printed says how
    many more of the site's samples the model should get right; where it should get fewer right, nothing is written
    (exit status 2).

    Examples:

        fedskew personal runs/my-1a2b3c4d --counts ours.csv
        fedskew counts hospitals/ > counts.csv; fedskew personal runs/my-1a2b3c4d --counts counts.csv --client north
        fedskew personal runs/my-1a2b3c4d --unlabelled new-images/

    In Python: fedskew.load("runs/my-1a2b3c4d").personal(counts), or load("runs/my-1a2b3c4d", personal=True).
    """
    import fedskew
    from fedskew import experiment

    if (counts is None) == (not unlabelled):
        raise ArgumentError("--counts: give the site's label counts, or unlabelled samples of it by --unlabelled")
    if client is not None and counts is None:
        raise ArgumentError("--client: says whose of the --counts; leave it out")
    model = fedskew.load(run, seed=seed, best=best, finished=finished, trust_code=trust_code).before_move()
    if unlabelled:
        moved = _fitting_move(model, unlabelled, held_out, "gls", force, "--force")
        return _write_move(moved, model, unlabelled[0], force, fresh, as_json, personal=True)
    assert counts is not None
    own = LabelCounts.read_own(counts, model.classes, client=client, decimal=decimal)
    if not own.any():
        raise ArgumentError(f"{counts}: every count is 0; give the site's samples of each class, or --unlabelled")
    samples, targets = model.held_out() if held_out is None else experiment.Adaptation.read_labelled(held_out, model)
    moved = experiment.Adaptation.of_counts(model, own, model.logits(samples, normalised=held_out is None), targets)
    return _write_move(moved, model, counts, force, fresh, as_json, personal=True)
