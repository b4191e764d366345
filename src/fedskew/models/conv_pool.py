"""Convolution, 2 x 2 max-pooling and ReLU as one operation, faster on CPUs than one after another.

The function and its gradient equal those of `relu(max_pool2d(conv(x), 2))`, ties included. On CPUs, convolutions and
PyTorch's max-pooling process 16 channels at once, so they waste most of that on layers with few channels:

- **Few output channels.** Two rows of outputs are computed as twice the channels (the kernel, and the kernel shifted
  down by one, with stride 2). Windows are reduced by taking the larger of two slices, twice; two masks store which one
  was larger.
- **Few input channels.** The gradient of the input is a convolution of the padded gradient of the output, again of two
  rows at once.

ReLU comes last, on a quarter of the values. The gain is measured in docs/performance.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d, pad, relu

FEW_CHANNELS = 8
"""Largest number of channels that fits twice into a register of 16 float32 values (AVX-512)."""
SMALLEST_BATCH = 32
"""In smaller batches, starting an operation takes longer than its computation."""


def is_poolable(layer: nn.Conv2d) -> bool:
    """Return whether `ConvPoolReLU` takes a convolution: bias, stride 1, padded by zeros, fewer than its kernel."""
    return (
        layer.bias is not None
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and all(padded < kernel for padded, kernel in zip(_padding(layer), layer.kernel_size, strict=True))
    )


class ConvPoolReLU(nn.Module):
    """`relu(max_pool2d(layer(x), 2))` for a convolution that `is_poolable`.

    The faster operation is used on a CPU, for layers of few channels and batches of at least `SMALLEST_BATCH`, outside
    `torch.func` transforms. Otherwise the three operations run one after another.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled activations, `(batch, channels, rows, columns)`."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():  # also a `torch.export`
            return relu(max_pool2d(self.layer(x), 2))
        if x.device.type != "cpu" or len(x) < SMALLEST_BATCH:
            return relu(max_pool2d(self.layer(x), 2))
        padding = _padding(self.layer)
        sides = [
            side + 2 * padded - kernel + 1
            for side, kernel, padded in zip(x.shape[2:], self.layer.kernel_size, padding, strict=True)
        ]
        own = self.layer.weight, self.layer.bias, padding
        if self.layer.out_channels <= FEW_CHANNELS and sides[0] % 2 == sides[1] % 2 == 0:
            pooled: Tensor = FewOutputChannels.apply(x, *own)  # type: ignore[no-untyped-call]
            return pooled
        if self.layer.in_channels <= FEW_CHANNELS and x.shape[2] % 2 == 0:
            return relu(max_pool2d(FewInputChannels.apply(x, *own), 2))  # type: ignore[no-untyped-call]
        return relu(max_pool2d(self.layer(x), 2))


class FewOutputChannels(torch.autograd.Function):
    """Convolution, pooling and ReLU for few output channels.

    Internally, channels are innermost: `(batch, rows, columns, channels)`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int] = (0, 0)) -> Tensor:
        """Compute the result, and save what `backward` needs."""
        x = x.contiguous(memory_format=torch.channels_last)
        kernel = _two_rows(weight).contiguous(memory_format=torch.channels_last)
        y = conv2d(x, kernel, torch.cat([bias, bias]), stride=(2, 1), padding=padding)
        y = y.permute(0, 2, 3, 1).contiguous()
        ctx.padding = padding
        batch, rows, columns, channels = y.shape
        left, right = y.view(batch, rows, columns // 2, 2, channels).unbind(3)
        larger = torch.maximum(left, right)
        top, bottom = larger.chunk(2, dim=3)
        pooled = torch.maximum(top, bottom).clamp_min_(0)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, kernel, pooled, _is_first(left, right), _is_first(top, bottom))
        return pooled.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of input, weight and bias, each if needed."""
        x, kernel, pooled, is_left, is_top = ctx.saved_tensors
        for_pooled = torch.ops.aten.threshold_backward(gradients[0].permute(0, 2, 3, 1), pooled, 0)
        batch, rows, columns, channels = is_left.shape
        for_larger = torch.empty(batch, rows, columns, channels)
        _share(for_pooled, is_top, *for_larger.chunk(2, dim=3))
        for_y = torch.empty(batch, rows, columns, 2, channels)
        _share(for_larger, is_left, *for_y.unbind(3))
        for_y = for_y.view(batch, rows, 2 * columns, channels).permute(0, 3, 1, 2)
        for_x, for_kernel, for_bias = _convolution_backward(
            for_y, x, kernel, (2, 1), ctx.padding, ctx.needs_input_grad[:3]
        )
        if ctx.needs_input_grad[1]:
            upper, lower = for_kernel.chunk(2)
            for_kernel = upper[:, :, :-1] + lower[:, :, 1:]
        if ctx.needs_input_grad[2]:
            for_bias = for_bias.view(2, -1).sum(0)
        return for_x, for_kernel, for_bias, None


class FewInputChannels(torch.autograd.Function):
    """Convolution with a faster gradient of its input, for few input channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int] = (0, 0)) -> Tensor:
        """Compute the result, and save what `backward` needs."""
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return conv2d(x, weight, bias, padding=padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of input, weight and bias, each if needed."""
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        needs_x, *needs = ctx.needs_input_grad[:3]
        _, for_weight, for_bias = _convolution_backward(gradient, x, weight, (1, 1), ctx.padding, (False, *needs))
        if not needs_x:
            return None, for_weight, for_bias, None
        batch, channels, height, width = x.shape
        around = [kernel - 1 - padded for kernel, padded in zip(weight.shape[2:], ctx.padding, strict=True)]
        kernel = _two_rows(weight.flip(2, 3).transpose(0, 1)).contiguous()
        # With channels outermost oneDNN takes half the time, copies included.
        pairs = conv2d(gradient.contiguous(), kernel, stride=(2, 1), padding=around)
        rows = pairs.view(batch, 2, channels, height // 2, width).permute(0, 3, 1, 4, 2)
        return rows.reshape(batch, height, width, channels).permute(0, 3, 1, 2), for_weight, for_bias, None


def _padding(layer: nn.Conv2d) -> tuple[int, int]:
    assert not isinstance(layer.padding, str), "is_poolable leaves out padding given by name"
    down, across = layer.padding
    return down, across


def _two_rows(kernel: Tensor) -> Tensor:
    """Make a kernel of twice the channels that, at stride 2, gives two neighbouring rows of outputs."""
    return torch.cat([pad(kernel, (0, 0, 0, 1)), pad(kernel, (0, 0, 1, 0))])


def _is_first(first: Tensor, second: Tensor) -> Tensor:
    """Return 1.0 where `first` is at least `second`, else 0.0; floats multiply twice as fast as bools."""
    return torch.ge(first, second, out=torch.empty(first.shape))


def _share(gradient: Tensor, is_first: Tensor, first: Tensor, second: Tensor) -> None:
    """Write each gradient to the one of two places that its value came from, and 0 to the other."""
    torch.mul(gradient, is_first, out=first)
    torch.sub(gradient, first, out=second)


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    needs: tuple[bool, ...],
) -> Any:
    """Compute the gradients of a convolution's input, kernel and bias, each if needed."""
    return torch.ops.aten.convolution_backward(
        gradient, x, kernel, [len(kernel)], stride, padding, (1, 1), False, (0, 0), 1, needs
    )
