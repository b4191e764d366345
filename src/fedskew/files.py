"""Replacing files whole: a reader finds the old file or the new one, also after a kill, never half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[Path]:
    """Give a path beside `path` to write to, and rename it to `path` when the block ends without an error.

        with replacing(folder / "model.safetensors") as part:
            save_file(tensors, part)

    Args:
        path: The file to make or to replace; its folder exists.
        shared: Whether several processes may write this file at once.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part" if shared else f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file whole, replacing what stood there."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
