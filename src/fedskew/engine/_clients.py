"""What clients keep between their participations: one state for each that took part, whatever the pool."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedskew.files import replacing

Named = Mapping[str, Tensor]


class ClientStates:
    """Named tensors by client, in memory up to `memory` bytes; beyond that the longest unused go to files.

    A file is named by client and round and never written twice, so that a checkpoint can name the files it belongs to,
    and a run that was killed later goes on from just those.
    """

    def __init__(self, folder: Path | None = None, memory: int = 2**30) -> None:
        self._given = folder
        self._memory = memory
        self._held: OrderedDict[int, Named] = OrderedDict()
        self._bytes = 0
        self._rounds: dict[int, int] = {}
        self._unwritten: set[int] = set()
        self._stale: list[Path] = []

    def get(self, client: int) -> Named | None:
        """A client's state; None before its first participation."""
        if client not in self._rounds:
            return None
        if client not in self._held:
            self._hold(client, load_file(self._path(client, self._rounds[client])))
        self._held.move_to_end(client)
        return self._held[client]

    def put(self, client: int, round: int, state: Named) -> None:
        """Keep what a client ended this round with."""
        if not state:
            return
        self._drop(client)
        if self._rounds.get(client, round) != round and client not in self._unwritten:
            self._stale.append(self._path(client, self._rounds[client]))
        self._rounds[client] = round
        self._unwritten.add(client)
        self._hold(client, state)

    @property
    def newest(self) -> int:
        """The last round of which there is a state; 0 before the first."""
        return max(self._rounds.values(), default=0)

    def save(self) -> NDArray[np.int64]:
        """Write what isn't on disk yet, and return which client's state is of which round, `(clients, 2)`."""
        for client in sorted(self._unwritten):
            self._write(client)
        rounds = np.array([[*self._rounds], [*self._rounds.values()]], dtype=np.int64)
        return rounds.T[np.argsort(rounds[0])]

    def restore(self, rounds: NDArray[np.int64]) -> None:
        """Go back to the states that `save` returned; later files are dropped."""
        self._held.clear()
        self._bytes = 0
        self._rounds = {int(client): int(round) for client, round in rounds}
        self._unwritten.clear()
        kept = {self._path(client, round) for client, round in self._rounds.items()}
        self._stale = [path for path in self._folder.glob("*.safetensors") if path not in kept]
        self.drop_stale()

    def drop_stale(self) -> None:
        """Delete the files of states that have been replaced; to be called once a checkpoint stands."""
        for path in self._stale:
            path.unlink(missing_ok=True)
        self._stale.clear()

    @cached_property
    def _folder(self) -> Path:
        """The folder given, or one that goes when this object does."""
        if self._given is not None:
            return self._given
        aside = Path(tempfile.mkdtemp(prefix="fedskew-"))
        weakref.finalize(self, shutil.rmtree, aside, ignore_errors=True)
        return aside

    def _hold(self, client: int, state: Named) -> None:
        self._held[client] = state
        self._bytes += _size(state)
        while self._bytes > self._memory and len(self._held) > 1:
            oldest = next(iter(self._held))
            self._write(oldest)
            self._drop(oldest)

    def _drop(self, client: int) -> None:
        if client in self._held:
            self._bytes -= _size(self._held.pop(client))

    def _write(self, client: int) -> None:
        if client not in self._unwritten:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(client, self._rounds[client])
        with replacing(path) as part:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in self._held[client].items()}, part)
        self._unwritten.remove(client)

    def _path(self, client: int, round: int) -> Path:
        return self._folder / f"{client}-{round}.safetensors"


def _size(state: Named) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
