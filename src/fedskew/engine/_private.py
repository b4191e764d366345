"""What never leaves a client: some or all of a model's parameters and buffers, which the client keeps in its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedskew.models import FlatModel, ModelState

PARAMETERS, BUFFERS = "private.parameters", "private.buffers"
"""Names of what a client kept, in its state."""


class Private(NamedTuple):
    """What never leaves a client: masks of the model's parameters and of its floating-point buffers, 1-d, bool.

    `first_epochs`: so many epochs train these parameters alone (see `personal.Alternating`).
    """

    parameters: Tensor
    buffers: Tensor
    first_epochs: int = 0

    @staticmethod
    def of(model: FlatModel, names: frozenset[str], first_epochs: int = 0) -> Private:
        """Mark the parameters and buffers of these names."""
        state = model.read_state()
        parameters, buffers = torch.zeros_like(state.parameters), torch.zeros_like(state.buffers)
        for name, part in (model.views(parameters) | model.buffer_views(buffers, state.integers)).items():
            if name in names:
                part.fill_(1)
        return Private(parameters.bool(), buffers.bool(), first_epochs)

    @property
    def bytes(self) -> int:
        """Bytes of what does not travel."""
        return 4 * int(self.parameters.sum() + self.buffers.sum())

    def start(self, sent: ModelState, state: Mapping[str, Tensor]) -> ModelState:
        """Return the model that a client begins with: the one that was sent, with what the client kept."""
        if PARAMETERS not in state:
            return sent
        parameters, buffers = sent.parameters.clone(), sent.buffers.clone()
        parameters[self.parameters] = state[PARAMETERS].to(parameters.device)
        buffers[self.buffers] = state[BUFFERS].to(buffers.device)
        return sent._replace(parameters=parameters, buffers=buffers)

    def shared(self, model: ModelState, sent: ModelState) -> ModelState:
        """Return a client's model as others may see it: with what is private as it was sent."""
        parameters = torch.where(self.parameters, sent.parameters, model.parameters)
        return model._replace(parameters=parameters, buffers=torch.where(self.buffers, sent.buffers, model.buffers))

    def kept(self, model: ModelState) -> dict[str, Tensor]:
        """Return what a client keeps of its model, for its state."""
        return {PARAMETERS: model.parameters[self.parameters], BUFFERS: model.buffers[self.buffers]}

    def steps(self, of_epoch: int) -> dict[str, Tensor]:
        """Return what a step that trains some layers first reads of the client's state."""
        if not self.first_epochs:
            return {}
        first = torch.full((), float(of_epoch * self.first_epochs), device=self.parameters.device)
        return {"private.first": first, "private.mask": self.parameters}
