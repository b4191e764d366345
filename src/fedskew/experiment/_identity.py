"""The identity of a run beside its config: its own code, the content of its data, fedskew's version.

    identity.json       fedskew's version; checksum of the data, and size and time of the user's files that they were
                        read from; where relative paths began
    code/               the source of the user's own components, as it was

A config's hash says what a run was asked for; this says what answered. A run is gone on with, and a finished one stands
in a sweep's table, only while both are the same.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from fedskew import __version__, components, data
from fedskew.data import OWN, ByteImages, Dataset, Encoder
from fedskew.data.texts import Tokens
from fedskew.errors import ConfigError, DataError, RunError, placed
from fedskew.experiment._config import IDENTITY, Config, Origin
from fedskew.experiment._own import changed_sources, own_sources
from fedskew.files import write_text, writing
from fedskew.own_code import CODE, names_in
from fedskew.randomness import Purpose, generator

_ROWS = 256
"""How many rows stand for the inputs of a data set that is read from files batch by batch."""


T = TypeVar("T")
ANEW = "start over with --fresh, which keeps the old folder"
"""What a message about a run that can't be gone on with advises."""


@dataclass(frozen=True)
class Content:
    """The content of a run's data: a checksum, and size and time of the user's files, by path (None: not known)."""

    checksum: str
    files: Mapping[str, str] | None


@dataclass
class Loaded:
    """A data set that was loaded, what it is of, and the user's files as they were before they were read."""

    key: str
    files: Mapping[str, str] | None
    dataset: Dataset

    @cached_property
    def checksum(self) -> str:
        """Checksum of the content; of inputs that are read from files batch by batch, shape and 256 rows count."""
        found = xxhash.xxh3_128()
        for field in dataclasses.fields(self.dataset):
            value = getattr(self.dataset, field.name)
            if field.name == "encoder" and value is None:
                continue
            found.update(f"{field.name}:".encode())
            if type(value) is ByteImages:  # in memory, unlike those of its subclasses
                value = value.pixels
            if field.name in ("inputs", "test_inputs") and not isinstance(value, Tensor):
                found.update(str(tuple(value.shape)).encode())
                value = value.index_select(0, torch.linspace(0, len(value) - 1, min(_ROWS, len(value))).long())
            if isinstance(value, Tensor):
                value = value.detach().cpu().contiguous().numpy()
            if isinstance(value, np.ndarray):
                found.update(f"{value.dtype}{value.shape}".encode())
                found.update(np.ascontiguousarray(value).data)
            else:
                found.update(repr(value).encode())
        return str(found.hexdigest())

    def content(self, config: Config) -> Content:
        """Return the content of the data of a run, the partition's file and unlabelled samples included."""
        checksum = self.checksum
        if places := _beside(config):
            found = xxhash.xxh3_128(checksum.encode())
            for place in places:
                for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
                    if file.is_file():
                        found.update(f"{file.relative_to(place)}:".encode())
                        found.update(file.read_bytes())
            checksum = str(found.hexdigest())
        return Content(checksum, None if self.files is None else {**self.files, **_listed(places)})


_kept: ContextVar[list[Loaded] | None] = ContextVar("_kept", default=None)
"""The data set that was loaded last, for the next run that needs the same one; None: nothing is kept."""


@contextmanager
def shared_data() -> Iterator[None]:
    """Keep the data set that was loaded last while the block runs, for the next that needs the same one."""
    token = _kept.set([] if (kept := _kept.get()) is None else kept)
    try:
        yield
    finally:
        _kept.reset(token)


def keep_data() -> None:
    """Keep the data set that was loaded last from now on, in a process that only works through runs."""
    if _kept.get() is None:
        _kept.set([])


def data_seed(config: Config, seed: int) -> int:
    """Return the seed of data set and partition: the config's `partition.seed`, else that of the run."""
    return seed if config.partition.seed is None else config.partition.seed


def loaded(config: Config, seed: int) -> Loaded:
    """Load the data set of a config with a seed (see `data_seed`)."""
    kept, key = _kept.get(), _key(config, seed)
    if kept and kept[0].key == key:
        return kept[0]
    if kept:
        kept.clear()  # only one in memory
    found = Loaded(key, _own_files(config), _load(config, seed))  # files as they are before: a change meanwhile shows
    if kept is not None:
        kept.append(found)
    return found


def load_dataset(config: Config, seed: int) -> Dataset:
    """Load the data set of a config, with a seed for those that are drawn at random (see `data_seed`)."""
    return loaded(config, seed).dataset


def files_of(config: Config) -> dict[str, str] | None:
    """Return size and time of the user's files that a config's data are read from (see `Content`)."""
    own = _own_files(config)
    return None if own is None else own | _listed(_beside(config))


def _own_files(config: Config) -> dict[str, str] | None:
    """Return size and time of the user's files that the data set is read from; None where these are not known."""
    if ":" in config.data.name:
        return None
    root = config.data.root or os.environ.get("FEDSKEW_DATA")
    if config.data.name not in OWN or root is None:  # fedskew's, or published: their reader checks
        return {}
    place = Path(config.place(root)).expanduser().absolute()
    test = config.data.parameters.get("test")
    if not place.exists():  # a pattern of files
        place = place.parent
    beside = place if place.is_dir() else place.parent
    return _listed([place, *([beside / str(test)] if test else [])])


def _beside(config: Config) -> list[Path]:
    """Return the partition's file and the target's unlabelled samples, where a config names these."""
    own = [config.partition.parameters["path"]] if config.partition.rule == "file" else []
    if config.target.is_estimated and isinstance(config.target.unlabelled, str):
        own.append(config.target.unlabelled)
    return [Path(config.place(path)).expanduser().absolute() for path in own]


def _listed(paths: list[Path]) -> dict[str, str]:
    """Return size and time of each file, or a checksum of those of all files below a folder."""
    found = {}
    for path in paths:
        try:
            about = path.stat()
            found[str(path)] = f"{about.st_size} {about.st_mtime_ns}" if not path.is_dir() else _times(path)
        except OSError as error:
            found[str(path)] = str(error.strerror)
    return found


def _times(path: Path) -> str:
    found = xxhash.xxh3_128()
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            about = os.stat(os.path.join(folder, name))
            found.update(f"{os.path.relpath(folder, path)}/{name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return str(found.hexdigest())


def _key(config: Config, seed: int) -> str:
    """Everything that a data set depends on, as one text."""
    name = config.data.name
    drawn = ":" in name or name not in data.INDEX or "rng" in inspect.signature(data.INDEX[name]).parameters
    places = [config.data.root, str(config.origin), os.environ.get("FEDSKEW_DATA"), os.getcwd()]
    return json.dumps([name, config.data.parameters, config.data.tokenizer, *places, seed if drawn else None])


def _load(config: Config, seed: int) -> Dataset:
    load = components.find(data.INDEX, config.data.name, "data.name")
    options, rng = config.data.parameters, generator(seed, Purpose.DATA)
    if ":" not in config.data.name:
        with placed("data."):
            encoder = _tokens(config)
            made = data.load(config.data.name, _data_root(config), rng=rng, encoder=encoder, **options)
            if encoder is not None and made.encoder != encoder:
                raise ConfigError(f"data.tokenizer: the samples of {config.data.name} are no texts; leave it out")
            return made
    dataset = components.call(load, config.data.name, "data", {"rng": rng}, options)
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"data.name: {config.data.name} returned {type(dataset).__name__}, no fedskew.data.Dataset")
    return dataset


def _tokens(config: Config) -> Encoder | None:
    """Return what makes ids of texts by the tokeniser of a folder; None where the config names none."""
    folder, length = config.data.tokenizer, config.data.parameters.get("length", 200)
    if folder is None:
        return None
    with placed("data.tokenizer: ", of=DataError):
        return Tokens.of_folder(Path(config.place(folder)).expanduser(), length)


def _data_root(config: Config) -> str | None:
    if config.data.root is not None:
        return config.place(config.data.root)
    recorded = None if config.origin is None else config.origin.data
    return None if recorded is None or os.environ.get("FEDSKEW_DATA") else str(recorded)


@dataclass(frozen=True)
class Identity:
    """What a run was made from: fedskew's version, the source of the user's own by file name, data, and place."""

    version: str
    sources: Mapping[str, str]
    content: Content
    origin: Origin

    @classmethod
    def of(cls, config: Config, content: Content) -> Identity:
        """Return the identity that a run of this config has now, whose data are loaded."""
        return cls(__version__, own_sources(config.tree()), content, _origin(config))

    def changes(self, now: Identity) -> list[str]:
        """List what has changed since, in words; empty if nothing has."""
        found = []
        if now.version != self.version:
            found.append(f"fedskew was {self.version} and is {now.version}")
        if code := changed_sources(self.sources, now.sources):
            found.append(f"your code changed ({', '.join(code)})")
        if now.content.checksum != self.content.checksum:
            found.append("your data changed")
        return found

    def write(self, folder: Path) -> None:
        """Write it into a run folder. RunError where that is not possible."""
        said = {
            "fedskew": self.version,
            "code": sorted(self.sources),
            "data": self.content.checksum,
            "files": self.content.files,
            "directory": str(self.origin.directory),
            "data_root": None if self.origin.data is None else str(self.origin.data),
        }
        for name, text in self.sources.items():
            write_text(folder / CODE / name, text)
        write_text(folder / IDENTITY, json.dumps(said, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Identity:
        """Read that of a run folder. RunError where it is missing or damaged."""
        try:
            said = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
            sources = {name: _within(folder / CODE, name).read_text(encoding="utf-8") for name in said["code"]}
            content = Content(str(said["data"]), said["files"])
            return cls(str(said["fedskew"]), sources, content, Origin.of_notes(said))
        except FileNotFoundError as error:
            raise RunError(
                f"{error.filename}: missing, so it can't be told whether code and data are still those of this run; "
                f"{ANEW}"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(f"{folder / IDENTITY}: damaged ({type(error).__name__}: {error}); {ANEW}") from None


class Present:
    """Code and data as they are now, to be compared with those of runs; what several configs name is read once."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def changes(self, folder: Path, config: Config) -> list[str]:
        """List what has changed since the runs in a config's run folder were made, in words, each once."""
        found: dict[str, None] = {}
        for name, part in config.parts().items():
            if (folder / name / "rounds.jsonl").exists():
                try:
                    before = Identity.read(folder / name)
                except RunError as error:
                    return [str(error).partition(";")[0]]
                now = Identity(__version__, self._sources(part), self._content(part, before.content), before.origin)
                found |= dict.fromkeys(before.changes(now))
        return list(found)

    def _sources(self, config: Config) -> Mapping[str, str]:
        tree = config.tree()
        return self._once(lambda: own_sources(tree), names_in(tree))

    def _content(self, config: Config, before: Content) -> Content:
        """Return the content of a config's data; that of before while the files are those of before."""
        tree = config.tree()
        parts = [tree["data"], tree["partition"], tree["target"], str(config.origin)]
        files = self._once(lambda: files_of(config), parts)
        if files is not None and files == before.files:
            return before
        seed = data_seed(config, config.seeds[0])
        return self._once(lambda: loaded(config, seed).content(config), [*parts, seed])

    def _once(self, make: Callable[[], T], parts: Any) -> T:
        key = json.dumps(parts)
        if key not in self._seen:
            self._seen[key] = make()
        found: T = self._seen[key]
        return found


def refuse_changes(folder: Path, changes: Sequence[str]) -> None:
    """Raise RunError where something has changed since the run in a folder was made."""
    if changes:
        raise RunError(f"{folder}: since this run, {' and '.join(changes)}; {ANEW}, or write elsewhere with --out")


def set_aside(folder: Path) -> Path | None:
    """Move a run folder, or a file, to `earlier/` beside it, and return where it is now; None where there was none."""
    if not folder.exists():
        return None
    earlier = folder.parent / "earlier"
    with writing(earlier):
        earlier.mkdir(exist_ok=True)
        number = 1
        while (place := earlier / f"{folder.name}.{number}").exists():
            number += 1
        folder.rename(place)
    return place


def _within(folder: Path, name: str) -> Path:
    """Return a file of a folder; ValueError if its name leads out of it."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is outside {CODE}/")
    return path


def _origin(config: Config) -> Origin:
    if config.origin is not None:
        return config.origin
    root = os.environ.get("FEDSKEW_DATA")
    return Origin(Path.cwd(), Path(root).expanduser().absolute() if root and config.data.root is None else None)
