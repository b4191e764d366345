"""Federated learning when clients hold different labels.

`simulate` trains a federation on this machine; `describe` says how skewed its labels are. PyTorch is imported when the
first name that needs it is used, so that label counts can be looked at without waiting for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedskew.errors import FedskewError
from fedskew.labels import LabelCounts, describe

if TYPE_CHECKING:
    from fedskew.experiment import Result, simulate
    from fedskew.methods import Method

__version__ = "0.1.0"
__all__ = ["FedskewError", "LabelCounts", "Method", "Result", "describe", "simulate"]

_LATE = {"Method": "fedskew.methods", "Result": "fedskew.experiment", "simulate": "fedskew.experiment"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'fedskew' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATE[name]), name)
