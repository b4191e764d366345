"""Names in a config, and what they stand for: an entry of a folder's INDEX, or `module:attribute` of the user's own."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import pydantic

from fedskew.errors import ConfigError, FedskewError, nearest


def fill(index: Mapping[str, type], table: Mapping[str, Any], where: str) -> Any:
    """One component from its table: `name`, and its parameters. Raises ConfigError naming the key."""
    if "name" not in table:
        raise ConfigError(f"{where}.name: missing (known: {', '.join(sorted(index))})")
    kind = find(index, str(table["name"]), f"{where}.name")
    parameters = {key: value for key, value in table.items() if key != "name"}
    known = [field.name for field in dataclasses.fields(kind)]
    for key in parameters:
        if key not in known:
            raise ConfigError(f"{where}.{key}: {table['name']} has no such parameter{nearest(key, known)}")
    try:
        return pydantic.TypeAdapter(kind).validate_python(parameters)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # the component's own check, which names parameter and value
            raise ConfigError(f"{where}.{first['msg'].removeprefix('Value error, ')}") from None
        key = ".".join([where, *map(str, first["loc"])])
        if first["type"] == "missing":
            raise ConfigError(f"{key}: missing") from None
        raise ConfigError(f"{key}: {first['msg']} (got {first['input']!r})") from None
    except FedskewError as error:
        raise ConfigError(f"{where}: {error}") from None


def find(index: Mapping[str, Any], name: str, where: str) -> Any:
    """What a name stands for: an entry of `index`, or `module:attribute` of the user's own."""
    if ":" not in name:
        if name not in index:
            raise ConfigError(f"{where}: unknown name {name!r}{nearest(name, index)}")
        return index[name]
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: {name!r} can't be imported: {error}") from None


def name_of(value: Any, where: str) -> str:
    """`module:attribute` of a class or function of the user's own, so that a config can name it."""
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "<locals>")
    if module is None or "<locals>" in qualname or "." in qualname:
        raise ConfigError(f"{where}: {value!r} can't be named in a config; define it at the top level of a module")
    return f"{module}:{qualname}"
