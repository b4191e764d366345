"""What a frozen body makes of a data set's samples, computed once and kept in a file."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.data._dataset import Inputs, IntArray
from fedskew.files import locked, replacing, writing

MOST_BYTES = 1 << 32
"""Largest features of a data set that are kept."""

_ROWS = 64
"""Samples that pass the body at a time."""


class Features:
    """The outputs of a body in eval mode for the samples of a data set, `(samples, *shape)` float32; a `Stored`.

    They are computed a group at a time, when the first of a group is asked for, in the group's order: so their bits
    depend neither on who asks nor on when. The file is in a folder for temporary files until the process that made it
    ends, and is shared by those that it starts.

    Args:
        body: The network's frozen part; it is moved to no other device.
        groups: The rows of every group, such as a client's; the last one with a row has it. The samples of none are
            groups of 64, in their order.
        place: A folder whose files stay, and are used where they are there: its name stands for samples and body.
    """

    def __init__(self, inputs: Inputs, body: nn.Module, groups: Sequence[IntArray], place: Path | None = None) -> None:
        self._inputs, self._body = inputs, body
        rest = np.setdiff1d(np.arange(len(inputs)), np.concatenate([*groups, np.empty(0, np.int64)]))
        groups = [*groups, *np.split(rest, range(_ROWS, len(rest), _ROWS))]
        self._group_of = np.empty(len(inputs), np.int64)
        for number, rows in enumerate(groups):
            self._group_of[rows] = number
        self._groups = [rows[self._group_of[rows] == number] for number, rows in enumerate(groups)]
        self.shape: tuple[int, ...] = (len(inputs), *self._outputs(np.arange(1)).shape[1:])
        self._stays = place is not None
        self._folder = place or Path(tempfile.mkdtemp(prefix="fedskew-features-"))
        if place is None:
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        with locked(self._folder, 60.0):  # two that made them at once would each have the values of one
            if not (self._folder / "known.npy").exists():
                self._make("values.npy", np.float32, self.shape)
                self._make("known.npy", np.bool_, (len(self._groups),))
            self._open()

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return self._inputs.device

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, object]:
        """Pickle where the files are, not what they hold."""
        return vars(self) | {"_file": None, "_values": None, "_known": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._open()

    def _make(self, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> None:
        # With all of its space at once: on a full disk, writing to a file that is mapped into memory is a bus error.
        path = self._folder / name
        with writing(path), replacing(path, shared=True, wait=False) as part:
            np.lib.format.open_memmap(part, "w+", dtype, shape)
            if hasattr(os, "posix_fallocate"):  # not on macOS
                with part.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, part.stat().st_size)

    def _open(self) -> None:
        self._file = np.load(self._folder / "values.npy", mmap_mode="r+")
        self._values = torch.from_numpy(self._file)
        self._known = np.load(self._folder / "known.npy", mmap_mode="r+")

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """See `Stored.index_select`."""
        rows = index.cpu()
        asked = np.unique(self._group_of[rows.numpy()])
        for number in asked[~self._known[asked]].tolist():
            for some in np.split(self._groups[number], range(_ROWS, len(self._groups[number]), _ROWS)):
                self._values[some] = self._outputs(some).cpu()
            if self._stays:
                self._file.flush()  # before a power cut may find that it is known
            self._known[number] = True
        return self._values.index_select(dim, rows).to(self.device)

    def to(self, device: torch.device | str, /) -> "Features":
        """See `Stored.to`; they stay where they are."""
        return self

    @torch.no_grad()
    def _outputs(self, rows: IntArray) -> Tensor:
        outputs: Tensor = self._body.eval()(self._inputs.index_select(0, torch.from_numpy(rows).to(self.device)))
        return outputs
