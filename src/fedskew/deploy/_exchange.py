"""One question to several sites, and their answers, over Flower's grid."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
LEEWAY = 60.0
"""Seconds that a question outlives its timeout: Flower answers an expired one with an error, as if the site had."""


class Answers(NamedTuple):
    """What came back, by the node that was asked.

    `contents`: records; `failures`: why there are none; `silent`: who said nothing in time.
    """

    contents: dict[int, RecordDict]
    failures: dict[int, str]
    silent: tuple[int, ...]


def exchange(
    grid: Grid, questions: Mapping[int, RecordDict], message_type: str, timeout: float, group: str = ""
) -> Answers:
    """Ask nodes, by node id, and wait until all have answered or `timeout` seconds have passed.

    An answer belongs to the node whose question it is pulled by: Flower's SuperLink takes an answer to a question from
    the node that it was for only, while what a message says of its own sender is the sender's to write. Answers are
    pulled one by one, so that one that Flower can't decode takes no other with it. Questions expire a while after the
    timeout, and an answer that comes later is never pulled.
    """
    messages = [
        Message(content, node, message_type, ttl=timeout + LEEWAY, group_id=group)
        for node, content in questions.items()
    ]
    pushed = list(grid.push_messages(messages)) if messages else []
    pending = dict(zip(pushed, questions, strict=True)) if len(pushed) == len(messages) else {}
    failures = {node: "the SuperLink did not take its message" for node in questions if node not in pending.values()}
    failures |= {node: "the SuperLink did not take its message" for sent, node in pending.items() if not sent}
    pending = {sent: node for sent, node in pending.items() if sent}
    contents: dict[int, RecordDict] = {}
    deadline, pause = time.monotonic() + timeout, FIRST_PAUSE
    while pending:
        for sent, node in list(pending.items()):
            try:
                pulled = list(grid.pull_messages([sent]))
            except httpx.HTTPError:
                raise  # the SuperLink is gone, and with it this run
            except Exception as error:  # bytes of somebody else's making can raise anything
                failures[node] = f"Flower can't decode its reply ({type(error).__name__})"
                del pending[sent]
                continue
            for message in pulled:
                pending.pop(sent, None)
                if message.has_content():
                    contents[node] = message.content
                else:
                    failures[node] = _one_line(message.error.reason)
        if not pending or time.monotonic() >= deadline:
            break
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(pause * 1.3, LONGEST_PAUSE)
    return Answers(contents, failures, tuple(pending.values()))


def _one_line(reason: str | None) -> str:
    line = " ".join((reason or "no reason given").split())
    return line if len(line) <= 200 else f"{line[:197]}..."
