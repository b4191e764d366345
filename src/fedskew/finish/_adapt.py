"""The model moved to the target's label mix: calibration on held-out samples, then the target's prior.

Alexandari, Kundaje and Shrikumar, "Maximum Likelihood with Bias-Corrected Calibration is Hard-To-Beat at Label Shift
Adaptation", ICML 2020:

    p_target(y | x) ~ softmax(z / T + b)_y q_y        z: the trained model's logits

Temperature T and biases b maximise the likelihood of samples that no client trained on, each class with the same total
weight; the mix q is estimated from the model's predictions for the target's unlabelled samples (`labels.estimate_mix`).
Both are folded into the last layer: its weight is divided by T, and its bias becomes bias / T + b + log q.

The likelihood is maximised by damped Newton steps on sums (loss, gradient, curvature: 1 + (C+1) + (C+1)^2 numbers), so
clients send nothing about single samples: about eight exchanges, then one of counts by class and outcome.
"""

from __future__ import annotations  # what annotations name is loaded late

import math
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedskew import labels
from fedskew.components import Cost
from fedskew.errors import ArgumentError
from fedskew.finish._protocol import MOST, Ask, Finish, Finished, Head, Known, Observed, Source, not_counts
from fedskew.hooks import Named
from fedskew.labels import EDGES, NEVER, outcome_cells, outcome_table
from fedskew.parameters import FloatArray, component

BINS = len(EDGES) + 1

LEAST_SAMPLES = 30
"""Fewest samples of a target site for an estimate of its mix, however sure the model is of them."""

MOST_EXCHANGES = 20
"""Most exchanges for a calibration; after that its best point so far is taken."""

ROUNDING = 1e-5
"""Tolerance of a curvature's checks, as a share of its largest number or of 1; a sure model leaves only rounding."""


@component
class Adapt(Finish):
    """The last layer calibrated on held-out samples and moved to the target's label mix.

    The mix is estimated from the target's unlabelled samples; without any, it is the mix that the server knows
    (`[target] mix`).

    Attributes:
        estimator: How the mix is estimated (see `labels.estimate_mix`): "gls", "em-cells" or "bbse".
        on_misfit: What to do if the target's samples are not a mix of the held-out classes (`labels.estimate_mix`):
            "keep" the trained model, or move it all the same and "warn".
    """

    paper: ClassVar[str] = "Alexandari et al., ICML 2020"
    cost: ClassVar[Cost] = Cost(numbers=("(C+1)(C+2) up, about 8 times, once",))
    asks: ClassVar[frozenset[Source]] = frozenset({"held_out"})
    most_questions: ClassVar[int] = 24

    estimator: Literal["gls", "em-cells", "bbse"] = "gls"
    on_misfit: Literal["keep", "warn"] = "keep"

    def lacks(self, known: Known) -> str | None:
        """See `Finish.lacks`."""
        if "target" not in known.sources and known.target is None:
            return (
                "needs a target: target.mix, or unlabelled samples (a partition rule with a target client, or "
                "target.mix = 'estimate' with target.truth)"
            )
        return super().lacks(known)

    def statistics(self, question: Named, observed: Observed) -> dict[str, Tensor]:
        """Return, as asked, sizes, sums for a Newton step, or counts of outcome cells; see `Finish.statistics`."""
        logits = observed.logits.double().cpu().numpy()
        classes = logits.shape[1]
        true = None if observed.targets is None else observed.targets.cpu().numpy()
        if "biases" not in question:
            assert true is not None, "sizes are only asked of labelled samples"
            squares = labels.CalibrationSums.spread_of(logits) ** 2 * logits.size
            return {"sizes": _tensor(np.bincount(true, minlength=classes)), "squares": _tensor(np.array([squares]))}
        slope, biases = float(question["slope"]), question["biases"].double().cpu().numpy()
        biases = np.where(biases > NEVER, biases, -np.inf)
        if "weights" in question:
            assert true is not None, "a calibration needs labelled samples"
            weights = question["weights"].double().cpu().numpy()[true]
            kept = (weights > 0) & np.isfinite(biases[true])
            sums = labels.CalibrationSums.of(logits[kept], true[kept], slope, biases, weights[kept])
            return {name: _tensor(np.atleast_1d(part)) for name, part in sums._asdict().items()}
        cells = outcome_cells(slope * logits + biases, logits=True)
        if true is None:
            return {"cells": _tensor(np.bincount(cells, minlength=classes * BINS))}
        return {"tables": _tensor(outcome_table(true, cells, classes, BINS))}

    def refuse(self, question: Named, answer: Named, samples: FloatArray | None) -> str | None:
        """See `Finish.refuse`."""
        if "cells" in answer:
            reason = not_counts(answer["cells"], None)
            return reason and f"its cells {reason}"
        for name in ("sizes", "tables"):
            if name in answer and (reason := not_counts(answer[name], samples)) is not None:
                return f"its {name} {reason}"
        if any(float(part.abs().max()) > MOST for part in answer.values()):
            return f"a number is above {MOST:g}"
        for name in ("squares", "loss"):
            if name in answer and float(answer[name]) < 0:
                return f"its {name} is below 0"
        if "curvature" in answer:
            curvature = answer["curvature"].double()
            off = ROUNDING * max(1.0, float(curvature.abs().max()))
            if not torch.allclose(curvature, curvature.T, rtol=0, atol=off):
                return "its curvature is not symmetric"
            if float(torch.linalg.eigvalsh(curvature).min()) < -off:
                return "its curvature is negative in some direction, which no loss has"
        return None

    def finish(self, head: Head, ask: Ask, known: Known) -> Finished:
        """Calibrate, estimate the mix, and move the last layer; see `Finish.finish`."""
        calibration, notes = _calibrated(ask)
        held = np.array(notes["held_out"]) > 0
        if "target" in known.sources:
            question = {"slope": torch.tensor(1 / calibration.temperature), "biases": _finite(calibration.biases)}
            tables, cells = ask("held_out", **question)["tables"], ask("target", **question)["cells"]
            estimate = labels.estimate_mix(tables.numpy(), cells.numpy(), self.estimator)
            notes |= _said(estimate)
            mix = estimate.mix
            if known.is_estimated and (not estimate.is_sure or float(cells.sum()) < LEAST_SAMPLES):
                return Finished(head, {**notes, "kept": "no estimate of the target's mix is sure enough"})
            if estimate.misfit and self.on_misfit == "keep":
                return Finished(head, {**notes, "kept": "the target's samples are no mix of the held-out classes"})
        elif known.target is not None:
            mix = np.where(held, known.target, 0.0)
            if not mix.any():
                raise ArgumentError("target: no held-out sample is of a class that its mix has a share of")
            notes["mix"] = (mix / mix.sum()).tolist()
        else:
            raise ArgumentError("target: there are neither unlabelled samples of it nor a mix")
        return Finished(moved(head, calibration, mix), notes)


@component
class Calibrate(Adapt):
    """The calibration alone, which the notes have, for an even mix of the classes that have held-out samples."""

    def lacks(self, known: Known) -> str | None:
        """See `Finish.lacks`."""
        return Finish.lacks(self, known)

    def finish(self, head: Head, ask: Ask, known: Known) -> Finished:
        """Calibrate; the last layer stays as it is."""
        return Finished(head, _calibrated(ask)[1])


def _calibrated(ask: Ask) -> tuple[labels.Calibration, dict[str, Any]]:
    """Calibrate on the held-out samples; return the calibration, and what is said of it."""
    first = ask("held_out")
    sizes = first["sizes"].numpy()
    held = sizes > 0
    weights = np.divide(1 / max(held.sum(), 1), sizes, out=np.zeros(len(sizes)), where=held)

    def sums(slope: float, biases: FloatArray) -> labels.CalibrationSums:
        found = ask("held_out", slope=torch.tensor(slope), biases=_finite(biases), weights=_tensor(weights))
        return labels.CalibrationSums(float(found["loss"]), found["gradient"].numpy(), found["curvature"].numpy())

    spread = math.sqrt(float(first["squares"]) / max(sizes.sum() * len(sizes), 1))
    calibration = labels.Calibration.of_sums(sums, weights * sizes, spread, MOST_EXCHANGES)
    return calibration, {
        "temperature": _plain(calibration.temperature),
        "biases": [_plain(bias) for bias in calibration.biases.tolist()],
        "held_out": sizes.astype(int).tolist(),
    }


def moved(head: Head, calibration: labels.Calibration, mix: FloatArray) -> Head:
    """Return the layer whose softmax is the calibrated probabilities times the mix, normalised; a class without a
    held-out sample, or a share of the mix, is never predicted."""
    added, slope = _tensor(calibration.offsets(mix)).to(head.bias), 1 / calibration.temperature
    return Head(head.weight * slope, torch.where(added > NEVER, head.bias * slope + added, added))


def _said(estimate: labels.MixEstimate) -> dict[str, Any]:
    """Return an estimate as plain values."""
    return {
        "mix": estimate.mix.tolist(),
        "standard_errors": estimate.standard_errors.tolist(),
        "p_value": _plain(estimate.p_value),
        "misfit": estimate.misfit,
        "unseen": list(estimate.unseen),
    }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _finite(biases: FloatArray) -> Tensor:
    return _tensor(np.maximum(biases, NEVER))


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))
