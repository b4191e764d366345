"""Evaluates a network on a labelled data set."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedskew import metrics
from fedskew.data import Inputs
from fedskew.engine._records import Evaluation

BATCH = 1000


@torch.inference_mode()
def predict(network: nn.Module, inputs: Inputs, targets: Tensor, num_classes: int) -> tuple[NDArray[np.int64], float]:
    """Predict the classes of a data set, and compare them with the true ones.

    Args:
        network: The network; it is set to eval mode.

    Returns:
        The confusion matrix, `(classes, classes)`, with a row for each true class, and the mean cross-entropy.
    """
    network.eval()
    confusion = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=targets.device)
    loss = torch.zeros((), dtype=torch.float64, device=targets.device)
    for start in range(0, len(targets), BATCH):
        y = targets[start : start + BATCH]
        x = _samples(inputs, start, len(y))
        logits = network(x)
        loss += functional.cross_entropy(logits, y, reduction="sum").double()
        confusion += torch.bincount(y * num_classes + logits.argmax(1), minlength=num_classes * num_classes)
    table = confusion.reshape(num_classes, num_classes).cpu().numpy()
    return table, float(loss) / max(len(targets), 1)


def _samples(inputs: Inputs, start: int, size: int) -> Tensor:
    """Consecutive samples; a view if the inputs are a tensor."""
    if isinstance(inputs, Tensor):
        return inputs[start : start + size]
    return inputs.index_select(0, torch.arange(start, start + size, device=inputs.device))


def evaluation(confusion: NDArray[np.int64], loss: float, target: NDArray[np.float64] | None) -> Evaluation:
    """Compute the metrics of an evaluation.

    Args:
        confusion: Confusion matrix, `(classes, classes)`, with a row for each true class.
        target: Target label mix, `(classes,)`; None: there is no target.
    """
    return Evaluation(
        accuracy=float(np.trace(confusion) / max(confusion.sum(), 1)),
        loss=loss if math.isfinite(loss) else None,
        balanced_accuracy=metrics.balanced_accuracy(confusion),
        macro_f1=metrics.macro_f1(confusion),
        per_class=plain(metrics.per_class_accuracy(confusion)),
        confusion=confusion.tolist(),
        target_accuracy=None if target is None else _defined(metrics.target_accuracy(confusion, target)),
    )


def plain(values: NDArray[np.float64]) -> list[float | None]:
    """Convert an array to a list of floats, with None in place of NaN, which JSON does not have."""
    return [_defined(float(value)) for value in values]


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value
