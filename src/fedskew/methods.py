"""Named combinations of fillers, and what may be combined.

A method is one filler for each of the five slots. In a config it is a preset, a table per slot, or both: a table
replaces what the preset says of its slot.

    [method]
    preset = "fedentopt+fedprox"

    [method.weighting]
    name = "fedpals"
    ess = 0.25

A filler of one's own is named `module:Class` wherever the name of one of ours may stand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedskew import local_steps, objectives, selection, server_updates, weighting
from fedskew.errors import CombinationError, ConfigError, nearest
from fedskew.local_steps import LocalStep
from fedskew.naming import fill, name_of
from fedskew.objectives import Loss, Objective
from fedskew.selection import Selection
from fedskew.server_updates import ServerUpdate
from fedskew.weighting import Weighting

Table = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One filler for each slot."""

    selection: Selection
    objective: Objective
    local_step: LocalStep
    weighting: Weighting
    server_update: ServerUpdate


SLOTS: dict[str, Mapping[str, type]] = {
    "selection": selection.INDEX,
    "objective": objectives.INDEX,
    "local_step": local_steps.INDEX,
    "weighting": weighting.INDEX,
    "server_update": server_updates.INDEX,
}

DEFAULTS: dict[str, Table] = {
    "selection": {"name": "uniform"},
    "objective": {"name": "cross_entropy", "terms": []},
    "local_step": {"name": "sgd"},
    "weighting": {"name": "fedavg"},
    "server_update": {"name": "plain"},
}

_VLS_TERMS = [{"name": "vacant_distillation", "weight": 0.1}, {"name": "suppression", "weight": 0.005}]

PRESETS: dict[str, dict[str, Table]] = {
    "fedavg": {},
    "uniform": {"weighting": {"name": "uniform"}},
    "fedentopt": {"selection": {"name": "fedentopt"}},
    "fedlc": {"objective": {"name": "fedlc"}},
    "fedvls": {"objective": {"name": "fedvls_calibration", "terms": _VLS_TERMS}},
    "fedlc+fedvls": {"objective": {"name": "fedlc", "terms": _VLS_TERMS}},
    "fedprox": {"local_step": {"name": "fedprox"}},
    "fedla": {"weighting": {"name": "fedla"}},
    "fedpals": {"weighting": {"name": "fedpals"}},
}


def expand(tables: Mapping[str, Any]) -> dict[str, Table]:
    """The whole `[method]` of a config: every slot, every parameter, defaults included.

    Raises ConfigError for an unknown name or key, CombinationError where two presets claim one slot.
    """
    for key in tables:
        if key != "preset" and key not in SLOTS:
            raise ConfigError(f"method.{key}: no such slot{nearest(key, [*SLOTS, 'preset'])}")
    whole = {slot: dict(table) for slot, table in DEFAULTS.items()}
    for slot, table in _preset(str(tables.get("preset", "fedavg"))).items():
        whole[slot] |= table
    for slot in SLOTS:
        if slot in tables:
            whole[slot] = _own(tables[slot], slot)
    return {slot: _complete(slot, table) for slot, table in whole.items()}


def build(whole: Mapping[str, Table]) -> Method:
    """The fillers of an expanded `[method]`."""
    fillers = {slot: fill(SLOTS[slot], whole[slot], f"method.{slot}") for slot in SLOTS if slot != "objective"}
    return Method(objective=_objective(whole["objective"]), **fillers)


def _preset(name: str) -> dict[str, Table]:
    if name in PRESETS:
        return PRESETS[name]
    whole: dict[str, Table] = {}
    owner: dict[str, str] = {}
    for part in (piece.strip() for piece in name.split("+")):
        if part not in PRESETS:
            raise ConfigError(f"method.preset: unknown name {part!r}{nearest(part, PRESETS)}")
        for slot, table in PRESETS[part].items():
            if slot in owner:
                raise CombinationError(
                    f"method.preset: {owner[slot]!r} and {part!r} both fill the {slot} slot, which holds one; "
                    f"keep one of them, or write [method.{slot}] yourself"
                )
            owner[slot] = part
            whole[slot] = table
    return whole


def _own(table: Any, slot: str) -> Table:
    """A slot's table as written by a user: a table, a bare name, or (from Python) a filler."""
    if isinstance(table, str):
        return {"name": table}
    if isinstance(table, Mapping):
        return dict(table)
    if isinstance(table, Objective):
        terms = [{"weight": weight, **_own(term, slot)} for weight, term in table.terms]
        return {**_own(table.loss, slot), "terms": terms}
    if dataclasses.is_dataclass(table) and not isinstance(table, type):
        known = {kind: name for name, kind in SLOTS[slot].items()}
        name = known.get(type(table)) or name_of(type(table), f"method.{slot}")
        return {"name": name, **dataclasses.asdict(table)}
    raise ConfigError(f"method.{slot}: expected a table, a name or a filler, got {table!r}")


def _complete(slot: str, table: Table) -> Table:
    """The table with every parameter of its filler, defaults included (those that are None left out)."""
    if slot == "objective":
        terms = [
            {"weight": float(term.get("weight", 1.0)), **_whole(term, f"method.objective.terms[{at}]", ("weight",))}
            for at, term in enumerate(table.get("terms", []))
        ]
        whole = {**_whole(table, "method.objective", ("terms",)), "terms": terms}
        _objective(whole)
        return whole
    return _whole(table, f"method.{slot}", ())


def _whole(table: Table, where: str, besides: tuple[str, ...]) -> Table:
    slot = where.split(".")[1]
    own = {key: value for key, value in table.items() if key not in besides}
    filler = fill(SLOTS[slot], own, where)
    values = {key: value for key, value in dataclasses.asdict(filler).items() if value is not None}
    return {"name": own["name"], **values}


def _objective(table: Table) -> Objective:
    loss = fill(SLOTS["objective"], {key: value for key, value in table.items() if key != "terms"}, "method.objective")
    if loss.role != "classification":
        raise CombinationError(
            f"method.objective.name: {table['name']!r} is a term, not a classification loss; "
            f"put it under terms, beside {_names('classification')}"
        )
    terms: list[tuple[float, Loss]] = []
    for at, entry in enumerate(table.get("terms", [])):
        where = f"method.objective.terms[{at}]"
        term = fill(SLOTS["objective"], {key: value for key, value in entry.items() if key != "weight"}, where)
        if term.role != "term":
            raise CombinationError(
                f"{where}.name: {entry['name']!r} is a second classification loss beside {table['name']!r}, and an "
                f"objective has one; terms that go with it: {_names('term')}"
            )
        terms.append((float(entry.get("weight", 1.0)), term))
    return Objective(loss, tuple(terms))


def _names(role: str) -> str:
    losses: Mapping[str, type[Loss]] = objectives.INDEX
    return ", ".join(sorted(name for name, kind in losses.items() if kind.role == role))
