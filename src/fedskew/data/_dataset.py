"""A labelled data set in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.data._stored import Inputs
from fedskew.errors import ArgumentError

Arrays = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and int64 labels of the training part, then of the test part."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples, already normalised.

    Attributes:
        inputs: Training samples, `(samples, *in_shape)`: a tensor of float32 or of int64 token ids (0 pads), or a
            `Stored`, which delivers such tensors.
        targets: Class ids of the training samples, `(samples,)` int64.
        mean: The means that inputs were normalised by, one per channel (per feature if they are no images), like the
            deviations `std`; empty if they were not.
        clients: Natural client of each training sample, `(samples,)` int64, if the data set has such.
        target: The label mix that the task itself asks for, `(classes,)` float64, if it does.
        domains: Source of each training sample, `(samples,)` int64, in a data set of several sources.
        validation: Training samples that the data set itself sets aside, `(rows,)` int64. They belong to no client:
            their client may be -1.

    Raises:
        ArgumentError: A field's shape, dtype or values don't fit; the message names it.
    """

    name: str
    inputs: Inputs
    targets: Tensor
    test_inputs: Inputs
    test_targets: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    clients: NDArray[np.int64] | None = None
    client_names: tuple[str, ...] = ()
    target: NDArray[np.float64] | None = None
    domains: NDArray[np.int64] | None = None
    test_domains: NDArray[np.int64] | None = None
    domain_names: tuple[str, ...] = ()
    validation: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        for part in ("", "test_"):
            self._check_part(f"{part}inputs", f"{part}targets")
        if self.test_inputs.shape[1:] != self.inputs.shape[1:]:
            raise ArgumentError(
                f"test_inputs: samples are {tuple(self.test_inputs.shape[1:])}, but those of inputs {self.in_shape}"
            )
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.inputs.shape[1]):
            raise ArgumentError(f"mean, std: expected {self.inputs.shape[1]} values each, or none")
        self._check_sources()
        if self.target is not None and (
            self.target.shape != (self.num_classes,)
            or not (self.target >= 0).all()
            or not 0 < self.target.sum() < np.inf
        ):
            raise ArgumentError(f"target: expected {self.num_classes} shares, none negative and not all 0")

    @property
    def num_classes(self) -> int:
        """Number of classes, with samples or without."""
        return len(self.classes)

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.inputs.shape[1:])

    def _check_part(self, inputs_name: str, targets_name: str) -> None:
        inputs, targets = getattr(self, inputs_name), getattr(self, targets_name)
        if isinstance(inputs, Tensor):
            _check_tensor(inputs_name, inputs)
        elif len(inputs.shape) < 2 or not len(inputs):
            raise ArgumentError(f"{inputs_name}: expected samples, (samples, ...), at least one; got {inputs.shape}")
        _check_ids(targets_name, targets, len(inputs), self.num_classes)

    def _check_sources(self) -> None:
        """Check clients, domains and the validation rows."""
        samples, clients = len(self.targets), self.clients
        if self.validation is not None:
            rows = torch.as_tensor(self.validation)
            _check_ids("validation", rows, len(rows), samples)
            if len(np.unique(self.validation)) != len(rows):
                raise ArgumentError("validation: names a row twice")
            if clients is not None and clients.shape == (samples,):
                clients = clients.copy()
                clients[self.validation] = np.maximum(clients[self.validation], 0)  # -1: no client
        if (self.domains is None) != (self.test_domains is None):
            raise ArgumentError("domains, test_domains: expected both, or none")
        for name, ids, size, names in (
            ("clients", clients, samples, self.client_names),
            ("domains", self.domains, samples, self.domain_names),
            ("test_domains", self.test_domains, len(self.test_targets), self.domain_names),
        ):
            if ids is not None and not names:
                one = "client" if name == "clients" else "domain"
                raise ArgumentError(f"{one}_names: there is none, but {name} has ids; give the name of every {one}")
            if ids is not None:
                _check_ids(name, torch.as_tensor(ids), size, len(names))


def _check_tensor(name: str, inputs: Tensor) -> None:
    if inputs.dtype not in (torch.float32, torch.int64) or inputs.dim() < 2 or not inputs.numel():
        raise ArgumentError(
            f"{name}: expected float32 samples, or int64 token ids, (samples, ...), at least one; "
            f"got {tuple(inputs.shape)} {inputs.dtype}"
        )
    low, high = inputs.aminmax()
    if inputs.dtype == torch.int64:
        if low < 0:
            raise ArgumentError(f"{name}: token ids must not be negative; found {int(low)}")
    elif not (low.isfinite() and high.isfinite()):
        raise ArgumentError(f"{name}: has a value that is NaN or infinite")


def _check_ids(name: str, ids: Tensor, samples: int, known: int) -> None:
    if ids.dtype != torch.int64 or ids.shape != (samples,):
        raise ArgumentError(f"{name}: expected int64, ({samples},); got {tuple(ids.shape)} {ids.dtype}")
    if not samples:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= known:
        raise ArgumentError(f"{name}: ids must lie in 0 to {known - 1}; found {low if low < 0 else high}")


Reads = TypeVar("Reads", bound=Callable[..., Dataset])


def names_clients(reader: Reads) -> Reads:
    """Mark the reader of data that name clients themselves, or may do so."""
    reader.names_clients = True  # type: ignore[attr-defined]
    return reader
