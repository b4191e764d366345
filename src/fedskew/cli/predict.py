"""New samples and a trained model: `fedskew predict` says what they are, `fedskew watch` if they look as before."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from typer import Argument, Option

from fedskew.cli.options import SkipBroken, TrustCode
from fedskew.cli.page import BARE, RULED, AsJson, Console, check_apart, print_json, table_of, write_csv
from fedskew.cli.target import HeldOutData, mix_values, print_mix, sentences, unlabelled_samples
from fedskew.errors import ArgumentError, DataError, FedskewError, RunError, placed
from fedskew.sheets import FloatArray
from fedskew.tables import counted

if TYPE_CHECKING:
    from torch import Tensor

    from fedskew import TrainedModel
    from fedskew.data import Change
    from fedskew.experiment import Adaptation

SHOWN, CHANGES_SHOWN, CLASSES_NAMED = 20, 12, 6
LEVEL = 0.01
"""A column has changed where p is below this."""


def predict(
    run: Annotated[Path, Argument(help="The run folder.")],
    images: Annotated[
        list[Path] | None,
        Argument(
            metavar="[FILES]...",
            help="Images, folders of images (at any depth), or .npz files with an array x; of a model of tables CSV or "
            "Parquet files, of texts these and .txt files.",
        ),
    ] = None,
    seed: Annotated[int | None, Option(help="The seed whose model is used.  [default: the first]")] = None,
    best: Annotated[bool, Option("--best", help="Use the model that was best on validation samples.")] = False,
    finished: Annotated[bool, Option("--finished", help="Use the model that the method's finish made.")] = False,
    adapted: Annotated[
        bool, Option("--adapted", help="Use the model that `fedskew adapt` moved to a target's label mix.")
    ] = False,
    personal: Annotated[
        bool, Option("--personal", help="Use the model that `fedskew personal` made for one site.")
    ] = False,
    skip_broken: SkipBroken = False,
    csv_path: Annotated[
        Path | None, Option("--csv", help="Write the probability of every class for every file.")
    ] = None,
    as_json: AsJson = False,
    export: Annotated[str | None, Option(help="For other programs: onnx, torchscript, weights or adapters.")] = None,
    out: Annotated[
        Path | None, Option(help="Where to export to.  [default: beside the model by its name: model.onnx, adapted.pt]")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Say which class a trained model sees in each image, text or row of a table, or export the model.

    Images are made grey or RGB, resized and normalised as in training; the run keeps how. Columns of a table are found
    by name, by the schema that is in the model. Takes seconds for a thousand images, and up to half a minute for an
    export as ONNX.

    Examples:

        fedskew predict runs/my-1a2b3c4d new-images/ --csv predictions.csv
        fedskew predict runs/my-1a2b3c4d one.png two.png
        fedskew predict runs/my-1a2b3c4d new.csv --csv predictions.csv
        fedskew predict runs/my-1a2b3c4d --export onnx      (for onnxruntime; torchscript: for torch.jit.load)

    In Python: fedskew.load("runs/my-1a2b3c4d").predict(array).
    """
    from fedskew import load
    from fedskew.experiment import ModelInfo

    if not images and export is None:
        raise ArgumentError("FILES: give images, a folder of them, an .npz or CSV file; or --export onnx")
    if not images and (csv_path is not None or as_json or skip_broken):
        raise ArgumentError("FILES: --csv, --json and --skip-broken are of predictions; give images, or leave them out")
    if out is not None and export is None:
        raise ArgumentError("--out: says where --export writes; add --export onnx, or use --csv")
    if export is not None and export not in ModelInfo.EXPORTS:
        raise ArgumentError(f"--export: can't export as {export!r} (known: {', '.join(ModelInfo.EXPORTS)})")
    if out is not None and csv_path is not None and out.resolve() == csv_path.resolve():
        raise ArgumentError(f"--csv: {csv_path} is where --export writes the model; write to another file")
    is_export = out is not None and out.suffix in (".onnx", ".pt")  # as no file is called that a run writes
    for place, folder in ((csv_path, run), (out, None if is_export else run)):
        check_apart(place, folder, *images or ())
    model = load(
        run, seed=seed, best=best, finished=finished, adapted=adapted, personal=personal, trust_code=trust_code
    )
    file = model.file.with_stem("adapted" if adapted else "personal" if personal else model.file.stem)
    console = Console(highlight=False, stderr=as_json)
    if export is not None:
        console.say(f"{export}: {model.export(out or file.with_suffix(ModelInfo.EXPORTS[export]), export)}")
        if model.info.before is not None and model.info.encoder is not None:
            console.note(f"It takes {model.info.before}, in the file's metadata.")
    if not images:
        return
    names, probabilities, resized = _predicted(model, images, skip_broken)
    decided = model.decide(probabilities).tolist()
    classes = [_answer(model, label, line) for label, line in zip(decided, probabilities, strict=True)]
    if csv_path is not None:
        rows = zip(names, classes, *probabilities.T.tolist(), strict=True)
        write_csv(csv_path, [["file", "class", *model.classes], *rows])
    if as_json:
        found = [
            {"file": name, "class": label, "probabilities": dict(zip(model.classes, line, strict=True))}
            for name, label, line in zip(names, classes, probabilities.tolist(), strict=True)
        ]
        about = {"model": str(file), "seed": model.seed, "threshold": model.info.threshold, "resized": resized}
        print_json(about | {"predictions": found})
        return
    console.say(f"model: {file}")
    if model.info.multi_label:
        console.note("A sample may have several labels, or none; those at 50 % or more are its own.")
        console.print(table_of(["file", "labels"], zip(names[:SHOWN], classes, strict=False), **BARE))
    else:
        lines = zip(names[:SHOWN], decided, probabilities, strict=False)
        shown = ([name, *_likeliest(model, label, line)] for name, label, line in lines)
        console.print(table_of(["file", "class", ">probability", "second"], shown, **BARE))
    if len(names) > SHOWN:
        console.print(f" [dim]the first {SHOWN} of {len(names):,}; all with --csv or --json")
    named = [f"{label or 'no label'}: {number:,}" for label, number in Counter(classes).most_common()]
    rest = f" and {len(named) - CLASSES_NAMED} more" if len(named) > CLASSES_NAMED else ""
    console.note(f"{counted(len(names), 'sample')}; {', '.join(named[:CLASSES_NAMED])}{rest}.")
    if (threshold := model.info.threshold) is not None:
        console.note(f"{model.classes[1]}: from a probability of {threshold:.3g} on, as validation samples chose.")
    if resized:
        size = " x ".join(map(str, model.in_shape[1:]))
        console.note(f"{resized:,} of another size were resized to {size}, as the model takes them.")
    if csv_path is not None:
        console.say(f"Every probability: {csv_path}")


def _answer(model: TrainedModel, label: int, line: FloatArray) -> str:
    """Return a sample's class; of several labels those that are likelier than not, apart by bars."""
    if not model.info.multi_label:
        return model.classes[label]
    return "|".join(name for name, share in zip(model.classes, line, strict=True) if share >= 0.5)


def _likeliest(model: TrainedModel, first: int, line: FloatArray) -> list[str]:
    """Return a sample's class, with its probability, and the likeliest other."""
    others = [at for at in np.argsort(-line, kind="stable").tolist() if at != first]
    second = f"{model.classes[others[0]]} {line[others[0]]:.1%}" if others else ""
    return [model.classes[first], f"{line[first]:.1%}", second]


def _predicted(model: TrainedModel, images: list[Path], skip_broken: bool) -> tuple[list[str], FloatArray, int]:
    """Return the names of samples, their probabilities `(samples, classes)`, and how many images were resized."""
    from fedskew import data

    parts: list[FloatArray] = []
    names, resized = list[str](), 0
    for some in data.unlabelled(images, model.in_shape, model.info.window, skip_broken, model.encoder):
        with placed(f"{some.names[0]}: ", DataError):
            parts.append(model.predict(some.inputs))
        names += some.names
        resized += some.resized
    return names, np.concatenate(parts), resized


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

    check_apart(csv_path, run, held_out, *files)
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
    shown = sorted(found or changes, key=lambda one: one.unit == "correlation")[:CHANGES_SHOWN]  # columns first
    rows = [[one.what, one.unit, f"{one.before:.4g}", f"{one.now:.4g}", _p(one.p)] for one in shown]
    caption = f"p: Holm's, of {counted(len(changes), 'test')}; changed is what has p below {LEVEL:g}"
    title = "What has changed most" if found else "What comes nearest to a change"
    console.print(table_of(["what", "figure", ">in training", ">now", ">p"], rows, title, caption=caption, **RULED))
    console.sentences("Label mix", [why] if move is None else sentences(move.estimate, model.classes))
    if move is not None:
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


def _move(model: TrainedModel, samples: Tensor, held_out: Path | None) -> tuple[Adaptation | None, str]:
    """Return what `adapt` would make of the samples; or why that is not known."""
    from fedskew.experiment import Adaptation

    try:
        labelled = model.held_out() if held_out is None else Adaptation.read_labelled(held_out, model)
        return Adaptation.of(model, samples, labelled, normalised=held_out is None), ""
    except FedskewError as error:
        if held_out is not None and not isinstance(error, ArgumentError | RunError):
            raise
        return None, f"It is not known: {error}."
