"""A figure of the page with the words around it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedskew.report._charts import Chart


@dataclass(frozen=True)
class Panel:
    """A figure and the words around it.

    Attributes:
        title: Heading of the figure.
        chart: The figure.
        alt: What it shows, for readers who don't see it.
        caption: How to read it.
        basis: How many seeds it rests on.
        findings: What it shows, in words.
        wide: Whether it takes the page's whole width.
    """

    title: str
    chart: Chart
    alt: str
    caption: str
    basis: str
    findings: list[str] = field(default_factory=list)
    wide: bool = False
