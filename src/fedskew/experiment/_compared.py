"""Run folders that are compared, each with a label of its own."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedskew.experiment._folder import read_runs
from fedskew.report import SeedRun
from fedskew.tables import flatten

_ALIKE = ("name", "seeds", "output.", "data.root")  # keys that make no other run


def read_compared(folders: Sequence[Path], labels: Sequence[str | None]) -> list[SeedRun]:
    """Read runs to be compared; where configs of one name differ, their labels say in what.

    Args:
        folders: Run folders, or folders that hold some.
        labels: The label of each; None: the config's name, and the keys whose values differ.

    Returns:
        Every seed of every run.

    Raises:
        RunError: There is no run, or it can't be read.
    """
    places = [(place, label) for folder, label in zip(folders, labels, strict=True) for place in _runs_in(folder)]
    runs = [read_runs(place, label) for place, label in places]
    trees = [tomllib.loads((place / "config.toml").read_text(encoding="utf-8")) for place, _ in places]
    unnamed = [tree for tree, (_, label) in zip(trees, places, strict=True) if label is None]
    found = []
    for tree, (_, label), seeds in zip(trees, places, runs, strict=True):
        own = label or _label(tree, [other for other in unnamed if other["name"] == tree["name"]])
        found += [replace(run, label=own) for run in seeds]
    return found


def _runs_in(folder: Path) -> list[Path]:
    """Return a run folder, or the run folders that a folder holds."""
    inner = sorted(path.parent for path in folder.glob("*/config.toml"))
    return inner if inner and not (folder / "config.toml").exists() else [folder]


def _label(tree: dict[str, Any], alike: Sequence[dict[str, Any]]) -> str:
    """Return a config's name and the values of the keys in which configs of this name differ."""
    flat = [{key: value for key, value in flatten(one).items() if not key.startswith(_ALIKE)} for one in (tree, *alike)]
    keys = [key for key in sorted(set().union(*flat)) if any(one.get(key) != flat[0].get(key) for one in flat)]
    if len(keys) > 1:  # one key may follow from another
        groups = {repr([one.get(key) for key in keys]) for one in flat}
        telling = [key for key in keys if len({repr(one.get(key)) for one in flat}) == len(groups)]
        keys = telling[:1] or keys
    short = [key.rpartition(".")[2] for key in keys]
    shown = [last if short.count(last) == 1 and last != "name" else key for last, key in zip(short, keys, strict=True)]
    return ", ".join([tree["name"], *(f"{name}={flat[0].get(key)}" for name, key in zip(shown, keys, strict=True))])
