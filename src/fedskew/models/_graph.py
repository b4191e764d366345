"""Reads the graph of a network by torch.fx, and refuses where the graph might not be the network.

A trace runs `forward` once, and takes every Python value that it meets for a constant. So a graph is refused if the run
changed such a value or a global random generator, made a tensor of its own, or switched gradients off (as `forward` of
a `torch.autograd.Function` does). What no single run can show is found by `_faster`, which compares the graph's outputs
and gradients with the network's own.
"""

from __future__ import annotations

import copy
import random
import warnings
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from fedskew.models._added import layer_hooks
from fedskew.models._dropout import Dropout, count_anew


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
    """Read the graph of a network in its present modes.

    Args:
        module: The network; it is not changed.

    Returns:
        The graph, over the network's own layers and tensors. Their names begin with `module.`.

    Raises:
        UnreadableError: It can't be read.
    """
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

    Attributes:
        counting: Names of the modules whose hook numbers the uses of dropout layers.
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
