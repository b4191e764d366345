"""Keyed randomness: every draw is a pure function of what it is for, so nothing depends on the order of work.

`generator` gives a numpy Philox generator for draws that happen once (cohorts, partitions, shuffles). `mix` and
`uniform` are a counter-based hash for draws inside a training step (dropout, augmentation): the same numbers on every
device, and for one client or a whole cohort at once. No global generator is read or set.
"""

import enum
from collections.abc import Sequence

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor


class Purpose(enum.IntEnum):
    """The purposes of draws. Their numbers are part of a run's identity: add new ones, never change one."""

    PARTITION = 1
    SELECTION = 2
    SHUFFLE = 3
    MODEL_INIT = 4
    DROPOUT_LAYER = 5
    AUGMENTATION = 6
    DATA = 7
    VALIDATION = 8
    NOISE = 9
    QUOTA = 10
    DROPOUT = 11
    STRAGGLERS = 12
    TARGET = 13
    MODEL_ADAPT = 14
    ORACLE = 15
    CLUSTERS = 16
    ROWS = 17
    HELD_OUT = 18
    UNLABELLED = 19
    ASKED = 20
    FINISH = 21
    UPDATE_NOISE = 22
    CLIENT_TEST = 23
    INTERVAL = 24
    BOOTSTRAP = 25
    BASELINE = 26


_WORD = 1 << 64
_LOW = 0x7FFFFFFF


def generator(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return a generator that depends on these four numbers only: seed and purpose are the Philox key; round and client
    the high words of its counter, so that streams overlap only after 2**128 draws."""
    key = _Key(np.array([seed % _WORD, int(purpose)], dtype=np.uint64))
    counter = np.array([0, 0, round % _WORD, client % _WORD], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key, counter=counter))  # type: ignore[arg-type]


class _Key(ISeedSequence):
    """A Philox key without seeding."""

    # `Philox(key=...)` gives the same stream in three times the time: it asks the system for entropy that it does not
    # use.

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> NDArray[np.uint64]:
        """Return the key, which is all that Philox asks for."""
        return self._words


def stream_key(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> int:
    """Return a 31-bit key for `mix` and `uniform`, drawn from `generator` of the same four numbers."""
    return int(generator(seed, purpose, round, client).integers(_LOW))


def mix(*words: Tensor | int) -> Tensor:
    """Hash integer tensors and numbers, one at least a tensor, broadcast together, into int64 values in [0, 2**32):
    each word is folded in by a 32-bit finaliser (Wellons' `lowbias32`), in int64 with masks, the same on every device
    and under `torch.func.vmap`."""
    if is_on_cpu(words):
        return torch.from_numpy(_mix_on_cpu(words).astype(np.int64))
    value = _mixed(words)
    assert isinstance(value, Tensor), "at least one word must be a tensor"
    return value


def is_on_cpu(words: Sequence[Tensor | int]) -> bool:
    """Return whether all tensors lie on the CPU outside `torch.func` transforms."""
    if torch._C._are_functorch_transforms_active():
        return False
    return all(word.device.type == "cpu" for word in words if isinstance(word, Tensor))


def _mix_on_cpu(words: Sequence[Tensor | int]) -> NDArray[np.uint32]:
    """Compute what `mix` computes, three times as fast, by unsigned arithmetic, which wraps at overflow."""
    value = np.zeros((), dtype=np.uint32)
    for word in words:
        own = word.numpy().astype(np.uint32) if isinstance(word, Tensor) else np.asarray(word % (1 << 32), np.uint32)
        # At least one dimension: numpy warns when a scalar wraps, but not when an array does.
        value = np.atleast_1d(value) * np.uint32(0x01000193) + own
        value += np.uint32(0x1E3779B9)
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            value ^= value >> np.uint32(shift)
            value *= np.uint32(factor)
        value ^= value >> np.uint32(15)
    return value.reshape(np.broadcast_shapes(*(tuple(word.shape) for word in words if isinstance(word, Tensor))))


def fold(*words: int) -> int:
    """Return a key made from numbers, such as another key: `hashed` of 0 and them."""
    return hashed(0, *words)


def hashed(*words: int) -> int:
    """Return `mix` of plain numbers as a number."""
    return int(_mixed(words))


def _mixed(words: Sequence[Tensor | int]) -> Tensor | int:
    value: Tensor | int = 0
    for word in words:
        value = (value * 0x01000193 + word + 0x1E3779B9) & 0xFFFFFFFF
        value = (value ^ (value >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
        value = (value ^ (value >> 15)) * 0x735A2D97 & 0xFFFFFFFF
        value = value ^ (value >> 15)
    return value


def uniform(*words: Tensor | int) -> Tensor:
    """Return `mix` as float32 in [0, 1), in steps of 2**-24."""
    if is_on_cpu(words):
        return torch.from_numpy((_mix_on_cpu(words) >> np.uint32(8)).astype(np.float32)) * (1.0 / (1 << 24))
    return (mix(*words) >> 8).to(torch.float32) * (1.0 / (1 << 24))
