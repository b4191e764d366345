"""Several seeds of one config as one larger cohort."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fedskew.engine._federation import Federation, ServerState
from fedskew.engine._records import RoundRecord
from fedskew.engine.cohort import CohortBackend, CohortRequest, train_together


def run_round_together(
    federations: Sequence[Federation], states: Sequence[ServerState]
) -> list[tuple[ServerState, RoundRecord]]:
    """One round of each federation: the next states and records, as `Federation.play` gives them.

    The federations differ in nothing but seed and data, their backends are `CohortBackend`. Their clients train as
    one cohort,
    with the same draws as alone; results are the same up to rounding, as a stack's size may change how its products are
    computed. A record's seconds are its share of the round's.
    """
    began = time.perf_counter()
    asked = [federation.select_participants(state) for federation, state in zip(federations, states, strict=True)]
    requests, sents = [], []
    for federation, (cohort, following) in zip(federations, asked, strict=True):
        assert isinstance(federation.backend, CohortBackend), "seeds train together only where a cohort does"
        sent, assignments = federation.instructions(following, cohort)
        sents.append(sent)
        requests.append(CohortRequest(federation.backend, following.round, assignments, sent))
    played = []
    for federation, (cohort, following), sent, updates in zip(
        federations, asked, sents, train_together(requests), strict=True
    ):
        settled, outcome = federation.aggregate(following, cohort, sent, updates)
        played.append((settled, federation.record(settled.round, cohort, outcome)))
    for _, record in played:
        record.seconds = (time.perf_counter() - began) / len(played)
    return played
