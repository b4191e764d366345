"""Child processes that end with their parent, even if it is killed, and a pool of them that works through jobs."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")

# Never a fork of this process: it may have used torch's threads, and then the child can hang. On Linux children are
# forked from a server that has imported what they need and computed nothing; elsewhere each starts anew.
if sys.platform == "linux":
    _CONTEXT = multiprocessing.get_context("forkserver")
else:
    _CONTEXT = multiprocessing.get_context("spawn")


class Reply(NamedTuple):
    """A child's reply to a job: any value that can be pickled, and whether no further reply to it follows."""

    value: Any
    done: bool = True


class Died(str):
    """Describes how a killed child ended; it is the value of the child's last reply."""


class Child:
    """A process that runs `target(connection, *arguments)`, which are pickled; `connection` leads to the parent. It
    ignores Ctrl-C until it calls `hear_interrupts`, and ends when its parent has ended; a daemon also when the parent
    exits normally, but it can start no processes itself. `loads` names the module that is loaded once for all children,
    if it is not the target's."""

    def __init__(self, target: Callable[..., None], *arguments: Any, daemon: bool = False, loads: str = "") -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        here = (dict(os.environ), os.getcwd(), list(sys.path))
        self.process = _CONTEXT.Process(target=_live, args=(target, theirs, arguments, here), daemon=daemon)
        if sys.platform == "linux":
            # Heeded by the first child only, which starts the server.
            _CONTEXT.set_forkserver_preload([loads or target.__module__])
        with _interrupts_blocked():
            self.process.start()
        theirs.close()

    def send(self, job: Any) -> None:
        """Send a job, which is pickled; a ConnectionError says that the child has ended."""
        self.connection.send(job)

    def receive(self) -> Reply:
        """Wait for the next reply; an EOFError or ConnectionError says that the child has ended."""
        reply: Reply = self.connection.recv()
        return reply

    def how_it_ended(self) -> str:
        """Wait until the child has ended, and return the exit status, or the signal that ended it, in words."""
        self.process.join()
        code = self.process.exitcode
        if code is None or code >= 0:
            hint = '; put what trains below `if __name__ == "__main__":`, as each process runs the script, too'
            return f"exit status {code}{hint if code == 1 and not are_safe() else ''}"
        name = signal.Signals(-code).name
        return f"{name}, perhaps for want of memory" if name == "SIGKILL" else name

    def interrupt(self) -> None:
        """Send the child the signal that Ctrl-C sends, SIGINT."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """End the child at once."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class Pool:
    """Children, at most `size` at a time, that each work on one job at a time; `start` starts one."""

    def __init__(self, start: Callable[[], Child], size: int) -> None:
        self._start, self._size = start, size
        self._children: list[Child] = []
        self._busy: dict[Any, tuple[Child, int]] = {}  # with the numbers of their jobs, by connection

    def open(self) -> None:
        """Start children until `size` of them run."""
        while len(self._children) < self._size:
            self._children.append(self._start())

    def run(
        self,
        following: Callable[[], tuple[int, Any] | None],
        read: Callable[[int, Reply], _T],
        own: Callable[[Any], Any] | None = None,
    ) -> Iterator[tuple[int, _T]]:
        """Hand out jobs, each to a free child, and to `own` in this process while all are busy; yield a job's number
        and the reply to it, in the order of arrival, as `read` returns it. A killed child's reply is a `Died`.

        `following` gives the next job and its number, or None while there is none; none is left if no child is busy.
        A reply is read at once, then its child has its next job, and works while the caller uses what was yielded.
        Children that an earlier call has left busy are ended.
        """
        if self._busy:
            self.kill()
        idle, busy = list(self._children), self._busy
        replies = deque[tuple[int, _T]]()
        while True:
            while len(busy) < self._size and (job := following()) is not None:
                if not idle:
                    idle.append(self._start())
                    self._children.append(idle[-1])
                child = idle.pop()
                with suppress(ConnectionError):  # the child was killed, which `receive` reports
                    child.send(job[1])
                busy[child.connection] = child, job[0]
            if replies:
                yield replies.popleft()
                continue
            if not busy:
                return
            ready = wait(list(busy), timeout=None if own is None else 0)
            if own is not None and not ready:
                if (job := following()) is None:
                    own = None
                else:
                    yield job[0], read(job[0], Reply(own(job[1])))
            for connection in ready:
                child, number = busy.pop(connection)
                try:
                    reply = child.receive()
                    idle.append(child)
                except (EOFError, ConnectionError):
                    reply = Reply(Died(child.how_it_ended()))
                    self._children.remove(child)
                    child.kill()
                replies.append((number, read(number, reply)))

    def kill(self) -> None:
        """End all children at once."""
        self._busy = {}
        while self._children:
            self._children.pop().kill()


def are_safe() -> bool:
    """Return whether children can be started unasked: none would run a user's script again, whose `__main__` they load.
    They can from fedskew's own commands, and from what is no file: `python -c`, a notebook."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    ours = (file is not None and Path(file).stem == "fedskew") or (spec is not None and spec.name.startswith("fedskew"))
    return sys.platform != "win32" and multiprocessing.parent_process() is None and (file is None or ours)


def hear_interrupts() -> None:
    """Let this child process raise KeyboardInterrupt at Ctrl-C, once: terminal and parent may both send it."""
    answered = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal answered
        if not answered:
            answered = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _live(
    target: Callable[..., None],
    connection: Connection,
    arguments: tuple[Any, ...],
    parents: tuple[dict[str, str], str, list[str]],
) -> None:
    """Take over the parent's environment, folder and import path of now: the server's are as old as the server."""
    environment, folder, path = parents
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(connection, *arguments)


def _end_with_parent() -> None:
    """End this process when its parent has ended, so that never two processes write one run folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process only"
    parent.join()
    os._exit(1)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block the interrupt signal, so that processes started inside this context begin with it blocked."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # started later, with the first process, it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
