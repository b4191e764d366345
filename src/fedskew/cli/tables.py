"""Tables on the terminal: results, and what a site holds and sends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedskew.experiment import Result, SweepResult
from fedskew.names import visible
from fedskew.report import SeedRun, SiteActivity
from fedskew.tables import Spread, counted

if TYPE_CHECKING:
    from fedskew.deploy import Agreement, Disclosure, Look, SiteData, Terms
    from fedskew.papers import Reproduction

BAR = 24
UNKNOWN = "unknown"


def results_table(results: Sequence[Result]) -> Table:
    """Return a row for each result: the figures that its report page shows first, in percent.

    They are mean ± standard deviation over its seeds; with a finish there are two rows, of the last round's model
    before and after it.
    """
    seeds = {len(result.runs) for result in results}
    caption = f"mean ± standard deviation over {min(seeds)} seeds" if min(seeds) > 1 else "one seed: no spread is known"
    title = f"Test set, {SeedRun.headline_in_words(run for result in results for run in result.runs)}, %"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("run", overflow="fold")
    rows = [row for result in results for row in _lines(result)]
    if len(rows) > len(results):
        table.caption = f"{caption}; as trained, after a finish: the last round's model alone"
    columns = list(dict.fromkeys(heading for _, figures, _ in rows for heading in figures))
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for name, figures, seconds in rows:
        cells = [figures[heading].text(scale=100) if heading in figures else "-" for heading in columns]
        table.add_row(name, *cells, f"{seconds:.1f}")
    return table


def _lines(result: Result) -> list[tuple[str, dict[str, Spread], float]]:
    """Return a result's name, figures and seconds; with a finish those of the last round's model without it too."""
    name = result.config.name
    seconds = sum(run.summary["seconds"] for run in result.runs)
    if not (after := result.headline("finished")):
        return [(name, result.headline(), seconds)]
    more = sum(run.summary["finished"]["seconds"] for run in result.runs)
    finish = result.config.method["finish"]["name"]
    return [
        (SeedRun.as_trained(name), result.headline("final"), seconds),
        (SeedRun.after_finish(name, finish), after, seconds + more),
    ]


def sweep_table(result: SweepResult, width: int) -> Table:
    """Return a row for each cell of a sweep, as in its `table.md`; numbers take two lines where `width` is small."""
    headings, rows = result.table()
    axes = len(result.sweep.axes)
    if sum(max(map(len, column)) + 2 for column in zip(headings, *rows, strict=True)) > width:
        headings = [*headings[:axes], *(heading.replace(" ", "\n", 1) for heading in headings[axes:])]
        rows = [[*row[:axes], *(re.sub(r" (?=[±(])", "\n", cell) for cell in row[axes:])] for row in rows]
    table = plain_table(headings, rows, axes)
    table.title, table.title_justify = Text(result.sweep.name), "left"
    return table


def comparison_table(done: Reproduction) -> Table:
    """Return ours, theirs and the difference, a line for each row of a recipe."""
    return plain_table(*done.table())


def samples_table(data: SiteData, agreement: Agreement) -> Table:
    """Return the number of samples of every class, for training (with a bar) and for tests."""
    shape = " x ".join(map(str, agreement.shape))
    kind = "token ids" if agreement.tokens else "numbers"
    counts = data.counts.astype(int)
    tests = [int((data.test_targets == label).sum()) for label in range(data.num_classes)]
    table = Table(
        title=f"This site's data fits: {counted(int(counts.sum()), 'sample')} to train on, {sum(tests)} to test; "
        f"{shape} {kind} each",
        title_justify="left",
    )
    table.add_column("class", overflow="fold")
    table.add_column("train", justify="right")
    table.add_column("", no_wrap=True, width=BAR)
    table.add_column("test", justify="right")
    most = max(1, int(counts.max()))
    for name, count, test in zip(agreement.classes, counts.tolist(), tests, strict=True):
        bar = "█" * -(-BAR * count // most) or "[dim]none[/dim]"
        table.add_row(escape(name), str(count), bar, str(test))
    return table


def disclosure_table(things: Sequence[Disclosure], agreement: Agreement) -> Table:
    """Everything that leaves a site (what, when, and how large) and what never does."""
    table = Table(title="What will leave this site", title_justify="left", caption_justify="left", show_lines=True)
    for heading in ("what", "when"):
        table.add_column(heading, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for thing in things:
        table.add_row(escape(thing.what), escape(thing.when), UNKNOWN if thing.bytes is None else f"{thing.bytes:,}")
    never = ["samples", "file names", "paths"]
    if agreement.label_counts != "exact":
        never.append("exact label counts" if agreement.epsilon else "label counts")
    table.caption = (
        f"Nothing else leaves it: never {', '.join(never)}. Flower learns the site's address, its key, and when it is "
        "connected. What a model may reveal of the samples that it was trained on: docs/privacy.md of fedskew."
    )
    return table


def sites_table(sites: Sequence[SiteActivity]) -> Table:
    """Return a row for each site of a federation: how often it was asked and counted, and what went wrong.

    It is read at 60 columns: what is long is wrapped, and the name last.
    """
    headings, rows = SiteActivity.table(sites)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    name = min(16, max(cell_len(visible(row[0])) for row in rows))
    table.add_column(headings[0], min_width=name, overflow="fold")
    table.add_column(headings[1], no_wrap=True)
    for heading in headings[2:]:
        table.add_column(heading, min_width=max(map(len, heading.split())))
    for row in rows:
        table.add_row(*(Text(visible(text)) for text in row))
    return table


def terms_table(look: Look) -> Group:
    """Return what a site agrees to, and agreed to before where that differs, and code that fedskew did not write."""
    terms, before, code = look.terms, look.before, look.code
    old = terms if before is None else before
    rows: list[tuple[str, object, object]] = [
        ("hash of the app's files", f"{terms.app[:16]}...", f"{old.app[:16]}..."),
        ("version of fedskew", terms.fedskew, old.fedskew),
        ("most rounds", terms.rounds, old.rounds),
    ]
    if look.agreement.updates == "masked":
        rows.append(("fewest sites in a sum", terms.sum_sites, old.sum_sites))
    if terms.updates_epsilon is not None or old.updates_epsilon is not None:
        rows.append(("largest epsilon of its updates together", _epsilon_in_words(terms), _epsilon_in_words(old)))
    if terms.epsilon is not None:
        rows += [
            (f"largest epsilon of a release ({terms.neighbours})", terms.epsilon, old.epsilon),
            (f"largest sum of epsilons ({terms.neighbours})", terms.epsilon_total, old.epsilon_total),
        ]
    table = Table(title="What this site agrees to", title_justify="left")
    for heading in ("what", "limit", "agreed before")[: 2 if before is None else 3]:
        table.add_column(heading, overflow="fold")
    for what, limit, earlier in rows:
        was = [] if before is None else [escape(str(earlier)) if earlier != limit else "[dim]the same[/dim]"]
        table.add_row(what, escape(str(limit)), *was)
    warning = f"CODE THAT IS NOT AS FEDSKEW WRITES IT, and would run at this site: {', '.join(code)}. Read it."
    notes = [*([warning] if code else []), *look.notes()]
    return Group(table, Text(" ".join(notes), style="bold red" if code else "dim"))


def _epsilon_in_words(terms: Terms) -> str:
    if terms.updates_epsilon is None or terms.updates_delta is None:
        return "none: UPDATES WITHOUT NOISE"
    return f"{terms.updates_epsilon:g} (delta {terms.updates_delta:g})"


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]], labels: int) -> Table:
    """Return a table whose first columns are labels and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for at, heading in enumerate(headings):
        number = at >= labels
        table.add_column(Text(heading), justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(text)) for text in row))  # as it is shown, so that its width is known
    return table
