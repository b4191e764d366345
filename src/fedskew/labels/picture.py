"""A picture of who holds what. Needs matplotlib, which `fedskew.labels` itself does not import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError
from fedskew.labels._counts import FloatArray, LabelCounts, as_target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED_CLIENTS = 40
NAMED_CLASSES = 60
NUMBERED_CELLS = 400
LINES = 1000
INK, ACCENT, COLOURS = "#1f3a5f", "#c8553d", "Blues"


def draw(counts: LabelCounts, path: str | Path, target: ArrayLike | None = None) -> None:
    """Write a picture, one line a client and one column a class: how much of a client's samples each class is.

    Above it stands each class's share of all samples (and of the target, `(classes,)`, where one is given), beside it
    each client's size. Up to 40 clients keep their order and names; more are sorted by their largest class, and more
    than 1000 share lines. The suffix of `path` chooses the format (.png, .svg, .pdf). Raises ArgumentError where it
    can't be written.
    """
    from matplotlib.figure import Figure

    mix = None if target is None else as_target(target, len(counts.classes))
    shares, sizes, each = _lines(counts)
    wide, high = 2.8 + min(9.0, max(3.5, 0.42 * shares.shape[1])), 2.0 + min(7.5, max(2.0, 0.28 * len(shares)))
    figure = Figure(figsize=(wide, high), layout="constrained")
    grid = figure.add_gridspec(
        2, 3, width_ratios=(1, 0.22, 0.03), height_ratios=(1.1, high - 1.6), hspace=0.03, wspace=0.02
    )
    main = figure.add_subplot(grid[1, 0])
    above = figure.add_subplot(grid[0, 0], sharex=main)
    beside = figure.add_subplot(grid[1, 1], sharey=main)

    shown = main.imshow(
        shares, aspect="auto", cmap=COLOURS, vmin=0, vmax=max(0.2, float(shares.max())), interpolation="nearest"
    )
    bar = figure.colorbar(shown, cax=figure.add_subplot(grid[1, 2]), format=lambda value, _: f"{value:.0%}")
    bar.set_label("share of the client's samples")
    _name_lines(main, counts, each)
    _name_classes(main, counts)
    if shares.size <= NUMBERED_CELLS and each == 1:
        _number_cells(main, counts, shares)

    pooled = counts.pooled / max(counts.pooled.sum(), 1e-300)
    above.bar(range(len(pooled)), pooled, color=INK, width=0.8, label="all clients")
    if mix is not None:
        above.plot(range(len(mix)), mix, "_", color=ACCENT, markersize=min(14, 400 / len(mix)), mew=2, label="target")
        above.legend(frameon=False, fontsize="small", ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0)
    above.set_ylabel("share")
    above.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    above.tick_params(labelbottom=False)
    above.margins(y=0.12)
    beside.barh(range(len(sizes)), sizes, color=INK, height=0.8 if len(sizes) <= NAMED_CLIENTS else 1.0)
    beside.set_xlabel("samples" if each == 1 else "samples each")
    beside.tick_params(labelleft=False, axis="y")
    beside.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    beside.locator_params(axis="x", nbins=3)
    for axes in (above, beside):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: the picture can't be written: {error}") from None


def _lines(counts: LabelCounts) -> tuple[FloatArray, FloatArray, int]:
    """What is drawn: mixes and sizes by line, and how many clients a line stands for."""
    shares, sizes = counts.marginals, counts.sizes
    if len(shares) <= NAMED_CLIENTS:
        return shares, sizes, 1
    largest = shares.argmax(axis=1)
    order = np.lexsort((-shares.max(axis=1), largest, sizes == 0))
    each = -(-len(shares) // LINES)
    starts = np.arange(0, len(shares), each)
    widths = np.diff(np.append(starts, len(shares)))
    return (
        np.add.reduceat(shares[order], starts, axis=0) / widths[:, None],
        np.add.reduceat(sizes[order], starts) / widths,
        each,
    )


def _name_lines(axes: Axes, counts: LabelCounts, each: int) -> None:
    if len(counts) <= NAMED_CLIENTS:
        axes.set_yticks(range(len(counts)), [_short(name) for name in counts.clients], fontsize="small")
        return
    lines = f", {each} to a line" if each > 1 else ""
    axes.set_ylabel(f"{len(counts):,} clients, by their largest class{lines}")
    axes.set_yticks([])


def _name_classes(axes: Axes, counts: LabelCounts) -> None:
    names = [_short(name) for name in counts.classes]
    if len(names) <= NAMED_CLASSES:
        upright = len(names) > 20 or max(map(len, names)) > 4
        axes.set_xticks(range(len(names)), names, rotation=90 if upright else 0, fontsize="small")
    axes.set_xlabel("class")


def _number_cells(axes: Axes, counts: LabelCounts, shares: FloatArray) -> None:
    for (row, column), amount in np.ndenumerate(counts.counts):
        if amount:
            colour = "white" if shares[row, column] > 0.55 * shares.max() else INK
            axes.text(column, row, f"{amount:,.4g}", ha="center", va="center", fontsize=7, color=colour)


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"
