"""Converts between named arrays in messages and the flat vectors that the engine computes with.

Messages hold arrays in numpy's own format, without pickle. An array is read only if its shape and dtype are as agreed.
"""

import io
import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from fedskew.errors import FedskewError
from fedskew.models import FlatModel, ModelState

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
AnyArray = NDArray[np.generic]
Record = ArrayRecord | MetricRecord | ConfigRecord

HEADER = 4096
"""Largest size of an array's header, in bytes."""


VARIANCE = "running_var"
"""How the name of an array of variances ends, in PyTorch's batch norm and instance norm."""


COUNTER = "num_batches_tracked"
"""How the name of an array ends in which batch norm counts its batches."""


class RefusedError(FedskewError):
    """Raised for a reply that is not used; the message gives the reason, in one line for the log."""


class NotFiniteError(RefusedError):
    """Raised for a reply with NaN or infinity, which an honest site sends where the model is ruined."""


class ArraySpec(NamedTuple):
    """Shape and dtype (numpy's name) of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the values in bytes."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def is_float(self) -> bool:
        """Whether the values are floating-point numbers."""
        return np.issubdtype(np.dtype(self.dtype), np.floating)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


Specs = Mapping[str, ArraySpec]


def bytes_of(specs: Specs) -> int:
    """Return the largest size of a record of such arrays, in bytes."""
    return sum(spec.bytes + HEADER for spec in specs.values())


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, ArraySpec]:
    """Return the shapes and dtypes of named tensors."""
    return {
        name: ArraySpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


def encode(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Convert named tensors to a record to be sent."""
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()})


def decode(record: ArrayRecord, expected: Specs, what: str) -> dict[str, AnyArray]:
    """Decode a record that holds exactly the expected arrays, all values finite, read-only; RefusedError names `what`.

    Shape and dtype in the record are ignored. The header inside the bytes is parsed without evaluating it, and values
    are read only if header and length are as expected, so that a sender can't make the receiver allocate more memory.
    """
    missing, extra = sorted(set(expected) - set(record)), sorted(set(record) - set(expected))
    if missing or extra:
        wrong = f"lacks {missing[0]!r}" if missing else f"has {short(extra[0])}, which is not expected"
        raise RefusedError(f"{what} {wrong}")
    return {name: _decode(record[name], spec, f"{what} {name!r}") for name, spec in expected.items()}


def _decode(array: Array, expected: ArraySpec, what: str) -> AnyArray:
    data = array.data
    if array.stype != "numpy.ndarray":
        raise RefusedError(f"{what} is stored as {short(array.stype)}, not as a numpy array")
    if not isinstance(data, bytes) or len(data) > expected.bytes + HEADER:
        raise RefusedError(f"{what} takes {len(data)} bytes; expected {expected}")
    buffer = io.BytesIO(data)
    try:
        version = npy.read_magic(buffer)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(buffer, max_header_size=HEADER)
    except Exception as error:  # the sender chose these bytes, which can raise anything
        raise RefusedError(f"{what} is no numpy array ({type(error).__name__})") from None
    if shape != expected.shape or dtype != np.dtype(expected.dtype):
        raise RefusedError(f"{what} is {short(f'{dtype} {shape}')}; expected {expected}")
    start = buffer.tell()
    if len(data) - start != expected.bytes:
        raise RefusedError(f"{what} has {len(data) - start} bytes of values; expected {expected.bytes}")
    flat = np.frombuffer(data, dtype, expected.size, start)
    if expected.is_float and not np.isfinite(flat).all():
        raise NotFiniteError(f"{what} has a value that is NaN or infinite")
    return flat.reshape(shape, order="F" if fortran else "C")


PACKED = "fedskew-packed"
"""Name and Flower's `stype` of an array that holds all arrays of a record."""


def pack(content: RecordDict) -> RecordDict:
    """Return a message with the arrays of each record as one, as Flower sends each array by requests of its own."""
    return RecordDict({key: _pack(part) if isinstance(part, ArrayRecord) else part for key, part in content.items()})


def _pack(record: ArrayRecord) -> ArrayRecord:
    head = json.dumps([[name, array.dtype, array.shape, len(array.data)] for name, array in record.items()]).encode()
    whole = b"".join([len(head).to_bytes(8, "little"), head, *(array.data for array in record.values())])
    return ArrayRecord({PACKED: Array("uint8", (len(whole),), PACKED, whole)})


def unpack(content: RecordDict) -> RecordDict:
    """Return a message with its arrays as before `pack`, if they were packed; RefusedError if that was done wrong."""
    return RecordDict({key: _unpack(record) for key, record in content.items()})


def _unpack(record: Record) -> Record:
    if not isinstance(record, ArrayRecord) or list(record) != [PACKED]:
        return record
    data, arrays = record[PACKED].data, ArrayRecord()
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:start])
        sizes = [size for *_, size in entries]
        if min(sizes, default=0) < 0 or start + sum(sizes) != len(data):  # no byte is in two arrays
            raise ValueError
        for name, dtype, shape, size in entries:
            arrays[name] = Array(dtype, tuple(shape), "numpy.ndarray", data[start : start + size])
            start += size
    except Exception as error:  # the sender chose these bytes, which can raise anything
        raise RefusedError(f"its arrays are not packed as fedskew packs them ({type(error).__name__})") from None
    return arrays


def short(value: object) -> str:
    """Describe a received value, cut to fit into one line of a log."""
    if isinstance(value, list) and len(value) > 8:
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) > 2**64:
        return "a number of more than 64 bits"
    line = repr(value)
    return line if len(line) <= 60 else f"{line[:57]}..."


class ModelLayout:
    """Layout of what training changes of a network's state dict; `whole`: of all, as in a user's own Flower project."""

    def __init__(self, model: FlatModel, whole: bool = False) -> None:
        self._model = model.copy(torch.device("cpu"))
        kept = {} if whole else self._model.frozen()
        self.specs: Specs = specs_of({name: one for name, one in self._model.state_dict().items() if name not in kept})
        self._integers = list(self._model.integer_buffers)
        self._buffers = [name for name in self._model.buffer_names if name not in self._integers]

    def to_record(self, state: ModelState) -> ArrayRecord:
        """Convert a model to a record of its arrays, to be sent."""
        self._model.write_state(ModelState(*(part.cpu() for part in state)))
        return encode({name: one for name, one in self._model.state_dict().items() if name in self.specs})

    def to_state(self, arrays: Mapping[str, AnyArray], out: Tensor | None = None) -> ModelState:
        """Convert a model's arrays to flat vectors."""
        vector = torch.empty_like(self._model.vector) if out is None else out
        for name, view in self._model.views(vector).items():
            np.copyto(view.numpy(), arrays[name])
        return ModelState(
            vector,
            _concatenated([arrays[name] for name in self._buffers], np.float32),
            _concatenated([arrays[name] for name in self._integers], np.int64),
        )

    def statistics(self, state: ModelState) -> dict[str, Tensor]:
        """Return the arrays that follow a site's data without being trained, by name: floating-point buffers."""
        return _split(state.buffers, {name: self.specs[name] for name in self._buffers})

    def counters(self, state: ModelState) -> dict[str, Tensor]:
        """Return the arrays of integers, by name."""
        return _split(state.integers, {name: self.specs[name] for name in self._integers})


class ArraysLayout(ModelLayout):
    """Layout of a model whose network is not known: every floating-point array counts as parameters, in float32."""

    def __init__(self, arrays: ArrayRecord) -> None:
        self.specs = {name: ArraySpec(tuple(array.shape), array.dtype) for name, array in arrays.items()}
        self._floats = [name for name, spec in self.specs.items() if spec.is_float]
        self._buffers, self._integers = [], [name for name, spec in self.specs.items() if not spec.is_float]

    def to_record(self, state: ModelState) -> ArrayRecord:
        """Convert a model to a record of its arrays, to be sent."""
        parts = self.counters(state) | _split(state.parameters, {name: self.specs[name] for name in self._floats})
        shaped = {name: parts[name].cpu().numpy().astype(spec.dtype) for name, spec in self.specs.items()}
        return ArrayRecord({name: Array(shaped[name].reshape(spec.shape)) for name, spec in self.specs.items()})

    def to_state(self, arrays: Mapping[str, AnyArray], out: Tensor | None = None) -> ModelState:
        """Convert a model's arrays to flat vectors."""
        return ModelState(
            _concatenated([arrays[name] for name in self._floats], np.float32, out),
            torch.zeros(0),
            _concatenated([arrays[name] for name in self._integers], np.int64),
        )


def _split(vector: Tensor, specs: Specs) -> dict[str, Tensor]:
    return dict(zip(specs, torch.split(vector, [spec.size for spec in specs.values()]), strict=True))


def _concatenated(arrays: list[AnyArray], dtype: type[np.generic], out: Tensor | None = None) -> Tensor:
    joined = np.empty(sum(array.size for array in arrays), dtype) if out is None else out.numpy()
    np.concatenate([joined[:0], *(array.reshape(-1) for array in arrays)], out=joined)
    return torch.from_numpy(joined)
