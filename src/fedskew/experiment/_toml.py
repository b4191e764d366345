"""TOML files as trees, by themselves: a site's SuperNode reads one, and needs neither models nor methods."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedskew.errors import ConfigError

DEEPEST = 32


def read_tree(
    path: Path, what: str, changes: Mapping[str, Any] | None, quick: bool
) -> tuple[dict[str, Any], str, set[str]]:
    """Read a TOML file as a tree.

    Args:
        path: The file.
        what: What the file is, for error messages.
        changes: Values for dotted keys, in place of the file's.
        quick: First apply the file's `[quick]` table; it is never part of the tree.

    Returns:
        The tree, the file's text, and the dotted keys that were changed.

    Raises:
        ConfigError: The file can't be read; the message names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: the {what} can't be read: {reason}") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        tree = None
    if tree is None or is_deep(tree):
        raise ConfigError(f"{path}: the {what} can't be read: its tables or lists are nested more than {DEEPEST} deep")
    smaller = tree.pop("quick", None)
    if quick and not isinstance(smaller, dict):
        raise ConfigError(
            f"{path}: there is no [quick] table of dotted keys, which --quick applies; add one, or leave out --quick"
        )
    changed = {**(smaller if quick else {}), **(changes or {})}
    for key, value in changed.items():
        put(tree, key, value)
    return tree, text, set(changed)


def is_deep(tree: Any) -> bool:
    """Return whether tables and lists are nested deeper than any that fedskew reads.

    Args:
        tree: Plain values.
    """
    level = [tree]
    for _ in range(DEEPEST):
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [one for parts in inner for one in parts]
    return bool(level)


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a tree, in place.

    Args:
        tree: The tree.
        key: The dotted key; missing tables on the way are added.
        value: The value.

    Raises:
        ConfigError: A part of the key that must be a table is a plain value.
    """
    *tables, last = key.split(".")
    for name in tables:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{key}: {name!r} is a value, not a table")
    tree[last] = value
