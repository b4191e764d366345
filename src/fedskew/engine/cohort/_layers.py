"""A network whose forward pass can be mapped over clients, each with its own parameters, buffers and short batches."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedskew.models import Dropout, FlatModel, Layout, Outputs, with_features
from fedskew.models.frozen import hold_still

_INSIDE = "inside.model."


class MappedNetwork:
    """The forward pass of one client at given parameters, to be mapped over clients by `torch.func.vmap`.

    Frozen tensors are shared with `model`. Batch norm, unlike PyTorch's, uses the statistics of the client's real rows
    only, and returns its running statistics instead of writing them.
    """

    def __init__(self, model: FlatModel, train: bool, batch_statistics: bool = False) -> None:
        self.batch_statistics = batch_statistics
        self._model = model
        self._mask = _BatchMask()
        own = {id(tensor): tensor for tensor in chain(model.module.parameters(), model.module.buffers())}
        module = _swap_layers(copy.deepcopy(model.module, own), self._mask)
        self._chain: tuple[LinearChain | None] | None = None
        self.keys = [_INSIDE + name for name in Dropout.keys_of(module)]  # of dropout layers
        views = model.buffer_views(model.buffers, model.read_state().integers)
        self._network = _Whole(module, list(views)).train(train)
        if batch_statistics:
            for layer in self._network.modules():
                if isinstance(layer, _BatchNorm):
                    layer.train()
        hold_still(self._network)

    def __call__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Tensor,
        integers: Tensor,
        x: Tensor,
        key: Tensor | None = None,
        mask: Tensor | None = None,
        smallest: int = 0,
    ) -> tuple[Outputs, Tensor, Tensor]:
        """Compute the network's outputs, and its buffers afterwards."""
        views = {**parameters, **self._model.buffer_views(buffers, integers)}
        tensors = {_INSIDE + name: tensor for name, tensor in views.items()}
        if key is not None:
            tensors |= dict.fromkeys(self.keys, key)
        self._mask.real, self._mask.smallest = mask, len(x) if mask is None else smallest
        outputs, after = functional_call(self._network, tensors, (x,))
        names = self._model.integer_buffers
        floating = [value.reshape(-1) for name, value in after.items() if name not in names]
        whole = [value.reshape(-1) for name, value in after.items() if name in names]
        return outputs, torch.cat(floating) if floating else buffers, torch.cat(whole) if whole else integers

    def chain(self, x: Tensor) -> "LinearChain | None":
        """Return the chain of linear layers that the network is, for a batch of one client; None: it is another."""
        if self._chain is None:
            whole = self._model.network
            trains = whole.training
            read = whole.train(self._network.training).chain(x)
            whole.train(trains)
            chain = None if read is None or (parts := read.linear()) is None else LinearChain(self._model, *parts)
            self._chain = (chain if chain is not None and chain.is_whole(self._model) else None,)
        return self._chain[0]

    def views(self, parameters: Tensor) -> dict[str, Tensor]:
        """Split a parameter vector, or a stack of them, `(clients, parameters)`, into named views, `(clients, ...)`."""
        return self._model.views(parameters)

    @property
    def layout(self) -> Layout:
        """Where the parameters stand in the vector."""
        return self._model.layout


@dataclass
class _BatchMask:
    """Mask of the current batch's real rows, `(batch,)`, None for all; number of real rows in the smallest batch."""

    real: Tensor | None = None
    smallest: int = 0


class _Whole(nn.Module):
    """The network, returning its buffers after the forward pass beside its outputs."""

    def __init__(self, module: nn.Module, buffers: list[str]) -> None:
        super().__init__()
        self.inside = with_features(module)
        owners = ((name, name.rpartition(".")) for name in buffers)
        self._places = [(name, module.get_submodule(path), key) for name, (path, _, key) in owners]

    def forward(self, x: Tensor) -> tuple[Outputs, dict[str, Tensor]]:
        outputs = self.inside(x)
        return outputs, {name: getattr(owner, key) for name, owner, key in self._places}


def on_stacks(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Inside a mapped function, call `function` once on the stacks, `(clients, ...)`, that the tensors are rows of."""
    result: Tensor = _OnStacks.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return result


class _OnStacks(torch.autograd.Function):
    """Applies a function to whole stacks when it is mapped: PyTorch's interface for a custom `vmap` rule."""

    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(*(tensor.unsqueeze(0) for tensor in tensors)).squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: Callable[..., Tensor], *tensors: Tensor
    ) -> tuple[Tensor, int]:
        stacks = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        return function(*stacks), 0


def _swap_layers(module: nn.Module, mask: _BatchMask) -> nn.Module:
    """Replace PyTorch's layers by the layers of this file, in place; return the module."""
    swapped: dict[nn.Module, nn.Module] = {}
    for layer in module.modules():
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
            swapped[layer] = _BatchNorm(layer, mask)
        elif type(layer) is nn.Conv2d and layer.weight.requires_grad and layer.padding_mode == "zeros":
            swapped[layer] = _Conv2d(layer)
        elif isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward and _trains_weight(layer):
            swapped[layer] = _Linear(layer)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in swapped:
                setattr(parent, name, swapped[child])
    return swapped.get(module, module)


def _trains_weight(layer: nn.Linear) -> bool:
    """Return whether the weight is a trained parameter; under PyTorch's parametrizations it is computed instead."""
    weight = layer._parameters.get("weight")
    return weight is not None and weight.requires_grad


class _BatchNorm(nn.Module):
    """Batch norm over the real rows of one client."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, layer: Any, mask: _BatchMask) -> None:
        super().__init__()
        _take_over(self, layer)
        self._eps, self._momentum = layer.eps, layer.momentum
        self._mask = mask

    def forward(self, x: Tensor) -> Tensor:
        along = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        if self.training or self.running_mean is None or self.running_var is None:
            mean, var = self._statistics(x, along)
        else:
            mean, var = self.running_mean, self.running_var
        scale: Tensor = (var + self._eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        return x * scale.view(shape) + shift.view(shape)

    def _statistics(self, x: Tensor, along: list[int]) -> tuple[Tensor, Tensor]:
        """Mean and variance by channel; updates the running ones."""
        mask, each = self._mask, x[0, 0].numel()
        if self.training and mask.smallest * each == 1:
            raise ValueError("Expected more than 1 value per channel when training, got 1")
        if mask.real is None:
            number: Tensor | int = len(x) * each
            var, mean = torch.var_mean(x, along, correction=0)
        else:
            real = mask.real.view(-1, *[1] * (x.dim() - 1))
            number = mask.real.sum() * each
            mean = torch.where(real, x, 0).sum(along) / number
            centred = torch.where(real, x - mean.view(1, -1, *[1] * (x.dim() - 2)), 0)
            var = centred.square().sum(along) / number
        if self.training and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None, "a layer with running statistics counts its batches"
            self.num_batches_tracked = self.num_batches_tracked + 1
            share = 1.0 / self.num_batches_tracked if self._momentum is None else self._momentum
            unbiased = var.detach() * (number / (number - 1))
            self.running_mean = (1 - share) * self.running_mean + share * mean.detach()
            self.running_var = (1 - share) * self.running_var + share * unbiased
        return mean, var


class _Linear(nn.Linear):
    """A linear layer whose gradient has the memory layout of its weights."""

    # If PyTorch maps its own layer, the gradient of all clients' weights is transposed; copying it into the layout of
    # the weights takes as long as the product.

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        _take_over(self, layer)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        return on_stacks(self._multiply, x, self.weight, *([] if self.bias is None else [self.bias]))

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.flatten(1, -2).transpose(1, 2)
        out = weight @ rows if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, rows)
        return out.transpose(1, 2).view(*x.shape[:-1], -1)


class _Conv2d(nn.Module):
    """A convolution: on a CPU of one client's images after another's, elsewhere of all clients' by one product."""

    # PyTorch's own rule is one convolution with a group for each client, which takes two to three times as long on a
    # CPU, and which cuDNN computes one group after another.

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        _take_over(self, layer)
        self._options: Any = layer.stride, layer.padding, layer.dilation, layer.groups
        stride, padding, dilation, groups = self._options
        is_plain = (stride, dilation, groups) == ((1, 1), (1, 1), 1) and not isinstance(padding, str)
        # Of larger kernels the windows take up to seventeen times the memory of groups, and gain little time.
        self._is_product = is_plain and math.prod(layer.kernel_size) <= max(9, 800 // layer.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        own = x, self.weight, *([] if self.bias is None else [self.bias])
        if x.device.type == "cpu":
            return on_stacks(self._one_by_one, *own)
        if self._is_product:
            return on_stacks(self._at_once, *own)
        return functional.conv2d(x, self.weight, self.bias, *self._options)

    def _one_by_one(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve with channels innermost, which is faster on CPUs."""
        biases = [None] * len(x) if bias is None else bias.unbind()
        own = zip(x.unbind(), weight.unbind(), biases, strict=True)
        images = [functional.conv2d(*one, *self._options).permute(0, 2, 3, 1) for one in own]
        return torch.stack(images).permute(0, 1, 4, 2, 3)

    def _at_once(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        _, (high, wide), *_ = self._options
        images: Tensor = _Product.apply(functional.pad(x, (wide, wide, high, high)), weight)  # type: ignore[no-untyped-call]
        return images if bias is None else images + bias.view(len(bias), 1, -1, 1, 1)


class _Product(torch.autograd.Function):
    """Convolutions of images `(clients, batch, channels, rows, columns)` with each client's weights, by `_convolve`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolve(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        clients, out, channels, *kernel = weight.shape
        high, wide = (side - 1 for side in kernel)
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = _convolve(functional.pad(gradient, (wide, wide, high, high)), weight.flip(3, 4).transpose(1, 2))
        rows, columns = gradient.shape[3:]
        down, right = block = _block(out, kernel, rows, columns)
        table = _windows(x, kernel, block).transpose(1, 2) @ _windows(gradient, (1, 1), block)
        table = table.view(clients, channels, down + high, right + wide, out, down, right)
        return by_x, _bands(table, kernel).sum((-2, -1))


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve images: values are computed in blocks, each from the window of inputs that it reads.

    With one value of each channel as columns, the product would have too few. Those of several have zeros where a value
    does not read an input of the window.
    """
    clients, out, channels, *kernel = weight.shape
    rows, columns = (side - own + 1 for side, own in zip(x.shape[3:], kernel, strict=True))
    high, wide = block = _block(out, kernel, rows, columns)
    table = weight.new_zeros(clients, channels, high + kernel[0] - 1, wide + kernel[1] - 1, out, high, wide)
    _bands(table, kernel).copy_(weight[..., None, None])
    images = _windows(x, kernel, block) @ table.view(clients, -1, out * high * wide)
    images = images.view(*x.shape[:2], rows // high, columns // wide, out, high, wide)
    return images.permute(0, 1, 4, 2, 5, 3, 6).reshape(*x.shape[:2], out, rows, columns)


_COLUMNS = 128
"""Columns of a matrix by which a GPU multiplies at its rate; with fewer it takes no less time."""


def _block(out: int, kernel: Sequence[int], rows: int, columns: int) -> tuple[int, int]:
    """Return height and width of the blocks that divide an image and take the least time for a value."""

    def price(block: tuple[int, int]) -> tuple[float, int]:
        window = math.prod(size + side - 1 for size, side in zip(block, kernel, strict=True))
        return window * max(_COLUMNS / (out * math.prod(block)), 1), -math.prod(block)

    heights, widths = ([size for size in range(1, side + 1) if side % size == 0] for side in (rows, columns))
    return min(product(heights, widths), key=price)


def _windows(x: Tensor, kernel: Sequence[int], block: Sequence[int]) -> Tensor:
    """Return the inputs that each block reads as a row, `(clients, blocks, inputs)`."""
    for axis, (side, size) in enumerate(zip(kernel, block, strict=True), 3):
        x = x.unfold(axis, size + side - 1, size)
    return x.movedim(2, 4).reshape(len(x), x.shape[1] * x.shape[3] * x.shape[4], -1)


def _bands(table: Tensor, kernel: Sequence[int]) -> Tensor:
    """View a table `(clients, channels, window, out, block)` as each weight's places, `(..., kernel, block)`."""
    clients, channels, _, _, out, *block = table.shape
    of_client, of_channel, row, column, of_out, down, right = table.stride()
    strides = of_client, of_out, of_channel, row, column, row + down, column + right
    return table.as_strided((clients, out, channels, *kernel, *block), strides)


def _take_over(new: nn.Module, old: nn.Module) -> None:
    """Give a new layer the parameters, the buffers (the same tensors, not copies) and the mode of an old one."""
    for name, parameter in old._parameters.items():
        new.register_parameter(name, parameter)
    for name, buffer in old._buffers.items():
        new.register_buffer(name, buffer, persistent=name not in old._non_persistent_buffers_set)
    new.train(old.training)


class LinearChain:
    """Linear layers, with ReLU between them, and a head of cosines, if there is one, of all clients of a stack: their
    products at once, without autograd."""

    def __init__(self, model: FlatModel, layers: Sequence[tuple[nn.Linear, bool]], head: Any) -> None:
        names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._layers = [(names[id(one.weight)], names.get(id(one.bias)), relu) for one, relu in layers]
        self._head = head
        of_head = {} if head is None else {names[id(one)]: one.detach() for one in (head.weight, head.scale)}
        self._of_head = of_head  # directions and scale, the same for all clients where they are not trained
        self._inputs: list[Tensor] = []
        self._compared: tuple[Tensor, ...] = ()

    def is_whole(self, model: FlatModel) -> bool:
        """Return whether the chain has layers, and all parameters of the model are theirs."""
        own = {name for weight, bias, _ in self._layers for name in (weight, bias)} | self._of_head.keys()
        return bool(self._layers) and own >= {*model.names}

    def outputs(self, views: Mapping[str, Tensor], x: Tensor) -> Outputs:
        """Compute features and logits, `(clients, batch, ...)`, of batches `(clients, batch, values)`."""
        self._inputs = []
        for weight, bias, relu in self._layers:
            self._inputs.append(x)
            turned = views[weight].transpose(1, 2)
            x = x @ turned if bias is None else torch.baddbmm(views[bias].unsqueeze(1), x, turned)
            x = x.relu_() if relu else x
        if self._head is None:
            return Outputs(self._inputs[-1], x)
        self._inputs.append(x)
        directions, scale = (views.get(name, fixed) for name, fixed in self._of_head.items())
        logits, self._compared = self._head.compare(x, directions, scale.reshape(-1, 1, 1))
        return Outputs(x, logits)

    def backward(
        self, views: Mapping[str, Tensor], to: Mapping[str, Tensor], features: Tensor | None, gradient: Tensor
    ) -> None:
        """Write the gradients of parameters, from those by features and logits of the last outputs."""
        if self._head is not None:
            gradient, by_scale = self._head.slopes(gradient, self._compared)
            directions, scale = map(to.get, self._of_head)
            if directions is not None:  # no gradient reaches them
                directions.zero_()
            if scale is not None:
                torch.sum(by_scale, (1, 2), out=scale)
            gradient = gradient if features is None else gradient.add_(features)
        for number in reversed(range(len(self._layers))):
            weight, bias, relu = self._layers[number]
            if relu:
                gradient = torch.ops.aten.threshold_backward(gradient, self._inputs[number + 1], 0)
            torch.bmm(gradient.transpose(1, 2), self._inputs[number], out=to[weight])
            if bias is not None:
                torch.sum(gradient, 1, out=to[bias])
            if number:
                gradient = gradient @ views[weight]
                if number == len(self._layers) - 1 and features is not None and self._head is None:
                    gradient += features
