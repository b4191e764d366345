"""FedConcat's rounds: encoders by cluster, then one head on all of them (see `fedskew.pipelines.FedConcat`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew.engine._federation import Federation, ServerState
from fedskew.engine._records import Cohort, FloatArray, RoundOutcome, RoundRecord
from fedskew.models import Concatenated, FlatModel, ModelState
from fedskew.pipelines import FedConcat


@dataclass(frozen=True)
class FedConcatState:
    """What the server carries from round to round.

    `head`: the head's state, and the selection's from the first round on; `encoders`: each cluster's model and what its
    server update keeps, by number; `cluster_of`, `(clients,)`.
    """

    head: ServerState
    encoders: dict[str, ServerState]
    cluster_of: NDArray[np.int64]

    @property
    def round(self) -> int:
        """The last round."""
        return self.head.round

    @property
    def model(self) -> ModelState:
        """The head."""
        return self.head.model


@dataclass
class FedConcatRunner:
    """`encoder_rounds` rounds of one federation for each cluster, then rounds of one for the head.

    `encoders` trains `network`, `head` the head of `whole`; both draw the same cohorts from the same clients.
    """

    pipeline: FedConcat
    encoder_rounds: int
    cluster_of: NDArray[np.int64]
    encoders: Federation
    head: Federation
    network: FlatModel
    whole: FlatModel
    _inside: dict[str, ServerState] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._untrained_head = self.whole.read_state()

    def open(self) -> None:
        """See `Backend.open`; the head's is sent the encoders, so it waits until they are trained."""
        self.encoders.open()

    def close(self) -> None:
        """See `Backend.close`."""
        self.encoders.close()
        self.head.close()

    def start(self, model: ModelState) -> FedConcatState:
        """The state before the first round: every cluster begins with a copy of its own of the untrained network."""
        return FedConcatState(
            head=self.head.start(self._untrained_head),
            encoders={
                str(cluster): replace(
                    self.encoders.start(ModelState(*(part.clone() for part in model))), selection=None
                )
                for cluster in range(self.pipeline.clusters)
            },
            cluster_of=self.cluster_of,
        )

    def run_round(self, state: FedConcatState) -> tuple[FedConcatState, RoundRecord]:
        """One round of encoders, or of the head."""
        if state.round < self.encoder_rounds:
            return self._train_encoders(state)
        self._put_encoders(state)
        head, record = self.head.run_round(state.head)
        return replace(state, head=head), record

    def evaluated_model(self, state: FedConcatState) -> ModelState | None:
        """The head, its encoders in their places; None before the head has been trained."""
        if state.round <= self.encoder_rounds:
            return None
        self._put_encoders(state)
        return self.head.evaluated_model(state.head)

    def _train_encoders(self, state: FedConcatState) -> tuple[FedConcatState, RoundRecord]:
        """One round in every cluster that has participants."""
        began = time.perf_counter()
        cohort, head = self.head.select_participants(state.head)
        encoders, outcomes = dict(state.encoders), []
        for name, encoder in state.encoders.items():
            members = state.cluster_of[cohort.ids] == int(name)
            if members.any():
                encoders[name], outcome = self.encoders.train(replace(encoder, round=head.round), cohort.take(members))
                outcomes.append(outcome)
        if head.round == self.encoder_rounds and self.pipeline.head == "clusters":
            head = replace(head, model=self._joined_heads(encoders))
        record = self.encoders.record(head.round, cohort, _together(cohort, outcomes))
        record.seconds = time.perf_counter() - began
        return replace(state, head=head, encoders=encoders), record

    def _put_encoders(self, state: FedConcatState) -> None:
        """The clusters' networks into the whole; once they are trained they stay the same object."""
        if self._inside is state.encoders:
            return
        module = self.whole.module
        assert isinstance(module, Concatenated), "the whole is encoders and a head"
        for place, encoder in enumerate(state.encoders.values()):
            self.network.write_state(self.encoders.evaluated_model(encoder))
            module.put(place, self.network.module)
        self._inside = state.encoders

    def _joined_heads(self, encoders: dict[str, ServerState]) -> ModelState:
        """The clusters' heads side by side, biases summed."""
        heads = [self.network.views(self.encoders.evaluated_model(encoder).parameters) for encoder in encoders.values()]
        joined = self._untrained_head.parameters.clone()
        parts = self.whole.views(joined)
        parts["head.weight"].copy_(torch.cat([head["head.weight"] for head in heads], dim=1))
        if "head.bias" in parts:
            parts["head.bias"].copy_(torch.stack([head["head.bias"] for head in heads]).sum(0))
        return self._untrained_head._replace(parameters=joined)


def _together(cohort: Cohort, outcomes: Sequence[RoundOutcome]) -> RoundOutcome:
    """The clusters' outcomes as one, in the order of the cohort.

    Weights, which have sum 1 in each cluster, count by its share of all samples trained on, so that they have sum 1
    together: under FedAvg they are those of FedAvg. Drift diversity is the mean over clusters, by the same shares.
    """
    place = {client: at for at, client in enumerate(cohort.ids.tolist())}
    updates = [update for outcome in outcomes for update in outcome.updates]
    order = np.argsort([place[update.client] for update in updates])
    counts = np.concatenate([outcome.counts for outcome in outcomes])[order]
    weights, drift = np.zeros(0), None
    if counts.any():
        shares = [outcome.counts.sum() / counts.sum() for outcome in outcomes]
        weights = np.concatenate([share * _weights(outcome) for share, outcome in zip(shares, outcomes, strict=True)])[
            order
        ]
        known = [
            (share, outcome.drift) for share, outcome in zip(shares, outcomes, strict=True) if outcome.drift is not None
        ]
        if known:
            drift = float(sum(share * value for share, value in known) / sum(share for share, _ in known))
    return RoundOutcome(
        replied=[client for outcome in outcomes for client in outcome.replied],
        updates=[updates[at] for at in order],
        counts=counts,
        weights=weights,
        drift=drift,
        bytes_up=sum(outcome.bytes_up for outcome in outcomes),
        bytes_down=sum(outcome.bytes_down for outcome in outcomes),
    )


def _weights(outcome: RoundOutcome) -> FloatArray:
    """Of those who answered; zeros where none of them has a sample."""
    return outcome.weights if len(outcome.weights) else np.zeros(len(outcome.updates))
