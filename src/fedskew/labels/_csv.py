"""Label counts and target mixes as tables of text.

What a spreadsheet makes of such a table is read too: totals, a column "hospital" for the clients, and what `sheets`
reads. Where that can be understood in two ways, the caller is asked.
"""

import csv
import re
import warnings
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import nullcontext
from itertools import compress, permutations
from pathlib import Path
from typing import Literal, TextIO, TypeAlias

import numpy as np

from fedskew.errors import ArgumentError, DataWarning, nearest
from fedskew.names import CLASS_WORDS, CLIENT_WORDS, COUNT_WORDS, plain, warn_of_look_alikes
from fedskew.sheets import Decimal, FloatArray, Sheet, decimals, written

Totals: TypeAlias = Literal["drop", "keep"]
Form: TypeAlias = Literal["wide", "long"]

Table: TypeAlias = tuple[FloatArray, list[str], list[str]]
"""Label counts, client names and class names."""

_LONG = ("client", "class", "count")
_TOTAL = re.compile(
    r"\W*(?:(?:total|sum|gesamt|summe)(?![^\W_]).*|(?:totals|all|overall|grand[ _-]?total|gesamtsumme|insgesamt)\W*)",
    re.IGNORECASE,
)

_MEAN = re.compile(r"\W*(?:mean|average|avg|median|mittelwert|durchschnitt)\W*", re.IGNORECASE)


def read_counts(
    path: Path, client: str | None = None, decimal: Decimal | None = None, totals: Totals | None = None
) -> Table:
    """Read counts and names from a file in wide or long form; see `LabelCounts.read_csv`."""
    sheet = Sheet(path, "a wide header such as client,cat,dog, or client,class,count, and a row a client", decimal)
    at = _client_column(sheet, client)
    sheet.header[at] = sheet.header[at] or "client"
    sheet.check_header()
    if len(sheet.header) == 1:
        sheet.fail(sheet.line, f"no column for any class beside {sheet.header[0]!r}")
    others = [column for column in range(len(sheet.header)) if column != at]
    long = _long_columns(sheet, others)
    counts, clients, classes = _wide(sheet, at, others) if long is None else _long(sheet, at, *long)
    counts, clients, classes = _without_totals(path, counts, clients, classes, totals)
    for names, what in ((clients, "clients"), (classes, "classes")):
        warn_of_look_alikes(names, what, path)
    return counts, clients, classes


def lists_samples(path: str | Path) -> bool:
    """Return whether a table has a row for each sample, and not counts: a column of labels, and none of counts."""
    sheet = Sheet(Path(path), "counts, or a row for each sample")
    words = [plain(name) for name in sheet.header]
    labels = [column for column, word in enumerate(words) if word in CLASS_WORDS]
    if not labels or COUNT_WORDS.intersection(words):
        return False
    owners = [column for column, word in enumerate(words) if word in CLIENT_WORDS]
    return sheet.is_text(labels[0]) or any(_repeats([cells[owner] for _, cells in sheet]) for owner in owners)


def write_counts(
    path: Path | TextIO, counts: FloatArray, clients: Sequence[str], classes: Sequence[str], form: Form
) -> None:
    """Write counts and names in wide or long form; see `LabelCounts.to_csv`."""
    if form not in ("wide", "long"):
        raise ArgumentError(f"form: must be 'wide' or 'long', not {form!r}")
    try:
        with path.open("w", encoding="utf-8", newline="") if isinstance(path, Path) else nullcontext(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("client", *classes) if form == "wide" else _LONG)
            for client, row in zip(clients, counts, strict=True):
                cells = [written(amount) for amount in row.tolist()]
                if form == "wide":
                    writer.writerow((client, *cells))
                else:
                    writer.writerows((client, *pair) for pair in zip(classes, cells, strict=True))
    except OSError as error:
        raise ArgumentError(f"{path}: can't be written: {error.strerror}") from None


def read_shares(path: Path, classes: Sequence[str], decimal: Decimal | None) -> list[float]:
    """Read an amount for each class from a file; see `read_target`."""
    sheet = Sheet(path, "class,share, or a header of class names over one row of shares", decimal)
    sheet.check_header()
    shares = _by_class(sheet, classes, {"share"})
    for name in classes:
        if name not in shares:
            raise ArgumentError(f"{path}: no share for class {name!r}; write 0 where the target has none of it")
    return [shares[name] for name in classes]


def read_own(path: Path, classes: Sequence[str], client: str | None, decimal: Decimal | None) -> list[float]:
    """Read one client's samples of each class; see `LabelCounts.read_own`."""
    sheet = Sheet(path, "class,count, a header of class names over a row of counts, or a row a client", decimal)
    words = [plain(name) for name in sheet.header]
    named, pairs = not words[0] or CLIENT_WORDS.intersection(words), _class_and_amount(words, COUNT_WORDS) is not None
    if named or (not pairs and any(map(sheet.is_text, range(len(words))))):
        if not named and len(words) <= 2:
            sheet.fail(sheet.line, f"the header has no classes, no column 'count' (expected {sheet.expected})")
        counts, clients, columns = read_counts(path, decimal=decimal)
        if client is None and len(clients) > 1:
            raise ArgumentError(
                f"{path}: has {len(clients):,} clients; say which by client (--client), such as {clients[0]}"
            )
        if client is not None and client not in clients:
            raise ArgumentError(f"{path}: has no client {client!r}{nearest(client, clients)}")
        found = dict(zip(columns, counts[clients.index(client) if client else 0].tolist(), strict=True))
    elif client is not None:
        raise ArgumentError(f"{path}: has the counts of one client, without a name; leave out client (--client)")
    else:
        sheet.check_header()
        found = _by_class(sheet, None, COUNT_WORDS)
    if all(map(str.isdecimal, found)) and not all(map(str.isdecimal, classes)):
        found = {classes[int(name)] if int(name) < len(classes) else name: found[name] for name in found}
    for name in found:
        if name not in classes:
            raise ArgumentError(f"{path}: the model has no class {name!r}{nearest(name, classes)}")
    return [found.get(name, 0.0) for name in classes]


def _class_and_amount(words: Sequence[str], amount_words: Set[str]) -> tuple[int, int] | None:
    """Return the columns of classes and amounts where there are these two and no other."""
    pairs = [pair for pair in ((0, 1), (1, 0)) if len(words) == 2]
    return next((pair for pair in pairs if words[pair[0]] in CLASS_WORDS and words[pair[1]] in amount_words), None)


def _by_class(sheet: Sheet, classes: Sequence[str] | None, amount_words: Set[str]) -> dict[str, float]:
    """Return an amount for each class (of those, if any) that is named in two columns, or in a header over one row."""
    words = [plain(name) for name in sheet.header]
    if (pair := _class_and_amount(words, amount_words)) is not None:
        named, amounts = sheet.texts(pair[0], "class"), sheet.amounts(pair[1:])[:, 0]
        lines = [line for line, _ in sheet]
    else:
        rows = sheet.amounts(range(len(words)))
        if len(rows) > 1:
            sheet.fail_row(1, f"a second row of numbers (expected {sheet.expected})")
        named, amounts, lines = sheet.header, rows[0], [sheet.line] * len(words)
    found: dict[str, float] = {}
    for name, amount, line in zip(named, amounts.tolist(), lines, strict=True):
        if name in found:
            sheet.fail(line, f"class {name!r} occurs twice")
        if classes is not None and name not in classes:
            unknown = f"the counts have no class {name!r}{nearest(name, classes)}; give it a column of zeros there"
            sheet.fail(line, f"{name!r} looks like a total; take it out" if _TOTAL.fullmatch(name) else unknown)
        found[name] = amount
    return found


def _client_column(sheet: Sheet, client: str | None) -> int:
    """Return the column of client names: the one that is asked for, is called so, or is the only one of text."""
    at = sheet.column("client", CLIENT_WORDS, client)
    if at is None:
        words = [plain(name) for name in sheet.header]
        free = [column for column, word in enumerate(words) if word not in CLASS_WORDS | COUNT_WORDS]
        if not (len(words) == 3 and len(free) == 1):  # beside a class and a count
            # Without a name: the index of a table of pandas or R.
            free = [0] if not words[0] else [column for column in free if sheet.is_text(column)]
            if words[0] and all(decimals(name) for column, name in enumerate(sheet.header) if [column] != free):
                free = []  # the header is a row of counts
        if len(free) != 1:
            sheet.fail(
                sheet.line, "no column 'client' in the header: say by client (--client) which column names the "
                f"clients, or rename it (expected {sheet.expected})"
            )  # fmt: skip
        at = free[0]
    name = sheet.header[at]
    if client is None and name and not plain(name).startswith("client"):
        warnings.warn(f"{sheet.path}: clients are named by the column {name!r}", DataWarning, stacklevel=4)
    return at


def _long_columns(sheet: Sheet, others: list[int]) -> tuple[int, int] | None:
    """Return the columns of classes and counts where a row is a client and a class; None where the table is wide."""
    if len(others) != 2:
        return None
    for label, count in permutations(others):
        is_class, is_count = plain(sheet.header[label]) in CLASS_WORDS, plain(sheet.header[count]) in COUNT_WORDS
        if (is_class and is_count) or ((is_class or is_count) and sheet.is_text(label) and not sheet.is_text(count)):
            return label, count
    return None


def _wide(sheet: Sheet, at: int, others: list[int]) -> Table:
    clients = sheet.texts(at, "client")
    if _repeats(clients):
        lines, name = [line for line, _ in sheet], next(name for name, times in Counter(clients).items() if times > 1)
        first, again = [row for row, own in enumerate(clients) if own == name][:2]
        how = f"; if each row is one sample, count them: fedskew counts {sheet.path} --label COLUMN"
        said = f"client {name!r} occurs twice; its first row is line {lines[first]}"
        sheet.fail(lines[again], said + how * (len(others) < 3))
    return sheet.amounts(others), clients, [sheet.header[column] for column in others]


def _long(sheet: Sheet, at: int, label: int, count: int) -> Table:
    of_rows = sheet.texts(at, "client"), sheet.texts(label, "class")
    clients, classes = (list(dict.fromkeys(names)) for names in of_rows)
    if all(name.isdecimal() for name in classes):
        classes.sort(key=int)
    places = [{name: place for place, name in enumerate(names)} for names in (clients, classes)]
    counts = np.full((len(clients), len(classes)), np.nan)
    for (line, cells), amount in zip(sheet, sheet.amounts([count])[:, 0], strict=True):
        pair = places[0][cells[at]], places[1][cells[label]]
        if not np.isnan(counts[pair]):
            sheet.fail(line, f"client {cells[at]!r} and class {cells[label]!r} occur together a second time")
        counts[pair] = amount
    return np.nan_to_num(counts), clients, classes


def _repeats(names: Sequence[str]) -> bool:
    return len(set(names)) < len(names)


def _without_totals(
    path: Path, counts: FloatArray, clients: list[str], classes: list[str], totals: Totals | None
) -> Table:
    """Leave out rows and columns that sum up the others, with a DataWarning for each."""
    # One that is called a total and is not the sum of the others is refused where `totals` is None; one of another name
    # that is the sum of all others, or is called a mean or the like, stays then.
    rows, columns = (np.array([bool(_TOTAL.fullmatch(name)) for name in names]) for names in (clients, classes))
    if totals == "keep" or rows.all() or columns.all():  # there would be nothing else
        return counts, clients, classes
    kept = []
    for table, names, totalled, others, place, what in (
        (counts, clients, rows, columns, "row", "client"),
        (counts.T, classes, columns, rows, "column", "class"),
    ):
        lines = table[:, ~others]
        means, whole = np.array([bool(_MEAN.fullmatch(name)) for name in names]), lines[~totalled].sum(axis=0)
        counts_them = any(np.allclose(line, whole, rtol=1e-6, atol=1e-9) for line in lines[totalled])
        means &= not (counts_them or (totalled | means).all())  # there would be nothing else
        inner = lines[~(totalled | means)]
        expected = inner.sum(axis=0)
        sums = (np.abs(2 * lines - expected) <= 1e-9 * expected).all(axis=1) & ~(totalled | means)
        # of fewer lines, or of fewer cells, it may be chance
        sums &= (inner.sum(axis=1) > 0).sum() > 2 and (expected > 0).sum() > 1
        for name, line, is_total, is_sum, is_mean in zip(names, lines, totalled, sums, means, strict=True):
            if is_total and totals is None and not np.allclose(line, expected, rtol=1e-6, atol=1e-9):
                where = int(np.argmax(np.abs(line - expected)))
                raise ArgumentError(
                    f"{path}: the {place} {name!r} is called a total and is not the sum of the others "
                    f"({line[where]:.10g} where they have {expected[where]:.10g}); say by totals (--totals) whether to "
                    f"'drop' it or to 'keep' it as a {what}"
                )
            if is_total or is_sum or is_mean:
                kind = "is the sum of all others" if is_sum else "has the name of a statistic"
                said = f"left out (--totals keep counts it as a {what})"
                if not is_total and totals is None:
                    said = f"counted as a {what}; if it is none: --totals drop"
                _warn(f"{path}: the {place} {name!r} {'is a total' if is_total else kind}, and was {said}")
        kept.append(~(totalled | ((sums | means) & (totals == "drop"))))
    return counts[np.ix_(*kept)], list(compress(clients, kept[0])), list(compress(classes, kept[1]))


def _warn(text: str) -> None:
    warnings.warn(text, DataWarning, stacklevel=5)
