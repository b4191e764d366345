"""Empty figures, and figures as inline SVG or as files."""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedskew.drawing._style import GRID, INK, MUTED, PAGE, SERIES, look
from fedskew.errors import ArgumentError

WIDTH = 400  # units of a 72nd of an inch: about a phone's width in CSS pixels, so that letters stay legible there
_VARIABLES = {color: f"var(--series-{index})" for index, color in enumerate(SERIES)} | {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PAGE: "var(--card)",
}


def panel(height: float, title: str = "", *, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Create a figure with one `Axes`.

    Args:
        height: Height in units of 1/72 inch.
        title: Title of the axes, usually the unit of its values.
        width: Width in units of 1/72 inch.
    """
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def legend_key(style: int) -> str:
    """Return the legend entry of a series, its line and its marker, as inline SVG.

    Args:
        style: Number of the series, see `look`.
    """
    color, dashes, marker = look(style)
    figure = Figure(figsize=(26 / 72, 12 / 72))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.axis("off")
    (line,) = axes.plot([0, 1], [0, 0], color=color, linewidth=1.9)
    if dashes:
        line.set_dashes(dashes)
    axes.plot([0.5], [0], marker, color=color, markersize=6)
    axes.set_ylim(-1, 1)
    return inline_svg(figure, f"line and marker {style}")


def inline_svg(figure: Figure, alt: str) -> str:
    """Return a figure as an SVG element to stand inside an HTML page.

    It has no fixed size, its text stays text in the font of the page, and its colours are the CSS variables
    `--series-0` ... `--series-5`, `--ink`, `--muted`, `--grid` and `--card`, so that the page decides on light and
    dark. The same figure gives the same bytes.

    Args:
        figure: The figure, drawn inside `styled`.
        alt: Description for readers who don't see the figure. It must differ between the figures of one page,
            because ids are made from it.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": alt}):
        # not `savefig`, which draws the figure twice, once only for its layout
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})  # type: ignore[no-untyped-call]
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None, "matplotlib gives every svg a viewBox"
    body = re.sub(r"<[^>]+>", _inline, svg[svg.index(">", box.end()) + 1 :])
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(alt)}">{body}'


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to a file on a white ground.

    Args:
        figure: The figure, drawn inside `styled`.
        path: The file; its suffix chooses the format (.png, .svg, .pdf).

    Raises:
        ArgumentError: The suffix is unknown or the file can't be written.
    """
    metadata = {"Date": None} if Path(path).suffix == ".svg" else None
    try:
        figure.savefig(path, dpi=150, facecolor="white", metadata=metadata)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: the figure can't be written: {error}") from None


def _inline(tag: re.Match[str]) -> str:
    """Rewrite one tag: colours as variables, short numbers, and no ids of groups, which every figure repeats."""
    text = re.sub(r'<g id="[^"]*"', "<g", tag[0])
    text = re.sub(r"#[0-9a-f]{6}\b(?!\w)", lambda color: _VARIABLES.get(color[0], color[0]), text)
    return re.sub(
        r'\bd="[^"]*"',
        lambda path: re.sub(r"\d+\.\d{2,}", lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), path[0]),
        text,
    )
