"""The nodes of a federation's members: who is connected, what they are asked, and which of their replies are used."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedskew import __version__
from fedskew.deploy import _wire as wire
from fedskew.deploy._arrays import RefusedError, pack, unpack
from fedskew.deploy._log import LOG

FIRST_PAUSE, LONGEST_PAUSE, PAUSE = 0.1, 3.0, 2.0
LEEWAY = 60.0
"""Seconds for which a message stays valid after its timeout; Flower answers an expired one with an error."""

SILENT = "no reply in time"
T = TypeVar("T")
Contents: TypeAlias = Mapping[int, RecordDict]
Read: TypeAlias = Callable[[RecordDict, int], T]


class Arrivals(NamedTuple):
    """What came back of a set of messages, by client: contents, reasons of errors, and who sent nothing."""

    contents: dict[int, RecordDict]
    failed: dict[int, str]
    silent: tuple[int, ...] = ()

    def read(self, read: Read[T], about: str, names: Sequence[str]) -> "Replies[T]":
        """Read each reply; `read` raises RefusedError where it can't be used. Log whose are missing, and why."""
        replies: Replies[T] = Replies({}, self.failed, {}, set(self.silent))
        for client, content in self.contents.items():
            try:
                replies.valid[client] = read(unpack(content), client)
            except RefusedError as error:
                replies.refused[client] = str(error)
        for client, reason in replies.missing.items():
            LOG.warning("%s: no answer of %s: %s", about, names[client], reason)
        return replies


class Replies(NamedTuple, Generic[T]):
    """Replies by client index: what valid ones hold, reasons of errors and refusals, and who did not answer in time."""

    valid: dict[int, T]
    failed: dict[int, str]
    refused: dict[int, str]
    silent: set[int]

    @property
    def missing(self) -> dict[int, str]:
        """Why there is no valid reply, by client index."""
        refused = {client: f"refused: {reason}" for client, reason in self.refused.items()}
        return dict.fromkeys(sorted(self.silent), SILENT) | self.failed | refused


@dataclass
class Members:
    """The nodes of a federation: client k is the node whose key is registered under the k-th name at the SuperLink,
    whatever a message says about its sender. The names are those of the `sites` that train, then of the target site, if
    it does not. `timeout` is in seconds. Of this round it is kept who was `asked`, and who did not answer in time
    (`silent`); `nodes` are ids of all members that were ever connected, and `told` is said with each message."""

    grid: Grid
    names: tuple[str, ...]
    sites: int
    timeout: float
    asked: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    nodes: dict[int, int] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    _refusals: dict[int, str] = field(default_factory=dict)

    def connected(self) -> dict[int, int]:
        """Return the node id of every connected member, by client index."""
        nodes: dict[int, list[int]] = {}
        for node in self.grid.get_nodes():
            if node.name in self.names:
                nodes.setdefault(self.names.index(node.name), []).append(node.node_id)
        for client, found in nodes.items():
            name, now = self.names[client], found[0]
            if len(found) > 1:
                LOG.warning("%s: %d nodes are registered under this name; none is used", name, len(found))
            elif self.nodes.get(client, now) != now:
                LOG.warning("%s: its key has been replaced at the SuperLink; the new one is used", name)
        connected = {client: found[0] for client, found in nodes.items() if len(found) == 1}
        self.nodes |= connected
        return connected

    def online(self) -> dict[int, int]:
        """Return the node id of every connected site that trains, by client index."""
        return {client: node for client, node in self.connected().items() if client < self.sites}

    def wait(self, ready: Callable[[dict[int, int]], object], seconds: float, warning: str) -> dict[int, int]:
        """Wait until the connected sites are as they should be, or for so long; return them. Warn once."""
        deadline, is_said = time.monotonic() + seconds, False
        while not ready(online := self.online()) and time.monotonic() < deadline:
            if not is_said:
                LOG.warning("%s", warning)
            is_said = True
            time.sleep(PAUSE)
        return online

    def begin(self) -> None:
        """Begin a round: nobody has been asked in it."""
        self.asked.clear()
        self.silent.clear()

    def refuse(self, client: int, reason: str) -> None:
        """Tell a client with the next message why what it sent is not used."""
        self._refusals[client] = reason

    def ask(
        self,
        kind: str,
        contents: Contents,
        read: Read[T],
        about: str,
        timeout: float | None = None,
        in_round: bool = True,
    ) -> Replies[T]:
        """Ask members that were connected; return what is valid of their replies, and why others are not used. `read`
        reads a client's reply, or raises RefusedError, which the client is told next. `about` says in words what it is
        about; with `in_round`, it counts in this round who does not answer."""
        questions = {}
        for client, content in contents.items():
            more = {wire.VERSION: __version__, **self.told}
            if client in self._refusals:
                more[wire.REFUSED] = self._refusals.pop(client)
            said = ConfigRecord({**wire.config_of(content), **more})
            questions[client] = pack(RecordDict({**content, wire.CONFIG: said}))
        seconds = self.timeout if timeout is None else timeout
        replies = exchange(self.grid, self.nodes, questions, kind, seconds, about).read(read, about, self.names)
        if in_round:
            self.asked.update(contents)
            self.silent.update(replies.silent)
        self._refusals |= {client: f"{about}: {reason}" for client, reason in replies.refused.items()}
        return replies


def exchange(
    grid: Grid, nodes: Mapping[int, int], questions: Contents, message_type: str, timeout: float, group: str = ""
) -> Arrivals:
    """Send a message to each of several clients' nodes, and wait until all replied or the timeout has passed.

    A reply is attributed to the node that the message with the reply's message id was sent to. Flower's SuperLink
    accepts a reply only from that node, whereas the sender named inside a message could be forged. Each reply is pulled
    by a thread of its own: one that Flower can't decode does not affect others, and one that a node announces and then
    does not send, for which Flower waits minutes, is left to its thread at the deadline. Messages expire some time
    after the timeout, and later replies are never used.
    """
    messages = [
        Message(content, nodes[client], message_type, ttl=timeout + LEEWAY, group_id=group)
        for client, content in questions.items()
    ]
    pushed = list(grid.push_messages(messages)) if messages else []
    pending = {sent: client for sent, client in zip(pushed, questions, strict=False) if sent}
    if len(pushed) < len(messages):
        pending = {}  # whose ids these are is not known
    failed = dict.fromkeys(sorted(questions.keys() - pending.values()), "the SuperLink did not take its message")
    contents: dict[int, RecordDict] = {}
    deadline, over = time.monotonic() + timeout, threading.Event()
    arrivals: queue.SimpleQueue[tuple[str, Message | Exception]] = queue.SimpleQueue()
    for sent in pending:
        threading.Thread(target=_pull, args=(grid, sent, arrivals, over), daemon=True).start()
    try:
        while pending:
            left = max(0.0, deadline - time.monotonic())
            try:  # short waits: an interrupt by a thread of Flower's, as when its SuperLink has ended, cuts none short
                sent, reply = arrivals.get(timeout=min(left, LONGEST_PAUSE))
            except queue.Empty:
                if left:
                    continue
                break
            client = pending.pop(sent)
            if isinstance(reply, httpx.HTTPError):
                raise reply  # the SuperLink has ended, and with it this run
            if isinstance(reply, Exception):
                failed[client] = f"Flower can't decode its reply ({type(reply).__name__})"
            elif reply.has_content():
                contents[client] = reply.content
            else:
                failed[client] = error_line(reply)
    finally:
        over.set()
    return Arrivals(contents, failed, tuple(pending.values()))


def _pull(
    grid: Grid, sent: str, arrivals: queue.SimpleQueue[tuple[str, Message | Exception]], over: threading.Event
) -> None:
    pause = FIRST_PAUSE
    while not over.is_set():
        try:
            pulled = list(grid.pull_messages([sent]))
        except httpx.HTTPStatusError as error:
            if not error.response.is_server_error:
                return arrivals.put((sent, error))
            pulled = []  # a SuperLink on a busy disk, whose database was locked: it is asked again
        except Exception as error:  # the sender chose these bytes, and they can raise anything
            return arrivals.put((sent, error))
        if pulled:
            return arrivals.put((sent, pulled[0]))
        over.wait(pause)
        pause = min(pause * 1.3, LONGEST_PAUSE)
    return None


def error_line(message: Message) -> str:
    """Return the reason that an error reply gives, in one line."""
    line = " ".join((message.error.reason or "no reason given").split())
    return line if len(line) <= 200 else f"{line[:197]}..."
