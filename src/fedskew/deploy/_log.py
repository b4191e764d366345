"""What servers and sites say: a log, in which others' text can't pass for something else, the time, how a run ended.

Flower's `flwr run --stream` ends with status 0 whatever becomes of a run, as it only shows the run's log: the ServerApp
writes its ending into a file, for the command that waits for it.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import httpx

from fedskew.errors import EndedEarlyError, FedskewError, StandstillError, in_one_line
from fedskew.files import writing
from fedskew.names import visible

LOG = logging.getLogger("flwr.fedskew")
"""Flower's log. Reasons, names and paths in it may come from sites and files."""

SIZE = 4096
"""Bytes of the file. They are taken up before the run, so that even on a full disk the ending can be written."""

UNEXPECTED = 70
"""Exit status after an error that is not of fedskew's own kinds (EX_SOFTWARE)."""


def _visible(record: logging.LogRecord) -> bool:
    """Write a record as one line, with control characters as escapes (see `names.visible`)."""
    record.msg, record.args = visible(record.getMessage()), None
    return True


LOG.addFilter(_visible)


def _in_one_line(record: logging.LogRecord) -> bool:
    """Write an error of fedskew's own, which says all in one line, without its traceback."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, FedskewError):
        record.msg, record.args, record.exc_info = visible(str(error)), None, None
    return True


def say_errors_in_one_line() -> None:
    """From now on, Flower's log shows an error of fedskew's own without its traceback."""
    logging.getLogger("flwr").addFilter(_in_one_line)


def utc_now() -> str:
    """Return the time in UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Ending(NamedTuple):
    """How a run ended: an exit status, and the reason in one line, empty for a run that was trained to its end."""

    code: int
    message: str

    @staticmethod
    def reserve(path: Path) -> None:
        """Make the file for the ending of a run that has yet to start; RunError where it can't be written."""
        with writing(path):
            path.write_bytes(b" " * SIZE)

    @classmethod
    def read(cls, path: Path) -> "Ending | None":
        """Read how a run ended; None if the run's process was killed before it could write that."""
        with suppress(OSError, ValueError, TypeError):
            return cls(*json.loads(path.read_text(encoding="utf-8")))
        return None


@contextmanager
def recording_ending(path: Path | None) -> Iterator[list[str]]:
    """Write how the block ended into a reserved file; yield a list for what is to be said of a run that was trained."""
    still: list[str] = []
    try:
        yield still
    except BaseException as error:
        _tell(path, _ending(error))
        raise
    said = f"trained to its end, but for rounds without a step. {'. '.join(still)}"
    _tell(path, Ending(StandstillError.exit_code, said) if still else Ending(0, ""))


def _ending(error: BaseException) -> Ending:
    if isinstance(error, FedskewError):
        return Ending(error.exit_code, " ".join(str(error).split()))
    if isinstance(error, httpx.HTTPError):
        return Ending(EndedEarlyError.exit_code, "the SuperLink has ended; start it, and then the run, which goes on")
    if isinstance(error, Exception):
        return Ending(UNEXPECTED, f"unexpected: {in_one_line(error)}; the log above has the traceback")
    return Ending(EndedEarlyError.exit_code, "the run was stopped; start it again, and it goes on")


def _tell(path: Path | None, ending: Ending) -> None:
    if path is None:
        return
    text = json.dumps(ending).encode()
    if len(text) > SIZE:
        text = json.dumps([ending.code, ending.message[: SIZE // 12]]).encode()
    with suppress(OSError), path.open("r+b") as file:  # the command that waited may have been stopped
        file.write(text.ljust(SIZE))
