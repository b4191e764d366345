"""Draw a recipe's figure from its runs: PNG and SVG, in the style of the reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedskew.errors import RunError
from fedskew.experiment import SeedRun
from fedskew.experiment._figures import look, styled
from fedskew.papers._drawing import Drawing
from fedskew.papers._measures import unit_of, value_of
from fedskew.papers._recipe import Labels, Recipe, Row

if TYPE_CHECKING:
    from fedskew.papers._reproduce import Line

Floats = NDArray[np.float64]
Runs = list[tuple[Row, Sequence[SeedRun]]]

_PANEL = (3.6, 2.7)  # inches


def draw(
    recipe: Recipe, runs: Sequence[tuple[Row, Sequence[SeedRun]]], lines: Sequence[Line], folder: Path
) -> list[Path]:
    """Write `figure.png` and `figure.svg`, or `figure-a.png` and so on for a figure of several parts.

    Parts whose rows were not run are left out. Raises RunError where a file can't be written.
    """
    files = []
    for letter, drawing in zip("abcdefgh", recipe.drawings, strict=False):
        shown = [
            (row, seeds)
            for row, seeds in runs
            if seeds and all(row.labels.get(axis) in labels for axis, labels in drawing.where.items())
        ]
        if not shown:
            continue
        figure = _figure(drawing, shown)
        name = f"figure-{letter}" if len(recipe.drawings) > 1 else "figure"
        for suffix in ("png", "svg"):
            path = folder / f"{name}.{suffix}"
            try:
                figure.savefig(path, dpi=150, facecolor="white", metadata={"Date": None} if suffix == "svg" else None)
            except OSError as error:
                raise RunError(f"{path}: the figure can't be written: {error.strerror}") from None
            files.append(path)
    return files


@styled()
def _figure(drawing: Drawing, shown: Runs) -> Figure:
    panels: dict[tuple[str, ...], Runs] = {}
    for row, seeds in shown:
        panels.setdefault(tuple(row.labels.get(axis, "") for axis in drawing.panels), []).append((row, seeds))
    apart = drawing.kind in ("confusion", "classes", "mixes", "weights")  # one picture for each row
    if apart:
        panels = {
            (*key, row.labels.get(drawing.lines, "")): [(row, seeds)]
            for key, rows in panels.items()
            for row, seeds in rows
        }
    columns = min(len(panels), 4 if apart else 3)
    high = -(-len(panels) // columns)
    wide = max(5.6, columns * _PANEL[0])
    figure = Figure(figsize=(wide, high * _PANEL[1] + 0.9), layout="constrained")
    grid = figure.subplots(high, columns, squeeze=False)
    styles = {
        label: at for at, label in enumerate(dict.fromkeys(row.labels.get(drawing.lines, "") for row, _ in shown))
    }
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (key, rows) in zip(grid.flat, panels.items(), strict=False):
        _DRAW[drawing.kind](axes, drawing, rows, styles)
        axes.set_title(", ".join(filter(None, key)))
    figure.suptitle(drawing.title, fontsize=13, wrap=True)
    handles, labels = _legend(grid.flat)
    if len(labels) > 1 or (labels and not apart):
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(int(wide // 1.4), len(labels)),
            frameon=False,
            fontsize=10,
        )
    return figure


def _legend(panels: Sequence[Axes] | Any) -> tuple[list[Any], list[str]]:
    """Every label of the panels once."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _curves(axes: Axes, drawing: Drawing, rows: Runs, styles: dict[str, int]) -> None:
    """A value of the records over rounds: mean over seeds, band of one standard deviation."""
    scale = 100.0 if unit_of(drawing.value) else 1.0
    for row, seeds in rows:
        series = [dict(_series(run, drawing.value)) for run in seeds]
        x = sorted(set.intersection(*(set(one) for one in series)))
        if not x:
            continue
        values = scale * np.array([[one[at] for at in x] for one in series])
        label = row.labels.get(drawing.lines, "")
        color, dashes, _ = look(styles[label])
        (line,) = axes.plot(x, values.mean(axis=0), color=color, linewidth=1.5, label=label)
        if dashes:
            line.set_dashes(dashes)
        if len(values) > 1:
            std = values.std(axis=0, ddof=1)
            axes.fill_between(x, values.mean(axis=0) - std, values.mean(axis=0) + std, color=color, alpha=0.15, lw=0)
    if drawing.reference is not None:
        axes.axhline(drawing.reference, color="0.4", linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlabel("round")
    axes.set_ylabel(_name(drawing.value))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y")


def _series(run: SeedRun, value: str) -> Iterator[tuple[int, float]]:
    for record in run.rounds:
        found: Any = record
        for key in value.split("."):
            found = None if found is None else found[key]
        if found is not None:
            yield record["round"], float(found)


def _against(axes: Axes, drawing: Drawing, rows: Runs, styles: dict[str, int]) -> None:
    """A value of runs against a number: of an axis's label, or another value of the same runs."""
    by_line: dict[str, list[tuple[float, Floats]]] = {}
    for row, seeds in rows:
        found = [(value_of(run, drawing.value), _x(drawing.x, row.labels, run)) for run in seeds]
        known = [(value, x) for value, x in found if value is not None and x is not None]
        if known:
            y, x = np.array(known, dtype=np.float64).T
            by_line.setdefault(row.labels.get(drawing.lines, ""), []).append((float(x.mean()), y))
    for label, points in by_line.items():
        color, dashes, marker = look(styles[label])
        points.sort(key=lambda point: point[0])
        x = np.array([at for at, _ in points])
        mean = np.array([values.mean() for _, values in points])
        std = np.array([values.std(ddof=1) if len(values) > 1 else 0.0 for _, values in points])
        (line,) = axes.plot(x, mean, marker=marker, markersize=5, color=color, linewidth=1.5, label=label)
        if dashes:
            line.set_dashes(dashes)
        if std.any():
            axes.fill_between(x, mean - std, mean + std, color=color, alpha=0.15, lw=0)
    if named := sorted({row.labels[drawing.x] for row, _ in rows if drawing.x in row.labels}, key=number_in):
        axes.set_xticks([number_in(label) for label in named], named, fontsize=9)
    axes.set_xlabel(_name(drawing.x))
    axes.set_ylabel(_name(drawing.value))
    axes.grid(axis="y")


def _x(x: str, labels: Labels, run: SeedRun) -> float | None:
    return number_in(labels[x]) if x in labels else value_of(run, x)


def number_in(label: str) -> float:
    """The first number of a label: 0.1 of "Dir(0.1)", 5 of "5 %"."""
    found = re.search(r"\d+(\.\d+)?", label)
    assert found is not None, f"{label!r} holds no number"
    return float(found[0])


def _bars(axes: Axes, drawing: Drawing, rows: Runs, styles: dict[str, int]) -> None:
    groups = list(dict.fromkeys(row.labels.get(drawing.x, "") for row, _ in rows))
    wide = 0.84 / len(styles)
    for row, seeds in rows:
        values = [value for run in seeds if (value := value_of(run, drawing.value)) is not None]
        if not values:
            continue
        label = row.labels.get(drawing.lines, "")
        at = groups.index(row.labels.get(drawing.x, "")) + (styles[label] - (len(styles) - 1) / 2) * wide
        color, dashes, _ = look(styles[label])
        error = np.std(values, ddof=1) if len(values) > 1 else None
        axes.bar(at, np.mean(values), wide, yerr=error, color=color, hatch="//" if dashes else None, label=label)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(_name(drawing.value))
    axes.grid(axis="y")


def _classes(axes: Axes, drawing: Drawing, rows: Runs, _: dict[str, int]) -> None:
    """Accuracy by class after local training and of the aggregated model, last evaluated round; mean over seeds."""
    for _row, seeds in rows:
        local, merged, before = [], [], []
        for run in seeds:
            evaluated = [record for record in run.rounds if record["evaluation"] is not None]
            watched = [client for client in evaluated[-1]["clients"] or [] if _meant(client["client"], drawing)]
            local.append(np.mean([_numbers(client["per_class"]) for client in watched], axis=0))
            merged.append(_numbers(evaluated[-1]["evaluation"]["per_class"]))  # type: ignore[index]
            before.append(_numbers(evaluated[-2]["evaluation"]["per_class"]))  # type: ignore[index]
        place = np.arange(len(merged[0]))
        start = ("model sent", before) if drawing.clients else ("aggregated", merged)
        for at, (label, values) in enumerate([start, ("after local training", local)]):
            axes.bar(place + (at - 0.5) * 0.42, 100 * np.mean(values, axis=0), 0.42, color=look(at)[0], label=label)
    axes.set_ylim(0, 100)
    axes.set_xlabel("class")
    axes.set_ylabel("accuracy, %")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))


def _confusion(axes: Axes, drawing: Drawing, rows: Runs, _: dict[str, int]) -> None:
    """Of the client after its local training, last evaluated round of the first seed; rows as shares."""
    run = rows[0][1][0]
    last = [record for record in run.rounds if record["clients"]][-1]
    matrix = next(client["confusion"] for client in last["clients"] or [] if _meant(client["client"], drawing))
    counts = np.array(matrix, dtype=np.float64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="none")
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")


def _weights(axes: Axes, _: Drawing, rows: Runs, styles: dict[str, int]) -> None:
    """Mean weight of each client over the rounds that it answered, sorted by size; FedAvg's in the same rounds."""
    run = rows[0][1][0]
    sizes = run.counts.sum(axis=1).astype(np.float64)
    given, fedavg, times = np.zeros((3, len(sizes)))
    for record in run.rounds:
        answered = record["answered"]
        if answered:
            given[answered] += record["weights"]
            fedavg[answered] += sizes[answered] / sizes[answered].sum()
            times[answered] += 1
    order = np.argsort(sizes)
    order = order[times[order] > 0]
    place = np.arange(len(order))
    axes.bar(place, given[order] / times[order], color=look(0)[0], label="weight")
    axes.plot(place, fedavg[order] / times[order], "o", markersize=3, color=look(1)[0], label="FedAvg's")
    axes.set_xlabel("client, by size")
    axes.set_ylabel("weight")


def _mixes(axes: Axes, _: Drawing, rows: Runs, styles: dict[str, int]) -> None:
    """Label mixes of the clients and, last, of the target, of the first seed."""
    run = rows[0][1][0]
    counts = run.counts.astype(np.float64)
    mixes = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [*run.client_names]
    if run.target is not None:
        mixes, names = np.vstack([mixes, run.target]), [*names, "target"]
    axes.imshow(mixes.T, cmap="Blues", vmin=0, interpolation="none", aspect="auto")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=9)
    axes.set_xlabel("client")
    axes.set_ylabel("class")


def _meant(client: int, drawing: Drawing) -> bool:
    return not drawing.clients or client in drawing.clients


def _numbers(values: Sequence[float | None]) -> Floats:
    return np.array(values, dtype=np.float64)


def _name(value: str) -> str:
    """What an axis of the picture says."""
    names = {
        "entropy": "cohort label entropy, bits",
        "drift": "drift diversity",
        "projection_distance": "projection distance",
    }
    figure = value.rpartition(".")[2]
    text = names.get(figure, figure.replace("_", " "))
    return f"{text}, %" if unit_of(value) else text


_DRAW: dict[str, Callable[[Axes, Drawing, Runs, dict[str, int]], None]] = {
    "curves": _curves,
    "against": _against,
    "bars": _bars,
    "classes": _classes,
    "confusion": _confusion,
    "weights": _weights,
    "mixes": _mixes,
}
