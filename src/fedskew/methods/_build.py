"""From the `[method]` of a config to a method, and back to tables with every default filled in."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fedskew.components import default_weight, filled, find, make_component, name_of
from fedskew.errors import ConfigError, nearest, placed
from fedskew.methods._compatibility import check, check_functions, fills
from fedskew.methods._slots import DEFAULTS, PLACES, SLOTS, Method, Table, compose
from fedskew.objectives import Objective

TERM_LISTS = ("terms", "extra_terms")
_KEYS = (*PLACES, "preset", *(f"objective.{name}" for name in TERM_LISTS))


def expand(tables: Mapping[str, Any]) -> dict[str, Table]:
    """Complete the `[method]` of a config: every slot, every parameter, defaults included.

    Args:
        tables: `preset`, and a table, a name or (from Python) a component by slot. A table with a name replaces what
            the preset brings for its slot; one without a name changes parameters of it. The objective's `extra_terms`
            are added to its terms.

    Returns:
        A table for each slot, and for the pipeline where there is one; the objective's `terms` are all of them.
    """
    for key in tables:
        if key != "preset" and key not in PLACES:
            raise ConfigError(f"method.{key}: no such slot{nearest(key, _KEYS)}")
    named = compose(str(tables.get("preset", "fedavg")))
    whole: dict[str, Table] = {}
    for slot in PLACES:
        table = DEFAULTS.get(slot, {}) | named.get(slot, {})
        if slot in tables:
            own = _as_table(tables[slot], f"method.{slot}", slot)
            if slot == "objective":
                _check_dropped(str(tables.get("preset", "fedavg")), table, own)
            table = own if "name" in own else table | own
        if slot in SLOTS or table:
            whole[slot] = _complete(slot, table)
    build(whole)
    return whole


def build(whole: Mapping[str, Table], momentum: float | None = None) -> Method:
    """Build and check the method of an expanded `[method]`.

    Args:
        momentum: The momentum of the clients' SGD, for a server update that depends on it (`local_momentum`).
    """
    used = [slot for slot in PLACES if slot in SLOTS or slot in whole]
    made = {slot: make_component(PLACES[slot], whole[slot], f"method.{slot}") for slot in used if slot != "objective"}
    index, objective = SLOTS["objective"], whole["objective"]
    terms = [
        (float(term["weight"]), make_component(index, _without(term, "weight"), f"method.objective.terms[{at}]"))
        for at, term in enumerate(objective["terms"])
    ]
    loss = make_component(index, _without(objective, "terms"), "method.objective")
    if momentum is not None:
        with placed("method.server_update."):
            known = "the clients' momentum (training.momentum)"
            made["server_update"] = filled(made["server_update"], "local_momentum", momentum, known)
    method = Method(objective=Objective(loss, tuple(terms)), **made)
    check(method)
    check_functions(method)
    return method


def objective_in_words(whole: Mapping[str, Table], several: bool = False) -> str:
    """Describe what a client minimises in one line: `fedlc(tau=0.5) + 0.1 vacant_distillation + 0.005 suppression`.

    With `several` a sample may have several labels (see `for_findings`).
    """
    objective = whole["objective"]
    terms = [f"{term['weight']:g} {_in_words(_without(term, 'weight'))}" for term in objective["terms"]]
    loss = _in_words(_without(objective, "terms")) + (" (a sigmoid for each label)" if several else "")
    return " + ".join([loss, *terms])


def _in_words(table: Table) -> str:
    """Return a loss by its name, with the parameters that are not at their default."""
    kind: Any = find(SLOTS["objective"], table["name"], "method.objective.name")
    usual = {field.name: field.default for field in dataclasses.fields(kind)}
    own = [f"{key}={value}" for key, value in table.items() if key != "name" and value != usual.get(key)]
    return f"{table['name']}({', '.join(own)})" if own else str(table["name"])


def _as_table(value: Any, where: str, slot: str) -> Table:
    """Return a slot's table (or a term's) as a user gave it: a table, a name, or (from Python) a component."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping):
        name = value.get("name")
        return {**value, "name": _name(name, f"{where}.name", slot)} if isinstance(name, type) else dict(value)
    if isinstance(value, Objective):
        terms = [{"weight": weight, **_as_table(term, where, slot)} for weight, term in value.terms]
        return {**_as_table(value.loss, where, slot), "terms": terms}
    if isinstance(value, type):  # a class stands for a component with its defaults
        return {"name": _name(value, where, slot)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"name": _name(type(value), where, slot), **fields}
    if fills(slot, value):
        name = type(value).__name__
        raise ConfigError(f"{where}: {name} is no component; write @dataclass(frozen=True) above class {name}")
    raise ConfigError(f"{where}: expected a table, a name or a component, got {value!r}")


def _name(kind: type, where: str, slot: str) -> str:
    known = {known: name for name, known in PLACES[slot].items()}
    return known.get(kind) or name_of(kind, where)


def _complete(slot: str, table: Table) -> Table:
    """Complete a component's table with the defaults of its parameters, except defaults that are None."""
    if slot != "objective":
        return _with_defaults(table, slot, f"method.{slot}")[0]
    terms = [
        _complete_term(entry, f"method.objective.{key}[{at}]")
        for key in TERM_LISTS
        for at, entry in enumerate(_entries(table, key))
    ]
    return {**_with_defaults(_without(table, *TERM_LISTS), slot, "method.objective")[0], "terms": terms}


def _entries(table: Table, key: str) -> list[Any]:
    entries = table.get(key, [])
    if isinstance(entries, str | Mapping) or not hasattr(entries, "__iter__"):
        raise ConfigError(f"method.objective.{key}: expected a list of tables with name and weight, got {entries!r}")
    return list(entries)


def _complete_term(entry: Any, where: str) -> Table:
    own = _as_table(entry, where, "objective")
    term, component = _with_defaults(_without(own, "weight"), "objective", where)
    weight = own.get("weight", default_weight(component))
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"{where}.weight: expected a finite number, 0 or above, got {weight!r}")
    return {"weight": float(weight), **term}


def _check_dropped(preset: str, brought: Table, own: Table) -> None:
    """Raise ConfigError if a user's own terms would silently replace those of a preset."""
    # A table with a name replaces the whole objective openly, and so does an empty list of terms; both are allowed.
    names = [term["name"] for term in brought.get("terms", [])]
    if not names:
        return
    if "name" in own and "extra_terms" in own:
        raise ConfigError(
            f"method.objective.extra_terms: these are added to the terms of {preset} ({', '.join(names)}), which "
            f"name = {own['name']!r} replaces; list all of them as terms"
        )
    if "name" in own or not (given := _entries(own, "terms")):
        return
    tables = [_as_table(term, f"method.objective.terms[{at}]", "objective") for at, term in enumerate(given)]
    dropped = [name for name in names if name not in [table.get("name") for table in tables]]
    if dropped:
        raise ConfigError(
            f"method.objective.terms: these would take the place of {', '.join(dropped)}, which {preset} brings; add "
            f"your own as extra_terms, or give name = {brought.get('name', DEFAULTS['objective']['name'])!r} too to "
            "replace them"
        )


def _with_defaults(table: Table, slot: str, where: str) -> tuple[Table, Any]:
    component = make_component(PLACES[slot], table, where)
    values = {key: value for key, value in dataclasses.asdict(component).items() if value is not None}
    return {"name": table["name"], **values}, component


def _without(table: Table, *keys: str) -> Table:
    return {other: value for other, value in table.items() if other not in keys}
