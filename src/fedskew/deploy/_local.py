"""A whole federation on this machine: SuperLink and SuperNodes on loopback, with TLS and node keys.

The processes are started by the scripts that `fedskew deploy init` writes for real sites.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import psutil

from fedskew.errors import RunError

STARTUP = 60.0
"""Seconds that a process may take to start."""

GRACE = 15.0
"""Seconds that processes may take to end before they are killed."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^\s*(?:INFO|WARNING|ERROR)\s*:\s*")
_WARNING = re.compile(r"^\s*(?:WARNING|ERROR)\s*:")
_REASON = re.compile(r"^fedskew: |ERROR|\[code: \d+\]|\w(?:Error|Exception)\b|_FAILED\b")
_NOISE = re.compile(
    r"|For more information.*|.*(?:terminated gracefully|Shutting down|[Ll]ifespan|Finished server process|SuperExec"
    r"|[Aa]pplication (?:shutdown|startup)|retrying in).*"
)


class LocalFederation:
    """The processes of a federation folder, by name, all on this machine; a context manager.

    On entry the SuperLink is started, and every site is registered and started. On exit, also after an error, all
    processes are ended. Each process writes to `logs/NAME.log` in the folder.
    """

    def __init__(self, folder: Path, port: int, sites: tuple[str, ...]) -> None:
        self.folder = folder.resolve()
        self.port = port
        self.sites = sites
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalFederation:
        try:
            self.start_server()
            self.wait("register", self.start("register", "server/register.sh"), STARTUP * len(self.sites))
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
        """Start the SuperLink, and wait until it listens; RunError if it does not start."""
        process = self.start("superlink", "server/superlink.sh")
        until = time.monotonic() + STARTUP
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.1)
        raise RunError(f"the SuperLink did not start: {self.last_message('superlink')}")

    def start_site(self, name: str) -> subprocess.Popen[bytes]:
        """Start a site's SuperNode."""
        return self.start(name, f"sites/{name}/supernode.sh", {"PORT": str(LocalFederation.free_port())})

    def run(self) -> subprocess.Popen[bytes]:
        """Start the training; the process ends with it."""
        return self.start("run", "server/run.sh")

    def start(self, name: str, script: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start one of the folder's scripts, in a process group of its own."""
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        with log.open("ab") as out:
            self.processes[name] = subprocess.Popen(
                ["sh", str(self.folder / script)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": path, **(environment or {})},
                start_new_session=True,
            )
        return self.processes[name]

    def wait(self, name: str, process: subprocess.Popen[bytes], seconds: float) -> None:
        """Wait for a process to end; RunError if it failed, or did not end in time."""
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RunError(f"{name} did not end within {seconds:.0f} s; see {self.log(name)}") from None
        if status != 0:
            raise RunError(f"{name} failed: {self.last_message(name)}; see {self.log(name)}")

    def check(self) -> None:
        """Raise RunError if the server or a site has ended, with the last message in its log."""
        for name, process in self.processes.items():
            code = process.poll()
            if name in ("superlink", *self.sites) and code is not None:
                by = f" by {signal.Signals(-code).name}" if code < 0 else ""
                raise RunError(f"{name} ended{by}: {self.last_message(name)}; see {self.log(name)}")

    def stop(self) -> None:
        """End all processes, the sites before the server; kill them at an interrupt."""
        try:
            self.end([name for name in self.processes if name != "superlink"])
            self.end(list(self.processes))
        except BaseException:
            self.end(list(self.processes), signal.SIGKILL)
            raise

    def end(self, names: list[str], by: signal.Signals = signal.SIGTERM) -> None:
        """End processes and all their descendants; kill those that do not end within `GRACE` seconds."""
        ending = {name: self.processes[name] for name in names}
        # Flower starts processes in sessions of their own; some of them run on for a while after Flower has ended.
        started = [child for process in ending.values() for child in _descendants(process.pid)]
        for process in ending.values():
            _signal(process, by)
        until = time.monotonic() + GRACE
        for name, process in ending.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.wait()
            del self.processes[name]
        _end(started)

    def log(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.folder / "logs" / f"{name}.log"

    def last_message(self, name: str) -> str:
        """Return the last line of a process's log that names an error; else the last line."""
        lines = [line for line in self._lines(name)[-40:] if not _NOISE.fullmatch(_plain(line))]
        last = next((line for line in reversed(lines) if _REASON.search(line)), lines[-1] if lines else "")
        return _plain(last) or "it wrote nothing"

    def warnings(self, name: str) -> list[str]:
        """Return the warnings in a process's log, without repetitions."""
        found = (line for line in self._lines(name)[:-1] if _WARNING.match(_COLOUR.sub("", line)))
        return list(dict.fromkeys(map(_plain, found)))

    def _lines(self, name: str) -> list[str]:
        log = self.log(name)
        return log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []

    @staticmethod
    def free_port() -> int:
        """Find a TCP port of this machine that is free at the moment."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port: int = listener.getsockname()[1]
            return port


def _plain(line: str) -> str:
    return _LEVEL.sub("", _COLOUR.sub("", line)).strip()


def _signal(process: subprocess.Popen[bytes], by: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, by)


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _end(processes: Iterable[psutil.Process]) -> None:
    """End processes that are not children of this one; kill those that do not end within `GRACE` seconds."""
    alive = list(processes)
    for by in (signal.SIGTERM, signal.SIGKILL):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(by)
        _, alive = psutil.wait_procs(alive, timeout=GRACE)
