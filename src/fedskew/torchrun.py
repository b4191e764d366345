"""What torchrun tells a process that it starts: `torchrun --nproc-per-node N -m fedskew run ...` starts N ranks."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether this process is a rank of several, or of one."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """This rank's number, from 0; the first one writes and prints. 0 without torchrun."""
    return int(os.environ["RANK"]) if launched() else 0


def ranks() -> int:
    """How many there are, on all machines."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def local_rank() -> int:
    """This rank's number on its machine: that of its GPU."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0
