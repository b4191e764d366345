"""Cuts a network in two: a frozen body, whose outputs never change, and the rest, which trains on them.

The cut is the last value in the network's graph (`_graph`) that is computed from the input by frozen layers alone, the
same in every pass, and that all later values depend on the input by.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from fedskew.models._dropout import Dropout, count_anew
from fedskew.models._faster import Faster
from fedskew.models._graph import UnreadableError, read_graph
from fedskew.models.frozen import hold_still

_INSIDE = "module."  # begins names in a graph that is read
_MOVING = Dropout, nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm
"""Layers whose outputs differ from pass to pass in training mode."""


def cut(module: nn.Module, samples: Tensor) -> tuple[nn.Module, nn.Module]:
    """Cut a network into its frozen body and the rest; each has the network's own layers, under their names.

    Args:
        module: The network; it is in training mode afterwards.
        samples: A few inputs, `(batch, *in_shape)`, on which both parts together must compute what the network does.

    Raises:
        UnreadableError: There is no such body.
    """
    if all(parameter.requires_grad for parameter in module.parameters()):
        raise UnreadableError("no layer is frozen")
    program = read_graph(hold_still(module.train()))
    nodes: list[fx.Node] = list(program.graph.nodes)
    source, fixed = nodes[0], {nodes[0]}
    for node in nodes[1:-1]:
        if fixed.issuperset(node.all_input_nodes) and _is_fixed(program, node):
            fixed.add(node)
    between = [node for node in nodes[1:-1] if node in fixed and _separates(node, source)]
    if not between:
        raise UnreadableError("no frozen layer comes before all that train")
    last = between[-1]
    body, rest = _Part(module, _needed(last, source)), _Part(module, _needed(nodes[-1], last))
    if not any(True for _ in body.parameters()):
        raise UnreadableError("no frozen layer comes before all that train")
    if _trained(module) != _trained(rest):
        raise UnreadableError("what trains is not used, or in another order than it was made")
    with torch.no_grad():
        features, expected = body.eval()(samples), module.eval()(samples)
        if features.shape[:1] != samples.shape[:1] or not torch.equal(expected, rest.eval()(features)):
            raise UnreadableError("its two parts compute something else")
    hold_still(module.train())
    return body, rest


def quickened(body: nn.Module) -> nn.Module:
    """Return a body with the channels of its convolutions innermost, where it can be: half the time on CPUs."""
    if not Faster(body).takes_views():
        body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # which PyTorch's types leave out
    return body.eval()


def _trained(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _is_fixed(program: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node gives the same in every pass: nothing of it trains, draws or adapts."""
    if node.op == "call_module":
        layer = program.get_submodule(str(node.target))
        moves = any(isinstance(one, _MOVING) and one.training and getattr(one, "p", 1) for one in layer.modules())
        return not moves and not any(parameter.requires_grad for parameter in layer.parameters())
    if node.op == "get_attr":
        path, _, key = str(node.target).rpartition(".")
        value = getattr(program.get_submodule(path), key)
        return isinstance(value, nn.Parameter) and not value.requires_grad
    return True


def _separates(node: fx.Node, source: fx.Node) -> bool:
    """Return whether all that follows a node depends on the source by it alone."""
    output = next(reversed(node.graph.nodes))
    return source in _needed(node, source) and source not in _needed(output, node)


def _needed(result: fx.Node, source: fx.Node) -> list[fx.Node]:
    """Return what a node is computed from, and itself, in the graph's order; nothing that comes before the source."""
    found, waiting = {result}, [result]
    while waiting:
        node = waiting.pop()
        more = set() if node is source else set(node.all_input_nodes) - found
        found |= more
        waiting += more
    return [node for node in result.graph.nodes if node in found]


@dataclass(frozen=True)
class _Value:
    """Stands for what a node of the graph gave."""

    name: str


class _Part(nn.Module):
    """Computes some nodes of a network's graph, the first of which is its input, by the network's own layers."""

    def __init__(self, module: nn.Module, nodes: Sequence[fx.Node]) -> None:
        super().__init__()
        self._input = nodes[0].name
        self._steps: list[tuple[str, str, Any, Any, Any]] = []
        for node in nodes[1:]:
            target: Any = node.target
            if node.op in ("call_module", "get_attr"):
                target = str(target).removeprefix(_INSIDE)
                self._hold(module, target)
            given = tree_map_only(fx.Node, lambda own: _Value(own.name), (list(node.args), dict(node.kwargs)))
            self._steps.append((node.name, node.op, target, *given))
        if count_anew in module._forward_pre_hooks.values():
            self.register_forward_pre_hook(count_anew)

    def _hold(self, module: nn.Module, name: str) -> None:
        """Register a layer or tensor of a network under its name."""
        *path, key = name.split(".")
        own: nn.Module = self
        for part in path:
            if part not in own._modules:
                own.add_module(part, nn.Module())
            own, module = getattr(own, part), getattr(module, part)
        setattr(own, key, getattr(module, key))

    def forward(self, x: Tensor) -> Any:
        values = {self._input: x}
        for name, kind, target, *given in self._steps:
            args, kwargs = tree_map_only(_Value, lambda value: values[value.name], given)
            if kind == "call_module":
                values[name] = self.get_submodule(target)(*args, **kwargs)
            elif kind == "get_attr":
                values[name] = operator.attrgetter(target)(self)
            elif kind == "call_method":
                values[name] = getattr(args[0], target)(*args[1:], **kwargs)
            elif kind == "call_function":
                values[name] = target(*args, **kwargs)
            else:  # the output
                return args[0]
        return values[name]
