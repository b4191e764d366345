"""What the recipes say: all rows make sense, all printed values have a row, labels are found as they are typed."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from fedskew.errors import ConfigError, PartitionError
from fedskew.papers import PrintedCounts, Recipe, names

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLISHED = sorted({recipe.published for name in names() if (recipe := Recipe.read(name)).published})


def printed(name: str):
    """The values that a recipe's table prints."""
    table = Recipe.read(name).printed
    assert table is not None
    return table


@pytest.mark.parametrize("name", names())
def test_every_row_of_a_recipe_is_a_config_that_can_be_run(name: str):
    recipe = Recipe.read(name)
    for row in recipe.rows:
        row.config()
        assert row.data


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_printed_value_has_a_row(name: str):
    recipe = Recipe.read(name)
    table = recipe.printed
    assert recipe.published == name
    assert table is not None
    read = [dict(zip(recipe.readings, labels, strict=True)) for labels in itertools.product(*recipe.readings.values())]
    found = [table.find({**row.labels, **reading}) for row in recipe.rows for reading in read]
    missing = [printed.labels for printed in table.rows if printed not in found]
    assert missing == []


def test_every_table_and_figure_that_holds_an_experiment_is_there():
    fedpals = [f"table{n}" for n in range(1, 5)] + [f"fig{n}" for n in (2, 3, 4, 5, 6, 7, 8, 9)]
    fedentopt = [f"table{n}" for n in range(1, 5)] + [f"fig{n}" for n in range(1, 7)]
    fedla = [f"fig{n}" for n in range(5, 10)]
    fedvls = [f"table{n}" for n in (1, 2, 3, 4, 5, 6, 11, 13, 14, 15, 16, 17)] + [f"fig{n}" for n in (1, 2, 3, 4, 8, 9)]
    asked = {"fedpals": fedpals, "fedentopt": fedentopt, "fedla": fedla, "fedvls": fedvls}
    assert {f"{paper}-{item}" for paper, items in asked.items() for item in items} <= set(names())


@pytest.mark.parametrize("name", ["fedvls-tabel1", "fedvls-table7"])  # table 7 prints a partition
def test_a_table_without_printed_values_is_refused(name: str):
    with pytest.raises(ConfigError, match=rf"no table is called '{name}' \(did you mean 'fedvls-table\d+'"):
        _ = Recipe("some", "Some", "Table", "last10.accuracy", name, ()).printed


def test_a_printed_value_is_as_in_the_paper():
    table = printed("fedentopt-table1")
    found = table.find({"dataset": "CIFAR-10", "partition": "Dir(0.1)", "method": "FedEntOpt"})
    assert found is not None
    assert (found.mean, found.std) == (52.80, 0.03)
    assert table.find({"dataset": "CIFAR-10", "partition": "Dir(0.1)"}) is None


def test_what_the_authors_saved_stands_beside_their_figures_and_names_its_source():
    table = printed("fedla-runs")
    assert table.source.startswith("from the authors' saved runs")
    assert printed("fedvls-table1").source == "as printed"
    rows = {"dataset": "EMNIST", "unique_c": "1", "noniid_s": "0.7", "k_r": "0.3"}
    found = [table.find({**rows, "method": method}) for method in ("FedAvg", "FedLA")]
    assert [(one.mean, one.std) for one in found if one] == [(40.93, 6.2), (63.59, 4.22)]
    # The reference on IID data has no unique_c, so it stands beside every one.
    assert table.find({**rows, "method": "FedAvg, IID"}) == table.find(
        {**rows, "unique_c": "6", "method": "FedAvg, IID"}
    )
    assert len(table.rows) == 2 * 136
    assert all(Recipe.read(f"fedla-fig{number}").published == "fedla-runs" for number in range(5, 10))


def test_settings_of_the_paper_reach_the_rows():
    (row,) = Recipe.read("fedentopt-table1").choose("CIFAR-100, C=3, FedEntOpt")
    config = row.config()
    assert config.data.parameters == {"superclasses": True}
    assert config.training.participation == 0.08
    assert config.training.lr_decay == 0.98
    assert config.method["selection"] == {"name": "fedentopt", "buffer": 0.7}
    (row,) = Recipe.read("fedvls-table6").choose("cifar100,fedsam+fedvls")
    terms = row.config().method["objective"]["terms"]
    assert [(term["name"], term["weight"]) for term in terms] == [("vacant_distillation", 0.5), ("suppression", 0.005)]
    (row,) = Recipe.read("fedentopt-table4").choose("cifar10,dir0.1,fedconcat")
    assert row.config().training.rounds == 980
    assert row.config().training.weight_decay == 1e-3


def test_runs_are_named_by_what_they_are_so_that_recipes_share_them():
    (one,) = Recipe.read("fedentopt-table1").choose("cifar10,dir0.1,fedentopt")
    (other,) = Recipe.read("fedentopt-fig2").choose("cifar10,fedentopt")
    assert (one.config().name, one.config().hash) == (other.config().name, other.config().hash)


@pytest.mark.parametrize(
    ("recipe", "labels", "name"),
    [
        ("fedla-exclusive-one", "fedavg", "-fedavg"),
        ("fedla-exclusive-one", "fedla", "-fedla"),
        ("fedvls-table1", "mnist,dir0.05,fedvls", "-fedvls_calibration-vacant_distillation-suppression"),
    ],
)
def test_a_run_is_named_by_what_differs_from_fedavg(recipe: str, labels: str, name: str):
    config = Recipe.read(recipe).choose(labels)[0].config()
    assert config.name.partition(config.model.name)[2] == name


def test_labels_are_found_as_they_are_typed_and_those_of_one_axis_are_alternatives():
    recipe = Recipe.read("fedentopt-table1")
    chosen = recipe.choose("cifar10, CIFAR-100, dir0.1, FEDAVG")
    assert [row.labels["dataset"] for row in chosen] == ["CIFAR-10", "CIFAR-100"]
    assert len(recipe.choose("cifar10")) == 40


def test_a_row_that_another_is_relative_to_comes_with_it():
    chosen = Recipe.read("fedentopt-table2").choose("cifar10,c2,fedrs+fedentopt")
    assert [row.labels["method"] for row in chosen] == ["FedRS", "FedRS + FedEntOpt"]


@pytest.mark.parametrize(
    ("words", "says"),
    [("cifar11", "did you mean 'cifar10'"), ("c2,dir0.1,kll", "did you mean 'kl'"), ("c5", "has no row 'c5'")],
)
def test_a_word_that_is_no_label_is_refused_with_the_nearest(words: str, says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        Recipe.read("fedentopt-table1").choose(words)


def test_labels_that_never_meet_are_refused():
    with pytest.raises(ConfigError, match="no row with all of"):
        Recipe.read("fedvls-table2").choose("cifar10,s20")


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'fedpals-table1'"):
        Recipe.read("fedpals-tabel1")


def test_the_printed_partition_is_dealt_as_printed():
    labels = np.repeat(np.arange(10), 5000)
    shares = PrintedCounts().split(labels, 10, np.random.default_rng(0))
    # client 0 of the table: 141 samples of class 3, 1471 of 5, 1360 of 8, 366 of 9
    assert np.bincount(labels[shares[0]], minlength=10).tolist() == [0, 0, 0, 141, 0, 1471, 0, 0, 1360, 366]
    assert sum(map(len, shares)) == 50_000
    assert len(np.unique(np.concatenate(shares))) == 50_000
    with pytest.raises(PartitionError, match="10 clients"):
        PrintedCounts().split(labels, 9, np.random.default_rng(0))


def test_the_page_on_reproducing_names_every_recipe_and_everything_that_deviates():
    page = (REPOSITORY / "docs" / "reproducing.md").read_text(encoding="utf-8")
    for name in names():
        recipe = Recipe.read(name)
        assert f"`{name}`" in page
        for text in recipe.deviating(recipe.rows):
            assert text[1:] in page, f"{name}: {text}"
