"""The papers' tables and figures: what they ran, what they print, and our runs beside it."""

from fedskew.papers._datasets import DATASETS, absent
from fedskew.papers._drawing import Drawing
from fedskew.papers._estimate import estimate, in_words
from fedskew.papers._measures import value_of
from fedskew.papers._printed_counts import PrintedCounts
from fedskew.papers._published import published
from fedskew.papers._recipe import Recipe, Row, names, read_recipe
from fedskew.papers._reproduce import Reproduction, plan, reproduce, text_lines

__all__ = [
    "DATASETS",
    "Drawing",
    "PrintedCounts",
    "Recipe",
    "Reproduction",
    "Row",
    "absent",
    "estimate",
    "in_words",
    "names",
    "plan",
    "published",
    "read_recipe",
    "reproduce",
    "text_lines",
    "value_of",
]
