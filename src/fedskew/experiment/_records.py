"""One seed of one config, as reports and trackers read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.engine import ClientEvaluation, Evaluation, Round

__all__ = ["ClientEvaluation", "Evaluation", "Round", "SeedRun"]


@dataclass(frozen=True)
class SeedRun:
    """One seed of one config, as read back from its folder or straight from memory."""

    label: str  # what it is called in a report; seeds of one config share it
    seed: int
    config: dict[str, Any]  # everything, defaults included
    rounds: list[Round]
    counts: NDArray[np.int64]  # (clients, classes), of the clients that train
    client_names: tuple[str, ...]
    class_names: tuple[str, ...]
    target: NDArray[np.float64] | None  # (classes,), sum 1
    summary: dict[str, Any]
