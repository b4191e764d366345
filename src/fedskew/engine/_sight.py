"""What a component's functions see beside their arguments (`components.SEEN`), and the figures that they log."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedskew.components import SEEN, seen_by
from fedskew.engine._backend import tensor_bytes
from fedskew.engine._records import Cohort, FloatArray, Notes
from fedskew.engine._states import ServerState
from fedskew.engine.contracts import calling, checked_choice, checked_figure, name_in
from fedskew.errors import ComponentError
from fedskew.models import FlatModel


class Sight(NamedTuple):
    """What can be seen in a round at the server, where the `state` has the sent model, or the next one."""

    state: ServerState
    notes: Notes
    network: FlatModel | None = None
    samples: Any = None

    def call(self, slot: str, component: Any, function: str, *arguments: Any, **more: Any) -> Any:
        """Call a component's function, with what it takes by name; `more` is what it alone may see."""
        with calling(slot, component, function, f"round {self.state.round}: "):
            seen = self._seen(slot, component, function, more)
            return getattr(component, function)(*arguments, **seen)

    def _seen(self, slot: str, component: Any, function: str, more: dict[str, Any]) -> dict[str, Any]:
        network = self.network
        seen = seen_by(getattr(component, function), dict.fromkeys(SEEN.get(function, ())))
        if not seen:
            return seen
        known = {
            "sent": self.state.model.parameters,
            "layout": None if network is None else network.layout,
            "network": network,
            "samples": self.samples,
            "log": self.notes.log,
            **more,
        }
        seen = {key: known.get(key) for key in seen}
        for key, value in seen.items():
            if value is None and key != "target":
                where = f"round {self.state.round}: {name_in(slot, component)}"
                raise ComponentError(f"{where}: {function}() takes {key}: {_MISSING[key]}")
        if network is not None and "network" in seen:
            network.write_state(self.state.model)
        return seen


def losses_of(federation: Any, state: ServerState, notes: Notes) -> Callable[[Any], FloatArray] | None:
    """Return what asks clients for the mean objective of the present model over their samples, and notes what travels;
    None: these clients can't be asked."""
    ask: Callable[..., list[float]] | None = getattr(federation.backend, "ask_losses", None)
    if ask is None:
        return None

    def losses(candidates: Any) -> FloatArray:
        ids, _ = checked_choice(federation.method.selection, (candidates, None), len(federation.counts))
        nobody, sizes = np.zeros(len(ids), dtype=np.bool_), federation.sizes
        samples = None if sizes is None else sizes[ids]
        sent, tasks = federation.instruct(state, Cohort(ids, nobody, federation.counts[ids], False, notes, samples))
        found = np.array(ask(state.round, tasks, sent), dtype=np.float64)
        notes.bytes_down += (federation.model_bytes(state.model) + tensor_bytes(sent.broadcast)) * len(ids)
        notes.bytes_up += found.nbytes
        return found

    return losses


_MISSING = {
    "samples": "the server holds none; set data.validation = 0.1, in a simulation",
    "losses": "real sites don't tell losses of a model before a round; take another selection there",
    "updates": "they are not seen one by one here",
    **dict.fromkeys(("layout", "network"), "here is no network, only arrays"),
}


class ClientLog:
    """Figures logged at a client, or at each client of a stack: the mean of each name's values."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._times: dict[str, int] = {}

    def __call__(self, name: str, value: Any) -> None:
        """Note a figure; nothing waits for the device."""
        figure = checked_figure(name, value)
        self._sums[name] = self._sums[name] + figure if name in self._sums else figure
        self._times[name] = self._times.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Return the means by name."""
        return {name: float(total) / self._times[name] for name, total in self._sums.items()}
