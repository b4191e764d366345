"""The ranks of `torchrun`: which rank this process is, and which work each rank does.

`torchrun --nproc-per-node N -m fedskew run ...` starts N ranks.
"""

import os
from collections.abc import Sequence

from fedskew.tables import balanced


def launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Return this process's rank, from 0; rank 0 writes files and prints. Without torchrun it is 0."""
    return int(os.environ["RANK"]) if launched() else 0


def ranks() -> int:
    """Return the number of ranks on all machines; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def device() -> str:
    """Return the GPU of this process: the one that has its rank on its machine."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if launched() else "cuda"


def assign(work: Sequence[float]) -> list[list[int]]:
    """Balance work over the ranks: return each one's items, the longest first."""
    return balanced(work, ranks())
