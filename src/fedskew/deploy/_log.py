"""The log of servers and sites, in which text that somebody else chose can't pass for something else; and the time."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from fedskew.errors import FedskewError
from fedskew.names import visible


class VisibleText(logging.Filter):
    """Writes every record as one line, with control characters and bidi marks but `keep` as escapes (see
    `names.visible`)."""

    def __init__(self, keep: str = "") -> None:
        super().__init__()
        self._keep = keep

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record's message, and let it pass."""
        record.msg, record.args = visible(record.getMessage(), self._keep), None
        return True


class OneLineErrors(logging.Filter):
    """Writes an error of fedskew's own, which says all in one line, without its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record, and let it pass."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, FedskewError):
            record.msg, record.args, record.exc_info = visible(str(error)), None, None
        return True


def say_errors_in_one_line() -> None:
    """From now on, Flower's log shows an error of fedskew's own without its traceback."""
    logging.getLogger("flwr").addFilter(OneLineErrors())


LOG = logging.getLogger("flwr.fedskew")
"""Flower's log. Reasons, names and paths in it may come from sites and files."""
LOG.addFilter(VisibleText())


def utc_now() -> str:
    """Return the time in UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
