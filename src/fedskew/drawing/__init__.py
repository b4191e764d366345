"""Figures: functions from arrays to matplotlib `Axes`, in one style, and their export.

The report, `fedskew describe` and the papers' figures are all drawn by these functions. They know nothing of runs or
records: what they draw are arrays.
"""

from fedskew.drawing._classes import MANY_CLASSES, Values, bars, class_height, label_mix, per_class
from fedskew.drawing._clients import (
    ClientWeights,
    Participation,
    heat_map,
    holdings_panel,
    participation,
    weights_against_fedavg,
    who_holds_what,
)
from fedskew.drawing._curves import Curve, curves
from fedskew.drawing._export import WIDTH, inline_svg, legend_key, panel, save
from fedskew.drawing._style import Floats, Look, look, styled

__all__ = [
    "MANY_CLASSES",
    "WIDTH",
    "ClientWeights",
    "Curve",
    "Floats",
    "Look",
    "Participation",
    "Values",
    "bars",
    "class_height",
    "curves",
    "heat_map",
    "holdings_panel",
    "inline_svg",
    "label_mix",
    "legend_key",
    "look",
    "panel",
    "participation",
    "per_class",
    "save",
    "styled",
    "weights_against_fedavg",
    "who_holds_what",
]
