"""Figures as files, drawn with matplotlib: functions from arrays to Axes, in one style.

They know nothing of runs or records. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError, placed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FloatArray = NDArray[np.float64]

# The palette of Okabe and Ito, which the common kinds of colour blindness can tell apart; dashes and markers repeat it.
_SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_MARKERS = "osD^vP"
_INK, _MUTED, _GRID = "#1b1f24", "#5b6470", "#dde1e6"
_REFERENCE: Any = (0, (4, 3))  # the dashes of a reference line
_MANY = 20  # names of so many classes stand beside an axis
_RC = {
    "svg.fonttype": "none",
    "font.size": 12,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "grid.color": _GRID,
}


@dataclass(frozen=True)
class Curve:
    """The line of one series: its number (of colour, dashes and marker), its points, its name in the legend. `std` is
    NaN where unknown, None for a single seed; thin where not every seed has a value (`complete`). A point is the mean
    of a `block` of recorded rounds."""

    style: int
    x: FloatArray
    mean: FloatArray
    std: FloatArray | None
    complete: NDArray[np.bool_]
    label: str = ""
    block: int = 1

    @classmethod
    def over_seeds(
        cls, style: int, series: Sequence[Mapping[int, float]], most: int | None = None, label: str = ""
    ) -> Curve:
        """Return the mean and standard deviation (ddof 1) of several seeds' `series` by round, none empty, of rounds
        where each seed that has not stopped has a value, so that the line does not jump; of more than `most` points,
        means of equal blocks of rounds."""
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

    def part(self, at: slice | NDArray[np.bool_]) -> Curve:
        """Return some points of the line."""
        std = None if self.std is None else self.std[at]
        return replace(self, x=self.x[at], mean=self.mean[at], std=std, complete=self.complete[at])


@contextmanager
def figure(*paths: Path, width: float = 6.4, height: float = 4.8) -> Iterator[Figure]:
    """Yield an empty figure, in inches, and write it to files after the block, by their suffixes."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _RC]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        drawn = Figure(figsize=(width, height), layout="constrained")
        yield drawn
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            with placed(f"{path}: the figure can't be written: ", ArgumentError, of=(OSError, ValueError)):
                drawn.savefig(path, dpi=150, facecolor="white", metadata=metadata)


def curves(
    axes: Axes, lines: Sequence[Curve], *, unit: str = "", reference: float | None = None, x_label: str = "round"
) -> None:
    """Draw lines with a band of one standard deviation to each side.

    Lines of at most 25 points have markers; the unit "%" keeps bands and axis within 0 and 100; `reference` is a level
    drawn as a dashed line.
    """
    for line in lines:
        color = _color(line.style)
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
        axes.plot(
            line.x,
            np.where(line.complete, line.mean, np.nan),
            color=color,
            linestyle=_DASHES[line.style // len(_SERIES) % len(_DASHES)],
            linewidth=1.9,
            marker=_MARKERS[line.style % len(_MARKERS)] if few else "",
            markersize=4,
            label=line.label or None,
        )
    if reference is not None:
        axes.axhline(reference, color=_MUTED, linewidth=1, linestyle=_REFERENCE)
    axes.set_xlabel(x_label)
    axes.locator_params("x", nbins=6, integer=True)
    axes.locator_params("y", nbins=5)
    axes.grid(axis="y")
    axes.margins(x=0.02)
    if unit == "%":
        low_end, high_end = axes.get_ylim()
        # 101 shows a line at 100 in its full width; 5 shows that a line at 0 is low
        axes.set_ylim(max(low_end, 0), min(max(high_end, 5), 101))


def bars(
    axes: Axes, series: Mapping[str, tuple[FloatArray, FloatArray | None]], names: Sequence[str] | None = None
) -> None:
    """Draw groups of bars, with whiskers of one standard deviation; `series` has both by label, NaN: no bar."""
    wide = 0.84 / len(series)
    for at, (label, (mean, std)) in enumerate(series.items()):
        place = np.arange(len(mean)) + (at - (len(series) - 1) / 2) * wide
        known = np.isfinite(mean)
        whiskers = None if std is None or not np.isfinite(std).any() else std[known]
        hatch = "//" if at >= len(_SERIES) else None
        axes.bar(place[known], mean[known], wide, yerr=whiskers, color=_color(at), hatch=hatch, label=label or None)
    if names is None:
        axes.locator_params("x", nbins=10, integer=True)
    else:
        axes.set_xticks(range(len(names)), [_cut(name, 14) for name in names])
    axes.grid(axis="y")


def heat_map(axes: Axes, values: FloatArray, class_names: Sequence[str], top: float = 1.0) -> None:
    """Draw a matrix `(classes, columns)`, a row for each class, from 0 (light) to `top`; masked cells stay blank."""
    axes.imshow(values, cmap="YlGnBu", vmin=0, vmax=top, aspect="auto", interpolation="none")
    if len(class_names) <= _MANY:
        axes.set_yticks(np.arange(len(class_names)), [_cut(name, 14) for name in class_names])
    else:
        axes.locator_params("y", nbins=6, integer=True)
        axes.set_ylabel("class")


def weights_against_fedavg(axes: Axes, runs: Sequence[tuple[int, str, FloatArray, FloatArray]]) -> None:
    """Draw each client's weight, in percent, against FedAvg's, by number, label and both weights of each run."""
    top = 0.0
    for style, label, fedavg, own in runs:
        marker = _MARKERS[style % len(_MARKERS)]
        axes.plot(100 * fedavg, 100 * own, marker, color=_color(style), ms=5, alpha=0.7, mew=0, label=label or None)
        top = max(top, 100 * float(fedavg.max(initial=0.0)))
    axes.axline((0, 0), (top or 1, top or 1), color=_MUTED, linewidth=1, linestyle=_REFERENCE)
    axes.set_xlabel("mean weight that FedAvg would give, %")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.locator_params(nbins=6)
    axes.grid()


def mix_with_intervals(
    axes: Axes, mix: FloatArray, interval: FloatArray, held_out: FloatArray, names: Sequence[str]
) -> None:
    """Draw the estimated share of each class with its `interval`, `(classes, 2)`, beside the held-out samples'."""
    places = np.arange(len(mix))
    reach = np.abs(interval - mix[:, None]).T
    axes.errorbar(places, mix, reach, fmt="o", color=_color(0), capsize=3, label="target, estimated (95 %)")
    axes.plot(places, held_out, "_", color="0.45", markersize=12, markeredgewidth=2, label="held-out samples")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of the samples")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    if len(mix) <= _MANY:
        turned = max(map(len, names)) * len(names) > 60
        axes.set_xticks(places, [_cut(name, 14) for name in names])
        axes.tick_params("x", rotation=45 if turned else 0)
    else:
        axes.set_xlabel("class")
    axes.grid(axis="y")
    axes.legend()


def differences(
    axes: Axes,
    means: Mapping[str, float],
    intervals: Sequence[tuple[float, float]],
    parts: Mapping[str, Sequence[float]],
) -> None:
    """Draw mean differences, first on top, coloured by the side of 0 of their intervals (NaN: unknown), and parts.

    A mean over 8 times as far from 0 as all others, and as one point, would hide these: a triangle stands for it.
    """
    looks = {1: (_color(0), "ahead"), -1: (_color(1), "behind"), 0: (_MUTED, "can't be told")}
    ends, values = np.array(intervals), np.array([*means.values()])
    kinds = (ends[:, 0] > 0) * 1 - (ends[:, 1] < 0)
    for kind, (color, word) in looks.items():
        rows = np.flatnonzero(kinds == kind)
        axes.hlines(rows, *ends[rows].T, color=color, linewidth=3, alpha=0.6)
        label = word if len(rows) and np.isfinite(ends).any() else None
        axes.plot(values[rows], rows, "o", color=color, ms=9, label=label)
        for row in rows.tolist():
            axes.text(1.01, row, f"{values[row]:+z.1f}", transform=axes.get_yaxis_transform(), va="center", color=color)
    for at, (label, own) in enumerate(parts.items()):
        axes.plot(own, range(len(means)), _MARKERS[at], color="0.35", ms=4.5, mfc="none", label=label)
    axes.axvline(0, color=_INK, linewidth=1)
    near = np.abs(values) <= 8 * max(1, np.sort(np.abs(values))[-2:][0])
    if not near.all():
        shown = np.column_stack([ends, *parts.values(), 0 * values, values])[near]
        axes.set_xlim(1.04 * min(-1, np.nanmin(shown)), 1.04 * max(1, np.nanmax(shown)))
        (row,) = np.flatnonzero(~near).tolist()
        right, edge = int(values[row] > 0), axes.get_yaxis_transform()
        axes.plot([right], [row], "<>"[right], color=looks[kinds[row]][0], ms=9, transform=edge, clip_on=False)
    axes.set_yticks(range(len(means)), [_cut(name, 28) for name in means])
    axes.set_ylim(len(means) - 0.4, -0.7)
    axes.grid()
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=11)


def _color(style: int) -> str:
    return _SERIES[style % len(_SERIES)]


def _cut(name: str, most: int) -> str:
    name = " ".join(name.split())
    return name if len(name) <= most else name[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
