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
from fedskew.experiment import TRACKERS, Config

_NOT_SET = ("root", "rng", "num_classes", "in_shape", "self", "return")
"""Parameters of readers and networks that are no keys of their table."""

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Key:
    """A key of a table: what it may hold as JSON schema, and its default in plain values."""

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
    """A table of a config, or a name that a key may have: its summary in one sentence, and its own keys."""

    name: str
    summary: str
    keys: tuple[Key, ...]


@cache
def tables() -> tuple[Entry, ...]:
    """Return the tables of a config, in order; the first, without a name, are the keys at its top."""
    top = {key.name: key for key in _of_section(Config)}
    found = [Entry("method", top.pop("method").meaning, ())]
    for name, field in Config.model_fields.items():
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                del top[name]
                found.append(Entry(name, _summary(kind), tuple(_of_section(kind))))
    order = list(Config.model_fields)
    return (Entry("", _summary(Config), tuple(top.values())), *sorted(found, key=lambda entry: order.index(entry.name)))


@cache
def choices() -> Mapping[str, tuple[Entry, ...]]:
    """Return the names that a key of a config takes, by that key: `data.name`, `partition.rule` and so on."""
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
        "description": whole["properties"]["method"]["description"],
        "anyOf": [presets, {"type": "object", "properties": {"preset": presets, **slots}}],
    }
    for name, meaning in (
        ("sweep", "Methods and a grid of keys, each with each: `fedskew sweep`."),
        ("quick", "Dotted keys that --quick applies."),
    ):
        whole["properties"][name] = {"type": "object", "description": meaning}
    for section in (whole, *whole["$defs"].values()):
        section["description"] = section.get("description", "").split("\n")[0]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fedskew config", **whole}


def _definition(whole: dict[str, Any], table: str) -> dict[str, Any]:
    if not table:
        return whole
    place = whole["properties"][table]
    reference = next((kind["$ref"] for kind in (place, *place.get("anyOf", [])) if "$ref" in kind), "")
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
    for name, field in section.model_fields.items():
        key = field.alias or name
        default = None if field.is_required() else field.get_default()
        meaning = " ".join((field.description or "").split())
        yield Key(key, whole["properties"][key], field.is_required(), default, meaning)


def _entry(place: str, name: str, kind: Any) -> Entry:
    # Augmentations and trackers have no keys of their own.
    keys = () if place in ("training.augmentation", "output.trackers") else tuple(_keys(kind))
    return Entry(name, _summary(kind), keys)


def _keys(kind: Any) -> Iterator[Key]:
    meanings = _meanings(kind)
    if dataclasses.is_dataclass(kind):
        whole = pydantic.TypeAdapter(kind).json_schema()
        for name, schema in whole["properties"].items():
            schema = {key: value for key, value in schema.items() if key != "title"}
            required = name in whole.get("required", [])
            yield Key(name, schema, required, schema.get("default"), meanings.get(name, ""))
        return
    function: Callable[..., Any] = inspect.getattr_static(kind, "__init__") if isinstance(kind, type) else kind
    hints = typing.get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in _NOT_SET or parameter.name not in hints:
            continue
        required = parameter.default is parameter.empty
        try:
            schema = pydantic.TypeAdapter(hints[parameter.name]).json_schema()
        except pydantic.PydanticUserError:
            schema = {}
        default = None if required else parameter.default
        yield Key(parameter.name, schema, required, default, meanings.get(parameter.name, ""))


def _summary(kind: Any) -> str:
    text = inspect.getdoc(kind) or ""
    return " ".join(text.split("\n\n")[0].split())


def _meanings(kind: Any) -> dict[str, str]:
    """Return what docstrings (sections "Args" and "Attributes") say of parameters, those of base classes included."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__) if isinstance(kind, type) else [kind]:
        sections = re.split(r"^\w+:\n", inspect.cleandoc(part.__doc__ or ""), flags=re.MULTILINE)[1:]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", "\n".join(sections), re.MULTILINE):
            found[name] = " ".join(text.split()).replace("None: ", "without it: ")  # TOML knows no None
    return found


def _in_words(schema: Mapping[str, Any]) -> str:
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
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
