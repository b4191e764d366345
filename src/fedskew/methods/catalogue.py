"""What is known of every method, as JSON and as text: from the components' own files, so that it can't be out of
date."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from typing import Any, NamedTuple

import tomli_w
from rich.console import Console
from rich.table import Table

from fedskew import about
from fedskew.errors import ConfigError, nearest
from fedskew.methods import COMBINATIONS, PLACES, PRESETS, SLOTS, build, check, cost, exceptions, expand

QUESTIONS = {
    "selection": "who trains this round",
    "objective": "what a client minimises, one loss and any terms (marked +)",
    "local_step": "how a client steps",
    "weighting": "how much each update counts",
    "server_update": "how the weighted updates move the model",
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
        """As other components name it."""
        return f"{self.slot}.{self.name}"

    @property
    def role(self) -> str:
        """Its part in the slot: of the objective, "classification" or "term"."""
        return str(getattr(self.kind, "role", ""))

    @property
    def parameters(self) -> dict[str, Any]:
        """Defaults by name, a term's weight among them; None where a parameter is not set."""
        weight = {"weight": about.default_weight(self.kind)} if self.role == "term" else {}
        return weight | {name: value for name, value in _defaults(self.kind).items() if value is not MISSING}

    @property
    def required(self) -> list[str]:
        """Parameters that have to be given."""
        return [name for name, value in _defaults(self.kind).items() if value is MISSING]

    @property
    def presets(self) -> list[str]:
        """Those that bring it."""
        return [preset for preset in PRESETS if self in _brought(preset)]


def components() -> list[Component]:
    """All of them, by slot."""
    return [Component(slot, name, kind) for slot, index in PLACES.items() for name, kind in index.items()]


def listing() -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "presets": {name: _preset(name) for name in PRESETS},
        "combinations": {name: _preset(name) for name in COMBINATIONS},
        "components": [_component(component) for component in components()],
    }


def explanation(name: str) -> dict[str, Any]:
    """One preset, one combination, or the components of one name, for JSON. Raises ConfigError for an unknown name."""
    preset = _preset(name) if _is_preset(name) else None
    return {"name": name, "preset": preset, "components": [_component(component) for component in _concerned(name)]}


def print_listing(console: Console) -> None:
    """Every preset and component, in tables."""
    _say(console, "Presets. [method] preset = NAME in a config; joined by + they compose.", before=0)
    _print_table(console, ("preset", "brings"), [(name, _summary(name)) for name in PRESETS])
    _say(console, f"The papers' own combinations: {', '.join(COMBINATIONS)}.")
    for slot, question in QUESTIONS.items():
        rows = [
            (
                f"+ {component.name}" if component.role == "term" else component.name,
                ", ".join(_parameters(component, "=")),
                about.paper(component.kind),
                str(about.cost(component.kind)),
            )
            for component in components()
            if component.slot == slot
        ]
        _say(console, f"{slot}: {question}")
        _print_table(console, (slot, "parameters", "paper", "cost"), rows)
    _say(console, COSTS)
    _say(console, "Any component of one slot goes with any of the others, and any loss with any terms, but:")
    for says, verb in ((about.refuses, "is refused with"), (about.warns, "conflicts with")):
        for one in dict.fromkeys(one for one, _ in exceptions(says)):
            others = {other: reason for (first, other), reason in exceptions(says).items() if first == one}
            for reason, names in _by_reason(others).items():
                _say(console, f"{one} {verb} {', '.join(names)}: {reason}.", indent="  ", before=0)
    _say(console, "One in a page: fedskew methods NAME. For programs: --json.")


def page(name: str, width: int) -> str:
    """One preset, one combination, or the components of one name, explained. Raises ConfigError for an unknown name."""
    concerned = _concerned(name)
    lines = _wrapped(f"{name}, a preset: {_summary(name)}" if _is_preset(name) else name, width, "    ")
    if "+" in name:
        lines += ["", *(f"  fedskew methods {part.strip()}" for part in name.split("+"))]
    else:
        for doc in dict.fromkeys(inspect.getdoc(inspect.getmodule(component.kind)) or "" for component in concerned):
            lines += ["", *reflow(doc, width)]
        for component in concerned:
            lines += ["", *_section(component, width)]
    method = build(expand({"preset": name})) if _is_preset(name) else None
    if method and len(_brought(name)) > 1:
        lines += ["", *_wrapped(f"Cost of {name} beyond FedAvg: {str(cost(method)) or 'none'}.", width)]
    for warning in check(method) if method else []:
        lines += ["", *_wrapped(f"Warning: {warning}.", width)]
    lines += ["", "In a config:", "", *textwrap.indent(_example(name), "    ").splitlines()]
    if any(str(about.cost(component.kind)) for component in concerned):
        lines += ["", *_wrapped(COSTS, width)]
    return "\n".join(lines)


def reflow(text: str, width: int) -> list[str]:
    """A docstring's lines at another width: paragraphs and bullets filled, formulas kept, broken at gaps only."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        for piece in _pieces(block):
            if piece.startswith("    "):
                lines += _formula(piece, width)
            else:
                lines += _wrapped(piece, width, "  " if piece.startswith("- ") else "")
        lines.append("")
    return lines[:-1]


def _pieces(block: str) -> Iterator[str]:
    """Lines of formulas as they are; the lines of a paragraph, or of a bullet, joined."""
    joined = ""
    for line in block.splitlines():
        if line.startswith(("    ", "- ")):
            if joined:
                yield joined
            joined = ""
        if line.startswith("    "):
            yield line
        else:
            joined = f"{joined} {line.strip()}".strip()
    if joined:
        yield joined


def _formula(line: str, width: int) -> list[str]:
    """The line, broken where it has gaps, and only where that is not enough elsewhere."""
    indent = " " * (len(line) - len(line.lstrip()))
    lines = [""]
    for part in re.findall(r"\s*\S+(?: {1,2}\S+)*", line):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append(f"{indent}    {part.lstrip()}")
        else:
            lines[-1] += part
    return [short for part in lines for short in _wrapped(part, width, indent + "    ")]


def _section(component: Component, width: int) -> list[str]:
    """A component's class: what its parameters mean, their defaults, what it costs and goes with."""
    role = {"classification": ", a classification loss", "term": ", a term"}.get(component.role, "")
    lines = [f"{component.name} ({component.slot}{role})", ""]
    lines += textwrap.indent("\n".join(reflow(inspect.getdoc(component.kind) or "", width - 2)), "  ").splitlines()
    if parameters := _parameters(component, " = "):
        lines += ["", *(f"    {parameter}" for parameter in parameters)]
    lines += ["", *_wrapped(f"  Paper: {about.paper(component.kind) or 'none'}.", width, "  ")]
    lines += _wrapped(f"  Cost beyond FedAvg: {str(about.cost(component.kind)) or 'none'}.", width, "  ")
    if getattr(component.kind, "needs_target", False):
        lines += _wrapped("  Needs a target label mix: [target] mix.", width, "  ")
    refused, warned = _against(component, about.refuses), _against(component, about.warns)
    with_what = {
        "classification": "any terms, and any component of the other slots",
        "term": "any classification loss, other terms, and any component of the other slots",
    }.get(component.role, "any component of the other slots")
    end = ", but:" if refused or warned else "."
    lines += _wrapped(f"  Goes with {with_what}{end}", width, "  ")
    for others, verb in ((refused, "refused with"), (warned, "conflicts with")):
        for reason, names in _by_reason(others).items():
            lines += _wrapped(f"  - {verb} {', '.join(names)}: {reason}.", width, "    ")
    return lines


def _example(name: str) -> str:
    """The `[method]` of a config that takes it, with every parameter that has a value."""
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
    return {
        "name": component.name,
        "slot": component.slot,
        "role": component.role or None,
        "summary": (inspect.getdoc(component.kind) or "").partition("\n\n")[0].replace("\n", " "),
        "documentation": inspect.getdoc(inspect.getmodule(component.kind)),
        "paper": about.paper(component.kind),
        "required": component.required,
        "parameters": component.parameters,
        "cost": dataclasses.asdict(about.cost(component.kind)),
        "needs_target": bool(getattr(component.kind, "needs_target", False)),
        "presets": component.presets,
        "refused_with": _against(component, about.refuses),
        "conflicts_with": _against(component, about.warns),
    }


def _summary(preset: str) -> str:
    """What presets bring, in a line."""
    brought = _brought(preset)
    if not brought:
        return "every slot as by default: " + ", ".join(f"{slot} {_default(slot)}" for slot in SLOTS)
    whole = expand({"preset": preset})
    parts = [f"{component.slot} {component.name}" for component in brought if component.slot != "objective"]
    if len(parts) < len(brought):
        objective = whole["objective"]
        terms = [f"{term['weight']:g} {term['name']}" for term in objective["terms"]]
        parts.insert(0, f"objective {' + '.join([objective['name'], *terms])}")
    return ", ".join(parts)


def _default(slot: str) -> str:
    return str(expand({})[slot]["name"])


@cache
def _brought(preset: str) -> tuple[Component, ...]:
    """The components by which presets differ from FedAvg, or that they name."""
    tables = [PRESETS[part.strip()] for part in preset.split("+")]
    whole = expand({"preset": preset})
    brought = []
    for component in components():
        own = [table[component.slot] for table in tables if component.slot in table]
        if component.role == "term":
            here = any(component.name == term["name"] for term in whole["objective"]["terms"])
        else:
            here = component.name == whole.get(component.slot, {}).get("name") and any("name" in table for table in own)
        if here:
            brought.append(component)
    return tuple(brought)


def _concerned(name: str) -> list[Component]:
    """What a preset brings, and the components of its name. Raises ConfigError where there is neither."""
    brought = _brought(name) if _is_preset(name) else ()
    concerned = [component for component in components() if component in brought or component.name == name]
    if not concerned:
        known = {*PRESETS, *(component.name for component in components())}
        raise ConfigError(f"methods: unknown name {name!r}{nearest(name.lower(), known)}")
    return concerned


def _is_preset(name: str) -> bool:
    """Whether it is a preset or several; a part that is none is an error."""
    if "+" in name:
        expand({"preset": name})
        return True
    return name in PRESETS


def _defaults(kind: Any) -> dict[str, Any]:
    """A parameter's default, or MISSING."""
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }


def _against(component: Component, says: Callable[[Any], Mapping[str, str]]) -> dict[str, str]:
    """The components that it has a rule with, and the reason; whichever of the two names the other."""
    pairs = {frozenset(pair): reason for pair, reason in exceptions(says).items() if component.key in pair}
    return {next(iter(pair - {component.key})): reason for pair, reason in pairs.items()}


def _by_reason(others: Mapping[str, str]) -> dict[str, list[str]]:
    return {reason: [other for other in others if others[other] == reason] for reason in others.values()}


def _parameters(component: Component, joint: str) -> list[str]:
    required = [f"{name} (required)" for name in component.required]
    return required + [
        f"{name} (not set)" if value is None else f"{name}{joint}{json.dumps(value, default=str)}"
        for name, value in component.parameters.items()
    ]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


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
