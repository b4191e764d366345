"""What is not believed."""

from __future__ import annotations

from fedskew.errors import FedskewError


class RefusedError(FedskewError):
    """A reply is not used; the message is the reason, one line for the log."""
