"""Plausibility of an update's direction: sites that hold the same labels pull the model the same way.

The label mix q_i that a site told is composed of those of the round's n - 1 other sites, as nearly as can be:

    b = argmin_{b >= 0} ||q_i - sum_j b_j q_j||^2 + 0.01 ||b||^2,      held = sum_c min(q_ic, sum_j b_j q_jc)

With the updates' directions u its agreement with these sites is

    s_i = sqrt(n - 1) sum_j b_j <u_i, u_j> / max(||sum_j b_j u_j||, ||b||)

and 0 where `held` is below a quarter: of a site whose labels nobody else holds nothing is known. Where like sites have
settled, their updates would sum to 0 but for noise, and s be -1. A site is contrary if the mean of its last five
agreements is below -0.75: of two at least, but in the first round that is compared, when all have as far to go.
Contrary sites are taken one by one, the lowest first, and the others are compared without them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float64]

DIRECTION = "direction"
LEAST = -0.75
"""Lowest mean agreement of a site that is not contrary: 13 of 7,912 means of honest sites were (docs/threats.md)."""

HELD = 0.25
"""Least share of a site's labels that others hold, where it is compared with them."""

FEWEST = 4
"""Sites of a round that can be compared: of three that hold different labels, each is contrary to the others."""

ROUNDS = 2
"""Agreements that make a site contrary, after the first round that is compared."""

RIDGE = 0.1
PART = 1 << 16
"""Parameters that are worked on at a time."""


def contrary(
    changes: Mapping[int, Tensor], mixes: Mapping[int, FloatArray], past: FloatArray
) -> tuple[dict[int, float], dict[int, float]]:
    """Compare the directions of a round's updates.

    Args:
        changes: Updates by client, each with a value other than 0.
        mixes: The label counts that these clients told, each with a sample.
        past: Agreements of earlier rounds, `(clients, KEPT)`, the newest first; NaN: none yet.

    Returns:
        The agreement of each client in this round, and the mean agreement of those that are contrary.
    """
    clients = list(changes)
    if len(clients) < FEWEST:
        return {}, {}
    cosines = _cosines([changes[client] for client in clients])
    shares = np.array([mixes[client] / mixes[client].sum() for client in clients])
    known = np.array([np.append(past[client, :-1], np.nan) for client in clients])
    left, scores = list(range(len(clients))), np.zeros(len(clients))
    suspects: list[int] = []
    while True:
        scores[left] = _agreements(cosines[np.ix_(left, left)], shares[left])
        means = np.nanmean(np.column_stack([scores, known]), axis=1)
        lowest = min(left, key=lambda place: means[place])
        if means[lowest] >= LEAST or 2 * (len(suspects) + 1) >= len(clients):
            break
        suspects.append(lowest)
        left.remove(lowest)
    rounds = 1 + (~np.isnan(known)).sum(axis=1)
    least = 1 if np.isnan(past).all() else ROUNDS
    out = {clients[place]: float(means[place]) for place in suspects if rounds[place] >= least}
    return dict(zip(clients, scores.tolist(), strict=True)), out


def _cosines(updates: list[Tensor]) -> FloatArray:
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for first in range(0, updates[0].numel(), PART):
        part = torch.stack([update[first : first + PART] for update in updates]).double()
        total += part @ part.T
    inner: FloatArray = total.numpy()
    lengths = np.sqrt(np.diag(inner))
    cosines: FloatArray = inner / np.outer(lengths, lengths)
    return cosines


def _agreements(cosines: FloatArray, shares: FloatArray) -> FloatArray:
    from scipy.optimize import nnls  # a site's process imports no SciPy

    sites = len(shares)
    found = np.zeros(sites)
    for site in range(sites):
        others = np.arange(sites) != site
        system = np.vstack([shares[others].T, RIDGE * np.eye(sites - 1)])
        parts, _ = nnls(system, np.append(shares[site], np.zeros(sites - 1)))
        held = np.minimum(shares[site], parts @ shares[others]).sum()
        length = np.sqrt(max(parts @ cosines[np.ix_(others, others)] @ parts, parts @ parts))
        if held >= HELD:
            found[site] = np.sqrt(sites - 1) * (parts @ cosines[site, others]) / length
    return found
