"""The identity of a run beside its config: its own code, the content of its data, fedskew's version.

    identity.json       fedskew's version; checksum of the data, and size and time of the user's files that they were
                        read from; where relative paths began
    code/               the source of the user's own components, as it was

A config's hash says what a run was asked for; this says what answered. A run is gone on with, and a finished one stands
in a sweep's table, only while both are the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from fedskew.errors import RunError
from fedskew.experiment._config import IDENTITY, Config, Origin
from fedskew.experiment._dataset import Content, data_seed, files_of, loaded
from fedskew.experiment._sources import changed_sources, own_sources
from fedskew.files import write_text, writing
from fedskew.own_code import CODE, names_in

T = TypeVar("T")

ANEW = "start over with --fresh, which keeps the old folder"
"""What a message about a run that can't be gone on with advises."""


@cache  # of the code that this process runs; read from a file
def _version() -> str:
    return version("fedskew")


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


class Present:
    """Code and data as they are now, to be compared with those of runs; what several configs name is read once."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def changes(self, folder: Path, config: Config) -> list[str]:
        """List what has changed since the runs in a config's run folder were made, in words, each once.

        The config's components have been imported.
        """
        found: dict[str, None] = {}
        for name, part in config.parts().items():
            if (folder / name / "rounds.jsonl").exists():
                try:
                    before = Identity.read(folder / name)
                except RunError as error:
                    return [str(error).partition(";")[0]]
                now = Identity(_version(), self._sources(part), self._content(part, before.content), before.origin)
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
