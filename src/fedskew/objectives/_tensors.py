"""What the losses share: reductions over part of a tensor, divergences, and sums by class.

Reductions are finite in value and in gradient where the part is empty. The part is a bool tensor, never an index, so
that every client of a mapped cohort runs the same operations. What is left out is replaced before the operation as well
as after it (a "double where"): with a mask on the result alone, a NaN or an infinity in the left-out part would come
back through the gradient as 0 * inf.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fedskew.hooks import Batch, Named, Returned

Change: TypeAlias = "tuple[Tensor | None, Tensor | None, Tensor | None]"
"""What logits are multiplied by, what is added to them, and which of them are out, `(..., classes)`; None: nothing."""
Out: TypeAlias = "tuple[Tensor | None, Tensor | None]"
"""Which classes the student leaves out, and which the teacher: masks for `(..., batch, classes)`; None: no class."""
LEAST = -1e30
"""Stands for a logit of minus infinity, where 0 times the logarithm of its share, which is 0, would be NaN."""
_NLL, _NLL_BACKWARD = torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss_backward.default


def real_rows(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return `values`, `(..., batch, ...)`, with padded rows set to 0; unchanged if `mask` is None."""
    if mask is None:
        return values
    return torch.where(mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim)), values, 0)


def number_of_rows(outputs: Tensor, mask: Tensor | None) -> Any:
    """Return the number of real rows: `(..., 1, 1)` in the outputs' dtype, or Python's own where all are."""
    return outputs.shape[-2] if mask is None else mask.sum(-1).to(outputs.dtype)[..., None, None]


def at_least_1(number: Any) -> Any:
    """Return a number, or those of a tensor, or 1 if that is more."""
    return number.clamp(min=1) if isinstance(number, Tensor) else max(number, 1)


def real_pairs(pairs: Tensor, mask: Tensor | None) -> Tensor:
    """Return a bool `(..., batch, batch)`, with those of padded rows set to False."""
    return pairs if mask is None else pairs & mask.unsqueeze(-2) & mask.unsqueeze(-1)


def row_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of `values`, `(..., batch)`, over real rows; 0 if there is none."""
    if mask is None:
        return values.mean(-1)
    return torch.where(mask, values, 0).sum(-1) / mask.sum(-1).clamp(min=1)


def is_target(targets: Tensor, classes: int) -> Tensor:
    """Return a `(..., batch, classes)` mask that is True at each row's class."""
    return targets.unsqueeze(-1) == torch.arange(classes, device=targets.device)


def logsumexp_over(values: Tensor, keep: Tensor) -> Tensor:
    """Return the log of the sum of the kept exponentials along the last dimension; 0 if nothing is kept."""
    empty = ~keep.any(-1, keepdim=True)
    total = torch.where(keep | empty, values, -math.inf).logsumexp(-1)
    return torch.where(empty.squeeze(-1), 0, total)


def mean_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor | None, weights: Tensor | None = None) -> Tensor:
    """Return the mean over real rows of cross-entropy, each times the weight of its class if there are weights; not
    divided by those of a batch, as where a client holds one class, they would cancel out."""
    if mask is None and weights is None and logits.dim() == 2:
        return F.cross_entropy(logits, targets)
    logits, targets = real_rows(logits, mask), real_rows(targets, mask)
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    return row_mean(losses if weights is None else losses * weights[targets], mask)


def by_rows(slopes: Tensor, mask: Tensor | None) -> Tensor:
    """Return the gradient of a mean over real rows from each row's, `(..., batch, classes)`, which it overwrites."""
    if mask is None:
        return slopes.div_(slopes.shape[-2])
    return slopes.mul_((mask.to(slopes.dtype) / mask.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1))


def cross_entropy_slope(
    logits: Tensor, targets: Tensor, mask: Tensor | None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the same of `(..., batch, classes)`, and its gradient by the logits."""
    if mask is None and logits.dim() == 2:  # of one client, by autograd's functions; -100: no class is ignored
        log_shares, share, how = torch.log_softmax(logits, 1), logits.new_ones(()), (weights, 1, -100)  # the mean
        if weights is not None:  # the sum, by rows: PyTorch's mean would be divided by the weights of the batch
            share, how = share / logits.shape[0], (weights, 2, -100)
        loss, rows = _NLL(log_shares, targets, *how)
        by_shares = _NLL_BACKWARD(share, log_shares, targets, *how, rows)
        loss = loss if weights is None else loss / logits.shape[0]
        return loss, torch._log_softmax_backward_data(by_shares, log_shares, 1, logits.dtype)
    logits, targets = real_rows(logits, mask), real_rows(targets, mask)
    log_shares, at = torch.log_softmax(logits, -1), targets.unsqueeze(-1)
    losses = log_shares.gather(-1, at).squeeze(-1).neg_()
    gradient = log_shares.exp_().scatter_add_(-1, at, log_shares.new_full((), -1.0).expand(at.shape))
    if weights is not None:
        losses, gradient = losses * weights[targets], gradient.mul_(weights[at])
    return row_mean(losses, mask), by_rows(gradient, mask)


def all_but(possible: Tensor) -> Tensor:
    """Return which classes are out of a softmax, `(..., classes)`; of an empty client, for which none is possible, none
    are, as all of its rows are padding and only need to stay finite."""
    return ~possible & possible.any(-1, keepdim=True)


def balanced(counts: Tensor, least: float) -> Change:
    """Return the change of logits to which the logs of counts are added, which are at least `least` each; those of 0
    are out of a softmax."""
    possible = counts > 0
    out = None if least > torch.finfo(counts.dtype).tiny else all_but(possible)
    return None, torch.where(possible, counts, 1).log(), out


def divergence(log_teacher: Tensor, log_student: Tensor) -> Tensor:
    """Return KL(teacher || student) of each row; both log-probabilities must be 0 at classes left out."""
    return (log_teacher.exp() * (log_teacher - log_student)).sum(dim=-1)


def distilled(batch: Batch, teacher: Tensor, out: Out, temperature: float) -> Tensor:
    """Return T^2 times the mean KL of the teacher from the student, over the classes that the teacher does not leave
    out. A row is worth 0 where both leave out all."""
    log_student, log_teacher = _log_shares(batch, teacher.detach(), out, temperature)
    return temperature**2 * row_mean(divergence(log_teacher, log_student), batch.mask)


def distilled_slope(batch: Batch, teacher: Tensor, out: Out, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the same, and its gradient by the student's logits."""
    log_student, log_teacher = _log_shares(batch, teacher, out, temperature)
    taught = log_teacher.exp()
    value = row_mean((taught * (log_teacher - log_student)).sum(-1), batch.mask)
    gradient = by_rows(log_student.exp() - taught, batch.mask)
    return (value, gradient) if temperature == 1 else (temperature**2 * value, temperature * gradient)


def _log_shares(batch: Batch, teacher: Tensor, out: Out, temperature: float) -> list[Tensor]:
    found = []
    for logits, left_out in zip((batch.logits, teacher), out, strict=True):
        logits = real_rows(logits, batch.mask)
        logits = logits if temperature == 1 else logits / temperature
        found.append((logits if left_out is None else logits.masked_fill(left_out, LEAST)).log_softmax(-1))
    return found


def shares_of(counts: Tensor) -> Tensor:
    """Return the classes' shares of a client's counts, `(..., classes)`; all 0 for an empty client."""
    total = counts.sum(-1, keepdim=True)
    return counts / torch.where(total > 0, total, 1)


def at_target(batch: Batch) -> Tensor:
    """Return a `(..., batch, classes)` mask that is True at each row's class; of padding at class 0."""
    return is_target(real_rows(batch.targets, batch.mask), batch.logits.shape[-1])


class ClassMeans(NamedTuple):
    """Mean vectors of a client's classes over its last local epoch: the names under which a component has them.

    Attributes:
        sums: Sums of vectors by class, `(classes, dim)`; gathered.
        means: Mean vectors by class, `(classes, dim)`, zeros where there is none; returned.
        counts: Numbers of samples, `(classes,)`; gathered and returned.
    """

    sums: str
    means: str
    counts: str

    def gather(self, gathered: Named, batch: Batch, vectors: Tensor) -> Named:
        """Add a batch's vectors, `(batch, dim)`, to the sums, and its samples to the counts."""
        of_class = is_target(batch.targets, batch.logits.shape[1]).to(vectors.dtype)
        of_class = real_rows(of_class, batch.mask)
        sums, counts = of_class.T @ real_rows(vectors, batch.mask), of_class.sum(dim=0)
        if gathered:
            sums, counts = sums + gathered[self.sums], counts + gathered[self.counts]
        return {self.sums: sums, self.counts: counts}

    def reply(self, gathered: Named) -> dict[str, Tensor]:
        """Return the means and counts of what was gathered; nothing where nothing was."""
        if not gathered:
            return {}
        counts = gathered[self.counts]
        return {self.means: gathered[self.sums] / counts.clamp(min=1).unsqueeze(1), self.counts: counts}

    def refuse(self, returned: Named, seen: Returned) -> str | None:
        """Return a reason if the numbers of samples can't be, or a class without a sample has a mean."""
        if self.counts not in returned:
            return None
        counts = returned[self.counts]
        whole = bool((counts >= 0).all()) and bool((counts == counts.round()).all())
        if not whole or float(counts.sum()) > seen.samples:
            return f"the numbers of samples with its class means are not whole, or above {seen.samples} together"
        if bool(returned[self.means][counts == 0].any()):
            return "it returns the mean of a class of which it says that it saw no sample"
        return None
