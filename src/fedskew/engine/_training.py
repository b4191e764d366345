"""Settings of local training: batches, the optimiser, and its learning rate from round to round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedskew.components import find
from fedskew.data import SAMPLERS
from fedskew.errors import ArgumentError, ComponentError, in_one_line, nearest
from fedskew.local_steps import Adam, StepSettings
from fedskew.models import FlatModel
from fedskew.parameters import FloatArray, IntArray


class Group(NamedTuple):
    """Parameters whose names match a pattern, with their own learning rate in the first round, or weight decay."""

    match: str
    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class LocalTraining:
    """Settings of local training that all clients share, whatever the method.

    Attributes:
        batch_size: Samples in a batch.
        lr: Learning rate of the first round; without a schedule, in round r (from 1) it is `lr * lr_decay ** (r - 1)`.
        lr_decay: Factor of the learning rate from round to round; of schedule "step" every `decay_every` rounds.
        schedule: "cosine" and "linear" lead from `lr` to `final_lr` (None: 0), that of the round after the last.
        warmup: In so many rounds before that, the learning rate grows from `lr / (warmup + 1)` by equal steps.
        rounds: Number of rounds, which "cosine" and "linear" need.
        optimizer: What takes the steps.
        momentum: Momentum of SGD, in [0, 1).
        betas: Adam's and AdamW's decay of the means of gradients and of their squares, each in [0, 1).
        eps: Adam's and AdamW's addition to the denominator.
        weight_decay: L2 penalty, added to the gradient; of AdamW the share of lr by which parameters shrink.
        keep_optimizer: Each client keeps what its optimiser carries between participations: SGD's momentum buffer, as
            FedVLS's public code does for its baselines, or Adam's means and number of steps.
        clip_norm: Longer gradients are scaled down to this norm; None: they are not.
        groups: Parameters with a learning rate or weight decay of their own; the first that matches a name counts.
        precision: "bf16": networks compute gradients in bfloat16, by autocast; None: in float32.
        teacher_train_mode: The teacher's batch norm uses batch statistics, as FedVLS's public code does for itself.
        smallest_batch: The last batch of an epoch is left out if it has fewer samples. 1 leaves out none; `batch_size`
            or more leaves out every short one.
        sampler: A name of `data.SAMPLERS`, or `module:function` (labels, counts, rng) -> rows of an epoch; None: every
            sample once, shuffled.
    """

    batch_size: int = 64
    lr: float = 0.01
    lr_decay: float = 1.0
    schedule: Literal["cosine", "step", "linear"] | None = None
    decay_every: int | None = None
    final_lr: float | None = None
    warmup: int | None = None
    rounds: int | None = None
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    betas: tuple[float, float] = Adam().betas
    eps: float = Adam().eps
    weight_decay: float = 0.0
    keep_optimizer: bool = False
    clip_norm: float | None = None
    groups: tuple[Group, ...] = ()
    precision: Literal["bf16"] | None = None
    teacher_train_mode: bool = False
    smallest_batch: int = 1
    sampler: str | None = None

    def __post_init__(self) -> None:
        plan, adam, ends = f"a {self.schedule} schedule", self.adapts_rates, self.schedule in ("cosine", "linear")
        stepped, final = self.schedule == "step", self.final_lr or 0.0
        betas, eps = tuple(self.betas) != Adam().betas, self.eps != Adam().eps
        short = self.rounds is not None and max(self.rounds, 1) <= (self.warmup or 0)
        bare = any(group.lr is None and group.weight_decay is None for group in self.groups)
        reasons = (
            (not adam and betas, 'betas: are Adam\'s; set optimizer = "adam" or "adamw", or leave them out'),
            (not adam and eps, 'eps: is Adam\'s; set optimizer = "adam" or "adamw", or leave it out'),
            (adam and self.momentum, f"momentum: is SGD's; the first of {self.optimizer}'s betas is like it"),
            (ends and self.rounds is None, f"rounds: {plan} ends with the last one; say how many there are"),
            (short, f"warmup: {self.warmup}, of {self.rounds} in all, leaves no round for the learning rate itself"),
            (ends and self.lr_decay != 1, f"lr_decay: {plan} has its own; leave it out"),
            (ends and final >= self.lr, f"final_lr: {final:g} is not below lr, which is {self.lr:g}"),
            (not ends and self.final_lr is not None, 'final_lr: is of schedule = "cosine" or "linear"; leave it out'),
            (stepped and self.decay_every is None, f"decay_every: missing; {plan} multiplies lr every so many rounds"),
            (stepped and self.lr_decay == 1, f"lr_decay: at 1 {plan} changes nothing; set one such as 0.1"),
            (not stepped and self.decay_every is not None, 'decay_every: is of schedule = "step"; leave it out'),
            (bare, "groups: one says neither lr nor weight_decay; give one of them, or leave it out"),
        )
        if (reason := next((reason for holds, reason in reasons if holds), None)) is not None:
            raise ArgumentError(reason)

    @property
    def adam(self) -> Adam | None:
        """Adam's settings; None: the optimiser is SGD."""
        return None if self.optimizer == "sgd" else Adam(self.betas, self.eps, self.optimizer == "adamw")

    @property
    def adapts_rates(self) -> bool:
        """Whether each parameter's step is divided by what its gradients were (a property for rules: `components`)."""
        return self.optimizer != "sgd"

    def drawn(self, labels: IntArray, counts: FloatArray, rng: np.random.Generator) -> IntArray:
        """Draw the rows of an epoch, by the labels of a client's samples and its label counts, `(classes,)`."""
        assert self.sampler is not None, "by the caller"
        draw, name = find(SAMPLERS, self.sampler, "training.sampler"), f"training.sampler {self.sampler}"
        try:
            rows = np.asarray(draw(labels, counts, rng))
        except Exception as error:
            raise ComponentError(f"{name}: failed: {in_one_line(error)}") from error
        if rows.shape != labels.shape or rows.dtype.kind not in "iu" or not 0 <= rows.min() <= rows.max() < len(rows):
            raise ComponentError(
                f"{name}: must return a row for each of the client's samples ({len(labels)}), whole numbers from 0 to "
                f"{len(labels) - 1}; got {rows.dtype} of shape {rows.shape}"
            )
        return rows.astype(np.int64)

    def bf16_on(self, device: torch.device) -> Literal["computed", "emulated"] | None:
        """Say whether a processor has instructions for bfloat16, or is slower by it; None: it is not used."""
        if self.precision is None:
            return None
        if device.type == "cuda":
            able = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            able = any(held for name, held in torch.cpu.get_capabilities().items() if "bf16" in name)
        return "computed" if able else "emulated"

    def samples_of_epoch(self, samples: int) -> int:
        """Count the samples that a client trains on in an epoch: all, less a last batch below `smallest_batch`."""
        last = samples % self.batch_size
        return samples - last if last < self.smallest_batch else samples

    @property
    def clips_gradients(self) -> bool:
        """Whether gradients are clipped (a property for rules)."""
        return self.clip_norm is not None

    @property
    def keeps_momentum(self) -> bool:
        """Whether a client's momentum goes on from its last participation (a property for rules)."""
        return self.keep_optimizer and self.momentum > 0

    @property
    def has_rates(self) -> bool:
        """Whether a group of parameters has a learning rate of its own (a property for rules)."""
        return any(group.lr is not None for group in self.groups)

    @property
    def has_decays(self) -> bool:
        """Whether a group of parameters has a weight decay of its own (a property for rules)."""
        return any(group.weight_decay is not None for group in self.groups)

    def settings(self, round: int, start: Tensor) -> StepSettings:
        """Make the settings that all local steps of a client share, but for groups and what came beside the model."""
        return StepSettings(
            start, self.lr_of(round), self.momentum, self.weight_decay, adam=self.adam, clip_norm=self.clip_norm
        )

    def of_parameters(self, model: FlatModel) -> dict[str, Any]:
        """Return the fields of `StepSettings` for parameters of their own rate or decay; none where all are alike."""
        if not self.groups:
            return {}
        made = torch.ones_like(model.vector), torch.full_like(model.vector, self.weight_decay)
        rates, decays = map(model.views, made)
        for name, at in self._group_of_name(model.names).items():
            _, lr, decay = self.groups[at]
            if lr is not None:
                rates[name].fill_(lr / self.lr)
            if decay is not None:
                decays[name].fill_(decay)
        both = torch.stack(made)
        ends = [*(torch.nonzero((both[:, 1:] != both[:, :-1]).any(0))[:, 0] + 1).tolist(), both.shape[1]]
        return {"rates": made[0], "decays": made[1], "spans": tuple(zip([0, *ends], ends, strict=False))}

    def check_groups(self, names: Sequence[str]) -> None:
        """Raise ArgumentError for a group that none of these names of parameters belongs to."""
        found, layers = self._group_of_name(names).values(), {f"{name.partition('.')[0]}.*" for name in names}
        for at, (match, *_) in enumerate(self.groups):
            if at not in found and any(fnmatchcase(name, match) for name in names):
                raise ArgumentError(
                    f"groups[{at}].match: all that {match!r} matches is in groups before it; put it first"
                )
            if at not in found:
                said = f"groups[{at}].match: no parameter that is trained has a name like {match!r}"
                raise ArgumentError(said + nearest(match, layers))

    def _group_of_name(self, names: Sequence[str]) -> dict[str, int]:
        """Return the place of the first group that matches each name, of the names that one matches."""
        places = {name: [at for at, one in enumerate(self.groups) if fnmatchcase(name, one.match)] for name in names}
        return {name: found[0] for name, found in places.items() if found}

    def lr_of(self, round: int) -> float:
        """Compute the learning rate of a round; after the last one a schedule stays where it is."""
        warmup = self.warmup or 0
        if round <= warmup:
            return self.lr * round / (warmup + 1)
        passed = round - warmup - 1
        if self.schedule not in ("cosine", "linear"):
            return self.lr * self.lr_decay ** (passed // (self.decay_every or 1))
        rounds = max(1, (self.rounds or 0) - warmup)
        share, final = min(passed, rounds - 1) / rounds, self.final_lr or 0.0
        left = (1 + math.cos(math.pi * share)) / 2 if self.schedule == "cosine" else 1 - share
        return final + (self.lr - final) * left

    def batches_of_epoch(self, samples: int) -> int:
        """Count the batches in an epoch."""
        return -(-self.samples_of_epoch(samples) // self.batch_size)

    def steps(self, epochs: float, samples: int, most: int | None = None) -> int:
        """Count a client's local steps; a part of an epoch is rounded up to whole batches."""
        steps = math.ceil(epochs * self.batches_of_epoch(samples) - 1e-9)
        return steps if most is None else min(steps, most)
