"""The papers' tables and figures: what they ran, what they print, and our runs beside it."""

from fedskew.papers._datasets import DATASETS, DatasetFacts, absent
from fedskew.papers._estimate import estimate, estimate_run, in_words
from fedskew.papers._measures import value_of
from fedskew.papers._paired import PairedDifference, paired, repetitions
from fedskew.papers._published import PrintedCounts, PublishedTable, published, published_names
from fedskew.papers._recipe import (
    Deviation,
    FigurePart,
    Recipe,
    RecipeRow,
    config_file,
    config_names,
    names,
    read_recipe,
)
from fedskew.papers._reproduce import (
    Comparison,
    Reproduction,
    compare,
    paired_lines,
    plan,
    reproduce,
    seed_lines,
    text_lines,
)

__all__ = [
    "DATASETS",
    "Comparison",
    "DatasetFacts",
    "Deviation",
    "FigurePart",
    "PairedDifference",
    "PrintedCounts",
    "PublishedTable",
    "Recipe",
    "RecipeRow",
    "Reproduction",
    "absent",
    "compare",
    "config_file",
    "config_names",
    "estimate",
    "estimate_run",
    "in_words",
    "names",
    "paired",
    "paired_lines",
    "plan",
    "published",
    "published_names",
    "read_recipe",
    "repetitions",
    "reproduce",
    "seed_lines",
    "text_lines",
    "value_of",
]
