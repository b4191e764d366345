"""Every key that a config may hold, read from the code: for `fedskew list`, the docs, new configs and editors."""

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from fedskew import data, methods, models, partition
from fedskew.experiment import TRACKERS, Config
from fedskew.trees import on_one_line

_NOT_SET = ("root", "rng", "encoder", "num_classes", "in_shape", "self", "return")
"""Parameters of readers and networks that are no keys of their table."""

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class Key(NamedTuple):
    """A key of a table: the values that it may have in words; its default, as TOML too (empty if none); its meaning."""

    name: str
    required: bool
    kind: str
    default: Any
    value: str
    meaning: str


@dataclass(frozen=True)
class Entry:
    """A table of a config, or a name that a key may have: its summary in one sentence, and its own keys."""

    name: str
    summary: str
    schema: dict[str, Any]

    @property
    def keys(self) -> tuple[Key, ...]:
        """Its keys."""
        required = self.schema.get("required", ())
        keys = []
        for name, own in self.schema.get("properties", {}).items():
            default = own.get("default")
            value = "" if default is None else on_one_line(default)
            keys.append(Key(name, name in required, _in_words(own), default, value, own.get("description", "")))
        return tuple(keys)


class _Plain(GenerateJsonSchema):
    """Pydantic's JSON schema without titles, and without a word on types that JSON has not."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {}


def _config() -> dict[str, Any]:
    """Return a config's own schema, each description on one line: of a table its first paragraph."""
    whole = Config.model_json_schema(by_alias=True, schema_generator=_Plain)
    for section in (whole, *whole["$defs"].values()):
        section["description"] = " ".join(section.get("description", "").split("\n\n")[0].split())
        for own in section.get("properties", {}).values():
            if "description" in own:
                own["description"] = " ".join(own["description"].split())
    return whole


@cache
def tables() -> tuple[Entry, ...]:
    """Return the tables of a config, in order; the first, without a name, are the keys at its top."""
    whole = _config()
    found, top = [], {}
    for name, own in whole["properties"].items():
        table = _definition(whole, name)
        if table or name == "method":
            found.append(Entry(name, (table or own)["description"], table))
        else:
            top[name] = own
    return (Entry("", whole["description"], whole | {"properties": top}), *found)


@cache
def choices() -> Mapping[str, tuple[Entry, ...]]:
    """Return the names that a key of a config takes, by that key: `data.name`, `partition.rule` and so on."""
    keyed: dict[str, Mapping[str, Any]] = {
        "data.name": data.INDEX,
        "partition.rule": partition.INDEX,
        "model.name": models.INDEX,
        "training.augmentation": data.AUGMENTATIONS,
        "output.trackers": TRACKERS,
        **{f"method.{slot}.name": index for slot, index in methods.PLACES.items()},
    }
    plain = ("training.augmentation", "output.trackers")  # which have no keys of their own
    return {
        place: tuple(
            Entry(name, _summary(kind), {} if place in plain else _own_keys(kind)) for name, kind in index.items()
        )
        for place, index in keyed.items()
    }


def json_schema() -> dict[str, Any]:
    """Return the schema of a config or sweep as JSON schema, with which editors complete and check TOML files."""
    whole = _config()
    for table, key in (("data", "name"), ("partition", "rule"), ("model", "name")):
        _offer(_definition(whole, table), key, choices()[f"{table}.{key}"])
    slots = {}
    for slot in methods.PLACES:
        table_of_slot: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
        filled = _offer(table_of_slot, "name", choices()[f"method.{slot}.name"])
        slots[slot] = {"anyOf": [{"type": "string"}, filled]}
    presets = {"type": "string", "examples": list(methods.PRESETS)}
    whole["properties"] |= {
        "method": {
            "description": whole["properties"]["method"]["description"],
            "anyOf": [presets, {"type": "object", "properties": {"preset": presets, **slots}}],
        },
        "sweep": {"type": "object", "description": "Methods and a grid of keys, each with each: `fedskew sweep`."},
        "quick": {"type": "object", "description": "Dotted keys that --quick applies."},
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fedskew config", **whole}


def _definition(whole: dict[str, Any], table: str) -> dict[str, Any]:
    """Return the schema of a table; an empty one where the key is none."""
    place = whole["properties"][table]
    reference = next((kind["$ref"] for kind in (place, *place.get("anyOf", [])) if "$ref" in kind), "")
    found: dict[str, Any] = whole["$defs"].get(reference.removeprefix("#/$defs/"), {})
    return found


def _offer(table: dict[str, Any], key: str, entries: Iterable[Entry]) -> dict[str, Any]:
    """Add to a table's schema the known names of a key, and the keys that go with each name."""
    names = [entry.name for entry in entries] + (["file"] if key == "rule" else [])
    table["properties"][key] = {**table["properties"][key], "anyOf": [{"enum": names}, {"pattern": ":"}]}
    table["allOf"] = [
        {
            "if": {"properties": {key: {"const": entry.name}}, "required": [key]},
            "then": {"properties": entry.schema["properties"], "required": entry.schema.get("required", [])},
        }
        for entry in entries
        if entry.keys
    ]
    return table


def _own_keys(kind: Any) -> dict[str, Any]:
    """Return the schema of a component's fields, or of the parameters of a function or class."""
    meanings = _meanings(kind)
    if not dataclasses.is_dataclass(kind):
        function = inspect.getattr_static(kind, "__init__") if isinstance(kind, type) else kind
        hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
        fields: list[Any] = [
            (name, hints[name]) if own.default is own.empty else (name, hints[name], own.default)
            for name, own in parameters.items()
            if name not in _NOT_SET and name in hints
        ]
        kind = dataclasses.make_dataclass("Keys", fields, kw_only=True)
    whole = pydantic.TypeAdapter(kind).json_schema(schema_generator=_Plain)
    for name, own in whole["properties"].items():
        own["description"] = meanings.get(name, "")
    return whole


def _summary(kind: Any) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


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
        return " or ".join(
            dict.fromkeys(_in_words(kind) for kind in schema["anyOf"] if kind and kind.get("type") != "null")
        )
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
