"""The papers' tables and figures: what they ran, what they print, and our runs beside it."""

from fedskew.papers._estimate import estimate as estimate
from fedskew.papers._published import PrintedCounts as PrintedCounts
from fedskew.papers._recipe import Recipe as Recipe
from fedskew.papers._recipe import RecipeRow as RecipeRow
from fedskew.papers._recipe import config_file as config_file
from fedskew.papers._recipe import config_names as config_names
from fedskew.papers._recipe import names as names
from fedskew.papers._reproduce import Reproduction as Reproduction
from fedskew.papers._reproduce import reproduce as reproduce
