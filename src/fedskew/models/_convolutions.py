"""Convolutions of few channels, each with bias, ReLU and 2 x 2 max-pooling one kernel each way, on buffers kept."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.models._chain import Stage, gradient_of
from fedskew.models._kernels import LONGEST_ROW, SCRATCH, Numbers, convolve_of, pack, unmask, unpool, weigh_of

SHORTEST_ROW = 8
"""Columns of a convolution's outputs below which PyTorch's own is faster."""
LARGEST_GROUP = 32
"""Samples of a group, at most: a few rows of a few channels then fit into a processor's fastest memory."""


def aligned(size: int) -> Numbers:
    """Return zeros that begin where a line of the processor's caches does, as PyTorch's do and NumPy's do not."""
    zeros: Numbers = torch.zeros(size, dtype=torch.float32).numpy()
    return zeros


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
            self.values = aligned(needed)
        else:
            self.values[:needed] = 0
        self.groups, self.step = groups, step
        self.at, self.strides = above * row + beside * step, (channels * plane, plane, row)

    def write(self, images: Tensor) -> None:
        """Set the values to a batch of images; samples that a last group lacks are 0."""
        pack(images.contiguous().numpy(), self.values, self.groups, self.at, self.strides, self.step)

    def read(self, batch: int) -> Tensor:
        """Return a batch of images."""
        shape, strides = (self.groups, self.step, *self.shape), (self.strides[0], 1, *self.strides[1:], self.step)
        images = torch.from_numpy(self.values).as_strided(shape, strides, self.at)
        return images.clone(memory_format=torch.contiguous_format).flatten(0, 1)[:batch]


class NarrowConvolution:
    """A convolution of stride 1 with its bias and, if wanted, 2 x 2 max-pooling and ReLU.

    `x` are its inputs, padded; `y` its outputs, which are the next one's inputs; `dx` and `dy` their gradients.
    """

    def __init__(self, layer: nn.Conv2d, x: Images, pooled: bool, relu: bool, first: bool) -> None:
        self.layer, self.x, self.pooled, self.relu, self.first = layer, x, pooled, relu, first
        channels, height, width = x.shape
        outs, (rows, taps), (down, across) = layer.out_channels, layer.kernel_size, x.padding
        self.height, self.width = height + 2 * down - rows + 1, width + 2 * across - taps + 1
        self.form = channels, rows, outs, self.height, self.width
        around = (0, 0) if first else (rows - 1 - down, taps - 1 - across)
        self.dy = Images(outs, self.height, self.width, around)
        self.out_shape = outs, self.height // (1 + pooled), self.width // (1 + pooled)
        self.y, self.dx = Images(*self.out_shape), Images(channels, height, width)
        self.choice = np.zeros(0, np.uint8)
        self.weight = np.zeros((outs, channels, rows, taps), np.float32)
        self.turned = np.zeros((channels, outs, rows, taps), np.float32)
        self.dw, self.db = np.zeros_like(self.weight), np.zeros(outs, np.float32)
        self.no_bias = np.zeros(max(outs, channels), np.float32)
        self.sums, self.lower = aligned(8 * SCRATCH), np.zeros(SCRATCH, np.int32)
        self.convolve, self.weigh = convolve_of(taps, outs), weigh_of(taps, outs)
        self.convolve_back = None if first else convolve_of(taps, channels)

    def lay_out(self, groups: int, step: int) -> None:
        """Make room for a batch."""
        for images in (self.x, self.dy, *([] if self.first else [self.dx])):
            images.lay_out(groups, step)
        self.choice = np.zeros(groups * math.prod(self.out_shape) * step, np.uint8)

    def forward(self) -> None:
        """Compute `y` from `x`."""
        x, y = self.x, self.y
        np.copyto(self.weight, self.layer.weight.detach().numpy())
        bias = self.no_bias if self.layer.bias is None else self.layer.bias.detach().numpy()
        self.convolve(
            x.values, self.weight, bias, y.values, self.choice, self.sums, self.lower, x.groups, x.strides,
            y.at, y.strides, (*self.form, x.padding[0], x.shape[1]), x.step, int(self.pooled), self.relu,
        )  # fmt: skip

    def backward(self, gradient: Images) -> None:
        """Write the layer's gradients and compute `dx`, from the gradient of the outputs, which has no padding."""
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
        if (to := gradient_of(self.layer.weight)) is not None:
            self.weigh(self.dw, x.values, dy.values, x.groups, x.strides, dy.at, dy.strides, self.form, x.step)
            to.copy_(torch.from_numpy(self.dw))
        if (to := gradient_of(self.layer.bias)) is not None:
            to.copy_(torch.from_numpy(self.db))
        if self.convolve_back is None:
            return
        np.copyto(self.turned, self.weight.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1])
        form = self.layer.out_channels, self.form[1], *x.shape, dy.padding[0], self.height
        self.convolve_back(
            dy.values, self.turned, self.no_bias, self.dx.values, self.choice, self.sums, self.lower, x.groups,
            dy.strides, self.dx.at, self.dx.strides, form, x.step, 0, False,
        )  # fmt: skip


class NarrowConvolutions(Stage):
    """The convolutions of a chain."""

    def __init__(self, convolutions: Sequence[NarrowConvolution]) -> None:
        super().__init__(None, first=True)
        self.convolutions = convolutions
        for one, following in pairwise(convolutions):
            one.y = following.x
        self.last = Images(*convolutions[-1].out_shape)
        self.batch = 0
        self.widest = max(one.width for one in convolutions)

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        self._lay_out(len(x))
        self.convolutions[0].x.write(x)
        for convolution in self.convolutions:
            convolution.forward()
        return self.convolutions[-1].y.read(len(x))

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        to = self.last
        to.write(gradient)
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
        self.convolutions[-1].y.lay_out(groups, step)
        self.last.lay_out(groups, step)
        self.batch = batch


def narrow_convolutions(
    found: Sequence[tuple[nn.Conv2d, bool, bool]], shape: tuple[int, int, int]
) -> NarrowConvolutions | None:
    """Make a stage of convolutions, each pooled and with ReLU or not; None where PyTorch's are as fast."""
    convolutions: list[NarrowConvolution] = []
    for layer, pooled, relu in found:
        down, across = map(int, layer.padding)
        one = NarrowConvolution(layer, Images(*shape, (down, across)), pooled, relu, first=not convolutions)
        if not SHORTEST_ROW <= one.width <= LONGEST_ROW or one.height < 2:
            return None
        convolutions.append(one)
        shape = one.out_shape
    return NarrowConvolutions(convolutions)
