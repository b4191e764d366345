"""A network that is computed by its rewritten graph where that is safe, and by its own `forward` elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fedskew.errors import in_one_line
from fedskew.models._added import has_global_hooks, is_plain
from fedskew.models._graph import UnreadableError, read_graph, rewrite
from fedskew.models._networks import MLP3, FastText, Logistic

_SAMPLES = 2  # on which a graph is compared with the network
_TOLERANCE = 1e-4  # as a share of the largest value

# Networks that have nothing to rewrite; to read their graph takes longer than a round of a small run.
_NEVER_REWRITTEN = {FastText, Logistic, MLP3, nn.Embedding, nn.Linear}


class Program(NamedTuple):
    """How a network is computed: by a rewritten graph or, at None, by its own `forward`; and `Faster.rules` of it."""

    graph: fx.GraphModule | None
    rules: Mapping[str, int | str]


class Faster(nn.Module):
    """Computes the same function as a network, with the network's own layers and tensors.

    In each combination of the layers' modes that occurs, the network's graph is read by torch.fx, rewritten by rules
    that keep its function, and compared with the network on two samples: outputs, gradients and buffers. Where its
    graph can't be read, or differs, the network is computed as it was written. The network itself is not changed.

    Attributes:
        rules: How often each was applied in training mode, or `as_written`, why none was; empty before that is known.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._layers = list(module.modules())
        self._plain = [is_plain(layer) for layer in self._layers]
        self._programs: dict[tuple[bool, ...], Program] = {}
        self.rules: Mapping[str, int | str] = {}

    def forward(self, x: Tensor) -> Any:
        """Return what the network returns for a batch."""
        graph = self.program(x).graph
        return self.module(x) if graph is None else graph(x)

    def program(self, x: Tensor) -> Program:
        """Return how the network is computed in its present modes; a new graph is compared with it on these samples."""
        if has_global_hooks():
            return Program(None, {"as_written": "PyTorch has a hook of all modules"})
        modes = torch.is_grad_enabled(), *[layer.training for layer in self._layers]
        known = self._programs.get(modes)
        if known is None:
            known = self._programs[modes] = self._read(x[:_SAMPLES])
            if self.training:
                self.rules = known.rules
        return known

    def _read(self, x: Tensor) -> Program:
        if all(self._plain) and {type(layer) for layer in self._layers} <= _NEVER_REWRITTEN:
            return Program(None, {"as_written": "no rule applies"})
        try:
            graph = read_graph(self.module)
            done = rewrite(graph)
            if not done:
                return Program(None, {"as_written": "no rule applies"})
            self._compare(graph, x)
        except UnreadableError as error:
            return Program(None, {"as_written": str(error)})
        return Program(graph, done)

    def _compare(self, graph: fx.GraphModule, x: Tensor) -> None:
        """Raise UnreadableError where the graph's outputs, gradients or buffers are not the network's."""
        expected = self._computed(self.module, self.module, x)
        got = self._computed(self.module, graph, x)
        if len(expected) != len(got) or not all(map(_agree, expected, got)):
            raise UnreadableError("its graph gives other values than its forward()")

    def _computed(self, module: nn.Module, network: nn.Module, x: Tensor) -> list[Tensor | None]:
        """Return outputs, gradients and buffers of a copy."""
        try:
            module, network = copy.deepcopy((module, network))
            for layer, plain in zip(module.modules(), self._plain, strict=True):
                if plain:  # hooks of a caller who reads this forward pass
                    layer._forward_hooks.clear()
                    layer._forward_pre_hooks.clear()
            y = network(x)
        except Exception as error:
            raise UnreadableError(in_one_line(error)) from error
        if not isinstance(y, Tensor):
            raise UnreadableError("it returns no tensor")
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients: tuple[Tensor | None, ...] = ()
        if y.requires_grad:
            gradients = torch.autograd.grad(y.square().sum() + y.sum(), parameters, allow_unused=True)
        return [y.detach(), *gradients, *module.buffers()]


def _agree(expected: Tensor | None, got: Tensor | None) -> bool:
    if expected is None or got is None:
        return expected is got
    scale = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    return expected.shape == got.shape and torch.allclose(
        got, expected, rtol=0, atol=_TOLERANCE * scale, equal_nan=True
    )
