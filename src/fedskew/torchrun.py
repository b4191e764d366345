"""The ranks of `torchrun`: which one this process is, and which work is whose.

`torchrun --nproc-per-node N -m fedskew run ...` starts N ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """This process's rank, from 0; the first one writes and prints. 0 without torchrun."""
    return int(os.environ["RANK"]) if launched() else 0


def ranks() -> int:
    """Number of ranks on all machines; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def local_rank() -> int:
    """This process's rank on its machine, which is the number of its GPU; 0 without torchrun."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0


def assign(work: Sequence[float]) -> list[list[int]]:
    """Balance work over the ranks: the longest first, each to the rank with the least so far, the lowest of several.

    Args:
        work: How long each item takes, in any unit.

    Returns:
        For each rank the indices of its items.
    """
    assigned: list[list[int]] = [[] for _ in range(ranks())]
    loads = [0.0] * len(assigned)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        least = loads.index(min(loads))
        assigned[least].append(index)
        loads[least] += work[index]
    return assigned
