"""The finish of a federation of real sites: questions after the last round, whose answers are added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedskew.deploy._agreement import Agreement
from fedskew.deploy._arrays import ArraySpec, RefusedError, Specs, decode, encode, specs_of
from fedskew.deploy._evaluations import limit
from fedskew.deploy._exchange import exchange
from fedskew.deploy._log import LOG
from fedskew.deploy._messages import ARRAYS, BROADCAST, CONFIG, FINISH, REPLY, SOURCE
from fedskew.deploy._replies import bytes_needed, check_size
from fedskew.deploy._sites import Sites
from fedskew.engine import EstimatedMix, FinishedModel, Target, check_finish, finish_model
from fedskew.errors import ArgumentError, ConfigError, FedskewError, RunError, in_one_line
from fedskew.finish import Finish, Head, Known, Observed, Source
from fedskew.models import FlatModel, ModelState
from fedskew.randomness import Purpose, generator

ATTEMPTS = 5
"""How often a finish begins, each time without the sites that stopped answering."""

SILENT = "no reply in time"

MOST_BYTES = 1 << 27
"""Largest answer of a site in bytes: the server holds the answers of all sites at once."""


class FinishQuestion(NamedTuple):
    """A question that a finish asks every site.

    Attributes:
        source: The samples that it is about.
        names: Names of the tensors that it consists of, sorted.
        arrays: Shapes and dtypes of the sums in the answer.
    """

    source: Source
    names: tuple[str, ...]
    arrays: dict[str, ArraySpec]

    def __str__(self) -> str:
        return kind_of(self.source, self.names)


def kind_of(source: str, names: Iterable[str]) -> str:
    """Name a kind of question as `agreed.toml` does: the samples that it is about, and the tensors in it."""
    return f"{source}: {', '.join(sorted(names)) or 'nothing'}"


def sources_of(agreement: Agreement) -> frozenset[Source]:
    """Return the samples that sites answer questions about.

    Besides training samples these are test samples, where sites evaluate models on them, and the target site's samples
    without labels.
    """
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
    """Find the questions that a finish will ask, by running it on random features.

    Raises:
        ConfigError: It fails on them.
    """
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


@dataclass(frozen=True)
class SiteFinisher:
    """Finishes models by asking the sites (see `experiment.Finisher`).

    All questions go to the same sites. Where one of them stops answering, or answers what can't be true, the finish
    begins anew without it.

    Attributes:
        component: The finish.
        model: The network that states are written into.
        sites: The sites.
        agreement: What server and sites agree on.
        target: The target's label mix that the server knows, `(classes,)`, or None.
        seed: The run's seed.
        reported_samples: Given a source, the last round and its model, returns the number of samples of each class that
            each site reported for that source, by client index; None where sites don't report exact numbers.

    Raises:
        ConfigError: The component needs samples or a target that this federation does not have, or can't be applied to
            the network.
    """

    component: Finish
    model: FlatModel
    sites: Sites
    agreement: Agreement
    target: NDArray[Any] | None
    seed: int
    reported_samples: Callable[[Source, int, ModelState], Mapping[int, NDArray[Any]] | None]

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

    def __call__(self, model: ModelState, server: Any) -> FinishedModel:
        """Finish a model; where too few sites answer, it stays as it was trained, and the notes say why.

        Where the target site does not answer, its mix is the newest estimate of the rounds; without one, the model
        stays as it was trained.

        Raises:
            RunError: No site answers, or the answers don't allow it.
        """
        out, known = set(server.watch.out()), server.server.target
        reported: dict[Source, Mapping[int, NDArray[Any]] | None] = {}
        needed, is_away = 0, False
        members: dict[Source, set[int]] = {}
        silent: set[int] = set()  # not asked again: each would cost another timeout
        for _ in range(ATTEMPTS):
            members.clear()

            def answers(source: Source, question: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
                nonlocal needed
                if source == "target":
                    return [self._ask_target(model, question, out)]
                if source not in reported:
                    reported[source] = self.reported_samples(source, server.server.round, model)
                nodes = {
                    node: client
                    for client, node in self.sites.online().items()
                    if client not in out | silent and client in members.get(source, {client})
                }
                found = self._exchange(model, source, question, nodes, reported[source])
                silent.update(client for client in nodes.values() if found.failures.get(client) == SILENT)
                is_first = not needed
                needed = needed or max(self.agreement.min_sites, math.ceil(len(nodes) / 2))
                self._check_enough(found, needed, len(nodes), is_first)
                if lost := members.setdefault(source, set(found.valid)) - set(found.valid):
                    raise _MissingError(sorted(lost))
                return _limited(found.valid, reported[source])

            try:
                return finish_model(
                    self.component,
                    self.model,
                    model,
                    some_samples(self.agreement),
                    answers,
                    self._known(known, is_away),
                )
            except _MissingError as error:
                names = ", ".join(self.sites.validator.names[client] for client in error.clients)
                LOG.warning("finish: begins anew without %s, which no longer answers", names)
                out.update(error.clients)
            except _AwayError as error:
                if self._known(known).target is None:
                    LOG.warning("finish: the model stays as it was trained: %s", error)
                    return FinishedModel(model, {"kept": str(error)})
                LOG.warning("finish: %s; the target's mix is the newest estimate of the rounds", error)
                is_away = True
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

    def _check_enough(self, found: _SiteAnswers, needed: int, asked: int, is_first: bool) -> None:
        """Raise _KeptError where too few sites answer for the finish to be theirs.

        Where nobody answers the first question at all, starting the run again may help.
        """
        refused = sum(reason.startswith("not agreed") for reason in found.failures.values())
        if len(found.valid) >= needed or (is_first and not found.valid and 2 * refused < asked):
            return
        said = f", {refused} of them did not agree to the question" if refused else ""
        raise _KeptError(f"{len(found.valid)} of {asked} sites answer{said}, and {needed} are needed")

    def _known(self, target: Target | None, is_away: bool = False) -> Known:
        mix = target.used if isinstance(target, EstimatedMix) else self.target
        is_estimated = self.agreement.target_site is not None
        sources = sources_of(self.agreement) - ({"target"} if is_away else set())
        return Known(sources, mix, is_estimated, generator(self.seed, Purpose.FINISH))

    def _ask_target(self, model: ModelState, question: Mapping[str, Tensor], out: set[int]) -> dict[str, Tensor]:
        """Ask the target site about its samples without labels.

        Raises:
            _AwayError: It does not answer.
        """
        target = self.sites.target
        assert target is not None, "only such a site has these samples"
        nodes = {node: place for place, node in self.sites.connected().items() if place == target.place}
        found = {} if target.place in out else self._exchange(model, "target", question, nodes, None).valid
        if not found.get(target.place):
            raise _AwayError(f"the target site {target.name} does not answer")
        return found[target.place]

    def _exchange(
        self,
        model: ModelState,
        source: Source,
        question: Mapping[str, Tensor],
        nodes: Mapping[int, int],
        reported: Mapping[int, NDArray[Any]] | None,
    ) -> _SiteAnswers:
        """Ask nodes a question.

        Args:
            model: The trained model.
            source: The samples that it is about.
            question: What is sent.
            nodes: Clients by node.
            reported: The number of samples of each class that each site reported; a site that reported none is not
                used.
        """
        sites, names = self.sites, self.agreement.members
        content = RecordDict(
            {
                ARRAYS: sites.validator.layout.to_record(model),
                BROADCAST: encode(dict(question)),
                CONFIG: ConfigRecord({SOURCE: source}),
            }
        )
        expected = self._expected(question, labelled=source != "target")
        answers = exchange(sites.grid, dict.fromkeys(nodes, content), f"query.{FINISH}", sites.timeout, FINISH).by(
            nodes
        )
        failures = dict.fromkeys(answers.silent, SILENT) | answers.failures
        found = {}
        for client, reply in answers.contents.items():
            try:
                found[client] = read_answer(reply, expected)
                self._check(question, found[client], reported, client)
            except RefusedError as error:
                failures[client] = f"refused: {error}"
                found.pop(client, None)
                sites.validator.refuse(client, f"finish: {error}")
        for client, reason in failures.items():
            LOG.warning("finish: no answer of %s: %s", names[client], reason)
        return _SiteAnswers(found, failures)

    def _check(
        self,
        question: Mapping[str, Tensor],
        answer: Mapping[str, Tensor],
        reported: Mapping[int, NDArray[Any]] | None,
        client: int,
    ) -> None:
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

    def _expected(self, question: Mapping[str, Tensor], labelled: bool) -> Specs:
        classes, dim = self._head_shape
        labels = torch.zeros(1, dtype=torch.int64) if labelled else None
        none = Observed(torch.zeros(1, dim), torch.zeros(1, classes), labels)
        return specs_of(self.component.statistics(question, none))


class _SiteAnswers(NamedTuple):
    """Valid answers to a question by client, empty of a site without such samples; and why others are not used."""

    valid: dict[int, dict[str, Tensor]]
    failures: dict[int, str]


def _limited(
    found: Mapping[int, dict[str, Tensor]], reported: Mapping[int, NDArray[Any]] | None
) -> list[dict[str, Tensor]]:
    """Return the answers of sites with such samples, in their order; of three or more none counts for over half."""
    given = {client: found[client] for client in sorted(found) if found[client]}
    sizes = {client: float(reported[client].sum()) for client in given} if reported is not None else {}
    if sizes and min(sizes.values()) > 0:
        largest, factor = limit(sizes)
        if factor < 1:
            given[largest] = {name: part.double() * factor for name, part in given[largest].items()}
    return list(given.values())


def read_answer(content: RecordDict, expected: Specs) -> dict[str, Tensor]:
    """Validate a site's answer to a question of a finish.

    Args:
        content: The reply's records.
        expected: Shapes and dtypes of the sums.

    Returns:
        The sums by name; none of a site that holds no such samples.

    Raises:
        RefusedError: They are not of these shapes, or not finite.
    """
    check_size(content, bytes_needed(expected))
    record = content.get(REPLY)
    if not isinstance(record, ArrayRecord):
        raise RefusedError(f"the reply has no ArrayRecord {REPLY!r}")
    if not len(record):
        return {}
    return {
        name: torch.from_numpy(array.copy()) for name, array in decode(record, expected, "the site's array").items()
    }
