"""The catalogue of methods, as JSON and as text, made from the components' own declarations and docstrings."""

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any

import tomli_w
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from fedskew import components
from fedskew.components import Cost
from fedskew.errors import ConfigError, nearest
from fedskew.methods import PLACES, PRESETS, SLOTS, build, check, cost, expand, objective_in_words
from fedskew.methods._compatibility import Verdict, exceptions
from fedskew.methods._slots import COMBINATIONS, brings, compose
from fedskew.tables import filled

QUESTIONS = {
    "selection": "who trains this round",
    "objective": "what a client minimises, one loss and any terms (marked +)",
    "local_step": "how a client steps",
    "weighting": "how much each update counts",
    "aggregation": "how the weighted updates become one change",
    "server_update": "how that change moves the model",
    "finish": "what happens once after the last round (mostly nothing)",
    "personal": "what a client does with the common model for itself (mostly nothing)",
    "pipeline": "how rounds follow each other, where they are not all alike (mostly none)",
}

COSTS = (
    "Costs are what is beyond FedAvg: passes of a batch in each local step; models and numbers that travel per client "
    "and round, or once (C: classes)."
)

Key = tuple[str, str]
"""A component by its slot and its name in that slot's index."""


def listing() -> dict[str, Any]:
    """Return all presets, combinations and components as plain values for JSON."""
    return {
        "presets": {name: _preset(name) for name in PRESETS},
        "combinations": {name: _preset(name) for name in COMBINATIONS},
        "components": [_facts(key) for key in _all()],
    }


def explanation(name: str) -> dict[str, Any]:
    """Return a preset, a combination, or the components of one name as plain values for JSON."""
    preset = _preset(name) if _is_preset(name) else None
    return {"name": name, "preset": preset, "components": [_facts(key) for key in _concerned(name)]}


def print_listing(console: Console) -> None:
    """Print tables of all presets and components."""
    _say(console, "Presets. [method] preset = NAME in a config; joined by + they compose.", before=0)
    _print_table(console, ("preset", "brings"), [(name, _summary(name)) for name in PRESETS])
    _say(console, f"The papers' own combinations: {', '.join(COMBINATIONS)}.")
    for slot, question in QUESTIONS.items():
        found = [_facts(key) for key in _all() if key[0] == slot]
        rows = [
            (
                f"+ {facts['name']}" if facts["role"] == "term" else facts["name"],
                ", ".join(_parameters(facts, "=").values()),
                facts["paper"],
                _cost_of(facts),
            )
            for facts in found
        ]
        _say(console, f"{slot}: {question}")
        _print_table(console, (slot, "parameters", "paper", "cost"), rows)
    _say(console, COSTS)
    _say(console, "Any component of one slot goes with any of the others, and any loss with any terms, except:")
    verdicts: tuple[tuple[Verdict, str], ...] = (("refuses", "is refused with"), ("warns", "conflicts with"))
    for verdict, verb in verdicts:
        pairs = exceptions(verdict)
        for one in dict.fromkeys(one for one, _ in pairs):
            others = {other: reason for (first, other), reason in pairs.items() if first == one}
            for reason, names in _by_reason(others).items():
                _say(console, f"{one} {verb} {', '.join(names)}: {reason}.", indent="  ", before=0)
    _say(console, "To explain one: fedskew methods NAME. For programs: --json.")


def print_page(console: Console, name: str) -> None:
    """Print the `page` of a name, rendered for the console."""
    console.print(Markdown(page(name), code_theme="bw"))


def page(name: str) -> str:
    """Explain a preset, a combination, or the components of one name in Markdown: `templates/page.md`, filled in."""
    concerned = [_facts(key) for key in _concerned(name)]
    method = build(expand({"preset": name})) if _is_preset(name) else None
    text = filled(
        "fedskew.methods",
        "page.md",
        {"by_reason": _by_reason, "cost_of": _cost_of, "parameters": _parameters},
        name=name,
        concerned=concerned,
        method=method,
        summary=method and _summary(name),
        cost=str(cost(method)) if method and len(_brought(name)) > 1 else None,
        warnings=check(method) if method else [],
        example=_example(name, concerned),
        costs=COSTS,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _cost_of(facts: dict[str, Any]) -> str:
    return str(Cost(**facts["cost"]))


def _example(name: str, concerned: Sequence[dict[str, Any]]) -> str:
    """Return the `[method]` of a config that uses it, with every parameter that has a value."""
    if not _is_preset(name):
        facts = concerned[0]
        table = {"name": name} | dict.fromkeys(facts["required"], "...")
        table |= {key: value for key, value in facts["parameters"].items() if value is not None}
        return _term(table) if facts["role"] == "term" else tomli_w.dumps({"method": {facts["slot"]: table}})
    whole = expand({"preset": name})
    tables: dict[str, Any] = {"preset": name}
    for slot, part in _brought(name):
        own = {key: value for key, value in whole[slot].items() if key not in ("name", "terms")}
        if own and getattr(PLACES[slot][part], "role", "") != "term":
            tables[slot] = own
    return tomli_w.dumps({"method": tables}) + "".join(f"\n{_term(term)}" for term in whole["objective"]["terms"])


def _term(table: dict[str, Any]) -> str:
    return f"[[method.objective.terms]]\n{tomli_w.dumps({'name': table['name']} | table)}"


def _preset(name: str) -> dict[str, Any]:
    whole = expand({"preset": name})
    method = build(whole)
    return {"method": whole, "cost": dataclasses.asdict(cost(method)), "warnings": check(method)}


def _facts(key: Key) -> dict[str, Any]:
    """Return what is known of a component: `parameters` has defaults, a term's weight among them; None: not set."""
    (slot, name), kind = key, PLACES[key[0]][key[1]]
    text, _, attributes = (inspect.getdoc(kind) or "").partition("\nAttributes:\n")
    text = text.strip()
    meanings = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", attributes, re.MULTILINE)
    fields: Any = dataclasses.fields(kind)
    defaults = {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields}
    role = getattr(kind, "role", None)
    weight = {"weight": components.default_weight(kind)} if role == "term" else {}
    return {
        "name": name,
        "slot": slot,
        "role": role,
        "summary": text.partition("\n\n")[0].replace("\n", " "),
        "text": text,
        "documentation": inspect.getdoc(inspect.getmodule(kind)),
        "paper": getattr(kind, "paper", ""),
        "required": [name for name, value in defaults.items() if value is MISSING],
        "parameters": weight | {name: value for name, value in defaults.items() if value is not MISSING},
        "cost": dataclasses.asdict(components.cost(kind)),
        "meanings": {name: " ".join(meaning.split()) for name, meaning in meanings},
        "properties": [name for name in components.PROPERTIES if components.has(kind, name)],
        "needs_target": components.has(kind, "needs_target"),
        "presets": [preset for preset in PRESETS if key in _brought(preset)],
        "refused_with": _against(key, "refuses"),
        "conflicts_with": _against(key, "warns"),
    }


def _summary(preset: str) -> str:
    """Return the components of a preset, in a line."""
    brought, whole = _brought(preset), expand({"preset": preset})
    if not brought:
        return "every slot as by default: " + ", ".join(f"{slot} {whole[slot]['name']}" for slot in SLOTS)
    parts = [f"{slot} {name}" for slot, name in brought if slot != "objective"]
    if len(parts) < len(brought):
        parts.insert(0, f"objective {objective_in_words(whole)}")
    return ", ".join(parts)


def _all() -> list[Key]:
    """Return all components, slot by slot."""
    return [(slot, name) for slot, index in PLACES.items() for name in index]


def _brought(preset: str) -> list[Key]:
    """Return the components by which presets differ from FedAvg, or that they name."""
    names = {(thing.partition(".")[0], table["name"]) for thing, table in brings(compose(preset)).items()}
    return [key for key in _all() if key in names]


def _concerned(name: str) -> list[Key]:
    """Return the components of a preset, and those with its name; ConfigError if there is neither."""
    brought = _brought(name) if _is_preset(name) else []
    concerned = [key for key in _all() if key in brought or key[1] == name]
    if not concerned:
        known = {*PRESETS, *(known for _, known in _all())}
        raise ConfigError(f"methods: unknown name {name!r}{nearest(name.lower(), known)}")
    return concerned


def _is_preset(name: str) -> bool:
    """Return whether it is a preset, or presets joined by "+"; an unknown part raises ConfigError."""
    if "+" in name:
        expand({"preset": name})
        return True
    return name in PRESETS


def _against(key: Key, verdict: Verdict) -> dict[str, str]:
    """Return the components that it has a rule with, and the reason, whichever of the two declares it."""
    own = ".".join(key)
    pairs = {frozenset(pair): reason for pair, reason in exceptions(verdict).items() if own in pair}
    return {next(iter(pair - {own})): reason for pair, reason in pairs.items()}


def _by_reason(others: Mapping[str, str]) -> dict[str, list[str]]:
    return {reason: [other for other in others if others[other] == reason] for reason in others.values()}


def _parameters(facts: dict[str, Any], joint: str) -> dict[str, str]:
    return {name: f"{name} (required)" for name in facts["required"]} | {
        name: f"{name} (not set)" if value is None else f"{name}{joint}{json.dumps(value, default=str)}"
        for name, value in facts["parameters"].items()
    }


def _say(console: Console, text: str, indent: str = "", before: int = 1) -> None:
    lines = textwrap.wrap(text, console.width, initial_indent=indent, subsequent_indent=indent + "  " * bool(indent))
    console.print("\n" * before + "\n".join(lines), markup=False, highlight=False)


def _print_table(console: Console, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for at, heading in enumerate(headings):
        longest = max(len(word) for row in [headings, *rows] for word in row[at].split())
        table.add_column(heading, no_wrap=at == 0, min_width=longest, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)
