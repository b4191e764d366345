"""Components: what they declare about themselves, and how a name in a config becomes one.

Everything is declared in class variables, and everything is optional:

    paper: ClassVar[str] = "Li et al., MLSys 2020"
    cost: ClassVar[Cost] = Cost(models_down=1)
    default_weight: ClassVar[float] = 0.1                  a term's weight where a config gives none; else 1
    fixed_cohort: ClassVar[bool] = True                    a property, see `PROPERTIES`
    refuses: ClassVar[Mapping[str, str]] = {"local_step.corrects_gradients": "the reason; the nearest that works"}
    warns: ClassVar[Mapping[str, str]] = {"weighting.not weighs_equally": "the reason; the nearest that avoids it"}

A key of `refuses` or `warns` is a slot and either a property (with "not" before it: the lack of that property) or the
name of a single component. Only one of two components states a rule; its reason is shown for both.
"""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pydantic

from fedskew import own_code
from fedskew.errors import ArgumentError, ConfigError, FedskewError, in_one_line, nearest
from fedskew.parameters import first_mistake

GIVEN = "given"
"""Stands for a module in the name of an object that was given from Python."""

_given: dict[str, Any] = {}

PROPERTIES: Mapping[str, str] = tomllib.loads(Path(__file__).with_name("properties.toml").read_text(encoding="utf-8"))
"""The properties that rules refer to, with their meaning. A component has only the properties that it declares."""


_COUNTED = ("forward", "backward", "models_up", "models_down")


@dataclass(frozen=True)
class Cost:
    """The cost of a method beyond FedAvg.

    Attributes:
        forward: Extra forward passes of a batch in each local step.
        backward: Extra backward passes of a batch in each local step.
        models_up: Vectors of the model's size that each client sends per round.
        models_down: Vectors of the model's size that each client receives per round.
        client_models: Vectors of the model's size that a client keeps between rounds.
        numbers: Other numbers that are sent per client, in words; per round unless marked "once" (C: classes).
    """

    forward: int = 0
    backward: int = 0
    models_up: int = 0
    models_down: int = 0
    client_models: int = 0
    numbers: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        """Add two costs; numbers that both send are sent once."""
        sums = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in dataclasses.fields(self)}
        return Cost(**sums | {"numbers": tuple(dict.fromkeys(sums["numbers"]))})

    def __str__(self) -> str:
        """Describe the cost in words; empty if there is none."""
        counts = {name.replace("models_", "model "): count for name, count in vars(self).items() if name in _COUNTED}
        words = [f"+{count} {what}" for what, count in counts.items() if count]
        kept = [f"client keeps {self.client_models} model"] if self.client_models else []
        return ", ".join([*words, *self.numbers, *kept])


def has(component: Any, name: str) -> bool:
    """Return whether a component, or its class, declares a property, but for what its parameters decide."""
    value = getattr(component, name, False)
    return value is True or (isinstance(value, frozenset) and bool(value))


def covers(component: Any, short: str, plain: str) -> bool:
    """Return whether a short cut stands for a component's own function: only where it is defined in the same class as
    the plain function, or in one below, as who overrides the plain one does not want what it inherits beside it."""
    kind = component if isinstance(component, type) else type(component)
    defined = [[name in vars(part) for part in kind.__mro__] for name in (short, plain)]
    return any(defined[0]) and (not any(defined[1]) or defined[0].index(True) <= defined[1].index(True))


SEEN: Mapping[str, tuple[str, ...]] = {
    "select": ("kept", "losses", "target", "log"),
    "value": ("log",),
    "step": ("layout", "log"),
    "end_local": ("layout", "log"),
    "weigh": ("sent", "updates", "layout", "log"),
    "combine": ("sent", "layout", "kept", "log"),
    "combine_buffers": ("kept", "log"),
    "move": ("layout", "network", "samples", "log"),
    "next_model": ("layout", "network", "samples", "log"),
    "end_round": ("layout", "network", "samples", "log"),
}
"""What a function of a component is given beside its arguments, where it has a parameter of that name.

    layout      names of the model's parameters, and where each stands in the vector (`models.Layout`)
    sent        the model that was sent, (parameters,)
    updates     the updates of the clients that replied, (answered, parameters)
    kept        what the component keeps at the server, by name (`hooks.Hooks`)
    target      the target's label mix, `(classes,)`; None where it is not known, or not yet
    losses      a function from client ids to the mean objective of the present model over each one's samples
    network     the network with the next model (`models.FlatModel`)
    samples     the samples that the server holds itself ([data] validation): inputs, targets
    log         a function of a name and a number that stands in the round's record
"""


def seen_by(function: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of `known` a function has parameters for, by name."""
    names = _named(getattr(function, "__func__", function))
    return {name: value for name, value in known.items() if names is None or name in names}


def takes(component: Any, function: str, name: str) -> bool:
    """Return whether a component, or its class, has a function with a parameter of this name."""
    own = getattr(component, function, None)
    return own is not None and bool(seen_by(own, {name: None}))


@cache
def _named(function: Any) -> frozenset[str] | None:
    """Return the names of a function's parameters; None where it takes any."""
    found = inspect.signature(function).parameters
    is_open = any(one.kind is one.VAR_KEYWORD for one in found.values())
    return None if is_open else frozenset(found)


def with_clients(component: Any, clients: int) -> Any:
    """Fill in the number of all clients, where a component has a parameter `clients`; see `filled`."""
    return filled(component, "clients", clients, "the number of clients")


def filled(component: Any, name: str, value: Any, what: str) -> Any:
    """Fill in a parameter that a run knows, where a component has it; ArgumentError if it was given and differs."""
    named = [field.name for field in dataclasses.fields(component)] if dataclasses.is_dataclass(component) else []
    if name not in named or (own := getattr(component, name)) == value:
        return component
    if own is not None:
        raise ArgumentError(f"{name}: {own} isn't {what}, which is {value}; leave it out, and it always is")
    return dataclasses.replace(component, **{name: value})


def default_weight(term: Any) -> float:
    """Return the weight of an objective's term for a config that gives none."""
    return float(getattr(term, "default_weight", 1.0))


def needs_label_counts(slot: str, component: Any) -> bool:
    """Return whether a component needs the clients' label counts at the server; selections and weightings are taken to,
    unless they declare otherwise."""
    kind = component if isinstance(component, type) else type(component)
    return bool(getattr(kind, "needs_label_counts", slot in ("selection", "weighting")))


def cost(*components: Any) -> Cost:
    """Add up what components cost together.

    Beside each component's own `cost`: label counts travel once where a component declares that it needs them; losses
    that read the outputs of the sent model share one more forward pass, and those that read the client's previous model
    another, and that model is kept.
    """
    reads = frozenset().union(*(getattr(component, "reads", frozenset()) for component in components))
    total = Cost()
    for component in components:
        if has(component, "needs_label_counts"):
            total += Cost(numbers=("C up once",))
        total += getattr(component, "cost", Cost())
    if "teacher" in reads:
        total += Cost(forward=1)
    if "previous" in reads:
        total += Cost(forward=1, client_models=1)
    return total


def make_component(index: Mapping[str, type], table: Mapping[str, Any], where: str, key: str = "name") -> Any:
    """Make a component from a table of its `name` (of the index, or `module:Class`) and parameters; a ConfigError
    begins with the key of the mistake, in the table `where`."""
    if "name" not in table:
        raise ConfigError(f"{where}.{key}: missing (known: {', '.join(sorted(index))})")
    kind = find(index, str(table["name"]), f"{where}.{key}")
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        advice = f"expected a frozen dataclass, not a value of type {type(kind).__name__}"
        if isinstance(kind, type):
            advice = f"write @dataclass(frozen=True) above class {kind.__name__}, with its parameters as fields"
        raise ConfigError(f"{where}.{key}: {table['name']} is no component; {advice}")
    parameters = {name: value for name, value in table.items() if name != "name"}
    known = [field.name for field in dataclasses.fields(kind)]
    for name in parameters:
        if name not in known:
            raise ConfigError(f"{where}.{name}: {table['name']} has no such parameter{nearest(name, known)}")
    try:
        return _checker(kind).validate_python(parameters)
    except pydantic.ValidationError as error:
        raise ConfigError(first_mistake(error, f"{where}.")) from None
    except FedskewError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:  # of its own constructor, or of a type that pydantic doesn't know
        raise ConfigError(f"{where}: {table['name']} can't be made: {in_one_line(error)}") from error


@lru_cache(256)
def _checker(kind: type) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def find(index: Mapping[str, Any], name: str, where: str) -> Any:
    """Return what a name at `where` in a config stands for: an entry of `index`, or the imported `module:attribute`."""
    if ":" not in name:
        if name not in index:
            raise ConfigError(f"{where}: unknown name {name!r}{nearest(name, index)}")
        return index[name]
    if name.startswith(f"{GIVEN}:"):
        if name not in _given:
            attribute = name.partition(":")[2]
            raise ConfigError(
                f"{where}: {attribute!r} was given as an object from Python, which isn't here; give it again to "
                f"simulate, as {where.partition('.')[0]}=..."
            )
        return _given[name]
    return own_code.load(name, where)


def keep(value: Any, label: str, digest: str) -> str:
    """Return a name for an object that a config can't import, which `find` knows for as long as this process runs."""
    name = f"{GIVEN}:{label}-{digest}"
    _given[name] = value
    return name


def given_in(tree: Any) -> list[Any]:
    """Return the objects from Python that a config's tree names, as far as this process has them."""
    if isinstance(tree, Mapping):
        return [value for part in tree.values() for value in given_in(part)]
    if isinstance(tree, list | tuple):
        return [value for part in tree for value in given_in(part)]
    return [_given[tree]] if isinstance(tree, str) and tree in _given else []


def call(function: Any, name: str, section: str, known: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call a user's own class or function by its `name` in a config's `section`, with the section's other keys, and
    those of `known` that it has parameters for. A ConfigError names the key."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = {}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    named = {key for key, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    for option in options:
        if not takes_any and (option not in named or option in known):
            hint = nearest(option, named - set(known)) if named - set(known) else " (it has none)"
            raise ConfigError(f"{section}.{option}: {name} has no such option{hint}")
    given = {key: value for key, value in known.items() if takes_any or key in named} | dict(options)
    for key in sorted(named - set(given)):
        if parameters[key].default is inspect.Parameter.empty:
            raise ConfigError(
                f"{section}.{key}: missing; {name} needs it (what it is called with by itself: "
                f"{', '.join(known) or 'nothing'})"
            )
    try:
        return function(**given)
    except FedskewError:
        raise
    except Exception as error:
        raise ConfigError(f"{section}.name: {name} failed: {in_one_line(error)}") from error


def name_of(value: Any, where: str) -> str:
    """Return the `module:attribute` of a user's own class or function, by which a config can name it."""
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "<locals>")
    if module is None or not qualname.isidentifier():
        raise ConfigError(f"{where}: {value!r} can't be named in a config; define it at the top level of a module")
    return f"{module}:{qualname}"
