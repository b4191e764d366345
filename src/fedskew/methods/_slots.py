"""The slots of a method, what may fill them, the method itself, and named methods.

Every component in an index is a preset under its own name, except its slot's default, components that need parameters,
and parts of a bundle. Bundles, which fill more than one slot or have another name than their parts, are written in
`presets.toml`; names joined by "+" compose.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedskew import aggregation, finish, local_steps, objectives, personal, selection, server_updates, weighting
from fedskew.aggregation import Aggregation, Mean
from fedskew.errors import CombinationError, ConfigError, nearest
from fedskew.finish import Finish
from fedskew.local_steps import LocalStep
from fedskew.objectives import Objective
from fedskew.personal import Personal
from fedskew.pipelines import INDEX as PIPELINES
from fedskew.pipelines import FedConcat
from fedskew.selection import Selection
from fedskew.server_updates import ServerUpdate
from fedskew.weighting import Weighting

Table = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One component for each slot.

    Attributes:
        objective: What a client minimises: a classification loss and weighted terms.
        pipeline: Set where the rounds are not all alike.
        finish: What happens once after the last round; mostly nothing.
        personal: What a client does with the common model for itself; mostly nothing.
    """

    selection: Selection
    objective: Objective
    local_step: LocalStep
    weighting: Weighting
    server_update: ServerUpdate
    aggregation: Aggregation = field(default_factory=Mean)
    pipeline: FedConcat | None = None
    finish: Finish | None = None
    personal: Personal | None = None

    def components(self) -> list[tuple[str, Any]]:
        """Return every component with its slot; the objective as its loss and its terms."""
        others = [(slot, part) for slot in PLACES if slot != "objective" and (part := getattr(self, slot)) is not None]
        return [*others, *(("objective", loss) for loss in self.objective.losses)]


SLOTS: dict[str, Mapping[str, type]] = {
    "selection": selection.INDEX,
    "objective": objectives.INDEX,
    "local_step": local_steps.INDEX,
    "weighting": weighting.INDEX,
    "aggregation": aggregation.INDEX,
    "server_update": server_updates.INDEX,
}
"""The components of each slot of a round by name."""

PLACES: dict[str, Mapping[str, type]] = {
    **SLOTS,
    "finish": finish.INDEX,
    "personal": personal.INDEX,
    "pipeline": PIPELINES,
}
"""Where a component may stand: the slots of a round, and others, which most methods leave empty."""

DEFAULTS: dict[str, Table] = {
    "selection": {"name": "uniform"},
    "objective": {"name": "cross_entropy", "terms": []},
    "local_step": {"name": "sgd"},
    "weighting": {"name": "fedavg"},
    "aggregation": {"name": "mean"},
    "server_update": {"name": "plain"},
}
"""The components of slots that a config does not name: FedAvg's."""


def key_of(slot: str, component: Any) -> str:
    """Return the `slot.name` of a component; a user's class that inherits from one of ours has the name of ours."""
    for kind in type(component).__mro__:
        for name, known in PLACES[slot].items():
            if known is kind:
                return f"{slot}.{name}"
    return f"{slot}.{type(component).__module__}:{type(component).__qualname__}"


def named(slot: str, component: Any) -> str:
    """Return a component's name in a config, without its slot."""
    return key_of(slot, component).partition(".")[2]


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
    """Return the slots that presets joined by "+" fill; CombinationError where two bring the same thing, and neither
    gives way."""
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
