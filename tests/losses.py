"""Losses on one client's batch, whose outputs are features and logits in one."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedskew.models import Outputs
from fedskew.objectives import INDEX, Batch, Context

VACANT = {
    "no vacant class": (3.0, 1.0, 4.0, 2.0, 6.0),
    "one vacant class": (3.0, 0.0, 4.0, 2.0, 6.0),
    "two vacant classes": (3.0, 0.0, 4.0, 0.0, 6.0),
    "all classes vacant but one": (0.0, 0.0, 7.0, 0.0, 0.0),
}
PROTOTYPES, OF_CLASSES = np.random.default_rng(3).normal(size=(5, 5)), np.array([0, 0, 1, 2, 4])  # none of class 3


class Client(NamedTuple):
    """One client's batch and constants; `inputs` is what a loss is differentiated by."""

    inputs: Tensor
    targets: Tensor
    counts: Tensor
    teacher: Tensor
    mask: Tensor | None = None


def client(counts: tuple[float, ...], rows: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64) -> Client:
    rng = np.random.default_rng(seed)
    observed = np.flatnonzero(counts)
    return Client(
        inputs=torch.tensor(rng.normal(scale=2, size=(rows, len(counts))), dtype=dtype),
        targets=torch.tensor(observed[rng.integers(len(observed), size=rows)]),
        counts=torch.tensor(counts, dtype=dtype),
        teacher=torch.tensor(rng.normal(scale=2, size=(rows, len(counts))), dtype=dtype),
    )


def read_of(of: Client) -> tuple[Batch, Context]:
    """What a loss reads where features are logits, and the previous model is the sent one's mirror image."""
    sent, previous = (Outputs(rows, rows) for rows in (of.teacher, of.teacher.flip(1)))
    rows = torch.tensor(PROTOTYPES, dtype=of.inputs.dtype)
    prototypes = {"fpl.prototypes": rows, "fpl.classes": torch.tensor(OF_CLASSES)}
    return Batch(of.inputs, of.inputs, of.targets, of.mask), Context(of.counts, sent, previous, prototypes)


def value_of(loss: Any, of: Client) -> Tensor:
    return loss.value(*read_of(of))


def slope_of(loss: Any, batch: Batch, context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """Its value and gradients by features and by logits, as it gives them itself."""
    with torch.no_grad():
        value, by_logits, by_features = (*loss.slope(batch, context), None)[:3]
    pairs = (by_features, batch.features), (by_logits, batch.logits)
    return value, *(torch.zeros_like(like) if by is None else by for by, like in pairs)


def value_by_name(
    name: str, outputs: Tensor, targets: Any = None, counts: Any = None, mask: Any = None, teacher: Any = None, **given
) -> Tensor:
    """A component's value by its name and parameters, without a previous model."""
    targets = torch.zeros(len(outputs), dtype=torch.int64) if targets is None else targets
    sent = None if teacher is None else Outputs(teacher, teacher)
    return INDEX[name](**given).value(Batch(outputs, outputs, targets, mask), Context(counts, sent))
