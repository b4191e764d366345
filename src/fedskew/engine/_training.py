"""Settings of local training: batches, the optimiser, and its learning rate from round to round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedskew.errors import ArgumentError
from fedskew.local_steps import Adam, StepSettings


@dataclass(frozen=True)
class LocalTraining:
    """Settings of local training that all clients share, whatever the method.

    Attributes:
        batch_size: Samples in a batch.
        lr: Learning rate of the first round; in round r (from 1) it is `lr * lr_decay ** (r - 1)`.
        lr_decay: Factor of the learning rate from round to round.
        optimizer: What takes the steps.
        momentum: Momentum of SGD, in [0, 1).
        betas: Adam's and AdamW's decay of the means of gradients and of their squares, each in [0, 1).
        eps: Adam's and AdamW's addition to the denominator.
        weight_decay: L2 penalty, added to the gradient; of AdamW the share of lr by which parameters shrink.
        keep_optimizer: Each client keeps what its optimiser carries between participations: SGD's momentum buffer, as
            FedVLS's public code does for its baselines, or Adam's means and number of steps.
        teacher_train_mode: The teacher's batch norm uses batch statistics, as FedVLS's public code does for itself.
        smallest_batch: The last batch of an epoch is left out if it has fewer samples. 1 leaves out none; `batch_size`
            or more leaves out every short one.
        sampler: "balanced": an epoch draws as many samples as the client has, with replacement, each from one of its
            classes, all of which are as likely; None: every sample once, shuffled.
    """

    batch_size: int = 64
    lr: float = 0.01
    lr_decay: float = 1.0
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    betas: tuple[float, float] = Adam().betas
    eps: float = Adam().eps
    weight_decay: float = 0.0
    keep_optimizer: bool = False
    teacher_train_mode: bool = False
    smallest_batch: int = 1
    sampler: Literal["balanced"] | None = None

    def __post_init__(self) -> None:
        if self.optimizer == "sgd" and (tuple(self.betas), self.eps) != Adam()[:2]:
            key = "eps" if tuple(self.betas) == Adam().betas else "betas"
            raise ArgumentError(f'{key}: is of Adam; set optimizer = "adam" or "adamw", or leave it out')
        if self.optimizer != "sgd" and self.momentum:
            raise ArgumentError(f"momentum: is SGD's; of {self.optimizer} set betas, whose first number is like it")

    @property
    def adam(self) -> Adam | None:
        """Adam's settings; None: the optimiser is SGD."""
        return None if self.optimizer == "sgd" else Adam(self.betas, self.eps, self.optimizer == "adamw")

    @property
    def adapts_rates(self) -> bool:
        """Whether each parameter's step is divided by what its gradients were (a property for rules: `components`)."""
        return self.optimizer != "sgd"

    def samples_of_epoch(self, samples: int) -> int:
        """Count the samples that a client trains on in an epoch: all, less a last batch below `smallest_batch`."""
        last = samples % self.batch_size
        return samples - last if last < self.smallest_batch else samples

    def settings(self, round: int, start: Tensor) -> StepSettings:
        """Make the settings that all local steps of a client share, but for what it was sent beside the model."""
        return StepSettings(start, self.lr_of(round), self.momentum, self.weight_decay, adam=self.adam)

    def lr_of(self, round: int) -> float:
        """Compute the learning rate of a round."""
        return self.lr * self.lr_decay ** (round - 1)

    def batches_of_epoch(self, samples: int) -> int:
        """Count the batches in an epoch."""
        return -(-self.samples_of_epoch(samples) // self.batch_size)

    def steps(self, epochs: float, samples: int, most: int | None = None) -> int:
        """Count a client's local steps; a part of an epoch is rounded up to whole batches."""
        steps = math.ceil(epochs * self.batches_of_epoch(samples) - 1e-9)
        return steps if most is None else min(steps, most)
