"""Parts of figures: arrays in, plotly's traces and layouts out as plain dicts."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.names import visible
from fedskew.report.drawing import Curve, FloatArray

MANY = 40  # beyond this, a row with a name for each class makes a figure too tall to see at once
_WIDTH = 30  # letters of a name; a Chinese character is two wide
_BAR = {"thickness": 12, "outlinewidth": 0}
CATEGORY: dict[str, Any] = {"type": "category", "automargin": True}
DOWN = CATEGORY | {"autorange": "reversed"}

Trace = dict[str, Any]


def text(name: object) -> str:
    """Return a name on one line, as plotly shows and does not interpret it."""
    return escape(visible(" ".join(str(name).split())), quote=False)


def categories(names: Sequence[str], kind: str) -> list[str]:
    """Return short names that differ from each other, for an axis; a bare number becomes `kind` and the number."""
    short = [text(_cut(f"{kind} {name}" if name.isdecimal() else name)) for name in names]
    times = Counter(short)
    return [f"{name} ({at})" if times[name] > 1 else name for at, name in enumerate(short)]


def numbers(values: NDArray[Any], digits: int | None = None) -> list[Any]:
    """Return an array for JSON: so many decimals, or six significant digits; None where it is not finite."""
    array = np.asarray(values, dtype=np.float64)
    if digits is None:
        return [float(f"{value:.6g}") if math.isfinite(value) else None for value in array.tolist()]
    rounded = np.round(array, digits) + 0.0  # no -0.0
    if np.isfinite(rounded).all():
        return (rounded.astype(np.int64) if digits == 0 else rounded).tolist()  # type: ignore[no-any-return]
    return np.where(np.isfinite(rounded), rounded.astype(object), np.array(None)).tolist()  # type: ignore[no-any-return]


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


def curve(name: str, line: Curve, runs: list[int], unit: str, dash: str = "", thin: bool = False) -> Trace:
    """Return a line over rounds that shows these runs; `thin` where some seeds have stopped."""
    meta: dict[str, Any] = {"kind": "curve", "look": line.style, "runs": runs, "digits": 1 if unit == "%" else 4}
    if line.std is not None and np.isfinite(line.std).any():
        meta["std"] = numbers(line.std)
    meta |= ({"share": True} if unit == "%" else {}) | ({"thin": True} if thin else {})
    points = {"x": numbers(line.x), "y": numbers(line.mean)}
    return {"type": "scatter", "name": text(name), **points, "meta": meta} | ({"line": {"dash": dash}} if dash else {})


def rounds_axes(traces: list[Trace], unit: str, levels: Sequence[float] = ()) -> dict[str, Any]:
    """Return the layout of lines over rounds, with dashed lines at some levels."""
    values = [value for trace in traces for value in trace["y"] if value is not None] + list(levels)
    dashed = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "line": {"dash": "dash", "width": 1}}
    return {
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "round"}},
        "yaxis": span(min(values), max(values), unit) | {"title": {"text": "" if unit == "%" else unit}},
        **({"shapes": [dashed | {"y0": level, "y1": level} for level in levels]} if levels else {}),
    }


def heat_map(x: list[Any], y: list[str], z: list[Any], hover: str, percent: bool = False, **meta: Any) -> Trace:
    """Return a heat map of shares in percent, or of counts."""
    suffix = {"ticksuffix": " %"} if percent else {}
    scale = {"colorscale": "Viridis", "zmin": 0, "zmax": 100} if percent else {}
    about = meta if percent else {"kind": "count", **meta}
    template = f"{hover}<extra></extra>"
    colours = {"colorbar": suffix | _BAR, "meta": about, **scale}
    return {"type": "heatmap", "x": x, "y": y, "z": z, "hovertemplate": template, **colours}


def bars(x: list[Any], y: list[Any], hover: str, **meta: Any) -> Trace:
    """Return a bar for each value."""
    return {"type": "bar", "x": x, "y": y, "hovertemplate": f"{hover}<extra></extra>", "meta": meta}


def square(end: float, x: str, y: str, **ends: Any) -> dict[str, Any]:
    """Return the layout of a cloud, with the diagonal up to `end`."""
    diagonal = {"type": "line", "x0": 0, "y0": 0, "x1": end, "y1": end, "line": {"dash": "dash", "width": 1}}
    axes = {
        name: {"ticksuffix": " %", "nticks": 6, "title": {"text": title}, **ends}
        for name, title in {"xaxis": x, "yaxis": y}.items()
    }
    return {**axes, "shapes": [diagonal], "hovermode": "closest"}


def class_axes(classes: int, values_title: str) -> tuple[str, dict[str, Any], int]:
    """Return the axis of the classes, both axes, and the height: rows for few classes, columns for many."""
    values = {"title": {"text": values_title}, "ticksuffix": " %", "nticks": 6}
    if classes > MANY:
        return "x", {"xaxis": CATEGORY | {"nticks": 16}, "yaxis": values, "hovermode": "x unified"}, 340
    axes = {"yaxis": DOWN, "xaxis": values | {"side": "top"}, "hovermode": "y unified"}
    return "y", axes, 90 + 24 * classes


def orders(rows: list[str], ways: dict[str, NDArray[Any]]) -> dict[str, list[str]]:
    """Return categories in their own order, and in ascending order of some values, by name."""
    ascending = {name: [rows[at] for at in np.argsort(values, kind="stable")] for name, values in ways.items()}
    return {"as in the data": rows, **ascending}


def mean_of_blocks(values: FloatArray, each: int) -> FloatArray:
    """Return the means of so many values each, along the first axis."""
    return np.array([values[start : start + each].mean(axis=0) for start in range(0, len(values), each)])


def number(value: float, unit: str = "%") -> str:
    """Return a value of a figure as text."""
    return f"{value:.1f} %" if unit == "%" else f"{value:.3g} {unit}".rstrip()


def _cut(name: str) -> str:
    """Shorten a name to what stands beside an axis."""
    name = " ".join(name.split())
    wide = np.cumsum([2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in name])
    if not len(wide) or wide[-1] <= _WIDTH:
        return name
    return name[: int(np.count_nonzero(wide < _WIDTH))] + "\N{HORIZONTAL ELLIPSIS}"
