"""Every recipe runs: the real readers, networks and methods on tiny files in the data sets' own formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedskew.experiment import Cell, Job, simulate
from fedskew.experiment._run import Run
from fedskew.papers import Recipe, Row, names, plan, read_recipe, reproduce
from tests.published_formats import write

SAMPLES = {  # of each class (or domain and class): for training, and for the test
    "mnist": (12, 2),
    "fashion_mnist": (12, 2),
    "emnist_balanced": (6, 1),
    "cifar10": (12, 2),
    "cifar100": (2, 1),
    "cinic10": (3, 1),
    "tiny_imagenet": (1, 1),
    "digit_domains": (2, 1),
    "pacs": (3, 1),
    "iwildcam": (1, 1),
    "ag_news": (12, 4),
}


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All data sets in their authors' formats, a few random samples of each class."""
    root = tmp_path_factory.mktemp("data")
    for name, (train, test) in SAMPLES.items():
        if name != "mnist":  # digit_domains has it
            write(name, root, train, test)
    write("mnist", root, *SAMPLES["mnist"])
    return root


def own_rows(recipe: Recipe) -> list[Row]:
    """A row that each part of the figure shows (of a table: any), of the paper's own method where it can be."""
    # the printed partition deals all of CIFAR-10; a hundred clients need more samples than these
    rows = [
        row
        for row in recipe.rows
        if row.labels.get("partition") != "printed" and row.labels.get("clients") not in {"100 clients", "50 clients"}
    ]
    rows.sort(key=lambda row: recipe.paper not in row.labels["method"])
    shown = [
        next(row for row in rows if all(row.labels.get(axis) in labels for axis, labels in drawing.where.items()))
        for drawing in recipe.drawings
    ] or rows[:1]
    bases = [{**row.labels, "method": recipe.relative.get(row.labels["method"])} for row in shown]
    return [row for row in rows if row in shown or row.labels in bases]


def tiny(row: Row) -> dict[str, Any]:
    """What makes a run small and leaves what it does as it is."""
    data, partition = row.tree["data"]["name"], row.tree["partition"]
    changes: dict[str, Any] = {"seeds": [0], "training.epochs": min(1, row.tree["training"]["epochs"])}
    if data in SAMPLES:
        changes["data.verify"] = False
    if data in {"pacs", "iwildcam"}:
        changes["data.size"] = 32
    if data == "iwildcam":
        changes["partition.clients"] = 10
    if "min_size" in partition:
        changes["partition.min_size"] = 0
    if "samples_per_client" in partition:
        changes["partition.samples_per_client"] = 6
    if "tune" in row.tree:
        changes["tune.values"] = [0.0, 0.5]
    return changes


def run(job: Job, out: Path) -> None:
    """What a worker process does, in this one, and without a report where there is nothing to choose."""
    if job.config.tune is not None:
        simulate(job.config, out=out)
        return
    Run(job.config, job.seed, job.folder(out)).go()
    (job.folder(out) / "report.html").touch()


@pytest.mark.parametrize("name", names())
def test_a_recipe_runs_and_ends_in_its_table_and_its_figure(name: str, tiny_root: Path, tmp_path: Path):
    recipe = read_recipe(name)
    rows = own_rows(recipe)
    changes: dict[str, Any] = {"data.root": str(tiny_root)}
    for row in rows:
        changes |= tiny(row)
    for row, config in plan(rows, changes, rounds=2):
        run(Job(Cell(row.name, row.labels, config), 0), tmp_path)
    done = reproduce(recipe, rows, tmp_path, changes=changes, rounds=2)
    assert not done.failures
    assert all(line.ours for line in done.lines) or "rounds" in recipe.readings
    pictures = [file for file in done.files if file.suffix in {".png", ".svg"}]
    assert len(pictures) == 2 * len(recipe.drawings)
    assert any(note.startswith("Not the whole") for note in done.notes)
