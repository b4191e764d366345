"""Reads the graph of a network by torch.fx, and from it a chain of known layers.

A trace runs `forward` once, and takes every Python value that it meets for a constant. So a graph is refused if the run
changed such a value or a global random generator, made a tensor of its own, or switched gradients off (as `forward` of
a `torch.autograd.Function` does). What no single run can show is found by `_faster`, which compares the chain's outputs
and gradients with the network's own.
"""

import copy
import random
import threading
import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.utils import _pair

from fedskew.models._added import is_plain, layer_hooks
from fedskew.models._chain import (
    HEADS,
    STAGES,
    WITHOUT_PARAMETERS,
    Chain,
    Convolution,
    Flatten,
    Mask,
    MaxPooling,
    ReLU,
    Stage,
)
from fedskew.models._dropout import ChannelDropout, Dropout, count_anew
from fedskew.models._winograd import has_kernels

_FUNCTIONS: dict[Any, type[nn.Module]] = {
    **dict.fromkeys((functional.relu, functional.relu_, torch.relu, torch.relu_, "relu", "relu_"), nn.ReLU),
    **dict.fromkeys((functional.max_pool2d, torch.max_pool2d), nn.MaxPool2d),
    functional.avg_pool2d: nn.AvgPool2d,
    functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    **dict.fromkeys((torch.flatten, torch.reshape, "flatten", "view", "reshape"), nn.Flatten),
}
"""What layers functions, and methods of tensors, are."""
_OF_IMAGES = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.BatchNorm2d, ChannelDropout)
_MANY = 16
"""Channels that fill a register of PyTorch's convolutions, which then take no longer than ours."""
_WIDEST_WINDOW = 11
"""Columns of a convolution's window, at most: each is written out, and 31 take ten seconds to compile."""
_ONE_AT_A_TIME = threading.RLock()
"""A trace changes what the calls of all modules do, in all threads."""


class UnreadableError(Exception):
    """The graph of a network can't be read; the message says why."""


class _Root(nn.Module):
    """Calls a network with one argument; its others keep their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


def read_graph(module: nn.Module) -> fx.GraphModule:
    """Read the graph of a network in its present modes, over its own layers and tensors, named `module.` and so on."""
    root = _Root(module)
    tensors = {id(tensor): tensor for tensor in chain(root.parameters(), root.buffers())}
    versions, before, drawn = [tensor._version for tensor in tensors.values()], values_of(root), _generators()
    reader = _Reader()
    try:
        # The copy has the same tensors; what a trace changes in Python changes the copy only.
        traced = copy.deepcopy(root, dict(tensors))
        with _ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = reader.trace(traced)
    except UnreadableError:
        raise
    except Exception as error:  # what user code raises where it is given no tensor
        raise UnreadableError(" ".join(str(error).split()) or type(error).__name__) from error
    named = {name for name, _ in chain(root.named_parameters(remove_duplicate=False), root.named_buffers())}
    if any(node.op == "get_attr" and node.target not in named for node in graph.nodes):
        raise UnreadableError("it makes tensors that depend on no input")
    if drawn != _generators():
        raise UnreadableError("it draws from a global random generator")
    written = versions != [tensor._version for tensor in tensors.values()]
    if written or before != values_of(root) or before != values_of(traced):
        raise UnreadableError("it changes its own attributes")
    return fx.GraphModule(root, graph)


class _Reader(fx.Tracer):
    """A tracer that takes buffers for tensors of the graph, and our dropout for a layer."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self._modes, self._thread = _modes(), threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Hooks read the inputs of linear layers, also of a user's own class (`with_features`).
        return isinstance(m, Dropout | nn.Linear) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if not self.is_leaf_module(m, name):
            hooks = layer_hooks(m)
            if hooks not in ([], [count_anew]):
                raise UnreadableError(f"{name.removeprefix('module.')!r} has hooks")
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise UnreadableError("it switches gradients or precision inside")
        return super().create_node(*args, **kwargs)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def _generators() -> tuple[Any, ...]:
    """Return the states of the global generators, which nothing here draws from."""
    kind, keys, *more = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, np.asarray(keys).tobytes(), more, torch.get_rng_state().numpy().tobytes()


def values_of(root: nn.Module) -> list[Any]:
    """Return the Python values that a module and its layers hold; our dropout may count its uses."""
    return [_value(vars(layer)) for layer in root.modules() if not isinstance(layer, Dropout)]


def _value(held: Any) -> Any:
    if isinstance(held, dict):
        return [(repr(key), _value(value)) for key, value in held.items()]
    if isinstance(held, list | tuple):
        return [_value(value) for value in held]
    return held if isinstance(held, bool | int | float | complex | str | bytes | None) else type(held)


def layers_of(program: fx.GraphModule) -> list[nn.Module]:
    """Return the layers that a graph calls one after another; raise UnreadableError where it does anything else."""
    layers: list[nn.Module] = []
    last: fx.Node | None = None
    sizes: set[fx.Node] = set()
    for node in program.graph.nodes:
        tensors = [one for one in node.all_input_nodes if one not in sizes]
        if node.op == "placeholder" and last is None:
            last = node
        elif (node.op, node.target) == ("call_method", "size") or node.args[1:] == ("shape",) or not tensors:
            sizes.add(node)
        elif tensors != [last] or node.args[:1] not in ((last,), ((last,),)):
            raise UnreadableError("it is no chain of layers")
        else:
            last = node
            if node.op != "output":
                layers.append(_layer(program, node))
    used = [id(own) for layer in layers for own in layer.parameters()]
    if len(used) != len(set(used)):
        raise UnreadableError("it uses a layer or a parameter twice")
    return [layer for layer in layers if type(layer) is not nn.Identity]


def _layer(program: fx.GraphModule, node: fx.Node) -> nn.Module:
    """Return the layer that a node calls, or what its function is; raise UnreadableError where there is none."""
    if node.op == "call_module":
        layer = program.get_submodule(str(node.target))
        if not is_plain(layer):
            raise UnreadableError(f"{str(node.target).removeprefix('module.')!r} has hooks")
        return layer
    kind = _FUNCTIONS.get(node.target)
    if kind is nn.Flatten:  # whatever the shape: another is found by comparing
        return nn.Flatten()
    if kind is None or len(node.all_input_nodes) > 1:
        raise UnreadableError(f"{node.name} is no layer of a chain")
    return kind(*node.args[1:], **node.kwargs)


def chain_of(layers: Sequence[nn.Module], shape: tuple[int, ...]) -> Chain:
    """Make the chain that layers are, for samples of a shape; raise UnreadableError where they are none."""
    stages, taken = _narrow(layers, shape)
    for layer in layers[taken:]:
        if isinstance(layer, _OF_IMAGES) and any(type(one) is Flatten for one in stages):
            raise UnreadableError(f"{type(layer).__name__} follows what is no image")
        kind = STAGES.get(type(layer))
        if kind is None or _is_unusual(layer):
            raise UnreadableError(f"{type(layer).__name__} is no layer of a chain")
        stage = kind(layer, all(isinstance(one, WITHOUT_PARAMETERS) for one in stages))
        relu = [stages.pop()] if kind is MaxPooling and stages and type(stages[-1]) is ReLU else []
        last = stages[-1] if stages else None
        pools = isinstance(layer, nn.MaxPool2d) and _is_halving(layer)
        if pools and isinstance(last, Convolution) and last.pool is None:
            last.pool = stage
        else:
            stages.append(stage)
        stages += relu  # behind pooling, which leaves it fewer values
    if not stages or not isinstance(stages[-1], HEADS):
        raise UnreadableError("its logits are not the outputs of a linear layer")
    return Chain(stages, layers)


def _is_unusual(layer: nn.Module) -> bool:
    """Return whether a layer has options that no stage knows."""
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return layer.momentum is None or layer.track_running_stats != (layer.running_mean is not None)
    return isinstance(layer, nn.MaxPool2d) and layer.return_indices


def _narrow(layers: Sequence[nn.Module], shape: tuple[int, ...]) -> tuple[list[Stage], int]:
    """Return what kernels of ours compute of a chain's first layers, and how many these are; 0: PyTorch is as fast."""
    found: list[tuple[nn.Conv2d, bool, bool]] = []
    masks: list[Stage] = []
    whole = True  # dropout of whole channels alone: before or after pooling and ReLU is the same
    taken = next((at for at, layer in enumerate(layers) if isinstance(layer, nn.Flatten)), 0)
    for layer in layers[:taken]:
        conv, pooled, relu = found[-1] if found else (None, False, False)
        if type(layer) is nn.Conv2d and not masks and _is_narrow(layer):
            found.append((layer, False, False))
        elif conv is None:
            return [], 0
        elif type(layer) is nn.ReLU:
            found[-1] = conv, pooled, True
        elif type(layer) is nn.MaxPool2d and _is_halving(layer) and whole and not pooled:
            found[-1] = conv, True, relu
        elif isinstance(layer, Dropout):
            whole = whole and isinstance(layer, ChannelDropout)
            masks.append(Mask(layer, first=False))
        else:
            return [], 0
    if not found or len(shape) != 3 or not has_kernels():
        return [], 0
    from fedskew.models._convolutions import narrow_convolutions

    stage = narrow_convolutions(found, shape)
    return ([], 0) if stage is None else ([stage, *masks], taken)


def _is_narrow(layer: nn.Conv2d) -> bool:
    """Return whether a convolution has few channels, moves by one, and is padded by zeros, fewer than its kernel."""
    return (
        layer.in_channels < _MANY
        and layer.kernel_size[1] <= _WIDEST_WINDOW
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and not _is_unusual(layer)
        and all(padded < kernel for padded, kernel in zip(map(int, layer.padding), layer.kernel_size, strict=True))
    )


def _is_halving(layer: nn.MaxPool2d) -> bool:
    """Return whether a layer takes the largest of each 2 x 2 values, and leaves out an odd last row or column."""
    options = [_pair(one) for one in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)]
    return options == [(2, 2), (2, 2), (0, 0), (1, 1)] and not layer.ceil_mode and not layer.return_indices
