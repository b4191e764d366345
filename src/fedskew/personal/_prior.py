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

from __future__ import annotations  # what annotations name is loaded late

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from fedskew import labels
from fedskew.components import Cost
from fedskew.parameters import component
from fedskew.personal._held_out import FloatArray, HeldOut
from fedskew.personal._protocol import Personal


@component
class Prior(Personal):
    """The common model's calibrated probabilities under the client's own label mix.

    Attributes:
        mix: Where the client's mix is from: "counts" of its training samples, or an "estimate" from the unlabelled
            samples at hand, where that is sure enough (`labels.MixEstimate.is_sure`); else counts all the same.
    """

    paper: ClassVar[str] = "Saerens et al., Neural Computation 2002"
    cost: ClassVar[Cost] = Cost(numbers=("(C+1)(C+2) up, about 8 times, once",))

    reads_held_out: ClassVar[bool] = True

    mix: Literal["counts", "estimate"] = "counts"

    def moved(self, logits: ArrayLike, held_out: HeldOut | None, counts: ArrayLike) -> FloatArray:
        """See `Personal.moved`."""
        assert held_out is not None, "it reads_held_out"
        outputs, calibration = np.asarray(logits, dtype=np.float64), held_out.calibration
        own = self._own_mix(outputs, held_out, counts)
        return outputs / calibration.temperature + calibration.offsets(own, held_out.mix)

    def _own_mix(self, logits: FloatArray, held_out: HeldOut, counts: ArrayLike) -> FloatArray:
        if self.mix == "estimate" and len(logits):
            estimate = held_out.estimate(logits)
            if estimate.is_sure and not estimate.misfit:
                return estimate.mix
        return labels.own_mix(counts, len(held_out.mix))
