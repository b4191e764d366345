"""Pre-trained weights from a local file in torchvision's layout."""

from __future__ import annotations

from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedskew.errors import ArgumentError, DataError
from fedskew.models._network import Network


def read_pretrained(network: Network, path: str | Path) -> None:
    """Set a network's weights and running statistics from a file, in place.

    `path`: a state dict by torchvision's names, as `.safetensors` or as `.pth` (read with weights_only=True, so that
    nothing in it is executed). Its last layer "fc" goes to `network.head`, unless it is for another number of classes:
    then the head stays as it is. Raises DataError for a file that can't be read, ArgumentError for one of another
    network.
    """
    state = {
        ("head." + name.removeprefix("fc.") if name.startswith("fc.") else name): value
        for name, value in _read(Path(path)).items()
    }
    held = state.get("head.weight")
    if held is not None and len(held) != network.head.out_features:
        state["head.weight"], state["head.bias"] = network.head.weight.data, network.head.bias.data
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ArgumentError(f"weights: {path} is of another network ({reason[:200]})") from None


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such weights file (model.weights)") from None
    except Exception as error:  # a damaged file can raise almost anything
        raise DataError(
            f"{path}: is not a readable weights file ({type(error).__name__}); expected a state dict as .pth or "
            ".safetensors"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise DataError(f"{path}: does not hold a state dict of tensors by name; save model.state_dict()")
    return dict(state)
