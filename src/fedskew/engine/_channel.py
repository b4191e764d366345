"""Messages between processes whose tensors travel through shared memory."""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import sys
import tempfile
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedskew.errors import RunError

_ALIGNMENT = 64  # bytes; some kernels give the same bits only for data of the same alignment
_LARGE = 2**16  # bytes; smaller tensors are copied as fast as they are looked up
_MESSAGE = -1  # in place of a buffer's number: the buffer that goes with the message


class SharedBuffer:
    """Memory shared by several processes.

    Processes share it by its file descriptor. It therefore needs neither a name nor space in /dev/shm (64 MB in a
    container, by default), and is freed once no process holds it.
    """

    _numbers = itertools.count()
    _registered: ClassVar[weakref.WeakValueDictionary[int, SharedBuffer]] = weakref.WeakValueDictionary()

    def __init__(self, size: int, file: int | None = None) -> None:
        self.file = _anonymous_file(size) if file is None else file
        self.number = next(self._numbers)
        self.size = size
        self.memory = torch.frombuffer(mmap.mmap(self.file, size), dtype=torch.uint8)
        weakref.finalize(self, os.close, self.file)

    def register(self) -> None:
        """Send tensors that lie in this buffer as their location in it from now on."""
        self._registered[self.memory.data_ptr()] = self

    @classmethod
    def containing(cls, tensor: Tensor) -> SharedBuffer | None:
        """Find the registered buffer that a tensor lies in; None: no such buffer."""
        return cls._registered.get(tensor.untyped_storage().data_ptr())


def share(message: Any) -> list[SharedBuffer]:
    """Move the large tensors inside a picklable object into shared buffers, unless they are in one already.

    The tensor objects stay the same. They are sent as locations for as long as the caller holds the returned buffers.
    """
    packer = _Packer()
    packer.dump(message)
    buffers = list(packer.used.values())
    for tensor, location in packer.loose:
        if tensor.nbytes >= _LARGE:
            buffer = SharedBuffer(tensor.nbytes)
            buffer.register()
            with torch.no_grad():
                tensor.set_(location._replace(start=0).of(buffer.memory).copy_(tensor))  # type: ignore[call-overload]
            buffers.append(buffer)
    return buffers


class MessageBuffer:
    """A shared buffer for the tensors of one message at a time; it grows with the largest message."""

    def __init__(self) -> None:
        self._buffer: SharedBuffer | None = None

    def copy_in(self, message: Any) -> Any:
        """Copy a picklable object; the copy's tensors lie in the buffer, so they are sent as their location in it."""
        packer = _Packer()
        packer.dump(message)
        buffer = self.write(packer)
        buffer.register()
        return _Unpacker(packer.stream.getvalue(), {_MESSAGE: buffer.memory}).load()

    def write(self, packer: _Packer) -> SharedBuffer:
        """Copy a packed message's loose tensors into the buffer, and return it."""
        if self._buffer is None or self._buffer.size < packer.size:
            self._buffer = SharedBuffer(max(_ALIGNMENT, 2 * packer.size))  # never of size 0
        for tensor, location in packer.loose:
            location.of(self._buffer.memory).copy_(tensor.detach())
        return self._buffer


class Channel:
    """One end of a connection between two processes that send in turns.

    CPU tensors in a registered buffer are sent as their location in it and received as views of it. Other tensors are
    copied through a buffer of this channel.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._handed_over: set[int] = set()
        self._message = MessageBuffer()
        self._received: dict[int, SharedBuffer] = {}  # outgrown ones are kept: at most as large together as the newest

    def send(self, message: Any) -> None:
        """Send a picklable object; raise OSError if the other end is closed."""
        packer = _Packer()
        packer.dump(message)
        own = self._message.write(packer) if packer.loose else None
        fresh = [
            buffer
            for buffer in (*packer.used.values(), own)
            if buffer is not None and buffer.number not in self._handed_over
        ]
        self.connection.send((own and own.number, [(buffer.number, buffer.size) for buffer in fresh]))
        for buffer in fresh:
            send_handle(self.connection, buffer.file, 0)
            self._handed_over.add(buffer.number)
        self.connection.send_bytes(packer.stream.getbuffer())

    def receive(self) -> Any:
        """Return the next message; raise EOFError or OSError if the other end is closed."""
        own, fresh = self.connection.recv()
        for number, size in fresh:
            self._received[number] = SharedBuffer(size, recv_handle(self.connection))
        memory = {number: buffer.memory for number, buffer in self._received.items()}
        if own is not None:
            memory[_MESSAGE] = memory[own]
        return _Unpacker(self.connection.recv_bytes(), memory, copy=True).load()


def picklable_error(error: Exception) -> Exception:
    """Return the error itself, or a RunError with its message if it can't be pickled."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        again = None
    return error if type(again) is type(error) else RunError(f"{type(error).__name__}: {error}")


class _Location(NamedTuple):
    """Where a tensor lies in a buffer: the buffer's number, the tensor's first byte, and its layout."""

    buffer: int
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of the buffer's memory."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        extent = (last + 1) * self.dtype.itemsize if all(self.shape) else 0
        return memory[self.start : self.start + extent].view(self.dtype).as_strided(self.shape, self.strides)


class _Packer(pickle.Pickler):
    """Pickles into `stream`, with locations instead of tensors.

    Attributes:
        used: The registered buffers in which tensors of the message lie, by number.
        loose: The tensors outside registered buffers, each with its location in the message's own buffer.
        size: Size that the message's own buffer needs, in bytes.
    """

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        super().__init__(self.stream, protocol=5)
        self.used: dict[int, SharedBuffer] = {}
        self.loose: list[tuple[Tensor, _Location]] = []
        self.size = 0
        self._located: dict[int, _Location] = {}

    def persistent_id(self, value: Any) -> _Location | None:
        """Return the location of a plain CPU tensor; None: the value is pickled as usual."""
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return None
        if (buffer := SharedBuffer.containing(value)) is not None:
            self.used[buffer.number] = buffer
            start = value.data_ptr() - buffer.memory.data_ptr()
            return _Location(buffer.number, start, value.dtype, tuple(value.shape), value.stride())
        if id(value) not in self._located:
            strides = torch.empty_like(value).stride()  # the same as the tensor's, unless its memory has gaps
            location = _Location(_MESSAGE, self.size, value.dtype, tuple(value.shape), strides)
            self.loose.append((value, location))
            self._located[id(value)] = location
            self.size += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._located[id(value)]


class _Unpacker(pickle.Unpickler):
    """Unpickles what a packer has written; with `copy`, loose tensors are copied out of the message's buffer."""

    def __init__(self, data: bytes, memory: Mapping[int, Tensor], copy: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self._memory, self._copy = memory, copy

    def persistent_load(self, location: _Location) -> Tensor:
        view = location.of(self._memory[location.buffer])
        return view.clone() if self._copy and location.buffer == _MESSAGE else view


def _anonymous_file(size: int) -> int:
    if sys.platform == "linux":
        file = os.memfd_create("fedskew")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.ftruncate(file, size)
    return file
