"""Figures of a page, as plotly reads them: arrays in, plain dicts out.

What depends on the reader (light or dark, smoothing, order, which runs are shown) is added by `report.js`, which finds
in the `meta` of a trace:

    runs    the numbers of the runs that it shows; it is drawn while one of them is
    look    the number of its colour and dashes
    kind    "curve": rounds and values, with standard deviations as `std`; "count": a heat map in logarithmic colours
    pick    the entry of the figure's menu that shows it
    ink     "line" or "area" for what is no run; "cloud", "small", "bar": how markers and bars look
    level   where a dashed line stands while it is shown
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.names import visible

MANY = 40  # beyond this, a row with a name for each class makes a figure too tall to see at once
_WIDTH = 30  # letters of a name; a Chinese character is two wide

Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """A figure.

    Attributes:
        data: Its traces.
        layout: Its layout.
        height: Height in CSS pixels.
        axis: The axis whose categories can be put in another order, "x" or "y".
        orders: The orders, by name, each as the categories from left to right or from the top.
        picks: What is shown one at a time, by a menu.
        menu: What the menu is called.
    """

    data: list[Trace]
    layout: dict[str, Any]
    height: int = 280
    axis: str = ""
    orders: dict[str, list[str]] = field(default_factory=dict)
    picks: list[str] = field(default_factory=list)
    menu: str = "Run"

    def plain(self) -> dict[str, Any]:
        """Return what `report.js` reads."""
        apart = ("height", "menu")
        return {key: value for key, value in vars(self).items() if key not in apart and value not in ("", {}, [])}


def text(name: object) -> str:
    """Return a name on one line, as plotly shows and does not interpret it."""
    return escape(visible(" ".join(str(name).split())), quote=False)


def categories(names: Sequence[str], kind: str) -> list[str]:
    """Return short names that differ from each other, for an axis; a bare number becomes `kind` and the number."""
    shown = [text(_cut(f"{kind} {name}" if name.isdecimal() else name)) for name in names]
    times = Counter(shown)
    return [f"{name} ({at})" if times[name] > 1 else name for at, name in enumerate(shown)]


def numbers(values: NDArray[Any], digits: int | None = None) -> list[Any]:
    """Return an array for JSON: so many decimals, or six significant digits; None where it is not finite."""
    array = np.asarray(values, dtype=np.float64)
    if digits is None:
        return [float(f"{value:.6g}") if math.isfinite(value) else None for value in array.tolist()]
    rounded = np.round(array, digits) + 0.0  # no -0.0
    if not np.isfinite(rounded).all():
        plain = rounded.astype(object)
        plain[~np.isfinite(rounded)] = None
        return plain.tolist()  # type: ignore[no-any-return]
    return (rounded.astype(np.int64) if digits == 0 else rounded).tolist()  # type: ignore[no-any-return]


def span(low: float, high: float, unit: str) -> dict[str, Any]:
    """Return the settings of a value axis, which never magnifies differences below a hundredth.

    What rounding makes of a constant would fill the figure otherwise.
    """
    least = 1.0 if unit == "%" else 0.01 * max(abs(low), abs(high), 1e-9)
    missing = max(least - (high - low), 0) / 2
    options: dict[str, Any] = {"include": [low - missing, high + missing]}
    if unit == "%":
        # 101 shows a line at 100 in its full width; 5 shows that a line at 0 is low
        options = {"clipmin": 0, "clipmax": 101, "include": [max(low - missing, 0), max(high + missing, 5)]}
    return {"autorangeoptions": options, "ticksuffix": " %" if unit == "%" else "", "nticks": 6}


def curve(
    name: str,
    look: int,
    runs: list[int],
    x: NDArray[Any],
    mean: NDArray[Any],
    std: NDArray[Any] | None = None,
    *,
    unit: str = "",
    dash: str = "",
    thin: bool = False,
) -> Trace:
    """Return a line over rounds.

    Args:
        name: What the reader sees when pointing at it.
        look: Number of its colour and dashes.
        runs: Numbers of the runs that it shows.
        x: Rounds, shape `(points,)`.
        mean: Values, shape `(points,)`.
        std: Standard deviations, for a band.
        unit: "%" shows one decimal.
        dash: Plotly's dash style, where it says more than which run it is.
        thin: Whether some seeds have stopped.
    """
    meta: dict[str, Any] = {"kind": "curve", "look": look, "runs": runs, "digits": 1 if unit == "%" else 4}
    if std is not None and np.isfinite(std).any():
        meta["std"] = numbers(std)
    if unit == "%":
        meta["share"] = True
    if thin:
        meta["thin"] = True
    line = {"line": {"dash": dash}} if dash else {}
    return {"type": "scatter", "name": text(name), "x": numbers(x), "y": numbers(mean), "meta": meta, **line}


def curves(data: list[Trace], unit: str, reference: float | None = None) -> Chart:
    """Return a figure of lines over rounds, with a dashed line at a level."""
    values = [value for trace in data for value in trace["y"] if value is not None]
    if reference is not None:
        values.append(reference)
    layout: dict[str, Any] = {
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "round"}},
        "yaxis": span(min(values), max(values), unit) | {"title": {"text": "" if unit == "%" else unit}},
    }
    if reference is not None:
        layout["shapes"] = [level(reference)]
    return Chart(data, layout)


def level(value: float, axis: str = "y") -> dict[str, Any]:
    """Return a dashed line at a value, over the whole figure."""
    other = {"y": "x", "x": "y"}[axis]
    ends = {f"{axis}0": value, f"{axis}1": value, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    return {"type": "line", **ends, "line": {"dash": "dash", "width": 1}}


def class_axes(classes: int, unit_title: str) -> tuple[str, dict[str, Any], int]:
    """Return the axis of the classes, both axes, and the height: rows for few classes, columns for many."""
    values = {"title": {"text": unit_title}, "ticksuffix": " %", "nticks": 6}
    names = {"type": "category", "automargin": True}
    if classes > MANY:
        return "x", {"xaxis": names | {"nticks": 16}, "yaxis": values}, 340
    return "y", {"yaxis": names, "xaxis": values | {"side": "top"}}, 90 + 24 * classes


def _cut(name: str) -> str:
    """Shorten a name to what stands beside an axis."""
    name = " ".join(name.split())
    wide = np.cumsum([2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in name])
    if not len(wide) or wide[-1] <= _WIDTH:
        return name
    return name[: int(np.count_nonzero(wide < _WIDTH))] + "\N{HORIZONTAL ELLIPSIS}"
