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
from fedskew.report._runs import Group, listed
from fedskew.report.drawing import Curve, FloatArray
from fedskew.tables import grouped

GOOD, SITES, CLASSES, DATA, ROUND, LOCAL = (
    "How good the model is",
    "Worth it for each client",
    "Class by class",
    "Who holds what, and who trains",
    "What happens in a round",
    "Clients after their local training",
)
MANY = 40  # beyond this, a row with a name for each class makes a figure too tall to see at once
_MOST_MARKERS = 1000
_WIDTH = 30  # letters of a name; a Chinese character is two wide
CATEGORY: dict[str, Any] = {"type": "category", "automargin": True}
DOWN = CATEGORY | {"autorange": "reversed"}

Trace = dict[str, Any]


FIGURES: list[tuple[Callable[[Figure], None], Callable[[Group], Hashable], dict[str, Any]]] = []
"""Every figure, in the order of the page within its section: what draws it, runs that share one, its settings."""


def figure(
    section: str, title: str, caption: str, alike: Callable[[Group], Hashable] = lambda group: "", **settings: bool
) -> Callable[[Callable[[Figure], None]], Callable[[Figure], None]]:
    """Make a function that draws a figure part of every page; runs for which `alike` is equal share one."""

    def register(draw: Callable[[Figure], None]) -> Callable[[Figure], None]:
        FIGURES.append((draw, alike, {"section": section, "title": title, "caption": caption, **settings}))
        return draw

    return register


@dataclass
class Figure:
    """A figure with the words around it, which the function that draws it completes.

    It stands under the heading `section`; the `caption` says how to read it. It shows the lowest seed of each run
    (`one_seed`) or all, all runs or one at a time, by a menu (`by_run`), and may take the page's whole width (`wide`).
    `members` of the page's `groups` may be shown; `add` says which are, and with how many seeds. `axis` ("x" or "y")
    has categories that can be put in the `orders`, each from left to right or from the top; `picks` are shown one at a
    time, by a `menu`. `findings` are sentences on what is seen, `description` is for readers who see nothing.
    """

    groups: list[Group]
    members: list[Group]
    section: str
    title: str
    caption: str
    one_seed: bool = False
    by_run: bool = False
    wide: bool = False
    traces: list[Trace] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 280
    findings: list[str] = field(default_factory=list)
    description: list[str] = field(default_factory=list)
    shown: list[tuple[Group, int]] = field(default_factory=list)
    axis: str = ""
    orders: dict[str, list[str]] = field(default_factory=dict)
    menu: str = "Run"
    picks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.members) < len(self.groups):
            self.title += f": {'; '.join(group.label for group in self.members)}"

    def add(self, group: Group, *traces: Trace, seeds: int = 1, name: str = "") -> None:
        """Add what shows a run, or several by one name."""
        if self.by_run:
            for trace in traces:
                trace["meta"] = trace.get("meta", {}) | {"pick": len(self.shown)}
            self.picks.append(name or group.label)
        self.traces += traces
        self.shown.append((group, seeds))

    def add_cloud(
        self,
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
        if len(part) < len(clients) and "evenly drawn" not in self.caption:
            self.caption += f" {len(part):,} of the clients, evenly drawn."
        names = [text(group.first.client_names[at]) for at in clients]
        about = [names[at] + (notes[at] if notes else "") for at in part]
        points = {"x": numbers(x[part], digits), "y": numbers(y[part], digits), "customdata": about}
        self.add(group, markers(group, points, hover, cloud=True))

    def add_classes(
        self, group: Group, mean: FloatArray, seeds: int, std: FloatArray | None = None, notes: Sequence[str] = ()
    ) -> None:
        """Add a marker for each class; `notes` stand behind the value that the reader points at."""
        values = "x" if self.axis == "y" else "y"
        points: Trace = {self.axis: class_names(group), values: numbers(mean, 2)}
        if notes:
            points["customdata"] = notes
        if std is not None:
            points[f"error_{values}"] = {"array": numbers(std, 2), "thickness": 1, "width": 0}
        hover = f"%{{{values}:.1f}} %" + (", %{customdata}" if notes else "")
        self.add(group, markers(group, points, hover, small=self.axis == "x"), seeds=seeds)

    def by_class(self, values: str, **settings: Any) -> list[str]:
        """Lay it out with a row for each class, or a column where there are many; return the names of these."""
        rows = class_names(self.members[0])
        axis = percent(values, **settings)
        if len(rows) > MANY:
            self.axis, self.height = "x", 340
            self.layout = {"xaxis": CATEGORY | {"nticks": 16}, "yaxis": axis, "hovermode": "x unified"}
        else:
            self.axis, self.height = "y", 90 + 24 * len(rows)
            self.layout = {"yaxis": DOWN, "xaxis": axis | {"side": "top"}, "hovermode": "y unified"}
        return rows

    def square(self, end: float, x: str, y: str, **ends: Any) -> None:
        """Lay it out as a cloud, with the diagonal up to `end`."""
        diagonal = {"type": "line", "x0": 0, "y0": 0, "x1": end, "y1": end, "line": {"dash": "dash", "width": 1}}
        axes = {"xaxis": percent(x, **ends), "yaxis": percent(y, **ends)}
        self.layout, self.height = {**axes, "shapes": [diagonal], "hovermode": "closest"}, 340

    def over_rounds(self, unit: str, levels: Sequence[float] = ()) -> None:
        """Lay it out as lines over rounds, with dashed lines at some levels."""
        values = [value for trace in self.traces for value in trace["y"] if value is not None] + list(levels)
        dashed = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "line": {"dash": "dash", "width": 1}}
        self.layout = {
            "hovermode": "x unified",
            "xaxis": {"title": {"text": "round"}},
            "yaxis": span(min(values), max(values), unit) | {"title": {"text": "" if unit == "%" else unit}},
            **({"shapes": [dashed | {"y0": level, "y1": level} for level in levels]} if levels else {}),
        }

    def order_by(self, axis: str, rows: list[str], ways: dict[str, NDArray[Any]]) -> None:
        """Offer the categories of an axis in their own order, and in ascending order of some values, by name."""
        ascending = {name: [rows[at] for at in np.argsort(values, kind="stable")] for name, values in ways.items()}
        self.axis, self.orders = axis, {"as in the data": rows, **ascending}

    def about(self, *groups: Group) -> str:
        """Return the beginning of a sentence about some runs: their labels, where the page has others."""
        return f"{listed(group.label for group in groups)}: " if len(self.groups) > 1 else ""

    @property
    def several(self) -> bool:
        """Whether a run is shown with several seeds."""
        return any(seeds > 1 for _, seeds in self.shown)

    @property
    def alt(self) -> str:
        """What it shows, for readers who don't see it."""
        return f"{self.title}: {', '.join(self.description or [group.label for group, _ in self.shown])}."

    @property
    def basis(self) -> str:
        """How many seeds it rests on."""
        counts = {count for _, count in self.shown}
        if self.one_seed:
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
    sections: dict[str, list[Figure]] = {section: [] for section in (GOOD, SITES, CLASSES, DATA, ROUND, LOCAL)}
    for draw, key, settings in FIGURES:
        for members in grouped(groups, key).values():
            drawn = Figure(groups, members, **settings)
            draw(drawn)
            if len(drawn.picks) < 2:
                drawn.picks = []
            if drawn.traces:
                sections[drawn.section].append(drawn)
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


def percent(title: str = "", **settings: Any) -> dict[str, Any]:
    """Return an axis of shares."""
    return {"title": {"text": title}, "ticksuffix": " %", "nticks": 6, **settings}


def span(low: float, high: float, unit: str) -> dict[str, Any]:
    """Return the settings of a value axis, which never magnifies what rounding makes of a constant."""
    least = 1.0 if unit == "%" else 0.01 * max(abs(low), abs(high), 1e-9)
    missing = max(least - (high - low), 0) / 2
    options: dict[str, Any] = {"include": [low - missing, high + missing]}
    if unit == "%":
        # 101 shows a line at 100 in its full width; 5 shows that a line at 0 is low
        options = {"clipmin": 0, "clipmax": 101, "include": [max(low - missing, 0), max(high + missing, 5)]}
    return {"autorangeoptions": options, "ticksuffix": " %" if unit == "%" else "", "nticks": 6}


def curve(name: str, line: Curve, runs: list[int], unit: str, dash: str = "", **more: Any) -> Trace:
    """Return a line over rounds that shows these runs; `thin=True` where some seeds have stopped."""
    meta: dict[str, Any] = {"kind": "curve", "look": line.style, "runs": runs, "digits": 1 if unit == "%" else 4}
    if line.std is not None and np.isfinite(line.std).any():
        meta["std"] = numbers(line.std)
    meta |= ({"share": True} if unit == "%" else {}) | more
    points = {"x": numbers(line.x), "y": numbers(line.mean)}
    return {"type": "scatter", "name": text(name), **points, "meta": meta} | ({"line": {"dash": dash}} if dash else {})


def heat_map(x: list[Any], y: list[str], z: list[Any], hover: str, is_share: bool = False) -> Trace:
    """Return a heat map of shares in percent, or of counts."""
    colours: Trace = {"colorbar": {"thickness": 12, "outlinewidth": 0}, "meta": {} if is_share else {"kind": "count"}}
    if is_share:
        colours |= {"colorscale": "Viridis", "zmin": 0, "zmax": 100}
        colours["colorbar"]["ticksuffix"] = " %"
    return {"type": "heatmap", "x": x, "y": y, "z": z, "hovertemplate": f"{hover}<extra></extra>", **colours}


def bars(x: list[Any], y: list[Any], hover: str, **meta: Any) -> Trace:
    """Return a bar for each value."""
    return {"type": "bar", "x": x, "y": y, "hovertemplate": f"{hover}<extra></extra>", "meta": meta}


def markers(group: Group, points: Trace, hover: str, **look: bool) -> Trace:
    """Return a run's markers."""
    meta = {"look": group.style, "runs": [group.style], **look}
    trace = {"type": "scatter", "mode": "markers", "name": text(group.label), "hovertemplate": hover}
    return {**trace, "meta": meta, **points}


def mean_of_blocks(values: FloatArray, each: int) -> FloatArray:
    """Return the means of so many values each, along the first axis."""
    return np.array([values[start : start + each].mean(axis=0) for start in range(0, len(values), each)])


def number(value: float, unit: str = "%") -> str:
    """Return a value of a figure as text."""
    return f"{value:.1f} %" if unit == "%" else f"{value:.3g} {unit}".rstrip()


def class_names(group: Group) -> list[str]:
    """Return the names of a run's classes, for an axis."""
    return categories(group.first.class_names, "class")


def _cut(name: str) -> str:
    """Shorten a name to what stands beside an axis."""
    name = " ".join(name.split())
    wide = np.cumsum([2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in name])
    if not len(wide) or wide[-1] <= _WIDTH:
        return name
    return name[: int(np.count_nonzero(wide < _WIDTH))] + "\N{HORIZONTAL ELLIPSIS}"
