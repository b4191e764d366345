"""What a network returns to an objective."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Outputs(NamedTuple):
    """The input of the last linear layer, `(batch, dim)`, and the raw logits, `(batch, classes)`."""

    features: Tensor
    logits: Tensor
