"""The server's side of masked sums: masks among the sites that answer, then one request to open their sum."""

import itertools
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedskew.deploy import _wire as wire
from fedskew.deploy._arrays import ArraySpec, FloatArray, RefusedError, Specs, decode, encode, short
from fedskew.deploy._ask import PAUSE, Contents, Members, Read, Replies, T
from fedskew.deploy._log import LOG
from fedskew.deploy._plan import Plan
from fedskew.deploy._replies import arrays_of, figures_of
from fedskew.deploy._roster import Roster
from fedskew.engine.sums import decode_answers
from fedskew.errors import EndedEarlyError, RunError, SumsError, placed
from fedskew.files import write_text
from fedskew.sums import Key, Masked, SumContext, unmask
from fedskew.weighting import Facts

HAS_OPENED = "not agreed: opened"
"""How the error of a site begins that has opened a sum of the round already."""

ANNOUNCED_FILE = "announced.json"

Weigh = Callable[[Sequence[int]], Sequence[float]]
"""From clients to the weights of their updates, in the same order, sum 1; all 0 where none holds a sample."""


@dataclass
class Taken:
    """The result of a masked sum: the weights of the clients in it (0 where nothing is weighed), the `members` of which
    the last sum was asked, those that were asked to open one or say that they opened one of the round before, the
    reason why none opened, and the replies that did not come."""

    total: Mapping[str, NDArray[Any]] | None = None
    weights: dict[int, float] = field(default_factory=dict)
    members: list[int] = field(default_factory=list)
    opened: set[int] = field(default_factory=set)
    reason: str = ""
    replies: Replies[Any] = field(default_factory=lambda: Replies({}, {}, {}, set()))


@dataclass(frozen=True)
class MaskedSums:
    """Takes masked sums over `least` sites or more, none above `limit`; the server learns only the sums."""

    members: Members
    session: str
    least: int
    limit: float

    def take(self, purpose: str, round: int, contents: Contents, specs: Specs, weigh: Weigh | None = None) -> Taken:
        """Ask sites for masked integers, once more without those that don't answer, and then once to open their sum.
        Where one does not, or a server that was killed plays a round again that sites have opened, the sum is lost, as
        a second one would tell the difference. The purpose is also Flower's type of the first message; `specs` are the
        arrays."""
        names, taken, clients, of = self.members.names, Taken(members=sorted(contents)), sorted(contents), None
        about, kind, questions = "", f"query.{purpose}" if purpose == wire.SITES else purpose, contents
        for attempt in itertools.count(1):  # each time over fewer sites
            weights = dict.fromkeys(clients, 0.0)
            if weigh is not None and clients:
                weights = dict(zip(clients, weigh(clients), strict=True))
            if reason := wire.why_no_sum(weights.values(), self.least, None if weigh is None else self.limit, of):
                over = ", ".join(names[client] for client in sorted(taken.opened))
                taken.reason = reason + (f"; {over} opened a sum of this round before" if over else "")
                return taken
            about, taken.members = about or wire.about_of(contents[clients[0]]), clients
            there, told = tuple(names[client] for client in clients), tuple(weights.values()) if weigh else ()
            asked = wire.SumAsked(self.session, round, attempt, purpose, there, told)
            arrived = self.ask(kind, asked, about, questions, specs, taken)
            if len(arrived) == len(clients):
                break
            of, clients, kind = len(clients), sorted(arrived), f"query.{wire.AGAIN}"
            questions = {client: RecordDict({wire.CONFIG: ConfigRecord()}) for client in clients}
        taken.total = self.open(asked, about, arrived, taken)
        taken.weights = {} if taken.total is None else weights
        return taken

    def ask(
        self, kind: str, asked: wire.SumAsked, about: str, questions: Contents, specs: Specs, taken: Taken
    ) -> dict[int, Masked]:
        """Ask sites for masked integers; return the valid answers, whose masks fit each other."""
        for content in questions.values():
            config = content[wire.CONFIG]
            assert isinstance(config, ConfigRecord), "made by the caller"
            config.update(wire.entries_of(asked))
        valid = self._ask(kind, questions, lambda reply, _: _check_masked(reply, asked, specs), asked, taken)
        return self._agreeing(valid, asked.context(about), asked, taken)

    def open(
        self, asked: wire.SumAsked, about: str, arrived: Mapping[int, Masked], taken: Taken
    ) -> dict[str, NDArray[Any]] | None:
        """Have the sites whose answers came open their sum; None where one does not, and the sum is lost."""
        names, context = self.members.names, asked.context(about)
        taken.opened.update(arrived)

        def read(reply: RecordDict, client: int) -> bytes:
            opening = _seeds(reply, wire.OPENING, [wire.OWN])[wire.OWN]
            with placed("", RefusedError, of=SumsError):
                context.check_opening(names[client], arrived[client], opening)
            return opening

        request = RecordDict({wire.CONFIG: ConfigRecord(wire.entries_of(asked._replace(weights=())))})
        openings = self._ask(f"query.{wire.UNMASK}", dict.fromkeys(arrived, request), read, asked, taken)
        if lost := sorted(arrived.keys() - openings.keys()):
            taken.replies.silent.update(lost)
            self.members.silent.update(lost)
            said = ", ".join(names[client] for client in lost)
            taken.reason = f"the round's sum is lost, as {said} masked and did not open it"
            LOG.warning("%s: %s", _about(asked), taken.reason)
            return None
        masked = {names[client]: one for client, one in arrived.items()}
        opened = {names[client]: opening for client, opening in openings.items()}
        total: dict[str, NDArray[Any]] = unmask(masked, opened, context)
        return total

    def _agreeing(
        self, masked: Mapping[int, Masked], context: SumContext, asked: wire.SumAsked, taken: Taken
    ) -> dict[int, Masked]:
        """Leave out, one after another, the site that disagrees with the most others about what was asked; of several
        with as many, one of whom may lie about the other, all, if enough sites remain."""
        there, names = dict(masked), self.members.names
        while pairs := context.disagreements({names[client]: one for client, one in there.items()}):
            said = ", ".join(" and ".join(sorted(set(pair))) for pair in pairs)
            LOG.warning("%s: masks that don't cancel: %s", _about(asked), said)
            often = {client: sum(names[client] in pair for pair in pairs) for client in sorted(there)}
            worst = [client for client, number in often.items() if number == max(often.values())]
            for client in worst if len(there) - len(worst) >= self.least else worst[:1]:
                del there[client]
                why = "its masks don't cancel with the others': it has other keys, or was told other things"
                taken.replies.refused[client] = why
                self.members.refuse(client, f"{_about(asked)}: {why}")
                LOG.warning("%s: no answer of %s: refused: %s", _about(asked), names[client], why)
        return there

    def _ask(self, kind: str, questions: Contents, read: Read[T], asked: wire.SumAsked, taken: Taken) -> dict[int, T]:
        replies = self.members.ask(kind, questions, read, _about(asked))
        taken.replies.failed.update(replies.failed)
        taken.replies.refused.update(replies.refused)
        taken.replies.silent.update(replies.silent)
        taken.opened.update(client for client, reason in replies.failed.items() if reason.startswith(HAS_OPENED))
        return replies.valid


def in_words(purpose: str) -> str:
    """Say in words what a sum is about that is of no round; empty for others."""
    return {
        wire.SUM_COUNTS: "label counts",
        wire.SUM_LABELS: "label counts, for class weights,",
        wire.SUM_MOMENTS: "means and deviations",
        wire.SUM_PROFILE: "profiles of inputs",
        wire.SITES: "figures of the sites' models",
    }.get(purpose, "")


def _about(asked: wire.SumAsked) -> str:
    if said := in_words(asked.purpose):
        return said
    return f"round {asked.round}" if asked.purpose == wire.TRAIN else f"evaluation of round {asked.round}"


def _check_masked(content: RecordDict, asked: wire.SumAsked, specs: Specs) -> Masked:
    """Validate a site's masked integers; only their form can be checked, as nobody sees their values."""
    figures_of(content, round=asked.round, attempt=asked.attempt)
    sums = decode(arrays_of(content, wire.SUMS), specs, "its array")
    return Masked(sums, _seeds(content, wire.COMMITMENTS, asked.members))


def _seeds(content: RecordDict, key: str, names: Collection[str]) -> Mapping[str, bytes]:
    record = content.get(key)
    if not isinstance(record, ConfigRecord):
        raise RefusedError(f"the reply has no {key}")
    if set(record) != set(names):
        raise RefusedError(f"its {key} are of {short(sorted(record))}, not {short(sorted(names))}")
    seeds = dict(record)
    if not all(isinstance(seed, bytes) and len(seed) == Key.SEED for seed in seeds.values()):
        raise RefusedError(f"its {key} are not {Key.SEED} bytes each")
    return seeds  # type: ignore[return-value]


def announced_from(plan: Plan, roster: Roster, target: FloatArray | None, folder: Path) -> dict[str, FloatArray] | None:
    """Ask all sites for sums of their label counts over all of them, once; return the numbers that all get, None where
    counts are not only summed. ConfigError where the sums are not enough, as no site holds a sample or the `target` mix
    is missing; EndedEarlyError where a site was away for too long."""
    if (weighting := plan.by_sums) is None:
        return None
    classes, sites, path = len(plan.agreement.classes), len(roster.names), folder / ANNOUNCED_FILE
    patience = max(plan.agreement.idle_timeout, plan.agreement.start_timeout)
    sums, numbers = MaskedSums(roster.members, roster.session, sites, 1.0), itertools.count(1)

    def ask(question: Facts) -> FloatArray:
        spec = ArraySpec(weighting.answer(np.zeros(classes), question).shape, "int64")
        return decode_answers(sum_over_all(sums, wire.SUM_COUNTS, next(numbers), spec, patience, question), question)

    def announce() -> dict[str, list[float]]:
        with placed("label_counts: "):
            announced = weighting.announce(ask, target, sites)
        LOG.info("weights follow from %d sums over all %d sites", next(numbers) - 1, sites)
        return {name: values.tolist() for name, values in announced.items()}

    stored = kept(path, announce)
    with placed(f"{path}: damaged; restore it: ", RunError, of=(ValueError, TypeError)):
        announced = {name: np.array(values, dtype=np.float64) for name, values in stored.items()}
    known = announced.get("totals", announced.get("samples"))
    roster.samples = float(len(roster.names)) if known is None else float(np.sum(known))
    return announced


def kept(path: Path, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a file in the run folder has, so that a server that is started again does not ask again."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        found = ask()
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: can't be read ({type(error).__name__}); restore it") from None
    write_text(path, json.dumps(found), private=True)
    return found


def sum_over_all(
    sums: MaskedSums, purpose: str, number: int, spec: ArraySpec, patience: float, question: Facts | None = None
) -> NDArray[np.int64]:
    """Return the masked sum over all sites of their answers; EndedEarlyError where one is away for so many seconds."""
    members, began = sums.members, time.monotonic()
    names = members.names[: sums.least]
    for attempt in itertools.count(1):
        asked, taken, online = (wire.SumAsked(sums.session, number, attempt, purpose, names), Taken(), members.online())
        content = RecordDict({wire.CONFIG: ConfigRecord(wire.entries_of(asked))})
        if question:
            content[wire.BROADCAST] = encode({name: torch.from_numpy(values) for name, values in question.items()})
        if len(online) == len(names):
            about, questions = wire.about_of(content), dict.fromkeys(online, content)
            arrived = sums.ask(f"query.{purpose}", asked, about, questions, {wire.ANSWER: spec}, taken)
            total = sums.open(asked, about, arrived, taken) if len(arrived) == len(names) else None
            if total is not None:
                return total[wire.ANSWER]
        away = ", ".join(name for client, name in enumerate(names) if client not in online)
        LOG.warning("sum %d of %s, attempt %d: not opened%s", number, purpose, attempt, away and f"; away: {away}")
        if time.monotonic() - began >= patience:
            break
        time.sleep(min(PAUSE, members.timeout))
    raise EndedEarlyError(
        f"{in_words(purpose)} were not summed within {patience:.0f} s, as that takes all of {', '.join(names)}; start "
        "again when they can be reached"
    )
