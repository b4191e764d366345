"""Networks and functions that are given to `simulate` as objects, and have no name that a config could import."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from fedskew import components
from fedskew.errors import ConfigError


def given_network(value: Any) -> str:
    """Name a network, or a function that makes one, for a config of this process.

    Args:
        value: An `nn.Module`, whose weights every seed starts from; or something that is called with those of
            `num_classes` and `in_shape` that it takes.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(value, nn.Module):
        label = type(value).__name__
        try:
            kept = copy.deepcopy(value).cpu()
        except Exception as error:
            raise ConfigError(f"model.name: {label} can't be copied: {error}; give a function that makes it") from None
        return components.keep(partial(copy.deepcopy, kept), label, _digest_of_network(kept))
    if callable(value):
        label = getattr(value, "__name__", type(value).__name__).strip("<>")
        return components.keep(value, label, digest_of_code(value))
    raise ConfigError(
        f"model.name: {type(value).__name__} {value!r} is no network; give a name, an nn.Module, or a function that "
        "makes one"
    )


def digest_of_code(function: Callable[..., Any]) -> str:
    """Hex digits that change with a function's or class's code, and with what it has closed over."""
    return hashlib.sha256("\n".join(_parts(function)).encode()).hexdigest()[:8]


def _parts(value: Any) -> list[str]:
    if isinstance(value, partial):
        return [*_parts(value.func), repr(value.args), repr(value.keywords)]
    if isinstance(value, staticmethod | classmethod):
        return _parts(value.__func__)
    if isinstance(value, type):
        return [value.__qualname__, *(part for one in vars(value).values() if callable(one) for part in _parts(one))]
    if isinstance(value, FunctionType):
        code = value.__code__
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        inner = [repr(constant) for constant in code.co_consts if not hasattr(constant, "co_code")]
        nested = [constant.co_code.hex() for constant in code.co_consts if hasattr(constant, "co_code")]
        closed = [_digest_of_network(cell) if isinstance(cell, nn.Module) else repr(cell) for cell in cells]
        return [value.__qualname__, code.co_code.hex(), str(code.co_names), *inner, *nested, *closed,
                repr(value.__defaults__), repr(value.__kwdefaults__)]  # fmt: skip
    return [repr(value)]


def _digest_of_network(module: nn.Module) -> str:
    """Hex digits that change with a network's layers and with the values of its tensors."""
    digest = hashlib.sha256(repr(module).encode())
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        if not is_lazy(value):
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:8]
