"""Each client's model after its local training, on the test set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedskew import metrics
from fedskew.data import Inputs
from fedskew.engine import ClientEvaluation, plain, predict
from fedskew.experiment._config import Config


@dataclass(frozen=True)
class ClientEvaluations:
    """What a run observes of its clients, in the rounds that `config` evaluates (see `engine.Observer`).

    `inputs`, `(samples, ...)`, and `targets`, `(samples,)`: the test set; `counts`, `(clients, classes)`: whose classes
    are those that a client holds many of, few of, none of.
    """

    config: Config
    inputs: Inputs
    targets: Tensor
    counts: NDArray[np.float64]

    def __call__(self, round: int, client: int, module: nn.Module) -> ClientEvaluation | None:
        """One client's evaluation; None in a round without."""
        if not self.config.is_evaluated(round):
            return None
        confusion, _ = predict(module, self.inputs, self.targets, self.counts.shape[1])
        accuracy = metrics.per_class_accuracy(confusion)
        groups = metrics.class_groups(self.counts[client])
        majority, minority, vacant = (
            _mean_known(accuracy[ids]) for ids in (groups.majority, groups.minority, groups.vacant)
        )
        return {
            "client": client,
            "per_class": plain(accuracy),
            "confusion": confusion.tolist(),
            "majority": majority,
            "minority": minority,
            "vacant": vacant,
        }


def _mean_known(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
