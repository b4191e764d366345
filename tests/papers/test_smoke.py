"""Every recipe runs: the real readers, networks and methods on tiny files in the data sets' own formats."""

import copy
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from common import some_first
from fedskew import simulate
from fedskew.experiment import Cell, Job, make_training_loop
from fedskew.models import Network
from fedskew.papers import Recipe, RecipeRow, names, reproduce
from published_formats import WRITERS, write

SAMPLES = {  # of each class (or domain and class): for training, and for the test
    "fashion_mnist": (12, 2),
    "emnist_balanced": (6, 1),
    "cifar10": (12, 2),
    "cifar100": (2, 1),
    "cinic10": (3, 1),
    "tiny_imagenet": (1, 1),
    "digit_domains": (2, 1),
    "pacs": (2, 1),
    "ag_news": (12, 4),
}


LARGE = {
    "resnet50": "fedpals-table4",
    "resnet18": "fedvls-table3",
    "mobilenetv2": "fedvls-table2",
    "vgg11": "fedentopt-table4",
}
"""Networks that take seconds, and the recipe with which `make test-all` trains each.

Elsewhere a small one with batch norm stands in.
"""


SOME = (
    *("fedentopt-table2", "fedentopt-table3", "fedentopt-fig1", "fedentopt-fig5", "fedla-exclusive-one", "fedla-runs"),
    *("fedpals-covered", "fedpals-table2", "fedpals-fig4", "fedpals-fig5", "fedpals-fig9", "fedvls-agnews"),
    *("fedvls-fig1", "fedvls-fig2", "fedvls-mnist-authors", "fedvls-parts"),
    *("fedvls-table2", "fedvls-table6", "fedvls-table14"),
)
"""Recipes that hold every data set, network, partition, method, key and figure; `make test-all` runs the others."""


class StandIn(Network):
    """A convolution with batch norm, and a linear layer."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_shape[0], 4, 5, stride=4), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4, num_classes)

    def features(self, x: Tensor) -> Tensor:
        return adaptive_avg_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1)


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All data sets in their authors' formats, a few random samples of each class."""
    root = tmp_path_factory.mktemp("data")
    for name, (train, test) in SAMPLES.items():
        write(name, root, train, test)
    WRITERS["iwildcam"](root, 3, 1, np.random.default_rng(0), classes=8)
    write("mnist", root, 6, 1)  # one client holds a whole class
    for name, train in (("cifar10", 3), ("cifar100", 1)):
        write(name, root / "few", train, 1)
    return root


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs go: recipes that share rows share runs."""
    return tmp_path_factory.mktemp("runs")


def shown_rows(recipe: Recipe) -> list[RecipeRow]:
    """A row for each part of the figure (of a table: any), of the paper's own method where it can be.

    The printed partition deals all of CIFAR-10, and among a hundred clients tiny files can't be divided.
    """
    rows = [
        row
        for row in recipe.rows
        if row.labels.get("partition") != "printed" and row.labels.get("clients") not in {"100 clients", "50 clients"}
    ]
    rows.sort(key=lambda row: recipe.paper not in row.labels["method"])
    parts = [[row for row in rows if part.shows(row.labels)] for part in recipe.parts] or [rows]
    shown = [part[0] for part in parts if part]
    bases = [{**row.labels, "method": recipe.relative.get(row.labels["method"])} for row in shown]
    return [row for row in recipe.rows if row in shown or row.labels in bases]


def tiny(row: RecipeRow, root: Path, own_network: bool) -> RecipeRow:
    """The row made small; what it does stays as it is."""
    tree = copy.deepcopy(row.tree)
    data, partition = tree["data"], tree["partition"]
    large = tree["model"]["name"] in {"mobilenetv2", "vgg11"}
    tree["seeds"] = [0]
    tree["training"]["epochs"] = min(1, tree["training"]["epochs"])
    data["root"] = str(root / "few" if large else root)
    if tree["model"]["name"] in LARGE and not own_network:
        tree["model"] = {"name": f"{__name__}:StandIn"}
    if data["name"] != "synthetic":
        data["verify"] = False
    if data["name"] == "fedvls_mnist":
        data |= {"beta": 5.0, "smallest": 1}
        tree["training"]["smallest_batch"] = 1
    if data["name"] == "digit_domains":
        data["share"] = 0.15
        partition["clients"] = 8  # two for each domain
    if data["name"] in {"pacs", "iwildcam"}:
        data["size"] = 40  # at which batch norm of a single picture still sees more than one pixel
    if data["name"] == "iwildcam":
        partition["clients"] = 5
    if "min_size" in partition:
        partition["min_size"] = 0
    if "samples_per_client" in partition:
        partition["samples_per_client"] = 6
    if "clients" in partition and "clients" not in tree.get("evaluation", {}):  # a figure shows a client of its own
        tree["training"]["participation"] = min(tree["training"].get("participation", 1.0), 3 / partition["clients"])
    if "tune" in tree:
        tree["tune"]["values"] = [0.0, 0.5]
    return RecipeRow(row.labels, tree)


def run(job: Job, out: Path) -> None:
    """What a worker process does, in this one, and without a report where there is nothing to choose."""
    if job.is_finished(out):
        return
    if job.config.tune is not None:
        simulate(job.config, out=out)
        return
    make_training_loop(job.config, job.seed, job.folder(out)).run()
    (job.folder(out) / "report.html").touch()


@pytest.mark.slow
@pytest.mark.parametrize("name", some_first(SOME, names()))
def test_every_recipe_runs_and_ends_in_its_table_and_its_figure(name: str, tiny_root: Path, out: Path):
    assert_runs(name, tiny_root, out)


@pytest.mark.whole_product
def test_the_others_hold_nothing_new():
    assert set().union(*map(held, names())) == set().union(*map(held, SOME))


def held(name: str) -> set[tuple[str, object]]:
    """What the rows that are trained of a recipe are made of."""
    found: set[tuple[str, object]] = set()
    rows = shown_rows(recipe := Recipe.read(name))
    for row in rows:
        tree = row.tree
        found |= {("data", tree["data"]["name"]), ("model", tree["model"]["name"]), ("tuned", "tune" in tree)}
        found |= {("partition", tree["partition"].get("rule")), ("method", tree["method"].get("preset"))}
        found |= {(table, key) for table, keys in tree.items() if isinstance(keys, dict) for key in keys}
    found |= {("figure", part.kind) for part in recipe.parts if any(part.shows(row.labels) for row in rows)}
    found |= {("line at a value", part.reference is not None) for part in recipe.parts}
    return found | {("paper", recipe.paper), ("drawn", bool(recipe.parts)), ("relative", bool(recipe.relative))}


@pytest.mark.whole_product
@pytest.mark.parametrize("name", LARGE.values())
def test_a_recipe_runs_with_its_own_network(name: str, tiny_root: Path, out: Path):
    assert_runs(name, tiny_root, out / "large", own_network=True)


def assert_runs(name: str, root: Path, out: Path, own_network: bool = False) -> None:
    """Train a recipe's rows, and read its table and its figure."""
    recipe = Recipe.read(name)
    rows = [tiny(row, root, own_network) for row in shown_rows(recipe)]
    for row, config in ((row, row.config(rounds=1)) for row in rows):
        run(Job(Cell(row.name, row.labels, config), 0), out)
    done = reproduce(recipe, rows, out, rounds=1)
    assert not done.failures
    assert all(line.ours for line in done.lines) or "rounds" in recipe.readings
    drawn = [part for part in recipe.parts if any(part.shows(row.labels) for row in rows)]
    assert len([file for file in done.files if file.suffix in {".png", ".svg"}]) == 2 * len(drawn)
    assert len(drawn) == len(recipe.parts) or name == "fedpals-fig8"
    assert any(note.startswith("Changed from the recipe") for note in done.notes)
