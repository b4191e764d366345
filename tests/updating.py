"""A round's move of the model by a server update, without a federation."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fedskew.engine.sums import summed


def moved(
    component: Any, state: Any, model: Tensor, updates: Tensor, weights: Any, steps: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The next model and state, from updates `(clients, parameters)`, their weights and local steps."""
    change, extras = summed(component, updates, np.asarray(weights), [int(step) for step in steps])
    return component.move(state, model, change, extras)
