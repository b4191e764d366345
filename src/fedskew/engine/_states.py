"""What is kept between rounds: the server's state, and those of clients that have taken part."""

import json
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.engine._backend import tensor_bytes
from fedskew.errors import ComponentError, RunError
from fedskew.files import load_tensors, save_tensors, sync_files
from fedskew.models import ModelState

Named = Mapping[str, Tensor]
Key = tuple[int, int]
"""A client, and the round that its state is of."""


@dataclass(frozen=True)
class ServerState:
    """The server's state between rounds: the number of the last round, and one dictionary of named tensors.

    A tensor's name is that of its owner (a component's place in the method, "model", "target"), a slash, and its own.
    A run can be resumed from this, the clients' states and the config.
    """

    round: int
    tensors: Mapping[str, Tensor]

    def of(self, owner: str) -> dict[str, Tensor]:
        """Return an owner's tensors by name."""
        return {name.partition("/")[2]: part for name, part in self.tensors.items() if name.startswith(f"{owner}/")}

    def having(self, owner: str, tensors: Named) -> "ServerState":
        """Return the state with other tensors of one owner."""
        others = {name: part for name, part in self.tensors.items() if not name.startswith(f"{owner}/")}
        return replace(self, tensors=others | {f"{owner}/{name}": part for name, part in tensors.items()})

    def moved_to(self, model: ModelState) -> "ServerState":
        """Return the state with another global model."""
        return self.having("model", model._asdict())

    @property
    def model(self) -> ModelState:
        """The global model, in training."""
        return ModelState(**self.of("model"))


def packed(state: Any, of: str = "selection") -> dict[str, Tensor]:
    """Return a dataclass of tensors, arrays and plain values (or None) as named tensors; plain values as JSON."""
    if state is not None and not is_dataclass(state):
        raise _unfit(of, state)
    return {entry.name: _tensor(of, getattr(state, entry.name)) for entry in fields(state)} if state is not None else {}


def unpacked(tensors: Named, like: Any) -> Any:
    """Return the dataclass (or None) that `packed` was given, of the same kind as another."""
    if like is None:
        return None
    return type(like)(**{name: _value(part, getattr(like, name)) for name, part in tensors.items()})


def _tensor(of: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value.copy())
        return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    except TypeError:
        raise _unfit(of, value) from None


def _value(part: Tensor, like: Any) -> Any:
    if isinstance(like, Tensor):
        return part
    is_array = isinstance(like, np.ndarray) or part.dtype != torch.uint8
    return part.numpy() if is_array else json.loads(bytes(part.tolist()))


def _unfit(of: str, value: Any) -> ComponentError:
    return ComponentError(
        f"{of} in the run's state is of type {type(value).__name__} and can't be saved; what a component keeps between "
        "rounds is a frozen dataclass of tensors, arrays and plain values, or None"
    )


class ClientStates:
    """A store of each client's named tensors: in memory up to a limit, the least recently used ones in files.

    A file is named by client and round and is never overwritten. A checkpoint can thus name the files that it belongs
    to, and a run that is killed later resumes from these files.
    """

    def __init__(self, folder: Path | None = None, memory: int = 2**30) -> None:
        self._given = folder
        self._memory = memory
        self._cached: OrderedDict[Key, Named] = OrderedDict()
        self._bytes = 0
        self._rounds: dict[int, int] = {}
        self._staged: set[Key] = set()
        self._unwritten: set[Key] = set()
        self._written: list[Path] = []  # since the last save, maybe not on the disk yet
        self._stale: list[Path] = []

    def get(self, client: int) -> Named | None:
        """Return a client's tensors by name; None before its first participation."""
        if client not in self._rounds:
            return None
        key = client, self._rounds[client]
        if key not in self._cached:
            self._cache(key, self._read(key))
        self._cached.move_to_end(key)
        return self._cached[key]

    def of(self, client: int) -> Named | None:
        """Return the same as `get`, but as a mapping that fetches the tensors once they are read."""
        return _Fetched(self, client) if client in self._rounds else None

    def put(self, client: int, round: int, state: Named) -> None:
        """Store a client's tensors at the end of a round; none are not stored."""
        self.stage(client, round, state)
        self.settle()

    def stage(self, client: int, round: int, state: Named) -> None:
        """Hold a client's tensors in a round that goes on; `settle` decides what becomes of them."""
        if state:
            key = client, round
            self._evict(key)
            self._staged.add(key)
            self._unwritten.add(key)
            self._cache(key, state)

    def settle(self, keep: bool = True) -> None:
        """Store all that is staged, or forget it."""
        for client, round in sorted(self._staged):
            old = self._rounds.get(client, round) if keep else round
            if old != round or not keep:
                self._forget((client, old))
            if keep:
                self._rounds[client] = round
        self._staged.clear()

    @property
    def newest(self) -> int:
        """The latest round at whose end a state was stored; 0 if none is stored."""
        return max(self._rounds.values(), default=0)

    def save(self) -> NDArray[np.int64]:
        """Write all states that are not on disk yet; return clients and the rounds that they are of, `(clients, 2)`."""
        for key in sorted(self._unwritten & self._rounds.items()):
            self._write(key)
        sync_files([path for path in self._written if path.exists()])
        self._written.clear()
        rounds = np.array([[*self._rounds], [*self._rounds.values()]], dtype=np.int64)
        return rounds.T[np.argsort(rounds[0])]

    def restore(self, rounds: NDArray[np.int64]) -> None:
        """Go back to the states of an earlier `save`, and delete the files of all other states."""
        self._cached.clear()
        self._bytes = 0
        self._rounds = {int(client): int(round) for client, round in rounds}
        self._unwritten.clear()
        self._staged.clear()
        kept = {self._path(key): key[0] for key in self._rounds.items()}
        there = set(self._folder.glob("*.safetensors"))
        for path, client in kept.items():
            if path not in there:
                raise _lost(path, client, "it is missing")
        self._stale = sorted(there - kept.keys())
        self.drop_stale()

    def drop_stale(self) -> None:
        """Delete the files of states that have been replaced. Call this once a checkpoint has been written."""
        for path in self._stale:
            path.unlink(missing_ok=True)
        self._stale.clear()

    @cached_property
    def _folder(self) -> Path:
        """The folder given, or a temporary one that is deleted with this object."""
        if self._given is not None:
            return self._given
        temporary = Path(tempfile.mkdtemp(prefix="fedskew-"))
        weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
        return temporary

    def _cache(self, key: Key, state: Named) -> None:
        self._cached[key] = state
        self._bytes += tensor_bytes(state)
        while self._bytes > self._memory and len(self._cached) > 1:
            oldest = next(iter(self._cached))
            self._write(oldest)
            self._evict(oldest)

    def _evict(self, key: Key) -> None:
        if key in self._cached:
            self._bytes -= tensor_bytes(self._cached.pop(key))

    def _forget(self, key: Key) -> None:
        self._evict(key)
        if key in self._unwritten:
            self._unwritten.remove(key)
        else:
            self._stale.append(self._path(key))

    def _write(self, key: Key) -> None:
        if key not in self._unwritten:
            return
        path = self._path(key)
        save_tensors(path, self._cached[key], {"of": path.stem}, wait=False)
        self._written.append(path)
        self._unwritten.remove(key)

    def _read(self, key: Key) -> Named:
        path = self._path(key)
        try:
            tensors, notes = load_tensors(path)
        except RunError as error:
            raise _lost(path, key[0], str(error)) from None
        if notes.get("of") != path.stem:
            raise _lost(path, key[0], f"it holds client and round {notes.get('of')}")
        return tensors

    def _path(self, key: Key) -> Path:
        return self._folder / f"{key[0]}-{key[1]}.safetensors"


class _Fetched(Mapping[str, Tensor]):
    """A client's tensors, which stay where they are until they are read."""

    def __init__(self, states: ClientStates, client: int) -> None:
        self._fetch = partial(states.get, client)

    def __getitem__(self, name: str) -> Tensor:
        return (self._fetch() or {})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetch() or {})

    def __len__(self) -> int:
        return len(self._fetch() or {})


def _lost(path: Path, client: int, why: str) -> RunError:
    return RunError(
        f"{path}: what client {client} keeps between rounds can't be read ({why}); start over with --fresh, which "
        "keeps the old folder"
    )
