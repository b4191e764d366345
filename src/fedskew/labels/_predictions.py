"""A model's predictions on held-out and on unlabelled samples, read from tables that people make elsewhere.

Two forms. A row for each sample: the model's probability of each class in columns named by the classes, or a column
`predicted` (and `confidence`, the largest probability); held-out samples also have a column `label`. Or counts: for
held-out samples a row for each class and a column for each outcome cell, for the target one row under the same names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.errors import ArgumentError
from fedskew.findings import IntArray
from fedskew.labels._calibration import calibrate
from fedskew.labels._counts import FloatArray
from fedskew.labels._outcomes import EDGES, MixMethod, cells_of, outcome_cells, outcome_table
from fedskew.labels._target_mix import MixEstimate, estimate_mix
from fedskew.names import CLASS_WORDS
from fedskew.sheets import Decimal, Sheet

_PREDICTED = frozenset({"predicted", "prediction", "pred"})
_CONFIDENCE = frozenset({"confidence", "probability", "score"})
_WRITTEN = ["file", "class"]  # what `fedskew predict --csv` writes before the probabilities: the sample, its prediction
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
        predictions: str | Path, tables: str | Path, edges: Sequence[float] = EDGES, decimal: Decimal | None = None
    ) -> "Outcomes":
        """Read a model's predictions on the target's unlabelled samples, and on held-out labelled ones.

        Args:
            predictions: Of the target: probabilities in columns named by the classes, or `predicted` and perhaps
                `confidence`; or one row of counts under the names of outcome cells.
            tables: Of held-out samples that the model was not trained on: the same columns and `label`, the class; or
                counts, a row for each class.
            edges: Where the cells of a predicted class are divided by its probability, rising, between 0 and 1.
        """
        cuts = np.asarray(edges, dtype=float)
        if cuts.ndim != 1 or not ((cuts > 0) & (cuts < 1)).all() or (np.diff(cuts) <= 0).any():
            raise ArgumentError(f"bins: must rise and lie between 0 and 1, such as 0.5,0.8,0.95, not {list(edges)}")
        held_out, target = sheets = [
            Sheet(Path(path), "a header, such as predicted,confidence, and a row for each sample", decimal)
            for path in (tables, predictions)
        ]
        for sheet in sheets:
            sheet.check_header()
        beside = _WRITTEN if held_out.header[:2] == _WRITTEN else []
        label = _needed(held_out, "label", CLASS_WORDS.difference(beside), ": the true class of each held-out sample")
        labels = held_out.texts(label, "class")
        if held_out.column("predicted", _PREDICTED) is not None:
            return _from_predicted(sheets, labels, cuts)
        names = [name for column, name in enumerate(held_out.header) if column != label and name not in beside]
        for name in names:
            if name not in target.header:
                target.fail(target.line, f"no column {name!r}, which {held_out.path} has")
        values, new = (sheet.amounts([sheet.header.index(name) for name in names]) for sheet in sheets)
        sums = values.sum(axis=1)
        odd = np.abs(sums - 1) > _ROUNDING
        if not odd.any():
            return _from_probabilities(sheets, names, values, new, labels, cuts)
        if len(set(labels)) < len(labels):
            row = int(np.argmax(odd))
            twice = next(name for place, name in enumerate(labels) if name in labels[:place])
            held_out.fail_row(
                row,
                f"the row sums to {sums[row]:.6g}, so it holds no probabilities of all classes; and {twice!r} "
                "occurs in two rows, so they are no counts of a class each",
            )
        if len(new) > 1:
            target.fail_row(1, "a second row (expected one row of counts, as the other file holds counts)")
        return Outcomes(tuple(labels), values, new[0])


def _needed(sheet: Sheet, what: str, words: frozenset[str], why: str) -> int:
    column = sheet.column(what, words)
    return sheet.fail(sheet.line, f"no column {what!r} in the header{why}") if column is None else column


def _from_predicted(sheets: Sequence[Sheet], labels: list[str], cuts: FloatArray) -> Outcomes:
    why = f", which {sheets[0].path} has"
    predicted = [sheet.texts(_needed(sheet, "predicted", _PREDICTED, why), "class") for sheet in sheets]
    names = {*labels, *predicted[0], *predicted[1]}
    classes = sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)
    if all(sheet.column("confidence", _CONFIDENCE) is None for sheet in sheets):
        confidences, cuts = [np.zeros(len(column)) for column in predicted], cuts[:0]
    else:
        confidences = [_confidences(sheet) for sheet in sheets]
    places = {name: place for place, name in enumerate(classes)}
    true, *found = (np.array([places[name] for name in column]) for column in (labels, *predicted))
    cells = [cells_of(column, sure, cuts) for column, sure in zip(found, confidences, strict=True)]
    return _outcomes(classes, true, cells, len(cuts) + 1)


def _confidences(sheet: Sheet) -> FloatArray:
    column = _needed(sheet, "confidence", _CONFIDENCE, ", which the other file has")
    values = sheet.amounts([column])[:, 0]
    if (most := values.max()) > 1:
        wrong = f"{most:.6g}, expected a probability from 0 to 1"
        sheet.fail_row(int(values.argmax()), wrong, sheet.header[column])
    return values


def _from_probabilities(
    sheets: Sequence[Sheet], classes: list[str], known: FloatArray, new: FloatArray, labels: list[str], cuts: FloatArray
) -> Outcomes:
    places = {name: place for place, name in enumerate(classes)}
    for row, name in enumerate(labels):
        if name not in places:
            wrong = f"the label {name!r} has no column of probabilities; columns: {', '.join(classes)}"
            sheets[0].fail_row(row, wrong)
    off = np.abs(new.sum(axis=1) - 1) > _ROUNDING
    if off.any():
        row = int(np.argmax(off))
        sheets[1].fail_row(row, f"the probabilities sum to {new[row].sum():.6g}, not to 1")
    true = np.array([places[name] for name in labels])
    cells = [outcome_cells(each, cuts) for each in (known, new)]
    return _outcomes(classes, true, cells, len(cuts) + 1, (known, true.astype(float)), new)


def _outcomes(classes: list[str], true: IntArray, cells: list[IntArray], bins: int, *probabilities: Any) -> Outcomes:
    """Count the outcome cells of held-out samples by class, and those of the target."""
    tables = outcome_table(true, cells[0], len(classes), bins)
    totals = np.bincount(cells[1], minlength=len(classes) * bins).astype(float)
    return Outcomes(tuple(classes), tables, totals, *probabilities)
