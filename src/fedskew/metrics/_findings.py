"""Figures of a model where a sample may have several labels, or none: each label is a question of its own, yes or no.

AUROC and PR-AUC (average precision) are scikit-learn's, mean over the labels that some samples have and others lack. A
label is predicted at a probability of one half or more; accuracy is the share of samples whose labels are all right.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew import findings
from fedskew.metrics._measures import mean_known
from fedskew.metrics._scores import Ranked, Scores, drawn_again, ends, over_classes


def finding_figures(logits: ArrayLike, targets: ArrayLike) -> dict[str, Any]:
    """Compute the figures of logits, `(samples, classes)`, by bits of labels, `(samples,)` (see `Dataset.multi_label`).

    `aurocs`, `pr_aucs` and `recalls` have a value for each label; NaN where one is undefined, as all that is made of
    probabilities is where a logit is not finite.
    """
    z = np.array(logits.detach().cpu() if hasattr(logits, "detach") else logits, dtype=np.float64)
    truth = findings.as_table(targets, z.shape[1]).astype(bool)
    said = z >= 0
    parts = ((~truth & ~said, ~truth & said), (truth & ~said, truth & said))
    table = np.array([[part.sum(axis=0) for part in row] for row in parts]).transpose(2, 0, 1)
    found = of_counts(table, int((truth == said).all(axis=1).sum()))
    aurocs, pr_aucs = np.full((2, z.shape[1]), np.nan)
    loss = math.nan
    if np.isfinite(z).all():
        loss = float((np.logaddexp(0, z) - truth * z).mean())
        aurocs, pr_aucs = Scores.rankings(np.exp(-np.logaddexp(0, -z)), truth)
    lists = {"aurocs": aurocs, "pr_aucs": pr_aucs}
    return found | {"loss": loss, "auroc": mean_known(aurocs), "pr_auc": mean_known(pr_aucs), **lists}


@dataclass(frozen=True, eq=False)
class FindingScores:
    """Logits of samples that may have several labels, `(samples, classes)`, and the bits of their labels."""

    logits: NDArray[np.float64]
    targets: NDArray[np.int64]

    def intervals(self, rng: np.random.Generator) -> dict[str, list[float]]:
        """Return both ends of each figure's interval, see `Scores.intervals`; a sample's labels are drawn together."""
        z, parts = self.logits, []
        truth, said = findings.as_table(self.targets, z.shape[1]).astype(bool), z >= 0
        if not z.size or not np.isfinite(z).all():
            return {}
        ranked = [Ranked(z[:, label], truth[:, label]) for label in range(z.shape[1])]
        losses, right = (np.logaddexp(0, z) - truth * z).mean(axis=1), (truth == said).all(axis=1)
        for times in drawn_again(rng, z):
            have, taken, both = (part.T.astype(float) @ times for part in (truth, said, truth & said))
            with np.errstate(invalid="ignore", divide="ignore"):
                balanced = (both / have + 1 - (taken - both) / (len(z) - have)) / 2
                f1 = 2 * both / (have + taken)
            areas = over_classes([one.areas(times) for one in ranked])
            parts.append([right @ times / len(z), *map(over_classes, (balanced, f1)), *areas, losses @ times / len(z)])
        names = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "pr_auc", "loss")
        return ends(dict(zip(names, np.concatenate(parts, axis=1), strict=True)))


def of_counts(table: NDArray[np.int64], right: int) -> dict[str, Any]:
    """Compute what follows of samples by true and predicted label, `(labels, 2, 2)`, and of those right in all."""
    rows, predicted = table.sum(axis=2).astype(np.float64), table[:, :, 1].sum(axis=1)
    negatives, positives = rows.T
    with np.errstate(invalid="ignore", divide="ignore"):
        recalls, specificities = table[:, 1, 1] / positives, table[:, 0, 0] / negatives
        f1 = np.where(positives + predicted > 0, 2 * table[:, 1, 1] / (positives + predicted), np.nan)
    return {
        "accuracy": float(right / max(table[0].sum(), 1)),
        "balanced_accuracy": mean_known((recalls + specificities) / 2),
        "macro_f1": mean_known(f1),
        "recalls": recalls,
    }
