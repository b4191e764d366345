"""The server's side of masked sums: masks among the sites that answer, then one request to open their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedskew.deploy._arrays import COUNTER, Layout, RefusedError, Specs
from fedskew.deploy._ask import Members, Replies, T
from fedskew.deploy._log import LOG
from fedskew.deploy._messages import (
    AGAIN,
    CONFIG,
    TRAIN,
    UNMASK,
    SumAsked,
    about_of,
    check_masked,
    check_opening,
    unmask_content,
    why_no_sum,
)
from fedskew.engine.sums import decode_sums
from fedskew.errors import SumsError
from fedskew.models import ModelState
from fedskew.privacy import UpdateNoise
from fedskew.sums import Masked, SumContext, unmask
from fedskew.sums.fixed_point import NUMBERS, UPDATES

HAS_OPENED = "not agreed: opened"
"""How the error of a site begins that has opened a sum of the round already."""

Weigh = Callable[[Sequence[int]], Sequence[float]]
"""From clients to the weights of their updates, in the same order, sum 1; all 0 where none holds a sample."""


@dataclass
class Taken:
    """The result of a masked sum; all but `total` and `reason` is by client, or of clients.

    Attributes:
        weights: The weights of the clients in it; 0 where nothing is weighed.
        members: Clients of which the last sum was asked.
        opened: Clients that were asked to open a sum, or say that they have opened one of the round before.
        reason: Why no sum opened.
    """

    total: Mapping[str, NDArray[Any]] | None = None
    weights: dict[int, float] = field(default_factory=dict)
    members: list[int] = field(default_factory=list)
    opened: set[int] = field(default_factory=set)
    reason: str = ""
    refused: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)

    @property
    def replies(self) -> Replies[Any]:
        """What did not come, as of the replies to one question."""
        return Replies({}, self.failed, self.refused, tuple(sorted(self.silent)))


@dataclass(frozen=True)
class MaskedSums:
    """Takes masked sums over `least` sites or more, none above `limit`; the server learns only the sums.

    For `session` see `Roster.session`.
    """

    members: Members
    session: str
    least: int
    limit: float

    def take(
        self,
        purpose: str,
        round: int,
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
            contents: The first message to each client.
            specs: Dtypes and lengths of the arrays.
            weigh: Weighs clients; None: nothing is weighed.
        """
        names, taken, clients = self.members.names, Taken(), sorted(contents)
        about = about_of(contents[clients[0]]) if contents else ""
        attempt = 0
        while True:  # each time over fewer sites
            attempt += 1
            taken.members = clients
            weights = dict.fromkeys(clients, 0.0)
            if weigh is not None and clients:
                weights = dict(zip(clients, weigh(clients), strict=True))
            if reason := why_no_sum(weights.values(), self.least, None if weigh is None else self.limit):
                taken.reason = reason
                return taken
            asked = SumAsked(
                self.session,
                round,
                attempt,
                purpose,
                tuple(names[client] for client in clients),
                tuple(weights.values()) if weigh else (),
            )
            arrived = self._masked(asked, about, clients, contents, specs, taken)
            if len(arrived) == len(clients):
                break
            of, clients = len(clients), sorted(arrived)
            if reason := why_no_sum([0.0] * len(arrived), self.least, None, of):
                over = ", ".join(names[client] for client in sorted(taken.opened))
                taken.reason = reason + (f"; {over} opened a sum of this round before" if over else "")
                return taken
        taken.opened.update(clients)
        openings = self._open(asked, about, arrived, taken)
        if lost := [client for client in clients if client not in openings]:
            taken.silent.update(lost)
            self.members.silent.update(lost)
            said = ", ".join(names[client] for client in lost)
            taken.reason = f"the round's sum is lost, as {said} masked and did not open it"
            LOG.warning("round %d: %s", round, taken.reason)
            return taken
        masked = {names[client]: one for client, one in arrived.items()}
        opened = {names[client]: opening for client, opening in openings.items()}
        taken.total, taken.weights = unmask(masked, opened, asked.context(about)), weights
        return taken

    def _masked(
        self,
        asked: SumAsked,
        about: str,
        clients: Sequence[int],
        contents: Mapping[int, RecordDict],
        specs: Specs,
        taken: Taken,
    ) -> dict[int, Masked]:
        """Ask sites for masked integers; return the valid answers, whose masks fit each other."""
        questions, kind = {}, asked.purpose if asked.attempt == 1 else f"query.{AGAIN}"
        for client in clients:
            content = contents[client] if asked.attempt == 1 else RecordDict({CONFIG: ConfigRecord()})
            config = content[CONFIG]
            assert isinstance(config, ConfigRecord), "made by the caller"
            config.update(asked.entries())
            questions[client] = content
        valid = self._ask(kind, questions, lambda reply, _: check_masked(reply, asked, specs), asked, taken)
        return self._agreeing(valid, asked.context(about), asked, taken)

    def _agreeing(
        self, masked: Mapping[int, Masked], context: SumContext, asked: SumAsked, taken: Taken
    ) -> dict[int, Masked]:
        """Leave out, one after another, the site that disagrees with the most others about what was asked.

        Where several disagree with as many, as two that disagree with each other alone, one of them may lie about the
        other: all of these are left out, if enough sites remain.
        """
        there, names = dict(masked), self.members.names
        while pairs := context.disagreements({names[client]: one for client, one in there.items()}):
            said = ", ".join(" and ".join(sorted(set(pair))) for pair in pairs)
            LOG.warning("round %d: masks that don't cancel: %s", asked.round, said)
            often = {client: sum(names[client] in pair for pair in pairs) for client in sorted(there)}
            worst = [client for client, number in often.items() if number == max(often.values())]
            for client in worst if len(there) - len(worst) >= self.least else worst[:1]:
                del there[client]
                why = "its masks don't cancel with the others': it has other keys, or was told other things"
                taken.refused[client] = why
                self.members.refuse(client, f"{_about(asked)}: {why}")
                LOG.warning("%s: no answer of %s: refused: %s", _about(asked), names[client], why)
        return there

    def _open(self, asked: SumAsked, about: str, arrived: Mapping[int, Masked], taken: Taken) -> dict[int, bytes]:
        """Ask the sites whose answers came to open the sum; return the valid openings."""
        names, context = self.members.names, asked.context(about)

        def read(reply: RecordDict, client: int) -> bytes:
            opening = check_opening(reply)
            try:
                context.check_opening(names[client], arrived[client], opening)
            except SumsError as error:
                raise RefusedError(str(error)) from None
            return opening

        return self._ask(f"query.{UNMASK}", dict.fromkeys(arrived, unmask_content(asked)), read, asked, taken)

    def _ask(
        self,
        kind: str,
        questions: Mapping[int, RecordDict],
        read: Callable[[RecordDict, int], T],
        asked: SumAsked,
        taken: Taken,
    ) -> dict[int, T]:
        replies = self.members.ask(kind, questions, read, _about(asked))
        taken.failed.update(replies.failed)
        taken.refused.update(replies.refused)
        taken.silent.update(replies.silent)
        taken.opened.update(client for client, reason in replies.failed.items() if reason.startswith(HAS_OPENED))
        return replies.valid


def _about(asked: SumAsked) -> str:
    return f"round {asked.round}" if asked.purpose == TRAIN else f"evaluation of round {asked.round}"


VARIANCE = "running_var"
DEVIATIONS = 9
"""Noise of so many standard deviations is in no coordinate of any model: once in 10^18 draws."""


def impossible(
    total: Mapping[str, NDArray[Any]],
    weight: float,
    members: int,
    sent: ModelState,
    layout: Layout,
    steps: tuple[int, int],
    least_loss: float,
    noise: UpdateNoise | None = None,
) -> str:
    """Say why no honest sites' answers can have this sum; empty: they can.

    Args:
        total: The sum of what sites encoded by `encode_update`.
        weight: Sum of their weights.
        members: Number of sites.
        sent: The model that was sent.
        layout: Names of its parts.
        steps: Fewest and most local steps of all together.
        least_loss: Lowest loss that there can be.
        noise: The noise of the updates; None: they have none.
    """
    opened = decode_sums(total, weight, members, members, sent)
    largest = float(opened.change.abs().max()) if opened.change.numel() else 0.0
    clip, around = UPDATES.limit, UPDATES.error(members, weight)
    if noise is not None:
        shares = math.sqrt(members / (noise.answers or members))
        deviation = shares * noise.deviation(opened.change.numel()) * 2.0**-UPDATES.fraction / weight
        clip, around = noise.clip, around + DEVIATIONS * deviation
    if largest > clip + around:
        return f"the mean update reaches {largest:.4g}, and each was clipped to {clip:g}"
    rounding, most = NUMBERS.error(members, weight), NUMBERS.limit * (1 + 2**-20)
    extras = [(name, value, -most) for name, value in opened.extras.items()]
    for what, value, least in (("loss", opened.loss, least_loss), *extras):
        if value is not None and not least - rounding <= value <= most:
            return f"the mean {what} is {value:.4g}"
    if opened.steps is not None and not steps[0] <= opened.steps <= steps[1]:
        return f"there are {opened.steps} local steps in all; expected {steps[0]} to {steps[1]}"
    found = sent._replace(buffers=opened.buffers, integers=opened.integers)
    for name, values in layout.statistics(found).items():
        if values.numel() and float(values.abs().max()) > most:
            return f"the mean of {name} reaches {float(values.abs().max()):.4g}"
        if name.endswith(VARIANCE) and values.numel() and float(values.min()) < -rounding:
            return f"the mean of {name}, a variance, is below 0"
    before = layout.counters(sent)
    for name, values in layout.counters(found).items():
        if name.endswith(COUNTER) and bool((values < before[name]).any()):
            return f"the counter {name} fell"
        if not name.endswith(COUNTER) and not torch.equal(values, before[name]):
            return f"the integers of {name} are not what was sent"
    return ""
