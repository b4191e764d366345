"""The slots of a method, what may fill them, and the method itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedskew import (
    aggregation,
    finish,
    local_steps,
    objectives,
    personal,
    pipelines,
    selection,
    server_updates,
    weighting,
)
from fedskew.aggregation import Aggregation, Mean
from fedskew.finish import Finish
from fedskew.local_steps import LocalStep
from fedskew.objectives import Loss, Objective
from fedskew.personal import Personal
from fedskew.pipelines import FedConcat
from fedskew.selection import Selection
from fedskew.server_updates import ServerUpdate
from fedskew.weighting import Weighting

Table = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One component for each slot.

    Attributes:
        objective: What a client minimises: a classification loss and weighted terms.
        pipeline: Set where the rounds are not all alike.
        finish: What happens once after the last round; mostly nothing.
        personal: What a client does with the common model for itself; mostly nothing.
    """

    selection: Selection
    objective: Objective
    local_step: LocalStep
    weighting: Weighting
    server_update: ServerUpdate
    aggregation: Aggregation = field(default_factory=Mean)
    pipeline: FedConcat | None = None
    finish: Finish | None = None
    personal: Personal | None = None

    def components(self) -> list[tuple[str, Any]]:
        """Return every component with its slot; the objective as its loss and its terms."""
        losses: list[Loss] = [self.objective.loss, *(term for _, term in self.objective.terms)]
        others = [
            (slot, getattr(self, slot)) for slot in PLACES if slot != "objective" and getattr(self, slot) is not None
        ]
        return [*others, *(("objective", loss) for loss in losses)]


SLOTS: dict[str, Mapping[str, type]] = {
    "selection": selection.INDEX,
    "objective": objectives.INDEX,
    "local_step": local_steps.INDEX,
    "weighting": weighting.INDEX,
    "aggregation": aggregation.INDEX,
    "server_update": server_updates.INDEX,
}
"""The components of each slot of a round by name."""

PLACES: dict[str, Mapping[str, type]] = {
    **SLOTS,
    "finish": finish.INDEX,
    "personal": personal.INDEX,
    "pipeline": pipelines.INDEX,
}
"""Where a component may stand: the slots of a round, and others, which most methods leave empty."""

DEFAULTS: dict[str, Table] = {
    "selection": {"name": "uniform"},
    "objective": {"name": "cross_entropy", "terms": []},
    "local_step": {"name": "sgd"},
    "weighting": {"name": "fedavg"},
    "aggregation": {"name": "mean"},
    "server_update": {"name": "plain"},
}
"""The components of slots that a config does not name: FedAvg's."""


def key_of(slot: str, component: Any) -> str:
    """Return the `slot.name` of a component; a user's class that inherits from one of ours has the name of ours."""
    for kind in type(component).__mro__:
        for name, known in PLACES[slot].items():
            if known is kind:
                return f"{slot}.{name}"
    return f"{slot}.{type(component).__module__}:{type(component).__qualname__}"


def name_of_key(key: str) -> str:
    """Return the name in a `slot.name`."""
    return key.partition(".")[2]


def named(slot: str, component: Any) -> str:
    """Return a component's name in a config, without its slot."""
    return name_of_key(key_of(slot, component))
