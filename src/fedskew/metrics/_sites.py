"""Figures of a model at each client, by the client's own test samples, and what they are over the clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedskew.metrics._findings import finding_figures
from fedskew.metrics._scores import Scores
from fedskew.parameters import IntArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SiteRow:
    """The figures of one model at one client, by the client's own test samples; NaN where one is undefined.

    Attributes:
        row: Whose model it is: the one that the client trained "alone", the federation's "common" one, the client's
            "personal" one, or the one of all clients' samples in one place, "pooled".
        samples: The client's test samples, at least one.
    """

    client: int
    row: str
    samples: int
    accuracy: float
    balanced_accuracy: float
    macro_f1: float
    auroc: float
    pr_auc: float
    ece: float
    loss: float

    ROWS = ("alone", "common", "personal", "pooled")
    """The rows in the order of a table."""
    FIGURES = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "pr_auc", "ece", "loss")
    LOW = ("ece", "loss")
    """The figures that are the better the lower they are."""

    @staticmethod
    def of(
        row: str, tests: Sequence[IntArray], logits: Callable[[int], ArrayLike | Tensor], several: bool = False
    ) -> tuple[SiteRow, ...]:
        """Make one row of the table for every client that has test samples.

        Args:
            row: Whose model the logits are of.
            tests: Class ids of each client's test samples, of `several` labels their bits; `tests[client]` is
                `(samples,)`, possibly none.
            logits: Called with the id of each client that has test samples, in order; returns the logits (or logarithms
                of probabilities) of these samples, `(samples, classes)`, in the order of `tests[client]`.
        """
        found = (
            (client, len(labels), finding_figures(z, labels) if several else Scores.of(z, labels).figures())
            for client, labels in enumerate(tests)
            if len(labels)
            for z in [logits(client)]
        )
        return tuple(
            SiteRow(client, row, samples, **{name: figures.get(name, math.nan) for name in SiteRow.FIGURES})
            for client, samples, figures in found
        )

    def cells(self) -> list[Any]:
        """Return the values as a line of CSV holds them; None where one is undefined."""
        return [None if value != value else value for value in vars(self).values()]

    @staticmethod
    def over_clients(rows: Sequence[SiteRow]) -> dict[str, dict[str, dict[str, Any]]]:
        """Summarise rows over the clients: `found[row][figure]`, by the rows that there are, in the order of a table.

        Each has `clients` (for how many the figure is defined), `mean`, `weighted` (mean, weighted by test samples),
        `median`, `worst_tenth` (mean over the worst tenth of the clients, their number rounded up), `std` (standard
        deviation, ddof 0), and, where there is a row "alone" to compare with, `losing`: how many clients have a worse
        figure than alone. Numbers are None where no client has the figure.
        """
        kinds = [kind for kind in SiteRow.ROWS if any(one.row == kind for one in rows)]
        by_kind = {kind: {one.client: one for one in rows if one.row == kind} for kind in kinds}
        return {
            kind: {figure: _summary(by_kind[kind], by_kind.get("alone", {}), figure) for figure in SiteRow.FIGURES}
            for kind in kinds
        }


def _summary(rows: dict[int, SiteRow], alone: dict[int, SiteRow], figure: str) -> dict[str, Any]:
    known = {client: value for client, one in rows.items() if math.isfinite(value := getattr(one, figure))}
    values, sign = np.array(list(known.values())), -1 if figure in SiteRow.LOW else 1
    found: dict[str, Any] = {"clients": len(known)}
    if not known:
        return found | dict.fromkeys(("mean", "weighted", "median", "worst_tenth", "std"))
    worst = sign * np.sort(sign * values)[: -(-len(values) // 10)]
    sizes = [rows[client].samples for client in known]
    found |= {
        "mean": float(values.mean()),
        "weighted": float(np.average(values, weights=sizes)),
        "median": float(np.median(values)),
        "worst_tenth": float(worst.mean()),
        "std": float(values.std()),
    }
    if alone and rows is not alone:
        pairs = [(value, getattr(alone[client], figure)) for client, value in known.items() if client in alone]
        found["losing"] = sum(sign * value < sign * other for value, other in pairs)
    return found
