"""Compatibility: the rules that components declare, applied to a method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from fedskew import components
from fedskew.components import Cost, default_weight, has
from fedskew.errors import CombinationError, ConfigError
from fedskew.methods._slots import PLACES, SLOTS, Method, key_of, name_of_key, named
from fedskew.objectives import Objective

Verdict = Literal["refuses", "warns"]

FUNCTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "selection": {"select": ("state", "counts", "size", "rng"), "init": ("counts",)},
    "objective": {"value": ("batch", "context")},
    "local_step": {"step": ("parameters", "gradient", "carried", "settings"), "init": ("settings",)},
    "weighting": {"weigh": ("answered",)},
    "aggregation": {"combine": ("updates", "weights"), "combine_buffers": ("changes", "weights")},
    "server_update": {"move": ("state", "parameters", "change", "extras"), "init": ("parameters",)},
    "finish": {"finish": ("head", "ask", "known"), "statistics": ("question", "observed")},
    "pipeline": {"divide": ("counts", "rng")},
}
"""The functions that a component of each slot must have, with the arguments that they are called with, by position."""


def fills(slot: str, component: Any) -> bool:
    """Return whether a component, or its class, has the main function of a slot, the first of its `FUNCTIONS`."""
    return callable(getattr(component, next(iter(FUNCTIONS[slot])), None))


def check(method: Method) -> list[str]:
    """Return warnings of pairs whose goals conflict; raise CombinationError for components that can't be combined.

    The rules are those that components declare in `refuses` and `warns`; see `docs/combinations.md`.
    """
    _check_slots(method)
    _check_objective(method.objective)
    keyed = [(key_of(slot, component), component) for slot, component in method.components()]
    # A pipeline's refusals come first: they concern the whole method.
    for key, component in sorted(keyed, key=lambda pair: not pair[0].startswith("pipeline.")):
        for other, reason in rules_between("refuses", component, keyed):
            slot, _, name = key.partition(".")
            raise CombinationError(f"method.{slot}: {name} doesn't go with {other}: {reason}")
    return [
        f"{name_of_key(key)} with {name_of_key(other)}: {reason}"
        for key, component in keyed
        for other, reason in rules_between("warns", component, keyed)
    ]


def cost(method: Method) -> Cost:
    """Return what a method costs beyond FedAvg."""
    return components.cost(*(component for _, component in method.components()))


def exceptions(verdict: Verdict) -> dict[tuple[str, str], str]:
    """Return why our components refuse or warn of others: reasons by the pair of both, each as `slot.name`."""
    keyed = [(f"{slot}.{name}", kind) for slot, index in PLACES.items() for name, kind in index.items()]
    found: dict[tuple[str, str], str] = {}
    for key, kind in keyed:
        for other, reason in rules_between(verdict, kind, keyed):
            found.setdefault((key, other), reason)
    return found


def rules_between(verdict: Verdict, component: Any, others: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Return which of `others`, pairs of key and component, a component refuses or warns of: key and reason."""
    rules: Mapping[str, str] = getattr(component, verdict, {})
    return [(key, reason) for rule, reason in rules.items() for key, other in others if _applies(rule, key, other)]


def _applies(rule: str, key: str, component: Any) -> bool:
    """Return whether a rule, such as `weighting.not weighs_equally`, is about a component."""
    (slot, _, what), (place, _, name) = rule.partition("."), key.partition(".")
    if slot != place:
        return False
    if what.startswith("not "):
        return not has(component, what.removeprefix("not "))
    return what == name or has(component, what)


def _check_slots(method: Method) -> None:
    for slot, component in method.components():
        if not fills(slot, component):
            fits = next((f"; it goes into {place}" for place in FUNCTIONS if fills(place, component)), "")
            name = type(component).__name__
            raise ConfigError(
                f"method.{slot}: {name} has no {next(iter(FUNCTIONS[slot]))}(), so it can't fill this slot{fits}"
            )


def check_functions(method: Method) -> None:
    """Raise ConfigError unless every component has the functions of its slot, which take what they are called with."""
    for slot, component in method.components():
        name = type(component).__name__
        for function, arguments in FUNCTIONS[slot].items():
            called = f"{function}({', '.join(arguments)})"
            if not callable(getattr(component, function, None)):
                raise ConfigError(f"method.{slot}: {name} has no {called}")
            own = getattr(component, function)
            plain = getattr(own, "__func__", None)  # of a bound method
            if not (_takes(own, arguments) if plain is None else _function_takes(plain, ("self", *arguments))):
                takes = inspect.signature(own)
                raise ConfigError(f"method.{slot}: {name}.{function}{takes} is called as {called}, after self")
        if slot == "objective" and not isinstance(getattr(component, "reads", None), frozenset | set):
            raise ConfigError(
                f"method.objective: {name}.reads is missing; write reads: ClassVar[frozenset[str]] = frozenset(), or "
                "name what it reads: 'teacher', 'previous', 'broadcast'"
            )
        if slot == "finish" and not isinstance(getattr(component, "asks", None), frozenset | set):
            raise ConfigError(
                f"method.finish: {name}.asks is missing; inherit from fedskew.finish.Finish, or name whose samples it "
                "asks for: asks: ClassVar[frozenset[str]] = frozenset({'training'})"
            )


def _takes(function: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    """Return whether a function can be called with these arguments, by position."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


_function_takes = cache(_takes)
"""The same of a function of a class, remembered: methods are built again and again."""


def _check_objective(objective: Objective) -> None:
    """Raise CombinationError unless there is one classification loss, and every term is a term that occurs once."""
    loss = named("objective", objective.loss)
    if _role(objective.loss) == "term":
        weight = default_weight(objective.loss)
        raise CombinationError(
            f"method.objective.name: {loss!r} is a term, not a classification loss: it doesn't tell a sample's class; "
            f'take name = "cross_entropy" with terms = [{{ name = "{loss}", weight = {weight:g} }}], or '
            "extra_terms beside a preset"
        )
    seen: set[type] = set()
    for at, (_, term) in enumerate(objective.terms):
        name, where = named("objective", term), f"method.objective.terms[{at}].name"
        if _role(term) == "classification":
            terms = ", ".join(name for name, kind in SLOTS["objective"].items() if getattr(kind, "role", "") == "term")
            raise CombinationError(
                f"{where}: {name!r} is a second classification loss beside {loss!r}, and an objective has one; take "
                f"either as its name, with terms such as {terms}"
            )
        if type(term) in seen:
            raise CombinationError(f"{where}: {name!r} occurs twice; give it once, with the sum of the weights")
        seen.add(type(term))


def _role(loss: Any) -> str:
    role = getattr(loss, "role", None)
    if role not in ("classification", "term"):
        raise ConfigError(
            f"method.objective: {type(loss).__name__}.role must be 'classification' or 'term', not {role!r}"
        )
    return str(role)
