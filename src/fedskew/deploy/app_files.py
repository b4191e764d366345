"""The files of an app, and their hash, by which a site knows the app that it agreed to.

Flower sends the app folder as a zip file, in which `pyproject.toml` is written anew and a list of the files is added.
The hash is of what Python could run or fedskew reads: every file but that list, and `pyproject.toml` by its content.
"""

import hashlib
import io
import json
import shutil
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from fedskew.errors import ConfigError, placed
from fedskew.own_code import importable
from fedskew.tables import flatten

PROJECT = "pyproject.toml"
APP, OFFERED = "app", "offered"
"""Folders at a site: the app that it looked at last, and the one that the server sent last, if that is another."""

MOST_BYTES = 2**26
"""Largest size of an unpacked app, in bytes."""

AppFiles = Mapping[str, bytes]


def read_app(folder: Path) -> AppFiles:
    """Read an app folder; ConfigError where there is none, or a file in it can't be read."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; the federation's app folder belongs there")
    with placed(f"{folder}: can't be read: ", of=OSError):
        return {
            name: path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not _is_aside(name := path.relative_to(folder).as_posix())
        }


def unzip_app(content: bytes) -> AppFiles:
    """Read an app as Flower sends it, running and writing nothing; ConfigError where it is none, or too large."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            entries = [entry for entry in packed.infolist() if not entry.is_dir()]
            if sum(entry.file_size for entry in entries) > MOST_BYTES:
                raise ConfigError(f"the server's app is larger than {MOST_BYTES} bytes")
            files = {entry.filename: packed.read(entry) for entry in entries}
    except ConfigError:
        raise
    except Exception as error:  # each way to compress has errors of its own
        raise ConfigError(f"the server's app is no zip file that can be unpacked ({type(error).__name__})") from None
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
            raise ConfigError(f"the server's app has a file outside its folder: {name!r:.80}")
    if len(files) < len(entries):
        raise ConfigError("the server's app has two files of one name")
    return {name: held for name, held in files.items() if name != ".info/CONTENT"}


def offer_app(files: AppFiles, site: Path) -> None:
    """Write an app that the server sent to the site's folder, to be looked at; none of it is run."""
    part = site / f".{OFFERED}.part"
    shutil.rmtree(part, ignore_errors=True)
    write_app(files, part)
    shutil.rmtree(site / OFFERED, ignore_errors=True)
    part.rename(site / OFFERED)


def take_offered(site: Path) -> None:
    """Replace the site's app by the one that the server sent."""
    if (site / OFFERED).is_dir():
        shutil.rmtree(site / APP, ignore_errors=True)
        (site / OFFERED).rename(site / APP)


def app_changes(before: AppFiles, after: AppFiles) -> list[str]:
    """List in what two apps differ, key by key in TOML files, such as "run.toml: training.epochs: 5 -> 50"."""
    lines = []
    for name in sorted({*before, *after}):
        if name not in after or name not in before:
            lines.append(f"{name}: {'is new' if name in after else 'is gone'}")
        elif before[name] != after[name]:
            trees = read_toml(before[name]), read_toml(after[name])
            if not name.endswith(".toml") or trees[0] is None or trees[1] is None:
                lines.append(f"{name}: is another")
                continue
            old, new = flatten(trees[0]), flatten(trees[1])
            changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            lines += [f"{name}: {key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}" for key in changed]
    return lines


def write_app(files: AppFiles, folder: Path) -> None:
    """Write an app's files to a folder."""
    for name, held in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(held)


@contextmanager
def running(files: AppFiles) -> Iterator[Path]:
    """Let an app's own code be imported while the block runs, after it was agreed to: these files and no others."""
    with tempfile.TemporaryDirectory(prefix="fedskew-app-") as place:
        write_app(files, Path(place))
        with importable(Path(place)):
            yield Path(place)


def app_hash(files: AppFiles) -> str:
    """Compute the hash of an app, 64 hex digits: SHA-256 over the names and contents of its files."""
    whole = hashlib.sha256()
    for name, held in sorted(files.items()):
        content = project_content(held) if name == PROJECT else held
        whole.update(f"{len(name.encode())} {name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return whole.hexdigest()


def project_content(held: bytes) -> bytes:
    """Return the content of `pyproject.toml` without its layout, and without the part that Flower leaves out."""
    tree = read_toml(held)
    if tree is None:
        return held
    tool = tree.get("tool")
    flower = tool.get("flwr") if isinstance(tool, dict) else None
    if isinstance(flower, dict):
        flower.pop("federations", None)
    return json.dumps(tree, sort_keys=True, default=str).encode()


def read_toml(held: bytes) -> dict[str, Any] | None:
    """Read TOML; None where it is none."""
    with suppress(ValueError, RecursionError):
        return tomllib.loads(held.decode())
    return None


def _is_aside(name: str) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in PurePosixPath(name).parts)
