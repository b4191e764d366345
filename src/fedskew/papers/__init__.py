"""The papers' tables and figures: what they ran, what they print, and our runs beside it."""

from fedskew.papers._estimate import estimate
from fedskew.papers._published import PrintedCounts
from fedskew.papers._recipe import Recipe, RecipeRow, config_file, config_names, names
from fedskew.papers._reproduce import Reproduction, reproduce

__all__ = [
    "PrintedCounts",
    "Recipe",
    "RecipeRow",
    "Reproduction",
    "config_file",
    "config_names",
    "estimate",
    "names",
    "reproduce",
]
