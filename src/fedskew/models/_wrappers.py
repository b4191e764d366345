"""Wrappers of networks: features beside logits, MOON's projection, FedConcat's encoders, directions as last layer.

A last layer may compare directions: cosines of the features with one direction for each class, which is not trained.
Either they are fixed (`OnSimplex`), or somebody else sets them (`OnPrototypes`).
"""

import copy
import math
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedskew.errors import ArgumentError
from fedskew.models._network import Network, Outputs, draw_weights, lengths_of, linear_head, unit_rows

_PROJECTION = 256


def with_features(model: nn.Module) -> nn.Module:
    """Wrap a model so that calling it returns features and logits in one forward pass.

    For a network of this package the features are the input of its head. For a user's own network they are the input,
    `(batch, dim)`, of the last linear layer to run that has as many outputs as there are logits; if there is no such
    layer, the logits. The wrapper works under `torch.func.functional_call` (names begin with `model.`) and
    `torch.func.vmap`, and keeps no tensor after the call.

    Args:
        model: Any module that returns logits, `(batch, classes)`; the wrapper holds it, unchanged, as `.model`.

    Returns:
        A module whose call returns `Outputs`; it raises ArgumentError if `model` returns no logits.
    """
    return _WithFeatures(model)


class _WithFeatures(nn.Module):
    """Reads the inputs of the model's linear layers by hooks that are removed after each call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Outputs:
        seen: list[tuple[Tensor, int]] = []

        def keep(layer: nn.Linear, inputs: tuple[Any, ...]) -> None:
            if inputs and inputs[0].dim() == 2:
                seen.append((inputs[0], layer.out_features))

        with ExitStack() as hooks:
            for layer in self._watched():
                hooks.enter_context(layer.register_forward_pre_hook(keep))
            logits = self.model(x)
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ArgumentError(f"model: must return logits, a tensor (batch, classes); got {got}")
        classes = logits.shape[1]
        features = next((inputs for inputs, outputs in reversed(seen) if outputs == classes), logits)
        return Outputs(features, logits)

    def _watched(self) -> list[nn.Linear]:
        if isinstance(self.model, Network):
            return [self.model.head]
        return [layer for layer in self.model.modules() if isinstance(layer, nn.Linear)]


@torch.no_grad()
def linear_outputs(model: nn.Module, samples: Tensor) -> tuple[Tensor, list[tuple[nn.Linear, Tensor]]]:
    """Return the logits of samples, and what each linear layer returned, in order; the model is in eval mode then."""
    found: list[tuple[nn.Linear, Tensor]] = []

    def keep(layer: nn.Linear, _: tuple[Any, ...], output: Tensor) -> None:
        found.append((layer, output.clone()))

    with ExitStack() as hooks:
        for layer in (one for one in model.modules() if isinstance(one, nn.Linear)):
            hooks.enter_context(layer.register_forward_hook(keep))
        return with_features(model.eval())(samples).logits, found


def last_layer(model: nn.Module, samples: Tensor) -> nn.Linear:
    """Find the linear layer, with a bias, whose output the logits of some samples are; the model is in eval mode then.

    Raises:
        ArgumentError: The logits come from something else, or the layer has no bias.
    """
    logits, found = linear_outputs(model, samples)
    name = type(model).__name__
    layer = next((layer for layer, output in reversed(found) if torch.equal(output, logits)), None)
    if layer is None:
        raise ArgumentError(f"model: the logits of {name} are not the output of a linear layer")
    if layer.bias is None:
        raise ArgumentError(f"model: the last layer of {name} has no bias")
    return layer


class Projected(Network):
    """A network with a projection before its head, as MOON trains it.

    The layers are encoder - linear d to d - ReLU - linear d to 256 - head, where the encoder's features are `(batch,
    d)`. The features of this network are the projection's output. The encoder is the network without its head; the new
    head has the same number of outputs.

    Args:
        network: A network with a method `features(x)` and a linear layer `head`; changed in place.
        generator: Draws the weights of the new layers.

    Raises:
        ArgumentError: The network has no features or no head.
    """

    def __init__(self, network: nn.Module, generator: torch.Generator) -> None:
        super().__init__()
        head = getattr(network, "head", None)
        if not isinstance(head, nn.Linear) or not callable(getattr(network, "features", None)):
            raise ArgumentError(
                f"network: {type(network).__name__} does not say where its projection goes; give it a method "
                "features(x), and a linear layer self.head that turns its result, (batch, dim), into the logits"
            )
        width, classes = head.in_features, head.out_features
        network.head = nn.Identity()
        self.encoder = network
        with torch.random.fork_rng(devices=[]):  # what the layers draw is drawn anew, below
            self.projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _PROJECTION))
            self.head = nn.Linear(_PROJECTION, classes)
        draw_weights(self.projection, generator)
        draw_weights(self.head, generator)
        self.train(network.training)

    def features(self, x: Tensor) -> Tensor:
        """Return the projection, `(batch, 256)`."""
        # Call the encoder itself, not its features(), so that its dropout layers count their uses anew.
        projected: Tensor = self.projection(self.encoder(x))
        return projected


def with_fixed_head(network: nn.Module) -> nn.Module:
    """Freeze the last layer of a network, its `head`, in place; raise ArgumentError where nothing else is trained."""
    linear_head(network).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ArgumentError(
            f"network: {type(network).__name__} has nothing to train but its last layer, which stays as it was drawn; "
            "take another model, or another local step"
        )
    return network


def with_added_head(model: nn.Module, samples: Tensor) -> nn.Module:
    """Return a copy of a network with a second last layer, of zeros, whose outputs are added to its logits.

    The new layer's parameters, `added.weight` and `added.bias`, are the last ones. No gradient reaches the others.
    `samples`, `(batch, ...)`, are those by which the number of features is found.
    """
    copied = copy.deepcopy(model)
    with torch.no_grad():
        features, logits = with_features(copied.eval())(samples.to(next(copied.parameters()).device))
    return _WithAddedHead(copied, features.shape[1], logits.shape[1])


class _WithAddedHead(nn.Module):
    def __init__(self, network: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.network = network
        device = next(network.parameters()).device
        self.added = nn.utils.skip_init(nn.Linear, width, classes, device=device)  # no random numbers
        nn.init.zeros_(self.added.weight)
        nn.init.zeros_(self.added.bias)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Outputs = with_features(self.network)(x)
        added: Tensor = self.added(outputs.features.detach())
        return outputs.logits.detach() + added


class Concatenated(Network):
    """Encoders side by side under one linear head: the final model of FedConcat.

    The model is head(encoder_1(x), ..., encoder_K(x)), with K frozen copies of a network without its head, and one new
    linear head. With P parameters and d features in one encoder it has `K * P + K * d * classes + classes` parameters,
    of which only the head's are trainable. Encoders stay in eval mode, whatever `train` says (the authors' code leaves
    them in train mode, so that a sample's features depend on its batch). A run's model is read back by

        model = Concatenated(build("lenet5", 10, (1, 28, 28)), encoders=5)
        model.load_state_dict(safetensors.torch.load_file("model.safetensors"))

    Args:
        network: A network with a linear layer `head` that turns its features, `(batch, d)`, into outputs; kept as is.
        generator: Draws the new head's weights; a fresh generator seeded 0 by default.

    Raises:
        ArgumentError: The network has no such head, or there is less than one encoder.
    """

    def __init__(self, network: nn.Module, encoders: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        head = linear_head(network)
        if encoders < 1:
            raise ArgumentError(f"encoders: must be at least 1, got {encoders}")
        self.encoders = nn.ModuleList(copy.deepcopy(network) for _ in range(encoders))
        for encoder in self.encoders:
            encoder.head = nn.Identity()
        self.encoders.requires_grad_(False).eval()
        width, bias = encoders * head.in_features, head.bias is not None
        self.head = nn.utils.skip_init(nn.Linear, width, head.out_features, bias=bias)  # on the CPU; drawn once, below
        draw_weights(self.head, generator or torch.Generator().manual_seed(0))
        self.head.to(head.weight.device)

    def features(self, x: Tensor) -> Tensor:
        """Return the encoders' features one after another, `(batch, encoders * d)`."""
        return torch.cat([encoder(x) for encoder in self.encoders], dim=1)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all layers except the encoders, which stay in eval mode."""
        super().train(mode)
        self.encoders.eval()
        return self

    def put(self, place: int, network: nn.Module) -> None:
        """Copy a network without its head into the encoder of this number."""
        state = {name: value for name, value in network.state_dict().items() if not name.startswith("head.")}
        self.encoders[place].load_state_dict(state)


class CosineHead(nn.Linear):
    """A last layer whose outputs are `scale * cos(features, direction)`; no gradient reaches its directions."""

    scale: Tensor
    learns = False

    def __init__(self, directions: Tensor, scale: float, *, learnt: bool, fixed: bool) -> None:
        classes, dim = directions.shape
        with torch.device("meta"):  # neither storage nor random numbers
            super().__init__(dim, classes, bias=False)
        self.weight = nn.Parameter(directions, requires_grad=not fixed)
        self.scale = nn.Parameter(torch.tensor(float(scale)), requires_grad=learnt)

    def forward(self, features: Tensor) -> Tensor:
        """Return the scaled cosines, `(batch, classes)`."""
        return self.scale * functional.linear(unit_rows(features), unit_rows(self.weight.detach()))

    @staticmethod
    def compare(features: Tensor, directions: Tensor, scale: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the outputs without autograd, also of a stack, `(clients, ...)`, and what `slopes` reads."""
        length, directions = lengths_of(features), unit_rows(directions)
        cosines = (units := features / length) @ directions.mT
        return scale * cosines, (units, length, directions, cosines, scale)

    @staticmethod
    def slopes(gradient: Tensor, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the gradients by the features and, of each row, by the scale, from that by the outputs."""
        units, length, directions, cosines, scale = kept
        by_scale = (gradient * cosines).sum(-1, keepdim=True)
        across = (gradient @ directions).addcmul_(by_scale, units, value=-1)  # all, where a row has no direction
        return across.mul_(scale / length), by_scale


class OnSimplex(Network):
    """A network whose outputs, `(batch, C)`, are compared with the corners of a fixed simplex, one for each class.

    What was the network's last layer, `head`, thus makes the features. ArgumentError is raised where there is none, or
    it has fewer than two outputs.

    Args:
        scale: What the cosines are multiplied by, to begin with; trained with the rest if `learnt`.
    """

    def __init__(self, network: nn.Module, scale: float, learnt: bool, generator: torch.Generator) -> None:
        super().__init__()
        head = linear_head(network)
        self.network = network
        self.head = CosineHead(_simplex(head.out_features, generator), scale, learnt=learnt, fixed=True)
        self.train(network.training)

    def features(self, x: Tensor) -> Tensor:
        """Return the network's outputs, `(batch, C)`."""
        outputs: Tensor = self.network(x)
        return outputs


class OnPrototypes(Network):
    """A network whose features are compared with a prototype of each class, which others set.

    The prototypes are the first of the model's parameters, `C * d` of them for C classes and d features, row by row.
    They begin orthonormal, or as near to it as C directions in d dimensions can. They replace the network's last layer,
    `head`, in place; ArgumentError is raised where there is none. The cosines are multiplied by `scale`, which is
    trained with the rest.
    """

    def __init__(self, network: nn.Module, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        head = linear_head(network)
        prototypes = unit_rows(_orthonormal(head.out_features, head.in_features, generator)).float()
        self.head = CosineHead(prototypes, scale, learnt=True, fixed=False)
        network.head = nn.Identity()
        self.encoder = network
        self.train(network.training)

    def features(self, x: Tensor) -> Tensor:
        """Return the features of the network, `(batch, dim)`."""
        features: Tensor = self.encoder(x)
        return features


def _simplex(classes: int, generator: torch.Generator) -> Tensor:
    """Draw the corners of a regular simplex, turned at random (a simplex equiangular tight frame)."""
    # They are the rows of sqrt(C / (C - 1)) (I - 1 1' / C) P' for C classes, with a random orthogonal P, `(C, C)`. Each
    # has length 1, and any two of them the product -1 / (C - 1), the least that C directions can have all together.
    if classes < 2:
        raise ArgumentError(f"classes: a simplex needs two corners at least, got {classes}")
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    turned = centred @ _orthonormal(classes, classes, generator)
    return (math.sqrt(classes / (classes - 1)) * turned).float()


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw a matrix, `(rows, columns)`, float64, whose rows are orthonormal, or its columns where they are fewer."""
    # All such matrices are equally likely, and the signs that a QR decomposition happens to choose don't matter.
    normal = torch.randn(max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64)
    orthogonal, upper = torch.linalg.qr(normal)
    signed: Tensor = orthogonal * upper.diagonal().sign()
    return signed if rows > columns else signed.T
