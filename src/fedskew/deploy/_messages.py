"""What a server and a site say to each other, as Flower's records.

    arrays      ArrayRecord     the model: the network's state dict
    broadcast   ArrayRecord     what the method sends beside the model; absent where that is nothing
    config      ConfigRecord    server-round, and for a site of ours: fedskew-run, -client, -epochs, -counted, and
                                -steps and -quota where they apply

A reply holds `arrays`, `metrics`, and `reply` with what the method returns beside the model. A stock Flower server
sends `arrays` and `config` with `server-round`; a stock Flower client reads only those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedskew.deploy._arrays import encode
from fedskew.engine import Assignment
from fedskew.errors import RunError

ARRAYS, BROADCAST, CONFIG, METRICS, REPLY = "arrays", "broadcast", "config", "metrics", "reply"
ROUND = "server-round"
RUN, CLIENT, EPOCHS, COUNTED, STEPS, QUOTA = (
    f"fedskew-{key}" for key in ("run", "client", "epochs", "counted", "steps", "quota")
)
REPORT_SAMPLES = "fedskew-report-samples"
"""Asks for the number of samples with the reply, of a site that may report it."""

COUNTS, SAMPLES, LOSS, CONFUSION, EVALUATION_LOSS = (
    "label-counts",
    "num-examples",
    "train-loss",
    "confusion",
    "eval-loss",
)
"""Metrics of replies."""

LAST_COUNTED = "deployed.counted"
"""Client state that the server keeps of a site: the last round whose update it aggregated (see `SiteStates`)."""


class TrainInstruction(NamedTuple):
    """What one site is to do in a round.

    Attributes:
        run: Identifier of the federation's run, hex digits; stays the same when the run is resumed.
        round: The round, from 1.
        client: The site's client index.
        epochs: Local epochs.
        counted: The last round in which this site's update was aggregated; 0 before the first.
        steps: Most local steps; None: no limit.
        quota: Samples of each class to train on; None: all samples.
    """

    run: str
    round: int
    client: int
    epochs: int
    counted: int
    steps: int | None = None
    quota: tuple[int, ...] | None = None

    @classmethod
    def of(cls, run: str, round: int, assignment: Assignment) -> TrainInstruction:
        """The instruction that corresponds to an engine's assignment."""
        quota = None if assignment.quota is None else tuple(int(share) for share in assignment.quota)
        counted = int(assignment.state[LAST_COUNTED]) if LAST_COUNTED in assignment.state else 0
        return cls(run, round, assignment.client, assignment.epochs, counted, assignment.steps, quota)

    @classmethod
    def parse(cls, config: ConfigRecord) -> TrainInstruction | None:
        """Read the instruction from a message's config.

        Returns:
            The instruction; None where the server is not fedskew's.

        Raises:
            RunError: A value is missing or of the wrong kind.
        """
        if CLIENT not in config:
            return None
        numbers = {key: config.get(key) for key in (ROUND, CLIENT, EPOCHS, COUNTED)}
        run, steps, quota = config.get(RUN), config.get(STEPS), config.get(QUOTA)
        wrong = [key for key, value in numbers.items() if not _is_count(value)]
        if wrong or not isinstance(run, str) or not run or not set(run) <= set("0123456789abcdef") or len(run) > 64:
            raise RunError(f"the server's config has no valid {wrong[0] if wrong else RUN!r}: {dict(config)!r:.200}")
        if (steps is not None and not _is_count(steps)) or (
            quota is not None and not (isinstance(quota, list) and all(map(_is_count, quota)))
        ):
            raise RunError(f"the server's config has no valid steps or quota: {dict(config)!r:.200}")
        return cls(
            run,
            numbers[ROUND],  # type: ignore[arg-type]
            numbers[CLIENT],  # type: ignore[arg-type]
            numbers[EPOCHS],  # type: ignore[arg-type]
            numbers[COUNTED],  # type: ignore[arg-type]
            steps,  # type: ignore[arg-type]
            None if quota is None else tuple(quota),  # type: ignore[arg-type]
        )

    def assignment(self, state: Mapping[str, Tensor]) -> Assignment:
        """The engine's assignment at a site that kept `state` since its last participation."""
        quota = None if self.quota is None else np.array(self.quota, dtype=np.float64)
        return Assignment(self.client, self.epochs, state, quota, self.steps)

    def content(
        self, arrays: ArrayRecord, broadcast: Mapping[str, Tensor], config: Mapping[str, Any] | None = None
    ) -> RecordDict:
        """The records of a training message.

        Args:
            arrays: The model.
            broadcast: What the method sends beside the model.
            config: Further entries that a user's ServerApp sends to its clients.
        """
        entries = ConfigRecord(dict(config or {}))
        for key, value in (
            (ROUND, self.round),
            (RUN, self.run),
            (CLIENT, self.client),
            (EPOCHS, self.epochs),
            (COUNTED, self.counted),
            (STEPS, self.steps),
            (QUOTA, None if self.quota is None else list(self.quota)),
        ):
            if value is not None:
                entries[key] = value
        content = RecordDict({ARRAYS: arrays, CONFIG: entries})
        if broadcast:
            content[BROADCAST] = encode(broadcast)
        return content


def counted_in(round: int) -> dict[str, Tensor]:
    """The client state that the server keeps once an update of this round is aggregated."""
    return {LAST_COUNTED: torch.tensor([round], dtype=torch.int64)}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
