"""A network that is a chain of known layers, computed forward and backward without autograd, on buffers laid out once.

Linear layers are products by `torch.addmm` and `torch.mm`; a convolution of stride 1 with its bias, ReLU and 2 x 2
max-pooling is one kernel each way (`_kernels`), or PyTorch's own where those are as fast. The loss stays PyTorch's:
autograd sees features and logits alone.

The function is the network's own. Sums are added up in another order, so gradients differ in their last digits, and two
trajectories part where a ReLU or a maximum is nearly tied, as they do between two builds of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.models._dropout import Dropout
from fedskew.models._kernels import LONGEST_ROW, SCRATCH, convolve_of, weigh_of
from fedskew.models._network import Outputs

LARGEST_GROUP = 32
"""Samples of a group, at most: a few rows of a few channels then fit into a processor's fastest memory."""
ROWS_AT_ONCE = 128
"""Samples that are computed at once where no gradient is wanted."""


class Stage(Protocol):
    """One layer, or several that are computed as one, on a batch of rows, `(batch, values)`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, and keep what `backward` reads; `x` may be overwritten."""

    def backward(self, gradient: Tensor) -> Tensor:
        """Write the layer's gradients, and return its inputs'; `gradient` may be overwritten."""


def _gradient(parameter: Tensor | None) -> Tensor | None:
    """Return where a parameter's gradient goes; None if it is frozen, or the layer has none."""
    return None if parameter is None or not parameter.requires_grad else parameter.grad


class Linear:
    """A linear layer; `first`: nothing before it is trained."""

    def __init__(self, layer: nn.Linear, first: bool) -> None:
        self.layer, self.first = layer, first
        # Once, as to look a parameter up takes as long as a small product.
        self.weight, self.bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        self.turned, self.dw, self.db = self.weight.t(), _gradient(layer.weight), _gradient(layer.bias)
        self.x = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        self.x = x
        return torch.mm(x, self.turned) if self.bias is None else torch.addmm(self.bias, x, self.turned)

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        if self.dw is not None:
            torch.mm(gradient.t(), self.x, out=self.dw)
        if self.db is not None:
            torch.sum(gradient, 0, out=self.db)
        return gradient if self.first else torch.mm(gradient, self.weight)


class ReLU:
    """The larger of each value and 0."""

    y = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        self.y = x.relu_()
        return self.y

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        torch.ops.aten.threshold_backward.grad_input(gradient, self.y, 0, grad_input=gradient)
        return gradient


class Mask:
    """Keyed dropout; with `channels`, of whole channels of images with so many."""

    def __init__(self, layer: Dropout, channels: int | None = None) -> None:
        self.layer, self.channels = layer, channels
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        drops = self.layer.training and self.layer.p > 0
        self.mask = self.layer(x.new_ones(len(x), self.channels or x.shape[1])) if drops else None
        return self.backward(x)

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        if self.mask is not None:
            gradient.view(*self.mask.shape, -1).mul_(self.mask.unsqueeze(-1))
        return gradient


class Images:
    """Values of a batch in the layout of convolutions, `[group][channel][row][column, sample]`, with zeros around."""

    def __init__(self, channels: int, height: int, width: int, padding: tuple[int, int] = (0, 0)) -> None:
        self.shape, self.padding = (channels, height, width), padding
        self.values = np.zeros(0, np.float32)
        self.step, self.groups, self.at, self.strides = 0, 0, 0, (0, 0, 0)

    def lay_out(self, groups: int, step: int) -> None:
        """Make room for a batch of so many groups of `step` samples; all values are 0 then."""
        (channels, height, width), (above, beside) = self.shape, self.padding
        row = width * step
        if self.padding != (0, 0):  # what a kernel reads beyond a row's end is 0, too
            row = ((width + 2 * beside) * step + 31) // 16 * 16
        plane = (height + 2 * above) * row
        needed = groups * channels * plane + 16 * 16
        if len(self.values) < needed:
            self.values = np.zeros(needed, np.float32)
        else:
            self.values[:needed] = 0
        self.groups, self.step = groups, step
        self.at, self.strides = above * row + beside * step, (channels * plane, plane, row)


class Convolution:
    """A convolution of stride 1 with its bias and, if wanted, 2 x 2 max-pooling and ReLU.

    `x` are its inputs, padded; `y` its outputs, which are the next one's inputs; `dx` and `dy` their gradients.
    """

    def __init__(self, layer: nn.Conv2d, x: Images, pooled: bool, relu: bool, first: bool) -> None:
        self.layer, self.x, self.pooled, self.relu, self.first = layer, x, pooled, relu, first
        rows, taps = layer.kernel_size
        channels, height, width = x.shape
        down, across = x.padding
        outs = layer.out_channels
        self.height, self.width = height + 2 * down - rows + 1, width + 2 * across - taps + 1
        self.form = channels, rows, outs, self.height, self.width
        around = (0, 0) if first else (rows - 1 - down, taps - 1 - across)
        self.dy = Images(outs, self.height, self.width, around)
        self.out_shape = outs, self.height // (1 + pooled), self.width // (1 + pooled)
        self.y = Images(*self.out_shape)
        self.dx = Images(channels, height, width)
        self.choice = np.zeros(0, np.uint8)
        self.weight = np.zeros((outs, channels, rows, taps), np.float32)
        self.turned = np.zeros((channels, outs, rows, taps), np.float32)
        self.dw = np.zeros_like(self.weight)
        self.db = np.zeros(outs, np.float32)
        self.no_bias = np.zeros(max(outs, channels), np.float32)
        self.sums = np.zeros(8 * SCRATCH, np.float32)
        self.lower = np.zeros(SCRATCH, np.uint8)
        self.convolve, self.weigh = convolve_of(taps, outs).convolve, weigh_of(taps, outs).weigh
        self.convolve_back = None if first else convolve_of(taps, channels).convolve

    def lay_out(self, groups: int, step: int) -> None:
        """Make room for a batch."""
        for images in (self.x, self.y, self.dy, *([] if self.first else [self.dx])):
            images.lay_out(groups, step)
        self.choice = np.zeros(groups * math.prod(self.out_shape) * step, np.uint8)

    def forward(self) -> None:
        """Compute `y` from `x`."""
        x, y = self.x, self.y
        np.copyto(self.weight, self.layer.weight.detach().numpy())
        bias = self.no_bias if self.layer.bias is None else self.layer.bias.detach().numpy()
        self.convolve(
            x.values, self.weight, bias, y.values, self.choice, self.sums, self.lower, x.groups, x.strides,
            y.at, y.strides, self.form, x.step, int(self.pooled), self.relu,
        )  # fmt: skip

    def backward(self, gradient: Images) -> None:
        """Write the layer's gradients and compute `dx`, from the gradient of the outputs, which has no padding."""
        from fedskew.models._layout import unmask, unpool

        x, y, dy = self.x, self.y, self.dy
        if self.pooled:
            unpool(
                dy.values, self.db, gradient.values, self.choice, x.groups, dy.at, dy.strides, self.out_shape, x.step
            )
        else:
            unmask(
                dy.values, self.db, gradient.values, y.values, x.groups, dy.at, dy.strides, y.at, y.strides,
                self.out_shape, x.step, self.relu,
            )  # fmt: skip
        if (to := _gradient(self.layer.weight)) is not None:
            self.weigh(self.dw, x.values, dy.values, x.groups, x.strides, dy.at, dy.strides, self.form, x.step)
            to.copy_(torch.from_numpy(self.dw))
        if (to := _gradient(self.layer.bias)) is not None:
            to.copy_(torch.from_numpy(self.db))
        if self.convolve_back is None:
            return
        np.copyto(self.turned, self.weight.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1])
        form = self.layer.out_channels, self.form[1], *x.shape
        self.convolve_back(
            dy.values, self.turned, self.no_bias, self.dx.values, self.choice, self.sums, self.lower, x.groups,
            dy.strides, self.dx.at, self.dx.strides, form, x.step, 0, False,
        )  # fmt: skip


class Convolutions:
    """The convolutions of a chain: images `(batch, channels, rows, columns)` to rows of values."""

    def __init__(self, convolutions: Sequence[Convolution]) -> None:
        self.convolutions = convolutions
        for one, following in pairwise(convolutions):
            one.y = following.x
        self.last = Images(*convolutions[-1].out_shape)
        self.batch = 0
        self.widest = max(one.width for one in convolutions)

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        from fedskew.models._layout import pack, unpack

        self._lay_out(len(x))
        first, last = self.convolutions[0].x, self.convolutions[-1].y
        pack(x.contiguous().numpy(), first.values, first.groups, first.at, first.strides, first.step)
        for convolution in self.convolutions:
            convolution.forward()
        values = x.new_empty(len(x), *last.shape)
        unpack(last.values, values.numpy(), last.at, last.strides, last.step)
        return values.view(len(x), -1)

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        from fedskew.models._layout import pack

        to = self.last
        images = gradient.reshape(len(gradient), *to.shape).numpy()
        pack(images, to.values, to.groups, to.at, to.strides, to.step)
        for convolution in reversed(self.convolutions):
            convolution.backward(to)
            to = convolution.dx
        return gradient

    def _lay_out(self, batch: int) -> None:
        if batch == self.batch:
            return
        groups = -(-batch // min(LARGEST_GROUP, LONGEST_ROW // self.widest))
        step = -(-batch // groups)
        for convolution in self.convolutions:
            convolution.lay_out(groups, step)
        self.last.lay_out(groups, step)
        self.batch = batch


class WideConvolution:
    """A convolution with its bias, 2 x 2 max-pooling and ReLU by PyTorch's own functions."""

    def __init__(self, layer: nn.Conv2d, pooled: bool, relu: bool, first: bool) -> None:
        self.layer, self.pooled, self.relu, self.first = layer, pooled, relu, first
        self.weight, self.bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        self.x = self.before = self.choice = self.y = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        self.x = x
        y = torch.conv2d(x, self.weight, self.bias, padding=self.layer.padding)
        if self.pooled:
            self.before = y
            y, self.choice = torch.ops.aten.max_pool2d_with_indices(y, (2, 2), (2, 2))
        self.y = y.relu_() if self.relu else y
        return self.y

    def backward(self, gradient: Tensor) -> Tensor:
        """Write the layer's gradients, and return its inputs'; of the first layer nothing of use."""
        if self.relu:
            gradient = torch.ops.aten.threshold_backward(gradient, self.y, 0)
        if self.pooled:
            gradient = torch.ops.aten.max_pool2d_with_indices_backward(
                gradient, self.before, (2, 2), (2, 2), (0, 0), (1, 1), False, self.choice
            )
        to = [_gradient(self.layer.weight), _gradient(self.layer.bias)]
        needed = [not self.first, *(one is not None for one in to)]
        options = (len(self.weight),), (1, 1), self.layer.padding, (1, 1), False, (0, 0), 1, needed
        dx, *found = torch.ops.aten.convolution_backward(gradient, self.x, self.weight, *options)
        for own, one in zip(to, found, strict=True):
            if own is not None:
                own.copy_(one)
        return gradient if self.first else dx


class WideConvolutions:
    """Convolutions of a chain that fill PyTorch's registers, channels innermost: images to rows of values."""

    def __init__(self, convolutions: Sequence[WideConvolution]) -> None:
        self.convolutions = convolutions
        self.shape = torch.Size()

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        x = x.contiguous(memory_format=torch.channels_last)
        for convolution in self.convolutions:
            x = convolution.forward(x)
        self.shape = x.shape
        return x.reshape(len(x), -1)

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        gradient = gradient.view(self.shape).contiguous(memory_format=torch.channels_last)
        for convolution in reversed(self.convolutions):
            gradient = convolution.backward(gradient)
        return gradient


class Chain:
    """Stages one after another; the last is the linear layer whose inputs are the features.

    Args:
        shape: The shape of one sample, `(values,)` or `(channels, rows, columns)`.
        stages: In their order.
        dropouts: The network's keyed dropout layers.

    Attributes:
        trained: How many tensors get a gradient.
    """

    def __init__(self, shape: tuple[int, ...], stages: Sequence[Stage], dropouts: Sequence[Dropout]) -> None:
        self.shape, self.stages, self.dropouts = shape, stages, dropouts
        self.images = isinstance(stages[0], Convolutions | WideConvolutions)
        layers: list[nn.Module] = [stage.layer for stage in stages if isinstance(stage, Linear)]
        if isinstance(stages[0], Convolutions | WideConvolutions):
            layers += [one.layer for one in stages[0].convolutions]
        self._parameters = [own for layer in layers for own in layer.parameters()]
        self.trained = sum(own.requires_grad for own in self._parameters)
        self._addresses = self._found()

    def linear(self) -> list[tuple[nn.Linear, bool]] | None:
        """Return a chain's layers, trained and linear, and whether a ReLU follows each; None: it has others."""
        layers: list[tuple[nn.Linear, bool]] = []
        for stage in self.stages:
            if isinstance(stage, Linear) and all(own.requires_grad for own in stage.layer.parameters()):
                layers.append((stage.layer, False))
            elif isinstance(stage, ReLU) and layers:
                layers[-1] = layers[-1][0], True
            else:
                return None
        return layers

    def is_current(self) -> bool:
        """Return whether parameters and gradients still lie where they did when the chain was read."""
        return self._addresses == self._found()

    def _found(self) -> list[tuple[int, int]]:
        gradients = [_gradient(own) for own in self._parameters]
        return [
            (own.data_ptr(), 0 if gradient is None else gradient.data_ptr())
            for own, gradient in zip(self._parameters, gradients, strict=True)
        ]

    def takes(self, x: Tensor) -> bool:
        """Return whether the chain can compute a batch."""
        fits = x.shape[1:] == self.shape and x.dtype == torch.float32 and x.device.type == "cpu"
        return fits and len(x) > 0 and not x.requires_grad

    def outputs(self, x: Tensor) -> Outputs:
        """Compute features and logits of a batch; what `backward` reads is kept until the next call."""
        for layer in self.dropouts:
            layer.uses = 0
        if not self.images:
            x = x.reshape(len(x), -1)
        *before, last = self.stages
        if before and isinstance(before[0], ReLU | Mask):  # they overwrite it
            x = x.clone()
        for stage in before:
            x = stage.forward(x)
        return Outputs(x, last.forward(x))

    def predictions(self, x: Tensor) -> Tensor:
        """Compute logits without a gradient, of a few samples at a time where no mask is drawn for the whole batch."""
        at_once = len(x) if any(layer.training for layer in self.dropouts) else ROWS_AT_ONCE
        return torch.cat([self.outputs(rows).logits for rows in torch.split(x, at_once)])

    def backward(self, features: Tensor | None, logits: Tensor | None, like: Outputs) -> None:
        """Write the parameters' gradients, from those of the loss by the last batch's features and logits."""
        gradient = self.stages[-1].backward(torch.zeros_like(like.logits) if logits is None else logits)
        if len(self.stages) > 1 and features is not None:
            gradient = gradient + features
        for stage in reversed(self.stages[:-1]):
            gradient = stage.backward(gradient)
