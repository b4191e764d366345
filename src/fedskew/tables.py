"""Means and p-values, tables as CSV and Markdown, nested tables as flat ones, texts that are filled in."""

import csv
import functools
import heapq
import io
import json
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import jinja2

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of some values, usually over seeds.

    Attributes:
        mean: The mean; None without values.
        std: The standard deviation (ddof 1); None for fewer than two values.
    """

    mean: float | None
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Return the spread of these values."""
        known = list(values)
        return cls(statistics.fmean(known) if known else None, statistics.stdev(known) if len(known) > 1 else None)

    def text(self, digits: int = 1, *, scale: float = 1.0, nothing: str = "-") -> str:
        """Return `mean ± std`, times `scale`; the mean alone where there is no standard deviation, or `nothing`."""
        if self.mean is None:
            return nothing
        mean = f"{scale * self.mean:,.{digits}f}"
        return mean if self.std is None else f"{mean} ± {scale * self.std:,.{digits}f}"


def holm(p: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's method; NaN where there is no test."""
    corrected, least = list(p), 0.0
    order = sorted((at for at, own in enumerate(p) if math.isfinite(own)), key=p.__getitem__)
    for rank, at in enumerate(order):
        corrected[at] = least = max(least, min(1.0, p[at] * (len(order) - rank)))
    return corrected


def counted(number: int, one: str, several: str | None = None) -> str:
    """Return a number with its noun: `1 client`, `2,000 clients`."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def duration(seconds: float) -> str:
    """Describe a duration in the unit that fits, rounded."""
    for unit, length in (("years", 31_557_600), ("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} s"


def amount(value: float) -> str:
    """Return a number with separators of thousands; a decimal only if it is not whole."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def csv_text(lines: Iterable[Sequence[Any]]) -> str:
    """Return lines of cells as CSV; None becomes an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], labels: int) -> str:
    """Return a Markdown table; `labels` columns, from the left, hold labels, and the others numbers, to the right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---"] * labels + ["---:"] * (len(headings) - labels)
    return "\n".join([line(headings), line(rule), *map(line, rows)])


_TEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


def latex_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for LaTeX with booktabs; columns whose cells are numbers stand to the right."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join("".join(_TEX.get(letter, letter) for letter in cell) for cell in cells) + r" \\"

    sides = ["r" if all(cell[:1] in "-+0123456789" for cell in column) else "l" for column in zip(*rows, strict=True)]
    form = "".join(sides or "l" * len(headings))
    body = "\n".join(map(line, rows))
    return (
        f"\\begin{{tabular}}{{{form}}}\n\\toprule\n{line(headings)}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}"
    )


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by a key of each, in the order in which keys and items come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def balanced(sizes: Sequence[float], groups: int) -> list[list[int]]:
    """Divide items of these sizes: return each group's, from the largest to the smallest, each to the group with the
    least so far, of several the first."""
    members: list[list[int]] = [[] for _ in range(groups)]
    held = [(0.0, group) for group in range(groups)]
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        amount, group = held[0]
        members[group].append(item)
        heapq.heapreplace(held, (amount + sizes[item], group))
    return members


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested config as one level of dotted keys, `{"data.name": "mnist"}`; an empty table stays `{}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def json_text(value: Any) -> str:
    """Return plain values as indented JSON with sorted keys."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def filled(package: str, template: str, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Fill in a text of a package's `templates/` (Jinja), with functions that the text may use as filters."""
    return _template(package, template, tuple(filters.items())).render(values)


@functools.lru_cache(16)  # filters may be closures
def _template(package: str, template: str, filters: tuple[tuple[str, Callable[..., Any]], ...]) -> "jinja2.Template":
    """Read and compile a text, which takes a quarter of a small run's set-up, once."""
    import jinja2  # it takes long to import

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package), trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= dict(filters)
    return environment.get_template(template)
