"""What config and agreement fix before any site is asked: the network, what leaves a site of it, and how many bytes.

Server, sites and `deploy check` make the same plan, so that what one of them lets pass, the others accept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.deploy._agreement import Agreement, method_of
from fedskew.deploy._arrays import HEADER, ArraySpec, ModelLayout, Specs, specs_of
from fedskew.deploy._finish import FinishQuestion, questions_of, some_samples, sources_of
from fedskew.deploy._site_data import SiteData
from fedskew.engine import Assignment, Backend, ClientStates, Federation, LocalWork, Sent, SequentialBackend, Update
from fedskew.engine.finish import check_finish
from fedskew.engine.sums import FixedPoint, Floats, encode_update
from fedskew.engine.target import Estimation
from fedskew.errors import ArgumentError, ConfigError
from fedskew.experiment import Config, make_network, make_protection, make_work, target_mix
from fedskew.finish import Known
from fedskew.labels import read_target
from fedskew.methods import Method
from fedskew.models import FlatModel
from fedskew.privacy import Protection
from fedskew.randomness import Purpose, generator
from fedskew.sums import Key
from fedskew.weighting import BySums

FloatArray = NDArray[np.float64]

LEEWAY = 2**20
"""Bytes of a reply beside its arrays: names, figures, and Flower's own."""

PUSHES = 4
"""How often a site may push a reply: parts of it may have to be sent again."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a federation of real sites computes and sends, of a config that `check_config` has found to fit.

    Attributes:
        config: The config, with one seed.
        agreement: What server and sites agree on.
        method: The method, which knows the number of sites.
        model: The network.
        protection: The noise of the updates, if they have any.
        estimation: How the target's mix is estimated, if it is.
    """

    config: Config
    agreement: Agreement
    method: Method
    model: FlatModel
    protection: Protection | None
    estimation: Estimation | None

    @classmethod
    def of(cls, config: Config, agreement: Agreement) -> Plan:
        """Make the plan.

        Raises:
            ConfigError: The method or the network can't be made for so many sites or such samples.
        """
        classes, method = len(agreement.classes), method_of(config, agreement)
        model = _network(config, agreement, method)
        protection = make_protection(config, model, len(agreement.names))
        return cls(config, agreement, method, model, protection, config.target.estimation(classes))

    @property
    def is_masked(self) -> bool:
        """Whether updates and evaluations leave a site in masked sums only."""
        return self.agreement.updates == "masked"

    @property
    def fewest(self) -> int:
        """Fewest sites that a masked sum may be over."""
        return max(self.agreement.sum_sites, (self.protection and self.protection.noise.answers) or 0)

    @property
    def by_sums(self) -> BySums | None:
        """The weighting by which each site computes its own weight, where label counts are only ever summed."""
        weighting = self.method.weighting
        return weighting if self.agreement.label_counts == "summed" and isinstance(weighting, BySums) else None

    @cached_property
    def layout(self) -> ModelLayout:
        """The arrays of the model."""
        return ModelLayout(self.model)

    @cached_property
    def returned(self) -> dict[str, ArraySpec]:
        """The arrays that a site returns beside the model after some local steps."""
        return self._returned(samples=2)

    @cached_property
    def returned_idle(self) -> dict[str, ArraySpec]:
        """The arrays that it returns after no step."""
        return self._returned(samples=0)

    @cached_property
    def sums(self) -> Specs:
        """The integers that a site sends of a training, where updates are masked."""
        if not self.is_masked:
            return {}
        state = self.model.read_state()
        if self.protection is not None:
            return {"update": ArraySpec((state.parameters.numel(),), "int32")}  # with noise nothing else is sent
        nothing = Update(
            client=0,
            change=torch.zeros_like(state.parameters),
            norm=torch.zeros(()),
            buffers=state.buffers,
            integers=state.integers,
            steps=1,
            loss=0.0,
            reply={name: torch.zeros(spec.shape) for name, spec in self.returned.items()},
        )
        own = self.by_sums is not None
        encoded = encode_update(self.method, nothing, 0.0, len(self.agreement.sites), own_weight=own)
        return {name: ArraySpec(array.shape, str(array.dtype)) for name, array in encoded.items()}

    @cached_property
    def questions(self) -> tuple[FinishQuestion, ...]:
        """The questions that the method's finish asks after the last round."""
        finish = self.method.finish
        return () if finish is None else tuple(questions_of(finish, self.model, self.agreement))

    @property
    def most_questions(self) -> int:
        """How many questions a site answers after the last round, or about its label counts before the first."""
        asks = self.by_sums or self.method.finish
        return 0 if asks is None else asks.most_questions

    @cached_property
    def reply_bytes(self) -> int:
        """Largest reply of a site, in bytes."""
        classes, bins = len(self.agreement.classes), 1 if self.estimation is None else self.estimation.bins
        if self.is_masked:
            answer = 8 * (classes + 1) ** 2 + 3 * HEADER
            return max(_bytes(self.sums), answer) + len(self.agreement.sites) * (Key.SEED + 200)
        tables = 8 * classes * (classes + 1) * bins + HEADER
        return max(_bytes(self.layout.specs) + _bytes(self.returned) + tables, self._answer_bytes)

    @property
    def pushed_bytes(self) -> int:
        """How many bytes a server should let a site push in reply to one message."""
        return PUSHES * max(self.agreement.max_reply or LEEWAY + self.reply_bytes, LEEWAY + self._answer_bytes)

    @property
    def _answer_bytes(self) -> int:
        return max((_bytes(question.arrays) for question in self.questions), default=0)

    def _returned(self, samples: int) -> dict[str, ArraySpec]:
        """Train a site on samples of zeros, and see what it returns."""
        agreement, config = self.agreement, self.config
        inputs = some_samples(agreement)[:samples]
        targets = torch.arange(samples) % len(agreement.classes)
        data = SiteData(inputs, targets, inputs[:0], targets[:0], len(agreement.classes), Path())
        work = make_work(config, config.seeds[0], self.method, data, tuple(agreement.mean), tuple(agreement.std))
        return returned_by(_network(config, agreement, self.method), work, len(agreement.sites))

    def mix(self, counts: FloatArray, target: Path | None = None) -> FloatArray | None:
        """Return the target's label mix, of a file or else of the config; None where it is estimated."""
        if target is not None:
            return read_target(target, self.agreement.classes)
        if self.estimation is not None:
            return None
        return target_mix(self.config.target.mix, counts.shape[1], {"pooled": counts.sum(axis=0)}, {})

    def federation(
        self,
        backend: Backend,
        counts: FloatArray,
        clients: ClientStates,
        mix: FloatArray | None,
        announced: Mapping[str, FloatArray] | None = None,
    ) -> Federation:
        """Make what plays the rounds.

        Args:
            backend: Trains the sites.
            counts: Their label counts, `(sites, classes)`.
            clients: What is kept of them.
            mix: The target's label mix (see `mix`).
            announced: What sums of label counts tell all sites, where they are only summed.

        Raises:
            ConfigError: The method does not fit so many sites, their label counts or the target.
        """
        training, finish = self.config.training, self.method.finish
        told = None if announced is None else dict(announced)
        codec = FixedPoint(self.protection, told) if self.is_masked else Floats()
        try:
            if finish is not None:
                is_estimated = self.agreement.target_site is not None
                rng = generator(self.config.seeds[0], Purpose.FINISH)
                known = Known(sources_of(self.agreement), mix, is_estimated, rng)
                check_finish(finish, self.model.module, some_samples(self.agreement), known)
        except ArgumentError as error:
            raise ConfigError(str(error)) from None
        try:
            return Federation(
                method=self.method,
                backend=backend,
                counts=counts,
                target=mix,
                participation=training.participation,
                seed=self.config.seeds[0],
                epochs=training.most_epochs,
                steps=training.steps,
                clients=clients,
                weight_limit=training.weight_limit,
                aim=self.estimation,
                codec=codec,
            )
        except ArgumentError as error:
            raise ConfigError(f"method: {error}") from None


def returned_by(model: FlatModel, work: LocalWork, clients: int) -> dict[str, ArraySpec]:
    """Find the arrays that a client returns beside the model, by training it."""
    start = model.read_state()
    sent: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    for hooks in work.hooks.values():
        sent |= hooks.broadcast(hooks.init_server(start.parameters, clients))
        kept |= hooks.init_client(start.parameters)
    (update,) = SequentialBackend(model, work).train(1, [Assignment(0, 1, kept)], Sent(start, sent))
    return specs_of(update.reply)


def _network(config: Config, agreement: Agreement, method: Method) -> FlatModel:
    return FlatModel(make_network(config, config.seeds[0], method, len(agreement.classes), tuple(agreement.shape)))


def _bytes(specs: Specs) -> int:
    return sum(spec.bytes + HEADER for spec in specs.values())
