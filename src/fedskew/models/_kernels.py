"""Kernels of convolutions, written out for the width of their window and compiled by Numba for the processor at hand.

A batch is kept in groups of samples, samples innermost: `[group][channel][row][column, sample]`. So a row of outputs is
one run of numbers however few the channels, and a tap of the window is the same run of inputs, moved by the size of a
group. The loops over the taps of a row and over a block of channels are written out, so that a compiler keeps their
values in registers. Compiled code is kept in the user's folder for caches, for each type of processor.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

LONGEST_ROW = 4096
"""Numbers in a row of outputs, at most."""
_AT_ONCE = 12  # products that a step of the innermost loop adds up
SCRATCH = LONGEST_ROW + 80  # no power of two: rows would share the lines of a cache

_CONVOLVE = """
@njit(cache=True, fastmath=MATHS)
def add_row(sums, first, x, w, at, channel, row, length, step, channels, rows, out):
    for c in range(channels):
        for r in range(rows):
            p = at + c * channel + r * row
            {offsets}
            {weights}
            for j in range(np.uintp(length)):
                {inputs}
                {adds}


@njit(cache=True, fastmath=MATHS)
def convolve(x, w, bias, y, choice, sums, lower, groups, x_strides, y_at, y_strides, shape, step, pooled, relu):
    # Convolution, bias and, if wanted, 2 x 2 max-pooling and ReLU; `choice`: which of four was the largest, 4: none.
    channels, rows, outs, height, width = shape
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
                    add_row(sums, first, x, w, at, x_strides[1], x_strides[2], length, step, channels, rows, out)
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
                        above = u <= v or v != v
                        sums[np.uintp(top) + j] = v if above else u
                        lower[j] = np.uint8(0) if above else np.uint8(1)
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
                            v, u = sums[p + s], sums[q + s]
                            is_left = u < v or (u == v and lower[left + s] <= lower[right + s])
                            which = 2 * lower[left + s] if is_left else 2 * lower[right + s] + 1
                            none = relu and v <= zero and u <= zero
                            choice[np.uintp(chosen + i * step) + s] = np.uint8(4) if none else np.uint8(which)
"""

_WEIGH = """
@njit(cache=True, fastmath=MATHS)
def weigh(dw, x, dy, groups, x_strides, y_at, y_strides, shape, step):
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

_HEAD = '''"""Written by fedskew: a kernel of convolutions."""

import numpy as np
from numba import njit

MATHS = {"contract", "reassoc", "nsz", "arcp"}  # NaN and infinity stay what they are
'''


def _filled(template: str, **lines: list[str]) -> str:
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
def convolve_of(taps: int, outs: int) -> ModuleType:
    """Load the kernel of a convolution, with pooling and ReLU, for windows `taps` wide and this many outputs."""
    block = next(block for block in (4, 2, 3, 1) if (outs % block == 0 and block * taps <= _AT_ONCE) or block == 1)
    k, b = range(taps), range(block)
    source = _filled(
        _CONVOLVE.replace("{block}", str(block)).replace("{scratch}", str(SCRATCH)),
        offsets=[f"o{t} = np.uintp(p + {t} * step)" for t in k],
        weights=[f"w{i}_{t} = w[out + {i}, c, r, {t}]" for i in b for t in k],
        inputs=[f"x{t} = x[o{t} + j]" for t in k],
        adds=[f"sums[np.uintp(first + {i * SCRATCH}) + j] += " + " + ".join(f"w{i}_{t} * x{t}" for t in k) for i in b],
    )
    return _loaded(source)


@functools.cache
def weigh_of(taps: int, outs: int) -> ModuleType:
    """Load the kernel of the gradient of a convolution's weights, for windows `taps` wide and this many outputs."""
    block = next(block for block in (4, 6, 5, 3, 2, 1) if outs % block == 0)
    k, b = range(taps), range(block)
    each = [(i, t) for i in b for t in k]
    source = _filled(
        _WEIGH.replace("{block}", str(block)),
        totals=[f"t{i}_{t} = dw[out + {i}, c, r, {t}]" for i, t in each],
        sources=[f"o{t} = np.uintp(p + {t} * step)" for t in k]
        + [f"q{i} = np.uintp(q + {i} * y_strides[1])" for i in b],
        zeros=[f"a{i}_{t} = np.float32(0)" for i, t in each],
        inputs=[f"x{t} = x[o{t} + j]" for t in k] + [f"d{i} = dy[q{i} + j]" for i in b],
        products=[f"a{i}_{t} += d{i} * x{t}" for i, t in each],
        totalled=[f"t{i}_{t} += a{i}_{t}" for i, t in each],
        stores=[f"dw[out + {i}, c, r, {t}] = t{i}_{t}" for i, t in each],
    )
    return _loaded(source)


def _loaded(body: str) -> ModuleType:
    """Import source from the folder for caches, beside which Numba keeps what it compiles."""
    source = _HEAD + body
    name = f"fedskew_kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    file = _folder() / f"{name}.py"
    if not file.is_file() or file.read_bytes() != source.encode():
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as written:
            written.write(source.encode())
        os.replace(written.name, file)
    for index in (file.parent / "__pycache__").glob(f"{name}.*.nbi"):
        if not index.stat().st_size:  # a machine that went down left it, and Numba can't read it
            index.unlink()
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a file of Python has a loader"
    assert spec.loader is not None, "a file of Python has a loader"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # Numba looks its own up by name
    spec.loader.exec_module(module)
    return module


@functools.cache
def _folder() -> Path:
    """Return the user's folder for caches; where it can't be written to, or by others too, one for this process."""
    home = {"win32": os.environ.get("LOCALAPPDATA"), "darwin": "~/Library/Caches"}.get(sys.platform)
    caches = home or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(caches).expanduser() / "fedskew" / "kernels"
        if not folder.is_absolute():
            raise OSError("it would be another in each working folder")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = folder.stat()
        if sys.platform != "win32" and (made.st_uid != os.getuid() or made.st_mode & 0o002):
            raise OSError("somebody else could put code there, which is run")
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):
        folder = Path(tempfile.mkdtemp(prefix="fedskew-kernels-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
