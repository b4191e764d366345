"""The round, written once: select, train, weigh, update."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew import metrics
from fedskew.engine._backend import Backend, Update
from fedskew.engine._records import Round
from fedskew.errors import ArgumentError
from fedskew.labels import effective_sample_size, entropy, kl_to_uniform
from fedskew.methods import Method
from fedskew.models import ModelState
from fedskew.randomness import Purpose, generator
from fedskew.weighting import Answered

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class ServerState:
    """Everything that the server carries from round to round: with it and the config, a run goes on where it stood."""

    round: int
    model: ModelState
    selection: Any
    server_update: Any


@dataclass(frozen=True)
class Federation:
    """A method on a pool of clients.

    `counts`: `(clients, classes)`, the label counts that the server knows; `target`: `(classes,)` label mix, or None;
    `participation`: share of the clients that is asked each round, `max(1, floor(share * clients + 1e-9))` of them.
    """

    method: Method
    backend: Backend
    counts: FloatArray
    target: FloatArray | None
    participation: float
    seed: int

    def __post_init__(self) -> None:
        if self.target is None and self.method.weighting.needs_target:
            raise ArgumentError(
                f"target: {type(self.method.weighting).__name__} weighs clients towards a target label mix, and none "
                "is given; set [target] mix, or choose another weighting"
            )
        # A rehearsal: a selection that can't choose such cohorts says so before anything is trained.
        selection, rng = self.method.selection, generator(self.seed, Purpose.SELECTION)
        selection.select(selection.init(self.counts), self.counts, self.cohort_size, rng)

    @property
    def cohort_size(self) -> int:
        """How many clients are asked each round."""
        return max(1, math.floor(self.participation * len(self.counts) + 1e-9))

    def start(self, model: ModelState) -> ServerState:
        """The state before the first round."""
        return ServerState(
            round=0,
            model=model,
            selection=self.method.selection.init(self.counts),
            server_update=self.method.server_update.init(model.parameters),
        )

    def play(self, state: ServerState) -> tuple[ServerState, Round]:
        """One round: the next state and its record (without evaluations)."""
        began = time.perf_counter()
        round = state.round + 1

        # 1. who trains
        rng = generator(self.seed, Purpose.SELECTION, round)
        ids, selection = self.method.selection.select(state.selection, self.counts, self.cohort_size, rng)
        cohort = [int(client) for client in ids]

        # 2. they train; whoever diverged is left out
        quotas = getattr(selection, "quotas", None)
        replies = self.backend.train(round, cohort, state.model, quotas)
        finite = np.array([_is_finite(update) for update in replies])
        updates = [update for update, fine in zip(replies, finite, strict=True) if fine]

        # 3. how much each counts, now that it is known who answered
        trained_on = self.counts[cohort] if quotas is None else quotas
        counts = trained_on[finite]
        weights = self._weigh(counts)

        # 4. how the model moves
        model, server_update, drift = state.model, state.server_update, None
        if len(weights):
            changes = torch.stack([update.change for update in updates])
            steps = np.array([update.steps for update in updates], dtype=np.int64)
            parameters, server_update = self.method.server_update.update(
                server_update, model.parameters, changes, weights, steps
            )
            model = ModelState(
                parameters,
                _average([update.buffers for update in updates], weights),
                torch.stack([update.integers for update in updates]).amax(0),
            )
            drift = metrics.drift_diversity(changes)
            drift = drift if math.isfinite(drift) else None  # updates that cancel out have none

        following = replace(state, round=round, model=model, selection=selection, server_update=server_update)
        record = self._record(round, cohort, updates, trained_on, counts, weights)
        model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.model)
        record["drift"] = drift
        record["bytes_up"] = record["bytes_down"] = model_bytes * len(cohort)
        record["seconds"] = time.perf_counter() - began
        return following, record

    def _weigh(self, counts: FloatArray) -> FloatArray:
        sizes = counts.sum(axis=1)
        if sizes.sum() == 0:
            return np.zeros(0)
        return self.method.weighting.weigh(Answered(counts, sizes, self.target))

    def _record(
        self,
        round: int,
        cohort: list[int],
        updates: Sequence[Update],
        trained_on: FloatArray,
        counts: FloatArray,
        weights: FloatArray,
    ) -> Round:
        """`trained_on`: label counts of the cohort; `counts`: of those who answered."""
        answered = [update.client for update in updates]
        pooled = trained_on.sum(axis=0)
        sizes = counts.sum(axis=1)
        moved = len(weights) > 0
        ess = effective_sample_size(weights, sizes) if moved else None
        distance = metrics.mix_distance(weights, counts, self.target) if moved and self.target is not None else None
        return {
            "seed": self.seed,
            "round": round,
            "cohort": cohort,
            "answered": answered,
            "diverged": [client for client in cohort if client not in set(answered)],
            "weights": weights.tolist(),
            "steps": [update.steps for update in updates],
            "loss": float(weights @ [update.loss for update in updates]) if moved else None,
            "entropy": float(entropy(pooled)),
            "kl": float(kl_to_uniform(pooled)),
            "ess": ess,
            "ess_share": None if ess is None else ess / float(sizes.sum()),
            "target_distance": distance,
            "drift": None,
            "seconds": 0.0,
            "bytes_up": 0,
            "bytes_down": 0,
            "evaluation": None,
            "validation": None,
            "clients": None,
        }


def _is_finite(update: Update) -> bool:
    """No NaN and no infinity; by the extremes, which is ten times as fast as asking of every element."""
    extremes = [end for part in (update.change, update.buffers) if part.numel() for end in part.aminmax()]
    return all(math.isfinite(end) for end in extremes)


def _average(rows: Sequence[torch.Tensor], weights: FloatArray) -> torch.Tensor:
    """Weighted mean of buffers, accumulated in float64 in the order of the cohort."""
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        total += row.double() * weight
    return total.to(rows[0].dtype)
