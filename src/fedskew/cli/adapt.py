"""`fedskew adapt`: a trained model moved to the label mix of the place where it will be used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer

from fedskew.cli.console import Console
from fedskew.cli.options import TrustCode
from fedskew.cli.page import CLASSES_SHOWN, AsJson, escaped, print_json, print_sentences, print_table
from fedskew.cli.target import check_samples, mix_method, mix_values, sentences
from fedskew.errors import ArgumentError

if TYPE_CHECKING:
    from fedskew.experiment import Adaptation, TrainedModel


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
    trust_code: TrustCode = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write the moved model even from few samples, or if it is expected to lose.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Make it anew; a moved model that is there goes to earlier/ beside it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Move a trained model to the label mix of the place where it will be used, from unlabelled samples of that place.

    Takes seconds; no weight changes. The run's folder gets `adapted.safetensors`, and `fedskew predict RUN --adapted`
    uses it. What is printed says how many more of the target's samples the model should get right. From fewer than 30
    samples, or where it should get fewer right, nothing is written (exit status 2).

    Example: fedskew adapt runs/my-1a2b3c4d --target-data new-images/ --held-out labelled/

    In Python: result.adapt(samples), fedskew.load("runs/my-1a2b3c4d", adapted=True).
    """
    import torch

    from fedskew import data, experiment

    wanted = mix_method(method)
    model = experiment.load(run, seed=seed, best=best, finished=finished, trust_code=trust_code)
    finish = experiment.read(model.file.with_name("config.toml")).method.get("finish", {}) if finished else {}
    if finish.get("name") == "adapt":
        raise ArgumentError(
            f"--finished: the finish of {run} was adapt, so that model is moved already; leave --finished out to move "
            "the one that was trained"
        )
    labelled = experiment.held_out_of(model) if held_out is None else experiment.read_labelled(held_out, model)
    samples = torch.cat([some.inputs for some in data.unlabelled(target_data, model.in_shape)])
    check_samples(len(samples), target_data[0])
    found = experiment.Adaptation.of(model, samples, labelled, wanted, normalised=(False, held_out is None))
    if found.estimate.misfit and on_misfit == "stop":
        raise ArgumentError(
            f"{target_data[0]}: {sentences(found.estimate, model.classes)[0]} Nothing was written; --on-misfit warn "
            "adapts the model in spite of that"
        )
    path = None if found.doubt and not force else found.save(fresh=fresh)
    if as_json:
        print_json(_values(found, model, path))
    else:
        _print(found, model, path)
    if path is None:
        raise ArgumentError(f"{target_data[0]}: {found.doubt}. Nothing was written; --force writes the moved model")


def _print(found: Adaptation, model: TrainedModel, path: Path | None) -> None:
    console = Console(highlight=False)
    plain, gain, low, high = found.expected()
    least, most = found.accuracy_interval()
    accuracy = (
        f"Expected accuracy there: {plain:.1%} as the model is (95 % interval {least:.1%} to {most:.1%}), "
        f"{plain + gain:.1%} when moved ({100 * gain:+.1f} points, 95 % interval "
        f"{100 * low:+.1f} to {100 * high:+.1f})."
    )
    title = f"What the target's {found.samples:,} samples say"
    print_sentences(console, title, [*sentences(found.estimate, model.classes), accuracy])
    _print_classes(console, found, model)
    if path is not None:
        console.say(f"\nadapted: {path}")


def _print_classes(console: Console, found: Adaptation, model: TrainedModel) -> None:
    """Print every class, or those with the largest share at the target."""

    def row(label: int) -> list[str]:
        gain, low, high = 100 * found.gains[label]
        name, share = escaped(model.classes[label]), f"{found.estimate.mix[label]:.1%}"
        if not found.held_out[label]:
            return [name, "not known", "-", "-", "-", "-"]
        shares = f"{found.plain[label]:.1%}", f"{found.adapted[label]:.1%}"
        return [name, share, *shares, f"{gain:+.1f}", f"{low:+.1f} to {high:+.1f}"]

    title = f"Classes ({found.held_out.sum():,} held-out samples)"
    headings = ["class", ">target", ">right now", ">moved", ">points", ">95 % interval"]
    order = np.argsort(-found.estimate.mix, kind="stable")
    print_table(console, title, headings, row, order, CLASSES_SHOWN, "with the largest share; all with --json")


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
