"""Draw a recipe's figure from its runs, as PNG and SVG."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedskew.papers._recipe import FigurePart, Kind, Recipe, RecipeRow
from fedskew.papers._values import repetitions, unit_of, value_of
from fedskew.report import SeedRun, drawing, label_shares
from fedskew.report.drawing import FloatArray
from fedskew.tables import grouped

Runs = list[tuple[RecipeRow, Sequence[SeedRun]]]

_PANEL = (3.6, 2.7)  # inches


def draw(recipe: Recipe, runs: Sequence[tuple[RecipeRow, Sequence[SeedRun]]], folder: Path) -> list[Path]:
    """Write `figure.png` and `.svg`, or `figure-a.png` and so on for several parts, but those that were not run."""
    files = []
    for letter, part in zip("abcdefgh", recipe.parts, strict=False):
        shown = [(row, seeds) for row, seeds in runs if seeds and part.shows(row.labels)]
        if not shown:
            continue
        name = f"figure-{letter}" if len(recipe.parts) > 1 else "figure"
        files += [folder / f"{name}.png", folder / f"{name}.svg"]
        with drawing.figure(*files[-2:]) as figure:
            _draw(figure, part, shown)
    return files


def _draw(figure: Figure, part: FigurePart, shown: Runs) -> None:
    apart = part.kind in ("confusion", "classes", "mixes")  # a panel for each row
    axes_of_panels = (*part.panels, part.lines) if apart else part.panels
    panels = grouped(shown, lambda run: tuple(run[0].labels.get(axis, "") for axis in axes_of_panels))
    columns = min(len(panels), 4 if apart else 3)
    high = -(-len(panels) // columns)
    wide = max(5.6, columns * _PANEL[0])
    figure.set_size_inches(wide, high * _PANEL[1] + 0.9)
    grid = figure.subplots(high, columns, squeeze=False)
    labels = dict.fromkeys(row.labels.get(part.lines, "") for row, _ in shown)
    styles = {label: at for at, label in enumerate(labels)}
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (key, rows) in zip(grid.flat, panels.items(), strict=False):
        _DRAW[part.kind](axes, part, rows, styles)
        axes.set_title(", ".join(filter(None, key)))
    figure.suptitle(part.title, fontsize=13, wrap=True)
    handles: dict[str, Any] = {}  # of every label in the panels, each label once
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if len(handles) > 1 or (handles and not apart):
        columns = min(int(wide // 1.4), len(handles))
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False, fontsize=10
        )


def _curves(axes: Axes, part: FigurePart, rows: Runs, styles: dict[str, int]) -> None:
    """Draw a value of the records over rounds."""
    lines = []
    for row, seeds in rows:
        label = row.labels.get(part.lines, "")
        scale = 100 if unit_of(part.value) else 1
        if series := [found for run in seeds if (found := run.series(part.value, scale))]:
            lines.append(drawing.Curve.over_seeds(styles[label], series, label=label))
    drawing.curves(axes, lines, unit=unit_of(part.value), reference=part.reference)
    axes.set_ylabel(_name(part.value))


def _against(axes: Axes, part: FigurePart, rows: Runs, styles: dict[str, int]) -> None:
    """Draw a value of runs against the number in an axis's label, or against another value of the same runs."""
    lines = []
    found = _points(part, rows, lambda row, run: row.number(part.x) if part.x in row.labels else value_of(run, part.x))
    for label, (x, mean, std) in found.items():
        spread = std if np.isfinite(std).any() else None
        lines.append(drawing.Curve(styles[label], x, mean, spread, np.ones(len(x), dtype=bool), label))
    drawing.curves(axes, lines, unit=unit_of(part.value), x_label=_name(part.x))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    if named := {row.labels[part.x]: row.number(part.x) for row, _ in rows if part.x in row.labels}:
        axes.set_xticks(list(named.values()), list(named), fontsize=9)
    axes.set_ylabel(_name(part.value))


def _bars(axes: Axes, part: FigurePart, rows: Runs, styles: dict[str, int]) -> None:
    groups = list(dict.fromkeys(row.labels.get(part.x, "") for row, _ in rows))
    means, stds = np.full((2, len(styles), len(groups)), np.nan)
    found = _points(part, rows, lambda row, run: groups.index(row.labels.get(part.x, "")))
    for label, (at, mean, std) in found.items():
        means[styles[label], at.astype(int)], stds[styles[label], at.astype(int)] = mean, std
    drawing.bars(axes, {label: (means[style], stds[style]) for label, style in styles.items()}, groups)
    axes.set_ylabel(_name(part.value))


def _points(
    part: FigurePart, rows: Runs, x: Callable[[RecipeRow, SeedRun], float | None]
) -> dict[str, tuple[FloatArray, FloatArray, FloatArray]]:
    """Return places, means and deviations (NaN where unknown) over repetitions, for each label of the part's lines."""
    found = []
    for row, seeds in rows:
        pairs = [(value_of(run, part.value), x(row, run)) for run in seeds]
        if known := [pair for pair in pairs if None not in pair]:
            found.append((row.labels, np.array(known, dtype=np.float64)))
    points: dict[str, list[tuple[float, float, float]]] = {}
    for labels, repeated in repetitions(found):
        y, at = repeated.T
        std = y.std(ddof=1) if len(y) > 1 else np.nan
        points.setdefault(labels.get(part.lines, ""), []).append((at.mean(), y.mean(), std))
    return {label: tuple(np.array(sorted(of_label)).T) for label, of_label in points.items()}


def _classes(axes: Axes, part: FigurePart, rows: Runs, _: dict[str, int]) -> None:
    """Draw accuracies by class after local training, and of the global model (that single clients were sent)."""
    local, sent_or_merged = [], []
    for run in (run for _, seeds in rows for run in seeds):
        evaluated = [record for record in run.rounds if record.evaluation is not None]
        watched = [one.per_class for one in evaluated[-1].clients or [] if _is_shown(one.client, part)]
        local.append(np.array(watched, dtype=np.float64).mean(axis=0))  # None becomes NaN
        model = evaluated[-2 if part.clients else -1].evaluation
        assert model is not None
        sent_or_merged.append(model.per_class)
    before = 100 * np.array(sent_or_merged, dtype=np.float64).mean(axis=0)
    after = 100 * np.mean(local, axis=0)
    first = "model sent" if part.clients else "aggregated"
    drawing.bars(axes, {first: (before, None), "after local training": (after, None)})
    axes.set_ylim(0, 100)
    axes.set_xlabel("class")
    axes.set_ylabel("accuracy, %")


def _confusion(axes: Axes, part: FigurePart, rows: Runs, _: dict[str, int]) -> None:
    """Draw a client's confusion after its local training, last evaluated round of the first seed; rows as shares."""
    run = rows[0][1][0]
    last = [record for record in run.rounds if record.clients][-1]
    matrix = next(one.confusion for one in last.clients or [] if _is_shown(one.client, part))
    drawing.heat_map(axes, label_shares(np.array(matrix)), run.class_names)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")


def _weights(axes: Axes, part: FigurePart, rows: Runs, styles: dict[str, int]) -> None:
    """Draw each client's mean weight against FedAvg's, of the first seed."""
    clouds = []
    for row, seeds in rows:
        (_, given, fedavg), label = seeds[0].mean_weights(), row.labels.get(part.lines, "")
        clouds.append((styles[label], label, fedavg, given))
    drawing.weights_against_fedavg(axes, clouds)
    axes.set_ylabel("mean weight given, %")


def _mixes(axes: Axes, _: FigurePart, rows: Runs, styles: dict[str, int]) -> None:
    """Draw the label mixes of the clients and, last, of the target, of the first seed."""
    run = rows[0][1][0]
    mixes, names = label_shares(run.counts), [*run.client_names]
    if run.target is not None:
        mixes, names = np.vstack([mixes, run.target]), [*names, "target"]
    drawing.heat_map(axes, np.ma.masked_equal(mixes.T, 0), run.class_names, mixes.max())
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=9)
    axes.set_xlabel("client")


def _is_shown(client: int, part: FigurePart) -> bool:
    return not part.clients or client in part.clients


def _name(value: str) -> str:
    names = {"entropy": "cohort label entropy, bits", "drift": "drift diversity"}
    figure = value.rpartition(".")[2]
    text = names.get(figure, figure.replace("_", " "))
    return f"{text}, %" if unit_of(value) else text


_DRAW: dict[Kind, Callable[[Axes, FigurePart, Runs, dict[str, int]], None]] = {
    "curves": _curves,
    "against": _against,
    "bars": _bars,
    "classes": _classes,
    "confusion": _confusion,
    "weights": _weights,
    "mixes": _mixes,
}
