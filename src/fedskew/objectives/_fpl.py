"""FPL: pull features towards their class's prototypes, and away from other classes'.

Huang et al., "Rethinking Federated Learning with Domain Shift: A Prototype View", CVPR 2023.

    L = mean_n [ -log( sum_{P of class y_n} e^{cos(f_n, P) / T} / sum_P e^{cos(f_n, P) / T} )
                 + |f_n - m_{y_n}|^2 / dim ]

m_c is the mean of class c's prototypes. A row whose class has no prototype adds 0, but counts in the mean.

A client returns the mean feature of each of its classes over its last local epoch, taken while the model moves. The
server clusters those of a class by FINCH, with cosine distance, coarsest partition; a class's prototypes are the means
of its clusters. Every round has the prototypes of the cohort before it, and the first has none: the term is 0.
"""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.components import Cost
from fedskew.errors import optional
from fedskew.hooks import Batch, Hooks, LocalEnd, Named, Returned, RoundEnd
from fedskew.models import lengths_of, unit_rows
from fedskew.objectives._protocol import Context, Term
from fedskew.objectives._tensors import LEAST, ClassMeans, by_rows, real_rows, row_mean
from fedskew.parameters import Positive, component

VALUES, CLASSES = "fpl.prototypes", "fpl.classes"
SUMS, MEANS, COUNTS = "fpl.sums", "fpl.means", "fpl.counts"
_CLASS_MEANS = ClassMeans(SUMS, MEANS, COUNTS)


@component
class FPL(Term, Hooks):
    """FPL's two terms, which pull features towards their class's prototypes. The authors' code has weight 1.

    It needs the extra `fpl`.

    Attributes:
        temperature: Divides the cosines.
    """

    temperature: Positive = 0.02

    shapes_features: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"broadcast"})
    paper: ClassVar[str] = "Huang et al., CVPR 2023"
    reveals_label_counts: ClassVar[bool] = True
    bounded_returns: ClassVar[frozenset[str]] = frozenset({COUNTS})
    cost: ClassVar[Cost] = Cost(numbers=("C features up", "C features or more down"))

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`; 0 without prototypes. A class id of -1 marks a row of padding among the prototypes."""
        if VALUES not in context.broadcast:
            return batch.features[..., :0].sum((-2, -1))
        return self._parts(batch, context.broadcast)[0]

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, None, Tensor | None]:
        """See `Sloped.slope`."""
        if VALUES not in context.broadcast:
            return self.value(batch, context), None, None
        value, own, length, directions, closeness, shares, gap, known = self._parts(batch, context.broadcast)
        along = (shares * closeness).sum(-1, keepdim=True)
        # Of features shorter than 1e-6, which have no direction, the second part is too small to matter.
        by_cosines = torch.addcmul(shares @ directions, own, along, value=-1) / length
        gradient = by_cosines.add_(gap, alpha=2 / gap.shape[-1])
        return value, None, gradient.mul_(by_rows(known.to(gradient.dtype), batch.mask))

    def _parts(self, batch: Batch, sent: Named) -> tuple[Tensor, ...]:
        values, classes = sent[VALUES].detach(), sent[CLASSES].unsqueeze(-2)
        features, targets = real_rows(batch.features, batch.mask), real_rows(batch.targets, batch.mask)
        of_class = targets.unsqueeze(-1) == classes
        held = of_class.sum(-1, keepdim=True)
        known = held > 0
        own, directions = features / (length := lengths_of(features)), unit_rows(values) / self.temperature
        closeness, kept = own @ directions.mT, (classes >= 0, of_class)
        log_all, log_own = (torch.where(one, closeness, LEAST).log_softmax(-1) for one in kept)
        share = log_own.exp()
        contrast = (share * (log_own - log_all)).sum(-1)  # the same for all prototypes of the class
        gap = features - (of_class.to(values.dtype) / held.clamp(min=1)) @ values
        each = torch.where(known.squeeze(-1), contrast + gap.square().mean(-1), 0)
        shares = log_all.exp() - share
        return row_mean(each, batch.mask), own, length, directions, closeness, shares, gap, known

    def init_server(self, parameters: Tensor, clients: int) -> dict[str, Tensor]:
        """Return no prototypes. Raises MissingPackageError where the extra isn't installed."""
        finch()
        return {VALUES: parameters.new_zeros(0, 0), CLASSES: parameters.new_zeros(0, dtype=torch.int64)}

    def broadcast(self, state: Named) -> dict[str, Tensor]:
        """Return the prototypes, `(prototypes, dim)`, and their class ids, `(prototypes,)`; nothing without any."""
        return dict(state) if len(state[CLASSES]) else {}

    def gather(self, gathered: Named, batch: Batch, last_epoch: bool) -> Named:
        """Sum the features by class, `(classes, dim)`, and count their samples, over the last epoch."""
        return _CLASS_MEANS.gather(gathered, batch, batch.features) if last_epoch else gathered

    def end_local(self, end: LocalEnd) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the mean feature of each class, `(classes, dim)`, and its number of samples; nothing is kept."""
        return {}, _CLASS_MEANS.reply(end.gathered)

    def refuse(self, returned: Named, seen: Returned) -> str | None:
        """Return a reason if the numbers of samples can't be, or a class without a sample has a mean."""
        return _CLASS_MEANS.refuse(returned, seen)

    def end_round(self, state: Named, end: RoundEnd) -> dict[str, Tensor]:
        """Return the prototypes of this cohort: the means of the clusters of its clients' mean features, by class."""
        replies = [reply for reply in end.replies if MEANS in reply]
        if not replies:
            return dict(state)
        means = torch.stack([reply[MEANS] for reply in replies]).cpu().numpy()
        held = torch.stack([reply[COUNTS] for reply in replies]).cpu().numpy() > 0
        values, classes = [], []
        for label in np.flatnonzero(held.any(axis=0)):
            points = means[held[:, label], label]
            clusters = coarsest_clusters(points)
            for cluster in np.unique(clusters):
                values.append(points[clusters == cluster].mean(axis=0, dtype=np.float64))
                classes.append(label)
        like = state[VALUES]
        return {
            VALUES: torch.from_numpy(np.stack(values)).to(like),
            CLASSES: torch.from_numpy(np.array(classes, dtype=np.int64)).to(like.device),
        }


def finch() -> Callable[..., Any]:
    """Return FINCH's clustering function; raise MissingPackageError if its package is not installed."""
    with warnings.catch_warnings(action="ignore"):  # it misses packages for millions of points
        function: Callable[..., Any] = optional("finch:FINCH", "FPL needs finch-clust: pip install 'fedskew[fpl]'")
    return function


def coarsest_clusters(points: NDArray[np.float32]) -> NDArray[np.int64]:
    """Cluster points, `(points, dim)`, by FINCH (Sarfraz et al., CVPR 2019) with cosine distance: nearest neighbours
    are linked, and clusters' means clustered again until one is left. Returns the partition before, as ids from 0."""
    if len(points) == 1:
        return np.zeros(1, dtype=np.int64)
    partitions, _, _ = finch()(points, distance="cosine", ensure_early_exit=False, verbose=False)
    return np.asarray(partitions[:, -1], dtype=np.int64)
