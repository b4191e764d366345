"""Curves with bands of one standard deviation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedskew.drawing._series import Curve
from fedskew.drawing._style import MUTED, REFERENCE, look


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
