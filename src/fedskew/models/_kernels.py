"""Kernels of convolutions, written out for the width of their window and compiled by Numba for the processor at hand.

A batch is kept in groups of samples, samples innermost: `[group][channel][row][column, sample]`. So a row of outputs is
one run of numbers however few the channels, and a tap of the window is the same run of inputs, moved by the size of a
group. The loops over the taps of a row and over a block of channels are written out, so that a compiler keeps their
values in registers. Numba keeps compiled code, for each type of processor, in `__pycache__` beside this file; where
that can't be written to, in the user's folder for caches; where neither can, each process compiles its own.
"""

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Numbers = NDArray[np.float32]
LONGEST_ROW = 4096
"""Numbers in a row of outputs, at most."""
# Products that a step of the innermost loop adds up, and sums that one of the weights' gradient keeps, as many as have
# a vector register each: AVX2 has 16 of them, AVX-512 and Neon have 32.
_FEW = torch.backends.cpu.get_cpu_capability() == "AVX2" or "-avx512f" in os.environ.get("NUMBA_CPU_FEATURES", "")
_AT_ONCE, _SUMS_AT_ONCE = (12, 10) if _FEW else (20, 20)
SCRATCH = LONGEST_ROW + 80  # no power of two: rows would share the lines of a cache
KEPT = False
with suppress(RuntimeError):
    KEPT = njit(cache=True)(lambda: None) is not None
_MATHS = {"contract", "reassoc", "nsz", "arcp"}  # NaN and infinity stay what they are


@intrinsic
def _whole_vectors(_: Any) -> tuple[Any, Any]:
    """Let a kernel use whole vector registers, of which a compiler halves Intel's, and take its arrays to be apart."""

    def generated(context: Any, builder: Any, *_: Any) -> Any:
        if isinstance(attributes := builder.function.attributes, set):
            set.add(attributes, '"prefer-vector-width"="512"')  # its own `add` knows a few names only
        for argument in builder.function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.none(), generated


_CONVOLVE = """
@njit(cache=KEPT, fastmath=MATHS)
def add_row_{name}(sums, first, x, w, at, strides, length, step, channels, low, high, out):
    whole_vectors()
    for c in range(channels):
        for r in range(low, high):
            p = at + c * strides[1] + r * strides[2]
            {offsets}
            {weights}
            for j in range(np.uintp(length)):
                {inputs}
                {adds}


@njit(cache=KEPT, fastmath=MATHS)
def convolve_{name}(x, w, bias, y, choice, sums, lower, groups, x_strides, y_at, y_strides, shape, step, pooled, relu):
    whole_vectors()
    # Convolution, bias and, if wanted, 2 x 2 max-pooling and ReLU; `choice`: which of four was the largest, 4: none.
    # What is compared is as wide as what is chosen by it, and nothing branches: a compiler takes whole vectors then.
    channels, rows, outs, height, width, padded, real = shape  # `real` rows of inputs, below `padded` rows of zeros
    length = (width * step + 15) // 16 * 16
    below = np.uintp({block} * {scratch})
    zero = np.float32(0)
    for g in range(groups):
        for h in range(0, height - pooled, 1 + pooled):
            for out in range(0, outs, {block}):
                for line in range(1 + pooled):
                    first = line * {block} * {scratch}
                    for b in range({block}):
                        for j in range(np.uintp(length)):
                            sums[np.uintp(first + b * {scratch}) + j] = bias[out + b]
                    at = g * x_strides[0] + (h + line) * x_strides[2]
                    low, high = max(0, padded - h - line), min(rows, padded + real - h - line)
                    add_row_{name}(sums, first, x, w, at, x_strides, length, step, channels, low, high, out)
                for b in range({block}):
                    top = b * {scratch}
                    to = y_at + g * y_strides[0] + (out + b) * y_strides[1] + h // (1 + pooled) * y_strides[2]
                    if not pooled:
                        for j in range(np.uintp(width * step)):
                            v = sums[np.uintp(top) + j]
                            y[np.uintp(to) + j] = zero if relu and v <= zero else v
                        continue
                    for j in range(np.uintp(length)):
                        v = sums[np.uintp(top) + j]
                        u = sums[np.uintp(top) + below + j]
                        above = (u <= v) | (v != v)
                        sums[np.uintp(top) + j] = v if above else u
                        lower[j] = np.int32(0) if above else np.int32(1)
                    half = width // 2
                    chosen = ((g * outs + out + b) * (height // 2) + h // 2) * half * step
                    for i in range(half):
                        p, q = np.uintp(top + 2 * i * step), np.uintp(top + (2 * i + 1) * step)
                        left, right = np.uintp(2 * i * step), np.uintp((2 * i + 1) * step)
                        for s in range(np.uintp(step)):
                            v, u = sums[p + s], sums[q + s]
                            v = v if u <= v or v != v else u
                            y[np.uintp(to + i * step) + s] = zero if relu and v <= zero else v
                        for s in range(np.uintp(step)):
                            v, u, a, b = sums[p + s], sums[q + s], lower[left + s], lower[right + s]
                            which = 2 * a if (u < v) | ((u == v) & (a <= b)) else 2 * b + 1
                            none = relu & (v <= zero) & (u <= zero)
                            choice[np.uintp(chosen + i * step) + s] = np.uint8(4 if none else which)
"""

_WEIGH = """
@njit(cache=KEPT, fastmath=MATHS)
def weigh_{name}(dw, x, dy, groups, x_strides, y_at, y_strides, shape, step):
    whole_vectors()
    # The gradient of a convolution's weights, from that of its outputs.
    channels, rows, outs, height, width = shape
    length = width * step
    dw[:] = np.float32(0)
    for g in range(groups):
        for out in range(0, outs, {block}):
            for c in range(channels):
                for r in range(rows):
                    {totals}
                    for h in range(height):
                        p = g * x_strides[0] + c * x_strides[1] + (h + r) * x_strides[2]
                        q = y_at + g * y_strides[0] + out * y_strides[1] + h * y_strides[2]
                        {sources}
                        {zeros}
                        for j in range(np.uintp(length)):
                            {inputs}
                            {products}
                        {totalled}
                    {stores}
"""


def filled(template: str, **lines: list[str]) -> str:
    """Fill a template in; where a line is a name in braces, each of the lines of that name takes its indentation."""
    out = []
    for line in template.splitlines():
        name = line.strip().removeprefix("{").removesuffix("}")
        if line.strip() == f"{{{name}}}" and name in lines:
            indent = line[: len(line) - len(line.lstrip())]
            out += [indent + each for each in lines[name]]
        else:
            out.append(line)
    return "\n".join(out)


@functools.cache
def convolve_of(taps: int, outs: int) -> Callable[..., None]:
    """Return the kernel of a convolution, with pooling and ReLU, for windows `taps` wide and this many outputs."""
    block = next(block for block in (4, 3, 2, 1) if (outs % block == 0 and block * taps <= _AT_ONCE) or block == 1)
    k, b, name = range(taps), range(block), f"{taps}_{block}"
    source = filled(
        _CONVOLVE.replace("{name}", name).replace("{block}", str(block)).replace("{scratch}", str(SCRATCH)),
        offsets=[f"o{t} = np.uintp(p + {t} * step)" for t in k],
        weights=[f"w{i}_{t} = w[out + {i}, c, r, {t}]" for i in b for t in k],
        inputs=[f"x{t} = x[o{t} + j]" for t in k],
        adds=[f"sums[np.uintp(first + {i * SCRATCH}) + j] += " + " + ".join(f"w{i}_{t} * x{t}" for t in k) for i in b],
    )
    return compiled(source, f"convolve_{name}")


@functools.cache
def weigh_of(taps: int, outs: int) -> Callable[..., None]:
    """Return the kernel of the gradient of a convolution's weights, for windows `taps` wide and this many outputs."""
    block = next((one for one in (4, 6, 5, 3, 2) if outs % one == 0 and one * taps <= _SUMS_AT_ONCE), 1)
    k, b, name = range(taps), range(block), f"{taps}_{block}"
    each = [(i, t) for i in b for t in k]
    source = filled(
        _WEIGH.replace("{name}", name).replace("{block}", str(block)),
        totals=[f"t{i}_{t} = dw[out + {i}, c, r, {t}]" for i, t in each],
        sources=[f"o{t} = np.uintp(p + {t} * step)" for t in k]
        + [f"q{i} = np.uintp(q + {i} * y_strides[1])" for i in b],
        zeros=[f"a{i}_{t} = np.float32(0)" for i, t in each],
        inputs=[f"x{t} = x[o{t} + j]" for t in k] + [f"d{i} = dy[q{i} + j]" for i in b],
        products=[f"a{i}_{t} += d{i} * x{t}" for i, t in each],
        totalled=[f"t{i}_{t} += a{i}_{t}" for i, t in each],
        stores=[f"dw[out + {i}, c, r, {t}] = t{i}_{t}" for i, t in each],
    )
    return compiled(source, f"weigh_{name}")


def compiled(body: str, name: str) -> Callable[..., None]:
    """Define functions, and return one; Numba keeps them compiled, by their names, where it keeps this file's own."""
    names: dict[str, Any] = {"np": np, "njit": njit, "whole_vectors": _whole_vectors, "MATHS": _MATHS, "KEPT": KEPT}
    names["__name__"] = __name__
    exec(compile(body, __file__, "exec"), names)
    function: Callable[..., None] = names[name]
    return function


@njit(cache=KEPT)
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


@njit(cache=KEPT, fastmath={"contract", "reassoc", "nsz"})
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


@njit(cache=KEPT, fastmath={"contract", "reassoc", "nsz"})
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


@njit(cache=KEPT)
def draw_mask(mask: Numbers, value: np.uint32, p: np.float32, factor: np.float32) -> None:
    """Write `factor` where `uniform` of what `value` is a hash of, and of the place, is `p` or more, else 0."""
    u = np.uint32  # of two of these Numba makes 64 bits
    start = u(u(value * u(0x01000193)) + u(0x1E3779B9))
    for place in range(np.uintp(len(mask))):
        hashed = u(start + u(place))
        hashed = u(u(hashed ^ u(hashed >> u(16))) * u(0x21F0AAAD))
        hashed = u(u(hashed ^ u(hashed >> u(15))) * u(0x735A2D97))
        hashed = u(hashed ^ u(hashed >> u(15)))
        mask[place] = factor if np.float32(u(hashed >> u(8))) * np.float32(2**-24) >= p else np.float32(0)


@njit(cache=KEPT)
def add_rows(total: NDArray[np.float64], rows: Numbers, weights: NDArray[np.float64]) -> None:
    """Add each row, times its weight, in double precision, each product rounded before it is added."""
    for first in range(0, len(total), 4096):
        for k in range(len(weights)):
            for at in range(np.uintp(first), np.uintp(min(first + 4096, len(total)))):
                total[at] += weights[k] * np.float64(rows[k, at])
