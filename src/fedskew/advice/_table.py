"""The table of evidence: a line for each simulated federation, with its figures and what each method gained there."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import DataError
from fedskew.tables import csv_text

FloatArray = NDArray[np.float64]

SHIPPED = Path(__file__).with_name("table.csv.gz")
"""The table that comes with fedskew."""

TEXTS = ("federation", "task", "rule")
"""The columns of a table of evidence that hold texts: description, data set and partition rule of each federation."""
_GAIN, _WORST = "gain:", "worst:"


@dataclass(frozen=True)
class Evidence:
    """Simulated federations, and what each method gained there.

    Attributes:
        federations: Description of each, `(federations,)`.
        tasks: Name of the data set of each.
        rules: Name of the partition rule of each.
        names: Names of the figures that federations are compared by.
        features: Their values, shape `(federations, figures)`.
        methods: Labels of the methods.
        gains: Points of accuracy (on the target mix, where there is one) that a method is ahead of FedAvg, mean over
            seeds, shape `(federations, methods)`; NaN where it was not run.
        worst: The same of the worst class.
    """

    federations: tuple[str, ...]
    tasks: tuple[str, ...]
    rules: tuple[str, ...]
    names: tuple[str, ...]
    features: FloatArray
    methods: tuple[str, ...]
    gains: FloatArray
    worst: FloatArray

    def __len__(self) -> int:
        return len(self.federations)

    @cached_property
    def _scale(self) -> tuple[FloatArray, FloatArray]:
        spread = self.features.std(axis=0)
        return self.features.mean(axis=0), np.where(spread > 1e-9, spread, 1.0)

    def standardised(self, features: FloatArray) -> FloatArray:
        """Standardise figures by this table's mean and standard deviation; those that never vary here are only centred.

        Args:
            features: Figures, `(..., figures)`.

        Returns:
            The standardised figures, same shape.
        """
        mean, spread = self._scale
        scaled: FloatArray = (features - mean) / spread
        return scaled

    def distances(self, features: FloatArray) -> FloatArray:
        """Return a federation's distance from each of these: root mean squared difference of standardised figures.

        Args:
            features: The federation's figures, in the order of `names`.
        """
        apart = self.standardised(self.features) - self.standardised(features)
        found: FloatArray = np.sqrt((apart**2).mean(axis=1))
        return found

    def take(self, which: NDArray[np.bool_]) -> Evidence:
        """Return the sub-table of some federations.

        Args:
            which: Mask of the federations to keep, `(federations,)`.
        """
        at = np.flatnonzero(which).tolist()
        return replace(
            self,
            federations=tuple(self.federations[one] for one in at),
            tasks=tuple(self.tasks[one] for one in at),
            rules=tuple(self.rules[one] for one in at),
            features=self.features[at],
            gains=self.gains[at],
            worst=self.worst[at],
        )

    def without(self, methods: Collection[str]) -> Evidence:
        """Return the table without some methods.

        Args:
            methods: Labels of the methods to leave out.
        """
        at = [place for place, name in enumerate(self.methods) if name not in methods]
        return replace(
            self, methods=tuple(self.methods[one] for one in at), gains=self.gains[:, at], worst=self.worst[:, at]
        )

    def values(self, figures: Mapping[str, float]) -> FloatArray:
        """Return a federation's figures in the order of `names`.

        Args:
            figures: The figures by name; see `features`.
        """
        return np.array([figures[name] for name in self.names])


def is_shipped() -> bool:
    """Return whether a table comes with this fedskew."""
    return SHIPPED.exists()


def read_evidence(path: Path = SHIPPED) -> Evidence:
    """Read a table of evidence.

    Args:
        path: A `.csv.gz` file as `fedskew arena` writes it.

    Returns:
        The table.

    Raises:
        DataError: It is missing or damaged.
    """
    if path == SHIPPED and not is_shipped():
        raise DataError(
            "no table of evidence comes with this fedskew yet: make one with fedskew arena @advice, and give its "
            "evidence.csv.gz with --table"
        )
    try:
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the table of evidence can't be read: {error}") from None
    lines = list(csv.DictReader(io.StringIO(text, newline="")))
    if not lines or not set(TEXTS) <= lines[0].keys():
        raise DataError(f"{path}: is not a table of evidence; `fedskew arena` writes one to evidence.csv.gz")
    methods = tuple(name.removeprefix(_GAIN) for name in lines[0] if name.startswith(_GAIN))
    names = tuple(name for name in lines[0] if name not in TEXTS and not name.startswith((_GAIN, _WORST)))

    def numbers(columns: Sequence[str]) -> FloatArray:
        try:
            rows = [[float(line[column]) if line[column] else np.nan for column in columns] for line in lines]
        except (TypeError, ValueError, KeyError):
            raise DataError(f"{path}: a cell is missing or not a number") from None
        return np.array(rows, dtype=np.float64).reshape(len(lines), len(columns))

    return Evidence(
        federations=tuple(line["federation"] for line in lines),
        tasks=tuple(line["task"] for line in lines),
        rules=tuple(line["rule"] for line in lines),
        names=names,
        features=numbers(names),
        methods=methods,
        gains=numbers([f"{_GAIN}{method}" for method in methods]),
        worst=numbers([f"{_WORST}{method}" for method in methods]),
    )


def evidence_bytes(evidence: Evidence) -> bytes:
    """Return the content of a table's file: compressed CSV, the same bytes for the same table.

    Args:
        evidence: The table.
    """
    head = [*TEXTS, *evidence.names]
    head += [f"{what}{method}" for what in (_GAIN, _WORST) for method in evidence.methods]
    outcomes = np.hstack([evidence.gains, evidence.worst])
    lines = [
        [
            *(evidence.federations[at], evidence.tasks[at], evidence.rules[at]),
            *(f"{value:.6g}" for value in evidence.features[at]),
            *("" if np.isnan(value) else f"{value:.3f}" for value in outcomes[at]),
        ]
        for at in range(len(evidence))
    ]
    return gzip.compress(csv_text([head, *lines]).encode(), mtime=0)
