"""Tables of a site's samples and of what will leave it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from fedskew.deploy import Agreement, Disclosure, SiteData

BAR = 24


def samples_table(data: SiteData, agreement: Agreement) -> Table:
    """Number of samples of every class, for training (with a bar) and for tests."""
    shape = " x ".join(map(str, agreement.shape))
    kind = "token ids" if agreement.tokens else "numbers"
    counts = data.counts.astype(int)
    tests = [int((data.test_targets == label).sum()) for label in range(data.num_classes)]
    table = Table(
        title=f"This site's data fits: {counts.sum()} samples to train on, {sum(tests)} to test; {shape} {kind} each",
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
        table.add_row(escape(thing.what), escape(thing.when), f"{thing.bytes:,}")
    never = ["samples", "file names", "paths"]
    if agreement.label_counts != "exact":
        never.append("exact label counts" if agreement.epsilon else "label counts")
    table.caption = (
        f"Nothing else leaves it: never {', '.join(never)}. Flower learns the site's address, its key, and when it is "
        "connected. What a model may reveal of the samples that it was trained on: docs/privacy.md of fedskew."
    )
    return table
