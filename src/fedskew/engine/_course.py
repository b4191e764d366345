"""What a run asks of the rounds that it plays."""

from __future__ import annotations

from typing import Any, Protocol

from fedskew.engine._records import Round
from fedskew.models import ModelState


class RoundRunner(Protocol):
    """Rounds, one after another; a state has the number of its last `round`, and the `model` that is trained."""

    def open(self) -> None:
        """Get the backend ready."""

    def close(self) -> None:
        """Let go of what the backend holds."""

    def start(self, model: ModelState) -> Any:
        """The state before the first round, from the untrained model."""

    def run_round(self, state: Any) -> tuple[Any, Round]:
        """One round: the next state and its record (without evaluations)."""

    def evaluated_model(self, state: Any) -> ModelState | None:
        """The model to evaluate and to save; None where there is none of all clients yet."""
