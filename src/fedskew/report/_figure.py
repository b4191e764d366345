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

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.report._charts import Trace, numbers, text
from fedskew.report._groups import Group, alike, listed
from fedskew.report.drawing import FloatArray

GOOD, CLASSES, DATA, ROUND, LOCAL = (
    "How good the model is",
    "Class by class",
    "Who holds what, and who trains",
    "What happens in a round",
    "Clients after their local training",
)
_MOST_MARKERS = 1000


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

    `members` of the page's `groups` may be shown; `add` says which are, and with how many seeds. `axis` ("x" or "y")
    has categories that can be put in the `orders`, each from left to right or from the top; `picks` are shown one at a
    time, by a `menu`. `findings` are sentences on what is seen, `description` is for readers who see nothing.
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
    description: list[str] = field(default_factory=list)
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

    def about(self, *groups: Group) -> str:
        """Return the beginning of a sentence about some runs: their labels, where the page has others."""
        return f"{listed(group.label for group in groups)}: " if len(self.groups) > 1 else ""

    @property
    def alt(self) -> str:
        """What it shows, for readers who don't see it."""
        return f"{self.title}: {', '.join(self.description or [group.label for group, _ in self.shown])}."

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
