"""Methods whose rounds are not all alike, and that end with another model than the config's."""

from __future__ import annotations

from fedskew.pipelines._fedconcat import FedConcat

INDEX: dict[str, type] = {"fedconcat": FedConcat}
"""The pipelines by the name that a config gives them."""

__all__ = ["INDEX", "FedConcat"]
