"""What a site holds, and what will leave it, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from fedskew.deploy import Agreement, Leaving, SiteData

BAR = 24


def held_table(data: SiteData, agreement: Agreement) -> Table:
    """Samples of each class of the federation, as a bar and a number, for training and for tests."""
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


def leaving_table(things: Sequence[Leaving], agreement: Agreement) -> Table:
    """Everything that leaves a site: what, when and how large; and what never does."""
    table = Table(title="What will leave it", title_justify="left", caption_justify="left", show_lines=True)
    for heading in ("what", "when"):
        table.add_column(heading, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for thing in things:
        table.add_row(escape(thing.what), escape(thing.when), f"{thing.bytes:,}")
    never = ["samples", "file names", "where they are"]
    if agreement.label_counts != "exact":
        never.append("how many samples of each class there are, exactly" if agreement.epsilon else "label counts")
    table.caption = (
        f"Nothing else: never {', '.join(never)}. Flower sees its address, its key, and when it is there. What a model "
        "may tell of the samples that it was trained on: docs/privacy.md of fedskew."
    )
    return table
