"""The catalogue of methods, as JSON and as text, made from the components' own declarations and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from typing import Any, Literal, NamedTuple

import tomli_w
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from fedskew import components
from fedskew.errors import ConfigError, nearest
from fedskew.methods import (
    COMBINATIONS,
    PLACES,
    PRESETS,
    SLOTS,
    build,
    check,
    cost,
    expand,
    objective_in_words,
)
from fedskew.methods._compatibility import exceptions
from fedskew.methods._presets import brings, compose

QUESTIONS = {
    "selection": "who trains this round",
    "objective": "what a client minimises, one loss and any terms (marked +)",
    "local_step": "how a client steps",
    "weighting": "how much each update counts",
    "aggregation": "how the weighted updates become one change",
    "server_update": "how that change moves the model",
    "finish": "what happens once after the last round (mostly nothing)",
    "pipeline": "how rounds follow each other, where they are not all alike (mostly none)",
}

COSTS = (
    "Costs are what is beyond FedAvg: passes of a batch in each local step; models and numbers that travel per client "
    "and round, or once (C: classes)."
)


class Component(NamedTuple):
    """One component: `name` in the index of `slot`, and its class."""

    slot: str
    name: str
    kind: type

    @property
    def key(self) -> str:
        """Its name in the rules of other components: `slot.name`."""
        return f"{self.slot}.{self.name}"

    @property
    def role(self) -> str:
        """Its part in the slot: of the objective, "classification" or "term"."""
        return str(getattr(self.kind, "role", ""))

    @property
    def parameters(self) -> dict[str, Any]:
        """Defaults by name, a term's weight among them; None where a parameter is not set."""
        weight = {"weight": components.default_weight(self.kind)} if self.role == "term" else {}
        return weight | {name: value for name, value in _defaults(self.kind).items() if value is not MISSING}

    @property
    def required(self) -> list[str]:
        """Parameters that have to be given."""
        return [name for name, value in _defaults(self.kind).items() if value is MISSING]

    @property
    def presets(self) -> list[str]:
        """Names of the presets that include it."""
        return [preset for preset in PRESETS if self in _brought(preset)]


def all_components() -> list[Component]:
    """Return all components, slot by slot."""
    return [Component(slot, name, kind) for slot, index in PLACES.items() for name, kind in index.items()]


def listing() -> dict[str, Any]:
    """Return all presets, combinations and components as plain values for JSON."""
    return {
        "presets": {name: _preset(name) for name in PRESETS},
        "combinations": {name: _preset(name) for name in COMBINATIONS},
        "components": [_component(component) for component in all_components()],
    }


def explanation(name: str) -> dict[str, Any]:
    """Return a preset, a combination, or the components of one name as plain values for JSON."""
    preset = _preset(name) if _is_preset(name) else None
    return {"name": name, "preset": preset, "components": [_component(component) for component in _concerned(name)]}


def print_listing(console: Console) -> None:
    """Print tables of all presets and components."""
    _say(console, "Presets. [method] preset = NAME in a config; joined by + they compose.", before=0)
    _print_table(console, ("preset", "brings"), [(name, _summary(name)) for name in PRESETS])
    _say(console, f"The papers' own combinations: {', '.join(COMBINATIONS)}.")
    for slot, question in QUESTIONS.items():
        rows = [
            (
                f"+ {component.name}" if component.role == "term" else component.name,
                ", ".join(_parameters(component, "=").values()),
                components.paper(component.kind),
                str(components.cost(component.kind)),
            )
            for component in all_components()
            if component.slot == slot
        ]
        _say(console, f"{slot}: {question}")
        _print_table(console, (slot, "parameters", "paper", "cost"), rows)
    _say(console, COSTS)
    _say(console, "Any component of one slot goes with any of the others, and any loss with any terms, except:")
    verdicts: tuple[tuple[Literal["refuses", "warns"], str], ...] = (
        ("refuses", "is refused with"),
        ("warns", "conflicts with"),
    )
    for verdict, verb in verdicts:
        found = exceptions(verdict)
        for one in dict.fromkeys(one for one, _ in found):
            others = {other: reason for (first, other), reason in found.items() if first == one}
            for reason, names in _by_reason(others).items():
                _say(console, f"{one} {verb} {', '.join(names)}: {reason}.", indent="  ", before=0)
    _say(console, "To explain one: fedskew methods NAME. For programs: --json.")


def page(name: str) -> str:
    """Explain a preset, a combination, or the components of one name in Markdown."""
    concerned = _concerned(name)
    blocks = [f"# {name}"]
    if _is_preset(name):
        blocks.append(f"A preset: {_summary(name)}.")
    if "+" in name:
        blocks.append("\n".join(f"- `fedskew methods {part.strip()}`" for part in name.split("+")))
    else:
        blocks += dict.fromkeys(inspect.getdoc(inspect.getmodule(component.kind)) or "" for component in concerned)
        blocks += [_section(component) for component in concerned]
    method = build(expand({"preset": name})) if _is_preset(name) else None
    if method and len(_brought(name)) > 1:
        blocks.append(f"Cost of {name} beyond FedAvg: {str(cost(method)) or 'none'}.")
    blocks += [f"Warning: {warning}." for warning in check(method)] if method else []
    blocks += ["In a config:", textwrap.indent(_example(name), "    ")]
    if any(str(components.cost(component.kind)) for component in concerned):
        blocks.append(COSTS)
    return "\n\n".join(blocks) + "\n"


def print_page(console: Console, name: str) -> None:
    """Print the `page` of a name, rendered for the console."""
    console.print(Markdown(page(name), code_theme="bw"))


def _section(component: Component) -> str:
    """Return a component's parameters with meaning and defaults, its cost and compatibility, in Markdown."""
    role = {"classification": ", a classification loss", "term": ", a term"}.get(component.role, "")
    text, meanings = _docstring(component.kind)
    blocks = [f"## {component.name} ({component.slot}{role})", text]
    if parameters := _parameters(component, " = "):
        blocks.append(
            "\n".join(
                f"- `{shown}`" + (f": {meanings[name]}" if name in meanings else "")
                for name, shown in parameters.items()
            )
        )
    facts = [
        f"Paper: {components.paper(component.kind) or 'none'}.",
        f"Cost beyond FedAvg: {str(components.cost(component.kind)) or 'none'}.",
    ]
    if components.has(component.kind, "needs_target"):
        facts.append("Needs a target label mix: `[target] mix`.")
    if components.has(component.kind, "needs_colocation"):
        facts.append("Tells two classes apart only where some client holds both: `fedskew describe` counts such pairs.")
    refused, warned = _against(component, "refuses"), _against(component, "warns")
    with_what = {
        "classification": "any terms, and any component of the other slots",
        "term": "any classification loss, other terms, and any component of the other slots",
    }.get(component.role, "any component of the other slots")
    facts.append(f"Goes with {with_what}{', but:' if refused or warned else '.'}")
    blocks.append("  \n".join(facts))
    blocks.append(
        "\n".join(
            f"- {verb} {', '.join(f'`{name}`' for name in names)}: {reason}."
            for others, verb in ((refused, "refused with"), (warned, "conflicts with"))
            for reason, names in _by_reason(others).items()
        )
    )
    return "\n\n".join(block for block in blocks if block)


def _docstring(kind: type) -> tuple[str, dict[str, str]]:
    """Return a class's docstring without its `Attributes:`, and the meaning of each parameter from there."""
    text, _, attributes = (inspect.getdoc(kind) or "").partition("\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", attributes, re.MULTILINE)
    return text.strip(), {name: " ".join(meaning.split()) for name, meaning in entries}


def _example(name: str) -> str:
    """Return the `[method]` of a config that uses it, with every parameter that has a value."""
    if not _is_preset(name):
        component = _concerned(name)[0]
        table = {"name": name} | dict.fromkeys(component.required, "...")
        table |= {key: value for key, value in component.parameters.items() if value is not None}
        return _term(table) if component.role == "term" else tomli_w.dumps({"method": {component.slot: table}})
    whole = expand({"preset": name})
    tables: dict[str, Any] = {"preset": name}
    for component in _brought(name):
        own = {key: value for key, value in whole[component.slot].items() if key not in ("name", "terms")}
        if own and component.role != "term":
            tables[component.slot] = own
    return tomli_w.dumps({"method": tables}) + "".join(f"\n{_term(term)}" for term in whole["objective"]["terms"])


def _term(table: dict[str, Any]) -> str:
    return f"[[method.objective.terms]]\n{tomli_w.dumps({'name': table['name']} | table)}"


def _preset(name: str) -> dict[str, Any]:
    whole = expand({"preset": name})
    method = build(whole)
    return {"method": whole, "cost": dataclasses.asdict(cost(method)), "warnings": check(method)}


def _component(component: Component) -> dict[str, Any]:
    text, meanings = _docstring(component.kind)
    return {
        "name": component.name,
        "slot": component.slot,
        "role": component.role or None,
        "summary": text.partition("\n\n")[0].replace("\n", " "),
        "documentation": inspect.getdoc(inspect.getmodule(component.kind)),
        "paper": components.paper(component.kind),
        "required": component.required,
        "parameters": component.parameters,
        "cost": dataclasses.asdict(components.cost(component.kind)),
        "meanings": meanings,
        "properties": [name for name in components.PROPERTIES if components.has(component.kind, name)],
        "needs_target": components.has(component.kind, "needs_target"),
        "presets": component.presets,
        "refused_with": _against(component, "refuses"),
        "conflicts_with": _against(component, "warns"),
    }


def _summary(preset: str) -> str:
    """Return the components of a preset, in a line."""
    brought = _brought(preset)
    if not brought:
        return "every slot as by default: " + ", ".join(f"{slot} {_default(slot)}" for slot in SLOTS)
    whole = expand({"preset": preset})
    parts = [f"{component.slot} {component.name}" for component in brought if component.slot != "objective"]
    if len(parts) < len(brought):
        parts.insert(0, f"objective {objective_in_words(whole)}")
    return ", ".join(parts)


def _default(slot: str) -> str:
    return str(expand({})[slot]["name"])


@cache
def _brought(preset: str) -> tuple[Component, ...]:
    """Return the components by which presets differ from FedAvg, or that they name."""
    things = brings(compose(preset))
    names = {(thing.partition(".")[0], table["name"]) for thing, table in things.items()}
    return tuple(component for component in all_components() if (component.slot, component.name) in names)


def _concerned(name: str) -> list[Component]:
    """Return the components of a preset, and those with its name; ConfigError if there is neither."""
    brought = _brought(name) if _is_preset(name) else ()
    concerned = [component for component in all_components() if component in brought or component.name == name]
    if not concerned:
        known = {*PRESETS, *(component.name for component in all_components())}
        raise ConfigError(f"methods: unknown name {name!r}{nearest(name.lower(), known)}")
    return concerned


def _is_preset(name: str) -> bool:
    """Return whether it is a preset, or presets joined by "+"; an unknown part raises ConfigError."""
    if "+" in name:
        expand({"preset": name})
        return True
    return name in PRESETS


def _defaults(kind: Any) -> dict[str, Any]:
    """Return a parameter's default, or MISSING."""
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }


def _against(component: Component, verdict: Literal["refuses", "warns"]) -> dict[str, str]:
    """Return the components that it has a rule with, and the reason, whichever of the two declares it."""
    pairs = {frozenset(pair): reason for pair, reason in exceptions(verdict).items() if component.key in pair}
    return {next(iter(pair - {component.key})): reason for pair, reason in pairs.items()}


def _by_reason(others: Mapping[str, str]) -> dict[str, list[str]]:
    return {reason: [other for other in others if others[other] == reason] for reason in others.values()}


def _parameters(component: Component, joint: str) -> dict[str, str]:
    """Return each parameter with its default, as text."""
    required = {name: f"{name} (required)" for name in component.required}
    return required | {
        name: f"{name} (not set)" if value is None else f"{name}{joint}{json.dumps(value, default=str)}"
        for name, value in component.parameters.items()
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
