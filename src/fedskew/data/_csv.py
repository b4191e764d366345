"""A user's own table of features, in CSV."""

from __future__ import annotations

from array import array
from csv import Error, reader
from pathlib import Path

import numpy as np
import torch

from fedskew.data._dataset import Dataset, names_clients
from fedskew.data._own import RawSamples, make
from fedskew.errors import DataError
from fedskew.names import separator_of

_HEADER = 1 << 16  # characters in which the header ends
_NAMED = 40  # columns that a message names


@names_clients
def csv(
    root: Path,
    rng: np.random.Generator | None,
    label: str = "label",
    client: str | None = None,
    test: str | None = None,
    test_share: float = 0.2,
) -> Dataset:
    """Read a user's own table of features from a CSV file.

    Features are standardised with mean and deviation of the training part.

    Args:
        root: The file: a header line, then one sample a line; columns apart by commas, semicolons or tabs, UTF-8.
            Columns other than labels and clients must hold numbers, with a decimal point.
        rng: Draws the samples to hold out.
        label: Column of labels, any text.
        client: Column of clients; a column called "client" by default, if there is one.
        test: Name of a file beside it with the same columns, the test part.
        test_share: Share of every class to hold out if there is no test file.
    """
    train, header = _read(root, label, client)
    held = None
    if test is not None:
        path = root.parent / test
        held, columns = _read(path, label, client)
        if columns != header:
            raise DataError(f"{path}, line 1: its columns are not those of {root}")
    return make("csv", train, held, test_share, rng)


def _read(path: Path, label: str, client: str | None) -> tuple[RawSamples, list[str]]:
    """Return the samples of one file, and its header."""
    labels: list[str] = []
    clients: list[str] = []
    values, lines = array("d"), array("q")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = separator_of(file.read(_HEADER), path)
            file.seek(0)
            rows = reader(file, delimiter=separator)
            header = [name.strip() for name in next(rows, [])]
            label_column, client_column = _columns(path, header, label, client)
            features = [column for column in range(len(header)) if column not in (label_column, client_column)]
            if not features:
                raise DataError(f"{path}, line 1: no column is left for features")
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    raise DataError(f"{path}, line {rows.line_num}: {len(row)} values under {len(header)} columns")
                for names, named in ((labels, label_column), (clients, client_column)):
                    if named is not None:
                        names.append(row[named].strip())
                        if not names[-1]:
                            raise DataError(f"{path}, line {rows.line_num}: {header[named]!r} is empty")
                lines.append(rows.line_num)
                try:
                    values.extend([float(row[column]) for column in features])
                except ValueError:
                    raise _no_number(path, rows.line_num, header, features, row) from None
    except (OSError, UnicodeDecodeError, Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: can't be read as a CSV file: {reason}") from None
    if not labels:
        raise DataError(f"{path}: has a header and no samples")
    table = np.frombuffer(values).reshape(len(labels), len(features))
    if not np.isfinite(table).all():
        row_index, column = np.argwhere(~np.isfinite(table))[0]
        raise DataError(
            f"{path}, line {lines[row_index]}: {header[features[column]]!r} is {table[row_index, column]}, "
            "not a finite number"
        )
    return RawSamples(torch.from_numpy(table.copy()), labels, clients if client_column is not None else None), header


def _columns(path: Path, header: list[str], label: str, client: str | None) -> tuple[int, int | None]:
    """Return the positions of the label and client columns."""
    doubled = [name for name in header if header.count(name) > 1]
    if not header or doubled:
        raise DataError(f"{path}, line 1: {f'column {doubled[0]!r} appears twice' if doubled else 'no header'}")
    for option, name in (("label", label), ("client", client)):
        if name is not None and name not in header:
            columns = ", ".join(header[:_NAMED]) + (", ..." if len(header) > _NAMED else "")
            raise DataError(
                f"{path}, line 1: no column {name!r}; set data.{option} to the column of {option}s (columns: {columns})"
            )
    if client is None and "client" in header and label != "client":
        client = "client"
    return header.index(label), None if client is None else header.index(client)


def _no_number(path: Path, line: int, header: list[str], features: list[int], row: list[str]) -> DataError:
    for column in features:
        try:
            float(row[column])
        except ValueError:
            return DataError(
                f"{path}, line {line}: {header[column]!r} is {row[column]!r}, not a number; only the columns of "
                "labels and clients (options label, client) may hold text"
            )
    raise AssertionError("every feature is a number")
