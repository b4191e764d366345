"""Differentially private release of label counts."""

from typing import Any, Literal, TypeVar

import numpy as np

from fedskew.errors import ArgumentError
from fedskew.labels._counts import FloatArray, LabelCounts, as_counts
from fedskew.parameters import Positive, checked
from fedskew.privacy import secure_noise

Counts = TypeVar("Counts", LabelCounts, FloatArray)

SENSITIVITY = {"add-remove": 1.0, "replace": 2.0}
"""How much a client's counts can change in L1 norm when one sample is added or removed, or replaced by another."""


@checked
def privatize(
    counts: Counts,
    epsilon: Positive,
    rng: np.random.Generator | None = None,
    neighbours: Literal["add-remove", "replace"] = "add-remove",
    each: int = 1,
) -> Counts:
    """Add Laplace noise to label counts and clamp them at 0: an epsilon-differentially private release.

    The scale is sensitivity / epsilon; the sensitivity is 1 where neighbouring data sets differ by one sample more or
    less, 2 where one sample is replaced (FedEntOpt, section V, uses 1 / epsilon with epsilon 0.5). Clamping comes after
    the noise, so it costs no privacy; nothing is rounded. The guarantee covers one release of these counts, not sizes
    sent elsewhere.

    Args:
        counts: Label counts, shape `(clients, classes)`.
        rng: Source of reproducible noise, for simulation only: floating-point Laplace noise leaks. Without it the noise
            comes from opendp's secure mechanism (extra `fedskew[dp]`).
        each: Most counts to which one sample adds 1, as of several labels to all: the sensitivity is times as much.
    """
    held = as_counts(counts)
    if neighbours not in SENSITIVITY:
        raise ArgumentError(f"neighbours: must be 'add-remove' or 'replace', not {neighbours!r}")
    scale = SENSITIVITY[neighbours] * each / epsilon
    if rng is None:
        dp = secure_noise()
        domain = dp.vector_domain(dp.atom_domain(T=float, nan=False))
        mechanism: Any = dp.m.make_laplace(domain, dp.l1_distance(T=float), scale=scale)
        noisy = np.array(mechanism(held.ravel().tolist())).reshape(held.shape)
    elif isinstance(rng, np.random.Generator):
        noisy = rng.laplace(scale=scale, size=held.shape)
        noisy += held
    else:
        raise ArgumentError(f"rng: must be a numpy.random.Generator or None, not {type(rng).__name__}")
    released: FloatArray = np.maximum(noisy, 0.0, out=noisy)
    if isinstance(counts, LabelCounts):
        return LabelCounts(released, counts.clients, counts.classes)
    return released
