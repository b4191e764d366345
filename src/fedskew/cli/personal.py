"""`fedskew personal`: the model of one site, from its label counts or its unlabelled samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedskew.cli.counts import DecimalSign
from fedskew.cli.options import TrustCode
from fedskew.cli.page import AsJson
from fedskew.cli.target import (
    Force,
    Fresh,
    HeldOutData,
    MovedSeed,
    MovesBest,
    MovesFinished,
    moved_by_samples,
    write_move,
)
from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts


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
        moved = moved_by_samples(model, unlabelled, held_out, "gls", force, "--force")
        return write_move(moved, model, unlabelled[0], force, fresh, as_json, personal=True)
    assert counts is not None
    own = LabelCounts.read_own(counts, model.classes, client=client, decimal=decimal)
    if not own.any():
        raise ArgumentError(f"{counts}: every count is 0; give the site's samples of each class, or --unlabelled")
    samples, targets = model.held_out() if held_out is None else experiment.Adaptation.read_labelled(held_out, model)
    logits = model.logits(samples, normalised=held_out is None)
    moved = experiment.Adaptation.of_counts(model, own, logits, targets)
    return write_move(moved, model, counts, force, fresh, as_json, personal=True)
