"""Named methods, and how names joined by "+" compose.

Every component in an index is a preset under its own name, except its slot's default, components that need parameters,
and parts of a bundle. Bundles, which fill more than one slot or have another name than their parts, are written in
`presets.toml`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedskew.errors import CombinationError, ConfigError, nearest
from fedskew.methods._slots import DEFAULTS, PLACES, Table

_WRITTEN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))

COMBINATIONS: tuple[str, ...] = tuple(_WRITTEN["combinations"])
"""The combinations that the papers themselves try."""


def _of_components() -> dict[str, dict[str, Table]]:
    """Return a preset for each component that makes one by itself."""
    in_bundles = {thing["name"] for bundle in _WRITTEN["bundles"].values() for thing in brings(bundle).values()}
    presets: dict[str, dict[str, Table]] = {}
    for slot, index in PLACES.items():
        for name, kind in index.items():
            is_default = name == DEFAULTS.get(slot, {}).get("name")
            is_part = slot == "objective" and name in in_bundles
            if is_default or is_part or name in _WRITTEN["bundles"] or _requires_parameters(kind):
                continue
            if name in presets:
                raise ValueError(f"{slot}.{name}: another slot has a preset of this name; choose another name")
            is_term = getattr(kind, "role", "") == "term"
            presets[name] = {slot: {"terms": [{"name": name}]} if is_term else {"name": name}}
    return presets


def _requires_parameters(kind: type) -> bool:
    missing = dataclasses.MISSING
    return any(field.default is missing and field.default_factory is missing for field in dataclasses.fields(kind))


def brings(preset: Mapping[str, Table]) -> dict[str, Table]:
    """Return tables by what a preset fills: a slot (of the objective: its loss), or a term as `objective.name`."""
    things: dict[str, Table] = {}
    for slot, table in preset.items():
        if "name" in table:
            things[slot] = {key: value for key, value in table.items() if key != "terms"}
        for term in table.get("terms", []):
            things[f"{slot}.{term['name']}"] = term
    return things


PRESETS: dict[str, dict[str, Table]] = _WRITTEN["bundles"] | _of_components()
"""Named methods: the tables by which each differs from FedAvg."""


def compose(name: str) -> dict[str, Table]:
    """Return the slots that presets joined by "+" fill.

    Raises:
        CombinationError: Two presets bring the same thing, and neither gives way.
    """
    parts = [piece.strip() for piece in name.split("+")]
    for part in parts:
        if ":" in part:
            raise ConfigError(
                f"method.preset: {part!r} is a class, and presets have plain names; give it to the slot that it fills, "
                f"such as --set method.weighting.name={part}"
            )
        if part not in PRESETS:
            raise ConfigError(f"method.preset: unknown name {part!r}{nearest(part.lower(), PRESETS)}")
        if parts.count(part) > 1:
            raise CombinationError(f"method.preset: {part!r} occurs twice; give it once")
    brought = {part: brings(PRESETS[part]) for part in parts}
    whole: dict[str, Table] = {}
    for thing in dict.fromkeys(thing for part in parts for thing in brought[part]):
        table = brought[_winner(thing, brought)][thing]
        slot, _, term = thing.partition(".")
        if term:
            whole.setdefault(slot, {}).setdefault("terms", []).append(table)
        else:
            whole[slot] = table | whole.get(slot, {})
    return whole


def _winner(thing: str, brought: Mapping[str, Mapping[str, Table]]) -> str:
    """Return the preset whose component fills a place: the only one that doesn't give way, or the first if all do."""
    claims = [part for part in brought if thing in brought[part]]
    firm = [part for part in claims if _WRITTEN["gives_way"].get(part) != thing] or claims[:1]
    if len(firm) == 1:
        return firm[0]
    first, second = firm[:2]
    slot, _, term = thing.partition(".")
    if term:
        reason = f"both bring the term {term!r}, which counts once"
    elif slot == "objective":
        reason = "both bring a classification loss, and an objective has one (with any terms)"
    else:
        reason = f"both fill the {slot} slot, which holds one"
    ways = ["+".join(part for part in brought if part != left) for left in (second, first)]
    raise CombinationError(f"method.preset: {first!r} and {second!r} {reason}; take {ways[0]!r} or {ways[1]!r}")
