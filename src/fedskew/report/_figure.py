"""Figures of the page: a function draws one as plain traces, and the words around it stand beside the function.

    @figure(DATA, "How much each client counts", "One marker a client.", one_seed=True)
    def weights(figure: Figure) -> None:
        for group in figure.members:
            figure.add(group, {"type": "scatter", "x": ..., "y": ...})

Traces and layouts are plotly's. What depends on the reader (light or dark, smoothing, order, which runs are shown) is
added by `report.js`, which finds in the `meta` of a trace:

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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.names import visible
from fedskew.report._groups import Group, alike
from fedskew.report.drawing import Curve, FloatArray

GOOD, CLASSES, DATA, ROUND, LOCAL = (
    "How good the model is",
    "Class by class",
    "Who holds what, and who trains",
    "What happens in a round",
    "Clients after their local training",
)
MANY = 40  # beyond this, a row with a name for each class makes a figure too tall to see at once
_WIDTH = 30  # letters of a name; a Chinese character is two wide
_MOST_MARKERS = 1000
_BAR = {"thickness": 12, "outlinewidth": 0}
CATEGORY: dict[str, Any] = {"type": "category", "automargin": True}
DOWN = CATEGORY | {"autorange": "reversed"}

Trace = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """What is the same of a figure on every page.

    Attributes:
        section: Heading under which it stands.
        title: Its own heading.
        caption: How to read it.
        draw: Draws it; a figure without traces is left out.
        alike: Runs for which this is equal share a figure.
        one_seed: Whether it shows the lowest seed of each run, not all.
        by_run: Whether runs are shown one at a time, by a menu.
        wide: Whether it takes the page's whole width.
    """

    section: str
    title: str
    caption: str
    draw: Callable[[Figure], None]
    alike: Callable[[Group], Hashable] = lambda group: ""
    one_seed: bool = False
    by_run: bool = False
    wide: bool = False


FIGURES: list[Kind] = []
"""Every figure, in the order of the page within its section."""


def figure(section: str, title: str, caption: str, **settings: Any) -> Callable[[Callable[[Figure], None]], Any]:
    """Make a function that draws a figure part of every page; `settings` are those of `Kind`."""

    def register(draw: Callable[[Figure], None]) -> Callable[[Figure], None]:
        FIGURES.append(Kind(section, title, caption, draw, **settings))
        return draw

    return register


@dataclass
class Figure:
    """A figure with the words around it, which the function that draws it completes.

    Attributes:
        kind: What is the same on every page.
        groups: The runs of the page.
        members: The runs that this figure may show.
        traces: Its traces.
        layout: Its layout.
        height: Height in CSS pixels.
        title: Its heading, with the runs that it may show where these are not all.
        caption: How to read it.
        findings: What it shows, in sentences.
        said: What it shows, for readers who don't see it; the names of its runs unless there is more to say.
        shown: The runs that it shows, with their number of seeds.
        axis: The axis whose categories can be put in another order, "x" or "y".
        orders: The orders, by name, each as the categories from left to right or from the top.
        menu: What is shown one at a time, by a menu.
        picks: The entries of that menu.
    """

    kind: Kind
    groups: list[Group]
    members: list[Group]
    traces: list[Trace] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 280
    title: str = ""
    caption: str = ""
    findings: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    shown: list[tuple[Group, int]] = field(default_factory=list)
    axis: str = ""
    orders: dict[str, list[str]] = field(default_factory=dict)
    menu: str = "Run"
    picks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        labels = "; ".join(group.label for group in self.members)
        self.title = self.kind.title + (f": {labels}" if len(self.members) < len(self.groups) else "")
        self.caption = self.kind.caption

    def add(self, group: Group, *traces: Trace, seeds: int = 1, name: str = "") -> None:
        """Add what shows a run, or several by one name."""
        if self.kind.by_run:
            for trace in traces:
                trace["meta"] = trace.get("meta", {}) | {"pick": len(self.shown)}
            self.picks.append(name or group.label)
        self.traces += traces
        self.shown.append((group, seeds))

    def find(self, group: Group, sentence: str) -> None:
        """Add a sentence about a run."""
        self.findings.append(f"{group.label}: {sentence}" if len(self.groups) > 1 else sentence)

    @property
    def alt(self) -> str:
        """What it shows, for readers who don't see it."""
        return f"{self.title}: {', '.join(self.said or [group.label for group, _ in self.shown])}."

    @property
    def basis(self) -> str:
        """How many seeds it rests on."""
        counts = {count for _, count in self.shown}
        if self.kind.one_seed:
            seeds = {group.first.seed for group, _ in self.shown}
            most = max(len(group.seeds) for group, _ in self.shown)
            which = f"seed {seeds.pop()}" if len(seeds) == 1 else "the lowest of each run"
            return f"1 seed{f' of {most}' if most > 1 else ''} ({which})"
        if len(counts) == 1:
            count = counts.pop()
            return f"{count} seed{'s' if count > 1 else ''}{' each' if len(self.shown) > 1 else ''}"
        return "Seeds: " + ", ".join(f"{group.label} {count}" for group, count in self.shown)

    def plain(self) -> dict[str, Any]:
        """Return what `report.js` reads."""
        order = {"axis": self.axis, "orders": self.orders} if self.orders else {}
        return {"data": self.traces, "layout": self.layout, **order, **({"picks": self.picks} if self.picks else {})}


def figures(groups: list[Group]) -> list[tuple[str, list[Figure]]]:
    """Draw every figure that these runs have the records for, under its heading."""
    sections: dict[str, list[Figure]] = {section: [] for section in (GOOD, CLASSES, DATA, ROUND, LOCAL)}
    for kind in FIGURES:
        for members in alike(groups, kind.alike):
            drawn = Figure(kind, groups, members)
            kind.draw(drawn)
            if len(drawn.picks) < 2:
                drawn.picks = []
            if drawn.traces:
                sections[kind.section].append(drawn)
    return [(heading, drawn) for heading, drawn in sections.items() if drawn]


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


def add_cloud(
    drawn: Figure,
    group: Group,
    clients: NDArray[np.int64],
    x: FloatArray,
    y: FloatArray,
    hover: str,
    digits: int | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Add a marker for each of these clients of a run, evenly drawn where there are too many."""
    part = np.unique(np.linspace(0, len(clients) - 1, min(len(clients), _MOST_MARKERS)).astype(np.int64))
    if len(part) < len(clients) and "evenly drawn" not in drawn.caption:
        drawn.caption += f" {len(part):,} of the clients, evenly drawn."
    names = [text(group.first.client_names[at]) for at in clients]
    drawn.add(
        group,
        {
            "type": "scatter",
            "mode": "markers",
            "name": text(group.label),
            "x": numbers(x[part], digits),
            "y": numbers(y[part], digits),
            "customdata": [names[at] + (notes[at] if notes else "") for at in part],
            "hovertemplate": hover,
            "meta": {"look": group.style, "runs": [group.style], "cloud": True},
        },
    )


def square(end: float, x: dict[str, Any], y: dict[str, Any]) -> dict[str, Any]:
    """Return the layout of a cloud, with the diagonal up to `end`."""
    ends = {"ticksuffix": " %", "nticks": 6}
    diagonal = {"type": "line", "x0": 0, "y0": 0, "x1": end, "y1": end, "line": {"dash": "dash", "width": 1}}
    return {"xaxis": ends | x, "yaxis": ends | y, "shapes": [diagonal], "hovermode": "closest"}


def class_axes(classes: int, values_title: str) -> tuple[str, dict[str, Any], int]:
    """Return the axis of the classes, both axes, and the height: rows for few classes, columns for many."""
    values = {"title": {"text": values_title}, "ticksuffix": " %", "nticks": 6}
    if classes > MANY:
        return "x", {"xaxis": CATEGORY | {"nticks": 16}, "yaxis": values, "hovermode": "x unified"}, 340
    axes = {"yaxis": DOWN, "xaxis": values | {"side": "top"}, "hovermode": "y unified"}
    return "y", axes, 90 + 24 * classes


def class_dots(
    group: Group,
    axis: str,
    rows: list[str],
    mean: FloatArray,
    std: FloatArray | None = None,
    notes: list[str] | None = None,
) -> Trace:
    """Return a marker for each class; `notes` stand behind the value that the reader points at."""
    other = "x" if axis == "y" else "y"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": text(group.label),
        axis: rows,
        other: numbers(mean, 2),
        "hovertemplate": f"%{{{other}:.1f}} %" + (", %{customdata}" if notes else ""),
        "meta": {"look": group.style, "runs": [group.style], "small": axis == "x"},
        **({"customdata": notes} if notes else {}),
        **({} if std is None else {f"error_{other}": {"array": numbers(std, 2), "thickness": 1, "width": 0}}),
    }


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
