"""The page of one run, or of several that are compared."""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2
import numpy as np
import tomli_w

from fedskew.errors import ArgumentError
from fedskew.files import replacing, writing
from fedskew.names import visible
from fedskew.privacy import COVERED
from fedskew.report import _classes, _clients, _curves, _target  # noqa: F401  (the figures that they register)
from fedskew.report._figure import Figure, figures
from fedskew.report._groups import Group, Note, alike, label_notes, listed, same_data, same_test
from fedskew.report._ranking import Ranking, ranking
from fedskew.report._runs import SeedRun, averaged_over, most_frequent
from fedskew.report._sites import SiteActivity, still_rounds, undone_rounds
from fedskew.tables import Spread, flatten

_NOTHING = "\u2013"
_FEW = 8  # labels that have a card each and whose figures are all drawn at first
_CLOCK = 200  # points of a run at which its seconds and bytes are given


class _Table(NamedTuple):
    title: str
    note: str
    columns: list[str]
    rows: list[tuple[Group, list[str]]]


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
    """Write one HTML file that shows these runs.

    The page is self-contained: it loads nothing, but for `scripts`. Runs with one label are seeds of one
    configuration, and figures are their mean with one standard deviation (ddof 1). Several labels make a comparison, in
    the order in which they first come; a finished model has a label of its own. The same runs give the same bytes.

    Args:
        runs: The runs, finished or not.
        path: The file to write; its folder is made.
        title: Title of the page.
        axes: Where the labels are cells of a grid, the value of each on every axis, by the label.
        accuracy: A test accuracy, a share, whose first round the table of a comparison names.
        notes: What else stands below that table, or below the headline figures of a single label.
        scripts: A folder above the page's, for the script of 4.8 MB that many pages share; they are to be moved
            together then. None: the page holds it.

    Returns:
        The path.

    Raises:
        ArgumentError: There are no runs, or a label has one seed twice.
        RunError: The file can't be written.
    """
    groups = _grouped(SeedRun.with_finished(runs))
    whole = [run for group in groups for run in group.seeds]
    ranked = ranking(groups, axes or {}, accuracy) if len(groups) > 1 else None
    sections = figures(groups)
    trivial = most_frequent(whole)
    library = None if scripts is None else os.path.relpath(_shared_script(scripts), path.parent)
    page = _template("report.html").render(
        title=title,
        groups=groups,
        comparison=len(groups) > 1,
        trained=_trained(groups),
        several_seeds=any(len(group.seeds) > 1 for group in groups),
        measured=SeedRun.headline_in_words(whole),
        headlines=[_headline(group) for group in groups],
        facts=_facts(groups),
        warnings=[*map(Note, _warnings(groups)), *label_notes(groups)],
        ranked=ranked,
        notes=[*notes, *([] if trivial is None else [trivial])],
        sections=sections,
        tables=_tables(groups),
        federations=_federations(groups),
        differences=_differences(groups),
        configs=[(group, _toml(group.first.config)) for group in groups],
        origins=_origins(groups),
        few=len(groups) <= _FEW,
        figures=_figures(groups, sections, ranked),
        script=_script() if library is None else "",
        library=None if library is None else quote(Path(library).as_posix()),
    )
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(page, encoding="utf-8", newline="\n")
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


def _trained(groups: list[Group]) -> bool:
    """Return whether these are runs, not label counts alone."""
    return any(run.rounds or run.config for group in groups for run in group.seeds)


def _figures(groups: list[Group], sections: list[tuple[str, list[Figure]]], ranked: Ranking | None) -> str:
    """Return what `report.js` reads, as JSON that may stand in a `<script>`."""
    plain = {
        "groups": [{"label": group.label, "clock": _clock(group.first)} for group in groups],
        "shown": [group.style for group in (ranked.groups if ranked else groups)[:_FEW]],
        "charts": [one.plain() for _, drawn in sections for one in drawn],
        "ranking": None if ranked is None else ranked.plain(),
    }
    return json.dumps(_visible(plain), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


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


def _warnings(groups: list[Group]) -> list[str]:
    """Return what makes a comparison of these runs unfair."""
    tests = alike(groups, same_test)
    if len(tests) > 1:
        parts = [f"{listed(group.label for group in members)}: {_data(members[0])}" for members in tests]
        return [
            "These runs are not of the same data, so their accuracies are of different tests: compare within each of "
            f"these only. {'. '.join(parts)}."
        ]
    splits = alike(groups, same_data)
    seeds = {tuple(run.seed for run in group.seeds) for group in groups}
    if len(splits) > 1 and len(seeds) == 1:
        parts = [f"{listed(group.label for group in members)}: {_split(members[0])}" for members in splits]
        return [
            "The clients of these runs do not hold the same samples, so differences between runs are not of the "
            f"method alone. {'; '.join(parts)}."
        ]
    return []


def _data(group: Group) -> str:
    run = group.first
    name = run.config.get("data", {}).get("name", "data of unknown name")
    return f"{name}, {len(run.class_names)} classes, {int(run.counts.sum()):,} training samples"


def _split(group: Group) -> str:
    counts = group.first.counts
    rule = group.first.config.get("partition", {})
    settings = [f"{key} {value}" for key, value in rule.items() if key not in ("rule", "clients") and value is not None]
    named = " ".join([str(rule.get("rule", "")), *settings]).strip()
    return f"{len(counts):,} clients{f', {named}' if named else ''}"


@cache
def _template(name: str) -> jinja2.Template:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("fedskew.report"),
        autoescape=True,
        finalize=lambda value: _visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    ).get_template(name)


def _grouped(runs: Sequence[SeedRun]) -> list[Group]:
    if not runs:
        raise ArgumentError("runs: a report needs at least one run, got none")
    by_label: dict[str, list[SeedRun]] = {}
    for run in runs:
        if any(run.seed == other.seed for other in by_label.setdefault(run.label, [])):
            raise ArgumentError(
                f"runs: {run.label!r} has seed {run.seed} twice; give each configuration its own label (fedskew report "
                "LABEL=RUN ...)"
            )
        by_label[run.label].append(run)
    return [
        Group(label, style, sorted(seeds, key=lambda run: run.seed))
        for style, (label, seeds) in enumerate(by_label.items())
    ]


def _facts(groups: list[Group]) -> list[tuple[str, str]]:
    """Return the numbers that all runs share, or the ranges that they span."""
    runs = [run for group in groups for run in group.seeds]
    numbers = [
        ("seed", "seeds", [len(group.seeds) for group in groups]),
        ("round", "rounds", [_last_round(run) for run in runs]),
        ("client", "clients", [run.counts.shape[0] for run in runs]),
        ("class", "classes", [run.counts.shape[1] for run in runs]),
        ("training sample", "training samples", [int(run.counts.sum()) for run in runs]),
    ]
    facts = [(one if max(values) == 1 else many, _range(values)) for one, many, values in numbers]
    spent = [found for run in runs if run.rounds and (found := run.rounds[-1].privacy) is not None]
    if spent:
        epsilon, delta = max(found["epsilon"] for found in spent), max(found["delta"] for found in spent)
        facts.append(("differential privacy", f"\u03b5 {epsilon:.2f} at most, \u03b4 {delta:.0e}, of {COVERED}"))
    if not _trained(groups):
        return facts[2:]
    return facts if len(groups) == 1 else [("runs, each with", str(len(groups))), *facts]


def _last_round(run: SeedRun) -> int:
    return max((record.round for record in run.rounds), default=0)


def _headline(group: Group) -> list[tuple[str, str]]:
    """Return the few numbers that a reader looks for first, of which the first is the largest on the page."""
    named = [("accuracy", "accuracy"), ("worst class", "worst_class"), ("target mix", "target_accuracy")]
    if most_frequent(group.seeds) is not None:
        named = [("balanced accuracy", "balanced_accuracy"), *named]
    shown = [(name, f"{SeedRun.MOMENTS[group.first.summarised_by]}.{key}") for name, key in named]
    if any(run.last_tenth for run in group.seeds):
        tenth = (named[0], named[-1])
        shown += [(f"{name}, last tenth of the rounds", f"last_tenth.{key}") for name, key in tenth]
    texts = [(name, _statistic(group, key, unit=" %")) for name, key in shown]
    return [(name, text) for name, text in texts if text != _NOTHING]


def _tables(groups: list[Group]) -> list[_Table]:
    runs = [run for group in groups for run in group.seeds]
    moments = {
        "final": "Final",
        "last10": averaged_over(runs).capitalize(),
        "last_tenth": "Mean of the last tenth",
        "best_by_validation": "Best by validation",
        "max": "Max on the test set",
    }
    if not any(run.last_tenth for run in runs):
        del moments["last_tenth"]

    def of(key: str, digits: int = 1, scale: float = 100) -> Callable[[Group], str]:
        return lambda group: _statistic(group, key, digits, scale)

    tables: list[tuple[str, str, dict[str, Callable[[Group], str]]]] = [
        (
            "Accuracy on the test set, %",
            "\u2018Max on the test set\u2019 is chosen by the test set itself, so it is optimistic: not a result to "
            "quote.",
            {name: of(f"{moment}.accuracy") for moment, name in moments.items()},
        ),
        (
            "Accuracy on the target mix, %",
            "Where there is a target, validation chooses its round by this accuracy.",
            {name: of(f"{moment}.target_accuracy") for moment, name in moments.items()},
        ),
        (
            "The final model in other measures",
            "The first three in %. Balanced accuracy is the mean over classes; loss is cross-entropy on the test set.",
            {
                "Worst class": of("final.worst_class"),
                "Balanced accuracy": of("final.balanced_accuracy"),
                "Macro F1": of("final.macro_f1"),
                "Test loss": of("final.loss", 3, 1),
            },
        ),
        (
            "Cost",
            "MB (10\u2076 bytes) are what would travel between the server and all clients. Diverged counts the clients "
            "left out of a round, over all rounds.",
            {
                "Rounds": lambda group: _range([_last_round(run) for run in group.seeds]),
                "Seconds": of("seconds", 2, 1),
                "MB up": of("bytes_up", 2, 1e-6),
                "MB down": of("bytes_down", 2, 1e-6),
                "Diverged": lambda group: _range([_diverged(run) for run in group.seeds]),
            },
        ),
    ]
    if all(of("final.target_accuracy")(group) == _NOTHING for group in groups):
        del tables[1]
    return [
        _Table(title, note, list(columns), [(group, [cell(group) for cell in columns.values()]) for group in groups])
        for title, note, columns in tables
    ]


def _federations(groups: list[Group]) -> list[tuple[str, list[str], list[list[str]], list[str]]]:
    """Return for each run of real sites its label, the headings and rows of its table of sites, and what happened."""
    federations = []
    for label, run in ((group.label, run) for group in groups for run in group.seeds):
        if not (sites := SiteActivity.of(run)):
            continue
        own = [site.accuracy for site in sites if site.accuracy is not None and site.quarantine is None]
        notes = [*undone_rounds(run), *still_rounds(run)]
        if own:
            notes.append(
                f"Median over sites of the accuracy on their own test samples: {100 * np.median(own):.1f} %, from "
                f"{100 * min(own):.1f} to {100 * max(own):.1f} %. Each site's is what it said of itself; the accuracy "
                "of all is that of their samples together."
            )
        notes += [f"{site.name}: {site.trouble}" for site in sites if site.trouble is not None]
        federations.append((label, *SiteActivity.table(sites), notes))
    return federations


def _diverged(run: SeedRun) -> int:
    return sum(len(record.diverged) for record in run.rounds)


def _statistic(group: Group, key: str, digits: int = 1, scale: float = 100, unit: str = "") -> str:
    """Return the mean over seeds of a number in the summaries and, from two seeds on, their standard deviation."""
    numbers = [flatten(run.summary).get(key) for run in group.seeds]
    values = [scale * float(number) for number in numbers if number is not None and math.isfinite(number)]
    spread = Spread.of(values)
    if spread.mean is None:
        return _NOTHING
    missing = f" ({len(values)} of {len(numbers)} seeds)" if len(values) < len(numbers) else ""
    return f"{spread.text(min(digits, 1) if spread.mean >= 100 else digits)}{unit}{missing}"


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _differences(groups: list[Group]) -> list[tuple[Group, list[tuple[str, str]]]]:
    """Return, for each label, the config keys in which the labels differ."""
    flat = [flatten(group.first.config) for group in groups]
    keys = sorted(set().union(*flat))
    differing = [key for key in keys if len({json.dumps(config.get(key), sort_keys=True) for config in flat}) > 1]
    return [
        (group, [(key, json.dumps(config[key])) for key in differing if key in config])
        for group, config in zip(groups, flat, strict=True)
    ]


def _toml(config: dict[str, Any]) -> str:
    def without_none(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {key: without_none(part) for key, part in tree.items() if part is not None}

    return tomli_w.dumps(without_none(config))


def _origins(groups: list[Group]) -> list[tuple[list[str], dict[str, Any]]]:
    """Group the labels that share revision, machine and versions, and return these as one level of keys."""
    origins: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for label, run in ((group.label, run) for group in groups for run in group.seeds):
        origin = {key: run.summary[key] for key in ("revision", "machine", "versions") if run.summary.get(key)}
        labels, _ = origins.setdefault(json.dumps(origin, sort_keys=True), ([], flatten(origin)))
        if label not in labels:
            labels.append(label)
    return list(origins.values())
