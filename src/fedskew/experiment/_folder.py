"""The run folder: a run's files on disk.

    config.toml         everything, defaults included: this file alone replays the run
    partition.npz       rows and label counts of every client; deployment.json where these are real sites
    identity.json       what it was made of: data, fedskew's version; code/, the source of the user's own components
    rounds.jsonl        one line a round
    checkpoint/         the server's state
    model.safetensors   the final model; best.safetensors where a validation set exists, finished.safetensors where the
                        method has a finish
    task.json           names of clients and classes, the target, what the labels say about the run
    summary.json        final figures, versions, machine, seconds
    report.html

A folder of several seeds (or of several values that are tried) holds one such folder for each, and its own config,
summary and report.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from fedskew.engine import RoundRecord
from fedskew.errors import FedskewError, RunError
from fedskew.experiment import _checkpoint
from fedskew.experiment._checkpoint import Mark
from fedskew.experiment._config import Config, write
from fedskew.experiment._identity import Identity, Present
from fedskew.experiment._model_info import ModelInfo
from fedskew.files import LOCK, append, load_tensors, save_tensors, write_text, writing
from fedskew.partition import Partition
from fedskew.report import SeedRun

FINISHED = "finished.safetensors"


@dataclass(frozen=True)
class TaskInfo:
    """The clients and their label counts, as reports show them.

    Attributes:
        counts: Label counts of the clients that train, `(clients, classes)`, int64.
        client_names: Their names.
        class_names: Names by class id.
        target: Target label mix, `(classes,)`, sum 1, or None.
        notes: What labels and network say about the run, a sentence each; see `label_notes`, `network_notes`.
    """

    counts: NDArray[np.int64]
    client_names: tuple[str, ...]
    class_names: tuple[str, ...]
    target: NDArray[np.float64] | None
    notes: tuple[str, ...] = ()


class RunFolder:
    """The files of one seed's run.

    Args:
        path: The folder; `open` makes it.
        partition: The simulation's partition, to be kept in the folder; None where clients are real sites.
        identity: What the simulation is made of, likewise.
    """

    def __init__(self, path: Path, partition: Partition | None = None, identity: Identity | None = None) -> None:
        self.path = path
        self._partition = partition
        self._identity = identity
        self._rounds = path / "rounds.jsonl"
        self._content = xxhash.xxh3_128()
        self._size = 0
        self._marks: dict[int, Mark] = {}

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of a run that is finished; None while it isn't.

        Raises:
            RunError: It can't be read.
        """
        path = self.path / "summary.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise RunError(f"{path}: damaged ({error}); start over with --fresh, which keeps the old folder") from None

    def open(self, config: Config, task: TaskInfo, resume: bool) -> None:
        """Make the folder, or check that the run in it is of this config, code and data.

        Nothing is written where the run is finished.

        Args:
            config: The run's config.
            task: Names and target, for `task.json`.
            resume: Whether there may be a run in the folder.

        Raises:
            RunError: There is a run already and it is not to be resumed, or it was made of something else; or the
                folder can't be written.
        """
        path = self.path
        if not resume:
            check_empty(path)
        elif self._rounds.exists() and self._identity is not None:
            self._check(config)
        if self.summary is not None:
            return
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if self._partition is not None:
                self._partition.save(path / "partition.npz")
            write(config, path / "config.toml")
            target = None if task.target is None else task.target.tolist()
            described = {"clients": task.client_names, "classes": task.class_names, "target": target}
            notes = {"notes": task.notes} if task.notes else {}
            write_text(path / "task.json", json.dumps(described | notes, indent=1))
        if self._identity is not None:
            self._identity.write(path)

    def append(self, record: RoundRecord) -> None:
        """Add a line to `rounds.jsonl`; it is on the disk when this returns.

        Args:
            record: The round's record.

        Raises:
            RunError: It can't be written.
        """
        line = (json.dumps(record.to_dict(), allow_nan=False) + "\n").encode()
        with writing(self._rounds):
            append(self._rounds, line)
        self._mark(record.round, line)

    def resume(self, template: Any) -> tuple[Any, list[RoundRecord]] | None:
        """Read the checkpoint and the records up to it; what is later is removed, as it was cut short by a kill.

        Args:
            template: A state of the same shape, whose tensors are on the devices to read to.

        Returns:
            The state and the records; None where no round was ever finished.

        Raises:
            RunError: Checkpoint or records are damaged, or do not belong together. Nothing is changed then.
        """
        read = _checkpoint.load(self.path, template)
        content = self._rounds.read_bytes() if self._rounds.exists() else b""
        if read is None:
            if self.summary is not None or content.count(b"\n") > 1:  # the untrained model's, at most
                raise RunError(
                    f"{self.path}: its checkpoint is missing, so it can't be gone on with; fedskew report shows what "
                    "is there; start over with --fresh, which keeps the old folder"
                )
            with writing(self._rounds):
                self._rounds.unlink(missing_ok=True)
            return None
        state, mark = read
        _check_content(self._rounds, content, mark)
        if len(content) > mark.size:
            with writing(self._rounds):
                os.truncate(self._rounds, mark.size)
        records = read_records(self._rounds, mark)
        self._mark(records[-1].round, content[: mark.size])
        return state, records

    def save_checkpoint(self, state: Any, round: int) -> None:
        """Replace the checkpoint.

        Args:
            state: A tree of frozen dataclasses, named tuples, dicts, tensors, arrays and plain values.
            round: The round that it is of, whose record has been added.

        Raises:
            RunError: It can't be written.
        """
        _checkpoint.save(self.path, state, self._marks[round])

    def save_model(self, name: str, tensors: Mapping[str, Tensor], info: ModelInfo) -> None:
        """Write a model.

        Args:
            name: Name of the file.
            tensors: The model's state dict.
            info: Its classes, shape and normalisation, for the file's notes.
        """
        save_tensors(self.path / name, {key: value.detach().cpu() for key, value in tensors.items()}, info.plain())

    def check_model(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Check that a model that was written is still these tensors.

        Args:
            name: Name of the file.
            tensors: The model's state dict.

        Raises:
            RunError: It is missing or another.
        """
        path, there = self.path / name, self.read_model(name)
        if there.keys() != tensors.keys() or not all(there[key].equal(value.cpu()) for key, value in tensors.items()):
            raise RunError(
                f"{path}: is not the model of the checkpoint beside it; start over with --fresh, which keeps the old "
                "folder"
            )

    def read_model(self, name: str) -> dict[str, Tensor]:
        """Read a model that was written.

        Args:
            name: Name of the file.

        Returns:
            The model's state dict.

        Raises:
            RunError: It is missing or damaged.
        """
        path = self.path / name
        try:
            return load_tensors(path)[0]
        except RunError as error:
            raise RunError(
                f"{path}: can't be read ({error}); start over with --fresh, which keeps the old folder"
            ) from None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`.

        Args:
            summary: The summary, in plain values.
        """
        with writing(self.path / "summary.json"):
            write_text(self.path / "summary.json", plain_json(summary))

    def _check(self, config: Config) -> None:
        """Raise RunError where the run in the folder was made of something else."""
        assert self._identity is not None, "asked for simulations only"
        data = self._identity.content.checksum
        found = Identity.read(self.path).changes(config, lambda: data, Present())
        stored = self.path / "partition.npz"
        if not found and self._partition is not None and Partition.load(stored).hash != self._partition.hash:
            found = [f"{stored} is not the partition that this config makes now"]
        if found:
            raise RunError(
                f"{self.path}: since this run, {' and '.join(found)}; start over with --fresh, which keeps the old "
                "folder, or write elsewhere with --out"
            )

    def _mark(self, round: int, content: bytes) -> None:
        self._content.update(content)
        self._size += len(content)
        self._marks[round] = Mark(self._size, self._content.hexdigest())


def is_begun(path: Path) -> bool:
    """Return whether there is a run in a folder already."""
    return path.exists() and any(file.name != LOCK for file in path.iterdir())


def check_empty(path: Path) -> None:
    """Raise RunError where there is a run in a folder already."""
    if is_begun(path):
        raise RunError(
            f"{path}: this run is there already; add --resume to go on with it (a finished one is only read), "
            "--fresh to start over, which keeps the old folder, or write elsewhere with --out"
        )


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
    except FedskewError:
        raise
    except Exception as error:  # what is damaged can raise almost anything
        said = " ".join(str(error).split())
        raise RunError(f"{path}: the run folder is damaged ({type(error).__name__}: {said})") from None


def _read_run(path: Path, label: str | None) -> SeedRun:
    """Read one seed's run; its components need not be importable here."""
    config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    task = json.loads((path / "task.json").read_text(encoding="utf-8"))
    deployment = path / "deployment.json"
    counts = (
        np.array(json.loads(deployment.read_text(encoding="utf-8"))["label_counts"], dtype=np.int64)
        if deployment.exists()
        else Partition.load(path / "partition.npz").counts
    )
    summary = path / "summary.json"
    run = SeedRun(
        label=label or config["name"],
        seed=config["seeds"][0],
        config=config,
        rounds=read_records(path / "rounds.jsonl", _checkpoint.mark(path)),
        counts=counts[: len(task["clients"])],
        client_names=tuple(task["clients"]),
        class_names=tuple(task["classes"]),
        target=None if task["target"] is None else np.array(task["target"]),
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {},
        notes=tuple(task.get("notes", ())),
    )
    if not run.rounds:
        raise RunError(f"{path / 'rounds.jsonl'}: holds no round yet, or has been emptied")
    check_summary(summary, run.summary, run.rounds)
    return run


def check_summary(path: Path, summary: Mapping[str, Any], rounds: Sequence[RoundRecord]) -> None:
    """Check that a summary is of these records.

    Args:
        path: The summary's file, for the message.
        summary: The summary; empty for a run that has not ended.
        rounds: The records.

    Raises:
        RunError: It is of others.
    """
    evaluated = [record.evaluation.accuracy for record in rounds if record.evaluation is not None]
    said = (summary.get("final") or {}).get("accuracy")
    if summary and (summary["rounds"] != rounds[-1].round or said != (evaluated[-1] if evaluated else None)):
        raise RunError(
            f"{path}: says accuracy {said} after {summary['rounds']} rounds, and rounds.jsonl "
            f"{evaluated[-1] if evaluated else None} after {rounds[-1].round}: they do not belong together"
        )


def read_records(path: Path, mark: Mark | None = None) -> list[RoundRecord]:
    """Read the records of a `rounds.jsonl`, without a last line that is still being written.

    Args:
        path: The file; if it does not exist, there are no records.
        mark: How far it was when its checkpoint was written.

    Raises:
        RunError: It is not what it was at that mark, or a round is missing.
    """
    content = path.read_bytes() if path.exists() else b""
    if mark is not None:
        _check_content(path, content, mark)
    records = [RoundRecord.from_dict(json.loads(line)) for line in content.split(b"\n")[:-1]]
    for number, record in enumerate(records):
        if record.round != number:
            raise RunError(f"{path}, line {number + 1}: has round {record.round} where round {number} should be")
    return records


def _check_content(path: Path, content: bytes, mark: Mark) -> None:
    if len(content) < mark.size or xxhash.xxh3_128(content[: mark.size]).hexdigest() != mark.checksum:
        what = "has been cut" if len(content) < mark.size else "has been changed"
        raise RunError(
            f"{path}: {what} since its checkpoint was written; put the file back, or start over with --fresh, which "
            "keeps the old folder"
        )


def plain_json(value: Any) -> str:
    """Format as indented JSON with sorted keys.

    Args:
        value: Plain values.

    Returns:
        The text.
    """
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
