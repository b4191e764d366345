"""The weights of a round's clients, under the limit, and towards a target mix that may change between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from fedskew import components
from fedskew.engine._records import Cohort, FloatArray
from fedskew.engine._states import Named, ServerState
from fedskew.engine.contracts import calling, checked_weights
from fedskew.mixing import limited
from fedskew.weighting import Answered, FedAvg

Federation = Any
"""That of `round`, which imports this file."""


class Weights(NamedTuple):
    """The weights of some clients.

    Attributes:
        values: One for each client, sum 1; empty if nobody holds a sample, or if each knows its own alone, and where
            the model stays as it was.
        limited: The clients whose weight `training.weight_limit` lowered.
        fallback: Why they are FedAvg's in place of the method's; None if they are the method's.
    """

    values: FloatArray = np.zeros(0)
    limited: Sequence[int] = ()
    fallback: str | None = None


class Aim(Protocol):
    """Gives the label mix that clients are weighed towards, where that changes in the course of a run."""

    def start(self) -> dict[str, Tensor]:
        """Return what the server keeps of it before the first round."""

    def mix(self, kept: Named) -> tuple[FloatArray | None, str | None]:
        """Return the mix, or None, and why there is none."""


def shown(federation: Federation, members: Cohort) -> FloatArray:
    """Return the label counts of some clients that the weighting sees."""
    seen: FloatArray | None = federation.weighed
    return members.counts if members.quotas or seen is None else seen[members.ids]


def weigh(federation: Federation, state: ServerState, members: Cohort) -> Weights:
    """Weigh clients; by FedAvg where the method's weighting needs a target mix that there is not yet."""
    weighting, limit, fallback, mix = federation.method.weighting, federation.weight_limit, None, federation.target
    sizes = members.counts.sum(axis=1)
    if federation.aim is not None:
        mix, why = federation.aim.mix(state.of("target"))
        if why is not None and components.has(weighting, "needs_target"):
            weighting, fallback = FedAvg(), why
    if sizes.sum() == 0:
        return Weights(fallback=fallback)
    where, kept = f"round {state.round}: ", state.of("weighting")
    given = Answered(shown(federation, members), sizes, mix, members.ids, kept, limit)
    with calling("weighting", weighting, "weigh", where):
        free = weights = checked_weights(weighting, weighting.weigh(given), members.ids, where)
        if limit is None:
            return Weights(weights, fallback=fallback)
        weights = limited(weights, limit, sizes)
        if components.has(weighting, "keeps_limit") and weights.max() >= limit * (1 - 1e-9):
            free = checked_weights(weighting, weighting.weigh(given._replace(limit=None)), members.ids, where)
    return Weights(weights, members.ids[free * (1 - 1e-9) > np.maximum(weights, limit)].tolist(), fallback)
