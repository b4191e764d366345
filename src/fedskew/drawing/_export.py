"""Figures as files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from fedskew.errors import ArgumentError

WIDTH = 400  # units of a 72nd of an inch: about a phone's width in CSS pixels, so that letters stay legible there


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
