"""One server at a time for a run folder: Ctrl-C on `flwr run --stream` stops watching, not the run."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedskew.errors import RunError

LOG = logging.getLogger("flwr")
PATIENCE = 90.0
"""Seconds: a ServerApp whose SuperLink was killed needs some to notice."""

PAUSE = 1.0


@contextmanager
def alone(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Keep every other process out of a run folder.

    Waits for one that is in it. Raises RunError where it is still there after `patience` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until, waiting = time.monotonic() + patience, False
    with (folder / "lock").open("a") as file:
        while not _taken(file):
            if time.monotonic() >= until:
                raise RunError(f"{folder}: another run is writing here; wait for its end, or end it with flwr stop")
            if not waiting:
                LOG.warning("%s: another run is writing here; waiting for its end", folder)
                waiting = True
            time.sleep(min(PAUSE, patience))
        yield


def _taken(file: IO[str]) -> bool:
    """Whether the lock is ours now; it ends with the process. Where the system has no such lock, nobody is kept out."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
