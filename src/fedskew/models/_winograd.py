"""Convolutions with windows of 3 x 3, by 24 multiplications for each tile of 2 x 4 outputs in place of 72.

Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016: linear maps turn a tile's 4 x 6 inputs, and
weights, into 24 numbers each; their products, added up over channels, are 24 matrix products, which another map turns
into outputs. Gradients go through the maps' transposes. Tiles of 4 x 4 outputs would take a quarter fewer, and be
1.1e-6 off, as a share of a gradient's norm, where these are 5e-7 off and PyTorch's are 2.5e-7 (up to 64 channels).
"""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules.utils import _pair

_DOWN, _ACROSS = 2, 4  # outputs of a tile
_FEWEST_OUTS, _FEWEST = 64, 32  # channels of outputs and of inputs below which PyTorch's are as fast
_FEWEST_TILES = 64  # of a batch: the weights' numbers are as many for one image as for a hundred
_FEWEST_PRODUCTS = 2**20  # of tiles and pairs of channels: for fewer, the calls take longer than what they save
_TILES_AT_ONCE = 96  # of a matrix product: what it reads and writes then fits into a processor's second cache
Pair = tuple[int, int]
Maps = tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]


def _turned(maps: Maps) -> Maps:
    return tuple(zip(*maps[0], strict=True)), tuple(zip(*maps[1], strict=True))


# Lavin and Gray's B', G and A', for two outputs and for four, at the points 0, 1, -1 and, for four, 1/2 and -2.
_INPUTS: Maps = (
    ((-1, 0, 1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, -1, 0, 1)),
    ((1, -1.5, -2, 1.5, 1, 0), (0, -1, 0.5, 2.5, 1, 0), (0, 1, -2.5, 0.5, 1, 0),
     (0, -2, -1, 2, 1, 0), (0, 0.5, -1, -0.5, 1, 0), (0, 1, -1.5, -2, 1.5, 1)),
)  # fmt: skip
_WEIGHTS: Maps = (
    ((-1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
    ((1, 0, 0), (1 / 3, 1 / 3, 1 / 3), (-1 / 3, 1 / 3, -1 / 3),
     (-16 / 15, -8 / 15, -4 / 15), (1 / 15, -2 / 15, 4 / 15), (0, 0, 1)),
)  # fmt: skip
_VALUES: Maps = (
    ((1, 1, 1, 0), (0, 1, -1, 1)),
    ((1, 1, 1, 1, 1, 0), (0, 1, -1, 0.5, -2, 0), (0, 1, 1, 0.25, 4, 0), (0, 1, -1, 0.125, -8, 1)),
)
# Of rows and of columns: of a tile's inputs and slopes to its numbers, of its numbers to values and inputs' slopes.
_MAPS = {"inputs": _INPUTS, "values": _VALUES, "slopes": _turned(_VALUES), "input_slopes": _turned(_INPUTS)}
# The same of the largest of each 2 x 2 values: a tile's first row; its second says which of the four each is.
_MAPS |= {"largest": _MAPS["values"], "largest_slopes": _MAPS["slopes"]}
_BY_WEIGHTS = torch.kron(*map(torch.tensor, _WEIGHTS))  # (24, 9)

_SPREAD = """
@njit(cache=KEPT, fastmath=MATHS)
def map_{name}(images, tiles, first, number, strides, grid):
    whole_vectors()
    zero = np.float32(0)
    for i in range(number):
        for a in range(grid[0]):
            for b in range(grid[1]):
                p = (first + i) * strides[0] + a * {down} * strides[1] + b * {across}
                to = np.uintp(((i * grid[0] + a) * grid[1] + b) * {size})
                {places}
                for c in range(np.uintp({channels})):
                    {inputs}
                    {sums}
                    {outputs}
"""
_GATHER = """
@njit(cache=KEPT, fastmath=MATHS)
def map_{name}(tiles, images, bias, tile, first, number, strides, grid):
    whole_vectors()
    zero = np.float32(0)
    for i in range(number):
        for a in range(grid[0]):
            for b in range(grid[1]):
                p = ((i * grid[0] + a) * grid[1] + b) * {channels}
                {places}
                for c in range(np.uintp({channels})):
                    {inputs}
                    {sums}
                    {outputs}
                for r in range({rows}):
                    to = np.uintp((first + i) * strides[0] + (a * {down} + r) * strides[1] + b * {across})
                    for j in range(np.uintp({row})):
                        images[to + j] {puts} tile[np.uintp(r * {row}) + j]
"""


def around_of(
    x: Tensor, weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Pair | None:
    """Return the rows and columns of zeros around; None: PyTorch's is taken (few full tiles, more threads than one)."""
    steps, around = [*_pair(stride), *_pair(dilation), groups], _pair(padding)
    if not takes(weight) or steps != [1] * 5 or isinstance(padding, str) or len(around) != 2 or min(around) < 0:
        return None
    if x.dim() != 4 or x.shape[1] != weight.shape[1] or not x.is_cpu or {x.dtype, weight.dtype} != {torch.float32}:
        return None
    shape = _shape_of(x, around)
    if min(*shape, *x.shape) < 1 or torch.get_num_threads() > 1:
        return None
    in_image = math.prod(_grid_of(shape))
    tiles, is_full = len(x) * in_image, 8 * math.prod(shape) >= 7 * in_image * _DOWN * _ACROSS
    is_large = tiles >= _FEWEST_TILES and tiles * math.prod(weight.shape[:2]) >= _FEWEST_PRODUCTS
    return around if is_full and is_large and has_kernels() else None


def takes(weight: Tensor) -> bool:
    """Return whether weights may be those of such a convolution."""
    return weight.shape[2:] == (3, 3) and weight.shape[0] >= _FEWEST_OUTS and weight.shape[1] >= _FEWEST


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether tensors are numbers in memory, and autograd's backward pass is all that is derived from them."""
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return False
    if torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0:
        return False
    own = [one for one in tensors if one is not None]
    return all(type(one) in (Tensor, nn.Parameter) and one.is_cpu and torch._C._has_storage(one) for one in own)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair, pools: bool = False
) -> tuple[Tensor, Tensor]:
    """Return a convolution's values, `(batch, channels, rows, columns)`, channels innermost in memory; with `pools` the
    largest of each 2 x 2 of them, and what `gradients` reads of it."""
    shape = _shape_of(x, padding)
    grid, maps, across = _grid_of(shape), "largest" if pools else "values", _ACROSS // 2 if pools else _ACROSS
    images, by = _Images(_fitted(x, padding, grid, 2), grid), _transformed(weight).transpose(1, 2)
    to = _Images(x.new_empty(len(x), grid[0] * _DOWN, grid[1] * across, len(weight)), grid, bias)
    for first, number in images.parts():
        to.gather(maps, images.spread("inputs", first, number), by, first, number)
    values = to.values[:, ::2][:, : shape[0] // 2, : shape[1] // 2] if pools else to.values[:, : shape[0], : shape[1]]
    return values.contiguous().permute(0, 3, 1, 2), to.values


def gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, padding: Pair, wanted: Sequence[bool], pooled: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a convolution's inputs, weights and bias, as wanted, from that of its values, or of the
    largest of each 2 x 2 where `pooled` is what `convolve` returned beside them, which is written to."""
    of_inputs, of_weights, of_bias = wanted
    grid, (outs, channels) = _grid_of(_shape_of(x, padding)), weight.shape[:2]
    images = _Images(_fitted(x, padding, grid, 2), grid)
    if pooled is None:
        maps, of_values = "slopes", _fitted(gradient, (0, 0), grid, 0)
    else:
        maps, of_values, (rows, columns) = "largest_slopes", pooled, gradient.shape[2:]
        pooled[:, ::2].zero_()
        pooled[:, ::2][:, :rows, :columns] = gradient.permute(0, 2, 3, 1)
    slopes = _Images(of_values, grid)
    to, by = _Images(torch.zeros_like(images.values), grid), _transformed(weight)
    dx = dw = by_weight = None
    for first, number in images.parts():
        products = slopes.spread(maps, first, number)
        if of_weights:
            pair = products.transpose(1, 2), images.spread("inputs", first, number)
            by_weight = torch.bmm(*pair) if by_weight is None else torch.baddbmm(by_weight, *pair, out=by_weight)
        if of_inputs:
            to.gather("input_slopes", products, by, first, number)
    if of_inputs:
        (above, beside), (height, width) = padding, x.shape[2:]
        dx = to.values[:, above : above + height, beside : beside + width].contiguous().permute(0, 3, 1, 2)
    if by_weight is not None:
        dw = torch.mm(_BY_WEIGHTS.t(), by_weight.flatten(1)).view(3, 3, outs, channels).permute(2, 3, 0, 1)
    return dx, dw, gradient.sum((0, 2, 3)) if of_bias else None


class _Images:
    """A batch of images, `(batch, rows, columns, channels)`, that tiles are read from or written to, plus a bias."""

    def __init__(self, values: Tensor, grid: Pair, bias: Tensor | None = None) -> None:
        self.values, self.channels = values, values.shape[3]
        self._tiles, self._places = math.prod(grid), (values.stride()[:2], grid)
        self._at_once = max(1, _TILES_AT_ONCE // self._tiles)
        # One for all parts, which then stays in a processor's fast memory.
        self._numbers = values.new_empty(self._at_once * self._tiles * len(_BY_WEIGHTS) * self.channels)
        self._bias = _flat(values.new_zeros(self.channels) if bias is None else bias)
        self._tile = _flat(values.new_empty(len(_BY_WEIGHTS) * self.channels))
        self._flat, self._flat_numbers = _flat(values), _flat(self._numbers)
        self._views = dict[tuple[int, ...], Tensor]()  # to make one anew for each part takes as long as a map

    def parts(self) -> list[Pair]:
        """Return the first image, and the number of images, of each matrix product."""
        batch, number = len(self.values), self._at_once
        return [(first, min(number, batch - first)) for first in range(0, batch, number)]

    def spread(self, maps: str, first: int, number: int) -> Tensor:
        """Return the numbers of each tile of some images, `(24, tiles, channels)`."""
        _kernel(maps, self.channels)(self._flat, self._flat_numbers, first, number, *self._places)
        return self._shaped(number * self._tiles, len(_BY_WEIGHTS)).transpose(0, 1)

    def gather(self, maps: str, tiles: Tensor, by: Tensor, first: int, number: int) -> None:
        """Write what each tile's numbers times a matrix become; where tiles overlap, add it."""
        torch.bmm(tiles, by, out=self._shaped(len(_BY_WEIGHTS), number * self._tiles))
        own = self._flat_numbers, self._flat, self._bias, self._tile
        _kernel(maps, self.channels)(*own, first, number, *self._places)

    def _shaped(self, *shape: int) -> Tensor:
        if shape not in self._views:
            self._views[shape] = self._numbers[: math.prod(shape) * self.channels].view(*shape, self.channels)
        return self._views[shape]


def _flat(values: Tensor) -> Any:
    return values.detach().view(-1).numpy()


def _shape_of(x: Tensor, padding: Pair) -> Pair:
    """Return rows and columns of a convolution's values."""
    return x.shape[2] + 2 * padding[0] - 2, x.shape[3] + 2 * padding[1] - 2


def _grid_of(shape: Sequence[int]) -> Pair:
    """Return how many tiles cover an image's values, down and across."""
    return -(-shape[0] // _DOWN), -(-shape[1] // _ACROSS)


def _fitted(x: Tensor, before: Pair, grid: Pair, more: int) -> Tensor:
    """Return images with channels innermost and zeros around, of the grid's rows and columns and some more."""
    images, (above, beside), (_, _, height, width) = x.permute(0, 2, 3, 1), before, x.shape
    below, behind = grid[0] * _DOWN + more - height - above, grid[1] * _ACROSS + more - width - beside
    around = 0, 0, beside, behind, above, below
    return (functional.pad(images, around) if any(around) else images).contiguous()


def _transformed(weight: Tensor) -> Tensor:
    """Return what each of a tile's numbers is multiplied by, `(24, channels of outputs, of inputs)`."""
    return torch.mm(_BY_WEIGHTS, weight.permute(2, 3, 0, 1).reshape(9, -1)).view(-1, *weight.shape[:2])


@functools.cache
def has_kernels() -> bool:
    """Return whether Numba is built for this Python and processor, and compiles."""
    try:
        from fedskew.models._kernels import compiled

        compiled("@njit(cache=KEPT)\ndef nothing(numbers):\n    whole_vectors()", "nothing")(_flat(torch.zeros(1)))
    except Exception:
        return False
    return True


@functools.cache
def _kernel(maps: str, channels: int) -> Callable[..., None]:
    """Return the kernel that computes tiles from images, or images from tiles."""
    from fedskew.models._kernels import compiled, filled

    by_rows, by_columns = _MAPS[maps]
    rows, columns, high, wide = (*map(len, (by_rows[0], by_columns[0], by_rows, by_columns)),)
    read, written = ([(i, j) for i in range(r) for j in range(c)] for r, c in ((rows, columns), (high, wide)))
    pooled = maps.startswith("largest")
    across = _ACROSS // 2 if pooled else _ACROSS
    if maps in ("values", "input_slopes", "largest"):
        template, plane = _GATHER, f"number * grid[0] * grid[1] * {channels}"
        places = [f"p{at} = np.uintp(p + {at} * {plane})" for at in range(len(read))]
        inputs = [f"x{i}_{j} = tiles[p{at} + c]" for at, (i, j) in enumerate(read)]
        added = "" if maps == "input_slopes" else " + bias[c]"
        put = [f"z{i}_{j}{added}" for i, j in written]
        if pooled:
            wide, put = across, ["v0 + bias[c]", "v1 + bias[c]", "w0", "w1"]
        outputs = [f"tile[np.uintp({at * channels}) + c] = {one}" for at, one in enumerate(put)]
    else:
        template = _SPREAD
        places = [f"p{i} = np.uintp(p + {i} * strides[1])" for i in range(rows)]
        inputs = [f"x{i}_{j} = images[p{i} + np.uintp({j * channels}) + c]" for i, j in read]
        if pooled:
            pairs = [(i, one, k) for i, one in enumerate("vw") for k in (0, 1)]
            inputs = [f"{one}{k} = images[p{i} + np.uintp({k * channels}) + c]" for i, one, k in pairs]
            inputs += [f"x{i}_{j} = v{j // 2} if w{j // 2} == np.float32({2 * i + j % 2}) else zero" for i, j in read]
        outputs = [f"tiles[to + np.uintp({at * channels}) + c] = z{i}_{j}" for at, (i, j) in enumerate(written)]
    sums = [f"y{i}_{j} = {_sum(by_rows[i], f'x{{}}_{j}')}" for i in range(high) for j in range(columns)]
    sums += [f"z{i}_{j} = {_sum(by_columns[j], f'y{i}_{{}}')}" for i, j in written]
    if maps == "largest":
        sums += [*_largest(0), *_largest(1)]
    own: dict[str, Any] = {"channels": channels, "rows": high, "row": wide * channels, "size": high * wide * channels}
    own |= {"down": _DOWN, "across": across * channels, "puts": "+=" if maps == "input_slopes" else "="}
    for key, value in own.items():
        template = template.replace(f"{{{key}}}", str(value))
    source = filled(template, places=places, inputs=inputs, sums=sums, outputs=outputs)
    # Numba sees by its name, its bytecode and `_kernels.py` alone whether a kernel is still the one it keeps.
    name = f"{maps}_{channels}_{zlib.crc32(source.encode()):08x}"
    return compiled(source.replace("{name}", name), f"map_{name}")


def _largest(k: int) -> list[str]:
    """Say in `vk` which of four values is the largest, and in `wk` at which place it is; of equal ones, the first."""
    a, b, c, d = f"z0_{2 * k}", f"z0_{2 * k + 1}", f"z1_{2 * k}", f"z1_{2 * k + 1}"
    # What is compared is as wide as what is chosen by it, and nothing branches: a compiler takes whole vectors then.
    return [
        f"left, lower_left = ({b} <= {a}) | ({a} != {a}), ({d} <= {c}) | ({c} != {c})",
        f"upper, lower = {a} if left else {b}, {c} if lower_left else {d}",
        "is_upper = (lower <= upper) | (upper != upper)",
        f"v{k} = upper if is_upper else lower",
        f"w{k} = (zero if left else np.float32(1)) if is_upper else (np.float32(2) if lower_left else np.float32(3))",
    ]


def _sum(factors: Sequence[float], names: str) -> str:
    terms = [(names.format(at), factor) for at, factor in enumerate(factors) if factor]
    return " + ".join(name if factor == 1 else f"np.float32({factor}) * {name}" for name, factor in terms)
