"""Prior: the common model with a client's own label mix in place of the federation's.

    p_k(y | x) ~ softmax(z / T + b)_y q_y / r_y        z: the common model's logits

T and b calibrate the logits on held-out samples of all clients (Alexandari, Kundaje and Shrikumar, "Maximum Likelihood
with Bias-Corrected Calibration is Hard-To-Beat at Label Shift Adaptation", ICML 2020), r is the label mix of these
samples, and q the client's own: its counts and half a sample more of each class, or an estimate from its unlabelled
samples (`labels.estimate_mix`), which follows a mix that changes. It is Bayes' rule where each class looks the same at
every client (Saerens, Latinne and Decaestecker, Neural Computation 2002).

Nothing is trained at the client, and what it takes of it are as many numbers as there are classes, so a client that
never took part can have its model too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew import labels
from fedskew.components import Cost
from fedskew.errors import ArgumentError
from fedskew.labels import EDGES, outcome_cells, outcome_table
from fedskew.parameters import component

FloatArray = NDArray[np.float64]

BINS = len(EDGES) + 1


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
        """Calibrate logits, `(samples, classes)`, on their true classes, each sample with the same weight."""
        outputs, true = np.asarray(logits, dtype=np.float64), np.asarray(targets, dtype=np.int64)
        calibration = labels.calibrate(outputs, true, np.ones(len(true)))
        classes = outputs.shape[1]
        tables = outcome_table(true, outcome_cells(calibration.apply(outputs)), classes, BINS)
        return cls(calibration, tables.sum(axis=1) / len(true), tables)

    def estimate(self, logits: ArrayLike) -> labels.MixEstimate:
        """Estimate the label mix of unlabelled samples from their logits, `(samples, classes)`."""
        if self.tables is None:
            raise ArgumentError("tables: an estimate of a mix needs the held-out samples by class and outcome")
        cells = outcome_cells(self.calibration.apply(logits))
        return labels.estimate_mix(self.tables, np.bincount(cells, minlength=self.tables.shape[1]))


@component
class Prior:
    """The common model's calibrated probabilities under the client's own label mix.

    Attributes:
        mix: Where the client's mix is from: "counts" of its training samples, or an "estimate" from the unlabelled
            samples at hand, where that is sure enough (`labels.MixEstimate.is_sure`); else counts all the same.
    """

    paper: ClassVar[str] = "Saerens et al., Neural Computation 2002"
    cost: ClassVar[Cost] = Cost(numbers=("(C+1)(C+2) up, about 8 times, once",))

    mix: Literal["counts", "estimate"] = "counts"

    def move(self, logits: ArrayLike, held_out: HeldOut, counts: ArrayLike) -> FloatArray:
        """Return one client's logits, `(samples, classes)`, of the common model's.

        Args:
            counts: The client's training samples of each class, `(classes,)`.
        """
        outputs, calibration = np.asarray(logits, dtype=np.float64), held_out.calibration
        own = self._own_mix(outputs, held_out, counts)
        moved: FloatArray = outputs / calibration.temperature + calibration.offsets(own, held_out.mix)
        return moved

    def _own_mix(self, logits: FloatArray, held_out: HeldOut, counts: ArrayLike) -> FloatArray:
        if self.mix == "estimate" and len(logits):
            estimate = held_out.estimate(logits)
            if estimate.is_sure and not estimate.misfit:
                return estimate.mix
        return labels.own_mix(counts, len(held_out.mix))
