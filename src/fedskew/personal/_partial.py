"""Partial models: some layers never leave the client.

    keep = "head"       FedPer, Arivazhagan et al., arXiv 1912.00818
         and head_epochs       FedRep, Collins et al., ICML 2021: first the kept layers alone, then the others
    keep = "norm"       FedBN, Li et al., ICLR 2021: normalisations, their parameters and running statistics
    keep = ["conv1.*"]  patterns of names, as `fedskew list models NAME` lists them

A client trains all layers, begins with its own kept ones, and sends no change of them. The common model has them as
they were drawn, and so has a client that never took part. Kept layers cost no traffic in a simulation; at real sites
they travel as they were drawn.

[D] The authors' FedRep trains ten epochs of the head and one of the body. `head_epochs` are those of the round's epochs
that train the head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedskew.components import seen_by
from fedskew.errors import ArgumentError
from fedskew.local_steps import Gradient, LocalStep, StepSettings
from fedskew.parameters import Size, component
from fedskew.personal._protocol import Names, Personal

Named = Mapping[str, Tensor]


@component
class Partial(Personal):
    """Layers that never leave the client; the others are averaged.

    Attributes:
        keep: "head": the last linear layer (FedPer); "norm": normalisations with their statistics (FedBN); "all", which
            is training alone; "none"; or patterns of names, such as `["layer4.*", "head.*"]`.
        head_epochs: So many of a round's epochs train the kept layers alone, and those after them the others alone
            (FedRep); 0: all are trained together.
    """

    keep: Literal["head", "norm", "all", "none"] | tuple[str, ...] = "head"
    head_epochs: Size = 0

    takes_findings: ClassVar[bool] = True
    paper: ClassVar[str] = "Arivazhagan et al., arXiv 1912.00818"
    refuses: ClassVar[Mapping[str, str]] = {
        "pipeline.fedconcat": "it puts several networks beside each other, and which layers a client keeps is said of "
        "one; take prior",
        "local_step.scaffold": "it tells the server about gradients of layers that stay at the client; take "
        "sgd, fedprox or fedsam",
    }

    def private(self, names: Names) -> frozenset[str]:
        """See `Personal.private`."""
        whole = (*names.trained, *names.buffers)
        if self.keep == "none":
            return frozenset()
        if self.keep == "all":
            return frozenset(whole)
        if isinstance(self.keep, str):
            found = names.head if self.keep == "head" else names.norm
            lacking = "trained last linear layer" if self.keep == "head" else "trained normalisation"
        else:
            lacking = f"layer of a name like {', '.join(self.keep)}"
            found = frozenset(name for name in whole if any(fnmatchcase(name, one) for one in self.keep))
        if not found:
            layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names.trained))
            shown = ", ".join([*layers[:8], "..."] if len(layers) > 8 else layers)
            raise ArgumentError(f"keep: the network has no {lacking}; its layers are {shown}")
        return found

    def local_step(self, step: LocalStep) -> LocalStep:
        """See `Personal.local_step`."""
        return Alternating(step) if self.head_epochs else step


@dataclass(frozen=True)
class Alternating:
    """A local step that trains the kept layers alone in its first steps, and then the others alone; how many, and
    which, the client's state says (`engine.Private.steps`)."""

    inner: LocalStep

    def init(self, settings: StepSettings) -> dict[str, Tensor]:
        """Return what the inner step carries, and how many steps were taken."""
        return {**(self.inner.init(settings) or {}), "alternating.taken": settings.start.new_zeros(())}

    def step(
        self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings, **seen: Any
    ) -> tuple[Tensor, Named]:
        """Take a step of some layers; what is not trained has no gradient, and stays as it is."""
        taken = carried["alternating.taken"]
        kept = settings.client["private.mask"]
        first, seen = settings.client["private.first"], seen_by(self.inner.step, seen)
        trained = torch.where(taken < first, kept, ~kept)
        if inner := self.inner.init(settings):  # the others' first step begins as a round does
            carried = {name: torch.where(taken == first, inner.get(name, part), part) for name, part in carried.items()}
        moved, following = self.inner.step(
            parameters, lambda at, *part: gradient(at, *part) * trained, carried, settings, **seen
        )
        return torch.where(trained, moved, parameters), {**(following or {}), "alternating.taken": taken + 1}
