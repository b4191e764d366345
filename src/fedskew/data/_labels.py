"""Labels as people write them: what is no class is refused or said before training; none becomes one by accident."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import DataError, DataWarning
from fedskew.tables import counted

_MISSING = frozenset({"", "nan", "na", "n/a", "<na>", "#n/a", "null", "nat", "?", "-", ".", "inf", "-inf"})
_VAGUE = frozenset({
    "unknown", "unk", "none", "missing", "unlabelled", "unlabeled", "undefined", "unspecified", "not available",
    "not known", "tbd",
})  # fmt: skip
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WHOLE = re.compile(r"-?\d+")
_FLAGS = {"0": 0.0, "0.0": 0.0, "false": 0.0, "1": 1.0, "1.0": 1.0, "true": 1.0}
_NONE = frozenset({"none", "no finding", "no findings"})
_MANY = 20  # classes from which on it is asked whether they are classes at all
_LIKE_NUMBERS, _LIKE_NAMES = 4, 2  # samples of a class in the mean, below which they are not
_UNLIKELY = 30


Missing: TypeAlias = Literal["refuse", "drop"]
"""What becomes of samples without a label."""
Rows: TypeAlias = NDArray[np.int64]


Label: TypeAlias = str | tuple[str, ...]
"""The class of a sample; or all that it has of several, its findings."""


Place: TypeAlias = Callable[[int], str]  # names the place of a sample, from 0


def by_number(at: int) -> str:
    """Name a sample by its number."""
    return f"sample {at + 1}"


class NoLabel(str):
    """A cell that says that a sample has no label, as it stands in the file."""

    __slots__ = ()


def of_columns(
    where: object,
    labels: Sequence[str],
    column: Callable[[str], Sequence[str]],
    separator: str | None,
    place: Place = by_number,
) -> Sequence[Label]:
    """Return the labels of a table: a column, with a separator of several in each cell, or columns of 0 and 1. A sample
    without a label has `NoLabel`, or an empty one."""
    if len(labels) != 1:
        cells = [[_FLAGS.get(cell.casefold(), cell) for cell in column(name)] for name in labels]
        return of_table(where, labels, list(zip(*cells, strict=True)), place)
    found = column(labels[0])
    return found if separator is None else [_split(where, at, cell, separator, place) for at, cell in enumerate(found)]


def of_table(
    where: object, names: Sequence[str], rows: Iterable[Sequence[Any]], place: Place = by_number
) -> list[Label]:
    """Return the findings of samples by a row of 0 and 1 of each; where a cell is missing, the sample has no label."""
    found: list[Label] = []
    for at, row in enumerate(rows):
        odd = next((place for place, cell in enumerate(row) if cell not in (0, 1)), None)
        if odd is not None and not _is_missing(str(row[odd])):
            raise DataError(
                f"{where}: {place(at)} has {row[odd]!r} for {names[odd]!r}; several labels a sample are columns of "
                "0 and 1"
            )
        own = tuple(name for name, cell in zip(names, row, strict=True) if cell == 1)
        found.append(own if odd is None else NoLabel(row[odd]))
    return found


def _split(where: object, at: int, cell: str, separator: str, place: Place) -> Label:
    if _is_missing(cell):
        return NoLabel(cell)
    pieces = tuple(dict.fromkeys(piece.strip() for piece in cell.split(separator)))
    none = [piece for piece in pieces if piece.casefold() in _NONE]
    if any(map(_is_missing, pieces)) or (none and len(pieces) > 1):
        raise DataError(f"{where}: the label {cell!r} of {place(at)} has an empty part, or says none beside another")
    return () if none else pieces


def strata(labels: Sequence[Label]) -> Sequence[str]:
    """Return the class of each sample by which samples are divided: of several findings the rarest, of none ""."""
    often = Counter(name for label in labels if isinstance(label, tuple) for name in label)
    return [
        label if isinstance(label, str) else min(label, key=lambda name: (often[name], name), default="")
        for label in labels
    ]


def prepared(
    where: object,
    parts: Sequence[Sequence[Label]],
    missing: Missing | None = None,
    numbered: Collection[str] = (),
    places: Sequence[Place] = (by_number, by_number),
) -> list[tuple[Rows, Sequence[Label]]]:
    """Return of each part of a data set the rows that have a label, and these rows' labels as names of classes. Where
    data name all classes themselves (`numbered`), they stay; `missing` None: data has no option."""
    rows = [
        np.flatnonzero([missing != "drop" or label in numbered or not _is_missing(label) for label in part])
        for part in parts
    ]
    if not len(rows[0]):
        raise DataError(f"{where}: no sample has a label")
    if lost := sum(map(len, parts)) - sum(map(len, rows)):
        _warn(f"{where}: {counted(lost, 'sample')} without a label left out")
    kept = [[part[row] for row in own.tolist()] for part, own in zip(parts, rows, strict=True)]
    if absent := {label for label in set().union(*kept) if _is_missing(label) and label not in numbered}:
        labelled = ((of, at, label) for of, part in enumerate(kept) for at, label in enumerate(part))
        gone = [one for one in labelled if one[2] in absent]
        of, at, label = gone[0]
        several = any(isinstance(one, tuple) for part in kept for one in part)
        advice = "write 0 (flags), No Finding (cell) or an empty list" if several else "give what they are a name"
        leave_out = "take them out" if missing is None else "leave them out (data.missing_labels = 'drop')"
        raise DataError(
            f"{where}: {counted(len(gone), 'sample')} without a label ({str(label)!r}, first in {places[of](at)}); "
            f"{leave_out}, or {advice}"
        )
    if isinstance(kept[0][0], tuple):
        if not numbered:  # cells that were split: another sign may stand between some
            _check_joined(where, {name for part in kept for label in part for name in label})
        if all(len(label) == 1 for part in kept for label in part):
            _warn(
                f"{where}: every sample has exactly one of its labels; if they are one-hot columns of one label, write "
                "one column of names, and a sample has one class"
            )
    elif not numbered:
        kept = as_classes(where, *([str(label) for label in part] for part in kept))
    return list(zip(rows, kept, strict=True))


def _is_missing(label: Label) -> bool:
    """Return whether a label is one of the ways to write that there is none."""
    return isinstance(label, NoLabel) or (isinstance(label, str) and label.strip().casefold() in _MISSING)


def as_classes(where: object, *parts: Sequence[str]) -> list[list[Label]]:
    """Return the labels of the parts of a data set as names of classes; whole numbers are written as such. A DataError
    says which labels are no classes, and what to do; a DataWarning, which may be none."""
    sizes = Counter(label for part in parts for label in part)
    numbers = all(map(_NUMBER.fullmatch, sizes))
    names = _whole(where, sizes) if numbers else {label: label for label in sizes}
    _check_number(where, sizes.total(), sorted(set(names.values())), numbers)
    _check_joined(where, sizes)
    for name, size in sizes.items():
        if name.casefold() in _VAGUE:
            _warn(
                f"{where}: {name!r}, of {counted(size, 'sample')}, is trained on as a class like the others; leave "
                "these out if it says that nobody knows"
            )
    return [[names[label] for label in part] for part in parts]


def whole(label: str) -> str:
    """Return a whole number as such, `1.0` as `1`, and other labels as they are."""
    return str(int(float(label))) if _NUMBER.fullmatch(label) and not float(label) % 1 else label


def _whole(where: object, labels: Collection[str]) -> Mapping[str, str]:
    """Return numbers as whole ones, which `1.0` is too."""
    for label in labels:
        if float(label) % 1:
            raise DataError(
                f"{where}: the label {label!r} is a measurement; regression is not what fedskew does: write classes, "
                "such as 'low' and 'high'"
            )
    if odd := [label for label in labels if not _WHOLE.fullmatch(label)]:
        names = {label: whole(label) for label in labels}
        _warn(f"{where}: {odd[0]!r} and the like are taken for whole numbers, as {names[odd[0]]!r}")
        return names
    return {label: label for label in labels}


def _check_number(where: object, samples: int, names: Sequence[str], numbers: bool) -> None:
    """Refuse labels of which there are too many to be classes; numbers from 0 or 1 on are the ids of some."""
    some, known = f"{', '.join(names[:3])}, ...", len(names)
    if numbers and sorted(map(int, names)) in (list(range(known)), list(range(1, known + 1))):
        return
    if known >= _MANY and samples < (_LIKE_NUMBERS if numbers else _LIKE_NAMES) * known:
        what = "measurements? Regression is not what fedskew does: write ranges" if numbers else "names of samples?"
        raise DataError(
            f"{where}: {known:,} different labels ({some}) of {samples:,} samples are hardly classes; is it the right "
            f"column? Are they {what}"
        )
    if numbers and known > _UNLIKELY:
        _warn(
            f"{where}: {known:,} different numbers ({some}) become as many classes; if they are measurements, write "
            "ranges: regression is not what fedskew does"
        )


def _check_joined(where: object, sizes: Collection[str]) -> None:
    """Refuse labels that look like several, one of which is known by itself or from another such label."""
    for sign in "|;,":
        pieces = {label: [piece.strip() for piece in label.split(sign)] for label in sizes if sign in label}
        often = Counter(piece for label in sizes for piece in set(pieces.get(label, [label])))
        for label, own in pieces.items():
            if any(often[piece] > 1 for piece in own):
                said = f"{where}: the label {label!r} looks like several"
                if sign != ",":
                    advice = f"write it without {sign!r} if it is one class, or set data.separator (--separator)"
                    raise DataError(f"{said}; {advice}")
                _warn(f"{said}; it is trained on as one class of its own")
                break


def _warn(said: str) -> None:
    warnings.warn(said, DataWarning, stacklevel=4)
