"""Processes that this one starts, and that end with it, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")  # a forked copy of a process that has used torch's threads can hang


class Child:
    """A process that runs `target(connection, *arguments)`, all of which is pickled; `connection` is the other end.

    It is deaf to Ctrl-C until it calls `hear_interrupts`, and ends when the process that started it is gone. With
    `daemon`, it is also ended when that one exits, and may start no process of its own.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any, daemon: bool = False) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_live, args=(target, theirs, arguments), daemon=daemon)
        with _interrupts_blocked():
            self.process.start()
        theirs.close()

    def how_it_ended(self) -> str:
        """Its exit status or the signal that ended it; waits for the end."""
        self.process.join()
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"exit status {code}"
        name = signal.Signals(-code).name
        return f"{name}, perhaps for want of memory" if name == "SIGKILL" else name

    def interrupt(self) -> None:
        """Send it what Ctrl-C sends."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def hear_interrupts() -> None:
    """Answer to the first Ctrl-C by KeyboardInterrupt, and to no other: a terminal and the parent may both send it."""
    answered = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal answered
        if not answered:
            answered = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _live(target: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(connection, *arguments)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: two must never write one run folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process only"
    parent.join()
    os._exit(1)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process that is started here is born with the signal blocked."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # it is started with the first process, and unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
