"""Objects in place of names: what `simulate` is given from Python, and the names that a config has for it."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedskew import components, data, methods, models
from fedskew.errors import ConfigError, DataWarning
from fedskew.parameters import plain as plain_number

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_DEEP = 8  # objects inside objects


def with_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's tree with names in place of classes, functions, networks and data that were given from Python.

    Raises:
        ConfigError: What stands in place of a name can have none.
    """
    plain = {key: _plain(dict(value)) if _is_table(value) else _plain(value) for key, value in tree.items()}
    for section, key in (("data", "name"), ("partition", "rule"), ("model", "name")):
        table = plain.get(section)
        if section in tree and not _is_table(table):
            table = plain[section] = {key: table}
        if isinstance(table, dict) and table.get(key) is not None and not isinstance(table[key], str):
            plain[section] = _with_name(section, key, table)
    if isinstance(method := plain.get("method"), str):
        plain["method"] = {"preset": method}
    elif dataclasses.is_dataclass(method):
        filled = {place: getattr(method, place) for place in methods.PLACES}
        plain["method"] = {place: component for place, component in filled.items() if component is not None}
    if isinstance(plain.get("seeds"), int):
        plain["seeds"] = [plain["seeds"]]
    return plain


def _plain(value: Any) -> Any:
    """Return a value as TOML has it: Python's numbers for NumPy's, a list for a tuple or a range."""
    value = list(value) if isinstance(value, tuple | range) and not hasattr(value, "_fields") else value
    if type(value) is dict:
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if type(value) is list else plain_number(value)


def _is_table(value: Any) -> bool:
    """Return whether it is a table of a config; a `DatasetDict` of the package `datasets` is a mapping too."""
    return isinstance(value, Mapping) and type(value).__module__.partition(".")[0] != "datasets"


def _with_name(section: str, key: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with a name in place of an object, and of a test part that is one."""
    value = table[key]
    if isinstance(value, type | FunctionType) and value.__qualname__.isidentifier():
        return table | {key: components.name_of(value, f"{section}.{key}")}
    if section == "model":
        return table | {key: _network_name(value)}
    if section == "partition" or isinstance(value, bool | int | float):
        return table if not callable(value) else table | {key: components.name_of(value, f"{section}.{key}")}
    if isinstance(value, type | FunctionType):
        return table | {key: components.keep(value, value.__name__.strip("<>"), _digest_of_code(value))}
    given = data.from_object(value, table.get("test"))
    return {name: part for name, part in table.items() if name != "test"} | {
        key: components.keep(given.read, given.label, given.digest)
    }


def _network_name(value: Any) -> str:
    """Name an `nn.Module`, whose weights every seed starts from, or a function that makes one."""
    if isinstance(value, nn.Module):
        label = type(value).__name__
        try:
            kept = models.copied(value).cpu()
        except Exception as error:
            raise ConfigError(f"model.name: {label} can't be copied: {error}; give a function that makes it") from None
        return components.keep(partial(models.copied, kept), label, _digest_of_network(kept))
    if callable(value):
        label = getattr(value, "__name__", type(value).__name__).strip("<>")
        return components.keep(value, label, _digest_of_code(value))
    raise ConfigError(
        f"model.name: {type(value).__name__} {value!r} is no network; give a name, an nn.Module, or a function that "
        "makes one"
    )


def _digest_of_code(function: Callable[..., Any]) -> str:
    """Hex digits that change with a function's or class's code, and with what it has closed over."""
    return hashlib.sha256("\n".join(_parts(function)).encode()).hexdigest()[:8]


def _parts(value: Any, around: tuple[int, ...] = ()) -> list[str]:
    def text(part: Any) -> str:
        return _text(part, around)

    if isinstance(value, partial):
        return [*_parts(value.func, around), text(value.args), text(value.keywords)]
    if isinstance(value, MethodType):
        return [*_parts(value.__func__, around), text(value.__self__)]
    if isinstance(value, staticmethod | classmethod):
        return _parts(value.__func__, around)
    if isinstance(value, type):
        functions = [one for one in vars(value).values() if callable(one)]
        return [value.__qualname__, *(part for one in functions for part in _parts(one, around))]
    if isinstance(value, FunctionType):
        code = value.__code__
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        inner = [text(constant) for constant in code.co_consts if not hasattr(constant, "co_code")]
        nested = [constant.co_code.hex() for constant in code.co_consts if hasattr(constant, "co_code")]
        return [value.__qualname__, code.co_code.hex(), str(code.co_names), *inner, *nested, *map(text, cells),
                text(value.__defaults__), text(value.__kwdefaults__)]  # fmt: skip
    return [text(value)]


def _text(value: Any, around: tuple[int, ...] = ()) -> str:
    """Describe a value inside others, the same in every process: like its repr, but sorted and without an address."""
    if id(value) in around or len(around) > _DEEP:
        return type(value).__qualname__
    inside = (*around, id(value))
    if isinstance(value, nn.Module):
        return _digest_of_network(value, inside)
    if isinstance(value, Tensor | np.ndarray):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        return f"{array.dtype}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
    if type(value) in (set, frozenset):
        parts = ", ".join(sorted(_text(one, inside) for one in value))
        return f"{type(value).__name__}({{{parts}}})"
    if type(value) is list:
        return f"[{', '.join(_text(one, inside) for one in value)}]"
    if type(value) is tuple:
        return f"({', '.join(_text(one, inside) for one in value)}{',' * (len(value) == 1)})"
    if type(value) is dict:
        return f"{{{', '.join(f'{_text(key, inside)}: {_text(one, inside)}' for key, one in value.items())}}}"
    if isinstance(value, partial | staticmethod | classmethod | type | FunctionType | MethodType):
        return "\n".join(_parts(value, inside))
    if not (found := _ADDRESS.search(text := repr(value))):
        return text
    if state := getattr(value, "__dict__", None):
        return f"{type(value).__qualname__}{_text(dict(state), inside)}"
    warnings.warn(
        f"what {text[: found.start()]}...> holds can't be told: networks and functions that differ in it alone have "
        "one name, and one run folder; give what differs as plain values",
        DataWarning,
        stacklevel=2,
    )
    return _ADDRESS.sub("", text)


def _digest_of_network(module: nn.Module, around: tuple[int, ...] = ()) -> str:
    """Hex digits that change with a network's layers, its hooks, and the values of its tensors."""
    digest = hashlib.sha256(repr(module).encode())
    for name, value in module.state_dict().items():
        digest.update(name.encode())
        if not is_lazy(value):
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    for hooked in models.hooks_of(module):
        digest.update(_text(hooked, around).encode())
    return digest.hexdigest()[:8]
