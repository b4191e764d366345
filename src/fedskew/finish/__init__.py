"""Finish: what happens once, after the last round. Most methods leave this place empty.

A finish asks the clients for sums over their samples, as the trained model sees these, and makes another last layer of
them; all other weights stay. It goes with every other component, as it knows nothing of the rounds before it. The model
as it was trained is kept, and both are evaluated.
"""

from fedskew.finish._adapt import Adapt, moved, offsets
from fedskew.finish._ccvr import CCVR
from fedskew.finish._protocol import NEVER, Ask, Finish, Finished, Head, Known, Observed, Source

INDEX: dict[str, type] = {
    "adapt": Adapt,
    "ccvr": CCVR,
}

__all__ = [
    "CCVR",
    "INDEX",
    "NEVER",
    "Adapt",
    "Ask",
    "Finish",
    "Finished",
    "Head",
    "Known",
    "Observed",
    "Source",
    "moved",
    "offsets",
]
