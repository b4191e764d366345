"""The run folder: a run's files on disk.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from fedskew.engine import RoundRecord
from fedskew.errors import RunError
from fedskew.experiment import _checkpoint
from fedskew.experiment._config import Config, read, write
from fedskew.experiment._model_info import ModelInfo
from fedskew.files import replacing, write_text
from fedskew.partition import Partition
from fedskew.report import SeedRun


@dataclass(frozen=True)
class TaskInfo:
    """The clients and their label counts, as reports show them.

    Attributes:
        counts: Label counts of the clients that train, `(clients, classes)`, int64.
        client_names: Their names.
        class_names: Names by class id.
        target: Target label mix, `(classes,)`, sum 1, or None.
    """

    counts: NDArray[np.int64]
    client_names: tuple[str, ...]
    class_names: tuple[str, ...]
    target: NDArray[np.float64] | None


class RunFolder:
    """The files of one seed's run.

    Args:
        path: The folder; `open` makes it.
        partition: The simulation's partition, to be kept in the folder; None where clients are real sites.
    """

    def __init__(self, path: Path, partition: Partition | None = None) -> None:
        self.path = path
        self._partition = partition
        self._rounds = path / "rounds.jsonl"

    def open(self, config: Config, task: TaskInfo, resume: bool) -> None:
        """Make the folder, or check that the run in it is of this config.

        Args:
            config: The run's config.
            task: Names and target, for `task.json`.
            resume: Whether there may be a run in the folder.

        Raises:
            RunError: There is a run already and it is not to be resumed, or it has another partition.
        """
        path = self.path
        if path.exists() and any(path.iterdir()) and not resume:
            raise RunError(
                f"{path}: this run is there already; add --resume to go on with it (a finished one is only read), "
                "or write elsewhere with --out"
            )
        path.mkdir(parents=True, exist_ok=True)
        if self._partition is not None:
            stored = path / "partition.npz"
            if stored.exists() and Partition.load(stored).hash != self._partition.hash:
                raise RunError(
                    f"{stored}: not the partition that this config makes now; the data or the code has changed"
                )
            self._partition.save(stored)
        write(config, path / "config.toml")
        target = None if task.target is None else task.target.tolist()
        described = {"clients": task.client_names, "classes": task.class_names, "target": target}
        write_text(path / "task.json", json.dumps(described, indent=1))

    def append(self, record: RoundRecord) -> None:
        """Add a line to `rounds.jsonl`.

        Args:
            record: The round's record.
        """
        with self._rounds.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.to_dict(), allow_nan=False) + "\n")

    def keep_rounds(self, last: int) -> list[RoundRecord]:
        """Remove from `rounds.jsonl` what is later than a checkpoint, and a line that was cut short by a kill.

        Args:
            last: The checkpoint's round.

        Returns:
            The records that stay.
        """
        kept = [record for record in read_records(self._rounds) if record.round <= last]
        write_text(self._rounds, "".join(json.dumps(record.to_dict()) + "\n" for record in kept))
        return kept

    def save_checkpoint(self, state: Any) -> None:
        """Replace the checkpoint.

        Args:
            state: A tree of frozen dataclasses, named tuples, dicts, tensors, arrays and plain values.
        """
        _checkpoint.save(self.path, state)

    def load_checkpoint(self, template: Any) -> Any | None:
        """Read the checkpoint.

        Args:
            template: A state of the same shape, whose tensors are on the devices to read to.

        Returns:
            The state; None where there is no checkpoint.

        Raises:
            RunError: It is damaged, or of another method.
        """
        return _checkpoint.load(self.path, template)

    def save_model(self, name: str, tensors: Mapping[str, Tensor], info: ModelInfo) -> None:
        """Write a model.

        Args:
            name: Name of the file.
            tensors: The model's state dict.
            info: Its classes, shape and normalisation, for the file's metadata.
        """
        with replacing(self.path / name) as part:
            save_file(dict(tensors), part, metadata=info.metadata())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`.

        Args:
            summary: The summary, in plain values.
        """
        write_text(self.path / "summary.json", plain_json(summary))


def read_runs(path: Path, label: str | None = None) -> list[SeedRun]:
    """Read every seed's run in a run folder, in order of seed; only the chosen one where several values were tried.

    Args:
        path: The run folder.
        label: The runs' name in a report; None: the config's.

    Raises:
        RunError: There is no run, or it can't be read.
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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: the run folder is damaged ({type(error).__name__}: {error})") from None


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
        rounds=read_records(path / "rounds.jsonl"),
        counts=counts[: len(task["clients"])],
        client_names=tuple(task["clients"]),
        class_names=tuple(task["classes"]),
        target=None if task["target"] is None else np.array(task["target"]),
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {},
    )


def read_records(path: Path) -> list[RoundRecord]:
    """Read the records of a `rounds.jsonl`, without a last line that is still being written.

    Args:
        path: The file; if it does not exist, there are no records.
    """
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [RoundRecord.from_dict(json.loads(line)) for line in lines]


def plain_json(value: Any) -> str:
    """Format as indented JSON with sorted keys.

    Args:
        value: Plain values.
    """
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
