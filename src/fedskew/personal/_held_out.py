"""What all clients are told of the samples that no client trained on, as the common model sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew import labels
from fedskew.errors import ArgumentError
from fedskew.labels import NEVER, outcome_cells, outcome_table

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class HeldOut:
    """What all clients are told of the samples that no client trained on.

    Attributes:
        calibration: Of the common model's logits.
        mix: The label mix that the calibrated probabilities are for, `(classes,)`.
        tables: These samples by true class and calibrated outcome cell (`labels.outcome_table`); None: not counted.
    """

    calibration: labels.Calibration
    mix: FloatArray
    tables: FloatArray | None = None

    @classmethod
    def of(cls, logits: ArrayLike, targets: ArrayLike) -> HeldOut:
        """Calibrate logits, `(samples, classes)`, on their true classes, each sample with the same weight.

        A class that the model never predicts (`labels.NEVER`), as after some finishes, is left out.
        """
        outputs, true = np.asarray(logits, dtype=np.float64), np.asarray(targets, dtype=np.int64)
        possible: NDArray[np.bool_] = np.logical_and.reduce(outputs > NEVER / 2, axis=0)
        outputs, kept = np.where(possible, outputs, 0.0), np.isin(true, np.flatnonzero(possible))
        calibration = labels.calibrate(outputs, true, kept.astype(float))
        cells = outcome_cells(calibration.apply(outputs))
        tables = outcome_table(true[kept], cells[kept], len(possible))
        return cls(calibration, tables.sum(axis=1) / kept.sum(), tables)

    def estimate(self, logits: ArrayLike) -> labels.MixEstimate:
        """Estimate the label mix of unlabelled samples from their logits, `(samples, classes)`."""
        if self.tables is None:
            raise ArgumentError("tables: an estimate of a mix needs the held-out samples by class and outcome")
        cells = outcome_cells(self.calibration.apply(logits))
        return labels.estimate_mix(self.tables, np.bincount(cells, minlength=self.tables.shape[1]))
