"""Files that outlive a kill: written whole or not at all, on the disk before they count, one writer at a time."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedskew.errors import RunError, placed

if TYPE_CHECKING:
    from torch import Tensor

_KEY = "fedskew"  # the one key of a file's metadata: their order is not fixed, and equal states give equal bytes
LOCK = "lock"
"""Name of the file that is in a folder while a process writes there."""


@contextmanager
def replacing(path: Path, shared: bool = False, private: bool = False, wait: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` when the block ends without an error.

        with replacing(folder / "config.toml") as part:
            part.write_text(text, encoding="utf-8")

    A reader finds the old file or the new one, never half of one, also after a kill or a power cut. RunError where the
    path is a folder, a pipe or a device.

    Args:
        path: The file to write; its folder must exist.
        shared: Whether several processes may write this file at the same time.
        private: Whether only the file's owner may read it (mode 0600), from its first byte on.
        wait: Whether to wait until it is on the disk; otherwise `sync_files` does, for many at once.
    """
    if path.exists() and not path.is_file():  # a rename would put a file in a device's place
        raise RunError(f"{path}: can't be written: it is {'a folder' if path.is_dir() else 'not a plain file'}")
    part = path.with_name(f".{path.name}.{os.getpid()}.part" if shared else f".{path.name}.part")
    try:
        if private:
            part.unlink(missing_ok=True)
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield part
        if wait:
            _sync(part)
        part.replace(path)
        if wait:
            _sync(path.parent)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def sync_files(paths: Collection[Path]) -> None:
    """Wait until files that were written without waiting are on the disk, and each folder's list of them once."""
    for path in paths:
        with writing(path):
            _sync(path)
    for folder in {path.parent for path in paths}:
        with writing(folder):
            _sync(folder)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's errors inside the block into one line, a RunError that names the path and the reason."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror or error}") from None


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Write a UTF-8 text file atomically, in a folder that is made if need be; RunError where that is not possible."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, private=private) as part:
            part.write_text(text, encoding="utf-8", newline="\n")


def private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter (mode 0700), and so those above it that are missing."""
    with writing(path):
        for folder in (*reversed([place for place in path.parents if not place.exists()]), path):
            folder.mkdir(mode=0o700, exist_ok=True)


def check_writable(folder: Path) -> None:
    """Raise RunError where no file can be written in a folder, or it can't be made; nothing is left there."""
    with writing(folder):
        there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))  # a link to nothing, too
        tempfile.TemporaryFile(dir=there).close()


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append(path: Path, content: bytes) -> None:
    """Append to a file, and return when that is on the disk; RunError where that is not possible."""
    with writing(path), path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def save_tensors(
    path: Path, tensors: "Mapping[str, Tensor]", notes: Mapping[str, Any] | None = None, *, wait: bool = True
) -> None:
    """Write tensors and plain notes whole, in a folder that is made if need be, as safetensors with a checksum."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    notes = dict(notes or {})
    tensors = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
    said = {"checksum": _checksum(tensors, notes), "notes": notes}
    with placed(f"{path}: can't be written: ", RunError, of=SafetensorError), writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, wait=wait) as part:
            save_file(tensors, part, metadata={_KEY: json.dumps(said)})


def load_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """Read what `save_tensors` wrote. RunError where it is missing or damaged; to name the file is the caller's."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            said = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            checksum, notes = str(said["checksum"]), dict[str, Any](said["notes"])
    except FileNotFoundError:
        raise RunError("it is missing") from None
    except KeyError:
        raise RunError("it has no checksum") from None
    except (SafetensorError, TypeError, ValueError, OSError, MemoryError, RecursionError) as error:
        raise RunError(" ".join(str(error).split())) from None
    if checksum != _checksum(tensors, notes):
        raise RunError("its content does not match its checksum")
    return tensors, notes


def read_notes(path: Path) -> dict[str, Any]:
    """Read the notes of what `save_tensors` wrote, and no tensor. RunError as with `load_tensors`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return dict(json.loads((file.metadata() or {})[_KEY])["notes"])
    except (SafetensorError, KeyError, TypeError, ValueError, OSError, RecursionError) as error:
        raise RunError(str(error)) from None


@contextmanager
def locked(folder: Path, patience: float = 0.0, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep other processes from writing in a folder, which is made, and removed if nothing was written; a killed one's
    lock ends with it. `waiting` is called once if one has to be waited for; RunError after `patience` seconds."""
    from filelock import FileLock, Timeout

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if patience > 0:
                waiting()
            try:
                lock.acquire(timeout=patience, poll_interval=1.0)
            except Timeout:
                raise RunError(f"{folder}: another run is writing here; wait for its end, or end it") from None
    try:
        yield
    finally:
        with suppress(OSError):  # while it is held: who waits for it makes a new one
            (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):
            folder.rmdir()


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(tensors: Mapping[str, Any], notes: Mapping[str, Any]) -> str:
    import torch
    import xxhash

    found = xxhash.xxh3_128(json.dumps(dict(notes), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return str(found.hexdigest())
