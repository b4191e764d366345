"""Checks of what a method's components return: once a round at the server, and by shape in a step.

What they ask of values costs microseconds and waits for no device. Where a client's update is not finite, `_faults`
finds out who is to blame.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedskew import components
from fedskew.errors import ArgumentError, ComponentError, FedskewError, in_one_line, placed
from fedskew.finish import Finished, Head
from fedskew.hooks import Hooks
from fedskew.methods import PLACES, Method
from fedskew.parameters import FloatArray, IntArray
from fedskew.personal import Names, OwnTraining

TOLERANCE = 1e-6
"""How far a sum of weights may be from 1: more than the rounding of float32."""

LARGE = 1e6
"""Numbers above this are taken for those of a training that diverges."""


def is_own(component: Any) -> bool:
    """Return whether a component, a network or a hook is a user's own, and not this package's."""
    return not type(component).__module__.startswith("fedskew.")


def name_in(slot: str, component: Any) -> str:
    """Return a component's slot and name, such as `weighting own:RootWeights`."""
    kind = type(component)
    names = {known: name for name, known in PLACES.get(slot.partition(".")[0], {}).items()}
    return f"{slot} {names.get(kind, f'{kind.__module__}:{kind.__qualname__}')}"


def hooked(method: Method) -> dict[str, Hooks]:
    """Return the components of a method that have hooks, by their place in it, such as `objective.terms[0]`."""
    places: dict[str, Any] = {
        "selection.hooks": method.selection,  # beside the state of its own
        "objective": method.objective.loss,
        **{f"objective.terms[{at}]": term for at, (_, term) in enumerate(method.objective.terms)},
        "local_step": method.local_step,
        "weighting": method.weighting,
        "aggregation": method.aggregation,
        "server_update": method.server_update,
    }
    return {name: component for name, component in places.items() if isinstance(component, Hooks)}


def adapting(method: Method) -> list[tuple[str, Hooks]]:
    """Return the components that have hooks, with their places, in the order in which they adapt the network: the
    classification loss last, as the last layer that it may put there is the network's."""
    return sorted(hooked(method).items(), key=lambda item: item[0] == "objective")


def shortage(aggregation: Any, clients: int) -> str:
    """Say that an aggregation needs more clients than there are."""
    name = name_in("aggregation", aggregation).removeprefix("aggregation ")
    return f"{name} needs {aggregation.least} clients, and has {clients}"


def fitting(federation: Any) -> Method:
    """Return a federation's method, whose server update knows the number of clients."""
    method: Method = federation.method
    for slot in ("selection", "weighting") if federation.target is None and federation.aim is None else ():
        if components.has(component := getattr(method, slot), "needs_target"):
            raise ArgumentError(
                f"target: {type(component).__name__} goes towards a target label mix, and none is given; set [target] "
                f"mix, or choose another {slot}"
            )
    if federation.cohort_size < method.aggregation.least:
        raise ArgumentError(
            f"aggregation: {shortage(method.aggregation, federation.cohort_size)}; let more clients take part "
            "(training.participation), or take geometric_median, which any number will do for"
        )
    with placed("server_update.", ArgumentError):
        server_update = components.with_clients(method.server_update, len(federation.counts))
    check = getattr(method.selection, "check", None)  # a user's own selection may have none
    if check is not None:
        with placed("method.selection.", ArgumentError):
            check(federation.counts_seen, federation.cohort_size)
    return replace(method, server_update=server_update)


@contextmanager
def calling(slot: str, component: Any, function: str, where: str = "") -> Iterator[None]:
    """Say in one line what a user's own component raised."""
    try:
        yield
    except FedskewError:
        raise
    except Exception as error:
        if not is_own(component):
            raise
        raise ComponentError(f"{where}{name_in(slot, component)}: {function}() failed: {in_one_line(error)}") from error


def called(slot: str, component: Any, function: str, *given: Any, where: str = "") -> Any:
    """Call a component's function; what a user's own raises is said in one line."""
    with calling(slot, component, function, where):
        return getattr(component, function)(*given)


def checked_choice(component: Any, chosen: object, clients: int, where: str = "") -> tuple[IntArray, Any]:
    """Return the cohort and the state that a selection returned."""
    name = f"{where}{name_in('selection', component)}: select()"
    if not isinstance(chosen, tuple) or len(chosen) != 2:
        raise ComponentError(f"{name} must return (client ids, next state), not {_what(chosen)}")
    try:
        ids = np.asarray(chosen[0])
    except (TypeError, ValueError):  # such as a ragged list
        ids = np.zeros(0)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ComponentError(
            f"{name} must return client ids first, whole numbers and one at least, not {_what(chosen[0])}"
        )
    ordered = np.sort(ids)
    out, twice = ordered[(ordered < 0) | (ordered >= clients)], ordered[1:][ordered[1:] == ordered[:-1]]
    if len(out):
        raise ComponentError(f"{name} chose client {out[0]}, and there are clients 0 to {clients - 1}")
    if len(twice):
        raise ComponentError(f"{name} chose client {twice[0]} twice; a cohort has a client once")
    return ids.astype(np.int64, copy=False), chosen[1]


def checked_quotas(component: Any, quotas: Any, ids: IntArray, classes: int, where: str = "") -> FloatArray:
    """Return the quotas in a selection's state, `(cohort, classes)`."""
    amounts, shape = _floats(quotas), (len(ids), classes)
    if amounts is None or amounts.shape != shape or not 0 <= amounts.sum() < np.inf or amounts.min(initial=0) < 0:
        said = f"quotas must be amounts of shape {shape}, (cohort, classes)"
        raise _wrong("selection", component, said, quotas, where)
    return amounts


def checked_weights(component: Any, weights: Any, answered: IntArray, where: str = "") -> FloatArray:
    """Return the weights that a weighting returned, `(answered,)`."""
    found, name = _floats(weights), f"{where}{name_in('weighting', component)}: weigh()"
    if found is None or found.shape != answered.shape:
        raise ComponentError(
            f"{name} must return one weight for each of the {len(answered)} clients that replied, not {_what(weights)}"
        )
    total = found.sum()
    if abs(total - 1) <= TOLERANCE and found.min() >= 0:  # neither holds for NaN
        return found
    wrong = np.flatnonzero(~np.isfinite(found) | (found < 0))
    if len(wrong):
        raise ComponentError(
            f"{name} returned {found[wrong[0]]:g} for client {answered[wrong[0]]}; weights must be finite and not "
            "negative"
        )
    raise ComponentError(f"{name} returned weights of sum {total:g}; they must sum to 1: divide them by their sum")


def checked_aggregate(component: Any, combined: Any, updates: Tensor, where: str = "") -> tuple[Tensor, FloatArray]:
    """Return the updates and their weights that an aggregation returned: of a user's own, the updates are finite."""
    name = f"{where}{name_in('aggregation', component)}: combine()"
    if not isinstance(combined, tuple) or len(combined) != 2 or not isinstance(combined[0], Tensor):
        raise ComponentError(f"{name} must return (updates, their weights), not {_what(combined)}")
    rows, shares = combined[0], np.asarray(combined[1], dtype=np.float64)
    clients, width = updates.shape
    if tuple(rows.shape) not in ((clients, width), (1, width)) or shares.shape != rows.shape[:1]:
        raise ComponentError(
            f"{name} must return an update for each of the {clients} clients, or one of all, with as many weights, not "
            f"{_what(combined)}"
        )
    if not (abs(shares.sum() - 1) <= TOLERANCE and shares.min() >= 0):  # neither holds for NaN
        raise ComponentError(f"{name} returned weights of sum {shares.sum():g}; they must sum to 1, none below 0")
    if is_own(component) and not rows.isfinite().all() and not updates.abs().max() >= LARGE:
        raise ComponentError(f"{name} returned NaN or infinity, although all updates are finite; guard its quotients")
    return rows if rows.is_floating_point() else rows.to(updates.dtype), shares


def checked_share(component: Any, shared: Any) -> tuple[float, Mapping[str, Any]]:
    """Return how a client's update enters a sum, as a server update's `share` returned it."""
    try:
        factor, extras = shared
        numbers = [torch.as_tensor(extra, dtype=torch.float64) for extra in extras.values()]
        fine = 0 <= factor <= 1 and all(number.isfinite().all() for number in numbers)
    except (TypeError, ValueError, AttributeError):
        fine = False
    if not fine:
        said = "share() must return (a factor from 0 to 1, finite numbers by name)"
        raise _wrong("server_update", component, said, shared)
    return float(factor), extras


def checked_model(component: Any, moved: Any, parameters: Tensor, where: str = "") -> tuple[Tensor, dict[str, Tensor]]:
    """Return the next model, in the sent one's dtype, and state that a server update returned; no value is checked."""
    if not _is_pair(moved, parameters):
        said = f"move() must return (next model, next state), the model of shape {tuple(parameters.shape)}"
        raise _wrong("server_update", component, said, moved, where)
    return moved[0].to(parameters.dtype), checked_state(component, moved[1], where)


def checked_state(component: Any, state: Any, where: str = "") -> dict[str, Tensor]:
    """Return the state of a server update: tensors by name, none where it is None."""
    if not _is_named(state):
        said = "its state can't be saved; what it keeps between rounds is tensors by name"
        raise _wrong("server_update", component, said, state, where)
    return dict(state or {})


def blame_for_infinity(component: Any, where: str) -> None:
    """Raise ComponentError for a server update of a user's own that made NaN or infinity of what is finite."""
    if is_own(component):
        raise ComponentError(
            f"{where}{name_in('server_update', component)}: move() returned NaN or infinity, although the model and "
            "all updates are finite; guard its roots and quotients"
        )


def checked_parameters(slot: str, component: Any, function: str, made: Any, parameters: Tensor, where: str) -> Tensor:
    """Return the model that a component's hook returned; to be evaluated, that of a training that diverges need not be
    finite."""
    diverges = function == "evaluated" and not bool((parameters.abs() < LARGE).all())
    made = made.to(parameters.dtype) if isinstance(made, Tensor) else made  # finite numbers may be infinite then
    if not isinstance(made, Tensor) or made.shape != parameters.shape or not (diverges or made.isfinite().all()):
        got = "NaN or infinity" if isinstance(made, Tensor) and made.shape == parameters.shape else _what(made)
        raise ComponentError(
            f"{where}{name_in(slot, component)}: {function}() must return a finite model of shape "
            f"{tuple(parameters.shape)}, not {got}"
        )
    return made


def checked_step(component: Any, stepped: Any, parameters: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the next parameters that a local step returned, and what it carries; the values are not looked at."""
    if not _is_pair(stepped, parameters) or not _is_named(stepped[1]):
        said = "step() must return (next parameters, what it carries by name or None), the parameters of shape"
        raise _wrong("local_step", component, f"{said} {tuple(parameters.shape)}", stepped)
    return stepped[0], dict(stepped[1] or {})


def checked_carried(component: Any, carried: Any) -> dict[str, Tensor]:
    """Return what a local step's `init` returned."""
    if not _is_named(carried):
        said = "init() must return what the first step is given as carried, tensors by name or None"
        raise _wrong("local_step", component, said, carried)
    return dict(carried or {})


def tensors(slot: str, component: Any, function: str, made: Any, where: str = "") -> dict[str, Tensor]:
    """Return the tensors by name that a component's function returned."""
    if made is None or not _is_named(made):
        raise _wrong(slot, component, f"{function}() must return tensors by name", made, where)
    return dict(made)


def tensors_of(slot: str, component: Any, function: str, *given: Any, where: str = "") -> dict[str, Tensor]:
    """Return the tensors by name that a component's function returns."""
    return tensors(slot, component, function, called(slot, component, function, *given, where=where), where)


def checked_sums(component: Any, answers: Iterable[Any]) -> dict[str, Tensor]:
    """Add up what holders of samples answered to a question of a finish, in their order, in float64."""
    name = f"{name_in('finish', component)}: statistics()"
    total: dict[str, Tensor] = {}
    first: dict[str, tuple[int, ...]] = {}
    for answer in answers:
        tensors("finish", component, "statistics", answer)
        shapes = {key: tuple(part.shape) for key, part in answer.items()}
        first = first or shapes
        if shapes != first:
            raise ComponentError(
                f"{name} must return the same names and shapes at every client, and returned {shapes} beside {first}"
            )
        for key, part in answer.items():
            own = part.detach().double().cpu()
            total[key] = total[key] + own if key in total else own
    odd = next((key for key, part in total.items() if not part.isfinite().all()), None)
    if odd is not None:
        raise ComponentError(f"{name}: the sum of {odd!r} is NaN or infinite")
    return total


def checked_finished(component: Any, finished: Any, head: Head) -> Finished:
    """Return the last layer that a finish made."""
    name = f"{name_in('finish', component)}: finish()"
    if not isinstance(finished, Finished) or not all(isinstance(part, Tensor) for part in finished.head):
        raise ComponentError(f"{name} must return Finished(Head(weight, bias)), not {_what(finished)}")
    shapes = [tuple(part.shape) for part in finished.head]
    if shapes != [tuple(part.shape) for part in head]:
        raise ComponentError(
            f"{name} must return a layer of the shapes {', '.join(str(tuple(part.shape)) for part in head)}, not "
            f"{', '.join(map(str, shapes))}"
        )
    if not all(part.isfinite().all() for part in finished.head):
        raise ComponentError(f"{name} returned a layer with NaN or infinity")
    try:
        json.dumps(dict(finished.notes))
    except (TypeError, ValueError):
        said = f"its notes are plain values for the summary, which {_what(finished.notes)} are not"
        raise ComponentError(f"{name}: {said}") from None
    return finished


def checked_private(component: Any, private: Any, names: Names) -> frozenset[str]:
    """Return the names of what never leaves a client, as a personal component returned them."""
    said = f"{name_in('personal', component)}: private()"
    if not isinstance(private, Iterable) or isinstance(private, str):
        raise ComponentError(f"{said} must return names of parameters and buffers, in a set, not {_what(private)}")
    found = frozenset(private)
    if unknown := [*map(str, found - {*names.trained, *names.buffers})]:
        raise ComponentError(
            f"{said} names {min(unknown)}, which is no trained parameter or buffer of the network; take names from "
            "names.trained and names.buffers"
        )
    return found


def checked_trainings(component: Any, trainings: Any) -> tuple[OwnTraining, ...]:
    """Return the trainings of own models that a personal component wants."""
    said = f"{name_in('personal', component)}: trainings()"
    if not isinstance(trainings, tuple) or not all(isinstance(one, OwnTraining) for one in trainings):
        raise ComponentError(f"{said} must return a tuple of OwnTraining, not {_what(trainings)}")
    for one in trainings:
        for key, known in (("when", ("rounds", "end")), ("layers", ("all", "head", "added"))):
            if getattr(one, key) not in known:
                raise ComponentError(f"{said}: {key} must be one of {', '.join(known)}, not {getattr(one, key)!r}")
        if one.when == "rounds" and one.epochs is not None:
            raise ComponentError(f"{said}: in the rounds it takes a round's epochs; leave epochs out")
        if one.when == "end" and len(trainings) > 1:
            raise ComponentError(f'{said}: one of when = "end" stands alone; several are trained in the rounds')
    return trainings


def checked_moved(component: Any, moved: Any, logits: FloatArray, where: str = "") -> FloatArray:
    """Return what a personal component made of a client's logits."""
    found = _floats(moved)
    if found is None or found.shape != logits.shape or (np.isnan(found).any() and not np.isnan(logits).any()):
        got = "NaN" if found is not None and found.shape == logits.shape else _what(moved)
        raise ComponentError(
            f"{where}{name_in('personal', component)}: moved() must return logits of shape {logits.shape}, not {got}"
        )
    return found


def checked_figure(name: Any, value: Any) -> Tensor:
    """Return a figure that a component logs, 0-d; whether it is finite is not looked at."""
    try:
        figure = torch.as_tensor(value).detach().double()
    except (TypeError, ValueError, RuntimeError):
        figure = torch.zeros(1)
    if not isinstance(name, str) or figure.dim():
        raise TypeError(f"log({name!r}, ...): expected a name and one number, not {_what(value)}")
    return figure


def _floats(value: Any) -> FloatArray | None:
    """Return numbers as an array; None for what is none."""
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):  # the last: a tensor that requires a gradient
        return None


def _is_pair(value: Any, like: Tensor) -> bool:
    """Return whether it is a tensor like another, and something else."""
    return (
        isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor) and value[0].shape == like.shape
    )


def _is_named(value: Any) -> bool:
    """Return whether it is tensors by name, or None."""
    return value is None or (isinstance(value, Mapping) and all(isinstance(part, Tensor) for part in value.values()))


def _wrong(slot: str, component: Any, said: str, got: object, where: str = "") -> ComponentError:
    return ComponentError(f"{where}{name_in(slot, component)}: {said}, not {_what(got)}")


def _what(value: object) -> str:
    """Return a value in a few words, for a message."""
    if isinstance(value, tuple) and any(isinstance(part, Tensor | np.ndarray) for part in value):
        return f"({', '.join(map(_what, value))})"
    if isinstance(value, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({type(value).__name__})"
