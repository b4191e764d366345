"""The finish of a simulated run: its clients' samples, the target's, and what the server knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedskew.engine import ClientSamples, EstimatedMix, FinishedModel, answer, check_finish, finish_model
from fedskew.errors import ArgumentError, ConfigError
from fedskew.finish import Finish, Known, Source
from fedskew.models import FlatModel, ModelState
from fedskew.randomness import Purpose, generator


@dataclass(frozen=True)
class LocalFinisher:
    """Finishes models on this machine (see `Finisher`).

    Attributes:
        component: The finish.
        model: The network that states are written into.
        holders: Who holds samples, by their kind: each holder's samples, one at least.
        samples: Some samples, `(batch, ...)`, by which the last layer is found.
        target: Target label mix that the server knows, `(classes,)`, or None.
        is_estimated: Whether the server estimates the mix.
        seed: The run's seed.

    Raises:
        ConfigError: The component needs samples that there aren't, or can't be applied to the network.
    """

    component: Finish
    model: FlatModel
    holders: Mapping[Source, Sequence[ClientSamples]]
    samples: Tensor
    target: NDArray[np.float64] | None
    is_estimated: bool
    seed: int

    def __post_init__(self) -> None:
        try:
            check_finish(self.component, self.model.module, self.samples, self._known(None))
        except ArgumentError as error:
            raise ConfigError(str(error)) from None

    def _known(self, server: Any) -> Known:
        estimated = getattr(server, "target", None)
        mix = estimated.used if isinstance(estimated, EstimatedMix) else self.target
        sources = frozenset(source for source, held in self.holders.items() if held)
        return Known(sources, mix, self.is_estimated, generator(self.seed, Purpose.FINISH))

    def __call__(self, model: ModelState, server: Any) -> FinishedModel:
        """Finish a model; the same one gives the same bits, however its rounds were played."""
        return finish_model(self.component, self.model, model, self.samples, self._answers, self._known(server))

    def _answers(self, source: Source, question: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for samples in self.holders[source]:
            yield answer(self.component, self.model.module, samples, question, labelled=source != "target")
