"""The identity of a run beside its config: its own code, the content of its data, fedskew's version.

    identity.json       fedskew's version; checksum of the data, and size and time of the user's files that they were
                        read from; where relative paths began
    code/               the source of the user's own components, as it was

A config's hash says what a run was asked for; this says what answered. A run is gone on with, and a finished one stands
in a sweep's table, only while both are the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from fedskew.data import OWN, ByteImages, Dataset
from fedskew.errors import RunError
from fedskew.experiment._config import IDENTITY, Config, Origin
from fedskew.experiment._sources import changed_sources, own_sources
from fedskew.files import write_text, writing
from fedskew.own_code import CODE

ANEW = "start over with --fresh, which keeps the old folder"
"""What a message about a run that can't be gone on with advises."""

_ROWS = 256
"""How many rows stand for the inputs of a data set that is read from files batch by batch."""


@cache  # of the code that this process runs; read from a file
def _version() -> str:
    return version("fedskew")


@dataclass(frozen=True)
class Content:
    """The content of a run's data.

    Attributes:
        checksum: Checksum of the data set.
        files: Size and time of the user's files that the data were read from, by path; while these are the same, so are
            the data. None where it isn't known which files these are.
    """

    checksum: str
    files: Mapping[str, str] | None


class Present:
    """Code and data as they are now; what several configs name is read once."""

    def __init__(self) -> None:
        self._sources: dict[str, dict[str, str]] = {}
        self._files: dict[str, dict[str, str] | None] = {}

    def sources(self, config: Config) -> Mapping[str, str]:
        """Return the source of a config's own components (see `own_sources`)."""
        tree = config.tree()
        key = json.dumps(_names(tree))
        if key not in self._sources:
            self._sources[key] = own_sources(tree)
        return self._sources[key]

    def files(self, config: Config) -> Mapping[str, str] | None:
        """Return size and time of the user's files that a config's data are read from (see `Content`)."""
        tree = config.tree()
        key = json.dumps([tree["data"], tree["partition"], tree["target"], str(config.origin)])
        if key not in self._files:
            self._files[key] = files_of(config)
        return self._files[key]


@dataclass(frozen=True)
class Identity:
    """The code, data and version that a run was made from.

    Attributes:
        version: fedskew's version.
        sources: Source of the user's own components and of what they import, by file name.
        content: What its data are.
        origin: Where relative paths began.
    """

    version: str
    sources: Mapping[str, str]
    content: Content
    origin: Origin

    @classmethod
    def of(cls, config: Config, content: Content) -> Identity:
        """Return the identity that a run of this config has now, whose data are loaded."""
        return cls(_version(), own_sources(config.tree()), content, _origin(config))

    def changes(self, config: Config, data: Callable[[], str], present: Present) -> list[str]:
        """List what has changed since, in words; empty if nothing has.

        Args:
            config: The run's config.
            data: Computes the checksum of the data now; called only where that may have changed.
            present: What there is now.
        """
        found = []
        if (now := _version()) != self.version:
            found.append(f"fedskew was {self.version} and is {now}")
        if code := changed_sources(self.sources, present.sources(config)):
            found.append(f"your code changed ({', '.join(code)})")
        before = self.content
        if (before.files is None or before.files != present.files(config)) and data() != before.checksum:
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
        with writing(folder / IDENTITY):
            for name, text in self.sources.items():
                path = folder / CODE / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)
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


def changed_since(folder: Path, config: Config, data: Callable[[], str], present: Present) -> list[str]:
    """List what has changed since the runs in a seed's folder were made, in words (see `Identity.changes`)."""
    try:  # one for each `rounds.jsonl`, of which there are several where a key is tuned
        made = [Identity.read(path.parent) for path in sorted(folder.rglob("rounds.jsonl"))]
    except RunError as error:
        return [str(error).partition(";")[0]]
    return list(dict.fromkeys(change for each in made for change in each.changes(config, data, present)))


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


def checksum(config: Config, dataset: Dataset) -> str:
    """Checksum of a data set's content, and of the partition's file and unlabelled samples that the config names.

    Of inputs that are read batch by batch from files, shape and 256 rows count, evenly spread.
    """
    found = xxhash.xxh3_128()
    if config.partition.rule == "file":
        found.update(Path(config.place(config.partition.parameters["path"])).read_bytes())
    if (own := own_target(config)) is not None:
        for file in sorted(own.rglob("*")) if own.is_dir() else [own]:
            if file.is_file():
                found.update(f"{file.relative_to(own)}:".encode())
                found.update(file.read_bytes())
    for field in dataclasses.fields(dataset):
        value = getattr(dataset, field.name)
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


def files_of(config: Config) -> dict[str, str] | None:
    """Return size and time of the user's files that a config's data are read from (see `Content`)."""
    if ":" in config.data.name:
        return None
    paths = []
    root = config.data.root or os.environ.get("FEDSKEW_DATA")
    if config.data.name in OWN and root is not None:  # others are fedskew's, or published: their reader checks
        paths.append(place := Path(config.place(root)).expanduser().absolute())
        if test := config.data.parameters.get("test"):
            paths.append(place.parent / str(test))
    if config.partition.rule == "file":
        paths.append(Path(config.place(config.partition.parameters["path"])).absolute())
    if (own := own_target(config)) is not None:
        paths.append(own)
    return {str(path): _listed(path) for path in paths}


def own_target(config: Config) -> Path | None:
    """Return where the target's unlabelled samples are, if these are the user's own."""
    given = config.target.unlabelled
    own = config.target.is_estimated and isinstance(given, str)
    return Path(config.place(str(given))).expanduser().absolute() if own else None


def _within(folder: Path, name: str) -> Path:
    """Return a file of a folder; ValueError if its name leads out of it."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is outside {CODE}/")
    return path


def _names(tree: Any) -> list[str]:
    """Return every text of a config that may name something of the user's own."""
    if isinstance(tree, Mapping):
        return [name for part in tree.values() for name in _names(part)]
    if isinstance(tree, list | tuple):
        return [name for part in tree for name in _names(part)]
    return [tree] if isinstance(tree, str) and ":" in tree else []


def _listed(path: Path) -> str:
    """Size and time of a file, or a checksum of those of all files below a folder."""
    try:
        if not path.is_dir():
            about = path.stat()
            return f"{about.st_size} {about.st_mtime_ns}"
        found = xxhash.xxh3_128()
        for folder, folders, files in os.walk(path):
            folders.sort()
            for name in sorted(files):
                about = os.stat(os.path.join(folder, name))
                found.update(f"{os.path.relpath(folder, path)}/{name} {about.st_size} {about.st_mtime_ns}\n".encode())
        return str(found.hexdigest())
    except OSError as error:
        return str(error.strerror)


def _origin(config: Config) -> Origin:
    if config.origin is not None:
        return config.origin
    root = os.environ.get("FEDSKEW_DATA")
    return Origin(Path.cwd(), Path(root).expanduser().absolute() if root and config.data.root is None else None)
