"""Models that clients train for themselves, beside the common one or from it; nothing of them leaves a client."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from fedskew.components import has
from fedskew.engine._backend import BUFFERS, PARAMETERS, Assignment, Backend, LocalWork, Private, Sent, Update
from fedskew.engine._faults import is_finite
from fedskew.engine._training import LocalTraining
from fedskew.hooks import Named
from fedskew.local_steps import SGD, Gradient, StepSettings
from fedskew.models import FlatModel, ModelState
from fedskew.objectives import INDEX, Objective
from fedskew.parameters import NonNegative, component

TOGETHER = 64
"""Clients whose models are trained, and held, at a time."""
SENT, TRAINED = "own.sent", "own.trained"

Score = Callable[[int, ModelState], float | None]
"""How good a client's own model is on its held-out samples; None if it has none."""


@component
class OwnStep(SGD):
    """SGD of a client's own model.

    Attributes:
        pull: Strength of the pull towards the model that was sent.
        some: Whether some of the parameters are trained alone; the others stay as they are.
    """

    pull: NonNegative = 0.0
    some: bool = False

    def direction(self, gradient: Tensor, parameters: Tensor, settings: StepSettings) -> Tensor:
        """Return the gradient plus `pull (v - w)`."""
        if self.pull:
            gradient = torch.add(gradient, parameters - settings.broadcast[SENT], alpha=self.pull)
        return gradient * settings.broadcast[TRAINED] if self.some else gradient

    def step(
        self, parameters: Tensor, gradient: Gradient, carried: Named, settings: StepSettings
    ) -> tuple[Tensor, Named]:
        """Take a step along `direction`; what is not trained stays as it is."""
        moved, carried = super().step(parameters, gradient, carried, settings)
        return (torch.where(settings.broadcast[TRAINED], moved, parameters) if self.some else moved), carried


@dataclass(eq=False)
class OwnModels:
    """One model for each client, trained for itself alone by plain cross-entropy. `name` begins the names of its
    tensors in what clients keep; `trained` masks the parameters that are trained (None: all). A client begins with
    `first` (None: the model that is sent then); with a `score` the best model is kept, and not the last."""

    name: str
    model: FlatModel
    backend: Backend
    private: Private
    settings: LocalTraining
    trained: Tensor | None = None
    first: ModelState | None = None
    score: Score | None = None

    @staticmethod
    def work(like: LocalWork, private: Private, pull: float, some: bool) -> LocalWork:
        """Return the local training of own models on the same samples and settings as another's."""
        step = OwnStep(pull, some) if pull or some else SGD()
        training = replace(like.training, keep_optimizer=False)
        several = has(like.objective.loss, "takes_findings")  # labels a sample
        loss = INDEX["cross_entropy"]().of_findings() if several else INDEX["cross_entropy"]()
        return replace(like, objective=Objective(loss), local_step=step, training=training, hooks={}, private=private)

    def of(self, common: ModelState, kept: Named, best: bool = True) -> ModelState:
        """Return a client's own model, by what it kept; the common one where it has none yet."""
        prefix = f"{self.name}.best." if best and f"{self.name}.best.parameters" in kept else f"{self.name}."
        own = {PARAMETERS: "parameters", BUFFERS: "buffers"}
        return self.private.start(
            self._widened(common), {key: kept[prefix + part] for key, part in own.items() if prefix + part in kept}
        )

    def train(
        self, round: int, tasks: Sequence[Assignment], common: ModelState, kept: Callable[[int], Named]
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Train some clients' own models for a round; yield each client with all that it keeps of its model, but of one
        that diverges, which goes on with the one before. `common` is the model that the server sent, or the one to
        begin with; `kept` gives what a client kept so far."""
        wide = self._widened(common)
        sent = Sent(wide, {SENT: wide.parameters} | ({} if self.trained is None else {TRAINED: self.trained}))
        remaining = iter(tasks)
        while some := list(islice(remaining, TOGETHER)):
            some = [task._replace(state=self._begin(wide, kept(task.client))) for task in some]
            for update in self.backend.train(round, some, sent):
                if is_finite(*update.state.values()):
                    yield update.client, self._next(update, kept(update.client), wide)

    def _begin(self, wide: ModelState, kept: Named) -> dict[str, Tensor]:
        """Return what a client keeps before a round: its own last model, or the first one."""
        begun = f"{self.name}.parameters" in kept
        return self.private.kept(self.of(wide, kept, best=False) if begun or self.first is None else self.first)

    def _next(self, update: Update, kept: Named, wide: ModelState) -> dict[str, Tensor]:
        own = update.state
        last = {f"{self.name}.parameters": own[PARAMETERS], f"{self.name}.buffers": own[BUFFERS]}
        if self.score is None or (score := self.score(update.client, self.of(wide, last))) is None:
            return last
        before = {name: part for name, part in kept.items() if name.startswith(f"{self.name}.best.")}
        if before and score < float(before[f"{self.name}.best.score"]):
            return last | before
        best = {name.replace(f"{self.name}.", f"{self.name}.best."): part.clone() for name, part in last.items()}
        return last | best | {f"{self.name}.best.score": torch.tensor(score, dtype=torch.float64)}

    def _widened(self, common: ModelState) -> ModelState:
        """Return a common model with zeros for the parameters that only own ones have, which stand behind its own."""
        added = len(self.model.vector) - len(common.parameters)
        if not added:
            return common
        return common._replace(parameters=torch.cat([common.parameters, common.parameters.new_zeros(added)]))
