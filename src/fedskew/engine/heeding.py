"""Whether a local step goes by the settings of training that it is given, found out by what it does.

Two steps along a gradient of ones, and then of tens, on parameters of ones: where they lead to the same bits, and carry
the same, with a setting as without, the step ignores it.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedskew.components import seen_by
from fedskew.engine.contracts import checked_carried, checked_step, name_in
from fedskew.errors import ComponentError
from fedskew.local_steps import StepSettings, steps_in_place

HEEDED: Mapping[str, str] = {
    "clips_gradients": "training.clip_norm",
    "has_rates": "the lr of training.groups",
    "has_decays": "the weight_decay of training.groups",
}
"""The settings, by the property for rules (`components`) that a run with one has."""


def check_heeds(component: Any, asked: Collection[str], settings: StepSettings, seen: Mapping[str, Any]) -> None:
    """Raise ComponentError for a local step that does the same with settings that are `asked` for as without them."""
    start = torch.ones_like(settings.start)
    plain = settings._replace(start=start, lr=0.1, clip_norm=None, rates=None, decays=None)
    own = torch.full_like(start, plain.weight_decay)
    alike = {"rates": start, "decays": own, "spans": ((0, len(start)),)}
    given: Mapping[str, Mapping[str, Any]] = {
        "clips_gradients": {"clip_norm": 1e-6},
        "has_rates": alike | {"rates": start / 2},
        "has_decays": alike | {"decays": own + 0.5},
    }
    first = _two_steps(component, plain, seen)
    for name in (name for name in HEEDED if name in asked):
        second = _two_steps(component, plain._replace(**given[name]), seen)
        if first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first):
            stepped = "step()" if steps_in_place(component) is None else "step_in_place()"
            raise ComponentError(
                f"{name_in('local_step', component)}: {stepped} does the same with {HEEDED[name]} as without; let "
                f"SGD().step(...) take the step, leave {HEEDED[name]} out, or refuse it: "
                f'refuses = {{"training.{name}": "why; what to do instead"}}'
            )


def _two_steps(component: Any, settings: StepSettings, seen: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return where two steps lead, and what they carry: the second's gradient is ten times the first's."""
    parameters, carried = settings.start, checked_carried(component, component.init(settings))
    for size in (1.0, 10.0):
        gradient = partial(lambda slope, at, *part: slope, torch.full_like(parameters, size))
        if (in_place := steps_in_place(component)) is not None:
            parameters = parameters.clone()
            in_place.step_in_place(parameters, gradient, carried, settings)
        else:
            stepped = component.step(parameters, gradient, carried, settings, **seen_by(component.step, seen))
            parameters, carried = checked_step(component, stepped, parameters)
    return {**carried, "": parameters}
