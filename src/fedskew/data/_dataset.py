"""A labelled data set, held once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples as tensors, normalised once.

    - `inputs`, `(samples, *in_shape)` float32, and `targets`, `(samples,)` int64; `test_inputs` and `test_targets`
      alike.
    - `classes`: names, by class id. `mean` and `std`: what inputs were normalised by, one value a channel (a feature,
      where they are no pictures); empty where they were not.
    - `clients`, `(samples,)` int64: the natural client of each training sample, where there are such; `client_names`
      by id.
    - `target`, `(classes,)` float64: the label mix that the task itself asks for, where it does.

    Raises ArgumentError naming the field whose shape, dtype or values don't fit.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    clients: NDArray[np.int64] | None = None
    client_names: tuple[str, ...] = ()
    target: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        for part in ("", "test_"):
            self._check_part(f"{part}inputs", f"{part}targets")
        if self.test_inputs.shape[1:] != self.inputs.shape[1:]:
            raise ArgumentError(
                f"test_inputs: samples are {tuple(self.test_inputs.shape[1:])}, but those of inputs {self.in_shape}"
            )
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.inputs.shape[1]):
            raise ArgumentError(f"mean, std: expected {self.inputs.shape[1]} values each, or none")
        if self.clients is not None:
            _check_ids("clients", torch.as_tensor(self.clients), len(self.targets), len(self.client_names))
        if self.target is not None and (
            self.target.shape != (self.num_classes,)
            or not (self.target >= 0).all()
            or not 0 < self.target.sum() < np.inf
        ):
            raise ArgumentError(f"target: expected {self.num_classes} shares, none negative and not all 0")

    @property
    def num_classes(self) -> int:
        """How many classes there are, with samples or without."""
        return len(self.classes)

    @property
    def in_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.inputs.shape[1:])

    def _check_part(self, inputs_name: str, targets_name: str) -> None:
        inputs, targets = getattr(self, inputs_name), getattr(self, targets_name)
        if inputs.dtype != torch.float32 or inputs.dim() < 2 or not inputs.numel():
            raise ArgumentError(
                f"{inputs_name}: expected float32 samples, (samples, ...), at least one; "
                f"got {tuple(inputs.shape)} {inputs.dtype}"
            )
        low, high = inputs.aminmax()
        if not (low.isfinite() and high.isfinite()):
            raise ArgumentError(f"{inputs_name}: has a value that is NaN or infinite")
        _check_ids(targets_name, targets, len(inputs), self.num_classes)


def _check_ids(name: str, ids: Tensor, samples: int, known: int) -> None:
    if ids.dtype != torch.int64 or ids.shape != (samples,):
        raise ArgumentError(f"{name}: expected int64, ({samples},); got {tuple(ids.shape)} {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= known:
        raise ArgumentError(f"{name}: ids must lie in 0 to {known - 1}; found {low if low < 0 else high}")
