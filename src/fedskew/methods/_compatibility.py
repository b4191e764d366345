"""Compatibility: the rules that components declare, applied to a method; whether sums over clients will do for it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from fedskew import components
from fedskew.components import SEEN, Cost, covers, default_weight, has, needs_label_counts, takes
from fedskew.errors import CombinationError, ConfigError
from fedskew.hooks import Hooks
from fedskew.methods._slots import PLACES, SLOTS, Method, key_of, named
from fedskew.objectives import Objective
from fedskew.weighting import BySums

Verdict = Literal["refuses", "warns"]

FUNCTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "selection": {"select": ("state", "counts", "size", "rng"), "init": ("counts",)},
    "objective": {"value": ("batch", "context")},
    "local_step": {"step": ("parameters", "gradient", "carried", "settings"), "init": ("settings",)},
    "weighting": {"weigh": ("answered",)},
    "aggregation": {"combine": ("updates", "weights"), "combine_buffers": ("changes", "weights")},
    "server_update": {"move": ("state", "parameters", "change", "extras"), "init": ("parameters",)},
    "finish": {"finish": ("head", "ask", "known"), "statistics": ("question", "observed")},
    "personal": {
        "trainings": (),
        "private": ("names",),
        "local_step": ("step",),
        "moved": ("logits", "held_out", "counts"),
    },
    "pipeline": {"divide": ("counts", "rng")},
}
"""The functions that a component of each slot must have, with the arguments that they are called with, by position."""


def fills(slot: str, component: Any) -> bool:
    """Return whether a component, or its class, has the main function of a slot, the first of its `FUNCTIONS`."""
    return callable(getattr(component, next(iter(FUNCTIONS[slot])), None))


def check(method: Method, training: Any = None) -> list[str]:
    """Return warnings of pairs whose goals conflict; raise CombinationError for components that can't be combined.

    The rules are those that components declare in `refuses` and `warns`; see `docs/combinations.md`. Rules about the
    slot `training` are about the settings of local training (`engine.LocalTraining`), if they are given.
    """
    _check_slots(method)
    _check_objective(method.objective)
    keyed = [(key_of(slot, component), component) for slot, component in method.components()]
    keyed += [] if training is None else [("training.optimizer", training)]
    # A pipeline's refusals come first: they concern the whole method.
    for key, component in sorted(keyed, key=lambda pair: not pair[0].startswith("pipeline.")):
        for other, reason in rules_between("refuses", component, keyed):
            slot, _, name = key.partition(".")
            raise CombinationError(f"method.{slot}: {name} doesn't go with {other}: {reason}")
    return [
        f"{key.partition('.')[2]} with {other.partition('.')[2]}: {reason}"
        for key, component in keyed
        for other, reason in rules_between("warns", component, keyed)
    ]


_SETTINGS = {"training.clips_gradients": "training.clip_norm", "training.keeps_momentum": "training.keep_optimizer"}
_SETTINGS |= dict.fromkeys(("training.has_rates", "training.has_decays"), "training.groups")
"""The rules about settings of local training that have another key than the optimiser's."""


def for_findings(method: Method, summed: bool = False) -> Method:
    """Return a method as it trains on samples that have several labels, or none; CombinationError where it can't.

    Label counts are of each label then, `summed` over clients or not, and cross-entropy is of a sigmoid for each.
    """
    weighting = method.weighting
    knows = has(weighting, "sums_labels") or has(weighting, "sums_mixes")
    if summed and not knows and needs_label_counts("weighting", weighting):
        raise CombinationError(
            f"method.weighting: {named('weighting', weighting)} declares neither sums_labels nor sums_mixes, and "
            "counts of several labels don't add up to samples; take fedavg, fedla or fedpals, or let clients report "
            "their counts, with noise or without"
        )
    twin = getattr(method.objective.loss, "of_findings", None)
    if twin is not None:
        method = replace(method, objective=replace(method.objective, loss=twin()))
    for slot, component in method.components():
        fits = has(component, "takes_findings") if slot in _INSTEAD else not has(component, "assigns_quotas")
        if not fits:
            raise CombinationError(
                f"method.{slot}: {named(slot, component)} is for samples of one class, and these have several labels "
                f"or none; {_INSTEAD.get(slot, 'take uniform or fedentopt')}"
            )
    return method


_INSTEAD = {
    "objective": "take cross_entropy, alone or with feddecorr, uniformity or moon",
    "finish": "leave it out",
    "personal": "take finetune, ditto or partial",
    "pipeline": "leave it out",
}
"""The slots whose components must declare that they take findings, and what to do."""


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
    applied = [(rule, key, why) for rule, why in rules.items() for key, other in others if _applies(rule, key, other)]
    return [(_SETTINGS.get(rule.replace("not ", ""), key), why) for rule, key, why in applied]


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
            plain, more = getattr(own, "__func__", None), SEEN.get(function, ())  # of a bound method
            in_full = ("self", *arguments)
            if not (_takes(own, arguments, more) if plain is None else _function_takes(plain, in_full, more)):
                has, too = inspect.signature(own), f"; it may also take {', '.join(more)}" if more else ""
                raise ConfigError(f"method.{slot}: {name}.{function}{has} is called as {called}, after self{too}")
        reads, known = getattr(component, "reads", None), {"teacher", "previous", "broadcast"}
        if slot == "objective" and not (isinstance(reads, frozenset | set) and reads <= known):
            raise ConfigError(
                f"method.objective: {name}.reads must be a set of what it reads, 'teacher', 'previous' or 'broadcast', "
                f"such as reads: ClassVar[frozenset[str]] = frozenset(); it is {reads!r}"
            )
        if slot == "finish" and not isinstance(getattr(component, "asks", None), frozenset | set):
            raise ConfigError(
                f"method.finish: {name}.asks is missing; inherit from fedskew.finish.Finish, or name whose samples it "
                "asks for: asks: ClassVar[frozenset[str]] = frozenset({'training'})"
            )


def _takes(function: Callable[..., Any], arguments: tuple[str, ...], more: tuple[str, ...]) -> bool:
    """Return whether a function can be called with these arguments, by position, and with those of `more` it names."""
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments, **{name: name for name in more if name in signature.parameters})
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


def sums_suffice(method: Method) -> bool:
    """Return whether no component reads what single clients send, so that it may be added up as it comes."""
    return all(_suffices(component) for _, component in method.components())


def masks_refused(method: Method) -> str | None:
    """Return why a method needs more of its clients than sums over them, and what to take instead; None if it doesn't.

    A component can do with sums if it declares `adds_up`, or reads nothing of single clients: no hook `end_round` or
    `next_model`. Server updates move by sums.
    """
    if method.pipeline is not None:
        return (
            f"{type(method.pipeline).__name__} trains a model for each cluster of clients, whose sums are over few; "
            'take a method of one model, or updates = "plain"'
        )
    for slot, component in method.components():
        name = named(slot, component)
        if has(component, "assigns_quotas"):
            return (
                f"{name} says on how many samples of each class a client trains, so that the server could choose whose "
                f'update is nothing, and the sum would show the others\'; take another {slot}, or updates = "plain"'
            )
        if slot == "aggregation" and not _suffices(component):
            return (
                f"{name} works on each client's update, and masks hide them; take the "
                'aggregation mean, or updates = "plain"'
            )
        if slot == "server_update" and has(component, "is_dynamic"):
            return (
                f"{name} reads each client's update (their plain mean beside the weighted one), and masks hide them; "
                'take the preset scaffold or fedavg, or updates = "plain"'
            )
        if not _suffices(component) or takes(component, "select", "losses"):
            return (
                f"{name} reads what each client returned by itself (it does not declare adds_up), and masks show only "
                f'sums; take another {slot}, or updates = "plain"'
            )
    return None


def sites_refused(method: Method) -> str | None:
    """Return why a method needs what real sites or their server don't have, and what to take instead; None: it fits."""
    for slot, component in method.components():
        name = f"{slot}: {named(slot, component)}"
        if takes(component, "select", "losses"):
            return f"{name} asks clients for losses before a round, which sites don't tell; take uniform or fedentopt"
        if any(takes(component, function, "samples") for function in ("move", "next_model", "end_round")):
            return f"{name} reads samples of the server, and that of real sites has none; take plain"
    return None


def summed_counts_refused(method: Method, participation: float) -> str | None:
    """Return why a method can't be trained where label counts are only ever summed over all clients; None if it can."""
    if (reason := masks_refused(method)) is not None:
        return reason
    if needs_label_counts("selection", method.selection):
        name = named("selection", method.selection)
        return f"{name} selects clients by their label counts, and nobody tells these; take uniform"
    weighting = method.weighting
    name = named("weighting", weighting)
    if not isinstance(weighting, BySums) or not covers(weighting, "own_weight", "weigh"):
        return f"{name} weighs by each client's label counts, and nobody tells these; take fedavg, fedla or fedpals"
    if (reason := weighting.why_no_sums()) is not None:
        return f"{name}: {reason}"
    if has(weighting, "weighs_everyone") and participation < 1:
        return (
            f"{name} weighs a round's clients by the labels of these alone, and sums over changing cohorts would tell "
            "every client's counts; set training.participation to 1, or take noisy counts"
        )
    return None


def noise_refused(method: Method) -> str | None:
    """Return why a method can't be trained with noise on clients' updates, for differential privacy; None if it can."""
    if (reason := masks_refused(method)) is not None:
        return reason
    if hasattr(method.server_update, "share"):
        name = named("server_update", method.server_update)
        return f"{name} needs a number of each client beside its update, which would have no noise; take plain"
    for slot, component in method.components():
        if slot == "finish":
            return f"the finish {named(slot, component)} asks clients for sums without noise; leave it out"
        if _reads_replies(component) and type(component).end_local is not Hooks.end_local:
            return (
                f"{named(slot, component)} returns something beside the update, which would have no "
                f"noise; take another {slot}"
            )
    return None


def _suffices(component: Any) -> bool:
    """Return whether sums of what clients send do for a component: it reads nothing of single ones, or says so by
    `adds_up`, of the functions that it has, not of those that a class below it overrides."""
    if takes(component, "weigh", "updates"):
        return False
    if not (hasattr(component, "combine") or _reads_replies(component)):
        return True
    functions = ("combine", "end_round", "next_model")
    return has(component, "adds_up") and all(covers(component, "adds_up", function) for function in functions)


def _reads_replies(component: Any) -> bool:
    """Return whether a component has a hook that is shown what clients returned."""
    kind = type(component)
    return isinstance(component, Hooks) and (
        kind.end_round is not Hooks.end_round or kind.next_model is not Hooks.next_model
    )
