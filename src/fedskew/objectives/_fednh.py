"""FedNH: features are compared with prototypes of the classes, which are spread out at first and then follow the data.

Dai, Chen, Li, Heinecke, Sun and Xu, "Tackling Data Heterogeneity in Federated Learning with Class Prototypes", AAAI
2023. z are a sample's features, W_c the prototype of class c, and u(x) = x / |x|:

    f_{n,c} = s cos(z_n, W_c)                               s is learnt, and averaged with the rest
    L       = mean_n  -log softmax(f_n)[y_n]
    m_{k,c} = u( mean of u(z) over client k's samples of c )
    W_c     <- u( rho W_c + (1 - rho) u( sum_k n_{k,c} m_{k,c} ) )      at the server, over the clients that replied

W is not trained. It begins with orthonormal rows; a class that no client of a round holds keeps its prototype. rho =
0.9, as in the authors' code, whose server averages the models plainly: the preset has uniform weights. n_{k,c} is what
a client says: where there is a `training.weight_limit`, no client's share of a class, n_{k,c} / sum_k n_{k,c}, is above
it (of fewer than 1 / limit clients that hold the class, all have the same).

The authors' clients make m_{k,c} by one more pass over their data, in evaluation mode, with the model that they
trained. Here it is of the last local epoch, taken while the model moves, as FPL's prototypes are, so that it costs
nothing; where the last epoch is not trained to its end, of as many last batches as an epoch has, or of all if they are
fewer, and n_{k,c} counts the samples of these. fluke's code (a0bd26a) weighs the old prototypes by 0.1 (`smoothing =
0.1` gives its step), takes the mean of z instead of u(z), and has NaN for a class that no client of a round holds.
"""

from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from fedskew.components import Cost
from fedskew.hooks import Batch, Hooks, LocalEnd, Named, Returned, RoundEnd
from fedskew.mixing import limited
from fedskew.models import OnPrototypes, unit_rows
from fedskew.objectives._cross_entropy import CrossEntropyOf
from fedskew.objectives._tensors import ClassMeans
from fedskew.parameters import Positive, Share, component

SUMS, MEANS, COUNTS = "fednh.sums", "fednh.means", "fednh.counts"
_CLASS_MEANS = ClassMeans(SUMS, MEANS, COUNTS)
_ROUNDING = 1e-3
"""How far the length of a returned mean direction may be above 1; it is 0 where the samples have no direction."""


@component
class FedNH(CrossEntropyOf, Hooks):
    """Cross-entropy on cosines of the features with prototypes, which the server moves towards the classes' features.

    Attributes:
        smoothing: How much of the old prototypes stays in a round (rho).
        scale: What the cosines are multiplied by, to begin with; it is learnt.
    """

    smoothing: Share = 0.9
    scale: Positive = 1.0

    paper: ClassVar[str] = "Dai et al., AAAI 2023"
    reveals_label_counts: ClassVar[bool] = True
    weighs_classes: ClassVar[bool] = True
    fixes_last_layer: ClassVar[bool] = True
    bounded_returns: ClassVar[frozenset[str]] = frozenset({MEANS, COUNTS})
    cost: ClassVar[Cost] = Cost(numbers=("C features up", "C up"))

    def adapt(self, module: nn.Module, generator: Generator) -> nn.Module:
        """Return the network with prototypes in place of its head; ArgumentError where it has none."""
        return OnPrototypes(module, self.scale, generator)

    def gather(self, gathered: Named, batch: Batch, last_epoch: bool) -> Named:
        """Sum the directions of features by class, `(classes, dim)`, and count their samples, over the last epoch."""
        return _CLASS_MEANS.gather(gathered, batch, unit_rows(batch.features)) if last_epoch else gathered

    def end_local(self, end: LocalEnd) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return each class's mean direction, `(classes, dim)`, and its number of samples; nothing is kept."""
        reply = _CLASS_MEANS.reply(end.gathered)
        return {}, reply | {MEANS: unit_rows(reply[MEANS])} if reply else {}

    def refuse(self, returned: Named, seen: Returned) -> str | None:
        """Return a reason if the numbers of samples can't be, or a mean direction is longer than 1."""
        if (reason := _CLASS_MEANS.refuse(returned, seen)) is not None or COUNTS not in returned:
            return reason
        lengths = torch.linalg.vector_norm(returned[MEANS].double(), dim=1)
        if bool((lengths > 1 + _ROUNDING).any()):
            return "a class's mean direction is longer than 1"
        return None

    def next_model(self, end: RoundEnd) -> Tensor:
        """Return the model with the next prototypes."""
        replies = [reply for reply in end.replies if MEANS in reply]
        if not replies:
            return end.new
        classes, dim = replies[0][MEANS].shape
        part = slice(classes * dim)
        old = unit_rows(end.old[part].view(classes, dim).double())
        shares = [reply[COUNTS].to(old) for reply in replies]
        if end.weight_limit is not None:
            shares = _limited(shares, end.weight_limit)
        total = torch.zeros_like(old)
        for share, reply in zip(shares, replies, strict=True):
            total += share.unsqueeze(1) * reply[MEANS].to(total)
        moved = unit_rows(self.smoothing * old + (1 - self.smoothing) * unit_rows(total))
        held = total.any(dim=1, keepdim=True)
        parameters = end.new.clone()
        parameters[part] = torch.where(held, moved, old).to(parameters.dtype).flatten()
        return parameters


def _limited(counts: list[Tensor], limit: float) -> list[Tensor]:
    """Return each reply's shares of the classes, `(classes,)`; none above the limit if a class has clients enough."""
    reported = torch.stack(counts)
    shares = torch.zeros_like(reported)
    for label in torch.nonzero(reported.sum(dim=0)).flatten().tolist():
        of_class = reported[:, label].cpu().numpy()
        shares[:, label] = torch.from_numpy(limited(of_class / of_class.sum(), limit, of_class))
    return list(shares)
