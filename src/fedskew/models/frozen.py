"""What no training changes: frozen parameters, by patterns of names, and the buffers of layers that are frozen.

A frozen layer that has buffers, such as batch norm, is in eval mode whatever the rest is in: its running statistics are
what they were. Dropout inside a frozen part stays as it is, as PyTorch has it.
"""

import copy
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError, nearest

_Module = TypeVar("_Module", bound=nn.Module)
_NormBase = nn.modules.batchnorm._NormBase


def freeze(module: nn.Module, frozen: Sequence[str] | None, trained: Sequence[str] | None) -> None:
    """Freeze, in place, parameters of names like those in `frozen`, or all but those of names like those in `trained`.

    ArgumentError where a pattern fits no name, and where nothing is left to train.
    """
    for key, patterns in (("freeze", frozen), ("train", trained)):
        for pattern in patterns or ():
            named = module.named_parameters(remove_duplicate=False)
            found = [one for name, one in named if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
            if not found:
                raise ArgumentError(f"{key}: no parameter of the network is called {pattern!r}{_near(module, pattern)}")
            for parameter in found:
                parameter.requires_grad_(key == "train")
        if key == "freeze" and trained is not None:
            module.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ArgumentError("freeze: nothing is left to train; leave out some of the patterns")


def _near(module: nn.Module, pattern: str) -> str:
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    parts = [name.split(".")[:depth] for name in names for depth in range(1, name.count(".") + 1)]
    layers = {".".join(part) + (".*" if "*" in pattern else "") for part in parts}
    close = nearest(pattern, {*names, *layers})
    return close if "mean" in close else f" (known: {', '.join(sorted(one for one in layers if one.count('.') < 2))})"


def _still(module: nn.Module, is_frozen: bool = False, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield name and layer of what has buffers and is frozen: its parameters, or where it has none those around it."""
    own = [parameter.requires_grad for parameter in module.parameters()]
    is_frozen = not any(own) if own else is_frozen
    if is_frozen and any(name not in module._non_persistent_buffers_set for name in module._buffers):
        yield path, module
    for name, child in module.named_children():
        yield from _still(child, is_frozen, f"{path}{name}.")


def hold_still(module: _Module) -> _Module:
    """Put the frozen layers that have buffers into eval mode, whatever the network is in; return the network."""
    for _, layer in _still(module):
        layer.training = False
    return module


def still_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers that `hold_still` puts into eval mode."""
    return [layer for _, layer in _still(module)]


def frozen_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers of frozen layers."""
    return {path + name for path, layer in _still(module) for name in layer._buffers}


def constant_buffers(module: nn.Module, samples: Tensor) -> frozenset[str]:
    """Find the buffers that a pass in training mode does not write to, such as a table of positions, by trying one."""
    layers, kept = dict(module.named_modules()), set(module.state_dict())
    names = [name for name, _ in module.named_buffers() if name in kept]
    names = [name for name in names if not isinstance(layers[name.rpartition(".")[0]], _NormBase)]  # some write unseen
    if not names:
        return frozenset()
    try:
        tried = hold_still(copy.deepcopy(module).train())
        before = {name: (one, one._version, one.clone()) for name, one in tried.named_buffers() if name in names}
        with torch.no_grad():
            tried(samples)
    except Exception:  # what can't be tried may change
        return frozenset()
    after = dict(tried.named_buffers())
    return frozenset(
        name
        for name, (one, version, held) in before.items()
        if after[name] is one and one._version == version and torch.equal(one, held)
    )
