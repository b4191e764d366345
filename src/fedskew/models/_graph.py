"""Reads the graph of a network by torch.fx, refuses it where it might not be the network, and makes it faster.

A trace runs `forward` once, and takes every Python value that it meets for a constant. So a graph is refused if the run
changed such a value or a global random generator, made a tensor of its own, or switched gradients off (as `forward` of
a `torch.autograd.Function` does). What no single run can show is found by `_faster`, which compares the graph's outputs
and gradients with the network's own.

Two rules change the graph into a faster one of the same function; a value that anything else reads or writes is left as
it is:

- **ReLU after max-pooling.** Instead of the reverse order: a quarter of the values. Output and gradient have the same
  bits, since ReLU keeps order, and where it makes ties, at 0, it passes no gradient.
- **Convolution, 2 x 2 max-pooling and ReLU as one operation**, `conv_pool`: the same function and choice between ties,
  rounded differently where a layer has few channels and a batch many samples; else the same bits.
"""

from __future__ import annotations

import copy
import operator
import random
import warnings
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fedskew.models._added import is_plain, layer_hooks
from fedskew.models._dropout import Dropout, count_anew
from fedskew.models.conv_pool import ConvPoolReLU, is_poolable

_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_POOL_FUNCTIONS = (
    functional.max_pool1d, functional.max_pool2d, functional.max_pool3d,
    torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
)  # fmt: skip
_OPTIONS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_RELUS = (functional.relu, functional.relu_, torch.relu, torch.relu_)
_FRESH = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm,
)  # fmt: skip
"""Layers whose output is a tensor of its own, and no view of another's memory."""


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
        with warnings.catch_warnings():
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
    program = fx.GraphModule(root, graph)
    for name in reader.counting:
        program.register_forward_pre_hook(_CountAnew(root.get_submodule(name)))
    return program


class _Reader(fx.Tracer):
    """A tracer that takes buffers for tensors of the graph, and our dropout for a layer.

    `counting` names the modules whose hook numbers the uses of dropout layers.
    """

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.counting: list[str] = []
        self._modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Hooks read the inputs of linear layers, also of a user's own class (`with_features`).
        return isinstance(m, Dropout | nn.Linear) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self.path_of_module(m)
        if not self.is_leaf_module(m, name):
            hooks = layer_hooks(m)
            if hooks == [count_anew] and name not in self.counting:
                self.counting.append(name)
            elif hooks:
                raise UnreadableError(f"{name.removeprefix('module.')!r} has hooks")
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise UnreadableError("it switches gradients or precision inside")
        return super().create_node(*args, **kwargs)


class _CountAnew:
    """A hook that numbers the uses of a module's dropout layers anew."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, program: nn.Module, inputs: tuple[Any, ...]) -> None:
        count_anew(self._module, inputs)


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


def rewrite(program: fx.GraphModule) -> dict[str, int]:
    """Apply all rules to a graph, in place; return how often each was applied, without those that were not."""
    done = {"relu_after_pooling": _pool_first(program), "convolution_with_pooling": _join_convolutions(program)}
    program.recompile()
    return {rule: times for rule, times in done.items() if times}


def _pool_first(program: fx.GraphModule) -> int:
    """Exchange each ReLU and the max-pooling that alone reads it."""
    times = 0
    for pool in list(program.graph.nodes):
        relu = _only_input(pool)
        if relu is None or _pooling(program, pool) is None or not _is_relu(program, relu):
            continue
        before = _only_input(relu)
        if before is None or not _is_fresh(program, before):
            continue
        pool.replace_input_with(relu, before)
        with program.graph.inserting_after(pool):
            after = program.graph.call_function(functional.relu)
        pool.replace_all_uses_with(after)
        after.args = (pool,)
        program.graph.erase_node(relu)
        times += 1
    return times


def _join_convolutions(program: fx.GraphModule) -> int:
    """Replace each convolution, the 2 x 2 max-pooling that alone reads it, and the ReLU that alone reads that."""
    times = 0
    for relu in list(program.graph.nodes):
        pool = _only_input(relu)
        if pool is None or not _is_relu(program, relu) or not _is_halving(_pooling(program, pool)):
            continue
        convolution = _only_input(pool)
        layer = None if convolution is None else _layer(program, convolution)
        if convolution is None or type(layer) is not nn.Conv2d or not is_poolable(layer):
            continue
        name = f"joined_{times}"
        program.add_submodule(name, ConvPoolReLU(layer))
        with program.graph.inserting_before(convolution):  # where the convolution read its input
            joined = program.graph.call_module(name, convolution.args, convolution.kwargs)
        relu.replace_all_uses_with(joined)
        for node in (relu, pool, convolution):
            program.graph.erase_node(node)
        times += 1
    return times


def _only_input(node: fx.Node) -> fx.Node | None:
    """Return the first argument of a node, if that is another node which nothing else reads."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) and list(first.users) == [node] else None


def _layer(program: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """Return the layer that a node calls; None where it calls none, or one that has hooks."""
    if node.op != "call_module":
        return None
    layer = program.get_submodule(str(node.target))
    return layer if is_plain(layer) else None


def _pooling(program: fx.GraphModule, node: fx.Node) -> dict[str, Any] | None:
    """Return the options of a max-pooling node; None if the node is something else, or also returns indices."""
    options: dict[str, Any] = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    layer = _layer(program, node)
    if type(layer) in _POOLS:
        options = {name: getattr(layer, name) for name in _OPTIONS}
    elif node.op == "call_function" and node.target in _POOL_FUNCTIONS:
        options |= dict(zip(_OPTIONS, node.args[1:], strict=False)) | node.kwargs
    else:
        return None
    return None if options["return_indices"] is not False else options


def _is_halving(options: dict[str, Any] | None) -> bool:
    """Return whether a pooling takes the largest of each 2 x 2 values, and leaves out an odd last row or column."""
    if options is None:
        return False
    wanted = {
        "kernel_size": (2, (2, 2)), "stride": (None, (), 2, (2, 2)), "padding": (0, (0, 0)), "dilation": (1, (1, 1)),
    }  # fmt: skip
    plain = all(_as_tuple(options[name]) in values for name, values in wanted.items())
    return plain and options["ceil_mode"] is False


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_relu(program: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    if node.op == "call_function":
        return node.target in _RELUS
    return type(_layer(program, node)) is nn.ReLU


def _is_fresh(program: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node's value is a tensor whose memory nothing else can read or write."""
    return type(_layer(program, node)) in _FRESH or (node.op == "call_function" and node.target is operator.add)
