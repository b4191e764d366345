"""The target's label mix, estimated in the course of a run from the target's unlabelled samples.

After some rounds the model is shown samples that it was not trained on: labelled ones at clients, and those of the
target, which have no labels. What it makes of both gives the mix (`labels.estimate_mix`). Every estimate is by the
model of its own round, so that no error is carried on. Until there is one that is sure enough, and where the target
looks like no mix of the clients' classes, there is no target, and a weighting that needs one gives way to FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedskew import labels
from fedskew.data import Inputs
from fedskew.engine._records import BATCH, outputs
from fedskew.engine._states import ServerState, packed, unpacked
from fedskew.errors import ArgumentError, RunError
from fedskew.labels import EDGES, MixMethod, outcome_cells
from fedskew.parameters import FloatArray, IntArray

ODD = 0.01
"""A site's p-value below which the record names it."""

Tables = Callable[[], Iterable[tuple[int, FloatArray | IntArray]]]
"""Goes through the clients' tables of outcomes, as often as it is called."""


@dataclass(frozen=True)
class EstimatedMix:
    """The server's state about a target whose mix is estimated.

    Attributes:
        round: The round of the newest estimate that was sure enough; -1: there is none yet.
        mix: That estimate, `(classes,)`, sum 1; zeros before the first.
        unused: Why the mix is not used; empty while it is.
        misfit: Whether label shift did not hold at the last estimate that said so or was sure enough.
    """

    round: int
    mix: FloatArray
    errors: FloatArray
    unused: str
    misfit: bool

    @property
    def used(self) -> FloatArray | None:
        """The mix that clients are weighed towards, `(classes,)`; None: none."""
        return None if self.unused else self.mix

    @classmethod
    def of(cls, state: ServerState) -> EstimatedMix | None:
        """Return what a state holds of the target; None if nothing is estimated."""
        kept, none = state.of("target"), np.zeros(0)
        return unpacked(kept, cls(-1, none, none, "", False)) if kept else None

    def within(self, state: ServerState) -> ServerState:
        """Return a state that holds this of the target."""
        return state.having("target", packed(self, "target"))


@dataclass(frozen=True)
class Estimation:
    """When and how a target's label mix is estimated.

    Attributes:
        warmup: The round after which the first estimate is made.
        bins: Outcome cells of a predicted class, from 1 to 4: the upper ones of `labels.EDGES` divide them.
        on_misfit: What to do where the target looks like no mix of the clients' classes: "warn" uses the mix in spite
            of that, "fedavg" uses none, "stop" ends the run.
        ask: Held-out samples that an estimate is made from, about, where clients hold more.
    """

    classes: int
    warmup: int = 10
    every: int = 5
    estimator: MixMethod = "gls"
    bins: int = 4
    on_misfit: Literal["warn", "fedavg", "stop"] = "fedavg"
    ask: int = 10_000

    def is_due(self, round: int) -> bool:
        """Return whether an estimate is made after a round."""
        return round >= self.warmup and (round - self.warmup) % self.every == 0

    @property
    def unknown(self) -> EstimatedMix:
        """What is known before the first estimate."""
        none = np.zeros(self.classes)
        return EstimatedMix(-1, none, none.copy(), f"the first estimate is made after round {self.warmup}", False)

    def outcomes(self, logits: FloatArray) -> IntArray:
        """Find the outcome cell of each sample."""
        return outcome_cells(logits, EDGES[len(EDGES) + 1 - self.bins :], logits=True)

    def update(
        self, known: EstimatedMix, round: int, tables: Tables, cells: FloatArray | IntArray
    ) -> tuple[EstimatedMix, dict[str, Any]]:
        """Estimate the mix after a round, and decide whether it is used."""
        nothing = np.zeros((self.classes, self.classes * self.bins))
        pooled = sum((np.asarray(table, dtype=np.float64) for _, table in tables()), nothing)
        try:
            found = labels.estimate_mix(pooled, cells, self.estimator)
        except ArgumentError as error:
            return self.skip(known, f"there is no estimate: {error}")
        following = self._judged(known, round, found)
        tested = {
            client: p
            for client, table in tables()
            if not math.isnan(p := labels.site_p_value(np.asarray(table, dtype=np.float64), pooled))
        }
        record = {
            "mix": found.mix.tolist(),
            "se": found.upper_errors.tolist(),
            "p": found.p_value if found.dof else None,
            "excess": found.excess,
            "misfit": found.misfit,
            "unseen": list(found.unseen),
            "held_out": int(pooled.sum()),
            "samples": len(cells) if np.ndim(cells) == 2 else int(np.sum(cells)),
            "sites": {"tested": len(tested), "odd": {str(client): p for client, p in tested.items() if p < ODD}},
            "unused": following.unused or None,
        }
        return following, record

    def skip(self, known: EstimatedMix, reason: str) -> tuple[EstimatedMix, dict[str, Any]]:
        """Go on with the newest estimate, as none can be made after this round."""
        following = known if known.round >= 0 or known.misfit else replace(known, unused=reason)
        return following, {"mix": None, "skipped": reason, "unused": following.unused or None}

    def check(self, known: EstimatedMix) -> None:
        """End a run whose target looks like no mix of the clients' classes, if it is to end."""
        if self.on_misfit == "stop" and known.misfit:
            raise RunError(
                f"target.on_misfit: {known.unused}; go on without a target by target.on_misfit = 'fedavg', or use the "
                "estimate in spite of that by 'warn'"
            )

    def _judged(self, known: EstimatedMix, round: int, found: labels.MixEstimate) -> EstimatedMix:
        """Return the server's state after an estimate was made."""
        if found.misfit and self.on_misfit != "warn":
            reason = (
                f"label shift does not hold after round {round}: the target's samples look like no mix of the clients' "
                f"classes (p = {found.p_value:.2g}; {100 * found.excess:.1f} % of them are out of place)"
            )
            return replace(known, unused=reason, misfit=True)
        if not found.is_sure:
            reason = f"no estimate is sure enough yet: standard error {found.error:.2g} of a share after round {round}"
            return known if known.round >= 0 or known.misfit else replace(known, unused=reason)
        return EstimatedMix(round, found.mix, found.upper_errors, "", found.misfit)


@torch.inference_mode()
def logits_of(network: nn.Module, inputs: Inputs, rows: IntArray | None = None, finite: bool = True) -> FloatArray:
    """Compute what a network says of some samples; ArgumentError where that is not finite but has to be."""
    wanted = torch.arange(len(inputs)) if rows is None else torch.from_numpy(rows)
    device = next(network.parameters()).device
    parts = [
        outputs(network, inputs.index_select(0, some.to(inputs.device)).to(device)).double().cpu()
        for some in wanted.split(BATCH)
        if len(some)
    ]
    logits: FloatArray = torch.cat(parts).numpy() if parts else np.zeros((0, 0))
    if finite and not np.isfinite(logits).all():
        raise ArgumentError("logits: the model's outputs are not finite")
    return logits
