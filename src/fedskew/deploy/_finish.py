"""The finish of a federation of real sites: questions after the last round, whose answers are added up."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedskew.deploy import _wire as wire
from fedskew.deploy._arrays import RefusedError, decode, encode, specs_of
from fedskew.deploy._ask import Replies
from fedskew.deploy._log import LOG
from fedskew.deploy._plan import Plan
from fedskew.deploy._replies import arrays_of, bytes_needed, check_size, limit
from fedskew.deploy._sites import Sites
from fedskew.deploy._watch import Watch
from fedskew.engine import ClientStates, ServerState
from fedskew.engine.finish import FinishedModel, finish_model
from fedskew.engine.target import EstimatedMix
from fedskew.errors import FedskewError, FinishError, RunError, in_one_line
from fedskew.experiment import RunFolder
from fedskew.files import write_text
from fedskew.finish import Observed, Source
from fedskew.metrics import SiteRow
from fedskew.models import ModelState

ATTEMPTS = 5
"""How often a finish begins, each time without the sites that stopped answering."""

Tensors = Mapping[str, Tensor]
Reported = Mapping[int, NDArray[Any]] | None
"""The number of samples of each class that each site reported, by client; None where they are not exact."""


class _KeptError(FedskewError):
    """Raised where the trained model is to stay as it is."""


class _AnewError(FedskewError):
    """Raised where the finish is to begin anew, without who does not answer any more."""


@dataclass(frozen=True)
class SiteFinisher:
    """Finishes models by asking the sites (see `experiment.Finisher`), the same ones all questions: where one stops
    answering, or answers what can't be true, it begins anew without it. `target` is the mix that the server knows."""

    plan: Plan
    sites: Sites
    target: NDArray[Any] | None

    def __call__(self, model: ModelState, server: ServerState) -> FinishedModel:
        """Finish a model; where too few sites answer, or the target site does not and its mix was never estimated, it
        stays as it was trained, and the notes say why. RunError where no site answers, or answers don't allow it."""
        plan, estimated, component = self.plan, EstimatedMix.of(server), self.plan.method.finish
        assert component is not None, "by the server"
        mix = self.target if estimated is None else estimated.used
        asking = _Asking(self, model, server.round, mix is not None, set(Watch.of(server).out()))
        for _ in range(ATTEMPTS):
            asking.members.clear()
            known = plan.known(mix, asking.is_away)
            try:
                return finish_model(component, plan.model, model, plan.some_samples, asking.answers, known)
            except _AnewError as error:
                LOG.warning("finish: %s", error)
            except _KeptError as error:
                LOG.warning("finish: the model stays as it was trained: %s", error)
                return FinishedModel(model, {"kept": str(error)})
            except FedskewError:
                raise
            except (ArithmeticError, ValueError, RuntimeError) as error:  # LinAlgError is one of these
                raise RunError(
                    f"method.finish: {type(component).__name__}: the sites' answers, added up, can't be computed with "
                    f"({in_one_line(error)}); the log says who answered what"
                ) from error
        raise RunError(
            f"method.finish: sites stopped answering {ATTEMPTS} times; start the run again when they are there"
        )


@dataclass
class TrainedModel:
    """Leaves the model of the last round at the sites, who evaluate it for themselves (an `experiment.SiteEvaluator`),
    with what `calibrate` finds by the server's last state. Where sites add up what their models are worth to them, that
    is written to `folder`."""

    sites: Sites
    clients: ClientStates
    server: Callable[[], ServerState]
    calibrate: SiteFinisher | None
    folder: Path

    def __call__(self, common: ModelState, round: int) -> tuple[SiteRow, ...]:
        """Leave the model at the sites; of what they make of it only sums are known, if anything."""
        told: dict[str, Tensor] = {}
        try:
            notes = {} if self.calibrate is None else self.calibrate(common, self.server()).notes
        except (FinishError, RunError) as error:
            notes = {"kept": str(error)}
        if "kept" in notes:
            LOG.warning("sites are told no calibration of the trained model: %s", notes["kept"])
        elif notes and notes["temperature"] is not None:
            held = torch.tensor(notes["held_out"]) > 0
            biases = [-math.inf if bias is None else bias for bias in notes["biases"]]
            told = {"temperature": torch.tensor([notes["temperature"]]), "biases": torch.tensor(biases)}
            told["mix"] = held / held.sum()
        left = self.sites.leave(round, common, told, self.clients)
        path = self.folder / RunFolder.SITE_FIGURES
        if self.sites.plan.agreement.site_figures == "summed" and not path.exists():
            found = self.sites.figures_in_sums(round, left)
            if "reason" in found:
                LOG.warning("what the models are worth to the sites is not known: %s", found["reason"])
            else:
                write_text(path, json.dumps(found, indent=1) + "\n")
                LOG.info("what the models are worth to %d sites: %s", len(found["sites"]), path)
        return ()


@dataclass
class _Asking:
    """The questions of one finish, and who still answers: not `out`, nor `silent`, which would cost a timeout. `needed`
    is the fewest that have to, 0 before the first question; `members` answered of each source in this attempt;
    `is_away`: the target site does not."""

    finisher: SiteFinisher
    model: ModelState
    round: int
    knows_mix: bool
    out: set[int]
    is_away: bool = False
    silent: set[int] = field(default_factory=set)
    needed: int = 0
    members: dict[Source, set[int]] = field(default_factory=dict)
    reported: dict[Source, Reported] = field(default_factory=dict)

    def answers(self, source: Source, question: Tensors) -> list[dict[str, Tensor]]:
        """Ask the sites; raise an error where not all answer that have to."""
        if source == "target":
            return [self._of_target(question)]
        sites, agreement = self.finisher.sites, self.finisher.plan.agreement
        if source not in self.reported:
            self.reported[source] = self._reported(source)
        reported, among = self.reported[source], self.members.get(source)
        clients = [
            client
            for client in sites.members.online()
            if client not in self.out | self.silent and (among is None or client in among)
        ]
        replies = self._ask(source, question, clients, reported)
        self.silent.update(replies.silent)
        is_first = not self.needed
        self.needed = self.needed or max(agreement.min_sites, math.ceil(len(clients) / 2))
        self._check_enough(replies, len(clients), is_first)
        if lost := sorted(self.members.setdefault(source, {*replies.valid}) - {*replies.valid}):
            self.out.update(lost)
            names = ", ".join(sites.members.names[client] for client in lost)
            raise _AnewError(f"begins anew without {names}, which no longer answers")
        return _limited(replies.valid, reported)

    def _reported(self, source: Source) -> Reported:
        """Return what sites reported of a source. Those of test samples are in evaluations of the trained model."""
        sites = self.finisher.sites
        if source == "held_out":
            evaluations = sites.evaluate(self.round, self.model).valid
            tables = {client: one.tally.table(one.counts) for client, one in evaluations.items()}
            return {client: table.sum(axis=1).astype(np.float64) for client, table in tables.items()}
        if self.finisher.plan.agreement.label_counts != "exact":
            return None
        counts = sites.roster.counts
        return {client: counts[client] for client in np.flatnonzero(counts.sum(axis=1)).tolist()}

    def _check_enough(self, replies: Replies[Any], asked: int, is_first: bool) -> None:
        """Raise _KeptError where too few sites answer; where none does at first, starting the run again may help."""
        refused = sum(reason.startswith("not agreed") for reason in replies.failed.values())
        if len(replies.valid) >= self.needed or (is_first and not replies.valid and 2 * refused < asked):
            return
        said = f", {refused} of them did not agree to the question" if refused else ""
        raise _KeptError(f"{len(replies.valid)} of {asked} sites answer{said}, and {self.needed} are needed")

    def _of_target(self, question: Tensors) -> dict[str, Tensor]:
        sites, place = self.finisher.sites, self.finisher.plan.target_place
        there = {place} & sites.members.connected().keys() - self.out
        answer = self._ask("target", question, there, None).valid.get(place)
        if answer:
            return answer
        away = f"the target site {sites.members.names[place]} does not answer"
        if not self.knows_mix:
            raise _KeptError(away)
        self.is_away = True
        raise _AnewError(f"{away}; the target's mix is the newest estimate of the rounds")

    @cached_property
    def _head_shape(self) -> tuple[int, int]:
        """Classes and features of the last layer, which is found by computing the network once."""
        plan = self.finisher.plan
        classes, dim = plan.finished_layer(plan.known(self.finisher.target)).weight.shape
        return classes, dim

    def _ask(
        self, source: Source, question: Tensors, clients: Iterable[int], reported: Reported
    ) -> Replies[dict[str, Tensor]]:
        """Ask clients a question about their samples; a site that reported none is not used."""
        sites, component = self.finisher.sites, self.finisher.plan.method.finish
        assert component is not None, "by the server"
        arrays = sites.validator.layout.to_record(self.model)
        config = ConfigRecord({wire.SOURCE: source})
        content = RecordDict({wire.ARRAYS: arrays, wire.BROADCAST: encode(dict(question)), wire.CONFIG: config})
        classes, dim = self._head_shape
        labels = None if source == "target" else torch.zeros(1, dtype=torch.int64)
        none = Observed(torch.zeros(1, dim), torch.zeros(1, classes), labels)
        expected = specs_of(component.statistics(question, none))

        def read(reply: RecordDict, client: int) -> dict[str, Tensor]:
            check_size(reply, bytes_needed(expected))
            record = arrays_of(reply, wire.REPLY)  # empty of a site that holds no such samples
            arrays = decode(record, expected, "the site's array") if len(record) else {}
            answer = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
            samples = None if reported is None else reported.get(client)
            if reported is not None and samples is None:
                raise RefusedError("it did not evaluate the trained model, so how many such samples it has is unknown")
            if not answer and samples is not None and samples.any():
                raise RefusedError("it reported such samples before, and now answers as if it had none")
            if answer and (reason := component.refuse(question, answer, samples)) is not None:
                raise RefusedError(reason)
            return answer

        asked = dict.fromkeys(clients, content)
        return sites.members.ask(f"query.{wire.FINISH}", asked, read, wire.FINISH, in_round=False)


def _limited(answers: Mapping[int, dict[str, Tensor]], reported: Reported) -> list[dict[str, Tensor]]:
    """Return the answers of sites with such samples, in their order; of three or more none counts for over half."""
    used = {client: answers[client] for client in sorted(answers) if answers[client]}
    sizes = {client: float(reported[client].sum()) for client in used} if reported is not None else {}
    if sizes and min(sizes.values()) > 0:
        largest, factor = limit(sizes)
        if factor < 1:
            used[largest] = {name: part.double() * factor for name, part in used[largest].items()}
    return list(used.values())
