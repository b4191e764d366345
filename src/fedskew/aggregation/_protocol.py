"""The base class of aggregations, and the rules of compatibility that all robust ones share."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedskew.components import seen_by, takes
from fedskew.parameters import FloatArray

PART = 1 << 16
"""Columns of the matrix of updates that are worked on at a time."""

_PROTOTYPES = (
    "its prototypes are averaged plainly beside the updates, so a bad client still moves them; leave one of them out"
)


class Aggregation:
    """A component of the aggregation slot: a frozen dataclass of hyper-parameters that inherits from this class.

    Attributes:
        least: Number of clients that must reply; with fewer, the model stays as it was in that round.
    """

    needs_label_counts: ClassVar[bool] = False

    @property
    def least(self) -> int:
        """Number of clients that must reply; with fewer, the model stays as it was in that round."""
        return 1

    def combine(self, updates: Tensor, weights: FloatArray) -> tuple[Tensor, FloatArray]:
        """Combine the updates of a round; by name it may also take `sent`, `layout`, `kept` and `log`.

        Args:
            updates: Client model minus sent model, shape `(answered, parameters)`, finite.

        Returns:
            Updates and their weights (sum 1), of which the server update takes the weighted sum: either one for each
            client, in the same order, or a single one, shape `(1, parameters)`, with weight 1.
        """
        raise NotImplementedError

    def combine_buffers(self, changes: Tensor, weights: FloatArray, **seen: Any) -> tuple[Tensor, FloatArray]:
        """Combine the changes of the buffers; as `combine`, unless overridden; where that sees parameters, their mean.

        Args:
            changes: Client buffers minus sent buffers, shape `(answered, buffers)`, finite.
        """
        if takes(self, "combine", "layout") or takes(self, "combine", "sent"):
            return changes, weights
        return self.combine(changes, weights, **seen_by(self.combine, seen))


class Robust(Aggregation):
    """An aggregation that bounds what a few bad clients can do."""

    refuses: ClassVar[Mapping[str, str]] = {
        "local_step.corrects_gradients": "what it corrects gradients by (SCAFFOLD's control variates, FedDyn's drift) "
        "is averaged plainly beside the updates, so one bad client moves it without bound; take sgd, fedprox or fedsam "
        "as local step, or mean as aggregation"
    }
    warns: ClassVar[Mapping[str, str]] = {
        "weighting.afl": "AFL's weights rise with the loss that a client reports, so one that lies gets all of the "
        "weight; take fedavg or uniform, or set training.weight_limit",
        **dict.fromkeys(("objective.fpl", "objective.fednh"), _PROTOTYPES),
    }


class Merging(Robust):
    """A robust aggregation that leaves no client's own update."""

    refuses: ClassVar[Mapping[str, str]] = {
        **Robust.refuses,
        "server_update.reads_each_update": "it needs each client's own update (FedNova its steps, FedEXP its length), "
        "and this aggregation merges them coordinate by coordinate; take geometric_median, krum or norm_clipping, or "
        "plain as server update",
    }


def products(updates: Tensor) -> FloatArray:
    """Compute the inner products of all pairs of updates in float64, shape `(answered, answered)`."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64, device=updates.device)
    for part in torch.split(updates, PART, dim=1):
        wide = part.to(torch.float64)
        total += wide @ wide.T
    return total.cpu().numpy()


def by_coordinate(updates: Tensor, weights: FloatArray, lowest: float) -> Tensor:
    """Compute the weighted trimmed mean of each coordinate, shape `(1, parameters)`."""
    lengths = torch.from_numpy(weights).to(updates.device)
    merged = torch.empty_like(updates[:1])
    for share, part in zip(torch.split(merged[0], PART), torch.split(updates, PART, dim=1), strict=True):
        values, order = part.to(torch.float64).sort(dim=0, stable=True)
        ends = lengths[order].cumsum(0)
        begins = ends - lengths[order]
        left = (ends.clamp(max=1 - lowest) - begins.clamp(min=lowest)).clamp(min=0)
        share.copy_((left * values).sum(0) / left.sum(0))
    return merged
