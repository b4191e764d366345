"""FedDKD: distillation split into the true class against the others, and the others among themselves.

Zhao et al., "Decoupled Knowledge Distillation", CVPR 2022; as a federated term, the FedVLS paper's table 13.

    L    = alpha TCKD + beta NCKD
    TCKD = T^2 mean_n KL( (p^g_y, 1 - p^g_y) || (p_y, 1 - p_y) ),    p = softmax(f / T)
    NCKD = T^2 mean_n KL( q^g_n || q_n ),                            q = softmax(f / T) over c != y_n

At T = 1 distillation over all classes is TCKD plus the mean of (1 - p^g_y) times the row of NCKD. The authors' library
has alpha 1, beta 8, T 4 and a warm-up of 20 epochs; FedVLS gives none, so alpha, beta and T are 1, without warm-up.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context, Distillation
from fedskew.objectives._tensors import at_target, distilled, divergence, is_target, logsumexp_over, real_rows, row_mean
from fedskew.parameters import NonNegative, Positive, component


@component
class FedDKD(Distillation):
    """DKD's two terms from the sent model. The FedVLS comparison has the outer weight 0.1.

    Attributes:
        temperature: Divides both models' logits.
        target_weight: Weight of the true class against the others (alpha).
        rest_weight: Weight of the others among themselves (beta).
    """

    temperature: Positive = 1.0
    target_weight: NonNegative = 1.0
    rest_weight: NonNegative = 1.0

    takes_stacks: ClassVar[bool] = True
    paper: ClassVar[str] = "Zhao et al., CVPR 2022"
    warns: ClassVar[Mapping[str, str]] = {
        "objective.fedntd": "FedNTD's term is the second half of FedDKD's, so it would count twice; raise rest_weight"
    }

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`."""
        teacher, own = context.sent.logits, at_target(batch)
        rest = distilled(batch, teacher, (own, own), self.temperature)
        log_teacher, log_student = (
            _against_the_rest(real_rows(logits, batch.mask) / self.temperature, real_rows(batch.targets, batch.mask))
            for logits in (teacher.detach(), batch.logits)
        )
        target = self.temperature**2 * row_mean(divergence(log_teacher, log_student), batch.mask)
        return self.target_weight * target + self.rest_weight * rest


def _against_the_rest(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities of each row's class and of all others together, `(..., batch, 2)`."""
    log_shares = logits.log_softmax(-1)
    own = log_shares.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    # Summed from the others' logs: 1 - p has no digits left where p is near 1.
    others = logsumexp_over(log_shares, ~is_target(targets, logits.shape[-1]))
    return torch.stack([own, others], dim=-1)
