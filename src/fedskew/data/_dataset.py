"""A labelled data set, in memory or on disk: inputs may be kept as stored, and become floats batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew import findings
from fedskew.data._schema import Encoder
from fedskew.errors import ArgumentError

Arrays = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and int64 labels of the training part, then of the test part."""

Moments = tuple[tuple[float, ...], tuple[float, ...]]
"""Means and deviations by channel."""

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@runtime_checkable
class Stored(Protocol):
    """Stands in for a tensor of inputs that would be too large; pickled, it names its files.

    Reading is deterministic, and safe from several threads and in forked processes.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """`(samples, *in_shape)`."""

    @property
    def device(self) -> torch.device:
        """Device of the batches."""

    def __len__(self) -> int: ...

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """Return the samples of these int64 rows, `(rows, *in_shape)`, on `device`, as a new tensor; `dim` is 0."""

    def to(self, device: torch.device | str, /) -> Stored:
        """Return the same samples with batches on another device."""


Inputs = Tensor | Stored
"""A data set's inputs. Training asks only for `shape`, `len`, `index_select(0, rows)`, `device` and `to(device)`."""


def in_own_units(inputs: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Undo a normalisation by channel, in double precision; without a mean samples are as they were."""
    sides = [1 for _ in inputs.shape[2:]]
    middle, spread = (torch.tensor(one, dtype=torch.float64).view(1, -1, *sides) for one in (mean, std))
    return inputs.double() * spread + middle if mean else inputs


def take(inputs: Inputs, rows: Tensor) -> Inputs:
    """Select samples by int64 row ids: a copy of a tensor's rows; of stored inputs, a view that lists the rows."""
    return inputs.index_select(0, rows.to(inputs.device)) if isinstance(inputs, Tensor) else Subset(inputs, rows)


class Subset:
    """A subset of the rows of stored inputs."""

    def __init__(self, inputs: Stored, rows: Tensor) -> None:
        self._inputs, self._rows = inputs, rows.to(inputs.device)
        self.device = inputs.device
        self.shape: tuple[int, ...] = (len(rows), *inputs.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """See `Stored.index_select`."""
        return self._inputs.index_select(dim, self._rows.index_select(0, index))

    def to(self, device: torch.device | str, /) -> Subset:
        """See `Stored.to`."""
        return Subset(self._inputs.to(device), self._rows)


class ByteImages:
    """Images in memory as bytes, `(samples, channels, height, width)` uint8, a quarter of the size of floats.

    A batch is scaled to [0, 1], normalised by channel and delivered on `device`, by default that of the images.
    """

    def __init__(
        self, pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device | str | None = None
    ) -> None:
        self.pixels, self.mean, self.std = pixels, mean, std
        self.device = pixels.device if device is None else torch.device(device)
        self.shape = tuple(pixels.shape)
        self._shift, self._scale = (torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (mean, std))

    def __len__(self) -> int:
        return len(self.pixels)

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """See `Stored.index_select`."""
        batch = self.pixels.index_select(dim, index.to(self.pixels.device)).to(self.device)
        return batch.float().div_(255).sub_(self._shift).div_(self._scale)

    def to(self, device: torch.device | str, /) -> ByteImages:
        """Return the images with their pixels moved to another device."""
        return ByteImages(self.pixels.to(device), self.mean, self.std)


class MappedImages(ByteImages):
    """`ByteImages` memory-mapped from a file."""

    def __init__(
        self, path: Path, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device | str = "cpu"
    ) -> None:
        # Copy-on-write: torch takes no read-only memory, and the file must not change.
        super().__init__(torch.from_numpy(np.load(path, mmap_mode="c")), mean, std, device)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return MappedImages, (self.path, self.mean, self.std, self.device)

    def to(self, device: torch.device | str, /) -> ByteImages:
        """Deliver to another device; the images move to a GPU if they take half of its free memory at most."""
        device = torch.device(device)
        if device.type == "cuda" and self.pixels.nbytes <= torch.cuda.mem_get_info(device)[0] // 2:
            return super().to(device)
        return MappedImages(self.path, self.mean, self.std, device)


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
        window: What is black and white in pictures of more than 8 bits: `(low, high)` of a user, the `(white,)` that
            was found, or nothing.
        skipped: What could not be read and was left out, each with its reason.
        encoder: What made inputs of samples as they are in files, in their own units; None: nothing that is kept.
        multi_label: Whether a sample may have several of the classes, or none; at most 62 then, and targets hold the
            class of id k as the bit of value 2 ** k.
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
    window: tuple[float, ...] = ()
    skipped: tuple[str, ...] = ()
    encoder: Encoder | None = None
    multi_label: bool = False

    def __post_init__(self) -> None:
        for name, inputs in (("inputs", self.inputs), ("test_inputs", self.test_inputs)):
            _check_inputs(name, inputs)
        if self.test_inputs.shape[1:] != self.inputs.shape[1:]:
            raise ArgumentError(
                f"test_inputs: samples are {tuple(self.test_inputs.shape[1:])}, but those of inputs {self.in_shape}"
            )
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.inputs.shape[1]):
            raise ArgumentError(f"mean, std: expected one value per channel ({self.inputs.shape[1]}) each, or none")
        if (self.domains is None) != (self.test_domains is None):
            raise ArgumentError("domains, test_domains: expected both, or none")
        for one, names, owned in (
            ("client", self.client_names, self.clients),
            ("domain", self.domain_names, self.domains),
        ):
            if owned is not None and not names:
                raise ArgumentError(f"{one}_names: there is none, but {one}s has ids; give the name of every {one}")
        train, test, aside = len(self.inputs), len(self.test_inputs), self.validation
        _check_ids("validation", aside, 0 if aside is None else len(aside), train)
        if aside is not None and len(np.unique(aside)) != len(aside):
            raise ArgumentError("validation: names a row twice")
        clients = self.clients
        if aside is not None and clients is not None and clients.shape == (train,):
            clients = clients.copy()
            clients[aside] = np.maximum(clients[aside], 0)  # -1: no client
        if self.multi_label and self.num_classes > findings.MOST:
            raise ArgumentError(f"classes: samples may have several of {findings.MOST} at most, not {self.num_classes}")
        known = 2**self.num_classes if self.multi_label else self.num_classes
        _check_ids("targets", self.targets, train, known)
        _check_ids("test_targets", self.test_targets, test, known)
        _check_ids("clients", clients, train, len(self.client_names))
        _check_ids("domains", self.domains, train, len(self.domain_names))
        _check_ids("test_domains", self.test_domains, test, len(self.domain_names))
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
    def labels(self) -> NDArray[np.int64]:
        """Class ids of the training samples, `(samples,)`, or 0 and 1 for each class, `(samples, classes)`."""
        targets: NDArray[np.int64] = self.targets.numpy()
        return findings.as_table(targets, self.num_classes) if self.multi_label else targets

    @property
    def strata(self) -> NDArray[np.int64]:
        """The training samples' class, `(samples,)`; of several the rarest, of none a number beyond the last id."""
        return findings.rarest(self.labels) if self.multi_label else self.labels

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.inputs.shape[1:])


def _check_inputs(name: str, inputs: Inputs) -> None:
    expected = f"{name}: expected float32 samples, or int64 token ids, (samples, ...), at least one"
    if len(inputs.shape) < 2 or not len(inputs):
        raise ArgumentError(f"{expected}; got {tuple(inputs.shape)}")
    if not isinstance(inputs, Tensor):
        return
    if inputs.dtype not in (torch.float32, torch.int64) or not inputs.numel():
        raise ArgumentError(f"{expected}; got {tuple(inputs.shape)} {inputs.dtype}")
    low, high = inputs.aminmax()
    if inputs.dtype == torch.int64 and low < 0:
        raise ArgumentError(f"{name}: token ids must not be negative; found {int(low)}")
    if not (low.isfinite() and high.isfinite()):
        raise ArgumentError(f"{name}: has a value that is NaN or infinite")


def _check_ids(name: str, values: Tensor | NDArray[np.int64] | None, samples: int, known: int) -> None:
    if values is None:
        return
    ids = torch.as_tensor(values)
    if ids.dtype != torch.int64 or ids.shape != (samples,):
        raise ArgumentError(f"{name}: expected int64, ({samples},); got {tuple(ids.shape)} {ids.dtype}")
    if samples and (int(ids.min()) < 0 or int(ids.max()) >= known):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise ArgumentError(f"{name}: ids must lie in 0 to {known - 1}; found {wrong}")


Reads = TypeVar("Reads", bound=Callable[..., Dataset])


def names_clients(reader: Reads) -> Reads:
    """Mark the reader of data that name clients themselves, or may do so."""
    reader.names_clients = True  # type: ignore[attr-defined]
    return reader


def balanced(labels: IntArray, counts: FloatArray, rng: np.random.Generator) -> IntArray:
    """Draw as many rows as there are, with replacement, each class as likely as the others. Of several labels a sample,
    it is of its rarest at the client; those without any are one class more."""
    by_class = np.argsort(labels, kind="stable")
    _, starts, sizes = np.unique(labels[by_class], return_index=True, return_counts=True)
    classes = rng.integers(len(sizes), size=len(labels))
    rows: IntArray = by_class[starts[classes] + rng.integers(sizes[classes])]
    return rows


SAMPLERS = {"balanced": balanced}
"""How the rows of an epoch are drawn, by name in a config."""
