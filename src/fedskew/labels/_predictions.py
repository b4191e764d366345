"""A model's predictions on held-out and on unlabelled samples, read from tables that people make elsewhere.

Two forms. A row for each sample: the model's probability of each class in columns named by the classes, or a column
`predicted` (and `confidence`, the largest probability); held-out samples also have a column `label`. Or counts: for
held-out samples a row for each class and a column for each outcome cell, for the target one row under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError
from fedskew.labels._calibration import calibrate
from fedskew.labels._counts import FloatArray
from fedskew.labels._outcomes import EDGES, MixMethod, outcome_cells, outcome_table
from fedskew.labels._target_mix import MixEstimate, estimate_mix
from fedskew.names import CLASS_WORDS
from fedskew.sheets import Decimal, Sheet

_PREDICTED = frozenset({"predicted", "prediction", "pred"})
_CONFIDENCE = frozenset({"confidence", "probability", "score"})
_ROUNDING = 0.02
_TINY = 1e-12


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of a model on held-out and on unlabelled samples.

    Attributes:
        tables: Held-out samples by true class and outcome cell, shape `(classes, cells)`.
        cells: The target's samples by outcome cell, shape `(cells,)`.
        held_out: Probabilities of the held-out samples, and their classes; None where the files hold none.
        target: Probabilities of the target's samples, likewise.
    """

    classes: tuple[str, ...]
    tables: FloatArray
    cells: FloatArray
    held_out: tuple[FloatArray, FloatArray] | None = None
    target: FloatArray | None = None

    def estimate(self, method: MixMethod = "gls") -> MixEstimate:
        """Estimate the target's label mix; `em` calibrates the probabilities of every class, which it needs, first."""
        if method != "em":
            return estimate_mix(self.tables, self.cells, method)
        if self.held_out is None or self.target is None:
            raise ArgumentError(
                "method: em takes each sample's probability of every class; give both files so, or take gls"
            )
        probabilities, labels = self.held_out
        calibration = calibrate(np.log(probabilities.clip(_TINY)), labels)
        return estimate_mix(self.tables, calibration.apply(np.log(self.target.clip(_TINY))), "em")

    @staticmethod
    def read(
        predictions: str | Path,
        tables: str | Path,
        edges: Sequence[float] = EDGES,
        decimal: Decimal | None = None,
    ) -> Outcomes:
        """Read a model's predictions on the target's unlabelled samples, and on held-out labelled ones.

        Args:
            predictions: Of the target: probabilities in columns named by the classes, or `predicted` and perhaps
                `confidence`; or one row of counts under the names of outcome cells.
            tables: Of held-out samples that the model was not trained on: the same columns and `label`, the class; or
                counts, a row for each class.
            edges: Where the cells of a predicted class are divided by its probability, rising, between 0 and 1.

        Raises:
            ArgumentError: A file can't be read or understood; the message names file, line and column.
        """
        cuts = np.asarray(edges, dtype=float)
        if cuts.ndim != 1 or not ((cuts > 0) & (cuts < 1)).all() or (np.diff(cuts) <= 0).any():
            raise ArgumentError(f"bins: must rise and lie between 0 and 1, such as 0.5,0.8,0.95, not {list(edges)}")
        held_out, target = (_sheet(Path(path), decimal) for path in (tables, predictions))
        label = held_out.column("label", CLASS_WORDS)
        if label is None:
            held_out.fail(held_out.line, "no column 'label' in the header: the true class of each held-out sample")
        labels = held_out.texts(label, "class")
        if held_out.column("predicted", _PREDICTED) is not None:
            return _from_predicted(held_out, target, labels, cuts)
        names = [name for column, name in enumerate(held_out.header) if column != label]
        values = held_out.amounts([held_out.header.index(name) for name in names])
        for name in names:
            if name not in target.header:
                target.fail(target.line, f"no column {name!r}, which {held_out.path} has")
        new = target.amounts([target.header.index(name) for name in names])
        sums = values.sum(axis=1)
        odd = np.abs(sums - 1) > _ROUNDING
        if not odd.any():
            return _from_probabilities(held_out, target, names, values, new, labels, cuts)
        if len(set(labels)) < len(labels):
            row = int(np.argmax(odd))
            twice = next(name for place, name in enumerate(labels) if name in labels[:place])
            held_out.fail(
                _line(held_out, row),
                f"the row sums to {sums[row]:.6g}, so it holds no probabilities of all classes; and {twice!r} "
                "occurs in two rows, so they are no counts of a class each",
            )
        if len(new) > 1:
            wrong = "a second row (expected one row of counts, as the other file holds counts)"
            target.fail(_line(target, 1), wrong)
        return Outcomes(tuple(labels), values, new[0])


def _sheet(path: Path, decimal: Decimal | None) -> Sheet:
    sheet = Sheet(path, "a header, such as predicted,confidence, and a row for each sample", decimal)
    sheet.check_header()
    return sheet


def _line(sheet: Sheet, row: int) -> int:
    return [line for line, _ in sheet][row]


def _from_predicted(held_out: Sheet, target: Sheet, labels: list[str], cuts: FloatArray) -> Outcomes:
    sheets = held_out, target
    columns = [sheet.column("predicted", _PREDICTED) for sheet in sheets]
    if columns[1] is None:
        target.fail(target.line, f"no column 'predicted' in the header, which {held_out.path} has")
    predicted = [sheet.texts(column or 0, "class") for sheet, column in zip(sheets, columns, strict=True)]
    names = {*labels, *predicted[0], *predicted[1]}
    classes = sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)
    confidences = [_confidences(sheet) for sheet in sheets]
    for sheet, own, other in zip(sheets, confidences, reversed(confidences), strict=True):
        if own is None and other is not None:
            sheet.fail(sheet.line, "no column 'confidence' in the header, which the other file has")
    places = {name: place for place, name in enumerate(classes)}
    cells = [np.array([places[name] for name in column]) for column in predicted]
    bins = 1
    for place, sure in enumerate(confidences):
        if sure is not None:
            cells[place], bins = outcome_cells(cells[place], sure, cuts), len(cuts) + 1
    return _outcomes(classes, np.array([places[name] for name in labels]), cells, bins)


def _confidences(sheet: Sheet) -> FloatArray | None:
    column = sheet.column("confidence", _CONFIDENCE)
    if column is None:
        return None
    values = sheet.amounts([column])[:, 0]
    if values.max() > 1:
        row = int(values.argmax())
        sheet.fail(_line(sheet, row), f"{values[row]:.6g}, expected a probability from 0 to 1", sheet.header[column])
    return values


def _from_probabilities(
    held_out: Sheet,
    target: Sheet,
    classes: list[str],
    values: FloatArray,
    new: FloatArray,
    labels: list[str],
    cuts: FloatArray,
) -> Outcomes:
    places = {name: place for place, name in enumerate(classes)}
    for row, name in enumerate(labels):
        if name not in places:
            wrong = f"the label {name!r} has no column of probabilities; columns: {', '.join(classes)}"
            held_out.fail(_line(held_out, row), wrong)
    off = np.abs(new.sum(axis=1) - 1) > _ROUNDING
    if off.any():
        row = int(np.argmax(off))
        target.fail(_line(target, row), f"the probabilities sum to {new[row].sum():.6g}, not to 1")
    true = np.array([places[name] for name in labels])
    cells = [outcome_cells(each.argmax(axis=1), each.max(axis=1), cuts) for each in (values, new)]
    return _outcomes(classes, true, cells, len(cuts) + 1, (values, true.astype(float)), new)


def _outcomes(
    classes: list[str], true: NDArray[np.int64], cells: list[NDArray[np.int64]], bins: int, *probabilities: Any
) -> Outcomes:
    """Count the outcome cells of held-out samples by class, and those of the target."""
    tables = outcome_table(true, cells[0], len(classes), bins)
    totals = np.bincount(cells[1], minlength=len(classes) * bins).astype(float)
    return Outcomes(tuple(classes), tables, totals, *probabilities)
