"""Values by class: dots, ranked lines, label mixes, bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedskew.drawing._style import GRID, INK, Floats, look, short

MANY_CLASSES = 20  # beyond this, a row with a name for each class makes a figure too tall to see at once


@dataclass(frozen=True)
class Values:
    """One value for each class, or for each group of bars, of one series.

    Attributes:
        style: Number of the series, see `look`.
        mean: Mean over seeds; NaN where undefined.
        std: Standard deviation over seeds; None for a single seed.
        label: Name in the legend.
    """

    style: int
    mean: Floats
    std: Floats | None = None
    label: str = ""


def class_height(series: int, classes: int) -> float:
    """Return the height that `per_class` and `label_mix` need, for `panel`.

    Args:
        series: Number of series.
        classes: Number of classes.
    """
    return 280 if classes > MANY_CLASSES else 60 + classes * max(20, 7 * series + 6)


def per_class(axes: Axes, series: Sequence[Values], class_names: Sequence[str]) -> None:
    """Draw accuracies by class in percent, the worst class of each series in a ring.

    Up to 20 classes have a row each; more are drawn as one line a series, from its worst class to its best.

    Args:
        axes: Where to draw, of the height that `class_height` names.
        series: The values.
        class_names: Names of the classes.
    """
    if len(class_names) > MANY_CLASSES:
        _ranked(axes, series)
        return
    offsets = _class_rows(axes, len(series), class_names)
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


def label_mix(
    axes: Axes, series: Sequence[Values], pooled: Floats, target: Floats | None, class_names: Sequence[str]
) -> None:
    """Draw label mixes, in percent by class, with the target mix and the mix of all clients for comparison.

    Args:
        axes: Where to draw, of the height that `class_height` names.
        series: Label mixes in percent.
        pooled: Label mix of all clients together, shape `(classes,)`, sum 1.
        target: Label mix of the target, shape `(classes,)`, sum 1.
        class_names: Names of the classes.
    """
    if len(class_names) > MANY_CLASSES:
        _mix_lines(axes, series, pooled, target)
        return
    offsets = _class_rows(axes, len(series), class_names)
    rows = np.arange(len(class_names))
    if target is not None:
        axes.barh(rows, 100 * target, height=0.86, color=GRID)
    axes.vlines(100 * pooled, rows - 0.43, rows + 0.43, color=INK, linewidth=1.4)
    for dots, offset in zip(series, offsets, strict=True):
        color, _, marker = look(dots.style)
        axes.plot(dots.mean, rows + offset, marker, color=color, markersize=5)
    axes.set_xlim(left=0)


def bars(axes: Axes, series: Sequence[Values], names: Sequence[str] | None) -> None:
    """Draw groups of bars, a bar for each series, with whiskers of one standard deviation.

    Args:
        axes: Where to draw.
        series: A value for each group; NaN leaves the bar out.
        names: Names of the groups; None numbers them.
    """
    wide = 0.84 / len(series)
    for at, values in enumerate(series):
        color, dashes, _ = look(values.style)
        place = np.arange(len(values.mean)) + (at - (len(series) - 1) / 2) * wide
        known = np.isfinite(values.mean)
        axes.bar(
            place[known],
            values.mean[known],
            wide,
            yerr=None if values.std is None or not np.isfinite(values.std).any() else values.std[known],
            color=color,
            hatch="//" if dashes else None,
            label=values.label or None,
        )
    if names is None:
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    else:
        axes.set_xticks(range(len(names)), [short(name) for name in names])
    axes.grid(axis="y")


def _ranked(axes: Axes, series: Sequence[Values]) -> None:
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


def _mix_lines(axes: Axes, series: Sequence[Values], pooled: Floats, target: Floats | None) -> None:
    edges = np.arange(len(series[0].mean) + 1) - 0.5
    if target is not None:
        axes.stairs(100 * target, edges, fill=True, color=GRID)
    axes.stairs(100 * pooled, edges, baseline=None, color=INK, linewidth=1)
    for dots in series:
        color, _, marker = look(dots.style)
        axes.plot(np.arange(len(dots.mean)), dots.mean, marker, color=color, markersize=2.5)
    axes.set_xlabel("class")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)


def _class_rows(axes: Axes, series: int, class_names: Sequence[str]) -> Floats:
    """Prepare a row for each class, the first on top; returns where in its row each series' marker sits."""
    classes = len(class_names)
    axes.set_yticks(np.arange(classes), [short(name) for name in class_names])
    axes.set_ylim(classes - 0.5, -0.5)
    axes.hlines(np.arange(classes - 1) + 0.5, 0, 1, transform=axes.get_yaxis_transform(), color=GRID, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    return 0.8 * ((np.arange(series, dtype=np.float64) + 0.5) / series - 0.5)
