"""Figures of a model where a sample may have several labels, or none: each label is a question of its own, yes or no.

AUROC and PR-AUC (average precision) are scikit-learn's, mean over the labels that some samples have and others lack. A
label is predicted at a probability of one half or more; accuracy is the share of samples whose labels are all right.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedskew import findings
from fedskew.metrics._scores import Scores


def finding_figures(logits: ArrayLike, targets: ArrayLike) -> dict[str, Any]:
    """Compute the figures of logits, `(samples, classes)`, by bits of labels, `(samples,)` (see `Dataset.multi_label`).

    `aurocs`, `pr_aucs` and `recalls` have a value for each label; NaN where one is undefined, as all that is made of
    probabilities is where a logit is not finite.
    """
    z = np.array(logits.detach().cpu() if hasattr(logits, "detach") else logits, dtype=np.float64)
    truth = findings.as_table(targets, z.shape[1]).astype(bool)
    said = z >= 0
    hits, positives, predicted = (part.sum(axis=0).astype(np.float64) for part in (truth & said, truth, said))
    right = (truth & said).sum(axis=0) + (~truth & ~said).sum(axis=0) - hits
    with np.errstate(invalid="ignore", divide="ignore"):
        recalls, specificities = hits / positives, right / (len(z) - positives)
        f1 = np.where(positives + predicted > 0, 2 * hits / (positives + predicted), np.nan)
    found: dict[str, Any] = {
        "accuracy": float((truth == said).all(axis=1).mean()),
        "balanced_accuracy": _mean((recalls + specificities) / 2),
        "macro_f1": _mean(f1),
        "recalls": recalls,
    }
    aurocs, pr_aucs = np.full((2, z.shape[1]), np.nan)
    loss = math.nan
    if np.isfinite(z).all():
        loss = float((np.logaddexp(0, z) - truth * z).mean())
        aurocs, pr_aucs = Scores.rankings(np.exp(-np.logaddexp(0, -z)), truth)
    lists = {"aurocs": aurocs, "pr_aucs": pr_aucs}
    return found | {"loss": loss, "auroc": _mean(aurocs), "pr_auc": _mean(pr_aucs), **lists}


def _mean(values: Any) -> float:
    """Return the mean of the values that are defined; NaN where none is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
