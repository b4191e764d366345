"""Reading files as their authors publish them, and checking them against their checksums."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

from fedskew.errors import DataError


def read(path: Path, expected: str, page: str) -> bytes:
    """Read a file; raise DataError, with what is expected and the authors' page, if it is missing or can't be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise missing(path, expected, page) from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None


def read_checked(path: Path, md5: str | None, page: str) -> bytes:
    """Read a file whose MD5 must be as published; with `md5` None, any file.

    The check is on by default: it takes a third of a second for all of CIFAR-10, and a wrong file would otherwise train
    a model. Raises DataError with the expected checksum and the authors' page.
    """
    if md5 is None:
        return read(path, "a file with any checksum", page)
    content = read(path, f"MD5 {md5}", page)
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise damaged(path, f"its MD5 is {found}, expected MD5 {md5}", page)
    return content


def unpacked(path: Path, content: bytes, expected: str, page: str) -> bytes:
    """Gunzip; raise DataError if the content is not a complete gzip file, or is empty."""
    try:
        if plain := gzip.decompress(content):
            return plain
        reason = "it is empty"
    except (OSError, EOFError, zlib.error) as error:
        reason = str(error)
    raise damaged(path, f"{reason}; expected {expected}", page)


def missing(path: Path, expected: str, page: str) -> DataError:
    """Return the error for a file or folder that does not exist."""
    return DataError(f"{path} is missing (expected {expected}); its authors publish it at {page}")


def damaged(path: Path, what: str, page: str) -> DataError:
    """Return the error for a file whose content is wrong."""
    return DataError(f"{path} is damaged: {what}; its authors publish it at {page}")
