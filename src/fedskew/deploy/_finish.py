"""The finish of a federation of real sites: questions after the last round, whose answers are added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedskew.deploy._agreement import Agreement
from fedskew.deploy._arrays import ArraySpec, RefusedError, Specs, decode, encode, specs_of
from fedskew.deploy._ask import Replies
from fedskew.deploy._evaluations import limit
from fedskew.deploy._log import LOG
from fedskew.deploy._messages import ARRAYS, BROADCAST, CONFIG, FINISH, REPLY, SOURCE
from fedskew.deploy._replies import bytes_needed, check_size
from fedskew.deploy._sites import Sites
from fedskew.deploy._watch import Watch
from fedskew.engine import ServerState
from fedskew.engine.finish import FinishedModel, check_finish, finish_model
from fedskew.engine.target import EstimatedMix
from fedskew.errors import ArgumentError, ConfigError, FedskewError, RunError, in_one_line
from fedskew.finish import Finish, Head, Known, Observed, Source
from fedskew.models import FlatModel, ModelState
from fedskew.randomness import Purpose, generator

ATTEMPTS = 5
"""How often a finish begins, each time without the sites that stopped answering."""

MOST_BYTES = 1 << 27
"""Largest answer of a site in bytes: the server holds the answers of all sites at once."""

Tensors = Mapping[str, Tensor]


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


def sources_of(agreement: Agreement) -> frozenset[Source]:
    """Return the samples that sites answer questions about: training, test and the target site's, as agreed."""
    known: set[Source] = {"training"}
    if agreement.evaluates:
        known.add("held_out")
    if agreement.target_site is not None:
        known.add("target")
    return frozenset(known)


def some_samples(agreement: Agreement) -> Tensor:
    """Return two samples of zeros, by which the last layer is found."""
    return torch.zeros(2, *agreement.shape, dtype=torch.int64 if agreement.tokens else torch.float32)


def questions_of(component: Finish, model: FlatModel, agreement: Agreement) -> list[FinishQuestion]:
    """Find the questions that a finish will ask, by running it on random features; ConfigError if it fails on them."""
    samples, classes = some_samples(agreement), len(agreement.classes)
    known = Known(
        sources_of(agreement), torch.full((classes,), 1 / classes).double().numpy(), False, generator(0, Purpose.FINISH)
    )
    asked: dict[str, FinishQuestion] = {}
    try:
        layer = check_finish(component, model.module, samples, known)
        head = Head(layer.weight.detach().double().cpu(), layer.bias.detach().double().cpu())
        drawn = torch.from_numpy(
            generator(0, Purpose.FINISH).standard_normal((8 * classes, head.weight.shape[1]))
        ).float()
        logits = (drawn.double() @ head.weight.T + head.bias).float()

        def ask(source: Source, **question: Tensor) -> dict[str, Tensor]:
            labels = None if source == "target" else torch.arange(len(drawn)) % classes
            found = component.statistics(question, Observed(drawn, logits, labels))
            one = FinishQuestion(source, tuple(sorted(question)), specs_of(found))
            if (most := bytes_needed(one.arrays)) > MOST_BYTES:
                raise ArgumentError(
                    f"{type(component).__name__} asks each site for {most / 1e6:,.0f} MB, and a server takes "
                    f"{MOST_BYTES / 1e6:,.0f} MB; take a network with fewer features at its end, or another finish"
                )
            asked[repr(one)] = one
            return {name: part.double() for name, part in found.items()}

        component.finish(head, ask, known)
    except FedskewError as error:
        raise ConfigError(f"method.finish: {str(error).removeprefix('method.finish: ')}") from None
    except Exception as error:  # a user's own component can raise anything
        raise ConfigError(f"method.finish: {type(component).__name__} can't be tried: {in_one_line(error)}") from error
    return list(asked.values())


class _KeptError(FedskewError):
    """Raised where the trained model is to stay as it is."""


class _AwayError(FedskewError):
    """Raised where the target site does not answer."""


class _MissingError(FedskewError):
    """Raised where a site that answered before does not answer any more."""

    def __init__(self, clients: Sequence[int]) -> None:
        super().__init__(f"{len(clients)} sites do not answer")
        self.clients = clients


Reported = Mapping[int, NDArray[Any]] | None
"""The number of samples of each class that each site reported, by client; None where they are not exact."""


@dataclass(frozen=True)
class SiteFinisher:
    """Finishes models by asking the sites (see `experiment.Finisher`).

    All questions go to the same sites. Where one of them stops answering, or answers what can't be true, the finish
    begins anew without it. `target` is the label mix that the server knows, if it does; `reported_samples` goes from a
    source, the last round and its model to what sites reported of that source. Raises ConfigError where the component
    needs samples or a target that this federation does not have, or can't be applied to the network.
    """

    component: Finish
    model: FlatModel
    sites: Sites
    agreement: Agreement
    target: NDArray[Any] | None
    seed: int
    reported_samples: Callable[[Source, int, ModelState], Reported]

    def __post_init__(self) -> None:
        try:
            _ = self._head_shape
        except ArgumentError as error:
            raise ConfigError(str(error)) from None

    @cached_property
    def _head_shape(self) -> tuple[int, int]:
        """Classes and features of the last layer, which is found by computing the network once."""
        layer = check_finish(self.component, self.model.module, some_samples(self.agreement), self._known(None))
        classes, dim = layer.weight.shape
        return classes, dim

    def __call__(self, model: ModelState, server: ServerState) -> FinishedModel:
        """Finish a model; where too few sites answer, it stays as it was trained, and the notes say why.

        Where the target site does not answer, its mix is the newest estimate of the rounds; without one, the model
        stays as it was trained.

        Raises:
            RunError: No site answers, or the answers don't allow it.
        """
        names, mix = self.sites.members.names, EstimatedMix.of(server)
        asking = _Asking(self, model, server.round, set(Watch.of(server).out()))
        for _ in range(ATTEMPTS):
            asking.begin()
            known = self._known(mix, asking.is_away)
            try:
                return finish_model(
                    self.component, self.model, model, some_samples(self.agreement), asking.answers, known
                )
            except _MissingError as error:
                lost = ", ".join(names[client] for client in error.clients)
                LOG.warning("finish: begins anew without %s, which no longer answers", lost)
                asking.out.update(error.clients)
            except _AwayError as error:
                if self._known(mix).target is None:
                    LOG.warning("finish: the model stays as it was trained: %s", error)
                    return FinishedModel(model, {"kept": str(error)})
                LOG.warning("finish: %s; the target's mix is the newest estimate of the rounds", error)
                asking.is_away = True
            except _KeptError as error:
                LOG.warning("finish: the model stays as it was trained: %s", error)
                return FinishedModel(model, {"kept": str(error)})
            except FedskewError:
                raise
            except (ArithmeticError, ValueError, RuntimeError) as error:  # LinAlgError is one of these
                name = type(self.component).__name__
                raise RunError(
                    f"method.finish: {name}: the sites' answers, added up, can't be computed with "
                    f"({in_one_line(error)}); the log says who answered what"
                ) from error
        raise RunError(
            f"method.finish: sites stopped answering {ATTEMPTS} times; start the run again when they are there"
        )

    def _known(self, target: EstimatedMix | None, is_away: bool = False) -> Known:
        mix = self.target if target is None else target.used
        is_estimated = self.agreement.target_site is not None
        sources = sources_of(self.agreement) - ({"target"} if is_away else set())
        return Known(sources, mix, is_estimated, generator(self.seed, Purpose.FINISH))

    def ask(
        self, model: ModelState, source: Source, question: Tensors, clients: Iterable[int], reported: Reported
    ) -> Replies[dict[str, Tensor]]:
        """Ask clients a question about their samples; a site that reported none is not used."""
        layout = self.sites.validator.layout
        content = RecordDict(
            {
                ARRAYS: layout.to_record(model),
                BROADCAST: encode(dict(question)),
                CONFIG: ConfigRecord({SOURCE: source}),
            }
        )
        classes, dim = self._head_shape
        labels = None if source == "target" else torch.zeros(1, dtype=torch.int64)
        none = Observed(torch.zeros(1, dim), torch.zeros(1, classes), labels)
        expected = specs_of(self.component.statistics(question, none))

        def read(reply: RecordDict, client: int) -> dict[str, Tensor]:
            answer = _read(reply, expected)
            self._check(question, answer, reported, client)
            return answer

        return self.sites.members.ask(f"query.{FINISH}", dict.fromkeys(clients, content), read, FINISH, in_round=False)

    def _check(self, question: Tensors, answer: Tensors, reported: Reported, client: int) -> None:
        """Raise RefusedError for an answer that can't be true."""
        samples = None if reported is None else reported.get(client)
        if reported is not None and samples is None:
            raise RefusedError("it did not evaluate the trained model, so how many such samples it has is not known")
        if not answer:
            if samples is not None and samples.any():
                raise RefusedError("it reported such samples before, and now answers as if it had none")
            return
        reason = self.component.refuse(question, answer, samples)
        if reason is not None:
            raise RefusedError(reason)


@dataclass
class _Asking:
    """The questions of one finish, and who still answers them: not `out`, and not `silent`, which would cost a timeout.

    `needed` is the fewest sites that have to answer, 0 before the first question; `members` are the clients that
    answered of each source, in this attempt.
    """

    finisher: SiteFinisher
    model: ModelState
    round: int
    out: set[int]
    is_away: bool = False
    silent: set[int] = field(default_factory=set)
    needed: int = 0
    members: dict[Source, set[int]] = field(default_factory=dict)
    reported: dict[Source, Reported] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin an attempt, whose first answers say who is asked further questions."""
        self.members.clear()

    def answers(self, source: Source, question: Tensors) -> list[dict[str, Tensor]]:
        """Ask the sites; raise an error where not all answer that have to."""
        if source == "target":
            return [self._of_target(question)]
        finisher = self.finisher
        if source not in self.reported:
            self.reported[source] = finisher.reported_samples(source, self.round, self.model)
        among = self.members.get(source)
        clients = [
            client
            for client in finisher.sites.members.online()
            if client not in self.out | self.silent and (among is None or client in among)
        ]
        replies = finisher.ask(self.model, source, question, clients, self.reported[source])
        self.silent.update(replies.silent)
        is_first = not self.needed
        self.needed = self.needed or max(finisher.agreement.min_sites, math.ceil(len(clients) / 2))
        self._check_enough(replies, len(clients), is_first)
        if lost := self.members.setdefault(source, {*replies.valid}) - {*replies.valid}:
            raise _MissingError(sorted(lost))
        return _limited(replies.valid, self.reported[source])

    def _check_enough(self, replies: Replies[Any], asked: int, is_first: bool) -> None:
        """Raise _KeptError where too few sites answer for the finish to be theirs.

        Where nobody answers the first question at all, starting the run again may help.
        """
        refused = sum(reason.startswith("not agreed") for reason in replies.failed.values())
        if len(replies.valid) >= self.needed or (is_first and not replies.valid and 2 * refused < asked):
            return
        said = f", {refused} of them did not agree to the question" if refused else ""
        raise _KeptError(f"{len(replies.valid)} of {asked} sites answer{said}, and {self.needed} are needed")

    def _of_target(self, question: Tensors) -> dict[str, Tensor]:
        """Ask the target site about its samples without labels; raise _AwayError where it does not answer."""
        target = self.finisher.sites.target
        assert target is not None, "only such a site has these samples"
        place = target.place
        there = [place] if place not in self.out and place in self.finisher.sites.members.connected() else []
        answer = self.finisher.ask(self.model, "target", question, there, None).valid.get(place)
        if not answer:
            raise _AwayError(f"the target site {target.name} does not answer")
        return answer


def _limited(answers: Mapping[int, dict[str, Tensor]], reported: Reported) -> list[dict[str, Tensor]]:
    """Return the answers of sites with such samples, in their order; of three or more none counts for over half."""
    used = {client: answers[client] for client in sorted(answers) if answers[client]}
    sizes = {client: float(reported[client].sum()) for client in used} if reported is not None else {}
    if sizes and min(sizes.values()) > 0:
        largest, factor = limit(sizes)
        if factor < 1:
            used[largest] = {name: part.double() * factor for name, part in used[largest].items()}
    return list(used.values())


def _read(content: RecordDict, expected: Specs) -> dict[str, Tensor]:
    """Validate a site's sums by name, of these shapes and finite; none of a site that holds no such samples."""
    check_size(content, bytes_needed(expected))
    record = content.get(REPLY)
    if not isinstance(record, ArrayRecord):
        raise RefusedError(f"the reply has no ArrayRecord {REPLY!r}")
    if not len(record):
        return {}
    return {
        name: torch.from_numpy(array.copy()) for name, array in decode(record, expected, "the site's array").items()
    }
