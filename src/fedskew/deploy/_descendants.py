"""Processes that a process started, and those that these started, in whatever session or group they are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Set
from pathlib import Path

PAUSE = 0.05


def descendants(roots: Collection[int]) -> set[int]:
    """The ids of all that descend from these processes now, without themselves."""
    children: dict[int, list[int]] = {}
    for process, parent in _living().items():
        children.setdefault(parent, []).append(process)
    found: set[int] = set()
    unseen = list(roots)
    while unseen:
        new = [child for child in children.get(unseen.pop(), []) if child not in found]
        found.update(new)
        unseen += new
    return found


def end(processes: Set[int], seconds: float) -> None:
    """End processes that are no children of this one: politely, and after some seconds by force."""
    for how, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, seconds)):
        for process in processes & _living().keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, how)
        until = time.monotonic() + patience
        while processes & _living().keys() and time.monotonic() < until:
            time.sleep(PAUSE)


def _living() -> dict[int, int]:
    """The parent of every process that has not ended."""
    if Path("/proc/self/stat").exists():
        lines = [line for path in Path("/proc").glob("[0-9]*/stat") if (line := _stat(path))]
    else:
        asked = ["ps", "-A", "-o", "pid=,state=,ppid="]
        lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    fields = [line.split() for line in lines]
    return {int(process): int(parent) for process, state, parent, *_ in fields if not state.startswith("Z")}


def _stat(path: Path) -> str:
    """Id, state and parent in a `/proc/ID/stat`, without the program's name, which may have spaces; "" if it ended."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    return text.partition(" ")[0] + text.rpartition(")")[2]
