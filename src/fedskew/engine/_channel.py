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

_ALIGNMENT = 64  # bytes; some kernels compute alike only where data are aligned alike
_LARGE = 2**16  # bytes; what is smaller is copied as quickly as looked up
_OWN = -1


class Block:
    """Memory that several processes see.

    It is known by its file descriptor, so that it needs no name and no room in /dev/shm (64 MB in a container, by
    default), and is gone with the last process that holds it.
    """

    _numbers = itertools.count()
    _in_use: ClassVar[weakref.WeakValueDictionary[int, Block]] = weakref.WeakValueDictionary()

    def __init__(self, size: int, file: int | None = None) -> None:
        self.file = _anonymous_file(size) if file is None else file
        self.number = next(self._numbers)
        self.size = size
        self.memory = torch.frombuffer(mmap.mmap(self.file, size), dtype=torch.uint8)
        weakref.finalize(self, os.close, self.file)

    def publish(self) -> None:
        """From now on, tensors that lie in it are sent as their places."""
        self._in_use[self.memory.data_ptr()] = self

    @classmethod
    def under(cls, tensor: Tensor) -> Block | None:
        """The published block that a tensor lies in."""
        return cls._in_use.get(tensor.untyped_storage().data_ptr())


def share(message: Any) -> list[Block]:
    """Move the large tensors inside `message`, which can be pickled, into blocks, where they don't lie in one yet.

    They stay the same objects, and are sent as their places as long as the blocks are held.
    """
    packer = _Packer()
    packer.dump(message)
    blocks = list(packer.used.values())
    for tensor, place in packer.loose:
        if tensor.nbytes >= _LARGE:
            block = Block(tensor.nbytes)
            block.publish()
            with torch.no_grad():
                tensor.set_(place._replace(start=0).of(block.memory).copy_(tensor))  # type: ignore[call-overload]
            blocks.append(block)
    return blocks


class Desk:
    """A block that one message after another is laid out on; it grows as they do."""

    def __init__(self) -> None:
        self._block: Block | None = None

    def lay_out(self, message: Any) -> Any:
        """A copy of what can be pickled, whose tensors are views of the block and sent as their places."""
        packer = _Packer()
        packer.dump(message)
        block = self.write(packer)
        block.publish()
        return _Unpacker(packer.stream.getvalue(), {_OWN: block.memory}).load()

    def write(self, packer: _Packer) -> Block:
        """The block, with a packed message's loose tensors in their places."""
        if self._block is None or self._block.size < packer.size:
            self._block = Block(max(_ALIGNMENT, 2 * packer.size))  # none is empty
        for tensor, place in packer.loose:
            place.of(self._block.memory).copy_(tensor.detach())
        return self._block


class Channel:
    """One end of a connection between two processes that answer each other by turns.

    Tensors on the CPU that lie in a published block are sent as their places, and received as views; others go through
    a block of this channel, and are received as copies.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._handed_over: set[int] = set()
        self._desk = Desk()
        self._theirs: dict[int, Block] = {}  # outgrown ones stay: each is half as large as the next

    def send(self, message: Any) -> None:
        """Send what can be pickled. Raises OSError where nobody reads."""
        packer = _Packer()
        packer.dump(message)
        own = self._desk.write(packer) if packer.loose else None
        fresh = [
            block
            for block in (*packer.used.values(), own)
            if block is not None and block.number not in self._handed_over
        ]
        self.connection.send((own and own.number, [(block.number, block.size) for block in fresh]))
        for block in fresh:
            send_handle(self.connection, block.file, 0)
            self._handed_over.add(block.number)
        self.connection.send_bytes(packer.stream.getbuffer())

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError where there will be none."""
        own, fresh = self.connection.recv()
        for number, size in fresh:
            self._theirs[number] = Block(size, recv_handle(self.connection))
        memory = {number: block.memory for number, block in self._theirs.items()}
        if own is not None:
            memory[_OWN] = memory[own]
        return _Unpacker(self.connection.recv_bytes(), memory, copy=True).load()


def sendable(error: Exception) -> Exception:
    """The error itself, or what it says where it can't be pickled."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        again = None
    return error if type(again) is type(error) else RunError(f"{type(error).__name__}: {error}")


def pack(message: Any) -> Tensor:
    """What can be pickled, its tensors on the CPU byte for byte, as a row of int32."""
    packer = _Packer()
    packer.dump(message)
    text = packer.stream.getbuffer()
    start = _aligned(8 + len(text))
    row = torch.zeros(_aligned(start + packer.size), dtype=torch.uint8)
    row[:8] = torch.tensor([len(text)]).view(torch.uint8)
    row[8 : 8 + len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    for tensor, place in packer.loose:
        place.of(row[start:]).copy_(tensor.detach())
    return row.view(torch.int32)


def unpack(row: Tensor) -> Any:
    """What was packed; its tensors are copies."""
    memory = row.clone().view(torch.uint8)
    text = memory[8 : 8 + int(memory[:8].view(torch.int64))]
    return _Unpacker(text.numpy().tobytes(), {_OWN: memory[_aligned(8 + len(text)) :]}, copy=True).load()


class _Place(NamedTuple):
    """Where a tensor lies: in which block, from which byte on, and how."""

    block: int
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        """The tensor as a view."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        extent = (last + 1) * self.dtype.itemsize if all(self.shape) else 0
        return memory[self.start : self.start + extent].view(self.dtype).as_strided(self.shape, self.strides)


class _Packer(pickle.Pickler):
    """Pickles into `stream`, with places instead of tensors.

    `used`: the published blocks that some lie in, by number; `loose`: the others, each with its place in a block of
    `size` bytes.
    """

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        super().__init__(self.stream, protocol=5)
        self.used: dict[int, Block] = {}
        self.loose: list[tuple[Tensor, _Place]] = []
        self.size = 0
        self._placed: dict[int, _Place] = {}

    def persistent_id(self, value: Any) -> _Place | None:
        """The place of a plain tensor on the CPU; None: it is pickled as any object."""
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return None
        if (block := Block.under(value)) is not None:
            self.used[block.number] = block
            start = value.data_ptr() - block.memory.data_ptr()
            return _Place(block.number, start, value.dtype, tuple(value.shape), value.stride())
        if id(value) not in self._placed:
            strides = torch.empty_like(value).stride()  # its own, or others if it has gaps
            place = _Place(_OWN, self.size, value.dtype, tuple(value.shape), strides)
            self.loose.append((value, place))
            self._placed[id(value)] = place
            self.size += _aligned(value.nbytes)
        return self._placed[id(value)]


class _Unpacker(pickle.Unpickler):
    """Reads what a packer has written; with `copy`, loose tensors are copied out of their block."""

    def __init__(self, data: bytes, memory: Mapping[int, Tensor], copy: bool = False) -> None:
        super().__init__(io.BytesIO(data))
        self._memory, self._copy = memory, copy

    def persistent_load(self, place: _Place) -> Tensor:
        view = place.of(self._memory[place.block])
        return view.clone() if self._copy and place.block == _OWN else view


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _anonymous_file(size: int) -> int:
    if sys.platform == "linux":
        file = os.memfd_create("fedskew")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.ftruncate(file, size)
    return file
