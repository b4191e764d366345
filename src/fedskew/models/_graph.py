"""Reads the graph of a network by torch.fx, and from it a chain of known layers.

A trace runs `forward` once, and takes every Python value that it meets for a constant. So a graph is refused if the run
changed such a value or a global random generator, made a tensor of its own, or switched gradients off (as `forward` of
a `torch.autograd.Function` does). What no single run can show is found by `_faster`, which compares the chain's outputs
and gradients with the network's own.
"""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fedskew.models._added import is_plain, layer_hooks
from fedskew.models._chain import (
    Chain,
    Convolution,
    Convolutions,
    Images,
    Linear,
    Mask,
    ReLU,
    Stage,
    WideConvolution,
    WideConvolutions,
)
from fedskew.models._dropout import ChannelDropout, Dropout, count_anew
from fedskew.models._kernels import LONGEST_ROW

_POOL_FUNCTIONS = (functional.max_pool2d, torch.max_pool2d)
_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_RELUS = (functional.relu, functional.relu_, torch.relu, torch.relu_)
_SHAPES = ("flatten", "view", "reshape")
_MANY = 16
"""Channels that fill a register of PyTorch's convolutions, which then take no longer than ours."""
_SHORTEST_ROW = 8
"""Columns of a convolution's outputs below which PyTorch's own is faster."""
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
    versions, before, drawn = [tensor._version for tensor in tensors.values()], _values(root), _generators()
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
    if written or before != _values(root) or before != _values(traced):
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


def _values(root: nn.Module) -> list[Any]:
    """Return the Python values that a module and its layers hold; our dropout may count its uses."""
    return [_value(vars(layer)) for layer in root.modules() if not isinstance(layer, Dropout)]


def _value(held: Any) -> Any:
    if isinstance(held, dict):
        return [(repr(key), _value(value)) for key, value in held.items()]
    if isinstance(held, list | tuple):
        return [_value(value) for value in held]
    return held if isinstance(held, bool | int | float | complex | str | bytes | None) else type(held)


def takes_views(module: nn.Module) -> bool:
    """Return whether a network calls `view`, which needs values in the usual order; so does one that can't be read."""
    try:
        nodes = read_graph(module).graph.nodes
    except UnreadableError:
        return True
    return any(node.op == "call_method" and node.target == "view" for node in nodes)


def read_chain(module: nn.Module, shape: tuple[int, ...]) -> Chain:
    """Read the chain of layers that a network is, for samples of a shape; raise UnreadableError where it is none."""
    layers = list(_layers(read_graph(module)))
    used = [id(one) for _, layer in layers if layer is not None for one in (layer, *layer.parameters())]
    if len(used) != len(set(used)):
        raise UnreadableError("it uses a layer or a parameter twice")
    stages: list[Stage] = []
    if layers and layers[0][0] == "convolution":
        stages = _convolutions(layers, shape)
    for kind, layer in layers:
        if isinstance(layer, nn.Linear):
            stages.append(Linear(layer, first=not stages))
        elif kind == "relu":
            stages.append(ReLU())
        elif isinstance(layer, Dropout):
            stages.append(Mask(layer))
        elif kind != "flatten":
            raise UnreadableError(f"it has a {kind} that no convolution precedes")
    if not stages or not isinstance(stages[-1], Linear):
        raise UnreadableError("its logits are not the outputs of a linear layer")
    return Chain(shape, stages, [layer for layer in module.modules() if isinstance(layer, Dropout)])


def _convolutions(layers: list[tuple[str, nn.Module | None]], shape: tuple[int, ...]) -> list[Stage]:
    """Take the convolutions, and what belongs to them, off the front of the layers; return their stages."""
    if len(shape) != 3:
        raise UnreadableError("it convolves what is no image")
    found: list[tuple[nn.Conv2d, bool, bool]] = []
    masks: list[Mask] = []
    while layers and layers[0][0] == "convolution":
        if masks:
            raise UnreadableError("it has dropout between convolutions")
        layer = layers.pop(0)[1]
        assert isinstance(layer, nn.Conv2d), "`_layers` says so"
        pooled = relu = False
        while layers and layers[0][0] in ("relu", "pooling", "dropout"):
            kind, what = layers.pop(0)
            if kind == "pooling" and (pooled or any(not isinstance(mask.layer, ChannelDropout) for mask in masks)):
                raise UnreadableError("it pools twice, or after dropout")
            pooled, relu = pooled or kind == "pooling", relu or kind == "relu"
            if isinstance(what, Dropout):  # of whole channels: before or after pooling and ReLU is the same
                masks.append(Mask(what, layer.out_channels if isinstance(what, ChannelDropout) else None))
        found.append((layer, pooled, relu))
    if not layers or layers[0][0] != "flatten":
        raise UnreadableError("what follows its last convolution is not flattened")
    narrow = _narrow(found, shape)
    wide = [WideConvolution(*one, first=not at) for at, one in enumerate(found)] if narrow is None else []
    return [WideConvolutions(wide) if narrow is None else Convolutions(narrow), *masks]


def _narrow(found: list[tuple[nn.Conv2d, bool, bool]], shape: tuple[int, ...]) -> list[Convolution] | None:
    """Return convolutions for kernels of ours; None where PyTorch's are as fast, or Numba can't be imported."""
    if any(layer.in_channels >= _MANY or layer.kernel_size[1] > _WIDEST_WINDOW for layer, _, _ in found):
        return None
    try:
        import numba  # noqa: F401
    except Exception:  # where it isn't built for this Python or processor
        return None
    convolutions: list[Convolution] = []
    for layer, pooled, relu in found:
        down, across = map(int, layer.padding)
        channels, height, width = shape
        images = Images(channels, height, width, (down, across))
        one = Convolution(layer, images, pooled, relu, first=not convolutions)
        if not _SHORTEST_ROW <= one.width <= LONGEST_ROW or one.height < 2:
            return None
        convolutions.append(one)
        shape = one.out_shape
    return convolutions


def _layers(program: fx.GraphModule) -> Iterator[tuple[str, nn.Module | None]]:
    """Yield the layers that a graph calls one after another; raise UnreadableError at any other."""
    last: fx.Node | None = None
    sizes: set[fx.Node] = set()
    for node in program.graph.nodes:
        tensors = [one for one in node.all_input_nodes if one not in sizes]
        if node.op == "placeholder" and last is None:
            last = node
        elif (node.op == "call_method" and node.target == "size") or _is_shape(node) or not tensors:
            sizes.add(node)
        elif tensors != [last] or node.args[:1] not in ((last,), ((last,),)):
            raise UnreadableError("it is no chain of layers")
        else:
            last = node
            if node.op != "output" and type(_layer(program, node)) is not nn.Identity:
                yield _kind(program, node)


def _is_shape(node: fx.Node) -> bool:
    return node.target is getattr and node.args[1] == "shape"


def _kind(program: fx.GraphModule, node: fx.Node) -> tuple[str, nn.Module | None]:
    """Return what a node computes, and its layer if it has one; raise UnreadableError where a chain knows no such."""
    layer = _layer(program, node)
    if type(layer) is nn.Linear:
        return "linear", layer
    if type(layer) in (Dropout, ChannelDropout):
        return "dropout", layer
    if type(layer) is nn.Conv2d and _is_simple(layer):
        return "convolution", layer
    if type(layer) is nn.ReLU or (node.op == "call_function" and node.target in _RELUS):
        return "relu", None
    if node.op == "call_method" and node.target in ("relu", "relu_"):
        return "relu", None
    if _is_halving(layer, node):
        return "pooling", None
    if type(layer) is nn.Flatten or (node.op == "call_method" and node.target in _SHAPES):
        return "flatten", None
    if node.op == "call_function" and node.target in (torch.flatten, torch.reshape):
        return "flatten", None
    raise UnreadableError(f"{type(layer).__name__ if layer is not None else node.name} is no layer of a chain")


def _layer(program: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """Return the layer that a node calls; None where it calls none; raise UnreadableError for one that has hooks."""
    if node.op != "call_module":
        return None
    layer = program.get_submodule(str(node.target))
    if not is_plain(layer):
        raise UnreadableError(f"{str(node.target).removeprefix('module.')!r} has hooks")
    return layer


def _is_simple(layer: nn.Conv2d) -> bool:
    """Return whether a convolution moves by one, over all channels, and is padded by zeros, fewer than its kernel."""
    return (
        layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and all(padded < kernel for padded, kernel in zip(layer.padding, layer.kernel_size, strict=True))
    )


def _is_halving(layer: nn.Module | None, node: fx.Node) -> bool:
    """Return whether a node takes the largest of each 2 x 2 values, and leaves out an odd last row or column."""
    options: dict[str, Any] = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    if type(layer) is nn.MaxPool2d:
        options = {name: getattr(layer, name) for name in _OPTIONS}
    elif node.op == "call_function" and node.target in _POOL_FUNCTIONS:
        options |= dict(zip(_OPTIONS, node.args[1:], strict=False)) | node.kwargs
    else:
        return False
    wanted = {
        "kernel_size": (2, (2, 2)), "stride": (None, (), 2, (2, 2)), "padding": (0, (0, 0)), "dilation": (1, (1, 1)),
    }  # fmt: skip
    plain = all(
        (tuple(options[name]) if isinstance(options[name], list) else options[name]) in values
        for name, values in wanted.items()
    )
    return plain and options["ceil_mode"] is False and options["return_indices"] is False
