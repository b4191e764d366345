"""What a server asks of a site, as Flower's records.

    arrays      ArrayRecord     the model: the network's state dict
    broadcast   ArrayRecord     what the method sends beside the model; absent where that is nothing
    config      ConfigRecord    server-round, and for a site of ours: fedskew-run, -client, -epochs, -counted, and
                                -steps, -quota where there are any

A stock Flower server sends the first and the last with `server-round`, and a stock Flower client reads just those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
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
TELL = "fedskew-tell-samples"
"""Asks for the number of samples with the reply, of a site that may tell it."""


class Task(NamedTuple):
    """What one site is to do in a round.

    `run`: which federation it is, hex digits, the same when it is resumed; `counted`: the last round in which this
    site's update became part of the model, 0 before the first; the rest as in `engine.Assignment`.
    """

    run: str
    round: int
    client: int
    epochs: int
    counted: int
    steps: int | None = None
    quota: tuple[int, ...] | None = None

    @classmethod
    def of(cls, run: str, round: int, assignment: Assignment, counted: int) -> Task:
        """The task of an assignment."""
        quota = None if assignment.quota is None else tuple(int(share) for share in assignment.quota)
        return cls(run, round, assignment.client, assignment.epochs, counted, assignment.steps, quota)

    def assignment(self, state: Mapping[str, Tensor]) -> Assignment:
        """The assignment of a site that kept `state`."""
        quota = None if self.quota is None else np.array(self.quota, dtype=np.float64)
        return Assignment(self.client, self.epochs, state, quota, self.steps)


def instruction(
    task: Task, arrays: ArrayRecord, broadcast: Mapping[str, Tensor], config: Mapping[str, Any] | None = None
) -> RecordDict:
    """The records of a training task; `config`: what else a user's ServerApp tells its clients."""
    told = ConfigRecord(dict(config or {}))
    for key, value in (
        (ROUND, task.round),
        (RUN, task.run),
        (CLIENT, task.client),
        (EPOCHS, task.epochs),
        (COUNTED, task.counted),
        (STEPS, task.steps),
        (QUOTA, None if task.quota is None else list(task.quota)),
    ):
        if value is not None:
            told[key] = value
    content = RecordDict({ARRAYS: arrays, CONFIG: told})
    if broadcast:
        content[BROADCAST] = encode(broadcast)
    return content


def evaluation_instruction(round: int, arrays: ArrayRecord) -> RecordDict:
    """The records of an evaluation."""
    return RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({ROUND: round})})


def task_of(config: ConfigRecord) -> Task | None:
    """The task in a config; None where the server is not ours. Raises RunError where it can't be one."""
    if CLIENT not in config:
        return None
    numbers = {key: config.get(key) for key in (ROUND, CLIENT, EPOCHS, COUNTED)}
    run, steps, quota = config.get(RUN), config.get(STEPS), config.get(QUOTA)
    wrong = [key for key, value in numbers.items() if not _is_count(value)]
    if wrong or not isinstance(run, str) or not run or not set(run) <= set("0123456789abcdef") or len(run) > 64:
        raise RunError(f"the server's config has no proper {wrong[0] if wrong else RUN!r}: {dict(config)!r:.200}")
    if (steps is not None and not _is_count(steps)) or (
        quota is not None and not (isinstance(quota, list) and all(map(_is_count, quota)))
    ):
        raise RunError(f"the server's config has no proper steps or quota: {dict(config)!r:.200}")
    return Task(
        run,
        numbers[ROUND],  # type: ignore[arg-type]
        numbers[CLIENT],  # type: ignore[arg-type]
        numbers[EPOCHS],  # type: ignore[arg-type]
        numbers[COUNTED],  # type: ignore[arg-type]
        steps,  # type: ignore[arg-type]
        None if quota is None else tuple(quota),  # type: ignore[arg-type]
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
