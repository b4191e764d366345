"""A model as one flat vector: an update is a row of a matrix, and a local step maps a vector to a vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedskew.errors import ArgumentError
from fedskew.models._added import check_added, parameter_hooks
from fedskew.models._chain import MANY_WEIGHTS
from fedskew.models._faster import Faster
from fedskew.models._network import Outputs
from fedskew.models._winograd import has_kernels
from fedskew.models.frozen import constant_buffers, frozen_buffers

_MANY_NUMBERS = 2**18


@dataclass(frozen=True)
class _Slice:
    """The part of a flat vector that holds one named tensor."""

    name: str
    shape: torch.Size
    start: int
    channels_last: bool

    def of(self, vector: Tensor) -> Tensor:
        """Return the named tensor as a view of `vector`, or of a stack of them, `(clients, parameters)`."""
        return self.shaped(vector.narrow(-1, self.start, self.shape.numel()))

    def shaped(self, part: Tensor) -> Tensor:
        """View the tensor's numbers, of a vector or a stack, in its shape."""
        if self.channels_last:
            outs, ins, height, width = self.shape
            return part.view(*part.shape[:-1], outs, height, width, ins).movedim(-1, -3)
        return part.view(part.shape[:-1] + self.shape)


@dataclass(frozen=True)
class Layout:
    """Where the named parameters of a network stand in its vector."""

    parts: tuple[_Slice, ...]

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The part of the vector of each parameter, by its name."""
        return {part.name: slice(part.start, part.start + part.shape.numel()) for part in self.parts}

    @cached_property
    def layers(self) -> dict[str, slice]:
        """The part of each layer, which has the parameters of one module, by the module's name."""
        layers: dict[str, slice] = {}
        for name, part in self.slices.items():
            layer = name.rpartition(".")[0]
            layers[layer] = slice(layers.get(layer, part).start, part.stop)
        return layers

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a vector, `(parameters,)`, or a stack of them, into views of the parameters' shapes by name."""
        split = vector.split([part.shape.numel() for part in self.parts], -1)
        return {part.name: part.shaped(own) for part, own in zip(self.parts, split, strict=True)}


class _Place(NamedTuple):
    """Where a named tensor is registered: the layer's dictionary and the key in it."""

    name: str
    tensors: dict[str, Any]
    key: str

    def addresses(self) -> tuple[int, int]:
        """Return the memory addresses of the tensor's values and of its gradient; 0 if there are none."""
        tensor = self.tensors[self.key]
        gradient = tensor.grad if tensor is not None and tensor.requires_grad else None
        return (0 if tensor is None else tensor.data_ptr(), 0 if gradient is None else gradient.data_ptr())


class ModelState(NamedTuple):
    """The state of a model as vectors: parameters and floating-point buffers, float32, and integer buffers, int64."""

    parameters: Tensor
    buffers: Tensor
    integers: Tensor


class FlatModel:
    """A model whose trainable parameters are views of one vector.

    Frozen parameters, the buffers of frozen layers (see `frozen`), and buffers outside the state dict, are not changed
    and no part of the model's state. With `channels_last`, the values of
    convolution weights are not in the order of `parameters_to_vector`; `views` and `state_dict` have the usual names
    and shapes with either layout. On CPUs a step of MobileNetV2 takes two thirds of the time then; but a network can't
    `view` what comes out of such a convolution.

    From now on the module must be updated in place. Replacing its tensors (`.to()`, `.zero_grad()`, assigning a buffer)
    detaches it from the vector; `read`, `write_buffers` and `state_dict` then raise ArgumentError.

    Args:
        module: The network.
        channels_last: Whether convolution weights are stored with channels innermost. None: unless the network calls
            `view`, or its graph can't be read.
        constant: Names of further buffers that training does not change (see `of`).

    Attributes:
        network: `module`, computed without autograd where it is a chain of known layers.
        vector: The parameters, `(parameters,)`, float32.
        gradient: Likewise; each `.grad` is a view of it, to which `loss.backward()` adds; `descend` skips large layers.
        layout: Where the parameters stand in the vector.
        names: The parameters' names, in the order of the vector. A tied parameter counts once.
        buffers: The floating-point buffers of the state dict, `(buffers,)`, float32, of which the module's are views.
        channels_last: Whether convolution weights are stored so.
        integer_buffers: The state dict's other buffers, by name.
        buffer_names: The names of both, without those that training does not change.
        entire: The network with its frozen body, as it is saved; mostly `module`.

    Raises:
        ArgumentError: There is no trainable parameter; or a trainable parameter or floating-point buffer is not
            float32, has no values yet, or is on another device than the rest; or a parameter has a hook for accumulated
            gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        channels_last: bool | None = None,
        constant: Collection[str] = (),
        entire: nn.Module | None = None,
    ) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ArgumentError("module: has no trainable parameter")
        state = set(module.state_dict(keep_vars=True)) - frozen_buffers(module) - set(constant)
        held = {name: b for name, b in module.named_buffers() if name in state}
        floating = {name: b for name, b in held.items() if b.is_floating_point() or b.is_complex()}
        _check({**parameters, **floating})
        check_added(module)
        self.module, self.entire = module, entire or module
        self.network = Faster(module)
        if channels_last is None:
            convolves = any(parameter.dim() == 4 for parameter in parameters.values())
            channels_last = convolves and not self.network.takes_views()
        self.channels_last, self.constant = channels_last, constant
        self._options: dict[str, Any] = {"channels_last": channels_last, "constant": constant}
        self.integer_buffers = {name: b for name, b in held.items() if name not in floating}
        self.buffer_names = tuple(held)
        self.layout = Layout(tuple(_lay_out(parameters, channels_last)))
        self.names = tuple(parameters)
        device = next(iter(parameters.values())).device
        self.vector = _gather(parameters, self.layout.parts, device)
        self.gradient = torch.zeros_like(self.vector)
        self._buffer_slices = _lay_out(floating, False)
        self.buffers = _gather(floating, self._buffer_slices, device)
        self._parameters = list(parameters.values())
        self._gradients = [part.of(self.gradient) for part in self.layout.parts]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._places = [_place(module, name) for name in (*parameters, *floating)]
        self._addresses = [place.addresses() for place in self._places]

    @classmethod
    def of(cls, module: nn.Module, samples: Tensor, entire: nn.Module | None = None) -> FlatModel:
        """Make a model whose state is without the buffers that a pass of some samples in training does not write to."""
        return cls(module, constant=constant_buffers(module, samples), entire=entire)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the module, the options of the layout, and the hooks of parameters, which PyTorch leaves out."""
        return partial(FlatModel, **self._options), (self.module,), [parameter_hooks(own) for own in self._parameters]

    def __setstate__(self, hooks: list[list[Any]]) -> None:
        """Register the hooks of the parameters."""
        for parameter, own in zip(self._parameters, hooks, strict=True):
            for hook in own:
                parameter.register_hook(hook)

    def copy(self, device: torch.device | None = None) -> FlatModel:
        """Return a model of a copy of the network, with the same layout; None: on the same device."""
        return FlatModel(copy.deepcopy(self.module).to(device), **self._options)

    def read(self) -> Tensor:
        """Return a copy of `vector`; raise ArgumentError if the module is detached from it."""
        self._check_views()
        return self.vector.clone()

    def write(self, vector: Tensor) -> None:
        """Set the parameters, in place, to a vector; nothing is copied if it is the model's own."""
        _check_shape("vector", vector, self.vector)
        if vector.data_ptr() != self.vector.data_ptr():
            with torch.no_grad():
                self.vector.copy_(vector)

    @torch.no_grad()
    def write_buffers(self, buffers: Tensor) -> None:
        """Set the floating-point buffers, in place; nothing is copied if they are the model's own."""
        self._check_views()
        _check_shape("buffers", buffers, self.buffers)
        if buffers.data_ptr() != self.buffers.data_ptr():
            self.buffers.copy_(buffers)

    def read_state(self, copied: bool = True) -> ModelState:
        """Return the model's state; without `copied`, its parameters are `vector` itself."""
        self._check_views()
        counters = [buffer.reshape(-1).to(torch.int64) for buffer in self.integer_buffers.values()]
        integers = torch.cat([self.vector.new_zeros(0, dtype=torch.int64), *counters])
        return ModelState(self.vector.clone() if copied else self.vector, self.buffers.clone(), integers)

    @torch.no_grad()
    def write_state(self, state: ModelState) -> None:
        """Set the state, in place, to that of a model with the same layout."""
        self.write(state.parameters)
        self.write_buffers(state.buffers)
        start = 0
        for buffer in self.integer_buffers.values():
            buffer.copy_(state.integers[start : start + buffer.numel()].view(buffer.shape))
            start += buffer.numel()

    def outputs(self, x: Tensor) -> Outputs:
        """Return features and logits of a batch, computed as fast as the network can be."""
        return self.network.outputs(x)

    def differentiate(
        self,
        x: Tensor,
        loss: Callable[[Outputs], Tensor],
        slope: Callable[[Outputs], tuple[Tensor, Tensor | None, Tensor | None]] | None = None,
    ) -> tuple[Tensor, Outputs]:
        """Set `gradient` to that of a loss, 0-d, of the network's outputs for a batch; return the loss and the outputs.

        Where the network is a chain, autograd sees the loss alone, on features and logits as leaves. If there is one,
        `slope` gives the loss and its gradients by the logits and by the features; None: it is 0.
        """
        chain = self.network.chain(x)
        if chain is None:
            outputs = self.network.outputs(x)
            detached = Outputs(*(tensor.detach() for tensor in outputs))
            if slope is None:
                value = loss(outputs)
                gradients = torch.autograd.grad(value, self._parameters, allow_unused=True)
            else:
                value, by_logits, by_features = slope(detached)
                known = [(outputs.logits, by_logits), (outputs.features, by_features)]
                known = [pair for pair in known if pair[1] is not None and pair[0].requires_grad]
                of, by = zip(*known, strict=True)
                gradients = torch.autograd.grad(of, self._parameters, by, allow_unused=True)
            for held, gradient in zip(self._gradients, gradients, strict=True):
                held.zero_() if gradient is None else held.copy_(gradient)
            return value.detach(), detached
        with torch.no_grad():
            outputs = chain.outputs(x)
            if slope is not None:
                value, by_logits, by_features = slope(outputs)
            else:
                with torch.enable_grad():
                    leaves = Outputs(*(tensor.detach().requires_grad_() for tensor in outputs))
                    value = loss(Outputs(*(leaf.clone() for leaf in leaves)))  # which it may overwrite
                    by_features, by_logits = torch.autograd.grad(value, leaves, allow_unused=True)
            if chain.trained < len(self._parameters):  # its other parameters have a gradient of 0
                self.gradient.zero_()
            chain.backward(by_features, by_logits, outputs)
        return value.detach(), outputs

    @torch.no_grad()
    def descend(self, rate: float, x: Tensor, *of: Any) -> tuple[Tensor, Outputs] | None:
        """Move the parameters by `rate` against the gradient that `differentiate` sets; return what that returns. None
        where this is not faster: large layers of a chain spare a pass over as many gradients."""
        chain = None if self.vector.numel() < MANY_WEIGHTS else self.network.chain(x)
        if chain is None or not chain.large:
            return None
        moved = {id(stage.layer.weight) for stage in chain.large}
        try:
            for stage in chain.large:
                stage.rate = rate
            found = self.differentiate(x, *of)
        finally:
            for stage in chain.large:
                stage.rate = None
        for own, gradient in zip(self._parameters, self._gradients, strict=True):
            if id(own) not in moved:
                own.add_(gradient, alpha=-rate)
        return found

    @staticmethod
    def add_rows(total: Tensor, rows: Tensor, weights: NDArray[np.float64]) -> bool:
        """Add rows, each times its weight, to a vector of float64, one after another; return whether there is a kernel
        that does so faster than PyTorch's operations, with their bits."""
        fits = (total.shape, total.dtype, rows.dtype) == (rows.shape[1:], torch.float64, torch.float32)
        if not fits or not rows.is_cpu or rows.shape[1] < _MANY_NUMBERS or not has_kernels():
            return False
        from fedskew.models import _kernels

        _kernels.add_rows(total.numpy(), rows.detach().numpy(), weights.astype(np.float64))
        return True

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a vector of parameters, or a stack, into views by name, as `torch.func.functional_call` takes them."""
        return self.layout.views(vector)

    def buffer_views(self, buffers: Tensor, integers: Tensor) -> dict[str, Tensor]:
        """Split vectors of buffers into views by buffer name, as `torch.func.functional_call` takes them."""
        whole = _lay_out(self.integer_buffers, False)
        return {part.name: part.of(buffers) for part in self._buffer_slices} | {
            part.name: part.of(integers) for part in whole
        }

    def frozen(self) -> dict[str, Tensor]:
        """Return what of the state dict training does not change, by name."""
        trained = {*self.names, *self.buffer_names}
        tied = {id(one) for name, one in self.entire.named_parameters() if name in trained}
        whole = self.entire.state_dict(keep_vars=True)
        return {name: one.detach() for name, one in whole.items() if name not in trained and id(one) not in tied}

    def state_dict(self) -> dict[str, Tensor]:
        """Return a contiguous copy of the module's state dict, with frozen parameters and integer buffers."""
        self._check_views()
        return {
            name: value.detach().clone(memory_format=torch.contiguous_format)
            for name, value in self.entire.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set all tensors of the state dict, in place; raise ArgumentError where names or shapes differ."""
        try:
            self.entire.load_state_dict(state)
        except RuntimeError as error:
            raise ArgumentError(f"state: does not fit this model: {' '.join(str(error).split())}") from None

    def _check_views(self) -> None:
        for place, addresses in zip(self._places, self._addresses, strict=True):
            if place.addresses() != addresses:
                raise ArgumentError(
                    f"module: {place.name!r} or its .grad was replaced by another tensor; a model must be updated in "
                    "place, as by self.buffer.copy_(value) instead of self.buffer = value"
                )


def _check(tensors: Mapping[str, Tensor]) -> None:
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if is_lazy(tensor) or tensor.is_meta:
            raise ArgumentError(f"module: {name!r} has no values yet; run the model once on a batch of your data first")
        if tensor.dtype != torch.float32:
            raise ArgumentError(f"module: {name!r} is {str(tensor.dtype).removeprefix('torch.')}, not float32")
        if tensor.device != device:
            raise ArgumentError(f"module: {name!r} is on {tensor.device}, other parameters are on {device}")


def _lay_out(tensors: Mapping[str, Tensor], channels_last: bool) -> list[_Slice]:
    slices, start = [], 0
    for name, tensor in tensors.items():
        slices.append(_Slice(name, tensor.shape, start, channels_last and tensor.dim() == 4))
        start += tensor.numel()
    return slices


@torch.no_grad()
def _gather(tensors: Mapping[str, Tensor], slices: Sequence[_Slice], device: torch.device) -> Tensor:
    """Move tensors into one new vector, and make the tensors views of it."""
    vector = torch.empty(sum(tensor.numel() for tensor in tensors.values()), device=device)
    for part in slices:
        view = part.of(vector)
        view.copy_(tensors[part.name])
        tensors[part.name].data = view
    return vector


def _place(module: nn.Module, name: str) -> _Place:
    path, _, key = name.rpartition(".")
    layer = module.get_submodule(path)
    tensors: dict[str, Any] = layer._parameters if key in layer._parameters else layer._buffers
    return _Place(name, tensors, key)


def _check_shape(argument: str, given: Tensor, expected: Tensor) -> None:
    if given.shape != expected.shape:
        raise ArgumentError(f"{argument}: expected shape {tuple(expected.shape)}, got {tuple(given.shape)}")
