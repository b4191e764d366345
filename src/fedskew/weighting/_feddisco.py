"""FedDisco: FedAvg's weights, less for clients whose labels are unlike the target's.

Ye et al., "FedDisco: Federated Learning with Discrepancy-Aware Collaboration", ICML 2023.

    a_k ~ max(0, n_k / N - a d_k + b)          N: samples of the clients that replied

d_k is the distance of client k's label mix S_k from a mix T: KL(S_k || T), divided by its sum over the clients that
replied, or ||S_k - T|| as it is. T is uniform; with `target = true` it is the target mix ([target] mix), as FedPALS has
it, and FedPALS and FedDisco then answer the same question. This follows the authors' code, in which a is 0.5, b 0.1 and
the distance KL.

Three cases are open there. A client that holds a class which T lacks has an infinite KL: here shares of T below e / C,
with e = 0.001 and C classes, count as e / C in the KL, which is 0 at least. So one stray sample costs a client little,
and one that holds only what T lacks is ln(C / e) away. If every weight would be 0 (a > 1 + b times the clients), the
weights are FedAvg's; the code stops with an error. A client without samples, or without label counts, has weight 0 and
enters no sum; in the code b would make it count.
"""

from typing import ClassVar, Literal

import numpy as np

from fedskew.errors import ArgumentError
from fedskew.labels import as_counts, as_sizes, as_target
from fedskew.parameters import Finite, FloatArray, NonNegative, Switch, component
from fedskew.weighting._protocol import Answered, as_shares

_LEAST = 1e-3
"""The smallest share of the target in KL, times the number of classes (see the top of the file)."""


def _divergences(mixes: FloatArray, mix: FloatArray) -> FloatArray:
    """KL(mixes || mix), divided by the sum; see the top of the file for what the target lacks."""
    ratios = np.divide(mixes, np.maximum(mix, _LEAST / len(mix)), out=np.ones_like(mixes), where=mixes > 0)
    far: FloatArray = np.maximum((mixes * np.log(ratios)).sum(axis=1), 0)
    return far / far.sum() if far.any() else far


@component
class FedDisco:
    """FedAvg's weights, lowered for clients whose label mix is far from uniform or from the target's.

    Attributes:
        a: How much the distance counts; the paper tunes it.
        b: What every client gets.
        distance: "kl", divided by its sum over the clients that replied, or "l2".
        target: Measure the distance from the target mix (`[target] mix`); else from uniform.
    """

    paper: ClassVar[str] = "Ye et al., ICML 2023"
    needs_label_counts: ClassVar[bool] = True

    a: NonNegative = 0.5
    b: Finite = 0.1
    distance: Literal["kl", "l2"] = "kl"
    target: Switch = False

    @property
    def needs_target(self) -> bool:
        """Whether it reads the target mix."""
        return self.target

    def weigh(self, answered: Answered) -> FloatArray:
        """Return the weights of the clients that replied; 0 without samples or without label counts."""
        if self.target and answered.target is None:
            raise ArgumentError(
                "target: FedDisco is to compare with a target label mix, and none is given; set [target] mix, or "
                "target = false"
            )
        held = as_counts(answered.counts)
        uniform = np.ones(held.shape[1])
        mix = as_target(answered.target if self.target and answered.target is not None else uniform, len(uniform))
        amounts, sums = as_sizes(answered.sizes, held), held.sum(axis=1)
        present = (sums > 0) & (amounts > 0)
        if not present.any():
            raise ArgumentError("counts: no client holds a sample")
        shares = np.where(present, amounts, 0) / amounts[present].sum()
        mixes = held[present] / sums[present, None]
        weights = np.zeros(len(held))
        far = _divergences(mixes, mix) if self.distance == "kl" else np.linalg.norm(mixes - mix, axis=1)
        weights[present] = np.maximum(shares[present] - self.a * far + self.b, 0)
        return as_shares(weights if weights.any() else shares, "counts")
