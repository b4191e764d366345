"""Curves with bands of one standard deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedskew.drawing._style import MUTED, REFERENCE, Floats, look


@dataclass(frozen=True)
class Curve:
    """The line of one series.

    Attributes:
        style: Number of the series, see `look`.
        x: Where the points are, shape `(points,)`.
        mean: Mean over seeds, shape `(points,)`.
        std: Standard deviation over seeds, shape `(points,)`, NaN where it is unknown; None for a single seed.
        complete: Whether every seed has a value there, shape `(points,)`; elsewhere the line is thin.
        label: Name in the legend.
        block: How many recorded rounds one point is the mean of.
    """

    style: int
    x: Floats
    mean: Floats
    std: Floats | None
    complete: NDArray[np.bool_]
    label: str = ""
    block: int = 1

    @classmethod
    def over_seeds(
        cls, style: int, series: Sequence[Mapping[int, float]], most: int | None = None, label: str = ""
    ) -> Curve:
        """Return the mean and the standard deviation (ddof 1) of several seeds.

        A round counts where each seed that has not yet stopped has a value, so that the line does not jump at a round
        that only some seeds evaluated.

        Args:
            style: Number of the series.
            series: Value by round, a mapping for each seed, none of them empty.
            most: At most so many points; a longer curve becomes the means of equal blocks of rounds.
            label: Name in the legend.
        """
        ends = [max(points) for points in series]
        rows = []
        for number in sorted(set().union(*series)):
            values = [points[number] for points in series if number in points]
            if len(values) == sum(end >= number for end in ends):
                std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
                rows.append((number, float(np.mean(values)), std, len(values) == len(series)))
        block = 1 if most is None else math.ceil(len(rows) / most)
        blocks = [np.array(rows[start : start + block], dtype=np.float64) for start in range(0, len(rows), block)]
        x, mean, std_, complete = np.array([part.mean(axis=0) for part in blocks]).T
        return cls(style, x, mean, std_ if len(series) > 1 else None, complete == 1, label, block)


def curves(
    axes: Axes, lines: Sequence[Curve], *, unit: str = "", reference: float | None = None, x_label: str = "round"
) -> None:
    """Draw lines with a band of one standard deviation to each side.

    Lines of at most 25 points have markers.

    Args:
        axes: Where to draw.
        lines: The lines.
        unit: "%" keeps bands and axis within 0 and 100.
        reference: A level to draw as a dashed line.
        x_label: Label of the horizontal axis.
    """
    for line in lines:
        color, dashes, marker = look(line.style)
        thin = np.where(line.complete, np.nan, line.mean)
        # the thin part begins where the complete one ends
        thin[:-1] = np.where(line.complete[:-1] & ~line.complete[1:], line.mean[:-1], thin[:-1])
        axes.plot(line.x, thin, color=color, linewidth=0.8)
        if line.std is not None:
            low, high = line.mean - line.std, line.mean + line.std
            if unit == "%":
                low, high = np.maximum(low, 0), np.minimum(high, 100)
            axes.fill_between(line.x, low, high, color=color, alpha=0.18, linewidth=0)
        few = np.count_nonzero(np.isfinite(line.mean)) <= 25
        (drawn,) = axes.plot(
            line.x,
            np.where(line.complete, line.mean, np.nan),
            color=color,
            linewidth=1.9,
            marker=marker if few else "",
            markersize=4,
            label=line.label or None,
        )
        if dashes:
            drawn.set_dashes(dashes)
    if reference is not None:
        axes.axhline(reference, color=MUTED, linewidth=1, linestyle=REFERENCE)
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y")
    axes.margins(x=0.02)
    if unit == "%":
        low_end, high_end = axes.get_ylim()
        # 101 shows a line at 100 in its full width; 5 shows that a line at 0 is low
        axes.set_ylim(max(low_end, 0), min(max(high_end, 5), 101))
