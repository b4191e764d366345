"""One client after another, on one model in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedskew.data import Augmentation
from fedskew.engine._backend import LocalTraining, Update
from fedskew.errors import RunError
from fedskew.local_steps import LocalStep, StepSettings
from fedskew.models import Dropout, FlatModel, ModelState, Outputs, with_features
from fedskew.objectives import Batch, Context, Objective
from fedskew.randomness import Purpose, fold, generator, mix, stream_key

Observer = Callable[[int, nn.Module], None]
"""Called with a client and its model right after its local training, before the next client's."""


@dataclass
class Sequential:
    """Trains a cohort client by client.

    `inputs`, `(samples, ...)`, and `targets`, `(samples,)`, are on the model's device; `samples[k]` are the rows of
    client k, and `counts[k]` its label counts. Shuffles, dropout and augmentation depend on (seed, round, client) only.
    """

    model: FlatModel
    inputs: Tensor
    targets: Tensor
    samples: Sequence[NDArray[np.int64]]
    counts: NDArray[np.float64]
    objective: Objective
    local_step: LocalStep
    training: LocalTraining
    seed: int
    augment: Augmentation | None = None
    observe: Observer | None = None
    _network: nn.Module = field(init=False)
    _teacher: FlatModel | None = field(init=False, default=None)
    _teacher_network: nn.Module | None = field(init=False, default=None)
    _dropouts: list[Dropout] = field(init=False)

    def __post_init__(self) -> None:
        self._network = with_features(self.model.module)
        self._dropouts = [layer for layer in self.model.module.modules() if isinstance(layer, Dropout)]
        if "teacher" in self.objective.reads:
            self._teacher = FlatModel(copy.deepcopy(self.model.module))
            self._teacher_network = with_features(self._teacher.module).eval()

    def train(
        self, round: int, cohort: Sequence[int], sent: ModelState, quotas: NDArray[np.float64] | None = None
    ) -> list[Update]:
        """See `Backend.train`."""
        if self._teacher is not None:
            self._teacher.write_state(sent)
        return [
            self._train(round, client, sent, None if quotas is None else quotas[place])
            for place, client in enumerate(cohort)
        ]

    def _train(self, round: int, client: int, sent: ModelState, quota: NDArray[np.float64] | None) -> Update:
        training, device = self.training, sent.parameters.device
        settings = StepSettings(
            start=sent.parameters,
            lr=training.lr * training.lr_decay ** (round - 1),
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )
        held = self.counts[client] if quota is None else quota
        counts = torch.as_tensor(held, dtype=sent.parameters.dtype, device=device)
        self.model.write_state(sent)
        self._network.train()
        parameters, carried = sent.parameters, self.local_step.init(sent.parameters)
        dropout_key = stream_key(self.seed, Purpose.DROPOUT_LAYER, round, client)
        augmentation_key = stream_key(self.seed, Purpose.AUGMENTATION, round, client)
        total, rows = torch.zeros((), device=device), 0
        steps = 0
        samples = self.samples[client] if quota is None else self._drawn(round, client, quota)
        for batch in self._batches(round, client, samples, device):
            for layer in self._dropouts:
                layer.key.fill_(fold(dropout_key, steps))
            x, y = self.inputs.index_select(0, batch), self.targets.index_select(0, batch)
            if self.augment is not None:
                x = self.augment(x, mix(torch.arange(len(batch), device=device), augmentation_key, steps))
            values: list[Tensor] = []
            gradient = self._gradient(x, y, counts, values)
            try:
                parameters, carried = self.local_step.step(parameters, gradient, carried, settings)
            except (RuntimeError, ValueError) as error:
                where = f"round {round}, client {client}, step {steps} ({len(batch)} samples)"
                raise RunError(f"{where}: local training failed: {' '.join(str(error).split())}") from error
            total += values[0] * len(batch)
            rows += len(batch)
            steps += 1
        self.model.write(parameters)
        if self.observe is not None:
            self.observe(client, self.model.module)
        trained = self.model.read_state()
        return Update(
            client=client,
            change=trained.parameters - sent.parameters,
            buffers=trained.buffers,
            integers=trained.integers,
            steps=steps,
            loss=float(total) / rows if rows else 0.0,
        )

    def _drawn(self, round: int, client: int, quota: NDArray[np.float64]) -> NDArray[np.int64]:
        """As many of a client's samples of each class as its quota says."""
        samples = self.samples[client]
        labels = self.targets[torch.from_numpy(samples).to(self.targets.device)].cpu().numpy()
        rng = generator(self.seed, Purpose.QUOTA, round, client)
        drawn = [rng.permutation(samples[labels == label])[: int(share)] for label, share in enumerate(quota)]
        return np.concatenate(drawn)

    def _batches(self, round: int, client: int, samples: NDArray[np.int64], device: torch.device) -> list[Tensor]:
        """Rows of every batch of every epoch, in a fresh order each epoch; the last short batch is kept."""
        if len(samples) == 0:
            return []
        rng = generator(self.seed, Purpose.SHUFFLE, round, client)
        orders = (torch.from_numpy(samples[rng.permutation(len(samples))]) for _ in range(self.training.epochs))
        return [batch for order in orders for batch in torch.split(order.to(device), self.training.batch_size)]

    def _gradient(self, x: Tensor, y: Tensor, counts: Tensor, values: list[Tensor]) -> Callable[[Tensor], Tensor]:
        """The gradient of one batch's objective as a function of the parameters.

        The returned vector is the model's own: it holds until the next call. Each call appends the objective's value.
        """
        teacher: Outputs | None = None
        if self._teacher_network is not None:
            with torch.no_grad():
                teacher = self._teacher_network(x)
        context = Context(counts=counts, teacher=teacher)

        def gradient(parameters: Tensor) -> Tensor:
            self.model.write(parameters)
            self.model.zero_gradient()
            features, logits = self._network(x)
            value = self.objective.value(Batch(features, logits, y), context)
            value.backward()  # type: ignore[no-untyped-call]
            values.append(value.detach())
            return self.model.gradient

        return gradient
