"""Convolutions of many weights on small images: PyTorch's take as long as on larger ones, matrix products do not."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from fedskew.models._winograd import around_of, convolve, gradients, is_plain

MANY = 2**19
"""Weights from which a product of windows may take less time than PyTorch's convolution."""
_HOOKS: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
"""Gives what a checkpoint saves tensors by, and None outside; PyTorch before 2.8 does not tell."""


def windows_of(
    x: Tensor, weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Tensor, list[int]] | None:
    """Return what each value of a convolution reads, `(batch, values, inputs)`, and the values' rows and columns.

    None where PyTorch's convolution is faster: few weights, one by one, or more values than twice the output channels.
    """
    if weight.numel() < MANY or weight[0, 0].numel() == 1 or groups != 1 or isinstance(padding, str) or x.dim() != 4:
        return None
    own = dilation, padding, stride = [_pair(one) for one in (dilation, padding, stride)]
    if x.shape[1] != weight.shape[1] or {*map(len, own)} != {2} or min(stride) < 1:  # PyTorch says what is wrong
        return None
    sides = zip(x.shape[2:], weight.shape[2:], *own, strict=True)
    shape = [(side + 2 * around - apart * (size - 1) - 1) // step + 1 for side, size, apart, around, step in sides]
    if min(shape) < 1 or len(x) * math.prod(shape) > 2 * len(weight):
        return None
    windows = functional.unfold(x, tuple(weight.shape[2:]), dilation, padding, stride).unflatten(1, (x.shape[1], -1))
    return windows.permute(0, 3, 2, 1).flatten(2) if _is_last(weight) else windows.flatten(1, 2).transpose(1, 2), shape


def rows_of(weight: Tensor) -> Tensor:
    """View weights, or their gradient, as a matrix: a row for each channel of outputs."""
    return (weight.permute(0, 2, 3, 1) if _is_last(weight) else weight).flatten(1)


def product_of(windows: Tensor, shape: list[int], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a convolution's values, `(batch, channels, *shape)`, from what `windows_of` returns."""
    values: Tensor = functional.linear(windows, rows_of(weight), bias).transpose(1, 2).unflatten(2, shape)
    return values


def images_of(windows: Tensor, weight: Tensor, shape: torch.Size, layer: Any) -> Tensor:
    """Return the sums of what windows hold of each value of images `(batch, channels, *shape)`."""
    channels, *size = weight.shape[1:]
    if _is_last(weight):
        windows = windows.unflatten(2, (-1, channels)).transpose(2, 3).flatten(2)
    return functional.fold(windows.transpose(1, 2), shape, tuple(size), layer.dilation, layer.padding, layer.stride)


def _is_last(weight: Tensor) -> bool:
    """Return whether channels of inputs are innermost; by strides, which a tensor in `torch.vmap` has, too."""
    return weight.stride(1) == 1


class ByProducts(TorchFunctionMode):
    """Within it, convolutions on a CPU are matrix products where these are faster: of tiles, or of windows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch's."""
        kwargs = kwargs or {}
        return _convolve(*args, **kwargs) if func is torch.conv2d else func(*args, **kwargs)


class _InTiles(torch.autograd.Function):
    """A convolution in tiles, for autograd; what is no plain backward pass is PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return convolve(x, weight, bias, padding)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        *needed, _ = ctx.needs_input_grad
        if torch.is_grad_enabled() or not is_plain(gradient, x, weight):
            options = [len(weight)], (1, 1), ctx.padding, (1, 1), False, (0, 0), 1, needed
            return *torch.ops.aten.convolution_backward(gradient, x, weight, *options), None
        return *gradients(gradient, x, weight, ctx.padding, needed), None


def _convolve(input: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **named: Any) -> Tensor:
    # A checkpoint computes anew outside of this mode, and must save the same tensors; torch.compile reads no hooks.
    compiles = torch.compiler.is_compiling()
    if input.is_cpu and (compiles or not _HOOKS(True)):
        bias_fits = bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype)
        ours = not compiles and bias_fits and is_plain(input, weight, bias)
        around = around_of(input, weight, *options, **named) if ours else None
        if around is not None:
            values: Tensor = _InTiles.apply(input, weight, bias, around)  # type: ignore[no-untyped-call]
            return values if _is_last(weight) else values.contiguous()
        if (found := windows_of(input, weight, *options, **named)) is not None:
            return product_of(*found, weight, bias)
    return torch.conv2d(input, weight, bias, *options, **named)
