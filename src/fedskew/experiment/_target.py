"""In a simulation: the target's label mix is estimated after some rounds, and the server's state gets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew import labels, torchrun
from fedskew.data import Inputs
from fedskew.engine import (
    EstimatedMix,
    Estimation,
    Federation,
    PartitionedData,
    RoundRecord,
    ServerState,
    from_the_first,
    logits_of,
)
from fedskew.errors import ArgumentError
from fedskew.experiment._config import Config
from fedskew.labels import outcome_table
from fedskew.models import FlatModel
from fedskew.randomness import Purpose, generator


def make_estimation(config: Config, classes: int) -> Estimation | None:
    """Return how a config's target mix is estimated; None where it is not.

    Args:
        config: The config.
        classes: Number of classes.
    """
    section = config.target
    if not section.is_estimated:
        return None
    rules = {field.name: getattr(section, field.name) for field in fields(Estimation) if field.name != "classes"}
    return Estimation(classes, **rules)


@dataclass(frozen=True)
class TargetWatch:
    """Estimates the target's label mix after the rounds in which that is due; a `Watch`.

    Attributes:
        federation: Plays the rounds, and knows how the mix is estimated.
        model: The network that models are written into.
        held_out: Samples that clients hold and do not train on.
        unlabelled: The target's samples.
        seed: Seed of all random draws.
    """

    federation: Federation
    model: FlatModel
    held_out: PartitionedData
    unlabelled: Inputs
    seed: int

    @property
    def _estimation(self) -> Estimation:
        assert self.federation.estimation is not None, "the mix is estimated"
        return self.federation.estimation

    def review(self, server: ServerState, record: RoundRecord) -> ServerState:
        """Estimate the mix where that is due, and complete the round's record (see `Watch.review`)."""
        if not self._estimation.is_due(record.round):
            return server
        self.model.write_state(self.federation.evaluated_model(server))
        assert isinstance(server.target, EstimatedMix), "as the federation starts"
        known, record.target = self._updated(server.target, record.round)
        if torchrun.launched():  # ranks may be unlike machines, and must go on with the same numbers
            known, record.target = from_the_first((known, record.target))
        return replace(server, target=known)

    def check(self, server: ServerState) -> None:
        """End a run whose target does not fit, if it is to end (see `Watch.check`)."""
        assert isinstance(server.target, EstimatedMix), "as the federation starts"
        self._estimation.check(server.target)

    def _updated(self, known: EstimatedMix, round: int) -> tuple[EstimatedMix, dict[str, Any]]:
        estimation, data = self._estimation, self.held_out
        asked = self._asked(round)
        rows = np.concatenate([data.rows[client] for client in asked])
        true = data.targets.numpy()[rows]
        try:
            ours = logits_of(self.model.network, data.inputs, rows)
            theirs = logits_of(self.model.network, self.unlabelled)
            said: NDArray[np.float64] | NDArray[np.int64]
            if estimation.estimator == "em":
                said = labels.calibrate(ours, true).apply(theirs)
            else:
                said = np.bincount(estimation.outcomes(theirs), minlength=estimation.classes * estimation.bins)
        except ArgumentError as error:
            return estimation.skip(known, f"there is no estimate: {error}")
        tables = _Tables(asked, [data.rows[client] for client in asked], true, estimation.outcomes(ours), estimation)
        return estimation.update(known, round, tables, said)

    def _asked(self, round: int) -> list[int]:
        """Return the clients whose held-out samples an estimate is made from, ascending."""
        sizes = np.array([len(rows) for rows in self.held_out.rows])
        if sizes.sum() <= self._estimation.ask:
            return np.flatnonzero(sizes).tolist()
        order = generator(self.seed, Purpose.ASKED, round).permutation(len(sizes))
        before = np.cumsum(sizes[order]) - sizes[order]
        return sorted(order[(before < self._estimation.ask) & (sizes[order] > 0)].tolist())


class _Tables(Mapping[int, NDArray[np.float64]]):
    """Each client's table of outcomes, made when it is asked for: all of them may not fit into memory."""

    def __init__(
        self,
        clients: list[int],
        rows: list[NDArray[np.int64]],
        true: NDArray[np.int64],
        cells: NDArray[np.int64],
        estimation: Estimation,
    ) -> None:
        ends = np.cumsum([len(own) for own in rows]).tolist()
        self._places = {
            client: slice(start, end) for client, start, end in zip(clients, [0, *ends], ends, strict=False)
        }
        self._true, self._cells, self._estimation = true, cells, estimation

    def __getitem__(self, client: int) -> NDArray[np.float64]:
        place = self._places[client]
        return outcome_table(self._true[place], self._cells[place], self._estimation.classes, self._estimation.bins)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
