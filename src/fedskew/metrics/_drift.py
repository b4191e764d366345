"""How far the clients' updates point apart."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedskew.errors import ArgumentError


def drift_diversity(updates: ArrayLike | Tensor, norms: ArrayLike | None = None) -> float:
    """The sum of the squared norms of the updates over the squared norm of their sum.

    `updates`: `(clients, parameters)`, client model minus the model that was sent; summed in their dtype, unweighted.
    `norms`: the norm of each, `(clients,)`, where they are known: a third less to do.
    1/clients where all updates are the same, 1 where they are orthogonal, infinite where they cancel out. Where nobody
    moves, nobody drifts: 1/clients. FedVLS, table 17; the gradient diversity of Yin et al., 2018, taken of updates.
    Raises `ArgumentError` for other shapes, NaN and infinity.
    """
    rows = updates if isinstance(updates, Tensor) else torch.tensor(np.asarray(updates, dtype=np.float64))
    if rows.ndim != 2 or not len(rows):
        raise ArgumentError(f"updates: must be (clients, parameters), not of shape {tuple(rows.shape)}")
    if not rows.is_floating_point():
        raise ArgumentError(f"updates: must be of floating point, not {rows.dtype}")
    if norms is not None and np.shape(norms) != (len(rows),):
        raise ArgumentError(f"norms: expected one for each of {len(rows)} updates, got shape {np.shape(norms)}")
    # In the updates' own dtype: float64 sums of float32 rows would be the dearest part of an idle round.
    apart = float(torch.linalg.vector_norm(rows) if norms is None else np.linalg.norm(np.asarray(norms)))
    together = float(torch.linalg.vector_norm(rows.sum(dim=0)))
    if not math.isfinite(apart + together):  # overflow of huge updates, or no numbers at all
        apart = float(torch.linalg.vector_norm(rows, dtype=torch.float64))
        together = float(torch.linalg.vector_norm(rows.sum(dim=0, dtype=torch.float64)))
    if not math.isfinite(apart):
        raise ArgumentError("updates: must be finite, but NaN or infinity occurs")
    if apart == 0:
        return 1.0 / len(rows)
    return (apart / together) ** 2 if together > 0 else math.inf
