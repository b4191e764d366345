"""What config and agreement fix before any site is asked: the network, what leaves a site of it, and how many bytes.

Server, sites and `deploy check` make the same plan, so that what one of them lets pass, the others accept.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.data import Profile
from fedskew.deploy._agreement import Agreement, method_of
from fedskew.deploy._arrays import HEADER, ArraySpec, FloatArray, ModelLayout, Specs, bytes_of, specs_of
from fedskew.deploy.site_data import SiteData
from fedskew.engine import Assignment, Backend, ClientStates, Federation, LocalWork, Sent, SequentialBackend, Update
from fedskew.engine.contracts import tensors_of
from fedskew.engine.finish import check_finish
from fedskew.engine.sums import FixedPoint, Floats, encode_update
from fedskew.engine.target import Estimation
from fedskew.errors import ArgumentError, ConfigError, FedskewError, in_one_line, placed
from fedskew.experiment import Config, make_network, make_protection, make_work, target_mix
from fedskew.finish import Head, Known, Observed, Source
from fedskew.labels import read_target
from fedskew.methods import Method
from fedskew.models import FlatModel
from fedskew.privacy import Protection
from fedskew.randomness import Purpose, generator
from fedskew.sums import Key
from fedskew.weighting import BySums

MOST_BYTES = 1 << 27
"""Largest answer of a site to a finish in bytes: the server holds the answers of all sites at once."""

LEEWAY = 2**20
"""Bytes of a reply beside its arrays: names, figures, and Flower's own."""

PUSHES = 4
"""How often a site may push a reply: parts of it may have to be sent again."""


class FinishQuestion(NamedTuple):
    """A question of a finish: which samples it is about, its tensors' names, sorted, and the sums in the answer."""

    source: Source
    names: tuple[str, ...]
    arrays: dict[str, ArraySpec]

    def __str__(self) -> str:
        return kind_of(self.source, self.names)


def kind_of(source: str, names: Iterable[str]) -> str:
    """Name a kind of question as `agreed.toml` does: the samples that it is about, and the tensors in it."""
    return f"{source}: {', '.join(sorted(names)) or 'nothing'}"


@dataclass(frozen=True, eq=False)
class Plan:
    """What a federation of real sites computes and sends, of a config with one seed that can be deployed."""

    config: Config
    agreement: Agreement
    method: Method
    model: FlatModel
    protection: Protection | None
    estimation: Estimation | None

    @classmethod
    def of(cls, config: Config, agreement: Agreement, target: Path | None = None, at_site: bool = False) -> "Plan":
        """Make the plan; ConfigError where the config can't be deployed (see `Agreement.check_config`)."""
        agreement.check_config(config, target, at_site)
        classes, method = len(agreement.classes), method_of(config, agreement)
        model = _network(config, agreement, method)
        protection = make_protection(config, model, len(agreement.names))
        return cls(config, agreement, method, model, protection, config.target.estimation(classes))

    @property
    def is_masked(self) -> bool:
        """Whether updates and evaluations leave a site in masked sums only."""
        return self.agreement.updates == "masked"

    @property
    def target_place(self) -> int:
        """The client index of the target site; after the others' if it has no labels."""
        members = self.agreement.members
        return members.index(self.agreement.target_site) if self.agreement.target_site is not None else -1

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
    def profile_size(self) -> int:
        """How many numbers say what a site's inputs look like; 0: sites don't tell."""
        cells = self.agreement.cells
        if cells is None or not self.agreement.sums_profile or self.config.privacy is not None:
            return 0
        return Profile.size(cells)

    @property
    def site_models(self) -> tuple[str, ...]:
        """The models that a site compares, as rows of a table, beginning with the one that it trains alone."""
        return ("alone", "common") if self.method.personal is None else ("alone", "common", "personal")

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
        sites = len(self.agreement.sites)
        encoded = encode_update(self.method, nothing, 0.0, sites, own_weight=self.by_sums is not None)
        return {name: ArraySpec(array.shape, str(array.dtype)) for name, array in encoded.items()}

    @property
    def some_samples(self) -> Tensor:
        """Two samples of zeros, by which the last layer is found."""
        agreement = self.agreement
        return torch.zeros(2, *agreement.shape, dtype=torch.int64 if agreement.tokens else torch.float32)

    def known(self, mix: FloatArray | None, is_away: bool = False) -> Known:
        """Return what a finish knows: whose samples are answered for, the target's unless it `is_away`, and the mix."""
        sources: set[Source] = {"training"}
        if self.agreement.evaluates:
            sources.add("held_out")
        has_target = self.agreement.target_site is not None
        if has_target and not is_away:
            sources.add("target")
        return Known(frozenset(sources), mix, has_target, generator(self.config.seeds[0], Purpose.FINISH))

    def finished_layer(self, known: Known) -> nn.Linear:
        """Return the layer that the method's finish changes; ArgumentError where it can't, or lacks what it takes."""
        assert self.method.finish is not None, "by the caller"
        return check_finish(self.method.finish, self.model.module, self.some_samples, known)

    @cached_property
    def questions(self) -> tuple[FinishQuestion, ...]:
        """The questions of the method's finish, found by running it on random features; ConfigError if it fails."""
        component, classes = self.method.finish, len(self.agreement.classes)
        if component is None:
            return ()
        rng, asked = generator(0, Purpose.FINISH), dict[str, FinishQuestion]()
        known = self.known(np.full(classes, 1 / classes))
        try:
            layer = self.finished_layer(known)
            head = Head(layer.weight.detach().double().cpu(), layer.bias.detach().double().cpu())
            drawn = torch.from_numpy(rng.standard_normal((8 * classes, head.weight.shape[1]))).float()
            logits = (drawn.double() @ head.weight.T + head.bias).float()

            def ask(source: Source, **question: Tensor) -> dict[str, Tensor]:
                labels = None if source == "target" else torch.arange(len(drawn)) % classes
                found = component.statistics(question, Observed(drawn, logits, labels))
                one = FinishQuestion(source, tuple(sorted(question)), specs_of(found))
                if (most := LEEWAY + bytes_of(one.arrays)) > MOST_BYTES:
                    raise ArgumentError(
                        f"{type(component).__name__} asks each site for {most / 1e6:,.0f} MB, and a server takes "
                        f"{MOST_BYTES / 1e6:,.0f} MB; take a network with fewer features at its end, or another finish"
                    )
                asked[repr(one)] = one
                return {name: part.double() for name, part in component.summand(question, found).items()}

            component.finish(head, ask, known)
        except FedskewError as error:
            raise ConfigError(f"method.finish: {str(error).removeprefix('method.finish: ')}") from None
        except Exception as error:  # a user's own component can raise anything
            kind = type(component).__name__
            raise ConfigError(f"method.finish: {kind} can't be tried: {in_one_line(error)}") from error
        return tuple(asked.values())

    @property
    def most_questions(self) -> int:
        """How many questions a site answers after the last round, or about its label counts before the first."""
        asks = self.by_sums or self.method.finish
        return 0 if asks is None else asks.most_questions

    @cached_property
    def reply_bytes(self) -> int:
        """Largest reply of a site, in bytes."""
        classes, bins = len(self.agreement.classes), 1 if self.estimation is None else self.estimation.bins
        counted = 8 * max(self.agreement.tally.size, self.profile_size)
        if self.is_masked:
            answer = max(8 * (classes + 1) ** 2, counted) + 3 * HEADER
            return max(bytes_of(self.sums), answer) + len(self.agreement.sites) * (Key.SEED + 200)
        tables = max(8 * classes * (classes + 1) * bins, counted) + HEADER
        return max(bytes_of(self.layout.specs) + bytes_of(self.returned) + tables, self._answer_bytes)

    @property
    def pushed_bytes(self) -> int:
        """How many bytes a server should let a site push in reply to one message."""
        return PUSHES * max(self.agreement.max_reply or LEEWAY + self.reply_bytes, LEEWAY + self._answer_bytes)

    @property
    def _answer_bytes(self) -> int:
        return max((bytes_of(question.arrays) for question in self.questions), default=0)

    def class_weights(self, counts: FloatArray, size: float) -> tuple[float, ...]:
        """Return what samples, or labels, of each class count for by all sites' label counts and number of samples."""
        return self._work(0, counts, size if self.agreement.multi_label else None).objective.class_weights

    def _returned(self, samples: int) -> dict[str, ArraySpec]:
        work = self._work(samples)
        if not work.hooks:
            return {}
        return returned_by(_network(self.config, self.agreement, self.method), work, len(self.agreement.sites))

    def _work(self, samples: int, counts: FloatArray | None = None, size: float | None = None) -> LocalWork:
        agreement, classes = self.agreement, len(self.agreement.classes)
        inputs, targets = self.some_samples[:samples], torch.arange(samples) % classes
        data = SiteData(inputs, targets, inputs[:0], targets[:0], classes, Path(), multi_label=agreement.multi_label)
        return self.work(data, self.model, counts, size)

    def work(
        self, data: SiteData, model: FlatModel, counts: FloatArray | None = None, size: float | None = None
    ) -> LocalWork:
        """Return the local training of a site's samples, of the plan's network or of what of it trains at the site."""
        agreement, seed = self.agreement, self.config.seeds[0]
        known = tuple(agreement.mean), tuple(agreement.std), len(agreement.classes), counts, size
        return make_work(self.config, seed, self.method, model, data, *known)

    def mix(self, counts: FloatArray, target: Path | None = None) -> FloatArray | None:
        """Return the target's label mix, of a file or else of the config; None where it is estimated."""
        if target is not None:
            return read_target(target, self.agreement.classes)
        if self.estimation is not None:
            return None
        return target_mix(self.config.target.mix, counts.shape[1], {"pooled": counts.sum(axis=0)}, {}, "target.mix")

    def federation(
        self,
        backend: Backend,
        counts: FloatArray,
        clients: ClientStates,
        mix: FloatArray | None,
        announced: Mapping[str, FloatArray] | None = None,
        sizes: FloatArray | None = None,
    ) -> Federation:
        """Make what plays the rounds; ConfigError where the method does not fit so many sites, their counts or `mix`.
        `announced` is what sums of label counts tell; `sizes` are samples where these have several labels."""
        training, told = self.config.training, None if announced is None else dict(announced)
        codec = FixedPoint(self.protection, told) if self.is_masked else Floats()
        if self.method.finish is not None:
            with placed(""):
                self.finished_layer(self.known(mix))
        with placed("method: "):
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
                network=self.model,
                sizes=sizes,
            )


def returned_by(model: FlatModel, work: LocalWork, clients: int) -> dict[str, ArraySpec]:
    """Find the arrays that a client returns beside the model: none without hooks; else by training it."""
    if not work.hooks:
        return {}
    start = model.read_state()
    sent, kept = dict[str, Tensor](), dict[str, Tensor]()
    for name, hooks in work.hooks.items():
        first = tensors_of(name, hooks, "init_server", start.parameters, clients)
        sent |= tensors_of(name, hooks, "broadcast", first)
        kept |= tensors_of(name, hooks, "init_client", start.parameters)
    (update,) = SequentialBackend(model, work).train(1, [Assignment(0, 1, kept)], Sent(start, sent))
    return specs_of(update.reply)


def _network(config: Config, agreement: Agreement, method: Method) -> FlatModel:
    shape, classes = tuple(agreement.shape), len(agreement.classes)
    some = torch.arange(2 * math.prod(shape)).view(2, *shape) % 2  # as token ids, which any vocabulary has
    if not agreement.tokens:
        some = torch.randn(some.shape, generator=torch.Generator().manual_seed(0))
    return FlatModel.of(make_network(config, config.seeds[0], method, classes, shape, some), some)
