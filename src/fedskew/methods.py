"""Named combinations of components, and what may be combined.

A method is one component for each of the five slots. In a config it is a preset, a table per slot, or both. A table
that
names a component replaces what the preset says of its slot; one without a name changes parameters of it.

    [method]
    preset = "fedentopt+fedprox"

    [method.local_step]
    mu = 0.1

    [method.weighting]
    name = "fedpals"
    ess = 0.25

A component of one's own is named `module:Class` wherever the name of one of ours may stand.

Presets are joined by "+". Each brings components of slots, a classification loss, or terms; what none brings is as in
FedAvg. Two that bring the same thing are refused, unless one of them says that its own gives way (`GIVES_WAY`): so
"fedlc+fedvls" is FedLC's loss with FedVLS's two terms, as in that paper's table 6.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedskew import about, local_steps, objectives, pipelines, selection, server_updates, weighting
from fedskew.about import Cost
from fedskew.errors import CombinationError, ConfigError, nearest
from fedskew.local_steps import LocalStep
from fedskew.naming import fill, name_of
from fedskew.objectives import Loss, Objective
from fedskew.pipelines import FedConcat
from fedskew.selection import Selection
from fedskew.server_updates import ServerUpdate
from fedskew.weighting import Weighting

Table = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One component for each slot; and a pipeline, where its rounds are not all alike."""

    selection: Selection
    objective: Objective
    local_step: LocalStep
    weighting: Weighting
    server_update: ServerUpdate
    pipeline: FedConcat | None = None


SLOTS: dict[str, Mapping[str, type]] = {
    "selection": selection.INDEX,
    "objective": objectives.INDEX,
    "local_step": local_steps.INDEX,
    "weighting": weighting.INDEX,
    "server_update": server_updates.INDEX,
}

PLACES: dict[str, Mapping[str, type]] = {**SLOTS, "pipeline": pipelines.INDEX}
"""Where a component may stand: the slots, and the pipeline, which most methods leave empty."""

DEFAULTS: dict[str, Table] = {
    "selection": {"name": "uniform"},
    "objective": {"name": "cross_entropy", "terms": []},
    "local_step": {"name": "sgd"},
    "weighting": {"name": "fedavg"},
    "server_update": {"name": "plain"},
}

PRESETS: dict[str, dict[str, Table]] = {
    "fedavg": {},
    "uniform": {"weighting": {"name": "uniform"}},
    "fedentopt": {"selection": {"name": "fedentopt"}},
    "seol_kim": {"selection": {"name": "seol_kim"}},
    "greedy_kl": {"selection": {"name": "greedy_kl"}},
    "fedrs": {"objective": {"name": "fedrs"}},
    "fedlc": {"objective": {"name": "fedlc"}},
    "fedvls": {
        "objective": {"name": "fedvls_calibration", "terms": [{"name": "vacant_distillation"}, {"name": "suppression"}]}
    },
    "fedntd": {"objective": {"terms": [{"name": "fedntd"}]}},
    "fedlmd": {"objective": {"terms": [{"name": "fedlmd"}]}},
    "fedkd": {"objective": {"terms": [{"name": "fedkd"}]}},
    "fedekd": {"objective": {"terms": [{"name": "fedekd"}]}},
    "feddkd": {"objective": {"terms": [{"name": "feddkd"}]}},
    "moon": {"objective": {"terms": [{"name": "moon"}]}},
    "fedmr": {"objective": {"terms": [{"name": "fedmr"}]}},
    "fpl": {"objective": {"terms": [{"name": "fpl"}]}},
    "fedprox": {"local_step": {"name": "fedprox"}},
    "scaffold": {"local_step": {"name": "scaffold"}, "weighting": {"name": "uniform"}},
    "fedsam": {"local_step": {"name": "fedsam"}},
    "fedgf": {"local_step": {"name": "fedgf"}},
    "fedla": {"weighting": {"name": "fedla"}},
    "fedpals": {"weighting": {"name": "fedpals"}},
    "afl": {"weighting": {"name": "afl"}},
    "fednova": {"server_update": {"name": "fednova"}},
    "fedexp": {"server_update": {"name": "fedexp"}},
    "fedconcat": {"pipeline": {"name": "fedconcat"}},
}

GIVES_WAY: dict[str, str] = {"fedvls": "objective", "scaffold": "weighting"}
"""Presets that are still themselves without the component of one slot (of the objective, the classification loss)."""

COMBINATIONS: tuple[str, ...] = (
    "fedentopt+fedprox",
    "fedentopt+fednova",
    "fedentopt+scaffold",
    "fedentopt+fedrs",
    "fedentopt+fedlc",
    "fedvls+fedexp",
    "fedvls+fedsam",
    "fedvls+fpl",
    "fedlc+fedvls",
    "fedpals+fedprox",
)
"""The papers' own."""

_DOES = {
    "selection": "select",
    "objective": "value",
    "local_step": "step",
    "weighting": "weigh",
    "server_update": "update",
    "pipeline": "divide",
}


def expand(tables: Mapping[str, Any]) -> dict[str, Table]:
    """The whole `[method]` of a config: every slot, every parameter, defaults included.

    Raises ConfigError for an unknown name or key, CombinationError for what makes no sense together.
    """
    for key in tables:
        if key != "preset" and key not in PLACES:
            raise ConfigError(f"method.{key}: no such slot{nearest(key, [*PLACES, 'preset'])}")
    named = _compose(str(tables.get("preset", "fedavg")))
    whole: dict[str, Table] = {}
    for slot in PLACES:
        table = DEFAULTS.get(slot, {}) | named.get(slot, {})
        if slot in tables:
            own = _own(tables[slot], f"method.{slot}", slot)
            table = own if "name" in own else table | own
        if slot in SLOTS or table:
            whole[slot] = _complete(slot, table)
    build(whole)
    return whole


def build(whole: Mapping[str, Table], momentum: float | None = None) -> Method:
    """The components of an expanded `[method]`, checked.

    `momentum`: that of the clients' SGD, for a server update that reckons with it (`local_momentum`); where a config
    gives another, that is an error.
    """
    filled = [slot for slot in PLACES if slot in SLOTS or slot in whole]
    components = {slot: fill(PLACES[slot], whole[slot], f"method.{slot}") for slot in filled if slot != "objective"}
    objective = whole["objective"]
    terms = [
        (float(term["weight"]), fill(SLOTS["objective"], _without(term, "weight"), f"method.objective.terms[{at}]"))
        for at, term in enumerate(objective["terms"])
    ]
    loss = fill(SLOTS["objective"], _without(objective, "terms"), "method.objective")
    if momentum is not None and hasattr(components["server_update"], "local_momentum"):
        components["server_update"] = _told(components["server_update"], momentum)
    method = Method(objective=Objective(loss, tuple(terms)), **components)
    check(method)
    return method


def check(method: Method) -> list[str]:
    """Whether its components make sense together: what conflicts, though it can be run, one line each.

    Raises CombinationError for what can't, with the reason and the nearest that can; ConfigError for a component
    that does
    not fit its slot. The rules: see `docs/combinations.md`.
    """
    _check_slots(method)
    _check_objective(method.objective)
    components = [(key_of(slot, component), component) for slot, component in _components(method)]
    keys = {key for key, _ in components}
    if method.pipeline is not None:
        _check_pipeline(method.pipeline, components)
    for key, component in components:
        for other, reason in about.refuses(component).items():
            if other in keys:
                raise CombinationError(f"method.{key.split('.')[0]}: {_short(key)} doesn't go with {other}: {reason}")
    return [
        f"{_short(key)} with {_short(other)}: {reason}"
        for key, component in components
        for other, reason in about.warns(component).items()
        if other in keys
    ]


def cost(method: Method) -> Cost:
    """What the method costs beyond FedAvg."""
    return about.cost(*(component for _, component in _components(method)))


def exceptions(says: Callable[[Any], Mapping[str, str]]) -> dict[tuple[str, str], str]:
    """Pairs of components, as `slot.name`, and why; `says`: `about.refuses` or `about.warns`."""
    kinds = {f"{slot}.{name}": kind for slot, index in PLACES.items() for name, kind in index.items()}
    return {
        (key, other): reason for key, kind in kinds.items() for other, reason in says(kind).items() if other in kinds
    }


def key_of(slot: str, component: Any) -> str:
    """`slot.name` of a component; a class of one's own that inherits from one of ours goes by that one's name."""
    names = {kind: name for name, kind in PLACES[slot].items()}
    own = f"{type(component).__module__}:{type(component).__qualname__}"
    return f"{slot}.{next((names[kind] for kind in type(component).__mro__ if kind in names), own)}"


def _compose(name: str) -> dict[str, Table]:
    """The slots that presets joined by "+" fill."""
    parts = [piece.strip() for piece in name.split("+")]
    for part in parts:
        if part not in PRESETS:
            raise ConfigError(f"method.preset: unknown name {part!r}{nearest(part.lower(), PRESETS)}")
        if parts.count(part) > 1:
            raise CombinationError(f"method.preset: {part!r} twice; once is enough")
    brings = {part: _brings(PRESETS[part]) for part in parts}
    whole: dict[str, Table] = {}
    for thing in dict.fromkeys(thing for part in parts for thing in brings[part]):
        table = brings[_whose(thing, brings)][thing]
        slot, _, term = thing.partition(".")
        if term:
            whole.setdefault(slot, {}).setdefault("terms", []).append(table)
        else:
            whole[slot] = table | whole.get(slot, {})
    return whole


def _brings(preset: Mapping[str, Table]) -> dict[str, Table]:
    """What a preset brings: components by slot (of the objective, its classification loss), terms as
    `objective.name`."""
    things: dict[str, Table] = {}
    for slot, table in preset.items():
        if "name" in table:
            things[slot] = _without(table, "terms")
        for term in table.get("terms", []):
            things[f"{slot}.{term['name']}"] = term
    return things


def _whose(thing: str, brings: Mapping[str, Mapping[str, Table]]) -> str:
    """The preset that has what one or several bring: the only one, or the only one that does not give way."""
    claims = [part for part in brings if thing in brings[part]]
    firm = [part for part in claims if GIVES_WAY.get(part) != thing] or claims
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
    ways = ["+".join(part for part in brings if part != left) for left in (second, first)]
    raise CombinationError(f"method.preset: {first!r} and {second!r} {reason}; take {ways[0]!r} or {ways[1]!r}")


def _own(table: Any, where: str, slot: str) -> Table:
    """A slot's table (or a term's) as written by a user: a table, a bare name, or (from Python) a component."""
    if isinstance(table, str):
        return {"name": table}
    if isinstance(table, Mapping):
        return dict(table)
    if isinstance(table, Objective):
        terms = [{"weight": weight, **_own(term, where, slot)} for weight, term in table.terms]
        return {**_own(table.loss, where, slot), "terms": terms}
    if dataclasses.is_dataclass(table) and not isinstance(table, type):
        known = {kind: name for name, kind in PLACES[slot].items()}
        name = known.get(type(table)) or name_of(type(table), where)
        return {"name": name, **{field.name: getattr(table, field.name) for field in dataclasses.fields(table)}}
    raise ConfigError(f"{where}: expected a table, a name or a component, got {table!r}")


def _complete(slot: str, table: Table) -> Table:
    """The table with every parameter of its component, defaults included (those that are None left out)."""
    if slot != "objective":
        return _whole(table, slot, f"method.{slot}")[0]
    terms = []
    entries = table.get("terms", [])
    if isinstance(entries, str | Mapping) or not hasattr(entries, "__iter__"):
        raise ConfigError(f"method.objective.terms: expected a list of tables with name and weight, got {entries!r}")
    for at, entry in enumerate(entries):
        where = f"method.objective.terms[{at}]"
        own = _own(entry, where, slot)
        term, component = _whole(_without(own, "weight"), slot, where)
        terms.append({"weight": _weight(own.get("weight", about.default_weight(component)), where), **term})
    return {**_whole(_without(table, "terms"), slot, "method.objective")[0], "terms": terms}


def _whole(table: Table, slot: str, where: str) -> tuple[Table, Any]:
    component = fill(PLACES[slot], table, where)
    values = {key: value for key, value in dataclasses.asdict(component).items() if value is not None}
    return {"name": table["name"], **values}, component


def _weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where}.weight: expected a finite number, 0 or above, got {value!r}")
    return float(value)


def _told(update: Any, momentum: float) -> Any:
    """The server update with the momentum of the clients' SGD."""
    if update.local_momentum not in (None, momentum):
        raise ConfigError(
            f"method.server_update.local_momentum: {update.local_momentum} isn't the clients' momentum, which is "
            f"{momentum} (training.momentum); leave it out, and it always is"
        )
    return dataclasses.replace(update, local_momentum=momentum)


def _components(method: Method) -> list[tuple[str, Any]]:
    """Every component with its slot; the objective as its loss and its terms."""
    losses: list[Loss] = [method.objective.loss, *(term for _, term in method.objective.terms)]
    others = [
        (slot, getattr(method, slot)) for slot in PLACES if slot != "objective" and getattr(method, slot) is not None
    ]
    return [*others, *(("objective", loss) for loss in losses)]


def _check_slots(method: Method) -> None:
    for slot, component in _components(method):
        if not hasattr(component, _DOES[slot]):
            fits = next((f"; it goes into {other}" for other, does in _DOES.items() if hasattr(component, does)), "")
            raise ConfigError(
                f"method.{slot}: {type(component).__name__} has no {_DOES[slot]}(), so it can't fill this slot{fits}"
            )


def _check_objective(objective: Objective) -> None:
    """One classification loss; terms that are terms, each once."""
    loss = _name(objective.loss)
    if _role(objective.loss) == "term":
        weight = about.default_weight(objective.loss)
        raise CombinationError(
            f"method.objective.name: {loss!r} is a term, not a classification loss: it doesn't tell a sample's class; "
            f'take name = "cross_entropy" with terms = [{{ name = "{loss}", weight = {weight:g} }}]'
        )
    seen: set[type] = set()
    for at, (_, term) in enumerate(objective.terms):
        name, where = _name(term), f"method.objective.terms[{at}].name"
        if _role(term) == "classification":
            raise CombinationError(
                f"{where}: {name!r} is a second classification loss beside {loss!r}, and an objective has one; take "
                f"either as its name, with terms such as {_terms()}"
            )
        if type(term) in seen:
            raise CombinationError(f"{where}: {name!r} stands there twice; take it once, with the sum of the weights")
        seen.add(type(term))


def _check_pipeline(pipeline: FedConcat, components: list[tuple[str, Any]]) -> None:
    for key, component in components:
        if reason := pipeline.clash(key.partition(".")[0], component):
            name = _short(key_of("pipeline", pipeline))
            raise CombinationError(f"method.pipeline: {name} doesn't go with {key}: {reason}")


def _role(loss: Any) -> str:
    role = getattr(loss, "role", None)
    if role not in ("classification", "term"):
        raise ConfigError(
            f"method.objective: {type(loss).__name__}.role must be 'classification' or 'term', not {role!r}"
        )
    return str(role)


def _name(loss: Any) -> str:
    return _short(key_of("objective", loss))


def _short(key: str) -> str:
    return key.partition(".")[2]


def _terms() -> str:
    return ", ".join(name for name, kind in SLOTS["objective"].items() if getattr(kind, "role", "") == "term")


def _without(table: Table, key: str) -> Table:
    return {other: value for other, value in table.items() if other != key}
