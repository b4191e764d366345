"""Models at each client, evaluated on the client's own test samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fedskew.engine.target import logits_of
from fedskew.experiment._task import Task
from fedskew.metrics import SiteRow, finding_figures
from fedskew.models import FlatModel, ModelState

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class ClientTests:
    """The test samples of all clients, `task.client_test`, and the network that a model is written into."""

    task: Task
    model: FlatModel

    def rows(self, row: str, logits: Callable[[int], ArrayLike | Tensor]) -> tuple[SiteRow, ...]:
        """Make a row of the table for every client that has test samples.

        `logits(client)` returns those of `task.client_test[client]`, `(samples, classes)`, in this order.
        """
        dataset, targets = self.task.dataset, self.task.dataset.targets.numpy()
        if dataset.multi_label:
            own = {client: rows for client, rows in enumerate(self.task.client_test) if len(rows)}
            found = {client: finding_figures(logits(client), targets[rows]) for client, rows in own.items()}
            return tuple(
                SiteRow(client, row, len(rows), **{name: found[client].get(name, np.nan) for name in SiteRow.FIGURES})
                for client, rows in own.items()
            )
        return SiteRow.of(row, [targets[own] for own in self.task.client_test], logits)

    def logits(self, network: nn.Module, client: int) -> FloatArray:
        """Compute the logits of one client's test samples; the network is left in its evaluation mode."""
        return logits_of(network, self.task.dataset.inputs, self.task.client_test[client], finite=False)

    def of_one(self, row: str, state: ModelState) -> tuple[SiteRow, ...]:
        """Make a row of the table for one model at all clients, whose samples go through the network together."""
        self.model.write_state(state)
        own = self.task.client_test
        together = logits_of(self.model.network, self.task.dataset.inputs, np.concatenate(own), finite=False)
        apart = np.split(together, np.cumsum([len(rows) for rows in own])[:-1])
        return self.rows(row, apart.__getitem__)
