"""The losses' formulas in loops, from the papers, by name: of logits, targets, the teacher's logits and counts.

Features are the logits, and the previous model is the sent one's mirror image, as in `test_every_loss.value_of`.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import wraps

import numpy as np
import torch

from losses import OF_CLASSES, PROTOTYPES


def log_sum(values: Collection[float]) -> float:
    return math.log(sum(math.exp(value) for value in values))


def softmax(row: np.ndarray, among: Collection[int], temperature: float) -> dict[int, float]:
    total = sum(math.exp(row[c] / temperature) for c in among)
    return {c: math.exp(row[c] / temperature) / total for c in among}


def divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    return sum(share * math.log(share / q[c]) for c, share in p.items())


def taught(f, g, among: Collection[int], temperature: float, by: Collection[int] | None = None) -> float:
    """T^2 KL(teacher over `by` || student over `among`)."""
    by = among if by is None else by
    return temperature**2 * divergence(softmax(g, by, temperature), softmax(f, among, temperature)) if by else 0.0


def others(f, y: int) -> list[int]:
    return [c for c in range(len(f)) if c != y]


def shifted(f, y: int, shift: Mapping[int, float]) -> float:
    """Cross-entropy of one row among the classes that have a shift."""
    return log_sum([f[c] + value for c, value in shift.items()]) - f[y] - shift[y]


def logs(values: Collection[float]) -> dict[int, float]:
    return {c: math.log(value) for c, value in enumerate(values) if value > 0}


def cosine(a, b) -> float:
    return a @ b / math.sqrt((a @ a) * (b @ b))


def mean_of_rows(of_row: Callable[..., float]) -> Callable[..., float]:
    @wraps(of_row)
    def of_batch(logits, targets, teacher, counts, **parameters) -> float:
        rows = zip(logits, targets, teacher, strict=True)
        return sum(of_row(f, int(y), g, counts, **parameters) for f, y, g in rows) / len(logits)

    return of_batch


@mean_of_rows
def cross_entropy(f, y, g, n):
    return log_sum(f) - f[y]


fednh = cross_entropy


@mean_of_rows
def fedrs(f, y, g, n, alpha=0.5, graded=False):
    scale = [alpha + (1 - alpha) * own / max(n) if graded else (1 if own > 0 else alpha) for own in n]
    return log_sum(scale * f) - scale[y] * f[y]


@mean_of_rows
def fedlc(f, y, g, n, tau=1.0, exclude_target=False):
    margins = {c: -tau * own**-0.25 for c, own in enumerate(n) if own > 0}
    among = [f[c] + margin for c, margin in margins.items() if not (exclude_target and c == y)]
    return log_sum(among) - f[y] - margins[y] if among else 0.0


@mean_of_rows
def fedrod(f, y, g, n, least=0.0):
    return shifted(f, y, logs(np.maximum(n, least)))


def fedetf(*batch, least=1.0):
    return fedrod(*batch, least=least)


@mean_of_rows
def fedgela(f, y, g, n):
    stretched = f * n * len(n) / sum(n)
    return log_sum(stretched) - stretched[y]


@mean_of_rows
def fedvls_calibration(f, y, g, n, prior_eps=1e-9):
    return shifted(f, y, logs(n / sum(n) + prior_eps))


@mean_of_rows
def vacant_distillation(f, y, g, n):
    return taught(f, g, np.flatnonzero(n == 0).tolist(), 1.0)


def suppression(logits, targets, teacher, n, form="official", prior_eps=1e-9):
    """Official: the mask multiplies the exponent, so that a label's own entry counts as e^0."""
    total, eps = 0.0, prior_eps
    for c, p in enumerate(n / sum(n)):
        h = logits[:, c] - math.log(p + eps) + math.log(1 / len(n) + eps) if p else logits[:, c]
        exponents = h * (targets != c) if form == "official" else logits[targets != c, c]
        if p > 0 and len(exponents):
            total += p * (log_sum(exponents) - math.log(len(targets)))
    return total


@mean_of_rows
def fedntd(f, y, g, n, temperature=1.0):
    return taught(f, g, others(f, y), temperature)


@mean_of_rows
def fedlmd(f, y, g, n, temperature=1.0):
    return taught(f, g, others(f, y), temperature, [c for c in others(f, y) if n[c] <= np.mean(n)])


@mean_of_rows
def fedkd(f, y, g, n, temperature=1.0):
    return taught(f, g, range(len(f)), temperature)


@mean_of_rows
def fedekd(f, y, g, n, temperature=1.0):
    return taught(f, g, np.flatnonzero(n).tolist(), temperature)


@mean_of_rows
def feddkd(f, y, g, n, temperature=1.0, target_weight=1.0, rest_weight=1.0):
    p, pg = (softmax(row, range(len(f)), temperature)[y] for row in (f, g))
    target = temperature**2 * divergence({0: pg, 1: 1 - pg}, {0: p, 1: 1 - p})
    return target_weight * target + rest_weight * taught(f, g, others(f, y), temperature)


@mean_of_rows
def moon(z, y, sent, n, temperature=0.5):
    near, far = (math.exp(cosine(z, other) / temperature) for other in (sent, sent[::-1]))
    return -math.log(near / (near + far))


@mean_of_rows
def fpl(z, y, g, n, temperature=0.02):
    """A row whose class has no prototype adds nothing, but is counted."""
    own = PROTOTYPES[y == OF_CLASSES]
    if not len(own):
        return 0.0
    near, every = (sum(math.exp(cosine(z, p) / temperature) for p in rows) for rows in (own, PROTOTYPES))
    return -math.log(near / every) + ((z - own.mean(axis=0)) ** 2).mean()


def correlation(rows: np.ndarray) -> float:
    """The mean square of the correlation matrix's entries beside the diagonal, before it is divided by n - 1."""
    scaled = (rows - rows.mean(axis=0)) / np.sqrt(rows.var(axis=0, ddof=1) + 1e-8)
    matrix = scaled.T @ scaled
    return (matrix[~np.eye(len(matrix), dtype=bool)] ** 2).mean()


def fedmr(z, targets, g, n):
    of_classes = [z[targets == label] for label in set(targets.tolist())]
    used = [rows for rows in of_classes if len(rows) > 1]
    return sum(map(correlation, used)) / sum(map(len, used)) if used else 0.0


def feddecorr(z, targets, g, n):
    """The authors' code (bytedance/FedDecorr 973e4af), with the correlation matrix written out."""
    return correlation(z) / len(z)


def classifier_variance(logits, targets, g, n):
    """sonhamin/FedUV dd2e3c5: gamma is the mean standard deviation, unbiased, of the columns of an identity matrix."""
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    gamma = np.eye(logits.shape[1]).std(axis=0, ddof=1).mean()
    return np.maximum(gamma - shares.std(axis=0, ddof=1), 0).mean()


def uniformity(z, targets, g, n):
    """sonhamin/FedUV dd2e3c5: the median of squared distances that aren't 0, the lower middle one, is the bandwidth."""
    distances = torch.pdist(torch.tensor(z)).pow(2)
    apart = distances[distances > 1e-6]
    return (-distances / (apart.median() if len(apart) else 1)).exp().mean().item()
