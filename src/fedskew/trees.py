"""TOML files as trees, by themselves: a site's SuperNode reads one, and needs neither models nor methods."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedskew.errors import ConfigError

DEEPEST = 32


def read_tree(
    path: Path, what: str, changes: Mapping[str, Any] | None = None, quick: bool = False
) -> tuple[dict[str, Any], str, set[str]]:
    """Read a TOML file as a tree, with the file's `[quick]` table of dotted keys applied where that is wanted, and then
    `changes`; return tree, text, and the dotted keys that were changed."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: the {what} can't be read: {reason}") from None
    except RecursionError:
        tree = None
    if tree is None or _is_deep(tree):
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


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a tree, in place; tables on the way that are missing are added."""
    *tables, last = key.split(".")
    for name in tables:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{key}: {name!r} is a value, not a table")
    tree[last] = value


def parse_change(text: str) -> tuple[str, Any]:
    """Read a change given on the command line: `a.b=value`, whose value is TOML, or a plain string where it is not."""
    key, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError(f"--set {text!r}: expected key=value with a dotted key, such as training.lr=0.1")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
    except RecursionError:
        parsed = None
    if parsed is None or _is_deep(parsed):
        raise ConfigError(f"--set {key}: lists and tables in its value are nested more than {DEEPEST} deep")
    return key, parsed


def on_one_line(value: Any) -> str:
    """Return a plain value as TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {on_one_line(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(on_one_line, value)) + "]"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
    return text.replace("\x7f", "\\u007f")


def line_of(text: str, key: str) -> int | None:
    """Return the line of a dotted key in TOML text, from 1; its table's where there is no such key; else None."""
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    table, found = "", None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?([^\]]+)\]", line):
            table = header[1].strip()
            if key == table or key.startswith(table + "."):
                found = number
        elif (entry := re.match(r"\s*([\w.-]+)\s*=", line)) and f"{table}.{entry[1]}".strip(".") == ".".join(parts):
            return number
    return found


def _is_deep(tree: Any) -> bool:
    """Return whether tables and lists are nested deeper than any that fedskew reads."""
    level = [tree]
    for _ in range(DEEPEST):
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [one for parts in inner for one in parts]
    return bool(level)
