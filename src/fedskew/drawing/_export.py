"""Empty figures, and figures as files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedskew.errors import ArgumentError

WIDTH = 400  # units of a 72nd of an inch: about a phone's width in CSS pixels, so that letters stay legible there


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
