"""A network that is computed without autograd where it is a chain of layers, and by its own `forward` elsewhere."""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from fedskew.errors import in_one_line
from fedskew.models._added import has_global_hooks, is_plain
from fedskew.models._chain import Chain, Flatten
from fedskew.models._dropout import ChannelDropout, Dropout
from fedskew.models._graph import UnreadableError, chain_of, layers_of, read_graph, values_of
from fedskew.models._network import Outputs
from fedskew.models._wide import MANY, ByProducts
from fedskew.models._winograd import takes
from fedskew.models._wrappers import with_features
from fedskew.models.frozen import still_layers

_WITHOUT_MODES = {nn.Sequential, nn.Identity, nn.Linear, nn.Conv2d, nn.ReLU, nn.Flatten, nn.MaxPool2d, nn.AvgPool2d}
"""Layers that compute the same in training and in evaluation: a network of these alone is read once."""
_KNOWN_TYPES = _WITHOUT_MODES | {nn.BatchNorm1d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d, Dropout, ChannelDropout}
_CHAINS: dict[str, list[nn.Module | str]] = {}
"""Of networks of known types, by all that decides their graph: the chain's layers, as names where they are theirs."""
_SAMPLES = 3  # on which a chain is compared with the network
_TOLERANCE = 1e-4  # as a share of a tensor's largest value
_ROUNDING = 1e-5  # as a share of the largest of all gradients


class Faster(nn.Module):
    """Computes the same function as a network, with the network's own layers and tensors.

    A network on the CPU whose graph, read by torch.fx, is a chain of known layers is computed without autograd (see
    `_chain`), once its outputs and gradients are those of its `forward` on a few samples. The network is not changed.

    Attributes:
        rules: In training, `chain`, the number of its stages, or `as_written`, why it is none; empty before.
        bf16: Whether layers compute in bfloat16 in training, by autocast; what they return is float32 again.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.rules: Mapping[str, int | str] = {}
        self.bf16 = False
        self._layers, self._still = list(module.modules()), still_layers(module)
        self._featured = (with_features(module),)  # in a tuple, as it is no layer of its own
        self._graphs: dict[tuple[bool, ...], fx.GraphModule | str] = {}
        self._chains: dict[tuple[Any, ...], Chain | None] = {}
        is_wide = any(own.dim() == 4 and (own.numel() >= MANY or takes(own)) for own in module.parameters())
        self._way: Any = ByProducts() if is_wide else contextlib.nullcontext()
        self._is_plain = True
        self._has_modes = not all(type(layer) in _WITHOUT_MODES or _is_ours(layer) for layer in self._layers)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without graphs and chains: they would keep the tensors of the original."""
        return vars(self) | {"_graphs": {}, "_chains": {}}

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the layers but for frozen ones with buffers; see if it is a chain then."""
        self._is_plain = not has_global_hooks() and all(map(is_plain, self._layers))
        self._chains = {key: one for key, one in self._chains.items() if one is None or one.is_current()}
        super().train(mode)
        for layer in self._still:
            layer.training = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of a batch, `(batch, classes)`; without a gradient by the chain, if there is one."""
        chain = None if torch.is_grad_enabled() else self.chain(x)
        if chain is not None:
            return chain.predictions(x)
        with self._way:
            logits: Tensor = self.module(x)
        return logits

    def outputs(self, x: Tensor) -> Outputs:
        """Return features and logits of a batch, without a gradient if the network is a chain."""
        if self.bf16 and self.training:
            with torch.autocast(x.device.type, torch.bfloat16):
                computed: Outputs = self._featured[0](x)
            return Outputs(*(part.float() for part in computed))
        if (chain := self.chain(x)) is not None:
            return chain.outputs(x)
        with self._way:
            written: Outputs = self._featured[0](x)
        return written

    def chain(self, x: Tensor) -> Chain | None:
        """Return the chain that computes such a batch; None where the network is computed as it was written."""
        if not self._is_plain or (self.bf16 and self.training):
            return None
        key = x.shape[1:], *self._modes()
        if key not in self._chains:
            self._chains[key] = self._read(x[:_SAMPLES])
        chain = self._chains[key]
        return chain if chain is not None and chain.takes(x) else None

    def takes_views(self) -> bool:
        """Return whether the network calls `view`, which needs values in the usual order; so does one not read."""
        try:
            nodes = self._graph().graph.nodes
        except UnreadableError:
            return True
        return any(node.op == "call_method" and node.target == "view" for node in nodes)

    def _modes(self) -> tuple[bool, ...]:
        return tuple([layer.training for layer in self._layers]) if self._has_modes else ()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _graph(self) -> fx.GraphModule:
        """Return the graph in the present modes, read once; raise UnreadableError where it can't be."""
        modes = self._modes()
        if modes not in self._graphs:
            try:
                self._graphs[modes] = read_graph(self.module)
            except UnreadableError as error:
                self._graphs[modes] = str(error)  # an error kept would keep its frames, and with them all data
        graph = self._graphs[modes]
        if isinstance(graph, str):
            raise UnreadableError(graph)
        return graph

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _read(self, x: Tensor) -> Chain | None:
        chain: Chain | None = None
        try:
            if x.device.type != "cpu" or x.dtype != torch.float32:
                raise UnreadableError("its inputs are no numbers of 32 bits on a CPU")
            structure = self._structure(x)
            if structure in _CHAINS:
                named = _CHAINS[structure]
                layers = [self.module.get_submodule(one) if isinstance(one, str) else one for one in named]
                chain = chain_of(layers, tuple(x.shape[1:]))
            else:
                layers = layers_of(self._graph())
                chain = chain_of(layers, tuple(x.shape[1:]))
                self._compare(layers, x.clone())
                if structure is not None:
                    names = {id(layer): name for name, layer in self.module.named_modules()}
                    _CHAINS[structure] = [names.get(id(layer), layer) for layer in layers]
            rules: dict[str, int | str] = {"chain": sum(not isinstance(stage, Flatten) for stage in chain.stages)}
        except Exception as error:  # also what the chain raises, of shapes, or of a folder for caches
            why = str(error) if isinstance(error, UnreadableError) else in_one_line(error)
            chain, rules = None, {"as_written": why}
        if self.training or not self._has_modes:
            self.rules = rules
        return chain

    def _structure(self, x: Tensor) -> str | None:
        """Return all that decides the graph for such a batch; None where a layer has code that is not known here."""
        if not all(type(layer) in _KNOWN_TYPES or _is_ours(layer) for layer in self._layers):
            return None
        named = [(name, type(layer), getattr(layer, "p", None)) for name, layer in self.module.named_modules()]
        parameters = [(name, one.shape, one.requires_grad) for name, one in self.module.named_parameters()]
        return repr((x.shape[1:], named, parameters, values_of(self.module)))

    def _compare(self, layers: Sequence[nn.Module], x: Tensor) -> None:
        """Raise UnreadableError where a chain's outputs or gradients on some samples are not the network's."""
        copies: dict[int, Any] = {}
        module = copy.deepcopy(self.module, copies)
        outputs = with_features(module)(x)
        loss = outputs.logits.square().sum() + outputs.logits.sum()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            chain = chain_of([copies.get(id(layer), layer) for layer in layers], tuple(x.shape[1:]))
            made = chain.outputs(x)
            chain.backward(None, 2 * made.logits + 1, made)
        expected = [torch.zeros_like(own) if one is None else one for own, one in zip(trained, gradients, strict=True)]
        found = [own.grad for own in trained if own.grad is not None]
        # Of a bias before batch norm the gradient is 0, but for rounding: small beside the others.
        rounding = _ROUNDING * max(float(own.abs().nan_to_num(0, 0, 0).max()) for own in expected if own.numel())
        agree = [_agree(*pair) for pair in zip(outputs, made, strict=True)]
        agree += [_agree(*pair, rounding) for pair in zip(expected, found, strict=True)]
        if not all(agree):
            raise UnreadableError("a chain of its layers gives other values than its forward()")


def _is_ours(layer: nn.Module) -> bool:
    """Return whether a layer is one of our networks, none of which asks for its mode."""
    return type(layer).__module__ == "fedskew.models._networks"


@torch.no_grad()
def _agree(expected: Tensor, got: Tensor, rounding: float = 0.0) -> bool:
    scale = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    return expected.shape == got.shape and torch.allclose(
        got, expected, rtol=0, atol=_TOLERANCE * scale + rounding, equal_nan=True
    )
