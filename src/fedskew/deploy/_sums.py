"""The server's side of masked sums: attempts until one opens, each over the sites that are still there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedskew.deploy._arrays import RefusedError, Specs
from fedskew.deploy._exchange import exchange
from fedskew.deploy._log import LOG
from fedskew.deploy._messages import CONFIG
from fedskew.deploy._replies import Answers
from fedskew.deploy._sum_messages import (
    AGAIN,
    UNMASK,
    SumAsked,
    about_of,
    check_masked,
    check_opening,
    over_few,
    unmask_content,
)
from fedskew.errors import RunError, SumsError
from fedskew.files import write_text, writing
from fedskew.sums import Masked, Opening, SumContext, check_opening_of, disagreements, unmask

ROUNDING = 1e-9
OPENED = "opened.json"

Weigh = Callable[[Sequence[int]], Sequence[float]]
"""From clients to the weights of their updates, in the same order, sum 1; all 0 where none holds a sample."""


@dataclass
class Taken:
    """The result of a masked sum.

    Attributes:
        total: The sum of the sites' integers; None: no sum opened.
        weights: The weights of the clients in it, by client; 0 where nothing is weighed.
        attempts: How many sums sites were asked to open.
        openings: How often each client was asked to open one, before the server was started again included.
        reason: Why no sum opened.
        refused: Why answers were refused, by client.
        failed: Why sites did not answer, by client.
        silent: Clients that did not answer in time.
        closed: Clients that sent masked integers, and then did not open them.
        asked: All clients that were asked.
    """

    total: Mapping[str, NDArray[Any]] | None = None
    weights: dict[int, float] = field(default_factory=dict)
    attempts: int = 0
    openings: dict[int, int] = field(default_factory=dict)
    reason: str = ""
    refused: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)

    @property
    def answers(self) -> Answers:
        """The clients that answered, and those that did not, as replies to an exchange."""
        there = self.asked - self.silent
        return Answers(
            {client: RecordDict() for client in there - self.closed}, {}, tuple(sorted(self.silent | self.closed))
        )


@dataclass(frozen=True)
class MaskedSums:
    """Takes masked sums over sites; the server learns only the sums.

    Attributes:
        grid: Flower's grid.
        session: See `Roster.session`.
        names: Names of the sites, by client index.
        timeout: Seconds to wait for each exchange.
        least: Fewest sites that a sum may be over.
        attempts: Most sums of a round that sites are asked to open; one that a member does not open is lost.
        limit: Largest weight that one site may have in a sum; the sites refuse more.
        path: The file that names the sums that sites were last asked to open. A server that was killed repeats its
            round. A second sum over other sites would reveal the difference, so it asks the same sites or takes none.
    """

    grid: Grid
    session: str
    names: Sequence[str]
    timeout: float
    least: int
    attempts: int
    limit: float
    path: Path

    def take(
        self,
        purpose: str,
        round: int,
        nodes: Mapping[int, int],
        contents: Mapping[int, RecordDict],
        specs: Specs,
        weigh: Weigh | None = None,
    ) -> Taken:
        """Ask sites for masked integers, then to open their sum; repeat without the sites that are lost in between.

        Args:
            purpose: What is summed, "train" or "evaluate", which is also Flower's type of the first message.
            round: Number of the round.
            nodes: The node of each client that is asked.
            contents: The first message to each client.
            specs: Dtypes and lengths of the arrays.
            weigh: Weighs clients; None: nothing is weighed.

        Returns:
            The sum, or why there is none.
        """
        taken, members = Taken(asked=set(nodes)), sorted(nodes)
        about = about_of(contents[members[0]]) if members else ""
        place = [round, about]
        before = self._opened().get(purpose, {})
        same = before.get("members") if before.get("place") == place else None
        if same is not None:
            opened = before.get("openings", dict.fromkeys(same, 1))  # written by an earlier fedskew
            taken.openings = {self.names.index(name): times for name, times in opened.items()}
            members = [client for client in members if self.names[client] in same]
        attempt = 0
        while True:  # each attempt opens a sum, is the last, or is over fewer sites than the one before
            attempt += 1
            if same is not None and len(members) < len(same):
                taken.reason = (
                    f"before the server was started again, a sum over {', '.join(same)} may have been opened; one over "
                    "fewer would tell the difference"
                )
                return taken
            weights = dict.fromkeys(members, 0.0)
            if weigh is not None and members:
                weights = dict(zip(members, weigh(members), strict=True))
            if reason := self._why_none(weights, weigh is not None):
                taken.reason = reason
                return taken
            names = tuple(self.names[client] for client in members)
            sent = tuple(weights.values()) if weigh is not None else ()
            asked = SumAsked(self.session, round, attempt, purpose, names, sent)
            arrived = self._ask(asked, about, {client: nodes[client] for client in members}, contents, specs, taken)
            if len(arrived) < len(members):  # a sum opens over all that were asked for it, or not at all
                of, members = len(members), sorted(arrived)
                if reason := self._why_none(dict.fromkeys(members, 0.0), False, of):
                    taken.reason = reason
                    return taken
                continue
            taken.attempts += 1
            taken.openings |= {client: taken.openings.get(client, 0) + 1 for client in members}
            self._opening(purpose, place, names, taken.openings)
            openings = self._open(asked, about, {client: nodes[client] for client in members}, arrived, taken)
            if len(openings) == len(members):
                by_name = {self.names[client]: masked for client, masked in arrived.items()}
                opened = {self.names[client]: opening for client, opening in openings.items()}
                taken.total, taken.weights = unmask(by_name, opened, asked.context(about)), weights
                return taken
            lost = [client for client in members if client not in openings]
            taken.closed.update(lost)
            said = ", ".join(self.names[client] for client in lost)
            LOG.warning("round %d: attempt %d at a sum to %s is lost with %s", round, attempt, purpose, said)
            if taken.attempts == self.attempts:
                taken.reason = f"none of {self.attempts} masked sums opened"
                return taken
            members = sorted(openings)

    def _opened(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.path.read_text(encoding="utf-8"))) if self.path.exists() else {}
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path}: can't be read ({type(error).__name__}); restore it") from None

    def _opening(self, purpose: str, place: list[Any], names: Sequence[str], openings: Mapping[int, int]) -> None:
        times = {self.names[client]: number for client, number in openings.items()}
        with writing(self.path):
            said = {**self._opened(), purpose: {"place": place, "members": list(names), "openings": times}}
            write_text(self.path, json.dumps(said), private=True)

    def _why_none(self, weights: Mapping[int, float], weighed: bool, of: int | None = None) -> str:
        """Return why no sum over clients with these weights is allowed; empty if one is."""
        if len(weights) < self.least:
            there = f"{len(weights)} of {of} answered" if of is not None else f"there are {len(weights)}"
            return f"a masked sum is over {self.least} sites at least, and {there}"
        if not weighed:
            return ""
        whole, largest = sum(weights.values()), max(weights.values())
        if not whole > 0:
            return "none of the sites that are there has a weight"
        if largest > (self.limit + ROUNDING) * whole:
            return (
                f"one of the sites that are there has {largest / whole:.3g} of the weight; sites allow {self.limit:g}"
            )
        return over_few([weight / whole for weight in weights.values()], self.least)

    def _ask(
        self,
        asked: SumAsked,
        about: str,
        nodes: Mapping[int, int],
        contents: Mapping[int, RecordDict],
        specs: Specs,
        taken: Taken,
    ) -> dict[int, Masked]:
        """Ask sites for masked integers; return the valid answers, whose masks fit each other."""
        entries = asked.entries()
        questions, kind = {}, asked.purpose if asked.attempt == 1 else f"query.{AGAIN}"
        for client, node in nodes.items():
            content = contents[client] if asked.attempt == 1 else RecordDict({CONFIG: ConfigRecord()})
            config = content[CONFIG]
            assert isinstance(config, ConfigRecord), "made by the caller"
            config.update(entries)
            questions[node] = content
        answers = self._exchange(questions, kind, asked, nodes, taken)
        valid: dict[int, Masked] = {}
        for client, reply in answers.contents.items():
            try:
                valid[client] = check_masked(reply, asked, specs)
            except RefusedError as error:
                self._refuse(client, str(error), asked, taken)
        return self._agreeing(valid, asked.context(about), asked, taken)

    def _agreeing(
        self, masked: Mapping[int, Masked], context: SumContext, asked: SumAsked, taken: Taken
    ) -> dict[int, Masked]:
        """Leave out, one after another, the site that disagrees with the most others about what was asked.

        Where several disagree with as many, as two that disagree with each other alone, one of them may lie about the
        other: all of these are left out, if enough sites remain.
        """
        there = dict(masked)
        while pairs := disagreements({self.names[client]: one for client, one in there.items()}, context):
            said = ", ".join(" and ".join(sorted(set(pair))) for pair in pairs)
            LOG.warning("round %d: masks that don't cancel: %s", asked.round, said)
            found = {client: sum(self.names[client] in pair for pair in pairs) for client in sorted(there)}
            worst = [client for client, number in found.items() if number == max(found.values())]
            for client in worst if len(there) - len(worst) >= self.least else worst[:1]:
                del there[client]
                self._refuse(
                    client,
                    "its masks don't cancel with the others': it has other keys, or was told other things",
                    asked,
                    taken,
                )
        return there

    def _open(
        self, asked: SumAsked, about: str, nodes: Mapping[int, int], arrived: Mapping[int, Masked], taken: Taken
    ) -> dict[int, Opening]:
        """Ask the sites whose answers came to open the sum; return the valid openings."""
        questions = dict.fromkeys(nodes.values(), unmask_content(asked))
        answers = self._exchange(questions, f"query.{UNMASK}", asked, nodes, taken)
        masked = {self.names[client]: one for client, one in arrived.items()}
        openings: dict[int, Opening] = {}
        for client, reply in answers.contents.items():
            try:
                opening = check_opening(reply)
                check_opening_of(self.names[client], masked, opening, asked.context(about))
            except (RefusedError, SumsError) as error:
                self._refuse(client, str(error), asked, taken)
            else:
                openings[client] = opening
        return openings

    def _exchange(
        self, questions: Mapping[int, RecordDict], kind: str, asked: SumAsked, nodes: Mapping[int, int], taken: Taken
    ) -> Answers:
        clients = {node: client for client, node in nodes.items()}
        answers = exchange(self.grid, questions, kind, self.timeout, str(asked.round)).by(clients)
        taken.failed.update(answers.failures)
        taken.silent.update(answers.silent)
        for client, reason in answers.failures.items():
            LOG.warning("round %d: %s failed: %s", asked.round, self.names[client], reason)
        return answers

    def _refuse(self, client: int, reason: str, asked: SumAsked, taken: Taken) -> None:
        taken.refused[client] = reason
        LOG.warning("round %d: refused the masked answer of %s: %s", asked.round, self.names[client], reason)
