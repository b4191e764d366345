"""The pictures of a report: arrays in, inline SVG out.

Every picture is drawn 400 units wide, about a phone's width in CSS pixels, so that its letters stay legible there and
it can be scaled up elsewhere. Text stays text, set in the page's own font. Colours leave here as CSS variables, so
that the page decides on light and dark. `alt` describes a picture to those who don't see it, and must differ from
picture to picture of one page: ids are made from it. The same arrays give the same bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Okabe and Ito's palette, told apart with any common colour blindness; dashes and markers repeat what it says
_SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
_MARKERS = "osD^vP"
_INK, _MUTED, _GRID, _PAGE = "#1b1f24", "#5b6470", "#dde1e6", "#fdfefe"
_VARIABLES = {color: f"var(--series-{index})" for index, color in enumerate(_SERIES)} | {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _GRID: "var(--grid)",
    _PAGE: "var(--card)",
}
_WIDTH = 400
MANY_CLASSES = 20  # beyond this, a row with a name for each class makes a picture too tall to see at once
_RC = {
    "svg.fonttype": "none",
    "figure.dpi": 72,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 12,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.facecolor": "none",
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlecolor": _MUTED,
    "axes.titlepad": 7,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.width": 0.8,
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}


@dataclass(frozen=True)
class Curve:
    """One run's line: mean over seeds and, with two seeds or more, their standard deviation."""

    style: int  # which colour, dashes and marker; a label keeps its own through the whole page
    x: Floats
    mean: Floats
    std: Floats | None
    whole: NDArray[np.bool_]  # where every seed has a value; elsewhere the line is thin


@dataclass(frozen=True)
class Dots:
    """One run's value for each class, (classes,); NaN where undefined."""

    style: int
    mean: Floats
    std: Floats | None


@dataclass(frozen=True)
class Attendance:
    """How often each client of one run was chosen, and diverged, as shares of the rounds, (clients,)."""

    style: int
    label: str
    chosen: Floats
    diverged: Floats


@dataclass(frozen=True)
class Points:
    """One run's clients: FedAvg's weight against the mean weight given, shares, (clients that took part,)."""

    style: int
    fedavg: Floats
    given: Floats


@contextmanager
def styled() -> Iterator[None]:
    """Our own settings whatever the user has set, put back afterwards; names in any script are left to the browser."""
    with matplotlib.style.context(["default", _RC]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


@styled()
def curves(lines: Sequence[Curve], unit: str, alt: str, *, reference: float | None = None) -> str:
    """Lines over rounds with bands of one standard deviation; `reference` is drawn as a dashed level."""
    figure, axes = _drawing(250, unit)
    for line in lines:
        color, dashes, marker = look(line.style)
        thin = np.where(line.whole, np.nan, line.mean)
        # the thin part begins where the whole one ends
        thin[:-1] = np.where(line.whole[:-1] & ~line.whole[1:], line.mean[:-1], thin[:-1])
        axes.plot(line.x, thin, color=color, linewidth=0.8)
        if line.std is not None:
            low, high = line.mean - line.std, line.mean + line.std
            if unit == "%":
                low, high = np.maximum(low, 0), np.minimum(high, 100)
            axes.fill_between(line.x, low, high, color=color, alpha=0.18, linewidth=0)
        few = np.count_nonzero(np.isfinite(line.mean)) <= 25
        (drawn,) = axes.plot(
            line.x,
            np.where(line.whole, line.mean, np.nan),
            color=color,
            linewidth=1.9,
            marker=marker if few else "",
            markersize=4,
        )
        if dashes:
            drawn.set_dashes(dashes)
    if reference is not None:
        axes.axhline(reference, color=_MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y")
    axes.margins(x=0.02)
    if unit == "%":
        low_end, high_end = axes.get_ylim()
        # 101, so that a line at 100 shows in its full width; 5, so that one at 0 is seen to be low
        axes.set_ylim(max(low_end, 0), min(max(high_end, 5), 101))
    return _svg(figure, alt)


@styled()
def per_class(series: Sequence[Dots], class_names: Sequence[str], alt: str) -> str:
    """Accuracy by class in percent: a row a class or, where there are many, classes from worst to best along x.

    The worst class of each run has a ring.
    """
    if len(class_names) > MANY_CLASSES:
        return _ranked(series, alt)
    figure, axes, offsets = _class_rows(len(series), class_names, "accuracy, %")
    for dots, offset in zip(series, offsets, strict=True):
        color, _, marker = look(dots.style)
        rows = np.arange(len(class_names)) + offset
        if dots.std is not None:
            axes.hlines(rows, (dots.mean - dots.std).clip(0), (dots.mean + dots.std).clip(0, 100), color, linewidth=1)
        axes.plot(dots.mean, rows, marker, color=color, markersize=5)
        if np.isfinite(dots.mean).any():
            worst = dots.mean == np.nanmin(dots.mean)
            axes.plot(dots.mean[worst], rows[worst], "o", markersize=11, fillstyle="none", color=color, clip_on=False)
    axes.set_xlim(-3, 103)
    return _svg(figure, alt)


def _ranked(series: Sequence[Dots], alt: str) -> str:
    figure, axes = _drawing(280, "accuracy, %")
    for dots in series:
        color, dashes, _ = look(dots.style)
        order = np.argsort(dots.mean)  # NaN last
        mean = dots.mean[order]
        ranks = np.arange(1, len(mean) + 1)
        (line,) = axes.plot(ranks, mean, color=color, linewidth=1.9)
        if dashes:
            line.set_dashes(dashes)
        axes.plot(1, mean[0], "o", markersize=11, fillstyle="none", color=color, clip_on=False)
    axes.set_xlabel("classes, from worst to best")
    axes.set_ylim(0, 100)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return _svg(figure, alt)


@styled()
def label_mix(
    series: Sequence[Dots], pooled: Floats, target: Floats | None, class_names: Sequence[str], alt: str
) -> str:
    """The label mix that the weights gave to training, in percent by class, beside the target's and all clients'."""
    if len(class_names) > MANY_CLASSES:
        return _mix_lines(series, pooled, target, alt)
    figure, axes, offsets = _class_rows(len(series), class_names, "share of the label mix, %")
    rows = np.arange(len(class_names))
    if target is not None:
        axes.barh(rows, 100 * target, height=0.86, color=_GRID)
    axes.vlines(100 * pooled, rows - 0.43, rows + 0.43, color=_INK, linewidth=1.4)
    for dots, offset in zip(series, offsets, strict=True):
        color, _, marker = look(dots.style)
        axes.plot(dots.mean, rows + offset, marker, color=color, markersize=5)
    axes.set_xlim(left=0)
    return _svg(figure, alt)


def _mix_lines(series: Sequence[Dots], pooled: Floats, target: Floats | None, alt: str) -> str:
    figure, axes = _drawing(280, "share of the label mix, %")
    edges = np.arange(len(series[0].mean) + 1) - 0.5
    if target is not None:
        axes.stairs(100 * target, edges, fill=True, color=_GRID)
    axes.stairs(100 * pooled, edges, baseline=None, color=_INK, linewidth=1)
    for dots in series:
        color, _, marker = look(dots.style)
        axes.plot(np.arange(len(dots.mean)), dots.mean, marker, color=color, markersize=2.5)
    axes.set_xlabel("class")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    return _svg(figure, alt)


@styled()
def who_holds_what(counts: Ints, client_names: Sequence[str], class_names: Sequence[str], alt: str) -> str:
    """Samples of each class (rows) at each client (columns), log colour, with the clients' sizes on top."""
    clients, classes = counts.shape
    row = 18 if classes <= MANY_CLASSES else max(4, 360 / classes)
    figure = Figure(figsize=(_WIDTH / 72, (150 + row * classes) / 72), layout="constrained")
    sizes, grid, scale = figure.subplots(3, 1, height_ratios=[46, row * classes, 9])
    _bars(sizes, counts.sum(axis=1), _MUTED)
    sizes.set_title("samples of each client")
    sizes.set_xlim(-0.5, clients - 0.5)
    sizes.set_xticks([])
    sizes.yaxis.set_major_locator(MaxNLocator(2, integer=True))

    most = max(10, int(counts.max(initial=1)))
    norm = LogNorm(1, most)
    grid.imshow(
        np.ma.masked_less(counts.T, 1), cmap=_heat(), norm=norm, aspect="auto", interpolation="none", origin="upper"
    )
    if classes <= MANY_CLASSES:
        grid.set_yticks(np.arange(classes), [_short(name) for name in class_names])
    else:
        grid.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        grid.set_ylabel("class")
    _client_axis(grid, client_names)
    for spine in ("top", "right"):
        grid.spines[spine].set_visible(True)

    scale.imshow(np.linspace(0, 1, 64)[None, :], cmap=_heat(), aspect="auto", interpolation="none", extent=(0, 1, 0, 1))
    powers = 10 ** np.arange(np.floor(np.log10(most)) + 1)
    scale.set_xticks(np.log10(powers) / np.log10(most), [f"{power:,.0f}" for power in powers])
    scale.set_yticks([])
    scale.set_title("samples of one class at one client (blank: none)")
    for spine in scale.spines.values():
        spine.set_visible(False)
    return _svg(figure, alt)


@styled()
def participation(rows: Sequence[Attendance], alt: str) -> str:
    """Share of the rounds in which each client was chosen: a strip of bars a run, its diverged rounds in ink."""
    figure = Figure(figsize=(_WIDTH / 72, (40 + 84 * len(rows)) / 72), layout="constrained")
    strips = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    top = max(100 * float(row.chosen.max(initial=0.0)) for row in rows) or 1.0
    for axes, row in zip(strips, rows, strict=True):
        _bars(axes, 100 * row.chosen, look(row.style)[0])
        _bars(axes, 100 * row.diverged, _INK)
        axes.axhline(100 * float(row.chosen.mean()), color=_MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_ylim(0, top)
        axes.set_xlim(-0.5, len(row.chosen) - 0.5)
        axes.yaxis.set_major_locator(MaxNLocator(2))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_title(f"{_short(row.label, 40)}: % of rounds" if len(rows) > 1 else "% of rounds")
    strips[-1].set_xlabel("client")
    return _svg(figure, alt)


@styled()
def weights(clouds: Sequence[Points], alt: str) -> str:
    """Each client's mean weight, in percent, against what FedAvg would have given it in the same rounds."""
    figure, axes = _drawing(300, "mean weight given, %")
    top = 0.0
    for cloud in clouds:
        color, _, marker = look(cloud.style)
        axes.plot(100 * cloud.fedavg, 100 * cloud.given, marker, color=color, markersize=5, alpha=0.7, mew=0)
        top = max(top, 100 * float(cloud.fedavg.max(initial=0.0)))
    axes.axline((0, 0), (top or 1, top or 1), color=_MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlabel("mean weight that FedAvg would give, %")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.grid()
    return _svg(figure, alt)


@styled()
def key(style: int) -> str:
    """A small picture of how this style is drawn, for a legend."""
    color, dashes, marker = look(style)
    figure = Figure(figsize=(26 / 72, 12 / 72))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.axis("off")
    (line,) = axes.plot([0, 1], [0, 0], color=color, linewidth=1.9)
    if dashes:
        line.set_dashes(dashes)
    axes.plot([0.5], [0], marker, color=color, markersize=6)
    axes.set_ylim(-1, 1)
    return _svg(figure, f"line and marker {style}")


def look(style: int) -> tuple[str, tuple[float, ...], str]:
    turn, color = divmod(style, len(_SERIES))
    return _SERIES[color], _DASHES[turn % len(_DASHES)], _MARKERS[style % len(_MARKERS)]


def _drawing(height: int, unit: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
    axes = figure.subplots()
    axes.set_title(unit)
    return figure, axes


def _class_rows(runs: int, class_names: Sequence[str], unit: str) -> tuple[Figure, Axes, Floats]:
    """A row a class, the first on top, and where in its row each run's marker sits."""
    classes = len(class_names)
    figure, axes = _drawing(60 + classes * max(20, 7 * runs + 6), unit)
    axes.set_yticks(np.arange(classes), [_short(name) for name in class_names])
    axes.set_ylim(classes - 0.5, -0.5)
    axes.hlines(np.arange(classes - 1) + 0.5, 0, 1, transform=axes.get_yaxis_transform(), color=_GRID, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    offsets = 0.8 * ((np.arange(runs, dtype=np.float64) + 0.5) / runs - 0.5)
    return figure, axes, offsets


def _bars(axes: Axes, values: Floats | Ints, color: str) -> None:
    """A bar a client; where there are many, one outline, which is the same picture in far fewer bytes."""
    if len(values) <= 60:
        axes.bar(np.arange(len(values)), values, width=0.84, color=color)
    else:
        axes.stairs(values, np.arange(len(values) + 1) - 0.5, fill=True, color=color)


def _client_axis(axes: Axes, names: Sequence[str]) -> None:
    """Names where they fit and say more than the number."""
    few = len(names) <= 12
    if few and not all(name.isdecimal() for name in names):
        axes.set_xticks(np.arange(len(names)), [_short(name) for name in names], rotation=90)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(12 if few else 6, integer=True))
        axes.set_xlabel("client")


def _heat() -> Colormap:
    """Light (few) to dark (many), turned round by the page on a dark ground; the lightest tint still shows on white."""
    return LinearSegmentedColormap.from_list("heat", matplotlib.colormaps["YlGnBu"](np.linspace(0.18, 1, 64)))


def _short(name: str, length: int = 14) -> str:
    name = " ".join(name.split())
    return name if len(name) <= length else name[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _svg(figure: Figure, alt: str) -> str:
    """The figure as an element of a page: no fixed size, no style of its own, colours as variables."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": alt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None, "matplotlib gives every svg a viewBox"
    body = re.sub(r"<[^>]+>", _inline, svg[svg.index(">", box.end()) + 1 :])
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(alt)}">{body}'


def _inline(tag: re.Match[str]) -> str:
    """One tag with colours as variables, short numbers, and without the ids of groups, which every figure repeats."""
    text = re.sub(r'<g id="[^"]*"', "<g", tag[0])
    text = re.sub(r"#[0-9a-f]{6}\b(?!\w)", lambda color: _VARIABLES.get(color[0], color[0]), text)
    return re.sub(
        r'\bd="[^"]*"',
        lambda path: re.sub(r"\d+\.\d{2,}", lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), path[0]),
        text,
    )
