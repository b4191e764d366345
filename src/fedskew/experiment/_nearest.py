"""The run that a config would go on with, and where there is none, the nearest that is there."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedskew.errors import ConfigError
from fedskew.experiment._config import Config
from fedskew.experiment._folder import is_begun
from fedskew.experiment._simulate import run_folder
from fedskew.tables import counted, flatten

_SHOWN = 3
"""Differences that are shown."""


def check_resumable(configs: Sequence[Config], out: Path) -> None:
    """Check that there is a run to go on with; where a command has several, the others may begin.

    Args:
        configs: The configs of a command.
        out: The folder that run folders are in.

    Raises:
        ConfigError: There is none; the message names the nearest run, and in what its config differs.
    """
    if any(is_begun(run_folder(config, out)) for config in configs):
        return
    differences = {
        path.parent: found for path in sorted(out.glob("*/config.toml")) if (found := _compared(path, configs[0]))
    }
    said = "leave out --resume to start a new run"
    if differences:
        nearest = min(differences, key=lambda folder: len(differences[folder]))
        found = differences[nearest]
        more = f" and {counted(len(found) - _SHOWN, 'key')} more" if len(found) > _SHOWN else ""
        said = f"{nearest} differs in {', '.join(found[:_SHOWN])}{more}; change that back, or {said}"
    raise ConfigError(f"--resume: {out} has no run of this config to go on with; {said}")


def _compared(path: Path, config: Config) -> list[str]:
    """Return in which keys the config of a run folder differs; empty where it can't be read."""
    try:
        there = flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
    here = flatten(config.tree())
    missing: Any = "none"
    return [
        f"{key} ({there.get(key, missing)!r} there, {here.get(key, missing)!r} here)"
        for key in dict.fromkeys([*here, *there])
        if there.get(key, missing) != here.get(key, missing) and key.split(".")[0] not in ("name", "output")
    ]
