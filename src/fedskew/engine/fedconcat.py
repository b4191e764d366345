"""FedConcat's rounds: one encoder for each cluster, then one head on all encoders (`fedskew.pipelines.FedConcat`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew.engine._records import Cohort, FloatArray, RoundOutcome, RoundRecord
from fedskew.engine._states import ServerState
from fedskew.engine.round import Federation
from fedskew.models import Concatenated, FlatModel, ModelState
from fedskew.pipelines import FedConcat


@dataclass(frozen=True)
class FedConcatState:
    """The server's state between the rounds of FedConcat.

    Attributes:
        head: The head's state; its selection chooses the cohorts of all rounds.
        encoders: The state of each cluster's network, by the cluster's number.
    """

    head: ServerState
    encoders: dict[str, ServerState]
    cluster_of: NDArray[np.int64]

    @property
    def round(self) -> int:
        """Number of the last round."""
        return self.head.round

    @property
    def model(self) -> ModelState:
        """The head's model."""
        return self.head.model


@dataclass
class FedConcatRunner:
    """Plays FedConcat's rounds: first each cluster trains a network, then all clients train one head on its encoders.

    Attributes:
        encoder_rounds: Number of rounds in which the clusters train; the others train the head.
        head: Trains the head of `whole`, and selects the cohorts of all rounds.
        whole: The network that consists of all encoders and the head.
    """

    pipeline: FedConcat
    encoder_rounds: int
    cluster_of: NDArray[np.int64]
    encoders: Federation
    head: Federation
    network: FlatModel
    whole: FlatModel
    _in_place: dict[str, ServerState] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._untrained_head = self.whole.read_state()

    def open(self) -> None:
        """Open the encoders' backend. The head's opens in its first round, since it needs the trained encoders."""
        self.encoders.open()

    def close(self) -> None:
        """Close both backends."""
        self.encoders.close()
        self.head.close()

    def start(self, model: ModelState) -> FedConcatState:
        """Make the state before the first round, in which every cluster has a copy of the untrained network."""
        return FedConcatState(
            head=self.head.start(self._untrained_head),
            encoders={
                str(cluster): self.encoders.start(ModelState(*(part.clone() for part in model))).having("selection", {})
                for cluster in range(self.pipeline.clusters)
            },
            cluster_of=self.cluster_of,
        )

    def run_round(self, state: FedConcatState) -> tuple[FedConcatState, RoundRecord]:
        """Play one round: of every cluster at first, then of the head (see `RoundRunner.run_round`)."""
        if state.round < self.encoder_rounds:
            return self._train_encoders(state)
        self._put_encoders(state)
        head, record = self.head.run_round(state.head)
        return replace(state, head=head), record

    def evaluated_model(self, state: FedConcatState) -> ModelState | None:
        """Write the encoders into `whole`, and return the head's model; None before the head's first round."""
        if state.round <= self.encoder_rounds:
            return None
        self._put_encoders(state)
        return self.head.evaluated_model(state.head)

    def _train_encoders(self, state: FedConcatState) -> tuple[FedConcatState, RoundRecord]:
        """Play one round of every cluster that has participants."""
        began = time.perf_counter()
        cohort, head = self.head.select(state.head)
        encoders, outcomes = dict(state.encoders), []
        for name, encoder in state.encoders.items():
            members = state.cluster_of[cohort.ids] == int(name)
            if members.any():
                encoders[name], outcome = self.encoders.train(replace(encoder, round=head.round), cohort.take(members))
                outcomes.append(outcome)
        if head.round == self.encoder_rounds and self.pipeline.head == "clusters":
            head = head.having("model", self._joined_heads(encoders)._asdict())
        record = self.encoders.record(head.round, cohort, _merged(cohort, outcomes))
        record.seconds = time.perf_counter() - began
        return replace(state, head=head, encoders=encoders), record

    def _put_encoders(self, state: FedConcatState) -> None:
        """Write the clusters' encoders into `whole`, unless it holds them already."""
        if self._in_place is state.encoders:
            return
        module = self.whole.module
        assert isinstance(module, Concatenated), "`whole` consists of encoders and a head"
        for place, encoder in enumerate(state.encoders.values()):
            self.network.write_state(self.encoders.evaluated_model(encoder))
            module.put(place, self.network.module)
        self._in_place = state.encoders

    def _joined_heads(self, encoders: dict[str, ServerState]) -> ModelState:
        """Return the clusters' heads joined into one: weights side by side, biases summed."""
        heads = [self.network.views(self.encoders.evaluated_model(encoder).parameters) for encoder in encoders.values()]
        joined = self._untrained_head.parameters.clone()
        parts = self.whole.views(joined)
        parts["head.weight"].copy_(torch.cat([head["head.weight"] for head in heads], dim=1))
        if "head.bias" in parts:
            parts["head.bias"].copy_(torch.stack([head["head.bias"] for head in heads]).sum(0))
        return self._untrained_head._replace(parameters=joined)


def _merged(cohort: Cohort, outcomes: Sequence[RoundOutcome]) -> RoundOutcome:
    """Merge the clusters' outcomes into one, in the order of the cohort."""
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
        limited=[client for outcome in outcomes for client in outcome.limited],
    )


def _weights(outcome: RoundOutcome) -> FloatArray:
    """Return a cluster's weights; zeros if none of its clients has a sample."""
    return outcome.weights if len(outcome.weights) else np.zeros(len(outcome.updates))
