"""Weights from a file: names and shapes have to be the network's, but for a last layer of other classes."""

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError, DataError
from fedskew.models._wrappers import linear_outputs
from fedskew.models.sources import TextClassifier

COUNTER = "num_batches_tracked"
"""How the name of a counter ends, which files from before PyTorch 0.4.1 lack."""


def load_weights(whole: nn.Module, path: Path, samples: Tensor) -> list[str]:
    """Set weights and running statistics from a file, in place; return the layers that stay as they were drawn.

    The file's last layer may have another name; where it has other classes, or there is none, the network's stays as it
    was drawn. `samples`, `(batch, ...)`, show which layer is the last. ArgumentError where the file is of another
    network; DataError where it can't be read.
    """
    if isinstance(whole, TextClassifier):
        return _load_text(whole, path)
    module, state, own = whole, _read(path), whole.state_dict()
    last = _last_layer(module, samples)
    head = {name for name in own if last is not None and name.rpartition(".")[0] == last}
    extra = state.keys() - own.keys()
    parts = {name.rpartition(".")[2] for name in head}
    if head and not head & state.keys() and {name.rpartition(".")[2] for name in extra} == parts:
        of_file = {name.rpartition(".")[0] for name in extra}
        if len(of_file) == 1:
            state = {name: one for name, one in state.items() if name not in extra} | {
                name: state[f"{next(iter(of_file))}.{name.rpartition('.')[2]}"] for name in head
            }
    left_out = {name for name in head if name not in state or state[name].shape != own[name].shape}
    state = {name: one for name, one in state.items() if not (left_out and name in head)}
    missing = own.keys() - state.keys() - (head if left_out else set())
    _check(path, state, own, {name for name in missing if not name.endswith(COUNTER)})
    module.load_state_dict(state, strict=False)
    return [str(last)] if left_out else []


def _load_text(whole: TextClassifier, path: Path) -> list[str]:
    """Load a file of transformers': what is after the body may be missing, or something else."""
    state, own, body = _read(path), whole.network.state_dict(), whole.body
    if not any(name.startswith(body) for name in state):
        state = {body + name: one for name, one in state.items()}
    kept = {
        name: one
        for name, one in state.items()
        if name.startswith(body) or (name in own and own[name].shape == one.shape)
    }
    free = {name for name in own if not name.startswith(body) or ".pooler." in name}
    _check(path, kept, own, own.keys() - kept.keys() - free)
    whole.network.load_state_dict(kept, strict=False)
    return sorted({name.rpartition(".")[0] for name in free - kept.keys()})


def _check(path: Path, state: Mapping[str, Tensor], own: Mapping[str, Tensor], missing: set[str]) -> None:
    """Raise ArgumentError where tensors are missing, of another shape, or not the network's."""
    extra = state.keys() - own.keys()
    other = [name for name in state if name in own and state[name].shape != own[name].shape]
    for names, what in ((missing, "lacks"), (extra, "has")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            why = "of the network" if what == "lacks" else "which the network has not"
            raise ArgumentError(f"weights: {path} is of another network: it {what} {min(names)!r}{more}, {why}")
    if other:
        shapes = [tuple(held[other[0]].shape) for held in (state, own)]
        raise ArgumentError(f"weights: {path}: {other[0]!r} is {shapes[0]} there and {shapes[1]} in the network")


def _last_layer(module: nn.Module, samples: Tensor) -> str | None:
    """Return the name of the linear layer that makes the logits; None where there is none."""
    names: dict[nn.Module, str] = {layer: name for name, layer in module.named_modules()}
    mode = module.training
    try:
        logits, found = linear_outputs(module, samples)
    finally:
        module.train(mode)
    return next((names[layer] for layer, output in reversed(found) if output.shape == logits.shape), None)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"{path}: no such weights file (model.weights)") from None
    except Exception as error:  # a damaged file can raise almost anything
        raise DataError(
            f"{path}: is not a readable weights file ({type(error).__name__}); expected a state dict as .pth or "
            ".safetensors"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise DataError(f"{path}: does not hold a state dict of tensors by name; save model.state_dict()")
    return dict(state)
