"""`fedskew adapt`: a trained model moved to the label mix of the place where it will be used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from rich.padding import Padding

from fedskew.cli.console import Console
from fedskew.cli.page import bullet, empty_table, escaped, heading, print_json, print_note, some_of
from fedskew.cli.target import mix_method, sentences
from fedskew.errors import ArgumentError

if TYPE_CHECKING:
    from fedskew.experiment import Adaptation, TrainedModel

CLASSES_SHOWN = 20


def adapt(
    run: Annotated[Path, typer.Argument(help="The run folder.", show_default=False)],
    target_data: Annotated[
        list[Path],
        typer.Option(
            "--target-data",
            metavar="IMAGES",
            help="Unlabelled samples of the target: images, folders of images, .npz files with an array x. May be "
            "repeated.",
            show_default=False,
        ),
    ],
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Labelled samples that the model was not trained on: a folder with a folder for each class, or an "
            ".npz file of x and y.  [default: the run's own, of data.held_out or data.validation]",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed whose model is moved.  [default: the first]")] = None,
    best: Annotated[bool, typer.Option("--best", help="Move the model that was best on validation samples.")] = False,
    finished: Annotated[bool, typer.Option("--finished", help="Move the model that the method's finish made.")] = False,
    method: Annotated[
        str, typer.Option("--method", help="How the mix is estimated: gls, em-cells, bbse or em.")
    ] = "gls",
    on_misfit: Annotated[
        Literal["stop", "warn"],
        typer.Option("--on-misfit", help="What to do where the target's samples are no mix of the held-out classes."),
    ] = "stop",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a page.")] = False,
) -> None:
    """Move a trained model to the label mix of the place where it will be used, from unlabelled samples of that place.

    Takes seconds; no weight changes. The run's folder gets `adapted.safetensors`, and `fedskew predict RUN --adapted`
    uses it. What is printed says how many more of the target's samples the model should get right.

    Example: fedskew adapt runs/my-1a2b3c4d --target-data new-images/ --held-out labelled/

    In Python: result.adapt(samples), fedskew.experiment.load_adapted("runs/my-1a2b3c4d").
    """
    import torch

    from fedskew import data, experiment

    wanted = mix_method(method)
    model = experiment.load(run, seed=seed, best=best, finished=finished)
    finish = experiment.read(model.file.with_name("config.toml")).method.get("finish", {}) if finished else {}
    if finish.get("name") == "adapt":
        raise ArgumentError(
            f"--finished: the finish of {run} was adapt, so that model is moved already; leave --finished out to move "
            "the one that was trained"
        )
    labelled = experiment.held_out_of(model) if held_out is None else experiment.read_labelled(held_out, model)
    samples = torch.cat([some.inputs for some in data.unlabelled(target_data, model.in_shape)])
    found = experiment.adaptation(model, samples, labelled, wanted, normalised=(False, held_out is None))
    if found.estimate.misfit and on_misfit == "stop":
        raise ArgumentError(
            f"{target_data[0]}: {sentences(found.estimate, model.classes)[0]} Nothing was written; --on-misfit warn "
            "adapts the model in spite of that"
        )
    path = experiment.save_adaptation(found)
    if as_json:
        print_json(_values(found, model, path))
        return
    console = Console(highlight=False)
    heading(console, f"What the target's {len(samples):,} samples say")
    plain, gain, low, high = found.expected()
    for sentence in (
        *sentences(found.estimate, model.classes),
        f"Expected accuracy there: {plain:.1%} as the model is, {plain + gain:.1%} when moved "
        f"({100 * gain:+.1f} points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f}).",
    ):
        console.print(Padding(bullet(sentence), (0, 0, 0, 1)))
    heading(console, f"Classes ({found.held_out.sum():,} held-out samples)")
    _print_classes(console, found, model)
    console.print(f"\nadapted: {path}", soft_wrap=True, markup=False)


def _print_classes(console: Console, found: Adaptation, model: TrainedModel) -> None:
    """Print every class, or those with the largest share at the target."""
    table = empty_table(
        ("class", "left"), ("target", "right"), ("right now", "right"), ("moved", "right"), ("points", "right"),
        ("95 % interval", "right"),
    )  # fmt: skip
    listed = some_of(np.argsort(-found.estimate.mix, kind="stable"), CLASSES_SHOWN)
    for label in listed:
        gain, low, high = 100 * found.gains[label]
        name, share = escaped(model.classes[label]), f"{found.estimate.mix[label]:.1%}"
        if found.held_out[label]:
            shares = (f"{found.plain[label]:.1%}", f"{found.adapted[label]:.1%}")
            table.add_row(name, share, *shares, f"{gain:+.1f}", f"{low:+.1f} to {high:+.1f}")
        else:
            table.add_row(name, "not known", "-", "-", "-", "-")
    console.print(table)
    print_note(console, listed, len(found.plain), f"the {len(listed)} with the largest share; all with --json")


def _values(found: Adaptation, model: TrainedModel, path: Path) -> dict[str, Any]:
    plain, gain, low, high = found.expected()
    estimate = found.estimate

    def numbers(values: np.ndarray) -> list[float | None]:
        return [value if np.isfinite(value) else None for value in values.tolist()]

    return {
        "file": str(path),
        "classes": list(model.classes),
        "mix": estimate.mix.tolist(),
        "interval": estimate.interval().tolist(),
        "p_value": estimate.p_value if estimate.dof else None,
        "misfit": estimate.misfit,
        "temperature": found.calibration.temperature if np.isfinite(found.calibration.temperature) else None,
        "biases": numbers(found.calibration.biases),
        "expected": {"accuracy": plain, "gain": gain, "interval": [low, high]},
        "accuracy": numbers(found.plain),
        "adapted_accuracy": numbers(found.adapted),
    }
