"""The papers' networks; each gives features and raw logits."""

from fedskew.models._outputs import Outputs

__all__ = ["Outputs"]
