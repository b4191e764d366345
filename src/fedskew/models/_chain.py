"""A network that is a chain of known layers, computed forward and backward without autograd.

Layers are PyTorch's own functions, called forward and backward; convolutions of few channels, with ReLU and pooling,
are kernels of ours (`_convolutions`). The loss stays PyTorch's: autograd sees features and logits alone.

The function is the network's own. Sums are added up in another order, so gradients differ in their last digits, and two
trajectories part where a ReLU or a maximum is nearly tied, as they do between two builds of PyTorch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from fedskew.models._dropout import ChannelDropout, Dropout
from fedskew.models._network import Outputs
from fedskew.models._wide import images_of, product_of, rows_of, windows_of
from fedskew.models._winograd import around_of, convolve, gradients, has_kernels
from fedskew.models._wrappers import CosineHead

_RELU_BACKWARD = torch.ops.aten.threshold_backward.grad_input
ROWS_AT_ONCE = 128
"""Samples that are computed at once where no gradient is wanted."""
MANY_WEIGHTS = 2**20
"""Weights too many for a processor's second cache; Intel's library copies them, unless they stand on the left."""


class Stage:
    """A layer on a batch of rows or images; `first`: nothing before it has parameters."""

    def __init__(self, layer: Any, first: bool) -> None:
        self.layer, self.first = layer, first
        # Once, as to look a parameter up takes as long as a small product.
        own = [getattr(layer, name, None) for name in ("weight", "bias")]
        detached: list[Any] = [None if one is None else one.detach() for one in own]
        self.weight, self.bias = detached
        self.to = [gradient_of(one) for one in own]
        self.x = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, and keep what `backward` reads; `x` may be overwritten."""
        raise NotImplementedError

    def backward(self, gradient: Tensor) -> Tensor:
        """Write the layer's gradients, and return its inputs'; `gradient` may be overwritten."""
        raise NotImplementedError


def gradient_of(parameter: Tensor | None) -> Tensor | None:
    """Return where a parameter's gradient goes; None if it is frozen, or the layer has none."""
    return None if parameter is None or not parameter.requires_grad else parameter.grad


def _written(found: Sequence[Tensor | None], to: Sequence[Tensor | None], dx: Tensor) -> Tensor:
    """Write gradients where they go; return that of the inputs."""
    for own, one in zip(to, found, strict=True):
        if own is not None and one is not None:
            own.copy_(one)
    return dx


class Linear(Stage):
    """A linear layer. With a `rate` its weights are moved against their gradient, which is kept nowhere."""

    rate: float | None = None

    def __init__(self, layer: nn.Linear, first: bool) -> None:
        super().__init__(layer, first)
        self.turned = layer.weight.detach().t()

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        self.x = x
        if self.weight.numel() >= MANY_WEIGHTS and 8 <= len(x) <= 32 and _is_intel():
            y = torch.mm(self.weight, x.t()).t().contiguous()
            return y if self.bias is None else y.add_(self.bias)
        return torch.mm(x, self.turned) if self.bias is None else torch.addmm(self.bias, x, self.turned)

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        dw, db = self.to
        if db is not None:
            torch.sum(gradient, 0, out=db)
        dx = gradient if self.first else torch.mm(gradient, self.weight)
        if dw is not None and self.rate is None:
            torch.mm(gradient.t(), self.x, out=dw)
        elif self.rate is not None:
            torch.addmm(self.weight, gradient.t(), self.x, alpha=-self.rate, out=self.weight)
        return dx


@functools.cache
def _is_intel() -> bool:
    """Return whether matrix products are those of Intel's library on a processor of its own."""
    if not torch.backends.mkl.is_available() or not has_kernels():
        return False
    from llvmlite.binding import get_host_cpu_name  # type: ignore[import-untyped]

    return not str(get_host_cpu_name()).startswith("znver")


class Cosines(Stage):
    """Scaled cosines of features with directions that no gradient reaches (`CosineHead`)."""

    def __init__(self, layer: CosineHead, first: bool) -> None:
        super().__init__(layer, first)
        self.scale, self.by_scale = layer.scale.detach(), gradient_of(layer.scale)
        self.kept: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        logits, self.kept = CosineHead.compare(x, self.weight, self.scale)
        return logits

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        dx, by_scale = CosineHead.slopes(gradient, self.kept)
        if self.by_scale is not None:
            torch.sum(by_scale, (0, 1), out=self.by_scale)
        if (by_directions := self.to[0]) is not None:
            by_directions.zero_()
        return dx


class Convolution(Stage):
    """A convolution, channels innermost; one of many channels by fewer products, or as one product of small images.

    `pool` is what takes the largest of each 2 x 2 values behind it, if that is next.
    """

    around: tuple[int, int] | None = None
    windows: Tensor | None = None
    pool: Stage | None = None
    pooled: Tensor | None = None

    def __init__(self, layer: nn.Conv2d, first: bool) -> None:
        super().__init__(layer, first)
        self.options: Any = layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        layer = self.layer
        own = x, self.weight, layer.stride, layer.padding, layer.dilation, layer.groups
        self.x, self.windows, self.around = x, None, around_of(*own)
        if self.around is not None:
            pools = self.pool is not None
            y, whole = convolve(x, self.weight, self.bias, self.around, pools)
            self.pooled = whole if pools else None
            return y
        if (found := windows_of(*own)) is not None:
            self.windows, _ = found
            y = product_of(*found, self.weight, self.bias)
        else:
            self.x = x.contiguous(memory_format=torch.channels_last)
            y = torch.convolution(self.x, self.weight, self.bias, *self.options)
        return y if self.pool is None else self.pool.forward(y)

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`; of the first layer nothing of use."""
        if self.around is None and self.pool is not None:
            gradient = self.pool.backward(gradient)
        if self.windows is not None:
            return self._by_windows(gradient.flatten(2).transpose(1, 2).flatten(0, 1), self.windows)
        needed = [not self.first, *(one is not None for one in self.to)]
        if self.around is not None:
            dx, *found = gradients(gradient, self.x, self.weight, self.around, needed, self.pooled)
            return _written(found, self.to, gradient if dx is None else dx)
        options = (len(self.weight),), *self.options, needed
        dx, *found = torch.ops.aten.convolution_backward(gradient, self.x, self.weight, *options)
        return _written(found, self.to, gradient if self.first else dx)

    def _by_windows(self, gradient: Tensor, windows: Tensor) -> Tensor:
        dw, db = self.to
        if dw is not None:
            torch.mm(gradient.t(), windows.flatten(0, 1), out=rows_of(dw))
        if db is not None:
            torch.sum(gradient, 0, out=db)
        if self.first:
            return gradient
        by_windows = torch.mm(gradient, rows_of(self.weight)).view(windows.shape)
        return images_of(by_windows, self.weight, self.x.shape[2:], self.layer)


class MaxPooling(Stage):
    """The largest value of each window."""

    def __init__(self, layer: nn.MaxPool2d, first: bool) -> None:
        super().__init__(layer, first)
        self.options = [list(_pair(one)) for one in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)]
        self.choice = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        self.x = x
        y: Tensor
        y, self.choice = torch.ops.aten.max_pool2d_with_indices(x, *self.options, self.layer.ceil_mode)
        return y

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        options = *self.options, self.layer.ceil_mode, self.choice
        dx: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(gradient, self.x, *options)
        return dx


class AveragePooling(Stage):
    """The mean of each window, or of parts of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        self.x = x
        y: Tensor = self.layer(x)
        return y

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        layer, of = self.layer, torch.ops.aten
        dx: Tensor
        if isinstance(layer, nn.AdaptiveAvgPool2d):
            dx = of._adaptive_avg_pool2d_backward(gradient, self.x)
        else:
            windows = [list(_pair(one)) for one in (layer.kernel_size, layer.stride, layer.padding)]
            options = *windows, layer.ceil_mode, layer.count_include_pad, layer.divisor_override
            dx = of.avg_pool2d_backward(gradient, self.x, *options)
        return dx


class BatchNorm(Stage):
    """Batch norm; its running statistics are moved as PyTorch's are."""

    kept: tuple[Any, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        layer = self.layer
        held = layer.running_mean, layer.running_var
        of_batch = layer.training or layer.running_mean is None
        if of_batch and x.numel() == x.shape[1]:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
        if layer.training and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
        y: Tensor
        y, *own = torch.native_batch_norm(x, self.weight, self.bias, *held, of_batch, layer.momentum, layer.eps)
        self.kept = x, self.weight, *held, *own, of_batch, layer.eps
        return y

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        needed = [not self.first, *(one is not None for one in self.to)]
        dx, *found = torch.ops.aten.native_batch_norm_backward(gradient, *self.kept, needed)
        return _written(found, self.to, gradient if self.first else dx)


class ReLU(Stage):
    """The larger of each value and 0."""

    y = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        self.y = x.relu_()
        return self.y

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        _RELU_BACKWARD(gradient, self.y, 0, grad_input=gradient)
        return gradient


class Mask(Stage):
    """Keyed dropout."""

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        drops = self.layer.training and self.layer.p > 0
        self.mask = self.layer.mask(x) if drops else None
        return self.backward(x)

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        return gradient if self.mask is None else gradient.mul_(self.mask)


class Flatten(Stage):
    """Images to rows of values."""

    def forward(self, x: Tensor) -> Tensor:
        """See `Stage`."""
        self.x = x
        return x.flatten(1)

    def backward(self, gradient: Tensor) -> Tensor:
        """See `Stage`."""
        gradient = gradient.view(self.x.shape)
        return gradient if self.x.is_contiguous() else gradient.contiguous(memory_format=torch.channels_last)


STAGES: dict[type[nn.Module], type[Stage]] = {
    nn.Linear: Linear, nn.Conv2d: Convolution, nn.MaxPool2d: MaxPooling, nn.ReLU: ReLU, nn.Flatten: Flatten,
    Dropout: Mask, ChannelDropout: Mask, nn.AvgPool2d: AveragePooling, nn.AdaptiveAvgPool2d: AveragePooling,
    nn.BatchNorm1d: BatchNorm, nn.BatchNorm2d: BatchNorm, CosineHead: Cosines,
}  # fmt: skip
HEADS = (Linear, Cosines)
WITHOUT_PARAMETERS = (ReLU, Mask, Flatten, MaxPooling, AveragePooling)


class Chain:
    """Stages one after another; the last is the linear layer, or that of cosines, whose inputs are the features.

    Args:
        stages: In their order.
        layers: The network's layers that they compute.

    Attributes:
        trained: How many tensors get a gradient.
        large: The linear layers of many weights that get one.
    """

    def __init__(self, stages: Sequence[Stage], layers: Sequence[nn.Module]) -> None:
        self.stages = stages
        self._first = next(at for at, stage in enumerate(stages) if not isinstance(stage, WITHOUT_PARAMETERS))
        self._overwrites = any(isinstance(stage, ReLU | Mask) for stage in stages[: self._first])
        self._dropouts = [layer for layer in layers if isinstance(layer, Dropout)]
        self._whole = [*self._dropouts, *(stage.layer for stage in stages if isinstance(stage, BatchNorm))]
        self._parameters = [own for layer in layers for own in layer.parameters()]
        self.trained = sum(own.requires_grad for own in self._parameters)
        trained = [one for one in stages if isinstance(one, Linear) and one.to[0] is not None]
        self.large = [one for one in trained if one.weight.numel() >= MANY_WEIGHTS]
        self._addresses = self._found()

    def linear(self) -> tuple[list[tuple[nn.Linear, bool]], CosineHead | None] | None:
        """Return a chain's layers, trained and linear, whether a ReLU follows each, and the head of cosines in which it
        may end; None: it has others."""
        layers: list[tuple[nn.Linear, bool]] = []
        *stages, last = self.stages
        for stage in stages if isinstance(last, Cosines) else self.stages:
            if isinstance(stage, Linear) and all(own.requires_grad for own in stage.layer.parameters()):
                layers.append((stage.layer, False))
            elif isinstance(stage, ReLU) and layers:
                layers[-1] = layers[-1][0], True
            elif not isinstance(stage, Flatten):
                return None
        return layers, last.layer if isinstance(last, Cosines) else None

    def is_current(self) -> bool:
        """Return whether parameters and gradients still lie where they did when the chain was read."""
        return self._addresses == self._found()

    def _found(self) -> list[int]:
        gradients = [gradient_of(own) for own in self._parameters]
        return [0 if one is None else one.data_ptr() for one in (*self._parameters, *gradients)]

    def takes(self, x: Tensor) -> bool:
        """Return whether the chain can compute a batch of the shape for which it was read."""
        return x.dtype == torch.float32 and x.is_cpu and x.numel() > 0 and not x.requires_grad

    def outputs(self, x: Tensor) -> Outputs:
        """Compute features and logits of a batch; what `backward` reads is kept until the next call."""
        for layer in self._dropouts:
            layer.uses = 0
        if self._overwrites:
            x = x.clone()
        *before, last = self.stages
        for stage in before:
            x = stage.forward(x)
        return Outputs(x, last.forward(x))

    def predictions(self, x: Tensor) -> Tensor:
        """Compute logits without a gradient, of a few samples at a time where none depends on the whole batch."""
        at_once = len(x) if any(layer.training for layer in self._whole) else ROWS_AT_ONCE
        return torch.cat([self.outputs(rows).logits for rows in torch.split(x, at_once)])

    def backward(self, features: Tensor | None, logits: Tensor | None, like: Outputs) -> None:
        """Write the parameters' gradients, from those of the loss by the last batch's features and logits."""
        gradient = self.stages[-1].backward(torch.zeros_like(like.logits) if logits is None else logits)
        trained = self.stages[self._first : -1]
        if trained and features is not None:
            gradient = gradient + features
        for stage in reversed(trained):
            gradient = stage.backward(gradient)
