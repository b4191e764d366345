"""Plausibility of an update: of its norm, and of its direction.

The norm is no larger than the model, the work and the other sites' updates make likely.

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
the loss of a model that knows nothing. a is the number of gradients that the steps amount to (`fedskew.hooks`). Where
Adam takes the steps, each moves a parameter by lr or so, and the flow is lr steps sqrt(parameters).

The steps of a length are those that a site tells, at most four times the median site's: told samples would buy length.

However many sites are known and however little they still move, no reference of a length is below 0.3 times the flow: a
site that joins late, or whose samples the model does not know yet, has as far to go as all had in the first round.
Measured of such sites, over learning rates and classes: 0.3 to 1.7 times the flow, with momentum 0.9 up to 5.3 times.

The direction: sites that hold the same labels pull the model the same way.

The label mix q_i that a site told is composed of those of the round's n - 1 other sites, as nearly as can be:

    b = argmin_{b >= 0} ||q_i - sum_j b_j q_j||^2 + 0.01 ||b||^2,      held = sum_c min(q_ic, sum_j b_j q_jc)

With the updates' directions u its agreement with these sites is

    s_i = sqrt(n - 1) sum_j b_j <u_i, u_j> / max(||sum_j b_j u_j||, ||b||)

and 0 where `held` is below a quarter: of a site whose labels nobody else holds nothing is known. Where like sites have
settled, their updates would sum to 0 but for noise, and s be -1. A site is contrary if the mean of its last five
agreements is below -0.75: of two at least, but in the first round that is compared, when all have as far to go.
Contrary sites are taken one by one, the lowest first, and the others are compared without them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedskew.deploy._arrays import VARIANCE, FloatArray
from fedskew.engine import LocalTraining
from fedskew.hooks import fednova_normaliser

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


class Measured(NamedTuple):
    """A size of one update, what the server takes to be likely at most, and the least that its reference may be."""

    size: float
    likely: float
    floor: float


def length(norm: float, steps: int, sent: Tensor, training: LocalTraining | None, round: int, classes: int) -> Measured:
    """Measure the length of an update; without `training` likely is what moves each parameter by 1."""
    likely = float(torch.linalg.vector_norm(sent))
    if training is None:
        return Measured(norm, max(likely, math.sqrt(sent.numel())), 0.0)
    taken = min(max(steps, 1), MOST_STEPS)
    lr = training.lr_of(round) * max([1.0, *(group.lr / training.lr for group in training.groups if group.lr)])
    if training.adapts_rates:
        flow = lr * taken * math.sqrt(sent.numel())
    else:
        flow = math.sqrt(lr * fednova_normaliser(taken, training.momentum) * math.log(max(classes, 2)))
    return Measured(*(value / math.sqrt(taken) for value in (norm, max(likely, flow), NEWCOMER * flow)))


def statistic(name: str, values: Tensor, sent: Tensor) -> Measured:
    """Measure the largest value of an array of running statistics; `sent` are the values that were sent."""
    size, likely = _peak(values), max(1.0, _peak(sent))
    if name.endswith(VARIANCE):
        size, likely = math.sqrt(size), math.sqrt(likely)
    return Measured(size, MOVES * likely, MOVES * likely)


def returned(values: Tensor, sent: Iterable[Tensor], classes: int) -> Measured:
    """Measure the largest value of an array that is returned beside the model; `sent` was sent beside it."""
    likely = max([math.log(max(classes, math.e)), *map(_peak, sent)])
    return Measured(_peak(values), likely, likely)


def excess(measured: Mapping[int, Mapping[str, Measured]], accepted: Sizes) -> dict[int, tuple[str, float]]:
    """Return for each client the size that exceeds its reference most, and how many times it is the reference."""
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
    """Return the most local steps of a site that count; `steps` are those of the round's updates, by client."""
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


def contrary(
    changes: Mapping[int, Tensor], mixes: Mapping[int, FloatArray], past: FloatArray
) -> tuple[dict[int, float], dict[int, float]]:
    """Compare directions of a round's updates, none of which is 0; `past` are agreements before, `(clients, KEPT)`,
    newest first. Returns the agreement of each client in this round, and the mean one of those that are contrary."""
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
