"""Atomic writes: a reader finds the old file or the new one, never a part, even if the writer is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` when the block ends without an error.

        with replacing(folder / "model.safetensors") as part:
            save_file(tensors, part)

    Args:
        path: The file to write; its folder must exist.
        shared: Whether several processes may write this file at the same time.

    Yields:
        The temporary path to write to.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part" if shared else f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically, replacing an existing one.

    Args:
        path: The file; its folder must exist.
        text: Its contents.
    """
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
