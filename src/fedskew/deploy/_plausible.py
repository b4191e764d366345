"""Plausibility of an update: its norm is no larger than the model, the work and the other sites' updates make likely.

Two kinds of sizes are measured of every update.

    length      |update| / sqrt(steps)                      "update"
    largest     max |values|; of variances, the root        each array of running statistics, and each array that is
                                                            returned beside the model (but for `bounded_returns`)

A size is out of line if it is more than `norm_limit` times its reference. A site's usual size is the median of its last
five that were accepted and this round's. Where at least three sites are known, the reference is the median of their
usual sizes: one vote a site, so that a liar can't move it far; a majority of the round's own replies is believed over
the past. Of fewer sites one liar is half, so that the server's own estimate bounds what it may be:

    length      the larger of |sent model| and the flow, sqrt(a lr ln(classes)), divided by sqrt(steps); once one of the
                sites has a usual size, not more than the larger of these
    largest     of running statistics: ten times the larger of 1 and what was sent, as they move within a round
                beside the model: the larger of ln(classes) and what was sent beside it

Gradient flow for the time t = a lr moves parameters by at most sqrt(t (loss before - loss after)), by Cauchy and
Schwarz, and SGD at a stable learning rate by a small multiple of it, whatever the scale of the inputs; ln(classes) is
the loss of a model that knows nothing. a is the number of gradients that the steps amount to (`fedskew.momentum`).

The steps of a length are those that a site tells, but at most four times what the median site takes, as it would buy
length by told samples.

However many sites are known and however little they still move, no reference of a length is below 0.3 times the flow: a
site that joins late, or whose samples the model does not know yet, has as far to go as all had in the first round.
Measured of such sites, over learning rates and classes: 0.3 to 1.7 times the flow, with momentum 0.9 up to 5.3 times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.deploy._arrays import RUNNING_VARIANCE
from fedskew.engine import LocalTraining
from fedskew.momentum import fednova_normaliser

FloatArray = NDArray[np.float64]
Sizes = Mapping[str, FloatArray]
"""Sizes that were accepted, by what was measured: `(sites, KEPT)` each, the newest first; NaN: none yet."""

UPDATE = "update"
STEPS = "steps"
KEPT = 5
CONFIDENT = 3
"""Sites whose median is believed: of fewer, one liar is half."""

MOST_STEPS = 10_000
"""More steps than these make no longer update plausible, since training settles; a site tells its steps itself."""


STEPS_OF_MEDIAN = 4.0
"""Steps beyond so many times the median site's do not count."""

NEWCOMER = 0.3
"""Least reference of a length, as a share of the flow."""

MOVES = 10.0
"""Running statistics of one site may become this many times as large within a round."""


class Measured(NamedTuple):
    """A size of one update.

    Attributes:
        size: The size.
        likely: The server's own estimate of what it may be at most.
        floor: The least that its reference may be, at most `likely`.
    """

    size: float
    likely: float
    floor: float


def no_sizes(names: Iterable[str], sites: int) -> dict[str, FloatArray]:
    """Return the sizes before the first round."""
    return {name: np.full((sites, KEPT), np.nan) for name in names}


def length(norm: float, steps: int, sent: Tensor, training: LocalTraining | None, round: int, classes: int) -> Measured:
    """Measure the length of an update.

    Args:
        norm: Norm of the update.
        steps: Number of local steps taken.
        sent: The sent parameters, `(parameters,)`.
        training: Settings of local training. None: the server doesn't know them, nor whether the steps are true; an
            update is then its norm long, and likely is what moves each parameter by 1.
        round: Number of the round, from 1.
        classes: Number of classes.
    """
    likely = float(torch.linalg.vector_norm(sent))
    if training is None:
        return Measured(norm, max(likely, math.sqrt(sent.numel())), 0.0)
    taken = min(max(steps, 1), MOST_STEPS)
    time = training.lr_of(round) * fednova_normaliser(taken, training.momentum)
    flow = math.sqrt(time * math.log(max(classes, 2)))
    return Measured(*(value / math.sqrt(taken) for value in (norm, max(likely, flow), NEWCOMER * flow)))


def statistic(name: str, values: Tensor, sent: Tensor) -> Measured:
    """Measure the largest value of an array of running statistics.

    Args:
        name: The array's name; one that ends with `running_var` holds variances.
        values: The values.
        sent: The values that were sent.
    """
    size, likely = _peak(values), max(1.0, _peak(sent))
    if name.endswith(RUNNING_VARIANCE):
        size, likely = math.sqrt(size), math.sqrt(likely)
    return Measured(size, MOVES * likely, MOVES * likely)


def returned(values: Tensor, sent: Iterable[Tensor], classes: int) -> Measured:
    """Measure the largest value of an array that is returned beside the model.

    Args:
        values: The values.
        sent: The arrays that were sent beside the model.
        classes: Number of classes.
    """
    likely = max([math.log(max(classes, math.e)), *map(_peak, sent)])
    return Measured(_peak(values), likely, likely)


def excess(measured: Mapping[int, Mapping[str, Measured]], accepted: Sizes) -> dict[int, tuple[str, float]]:
    """Compare the sizes of a round's updates with their references.

    Args:
        measured: Sizes by client and name; of clients that took no step those of what they returned beside the model.
        accepted: Sizes that were accepted before.

    Returns:
        For each client the size that exceeds its reference most, and how many times it is the reference.
    """
    worst: dict[int, tuple[str, float]] = {}
    for name, past in accepted.items():
        now = {client: sizes[name].size for client, sizes in measured.items() if name in sizes}
        for client, size in now.items():
            reference = _reference(measured[client][name], now, past)
            ratio = math.inf if not math.isfinite(size) or (size and not reference) else size / (reference or 1.0)
            if client not in worst or not ratio <= worst[client][1]:
                worst[client] = (name, ratio)
    return worst


def most_steps(steps: Mapping[int, int], accepted: Sizes) -> int:
    """Return the most local steps of a site that count.

    Args:
        steps: Steps of the round's updates, by client.
        accepted: Sizes that were accepted before.
    """
    usual = _usual({client: float(taken) for client, taken in steps.items()}, accepted[STEPS])
    return round(STEPS_OF_MEDIAN * float(np.median(usual))) if len(usual) >= CONFIDENT else MOST_STEPS


def with_accepted(accepted: Sizes, measured: Mapping[int, Mapping[str, Measured]]) -> dict[str, FloatArray]:
    """Return the sizes with those of a round's accepted updates added."""
    following = {name: past.copy() for name, past in accepted.items()}
    for client, sizes in measured.items():
        for name, one in sizes.items():
            row = following[name][client]
            row[:] = [one.size, *row[:-1]]
    return following


def _reference(one: Measured, now: Mapping[int, float], past: FloatArray) -> float:
    usual = _usual(now, past)
    if len(usual) >= CONFIDENT:
        median = float(np.median(usual))
        if len(now) >= CONFIDENT:
            median = max(median, float(np.median(list(now.values()))))
        return max(median, one.floor)
    before = _usual({}, past)
    return min(one.likely, max(one.floor, *before)) if before else one.likely


def _usual(now: Mapping[int, float], past: FloatArray) -> list[float]:
    """Return the usual size of each site that has one: the median of those before and of this round's."""
    rows = ([*row[~np.isnan(row)], *([now[site]] if site in now else ())] for site, row in enumerate(past))
    return [float(np.median(row)) for row in rows if row]


def _peak(values: Tensor) -> float:
    return max(map(abs, map(float, values.aminmax()))) if values.numel() else 0.0
