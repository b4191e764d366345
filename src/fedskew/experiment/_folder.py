"""A run on disk.

    config.toml         everything, defaults included: this file alone replays the run
    partition.npz       rows and label counts of every client; deployment.json where these are real sites
    rounds.jsonl        one line a round
    checkpoint/         the server's state
    model.safetensors   the final model; best.safetensors where a validation set exists
    task.json           names of clients and classes, the target
    summary.json        final figures, versions, machine, seconds
    report.html

A folder of several seeds (or of several values that are tried) holds one such folder for each, and its own config,
summary and report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.engine import Round
from fedskew.errors import RunError
from fedskew.experiment._config import read
from fedskew.experiment._records import SeedRun
from fedskew.partition import Partition


class RunFolder:
    """Writes and reads the files of one seed's run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds = path / "rounds.jsonl"
        self.summary = path / "summary.json"

    def append(self, record: Round) -> None:
        """One more line, whole or not at all as far as a reader of whole lines can see."""
        with self.rounds.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def keep_rounds(self, last: int) -> list[Round]:
        """The records up to round `last`; later ones, and a line cut short by a kill, are dropped from the file."""
        kept = [record for record in whole_lines(self.rounds) if record["round"] <= last]
        write_text(self.rounds, "".join(json.dumps(record) + "\n" for record in kept))
        return kept


def read_runs(path: Path, label: str | None = None) -> list[SeedRun]:
    """Every seed's run in a run folder, in order of seed; only the chosen one where several values were tried.

    Raises RunError where there is none, or one can't be read.
    """
    if not (path / "config.toml").exists():
        raise RunError(f"{path}: not a run folder (it has no config.toml)")
    try:
        if (path / "rounds.jsonl").exists():
            return [_read_run(path, label)]
        if not (path / "summary.json").exists():
            raise RunError(f"{path}: the run is not finished; go on with: fedskew run {path / 'config.toml'} --resume")
        parts = json.loads((path / "summary.json").read_text(encoding="utf-8"))["parts"]
        return [run for part in parts for run in read_runs(path / part, label)]
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path}: the run folder is damaged ({type(error).__name__}: {error})") from None


def write_text(path: Path, text: str) -> None:
    """Write aside and rename: the file is the old one or the new one, never half."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def _read_run(path: Path, label: str | None) -> SeedRun:
    config = read(path / "config.toml")
    task = json.loads((path / "task.json").read_text(encoding="utf-8"))
    deployment = path / "deployment.json"
    counts = (
        np.array(json.loads(deployment.read_text(encoding="utf-8"))["label_counts"], dtype=np.int64)
        if deployment.exists()
        else Partition.load(path / "partition.npz").counts
    )
    summary = path / "summary.json"
    return SeedRun(
        label=label or config.name,
        seed=config.seeds[0],
        config=config.tree(),
        rounds=list(whole_lines(path / "rounds.jsonl")),
        counts=counts[: len(task["clients"])],
        client_names=tuple(task["clients"]),
        class_names=tuple(task["classes"]),
        target=None if task["target"] is None else np.array(task["target"]),
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {},
    )


def task_json(run: SeedRun) -> str:
    """What a reader of the folder needs beside the partition."""
    target = None if run.target is None else run.target.tolist()
    return json.dumps({"clients": run.client_names, "classes": run.class_names, "target": target}, indent=1)


def whole_lines(path: Path) -> Sequence[Round]:
    """The records in a `rounds.jsonl`, but for a line that is being written."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def plain_json(value: Any) -> str:
    """Indented JSON with sorted keys."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
