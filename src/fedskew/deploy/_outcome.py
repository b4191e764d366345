"""How a deployed run ended: told by the ServerApp, in a file, to the command that waits for it.

Flower's `flwr run --stream` ends with status 0 whatever becomes of the run, as it only shows the run's log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from fedskew.errors import EndedEarlyError, FedskewError, in_one_line
from fedskew.files import writing

SIZE = 4096
"""Bytes of the file. They are taken up before the run, so that a full disk can be told."""

UNEXPECTED = 70
"""Exit status after an error that is not of fedskew's own kinds (EX_SOFTWARE)."""


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        code: Exit status.
        message: The reason, in one line; empty for a run that was trained to its end.
    """

    code: int
    message: str


def reserve(path: Path) -> None:
    """Make an outcome's file, in which there is none yet."""
    with writing(path):
        path.write_bytes(b" " * SIZE)


def read_outcome(path: Path) -> Outcome | None:
    """Read an outcome; None where the run's process did not live to tell it."""
    try:
        return Outcome(*json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def told(path: Path | None) -> Iterator[None]:
    """Write how the block ended into a reserved file, and let its error go on.

    Args:
        path: The file; None: nobody waits for it.
    """
    try:
        yield
    except BaseException as error:
        _tell(path, _outcome(error))
        raise
    _tell(path, Outcome(0, ""))


def _outcome(error: BaseException) -> Outcome:
    if isinstance(error, FedskewError):
        return Outcome(error.exit_code, " ".join(str(error).split()))
    if isinstance(error, httpx.HTTPError):
        return Outcome(EndedEarlyError.exit_code, "the SuperLink has ended; start it, and then the run, which goes on")
    if isinstance(error, Exception):
        return Outcome(UNEXPECTED, f"unexpected: {in_one_line(error)}; the log above has the traceback")
    return Outcome(EndedEarlyError.exit_code, "the run was stopped; start it again, and it goes on")


def _tell(path: Path | None, outcome: Outcome) -> None:
    if path is None:
        return
    text = json.dumps(outcome).encode()
    if len(text) > SIZE:
        text = json.dumps([outcome.code, outcome.message[: SIZE // 12]]).encode()
    with suppress(OSError), path.open("r+b") as file:  # who waited may have gone
        file.write(text.ljust(SIZE))
