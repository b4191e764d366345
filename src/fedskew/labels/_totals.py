"""Rows and columns of a table of counts that sum up the others: totals are no client and no class."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError, DataWarning

FloatArray: TypeAlias = NDArray[np.float64]
Totals: TypeAlias = Literal["drop", "keep"]

_TOTAL = re.compile(
    r"\W*(?:(?:total|gesamt|sum|summe)(?![^\W_]).*|(?:totals|all|overall|grand[ _-]?total|gesamtsumme|insgesamt|totale|"
    r"totaal|totaux|somme|ensemble|suma|итого|всего|合計|合计|总计|總計|합계|σ|∑)\W*)",
    re.IGNORECASE,
)


def without_totals(
    path: Path, counts: FloatArray, clients: list[str], classes: list[str], totals: Totals | None
) -> tuple[FloatArray, list[str], list[str]]:
    """Leave totals out of a table, and say so.

    A row or column that is called a total ("total", "sum", "Gesamt" ...) and is the sum of the others is left out;
    where it is not their sum, the caller is asked. One of another name that is the sum of all others stays.
    Each of these issues a DataWarning.

    Args:
        path: The table's file, for messages.
        counts: Shape `(clients, classes)`.
        clients: Names of the rows.
        classes: Names of the columns.
        totals: "drop": leave out whatever is called a total or is the sum of the others; "keep": count all.

    Returns:
        The table that is left.

    Raises:
        ArgumentError: A total does not fit the others, and `totals` is None.
    """
    if totals == "keep":
        return counts, clients, classes
    rows, columns = (np.array([_TOTAL.fullmatch(name) is not None for name in names]) for names in (clients, classes))
    if rows.all() or columns.all():  # there would be nothing else
        return counts, clients, classes
    inner = counts[~rows][:, ~columns]
    _check(path, "client", clients, rows, counts[:, ~columns], inner, totals)
    _check(path, "class", classes, columns, counts[~rows].T, inner.T, totals)
    kept = [name for name, total in zip(clients, rows, strict=True) if not total]
    named = [name for name, total in zip(classes, columns, strict=True) if not total]
    summing_rows = _note_sums(path, "row", kept, inner, totals)
    summing_columns = _note_sums(path, "column", named, inner.T, totals)
    return (
        inner[~summing_rows][:, ~summing_columns],
        [name for name, sums in zip(kept, summing_rows, strict=True) if not sums],
        [name for name, sums in zip(named, summing_columns, strict=True) if not sums],
    )


def _check(
    path: Path,
    what: str,
    names: Sequence[str],
    called: NDArray[np.bool_],
    lines: FloatArray,
    inner: FloatArray,
    totals: Totals | None,
) -> None:
    """Compare each line that is called a total with the sum of the others."""
    expected = inner.sum(axis=0)
    place = "row" if what == "client" else "column"
    for line in np.flatnonzero(called).tolist():
        if totals is None and not np.allclose(lines[line], expected, rtol=1e-6, atol=1e-9):
            where = int(np.argmax(np.abs(lines[line] - expected)))
            raise ArgumentError(
                f"{path}: the {place} {names[line]!r} is called a total and is not the sum of the others "
                f"({lines[line][where]:.10g} where they have {expected[where]:.10g}); say by totals (--totals) whether "
                f"to 'drop' it or to 'keep' it as a {what}"
            )
        _warn(f"{path}: the {place} {names[line]!r} is a total, and was left out (--totals keep counts it as a {what})")


def _note_sums(
    path: Path, place: str, names: Sequence[str], lines: FloatArray, totals: Totals | None
) -> NDArray[np.bool_]:
    """Return the lines to leave out although they are not called totals, because each is the sum of all others."""
    everything = lines.sum(axis=0)
    sums = (np.abs(2 * lines - everything) <= 1e-9 * everything).all(axis=1) & (everything > 0).any()
    if (lines.sum(axis=1) > 0).sum() < 3 or (everything > 0).sum() < 2:  # too few to be more than chance
        return np.zeros(len(lines), dtype=bool)
    for line in np.flatnonzero(sums).tolist():
        left = "and was left out" if totals == "drop" else "and is counted; if it is a total, add --totals drop"
        _warn(f"{path}: the {place} {names[line]!r} is the sum of all others {left}")
    return sums if totals == "drop" else np.zeros(len(lines), dtype=bool)


def _warn(text: str) -> None:
    warnings.warn(text, DataWarning, stacklevel=6)
