"""A whole federation on this machine: SuperLink and SuperNodes on loopback, with TLS and node keys, by the scripts that
`fedskew deploy init` writes for real ones."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from fedskew.deploy._descendants import descendants
from fedskew.deploy._descendants import end as end_all
from fedskew.errors import RunError

PATIENCE = 60.0
"""Seconds that a process gets to begin before it is an error."""

GRACE = 15.0
"""Seconds that processes get to end before they are killed."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^\s*(?:INFO|WARNING|ERROR)\s*:\s*")
_WARNING = re.compile(r"^\s*(?:WARNING|ERROR)\s*:")
_REASON = re.compile(r"ERROR|\[code: \d+\]|\w(?:Error|Exception)\b|_FAILED\b")
_CHATTER = re.compile(
    r"|For more information.*|.*(?:terminated gracefully|Shutting down|[Ll]ifespan|Finished server process|SuperExec"
    r"|[Aa]pplication (?:shutdown|startup)|retrying in).*"
)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Loopback:
    """The processes of one federation folder, whose server listens on 127.0.0.1 at `port`.

    Entered, the SuperLink runs, every site is registered and joins. Left, in whatever way, every process has ended.
    Each process writes to `logs/NAME.log` in the folder.
    """

    def __init__(self, folder: Path, port: int, sites: tuple[str, ...]) -> None:
        self.folder = folder.resolve()
        self.port = port
        self.sites = sites
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Loopback:
        try:
            self.start_server()
            self.wait("register", self.start("register", "server/register.sh"), PATIENCE * len(self.sites))
            for name in self.sites:
                self.start_site(name)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start_server(self) -> None:
        """The SuperLink, until it listens. Raises RunError where it doesn't."""
        process = self.start("superlink", "server/superlink.sh")
        until = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.1)
        raise RunError(f"the SuperLink did not start: {self.last_words('superlink')}")

    def start_site(self, name: str) -> subprocess.Popen[bytes]:
        """A site's SuperNode."""
        return self.start(name, f"sites/{name}/supernode.sh", {"PORT": str(free_port())})

    def run(self) -> subprocess.Popen[bytes]:
        """The training, which ends by itself."""
        return self.start("run", "server/run.sh")

    def start(self, name: str, script: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """One of the folder's scripts, in a process group of its own."""
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        with log.open("ab") as out:
            self.processes[name] = _popen(self.folder / script, out, {"PATH": path, **(environment or {})})
        return self.processes[name]

    def wait(self, name: str, process: subprocess.Popen[bytes], seconds: float) -> None:
        """Until a process has ended well. Raises RunError with its last words."""
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RunError(f"{name} did not end within {seconds:.0f} s; see {self.log(name)}") from None
        if status != 0:
            raise RunError(f"{name} failed: {self.last_words(name)}; see {self.log(name)}")

    def check(self) -> None:
        """Raises RunError where the server or a site has ended, with its last words."""
        for name, process in self.processes.items():
            if name in ("superlink", *self.sites) and process.poll() is not None:
                raise RunError(f"{name} ended{_how(process)}: {self.last_words(name)}; see {self.log(name)}")

    def stop(self) -> None:
        """End all of it: the sites, then the server; at once where that is interrupted."""
        try:
            self.end([name for name in self.processes if name != "superlink"])
            self.end(list(self.processes))
        except BaseException:
            self.end(list(self.processes), signal.SIGKILL)
            raise

    def end(self, names: list[str], how: signal.Signals = signal.SIGTERM) -> None:
        """End some processes, and what they started; by force those that take too long."""
        ending = {name: self.processes[name] for name in names}
        # Flower starts processes in sessions of their own, some of which outlive it for a while.
        theirs = descendants([process.pid for process in ending.values()])
        for process in ending.values():
            _signal(process, how)
        until = time.monotonic() + GRACE
        for name, process in ending.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.wait()
            del self.processes[name]
        end_all(theirs, GRACE)

    def log(self, name: str) -> Path:
        """What a process wrote."""
        return self.folder / "logs" / f"{name}.log"

    def last_words(self, name: str) -> str:
        """The last line that a process wrote which gives a reason, or else says anything."""
        lines = [line for line in self._lines(name)[-40:] if not _CHATTER.fullmatch(_plain(line))]
        last = next((line for line in reversed(lines) if _REASON.search(line)), lines[-1] if lines else "")
        return _plain(last) or "it said nothing"

    def warnings(self, name: str) -> list[str]:
        """What a process warned of, each once."""
        found = (line for line in self._lines(name)[:-1] if _WARNING.match(_COLOUR.sub("", line)))
        return list(dict.fromkeys(map(_plain, found)))

    def _lines(self, name: str) -> list[str]:
        log = self.log(name)
        return log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []


def _plain(line: str) -> str:
    """A line of a log without colour and level."""
    return _LEVEL.sub("", _COLOUR.sub("", line)).strip()


def _popen(script: Path, out: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sh", str(script)],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def _how(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f" by {signal.Signals(-code).name}" if code < 0 else ""


def _signal(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
