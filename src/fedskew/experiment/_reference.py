"""Every key that a config may hold, read from the code: for `fedskew list`, the docs, new configs and editors."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pydantic

from fedskew import data, methods, models, partition
from fedskew.experiment._config import Config
from fedskew.experiment._trackers import TRACKERS

_NOT_SET = ("root", "rng", "num_classes", "in_shape", "self", "return")
"""Parameters of readers and networks that are no keys of their table."""

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Key:
    """A key of a table.

    Attributes:
        name: Its name.
        schema: What it may hold, as JSON schema.
        required: Whether it must be given.
        default: Its value otherwise, in plain values.
        meaning: A sentence or two.
    """

    name: str
    schema: dict[str, Any]
    required: bool
    default: Any
    meaning: str

    @property
    def kind(self) -> str:
        """The values that it may have, in words."""
        return _in_words(self.schema)

    @property
    def value(self) -> str:
        """Its default as TOML; empty where it has none."""
        return "" if self.required or self.default is None else _toml(self.default)


@dataclass(frozen=True)
class Entry:
    """A table, or what a name in a table stands for.

    Attributes:
        name: The table's key, or the name.
        summary: One sentence.
        keys: Its own keys.
    """

    name: str
    summary: str
    keys: tuple[Key, ...]


@cache
def tables() -> tuple[Entry, ...]:
    """Return the tables of a config, in order; the first, without a name, are the keys at its top."""
    found, top = [], []
    for name, field in Config.model_fields.items():
        section = _section(field.annotation)
        key = field.alias or name
        if section is not None:
            found.append(Entry(key, _summary(section), tuple(_of_section(section))))
        elif key == "method":
            found.append(Entry(key, _meanings(Config)["method"], ()))
        else:
            top.append(key)
    whole = {key.name: key for key in _of_section(Config)}
    return (Entry("", _summary(Config), tuple(whole[name] for name in top)), *found)


def _section(annotation: Any) -> type[pydantic.BaseModel] | None:
    """Return the table that a key's annotation names."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
            return kind
    return None


@cache
def choices() -> Mapping[str, tuple[Entry, ...]]:
    """List the names that a key of a config takes: `data.name`, `partition.rule` and so on.

    Returns:
        The names with their keys, by that key of a config.
    """
    found: dict[str, Mapping[str, Any]] = {
        "data.name": data.INDEX,
        "partition.rule": partition.INDEX,
        "model.name": models.INDEX,
        "training.augmentation": data.AUGMENTATIONS,
        "output.trackers": TRACKERS,
        **{f"method.{slot}.name": index for slot, index in methods.PLACES.items()},
    }
    return {place: tuple(_entry(place, name, kind) for name, kind in index.items()) for place, index in found.items()}


def json_schema() -> dict[str, Any]:
    """Return the schema of a config or sweep as JSON schema, with which editors complete and check TOML files."""
    whole = Config.model_json_schema(by_alias=True)
    for entry in tables():
        properties = _definition(whole, entry.name)["properties"]
        for own in entry.keys:
            properties[own.name] = {**properties[own.name], "description": own.meaning}
            properties[own.name].pop("title", None)
    for table, key in (("data", "name"), ("partition", "rule"), ("model", "name")):
        _offer(_definition(whole, table), key, choices()[f"{table}.{key}"])
    slots = {}
    for slot in methods.PLACES:
        table_of_slot: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
        filled = _offer(table_of_slot, "name", choices()[f"method.{slot}.name"])
        slots[slot] = {"anyOf": [{"type": "string"}, filled]}
    presets = {"type": "string", "examples": list(methods.PRESETS)}
    whole["properties"]["method"] = {
        "description": _meanings(Config)["method"],
        "anyOf": [presets, {"type": "object", "properties": {"preset": presets, **slots}}],
    }
    for name, meaning in (
        ("sweep", "Methods and a grid of keys, each with each: `fedskew sweep`."),
        ("quick", "Dotted keys that --quick applies."),
    ):
        whole["properties"][name] = {"type": "object", "description": meaning}
    for section in whole["$defs"].values():
        section["description"] = section.get("description", "").split("\n")[0]
    whole["description"] = whole["description"].split("\n")[0]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fedskew config", **whole}


def _definition(whole: dict[str, Any], table: str) -> dict[str, Any]:
    """Return the schema of a table, or of the whole where it has no name."""
    if not table:
        return whole
    place = whole["properties"][table]
    kinds = [place, *place.get("anyOf", [])]
    reference = next((kind["$ref"] for kind in kinds if "$ref" in kind), "")
    found: dict[str, Any] = whole["$defs"].get(reference.removeprefix("#/$defs/"), {"properties": {}})
    return found


def _offer(table: dict[str, Any], key: str, entries: tuple[Entry, ...]) -> dict[str, Any]:
    """Add to a table's schema the known names of a key, and the keys that go with each name."""
    names = [entry.name for entry in entries] + (["file"] if key == "rule" else [])
    table["properties"][key] = {**table["properties"][key], "anyOf": [{"enum": names}, {"pattern": ":"}]}
    table["allOf"] = [
        {
            "if": {"properties": {key: {"const": entry.name}}, "required": [key]},
            "then": {
                "properties": {own.name: {**own.schema, "description": own.meaning} for own in entry.keys},
                "required": [own.name for own in entry.keys if own.required],
            },
        }
        for entry in entries
        if entry.keys
    ]
    return table


def _of_section(section: type[pydantic.BaseModel]) -> Iterator[Key]:
    whole = section.model_json_schema(by_alias=True)
    meanings = _meanings(section)
    for name, field in section.model_fields.items():
        key = field.alias or name
        default = None if field.is_required() else field.get_default()
        yield Key(key, whole["properties"][key], field.is_required(), default, meanings.get(name, ""))


def _entry(place: str, name: str, kind: Any) -> Entry:
    """Return the entry of a name; augmentations and trackers have no keys of their own."""
    keys = () if place in ("training.augmentation", "output.trackers") else tuple(_keys(kind))
    return Entry(name, _summary(kind), keys)


def _keys(kind: Any) -> Iterator[Key]:
    """Yield the parameters of a component, network or reader."""
    meanings = _meanings(data.from_huggingface if kind is data.INDEX["huggingface"] else kind)
    if dataclasses.is_dataclass(kind):
        whole = pydantic.TypeAdapter(kind).json_schema()
        for field in dataclasses.fields(kind):
            if not field.init:
                continue
            required = field.name in whole.get("required", [])
            schema = {key: value for key, value in whole["properties"][field.name].items() if key != "title"}
            yield Key(field.name, schema, required, schema.get("default"), meanings.get(field.name, ""))
        return
    function: Callable[..., Any] = inspect.getattr_static(kind, "__init__") if isinstance(kind, type) else kind
    hints = typing.get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in _NOT_SET or parameter.name not in hints:
            continue
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        try:
            schema = pydantic.TypeAdapter(hints[parameter.name]).json_schema()
        except pydantic.PydanticUserError:
            schema = {}
        yield Key(parameter.name, schema, required, default, meanings.get(parameter.name, ""))


def _summary(kind: Any) -> str:
    text = inspect.getdoc(kind) or ""
    return " ".join(text.split("\n\n")[0].split())


def _meanings(kind: Any) -> dict[str, str]:
    """Descriptions by name from the sections "Args" and "Attributes" of docstrings, those of base classes included."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__) if isinstance(kind, type) else [kind]:
        section, name = False, ""
        for line in inspect.cleandoc(part.__doc__ or "").splitlines():
            if re.fullmatch(r"(Args|Attributes):", line):
                section = True
            elif line and not line.startswith(" "):
                section = False
            elif section and (start := re.match(r"    (\w+): (.*)", line)):
                name, found[start[1]] = start[1], start[2]
            elif section and line.strip() and name:
                found[name] += " " + line.strip()
    return {name: text.replace("None: ", "without it: ") for name, text in found.items()}  # TOML knows no None


def _in_words(schema: Mapping[str, Any]) -> str:
    """Describe in a few words what a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_in_words(kind) for kind in schema["anyOf"] if kind.get("type") != "null"))
    if "const" in schema or "enum" in schema:
        return ", ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "")
    if kind == "array":
        inner = schema.get("items") or {}
        return f"list of {_in_words(inner)}" if inner else "list"
    if kind in ("number", "integer"):
        bounds = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema]
        return " ".join(["whole number" if kind == "integer" else "number", ", ".join(bounds)]).strip()
    if "$ref" in schema:
        return "table"
    return {"string": "text", "boolean": "true or false", "object": "table"}.get(kind, "any value")


def _toml(value: Any) -> str:
    """Return a default as TOML writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
