"""FedConcat's rounds: one encoder for each cluster, then one head on all encoders (`fedskew.pipelines.FedConcat`)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew.engine._backend import Backend
from fedskew.engine._records import Cohort, RoundRecord
from fedskew.engine._states import ServerState
from fedskew.engine.round import Federation
from fedskew.engine.totals import Collected, Weights
from fedskew.models import Concatenated, FlatModel, ModelState
from fedskew.pipelines import FedConcat


@dataclass(frozen=True)
class FedConcatRunner:
    """Plays FedConcat's rounds: first each cluster trains a network, then all clients train one head on its encoders.

    Its state is the head's, in which every cluster's state has an owner: "encoder0", "encoder1", ...

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

    @property
    def backend(self) -> Backend:
        """The encoders' backend."""
        return self.encoders.backend

    def open(self) -> None:
        """Open the encoders' backend. The head's opens in its first round, since it needs the trained encoders."""
        self.encoders.open()

    def close(self) -> None:
        """Close both backends."""
        self.encoders.close()
        self.head.close()

    def start(self, model: ModelState) -> ServerState:
        """Make the state before the first round, in which every cluster has a copy of the untrained network."""
        state = self.head.start(self.whole.read_state())
        for cluster in range(self.pipeline.clusters):
            own = self.encoders.start(ModelState(*(part.clone() for part in model))).having("selection", {})
            state = state.having(f"encoder{cluster}", own.tensors)
        return state

    def run_round(self, state: ServerState) -> tuple[ServerState, RoundRecord]:
        """Play one round: of every cluster at first, then of the head (see `RoundRunner.run_round`)."""
        if state.round < self.encoder_rounds:
            return self._train_encoders(state)
        self._put_encoders(state)
        return self.head.run_round(state)

    def evaluated_model(self, state: ServerState) -> ModelState | None:
        """Write the encoders into `whole`, and return the head's model; None before the head's first round."""
        if state.round <= self.encoder_rounds:
            return None
        self._put_encoders(state)
        return self.head.evaluated_model(state)

    def encoder(self, state: ServerState, cluster: int) -> ServerState:
        """Return the state of one cluster."""
        return ServerState(state.round, state.of(f"encoder{cluster}"))

    def _train_encoders(self, state: ServerState) -> tuple[ServerState, RoundRecord]:
        """Play one round of every cluster that has participants."""
        began = time.perf_counter()
        cohort, state = self.head.select(state)
        outcomes = []
        for cluster in range(self.pipeline.clusters):
            members = cohort.only(np.flatnonzero(self.cluster_of == cluster).tolist())
            if len(members.ids):
                own, outcome = self.encoders.train(self.encoder(state, cluster), members)
                state = state.having(f"encoder{cluster}", own.tensors)
                outcomes.append(outcome)
        if state.round == self.encoder_rounds and self.pipeline.head == "clusters":
            state = state.having("model", self._joined_heads(state)._asdict())
        record = self.encoders.record(state.round, cohort, _merged(cohort, outcomes))
        record.seconds = time.perf_counter() - began
        return state, record

    def _networks(self, state: ServerState) -> list[ModelState]:
        return [self.encoders.evaluated_model(self.encoder(state, one)) for one in range(self.pipeline.clusters)]

    def _put_encoders(self, state: ServerState) -> None:
        """Write the clusters' encoders into `whole`."""
        module = self.whole.module
        assert isinstance(module, Concatenated), "`whole` consists of encoders and a head"
        for place, network in enumerate(self._networks(state)):
            self.network.write_state(network)
            module.put(place, self.network.module)

    def _joined_heads(self, state: ServerState) -> ModelState:
        """Return the clusters' heads joined into one: weights side by side, biases summed."""
        heads = [self.network.views(network.parameters) for network in self._networks(state)]
        joined = state.model.parameters.clone()
        parts = self.whole.views(joined)
        parts["head.weight"].copy_(torch.cat([head["head.weight"] for head in heads], dim=1))
        if "head.bias" in parts:
            parts["head.bias"].copy_(torch.stack([head["head.bias"] for head in heads]).sum(0))
        return state.model._replace(parameters=joined)


def _merged(cohort: Cohort, parts: Sequence[Collected]) -> Collected:
    """Return what is recorded of all clusters together, in the order of the cohort; each counts by its samples."""
    ids = [client for part in parts for client in part.members.ids.tolist()]
    members, order = cohort.only(ids), np.argsort([cohort.ids.tolist().index(one) for one in ids])

    def in_order(lists: Sequence[Sequence[Any]]) -> list[Any]:
        joined = [value for values in lists for value in values]
        return [joined[at] for at in order]

    sizes = np.array([part.members.counts.sum() for part in parts])
    values, drift = np.zeros(0), None
    if sizes.any():
        shares = sizes / sizes.sum()
        own = [part.weights.values if len(part.weights.values) else np.zeros(len(part.members.ids)) for part in parts]
        values = np.concatenate([share * each for share, each in zip(shares, own, strict=True)])[order]
        drifts = [(share, part.drift) for share, part in zip(shares, parts, strict=True) if part.drift is not None]
        if drifts:
            drift = float(sum(share * value for share, value in drifts) / sum(share for share, _ in drifts))
    return Collected(
        members,
        [client for part in parts for client in part.replied],
        Weights(values, [client for part in parts for client in part.weights.limited]),
        bytes_up=sum(part.bytes_up for part in parts),
        bytes_down=sum(part.bytes_down for part in parts),
        steps=in_order([part.steps for part in parts]),
        losses=in_order([part.losses for part in parts]),
        drift=drift,
        observed=in_order([part.observed for part in parts]),
    )
