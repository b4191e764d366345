"""`fedskew predict`: what a trained model says of images, and the model for other programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from fedskew.cli.options import TrustCode
from fedskew.cli.page import BARE, AsJson, Console, print_json, table_of, write_csv
from fedskew.errors import ArgumentError, DataError
from fedskew.tables import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedskew import TrainedModel

SHOWN = 20
CLASSES_NAMED = 6


def predict(
    run: Annotated[Path, typer.Argument(help="The run folder.", show_default=False)],
    images: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[IMAGES]...",
            help="Images, folders of images (at any depth), or .npz files with an array x.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed whose model is used.  [default: the first]")] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the model that was best on validation samples.")] = False,
    finished: Annotated[bool, typer.Option("--finished", help="Use the model that the method's finish made.")] = False,
    adapted: Annotated[
        bool, typer.Option("--adapted", help="Use the model that `fedskew adapt` moved to a target's label mix.")
    ] = False,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", help="Write the probability of every class for every file.")
    ] = None,
    as_json: AsJson = False,
    export: Annotated[
        str | None, typer.Option("--export", help="Write the model for other programs: onnx or torchscript.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to export to.  [default: model.onnx or .pt in the run folder]")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Say which class a trained model sees in each image, or export the model.

    Images are made grey or RGB, resized and normalised as in training; the run keeps how. Takes seconds for a thousand
    images, and up to half a minute for an export as ONNX.

    Examples:

        fedskew predict runs/my-1a2b3c4d new-images/ --csv predictions.csv

        fedskew predict runs/my-1a2b3c4d one.png two.png

        fedskew predict runs/my-1a2b3c4d --export onnx      (for onnxruntime; torchscript: for torch.jit.load)

    In Python: fedskew.load("runs/my-1a2b3c4d").predict(array).
    """
    from fedskew import load
    from fedskew.experiment import ModelInfo

    if not images and export is None:
        raise ArgumentError("IMAGES: give images, a folder of them or an .npz file; or --export onnx")
    if out is not None and export is None:
        raise ArgumentError("--out: says where --export writes; add --export onnx, or use --csv")
    if export is not None and export not in ModelInfo.EXPORTS:
        raise ArgumentError(f"--export: can't export as {export!r} (known: {', '.join(ModelInfo.EXPORTS)})")
    if adapted and (best or finished):
        which = "--best" if best else "--finished"
        raise ArgumentError(f"--adapted: `fedskew adapt {which}` says of which model it is; leave out {which} here")
    model = load(run, seed=seed, best=best, finished=finished, adapted=adapted, trust_code=trust_code)
    console = Console(highlight=False, stderr=as_json)
    if export is not None:
        path = model.export(out or model.file.with_suffix(ModelInfo.EXPORTS[export]), export)
        console.say(f"{export}: {path}")
    if not images:
        return
    found = _predicted(model, images)
    if csv_path is not None:
        rows = ([*start, *line.tolist()] for *start, line in found.rows())
        write_csv(csv_path, [["file", "class", *model.classes], *rows])
    if as_json:
        print_json(found.to_dict())
        return
    console.say(f"model: {model.file}")
    shown = (found.row(at) for at in range(min(SHOWN, len(found.names))))
    console.print(table_of(["file", "class", ">probability", "second"], shown, **BARE))
    if len(found.names) > SHOWN:
        console.print(f" [dim]the first {SHOWN} of {len(found.names):,}; all with --csv or --json")
    console.print(found.summary(), markup=False)
    if csv_path is not None:
        console.say(f"Every probability: {csv_path}")


@dataclass(frozen=True)
class _Predicted:
    """A model's predictions: names of samples, `probabilities` `(samples, classes)`, and how many it resized."""

    model: TrainedModel
    names: list[str]
    probabilities: NDArray[np.float64]
    resized: int

    def rows(self) -> Iterator[tuple[str, str, NDArray[np.float64]]]:
        """Yield each sample's name, class and probabilities."""
        for name, line in zip(self.names, self.probabilities, strict=True):
            yield name, self.model.classes[line.argmax()], line

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        model = self.model
        return {
            "model": str(model.file),
            "seed": model.seed,
            "resized": self.resized,
            "predictions": [
                {"file": name, "class": label, "probabilities": dict(zip(model.classes, line.tolist(), strict=True))}
                for name, label, line in self.rows()
            ],
        }

    def row(self, sample: int) -> list[str]:
        """A sample's name, with its two likeliest classes."""
        classes, line = self.model.classes, self.probabilities[sample]
        first, *others = np.argsort(-line, kind="stable").tolist()
        second = f"{classes[others[0]]} {line[others[0]]:.1%}" if others else ""
        return [self.names[sample], classes[first], f"{line[first]:.1%}", second]

    def summary(self) -> str:
        """Say how many samples each class was predicted for, most first, and how many images were resized."""
        classes, shape = self.model.classes, self.model.in_shape
        numbers = np.bincount(self.probabilities.argmax(axis=1), minlength=len(classes))
        order = [label for label in np.argsort(-numbers, kind="stable").tolist() if numbers[label]]
        named = ", ".join(f"{classes[label]}: {numbers[label]:,}" for label in order[:CLASSES_NAMED])
        rest = f" and {len(order) - CLASSES_NAMED} more" if len(order) > CLASSES_NAMED else ""
        text = f"{counted(len(self.names), 'sample')}; {named}{rest}."
        if not self.resized:
            return text
        size = f"{shape[1]} x {shape[2]}"
        return f"{text} {self.resized:,} of another size were resized to {size}, as the model takes them."


def _predicted(model: TrainedModel, images: list[Path]) -> _Predicted:
    from fedskew import data

    names: list[str] = []
    parts: list[NDArray[np.float64]] = []
    resized = 0
    for some in data.unlabelled(images, model.in_shape):
        try:
            parts.append(model.predict(some.inputs))
        except ArgumentError as error:
            raise DataError(f"{some.names[0]}: {str(error).removeprefix('inputs: ')}") from None
        names += some.names
        resized += some.resized
    return _Predicted(model, names, np.concatenate(parts), resized)
