"""Losses as functions of tensors, where `fedskew.objectives.functional` has none."""

from __future__ import annotations

import torch
from torch import Tensor

from fedskew.objectives import INDEX, Batch, Context


def value_of(name: str, outputs: Tensor, targets: Tensor | None = None, counts=None, mask=None, **parameters) -> Tensor:
    """A component's value; `outputs` are features and logits in one."""
    targets = torch.zeros(len(outputs), dtype=torch.int64) if targets is None else targets
    return INDEX[name](**parameters).value(Batch(outputs, outputs, targets, mask), Context(counts))


def balanced_cross_entropy(logits, targets, counts, least=0.0, mask=None) -> Tensor:
    return value_of("fedrod", logits, targets, counts, mask, least=least)


def fedgela(logits, targets, counts, mask=None) -> Tensor:
    return value_of("fedgela", logits, targets, counts, mask)


def classifier_variance(logits, mask=None) -> Tensor:
    return value_of("classifier_variance", logits, mask=mask)


def uniformity(features, mask=None) -> Tensor:
    return value_of("uniformity", features, mask=mask)


def feddecorr(features, mask=None) -> Tensor:
    return value_of("feddecorr", features, mask=mask)
