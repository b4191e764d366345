"""What moves numbers in and out of the layout of convolutions, `[group][channel][row][column, sample]`, by Numba."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Numbers = NDArray[np.float32]


@njit(cache=True)
def pack(x: Numbers, y: Numbers, groups: int, at: int, strides: tuple[int, int, int], step: int) -> None:
    """Write a batch `(batch, channels, rows, columns)`; samples that a last group lacks are 0."""
    batch, channels, height, width = x.shape
    for g in range(groups):
        for c in range(channels):
            for first in range(0, height, 8):  # runs that a processor reads ahead, and rows that its cache holds
                for s in range(step):
                    sample = g * step + s
                    for h in range(first, min(first + 8, height)):
                        to = at + g * strides[0] + c * strides[1] + h * strides[2] + s
                        for w in range(width):
                            y[np.uintp(to + w * step)] = x[sample, c, h, w] if sample < batch else np.float32(0)


@njit(cache=True)
def unpack(y: Numbers, x: Numbers, at: int, strides: tuple[int, int, int], step: int) -> None:
    """Read a batch `(batch, channels, rows, columns)`."""
    batch, channels, height, width = x.shape
    for sample in range(batch):
        first = at + sample // step * strides[0] + sample % step
        for c in range(channels):
            for h in range(height):
                p = first + c * strides[1] + h * strides[2]
                for w in range(width):
                    x[sample, c, h, w] = y[np.uintp(p + w * step)]


@njit(cache=True, fastmath={"contract", "reassoc", "nsz"})
def unpool(
    dy: Numbers, db: Numbers, dx: Numbers, choice: NDArray[np.uint8], groups: int, at: int,
    strides: tuple[int, int, int], shape: tuple[int, int, int], step: int,
) -> None:  # fmt: skip
    """Write the gradient before pooling and ReLU, and add up the bias's, from the gradient `dx` after them."""
    channels, height, width = shape  # after pooling
    zero = np.float32(0)
    db[:] = zero
    for g in range(groups):
        for c in range(channels):
            total = zero
            for h in range(height):
                p = ((g * channels + c) * height + h) * width * step
                for j in range(np.uintp(width * step)):
                    total += dx[np.uintp(p) + j] if choice[np.uintp(p) + j] < 4 else zero
                for w in range(width):
                    first, q = at + g * strides[0] + c * strides[1] + 2 * h * strides[2] + 2 * w * step, p + w * step
                    for k in range(4):
                        to = np.uintp(first + k // 2 * strides[2] + k % 2 * step)
                        for s in range(np.uintp(step)):
                            dy[to + s] = dx[np.uintp(q) + s] if choice[np.uintp(q) + s] == k else zero
            db[c] += total


@njit(cache=True, fastmath={"contract", "reassoc", "nsz"})
def unmask(
    dy: Numbers, db: Numbers, dx: Numbers, y: Numbers, groups: int, at: int, strides: tuple[int, int, int],
    y_at: int, y_strides: tuple[int, int, int], shape: tuple[int, int, int], step: int, relu: bool,
) -> None:  # fmt: skip
    """Write the gradient before ReLU, and add up the bias's, from the gradient `dx` after it and its outputs `y`."""
    channels, height, width = shape
    zero = np.float32(0)
    db[:] = zero
    for g in range(groups):
        for c in range(channels):
            total = zero
            for h in range(height):
                p = np.uintp(((g * channels + c) * height + h) * width * step)
                to = np.uintp(at + g * strides[0] + c * strides[1] + h * strides[2])
                out = np.uintp(y_at + g * y_strides[0] + c * y_strides[1] + h * y_strides[2])
                for j in range(np.uintp(width * step)):
                    v = zero if relu and y[out + j] <= zero else dx[p + j]
                    dy[to + j] = v
                    total += v
            db[c] += total
