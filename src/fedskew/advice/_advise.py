"""Advice for a federation: the nearest simulated ones, what each method gained there, and which method to take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedskew.advice._features import features
from fedskew.advice._predict import HIGH, LOW, NEIGHBOURS, FixedRule, Predictor, advised, nearest, takes_all
from fedskew.advice._table import Evidence, FloatArray, read_evidence
from fedskew.advice._validate import accepted_predictor, read_validation
from fedskew.errors import ArgumentError, DataError
from fedskew.errors import nearest as did_you_mean
from fedskew.labels import CountsLike
from fedskew.tables import counted

_SUPPORT = 99.0  # percentile of distances within the table; a federation farther away is unlike all of them
_ROUNDING = 1e-3  # figures in a table are rounded


@dataclass(frozen=True)
class MethodGains:
    """What a method gained over FedAvg in the nearest simulated federations, in points.

    Attributes:
        method: Its label.
        median: Median gain.
        low: Lower end of the interval of 80 %.
        high: Its upper end.
        gained: Share of the federations in which it was ahead of FedAvg.
        worst_class: Median gain of the worst class.
        federations: Number of these federations in which it was run.
    """

    method: str
    median: float
    low: float
    high: float
    gained: float
    worst_class: float
    federations: int


@dataclass(frozen=True)
class Neighbour:
    """A simulated federation that is near to the one advised on.

    Attributes:
        federation: Its description.
        distance: Its distance: root of the mean squared difference of figures, in standard deviations of the table.
        best: The method that gained most there, and its gain in points; "fedavg" and 0 where none gained.
    """

    federation: str
    distance: float
    best: tuple[str, float]


@dataclass(frozen=True)
class Advice:
    """Advice for a federation; `print` it as sentences.

    Attributes:
        methods: What each method gained in the nearest federations, the largest median first.
        neighbours: These federations, nearest first.
        table: Number of federations in the table.
        supported: Whether the federation is like those of the table; otherwise nothing is recommended.
        method: The method to take; None: nothing is recommended.
        reason: Why, in a sentence.
    """

    methods: tuple[MethodGains, ...]
    neighbours: tuple[Neighbour, ...]
    table: int
    supported: bool
    method: str | None
    reason: str

    def sentences(self) -> list[str]:
        """Return the advice in sentences."""
        first = self.methods[0] if self.methods and self.supported else None
        found = [self.reason]
        if first is not None:
            found.append(
                f"In the {counted(len(self.neighbours), 'simulated federation')} nearest to it, of {self.table:,}, "
                f"{first.method} gained most over FedAvg: {first.median:+.1f} points (median; 80 % of them "
                f"{first.low:+.1f} to {first.high:+.1f}), ahead in {first.gained:.0%}."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "method": self.method,
            "reason": self.reason,
            "supported": self.supported,
            "table": self.table,
            "methods": [
                {name: None if value != value else value for name, value in vars(one).items()} for one in self.methods
            ],
            "neighbours": [
                {"federation": one.federation, "distance": one.distance, "best": one.best[0], "gain": one.best[1]}
                for one in self.neighbours
            ],
        }

    def __str__(self) -> str:
        return "\n".join(f"- {sentence}" for sentence in self.sentences())


def advise(
    counts: CountsLike,
    target: ArrayLike | None = None,
    participation: float = 1.0,
    epochs: float = 1.0,
    without: Collection[str] = (),
    evidence: Evidence | None = None,
    predictor: Predictor | None = None,
) -> Advice:
    """Advise on a method, from simulated federations that are like this one.

    Args:
        counts: Label counts of the clients that train, shape `(clients, classes)`.
        target: Label mix that the model will serve, shape `(classes,)`; None: that of the test data.
        participation: Share of the clients that takes part in a round.
        epochs: Local epochs of a round.
        without: Labels of methods that can't be used, such as those that need what clients won't report.
        evidence: The table; None: the one that comes with fedskew.
        predictor: Predicts the methods' gains; None: for the table that comes with fedskew the predictor that its
            validation accepted, if any, and otherwise the fixed rule.

    Returns:
        The advice.

    Raises:
        ArgumentError: Wrong shapes or values, or an unknown method.
        DataError: The table can't be read.
    """
    if not 0 < participation <= 1:
        raise ArgumentError(f"participation: must be a share above 0 and up to 1, not {participation}")
    if not epochs > 0:
        raise ArgumentError(f"epochs: must be above 0, not {epochs}")
    if evidence is None:
        evidence, predictor = _shipped(), predictor or accepted_predictor(read_validation())
    if len(evidence) < NEIGHBOURS:
        raise DataError(f"the table of evidence has only {len(evidence)} federations, and advice needs {NEIGHBOURS}")
    unknown = next((method for method in without if method not in evidence.methods), None)
    if unknown is not None:
        raise ArgumentError(f"without: the table has no method {unknown!r}{did_you_mean(unknown, evidence.methods)}")
    evidence = evidence.without(without)
    own = evidence.values(features(counts, target, participation, epochs))
    evidence = evidence.without(_never_run(evidence, own))
    rows, distances = nearest(evidence, own)
    supported = bool(distances[-1] <= _limit(evidence) + _ROUNDING)
    neighbours = tuple(_neighbour(evidence, int(row), float(apart)) for row, apart in zip(rows, distances, strict=True))
    methods = _methods(evidence, rows.tolist())
    chosen, reason = _choose(evidence, own, supported, predictor, methods)
    return Advice(methods, neighbours, len(evidence), supported, chosen, reason)


@cache
def _shipped() -> Evidence:
    return read_evidence()


def _never_run(evidence: Evidence, own: FloatArray) -> list[str]:
    """Methods that were never run in a setting like this one, with a target or none and all clients a round or not.

    They need what is missing here: FedPALS a target, FedEntOpt clients to choose among.
    """
    at = evidence.names.index("target")
    alike = evidence.features[:, at] == own[at]
    alike &= takes_all(evidence, evidence.features) == takes_all(evidence, own[None, :])
    never = ~np.isfinite(evidence.gains[alike]).any(axis=0) & alike.any()
    return [method for method, out in zip(evidence.methods, never, strict=True) if out]


def _limit(evidence: Evidence) -> float:
    """Return the largest distance to the tenth neighbour that is usual in the table: its 99th percentile."""
    own = []
    for at in range(len(evidence)):
        distances = np.sort(np.delete(evidence.distances(evidence.features[at]), at))
        own.append(distances[min(len(distances), NEIGHBOURS) - 1] if len(distances) else 0.0)
    return float(np.percentile(own, _SUPPORT))


def _neighbour(evidence: Evidence, row: int, distance: float) -> Neighbour:
    gains = evidence.gains[row]
    best = int(np.nanargmax(gains)) if np.isfinite(gains).any() else None
    won = ("fedavg", 0.0) if best is None or gains[best] <= 0 else (evidence.methods[best], float(gains[best]))
    return Neighbour(evidence.federations[row], distance, won)


def _methods(evidence: Evidence, rows: Sequence[int]) -> tuple[MethodGains, ...]:
    found = []
    near = evidence.gains[rows]
    for at, method in enumerate(evidence.methods):
        known = np.isfinite(near[:, at])
        if not known.any():
            continue
        own = near[known, at]
        middle, low, high = np.percentile(own, [50, LOW, HIGH])
        worst = evidence.worst[rows, at]
        worst = worst[np.isfinite(worst)]
        found.append(
            MethodGains(
                method=method,
                median=float(middle),
                low=float(low),
                high=float(high),
                gained=float((own > 0).mean()),
                worst_class=float(np.median(worst)) if len(worst) else float("nan"),
                federations=int(known.sum()),
            )
        )
    return tuple(sorted(found, key=lambda one: -one.median))


def _choose(
    evidence: Evidence, own: FloatArray, supported: bool, predictor: Predictor | None, methods: Sequence[MethodGains]
) -> tuple[str | None, str]:
    """Return the method to take, and why."""
    if not supported:
        return None, (
            "No recommendation: this federation is unlike all simulated ones, so what was gained there says little. "
            "The nearest are shown."
        )
    if predictor is not None:
        (gains,) = predictor(evidence, own[None, :])
        chosen = advised(gains)
        if chosen is not None:
            return evidence.methods[chosen], (
                f"Take {evidence.methods[chosen]}: of the methods whose gain over FedAvg is above -1 point with 90 % "
                f"certainty it has the largest, {gains.middle[chosen]:+.1f} points ({gains.low[chosen]:+.1f} to "
                f"{gains.high[chosen]:+.1f})."
            )
    everyone = bool(takes_all(evidence, own[None, :])[0])
    possible = np.isin(evidence.methods, [one.method for one in methods])
    by_rule = FixedRule.of(evidence).choose(everyone, possible)
    part = "all clients take part in every round" if everyone else "not all clients take part in a round"
    if by_rule is None:
        return "fedavg", f"Take FedAvg: where {part}, no method is ahead of it on average in the simulated federations."
    return evidence.methods[by_rule], (
        f"Take {evidence.methods[by_rule]}, by a fixed rule: where {part}, it gained most over FedAvg on average in "
        "the simulated federations. "
        + (
            "No method is safe enough here to be preferred to it."
            if predictor is not None
            else "What the nearest federations say did not prove better than this rule (see docs/advice.md)."
        )
    )
