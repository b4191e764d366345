"""The page of one run, or of several that are compared."""

import base64
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import numpy as np
import tomli_w

from fedskew.errors import ArgumentError
from fedskew.files import replacing, write_text, writing
from fedskew.names import visible
from fedskew.privacy import COVERED
from fedskew.report import _classes, _clients, _curves  # noqa: F401  (the figures that they register)
from fedskew.report._charts import figures
from fedskew.report._ranking import ranking
from fedskew.report._runs import Group, SeedRun, averaged_over, listed, same_data, same_test
from fedskew.report._sites import SiteActivity
from fedskew.tables import Spread, counted, flatten, grouped

_NOTHING = "\u2013"
_FEW = 8  # labels that have a card each and whose figures are all drawn at first
_CLOCK = 200  # points of a run at which its seconds and bytes are given


def write_report(
    runs: Sequence[SeedRun],
    path: Path,
    title: str,
    *,
    axes: Mapping[str, Mapping[str, str]] | None = None,
    accuracy: float | None = None,
    notes: Sequence[str] = (),
    scripts: Path | None = None,
) -> Path:
    """Write one HTML file that shows these runs, and return its path.

    The page is self-contained: it loads nothing, but for `scripts`. Runs with one label are seeds of one configuration,
    and figures are their mean with one standard deviation (ddof 1). Several labels make a comparison, in the order in
    which they first come; a finished model has a label of its own. The same runs give the same bytes.

    Args:
        axes: Where the labels are cells of a grid, the value of each on every axis, by the label.
        accuracy: A test accuracy, a share, whose first round the table of a comparison names.
        notes: What else stands below that table, or below the headline figures of a single label.
        scripts: A folder above the page's, for the script of 4.8 MB that many pages share; they are to be moved
            together then. None: the page holds it.
    """
    if path.suffix != ".html":
        raise ArgumentError(f"{path}: the page is to be looked at in a browser; name it .html")
    groups = _grouped(SeedRun.with_finished(runs))
    whole = [run for group in groups for run in group.seeds]
    ranked = ranking(groups, axes or {}, accuracy) if len(groups) > 1 else None
    sections = figures(groups)
    drawn = {
        "groups": [{"label": group.label, "clock": _clock(group.first)} for group in groups],
        "shown": [group.style for group in (ranked.groups if ranked else groups)[:_FEW]],
        "charts": [one.plain() for _, in_section in sections for one in in_section],
        "ranking": None if ranked is None else ranked.plain(),
    }
    library = None if scripts is None else os.path.relpath(_shared_script(scripts), path.parent)
    page = _template().render(
        title=title,
        groups=groups,
        runs=whole,
        trained=any(run.rounds or run.config for run in whole),
        private=[found for run in whole if run.rounds and (found := run.rounds[-1].privacy) is not None],
        warnings=[*_warnings(groups), *SeedRun.label_notes(whole)],
        ranked=ranked,
        notes=[*notes, *filter(None, [SeedRun.most_frequent(whole)]), *SeedRun.threshold_notes(whole)],
        sections=sections,
        few=len(groups) <= _FEW,
        differences=_differences(groups),
        origins=_origins(whole),
        # JSON that may stand in a `<script>`
        figures=json.dumps(_visible(drawn), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script=_script() if library is None else "",
        library=None if library is None else quote(Path(library).as_posix()),
    )
    write_text(path, page)
    return path


@cache
def _script() -> str:
    """Return plotly's own script, compressed (zlib) and in base64: 2.0 MB, and 4.8 once the browser unpacks it."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(zlib.compress(get_plotlyjs().encode(), 4)).decode()


def _shared_script(folder: Path) -> Path:
    """Write plotly's own script to a folder, for all pages that are below it, unless it is there."""
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    path = folder / f"plotly-{get_plotlyjs_version()}.js"
    if not path.exists():
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path, shared=True) as part:
                part.write_text(get_plotlyjs(), encoding="utf-8", newline="\n")
    return path


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedskew.report"),
        autoescape=True,
        finalize=lambda value: _visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {
        "COVERED": COVERED,
        "NOTHING": _NOTHING,
        "MOMENTS": SeedRun.MOMENTS,
        "FIGURES": SeedRun.FIGURES,
        "averaged_over": averaged_over,
        "headline_in_words": SeedRun.headline_in_words,
        "shown_figures": SeedRun.shown_figures,
        "site_notes": _site_notes,
        "sites_table": SiteActivity.table,
        "statistic": _statistic,
        "toml": _toml,
        "with_interval": _with_interval,
    }
    environment.filters |= {"span": _span, "sites": SiteActivity.of, "statistic": _statistic, "sum": np.sum}
    return environment.get_template("report.html")


def _visible(tree: Any) -> Any:
    """Return a tree of plain values whose texts hide nothing (see `names.visible`)."""
    if isinstance(tree, str):
        return visible(tree, keep="\n\t")
    if isinstance(tree, dict):
        return {_visible(key): _visible(value) for key, value in tree.items()}
    return list(map(_visible, tree)) if isinstance(tree, (list, tuple)) else tree


def _clock(run: SeedRun) -> dict[str, list[float]]:
    """Return at which second of training, and after how many megabytes, some rounds ended."""
    if not run.rounds:
        return {"round": [0], "seconds": [0], "megabytes": [0]}
    at = np.unique(np.linspace(0, len(run.rounds) - 1, min(len(run.rounds), _CLOCK)).astype(np.int64))
    seconds = np.cumsum([record.seconds for record in run.rounds])[at]
    megabytes = np.cumsum([(record.bytes_up + record.bytes_down) / 1e6 for record in run.rounds])[at]
    return {
        "round": [run.rounds[place].round for place in at],
        "seconds": np.round(seconds, 3).tolist(),
        "megabytes": np.round(megabytes, 3).tolist(),
    }


def _grouped(runs: Sequence[SeedRun]) -> list[Group]:
    if not runs:
        raise ArgumentError("runs: a report needs at least one run, got none")
    return [
        Group(label, style, sorted(seeds, key=lambda run: run.seed))
        for style, (label, seeds) in enumerate(SeedRun.by_label(runs).items())
    ]


def _warnings(groups: list[Group]) -> list[str]:
    """Return what makes a comparison of these runs unfair."""
    if len(tests := grouped(groups, same_test)) > 1:
        parts = [f"{listed(group.label for group in members)}: {_data(members[0])}" for members in tests.values()]
        return [
            "These runs are not of the same data, so their accuracies are of different tests: compare within each of "
            f"these only. {'. '.join(parts)}."
        ]
    seeds = {tuple(run.seed for run in group.seeds) for group in groups}
    if len(splits := grouped(groups, same_data)) > 1 and len(seeds) == 1:
        parts = [f"{listed(group.label for group in members)}: {_split(members[0])}" for members in splits.values()]
        return [
            "The clients of these runs do not hold the same samples, so differences between runs are not of the "
            f"method alone. {'; '.join(parts)}."
        ]
    return []


def _data(group: Group) -> str:
    run = group.first
    name = run.config.get("data", {}).get("name", "data of unknown name")
    return f"{name}, {len(run.class_names)} classes, {int(run.samples.sum()):,} training samples"


def _split(group: Group) -> str:
    rule = group.first.config.get("partition", {})
    settings = [f"{key} {value}" for key, value in rule.items() if key not in ("rule", "clients") and value is not None]
    named = " ".join([str(rule.get("rule", "")), *settings]).strip()
    return f"{counted(len(group.first.counts), 'client')}{f', {named}' if named else ''}"


def _site_notes(run: SeedRun) -> list[str]:
    """Return what happened in a run of real sites, beside the table of what each did."""
    notes, sites = [*SiteActivity.undone_rounds(run), *SiteActivity.still_rounds(run)], SiteActivity.of(run)
    if own := [site.accuracy for site in sites if site.accuracy is not None and site.quarantine is None]:
        notes.append(
            f"Median over sites of the accuracy on their own test samples: {100 * np.median(own):.1f} %, from "
            f"{100 * min(own):.1f} to {100 * max(own):.1f} %. Each site's is what it said of itself; the accuracy "
            "of all is that of their samples together."
        )
    return [*notes, *(f"{site.name}: {site.trouble}" for site in sites if site.trouble is not None)]


def _statistic(group: Group, key: str, digits: int = 1, scale: float = 100, unit: str = "") -> str:
    """Return the mean over seeds of a number in the summaries and, from two seeds on, their standard deviation."""
    numbers = [flatten(run.summary).get(key) for run in group.seeds]
    values = [scale * float(number) for number in numbers if number is not None and math.isfinite(number)]
    spread = Spread.of(values)
    if spread.mean is None:
        return _NOTHING
    missing = f" ({len(values)} of {len(numbers)} seeds)" if len(values) < len(numbers) else ""
    return f"{spread.text(min(digits, 1) if spread.mean >= 100 else digits)}{unit}{missing}"


def _with_interval(group: Group, key: str, digits: int = 1, scale: float = 100) -> str:
    """Return a figure of the final model as `_statistic` does, and its interval over test samples, if known."""
    found = [run.summary.get("intervals", {}).get(key.partition(".")[2]) for run in group.seeds]
    ends = [scale * np.array(one) for one in found if one is not None]
    low, high = np.mean(ends, axis=0) if ends else (math.nan, math.nan)
    return _statistic(group, key, digits, scale) + (f" ({low:.{digits}f} to {high:.{digits}f})" if ends else "")


def _span(values: Iterable[float]) -> str:
    low, *_, high = sorted([*values] * 2)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _differences(groups: list[Group]) -> list[tuple[Group, list[tuple[str, str]]]]:
    """Return, for each label, the config keys in which the labels differ."""
    flat = [{key: json.dumps(value) for key, value in flatten(group.first.config).items()} for group in groups]
    keys = sorted(set().union(*flat))
    differing = [key for key in keys if len({config.get(key) for config in flat}) > 1]
    return [
        (group, [(key, config[key]) for key in differing if key in config])
        for group, config in zip(groups, flat, strict=True)
    ]


def _toml(config: dict[str, Any]) -> str:
    def without_none(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {key: without_none(part) for key, part in tree.items() if part is not None}

    return tomli_w.dumps(without_none(config))


def _origins(runs: Sequence[SeedRun]) -> list[tuple[list[str], dict[str, Any]]]:
    """Group the labels that share revision, machine and versions, and return these as one level of keys."""
    origins: dict[str, tuple[dict[str, None], dict[str, Any]]] = {}
    for run in runs:
        origin = {key: run.summary[key] for key in ("revision", "machine", "versions") if run.summary.get(key)}
        labels, _ = origins.setdefault(json.dumps(origin, sort_keys=True), ({}, flatten(origin)))
        labels[run.label] = None
    return [(list(labels), origin) for labels, origin in origins.values()]
