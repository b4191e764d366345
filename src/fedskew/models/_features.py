"""Features and logits of any network in one forward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedskew.errors import ArgumentError
from fedskew.models._network import Network
from fedskew.models._outputs import Outputs


def with_features(model: nn.Module) -> nn.Module:
    """A module whose call returns `Outputs(features, logits)` of `model`, which it holds as `.model`, unchanged.

    For a network of this package the features are the input of its head. For a user's own they are the input, `(batch,
    dim)`, of the linear layer that ran last and has as many outputs as there are logits; the logits themselves where
    there is none. Works under `torch.func.functional_call` (names begin with `model.`) and `torch.func.vmap`; no tensor
    outlives the call. Calling it raises ArgumentError where the model does not return logits, `(batch, classes)`.
    """
    return _WithFeatures(model)


class _WithFeatures(nn.Module):
    """Watches the model's linear layers by hooks that stand for the time of one call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Outputs:
        seen: list[tuple[Tensor, int]] = []

        def keep(layer: nn.Linear, inputs: tuple[Any, ...]) -> None:
            if inputs and inputs[0].dim() == 2:
                seen.append((inputs[0], layer.out_features))

        hooks = [layer.register_forward_pre_hook(keep) for layer in self._watched()]
        try:
            logits = self.model(x)
        finally:
            for hook in hooks:
                hook.remove()
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
