"""The server's side of masked sums: masks among the sites that answer, then one request to open their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    unmask_content,
    why_no_sum,
)
from fedskew.errors import SumsError
from fedskew.sums import Masked, Opening, SumContext, check_opening_of, disagreements, unmask

HAS_OPENED = "not agreed: opened"
"""How the error of a site begins that has opened a sum of the round already."""

Weigh = Callable[[Sequence[int]], Sequence[float]]
"""From clients to the weights of their updates, in the same order, sum 1; all 0 where none holds a sample."""


@dataclass
class Taken:
    """The result of a masked sum.

    Attributes:
        total: The sum of the sites' integers; None: no sum opened.
        weights: The weights of the clients in it, by client; 0 where nothing is weighed.
        opened: Clients that were asked to open a sum, or say that they have opened one of the round before.
        reason: Why no sum opened.
        refused: Why answers were refused, by client.
        failed: Why sites did not answer, by client.
        silent: Clients that did not answer in time.
        closed: Clients that sent masked integers, and then did not open them.
        asked: All clients that were asked.
    """

    total: Mapping[str, NDArray[Any]] | None = None
    weights: dict[int, float] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
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
        limit: Largest weight that one site may have in a sum; the sites refuse more.
    """

    grid: Grid
    session: str
    names: Sequence[str]
    timeout: float
    least: int
    limit: float

    def take(
        self,
        purpose: str,
        round: int,
        nodes: Mapping[int, int],
        contents: Mapping[int, RecordDict],
        specs: Specs,
        weigh: Weigh | None = None,
    ) -> Taken:
        """Ask sites for masked integers, once more without those that don't answer, and then once to open their sum.

        Where one does not open it, the round's sum is lost, as a second one would tell the difference. So it is where a
        server that was killed plays a round again that sites have opened.

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
        attempt = 0
        while True:  # each time over fewer sites
            attempt += 1
            weights = dict.fromkeys(members, 0.0)
            if weigh is not None and members:
                weights = dict(zip(members, weigh(members), strict=True))
            if reason := self._why_none(weights, weigh is not None):
                taken.reason = reason
                return taken
            names = tuple(self.names[client] for client in members)
            asked = SumAsked(self.session, round, attempt, purpose, names, tuple(weights.values()) if weigh else ())
            there = {client: nodes[client] for client in members}
            arrived = self._ask(asked, about, there, contents, specs, taken)
            if len(arrived) == len(members):
                break
            of, members = len(members), sorted(arrived)
            if reason := self._why_none(dict.fromkeys(members, 0.0), False, of):
                over = [self.names[client] for client in sorted(taken.opened)]
                taken.reason = reason + (f"; {', '.join(over)} opened a sum of this round before" if over else "")
                return taken
        taken.opened.update(members)
        openings = self._open(asked, about, there, arrived, taken)
        if lost := [client for client in members if client not in openings]:
            taken.closed.update(lost)
            said = ", ".join(self.names[client] for client in lost)
            taken.reason = f"the round's sum is lost, as {said} masked and did not open it"
            LOG.warning("round %d: %s", round, taken.reason)
            return taken
        by_name = {self.names[client]: masked for client, masked in arrived.items()}
        opened = {self.names[client]: opening for client, opening in openings.items()}
        taken.total, taken.weights = unmask(by_name, opened, asked.context(about)), weights
        return taken

    def _why_none(self, weights: Mapping[int, float], weighed: bool, of: int | None = None) -> str:
        """Return why no sum over clients with these weights is allowed; empty if one is."""
        return why_no_sum(weights.values(), self.least, self.limit if weighed else None, of)

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
        taken.opened.update(client for client, reason in answers.failures.items() if reason.startswith(HAS_OPENED))
        taken.silent.update(answers.silent)
        for client, reason in answers.failures.items():
            LOG.warning("round %d: %s failed: %s", asked.round, self.names[client], reason)
        return answers

    def _refuse(self, client: int, reason: str, asked: SumAsked, taken: Taken) -> None:
        taken.refused[client] = reason
        LOG.warning("round %d: refused the masked answer of %s: %s", asked.round, self.names[client], reason)
