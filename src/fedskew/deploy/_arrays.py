"""Arrays on the wire: numpy's own format, without pickle, read only where they have the shape and dtype agreed on."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from fedskew.deploy._refusal import RefusedError

AnyArray = NDArray[np.generic]

HEADER = 4096
"""Bytes that an array may take beside its values."""


class Form(NamedTuple):
    """Shape and dtype of an array; the dtype by numpy's name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """How many values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of its values."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def is_float(self) -> bool:
        """Whether its values are floating-point numbers."""
        return np.issubdtype(np.dtype(self.dtype), np.floating)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def encode(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as a record."""
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()})


def forms(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    """Shapes and dtypes of named tensors."""
    return {
        name: Form(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()
    }


def decode(record: ArrayRecord, expected: Mapping[str, Form], what: str) -> dict[str, AnyArray]:
    """The arrays of a record, which are just the expected ones, all finite; read-only.

    What a record says of its arrays is not believed: the bytes' own header is read, without evaluating it, and values
    only where it and the number of bytes are as expected; so nothing is allocated that wasn't agreed on. Raises
    RefusedError naming `what` and the first thing that is wrong.
    """
    missing, extra = sorted(set(expected) - set(record)), sorted(set(record) - set(expected))
    if missing or extra:
        wrong = f"lacks {missing[0]!r}" if missing else f"has {_short(extra[0])}, which nobody asked for"
        raise RefusedError(f"{what} {wrong}")
    return {name: _decode(record[name], form, f"{what} {name!r}") for name, form in expected.items()}


def _decode(array: Array, expected: Form, what: str) -> AnyArray:
    data = array.data
    if array.stype != "numpy.ndarray":
        raise RefusedError(f"{what} is stored as {_short(array.stype)}, not as a numpy array")
    if not isinstance(data, bytes) or len(data) > expected.bytes + HEADER:
        raise RefusedError(f"{what} takes {len(data)} bytes; expected {expected}")
    buffer = io.BytesIO(data)
    try:
        version = npy.read_magic(buffer)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(buffer, max_header_size=HEADER)
    except Exception as error:  # bytes of somebody else's making: whatever they raise, they are no array
        raise RefusedError(f"{what} is no numpy array ({type(error).__name__})") from None
    if shape != expected.shape or dtype != np.dtype(expected.dtype):
        raise RefusedError(f"{what} is {_short(f'{dtype} {shape}')}; expected {expected}")
    start = buffer.tell()
    if len(data) - start != expected.bytes:
        raise RefusedError(f"{what} has {len(data) - start} bytes of values; expected {expected.bytes}")
    flat = np.frombuffer(data, dtype, expected.size, start)
    if expected.is_float and not np.isfinite(flat).all():
        raise RefusedError(f"{what} has a value that is NaN or infinite")
    values: AnyArray = flat.reshape(shape, order="F" if fortran else "C")
    return values


def _short(text: object) -> str:
    """Somebody else's text, fit for one line of a log."""
    line = repr(text)
    return line if len(line) <= 60 else f"{line[:57]}..."
