"""The run folder: a run's files on disk.

    config.toml         everything, defaults included: this file alone replays the run
    partition.npz       rows and label counts of every client; deployment.json where these are real sites
    identity.json       what it was made of: data, fedskew's version; code/, the source of the user's own components
    rounds.jsonl        one line a round
    checkpoint/         the server's state
    model.safetensors   the final model; best.safetensors where a validation set exists, finished.safetensors where the
                        method has a finish
    frozen.safetensors  what of the network is frozen, where the config freezes some; checkpoints are without it
    sites.csv           figures of the models at each client, where clients have test samples
    task.json           names of clients and classes, the target, what the labels say about the run
    summary.json        final figures, versions, machine, seconds
    report.html

A folder of several seeds holds one such folder for each (of values that are tried for each, `seed-0-ess-0.5`), and its
own config, summary and report.

A checkpoint is one safetensors file: the tensors of a `RunState`, and its numbers in the header.
"""

import csv
import json
import os
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from fedskew.data import Profile
from fedskew.engine import RoundRecord, ServerState
from fedskew.errors import FedskewError, RunError, in_one_line
from fedskew.experiment._config import Config
from fedskew.experiment._identity import ANEW, Identity, Present, refuse_changes
from fedskew.experiment._model_info import ModelInfo
from fedskew.files import LOCK, append, load_tensors, read_notes, save_tensors, write_text, writing
from fedskew.metrics import SiteRow
from fedskew.models import ModelState
from fedskew.partition import Partition
from fedskew.report import SeedRun
from fedskew.tables import csv_text, flatten, json_text

FINISHED = "finished.safetensors"
CHECKPOINT = "checkpoint/state.safetensors"
SITES, FROZEN = "sites.csv", "frozen.safetensors"
_ALIKE = ("name", "seeds", "output.", "data.root")  # keys that make no other run


class Mark(NamedTuple):
    """How far `rounds.jsonl` was when a round was over: its length in bytes, and its content's checksum."""

    size: int
    checksum: str


@dataclass(frozen=True)
class TaskInfo:
    """The clients that train, their label counts, target mix and samples, as reports show them, and the run's notes."""

    counts: NDArray[np.int64]
    client_names: tuple[str, ...]
    class_names: tuple[str, ...]
    target: NDArray[np.float64] | None
    notes: tuple[str, ...] = ()
    sizes: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class RunState:
    """The state of a run between rounds, without its records; the contents of a checkpoint. `best` is the best model by
    validation so far, of `best_round` with `best_score` (-1 before the first validation), `stale` the number of
    validations since. `clients` are the rounds that clients' stored states are of, `(clients, 2)`, `own` those of their
    own models."""

    server: ServerState
    best: ModelState
    best_score: float
    best_round: int
    stale: int
    clients: NDArray[np.int64]
    own: NDArray[np.int64]

    def numbers(self) -> dict[str, Any]:
        """Return what is no tensor."""
        return {
            "round": self.server.round,
            "best_score": self.best_score,
            "best_round": self.best_round,
            "stale": self.stale,
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all tensors by name: the server's, and those of two more owners."""
        whole = self.server.having("best", self.best._asdict())
        rounds = {"rounds": torch.from_numpy(self.clients), "own": torch.from_numpy(self.own)}
        return whole.having("clients", rounds).tensors

    def restored(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> "RunState":
        """Return the state of which these are, whose tensors are named, and on the devices, as here."""
        own = {name: numbers[name] for name in self.numbers()}
        parts = {name: tensors[name].to(like.device) for name, like in self.tensors().items()}
        whole = ServerState(own.pop("round"), parts)
        best, rounds = ModelState(**whole.of("best")), whole.of("clients")
        server = whole.having("best", {}).having("clients", {})
        return RunState(server, best, clients=rounds["rounds"].numpy(), own=rounds["own"].numpy(), **own)


class RunFolder:
    """The files of one seed's run: of a simulation its partition and identity, and what of the network is `frozen`."""

    INPUTS = "inputs.json"
    SITE_FIGURES = "site-figures.json"
    """File of a federation of real sites: what models are worth to these, in means that were summed under masks."""

    def __init__(
        self,
        path: Path,
        partition: Partition | None = None,
        identity: Identity | None = None,
        frozen: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.path, self._frozen = path, frozen
        self._partition = partition
        self._identity = identity
        self._rounds = path / "rounds.jsonl"
        self._content = xxhash.xxh3_128()
        self._size = 0
        self._marks: dict[int, Mark] = {}

    def open(self, config: Config, task: TaskInfo, resume: bool) -> None:
        """Make the folder, or check that the run in it is of this code and data; RunError where it is not."""
        path = self.path
        if not resume:
            check_empty(path)
        elif self._rounds.exists() and self._identity is not None:
            self._check(self._identity)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if self._partition is not None:
                self._partition.save(path / "partition.npz")
            config.write(path / "config.toml")
            target = None if task.target is None else task.target.tolist()
            described = {"clients": task.client_names, "classes": task.class_names, "target": target}
            notes = {"notes": task.notes} if task.notes else {}
            write_text(path / "task.json", json.dumps(described | notes, indent=1))
        if self._identity is not None:
            self._identity.write(path)
        if self._frozen:
            self._keep({name: one.cpu() for name, one in self._frozen.items()})

    def _keep(self, frozen: Mapping[str, Tensor]) -> None:
        """Write what no round changes, once; RunError where there is another already."""
        path = self.path / FROZEN
        if not path.exists():
            save_tensors(path, frozen)
            return
        with reading(path):
            held, _ = load_tensors(path)
        if held.keys() != frozen.keys() or not all(torch.equal(held[name], one) for name, one in frozen.items()):
            raise RunError(f"{path}: the network has frozen something else by now; {starting_over(self.path)}")

    def append(self, record: RoundRecord) -> None:
        """Add a line to `rounds.jsonl`; it is on the disk when this returns. RunError where it can't be written."""
        line = (json.dumps(record.to_dict(), allow_nan=False) + "\n").encode()
        append(self._rounds, line)
        self._mark(record.round, line)

    def resume(self, template: RunState) -> tuple[RunState, list[RoundRecord]] | None:
        """Read the checkpoint and the records up to it; what is later is removed, as it was cut short by a kill. None
        where no round was finished; RunError, and no change, where they are damaged or do not belong together."""
        read = _load_checkpoint(self.path / CHECKPOINT, template)
        content = self._rounds.read_bytes() if self._rounds.exists() else b""
        if read is None:
            if content.count(b"\n") > 1:  # the untrained model's, at most
                raise RunError(
                    f"{self.path}: its checkpoint is missing, so it can't be gone on with; fedskew report shows what "
                    f"is there; {starting_over(self.path)}"
                )
            with writing(self._rounds):
                self._rounds.unlink(missing_ok=True)
            return None
        state, mark = read
        _check_content(self._rounds, content, mark)
        if len(content) > mark.size:
            with writing(self._rounds):
                os.truncate(self._rounds, mark.size)
        records = RunFolder.read_records(self._rounds)
        self._mark(records[-1].round, content[: mark.size])
        return state, records

    def save_checkpoint(self, state: RunState) -> None:
        """Replace the checkpoint by a state, of a round whose record has been added."""
        tensors = {name: part.cpu().clone() for name, part in state.tensors().items()}  # no memory is written twice
        notes = {"numbers": state.numbers(), "records": self._marks[state.server.round]}
        save_tensors(self.path / CHECKPOINT, tensors, notes)

    def save_model(self, name: str, tensors: Mapping[str, Tensor], info: ModelInfo) -> None:
        """Write a model's state dict to a file of this name, with its notes."""
        save_tensors(self.path / name, tensors, info.plain())

    def write_profile(self, profile: Profile) -> None:
        """Write `inputs.json`: what the training samples look like."""
        write_text(self.path / self.INPUTS, json_text(profile.plain()))

    def write_sites(self, rows: Sequence[SiteRow]) -> None:
        """Write `sites.csv`, a line for each client and row; NaN as an empty cell."""
        write_text(self.path / SITES, csv_text([list(SiteRow.__annotations__), *(row.cells() for row in rows)]))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, in plain values."""
        write_text(self.path / "summary.json", json_text(summary))

    def _check(self, identity: Identity) -> None:
        """Raise RunError where the run in the folder was made of something else."""
        found = Identity.read(self.path).changes(identity)
        stored = self.path / "partition.npz"
        if not found and self._partition is not None and Partition.load(stored).hash != self._partition.hash:
            found = [f"{stored} is not the partition that this config makes now"]
        refuse_changes(self.path, found)

    def _mark(self, round: int, content: bytes) -> None:
        self._content.update(content)
        self._size += len(content)
        self._marks[round] = Mark(self._size, self._content.hexdigest())

    @staticmethod
    def changes_since(folder: Path, config: Config) -> list[str]:
        """List what has changed since the runs in a config's run folder were made, in words (see `Identity`)."""
        return Present().changes(folder, config)

    @staticmethod
    def notes(folder: Path, seed: int) -> list[str]:
        """Return the notes of a seed's run, from its run folder, of one seed or several."""
        for name in ("", f"seed-{seed}", f"seed-{seed}-*"):
            for path in sorted(folder.glob(f"{name}/task.json" if name else "task.json")):
                return list(json.loads(path.read_text(encoding="utf-8")).get("notes", []))
        return []

    @staticmethod
    def read_records(path: Path, mark: Mark | None = None) -> list[RoundRecord]:
        """Read a `rounds.jsonl`, without a line that is being written; RunError where it is not its checkpoint's."""
        content = path.read_bytes() if path.exists() else b""
        if mark is not None:
            _check_content(path, content, mark)
        records = [RoundRecord.from_dict(json.loads(line)) for line in content.split(b"\n")[:-1]]
        for number, record in enumerate(records):
            if record.round != number:
                raise RunError(f"{path}, line {number + 1}: has round {record.round} where round {number} should be")
        return records

    @staticmethod
    def read_runs(path: Path, label: str | None = None) -> list[SeedRun]:
        """Read every seed's run in a run folder, with the chosen value where several were tried, or raise RunError."""
        require_run(path)
        try:
            if (path / "rounds.jsonl").exists():
                return [_read_run(path, label)]
            return [_read_run(path / part, label) for part in parts_of(path)]
        except FedskewError:
            raise
        except Exception as error:  # what is damaged can raise almost anything
            why = in_one_line(error)
            raise RunError(f"{path}: is damaged ({why}); put its files back, or {starting_over(path)}") from None

    @staticmethod
    def read_compared(folders: Sequence[Path], labels: Sequence[str | None]) -> list[SeedRun]:
        """Read runs to be compared, of run folders or folders of these; without labels, what configs differ in tells
        them apart."""
        runs: list[tuple[str | None, list[SeedRun]]] = []
        for folder, label in zip(folders, labels, strict=True):
            inner = sorted(path.parent for path in folder.glob("*/config.toml"))
            places = inner if inner and not (folder / "config.toml").exists() else [folder]
            runs += [(label, RunFolder.read_runs(place, label)) for place in places]
        trees = [seeds[0].config for label, seeds in runs if label is None]
        found = []
        for label, seeds in runs:
            tree = seeds[0].config
            own = label or _label(tree, [other for other in trees if other["name"] == tree["name"]])
            found += [replace(run, label=own) for run in seeds]
        return found


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


def _read_run(path: Path, label: str | None) -> SeedRun:
    """Read one seed's run; its components need not be importable here."""
    config, task = _parsed(path / "config.toml", tomllib.loads), _parsed(path / "task.json")
    deployment = path / "deployment.json"
    if deployment.exists():
        counts = np.array(_parsed(deployment)["label_counts"], dtype=np.int64)
        sizes = counts.sum(axis=1)
    else:
        partition = Partition.load(path / "partition.npz")
        counts, sizes = partition.counts, partition.sizes
    summary = path / "summary.json"
    run = SeedRun(
        label=label or config["name"],
        seed=config["seeds"][0],
        config=config,
        rounds=RunFolder.read_records(path / "rounds.jsonl", _mark_of(path / CHECKPOINT)),
        counts=counts[: len(task["clients"])],
        client_names=tuple(task["clients"]),
        class_names=tuple(task["classes"]),
        target=None if task["target"] is None else np.array(task["target"]),
        summary=_parsed(summary) if summary.exists() else {},
        notes=tuple(task.get("notes", ())),
        sizes=sizes[: len(task["clients"])],
        sites=_read_sites(path / SITES),
    )
    if not run.rounds:
        raise RunError(f"{path / 'rounds.jsonl'}: holds no round yet, or has been emptied")
    check_summary(summary, run.summary, run.rounds)
    return run


def _parsed(path: Path, parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    """Read a file of a run folder, a table; RunError where it is damaged."""
    with reading(path):
        found = parse(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError("it holds no table")
        return found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Let errors of the block say which file of a run folder can't be read, why, and what can be done."""
    try:
        yield
    except (RunError, KeyError, ValueError, TypeError, RecursionError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        folder = path.parent.parent if path.match(CHECKPOINT) else path.parent
        raise RunError(f"{path}: can't be read ({said}); put it back, or {starting_over(folder)}") from None


def _read_sites(path: Path) -> tuple[SiteRow, ...]:
    """Read what `RunFolder.write_sites` wrote; nothing if there is no such file."""
    if not path.exists():
        return ()
    with open(path, encoding="utf-8", newline="") as file:
        rows = [{name: cell or "nan" for name, cell in line.items()} for line in csv.DictReader(file)]
    return tuple(TypeAdapter(list[SiteRow]).validate_python(rows))


def check_summary(path: Path, summary: Mapping[str, Any], rounds: Sequence[RoundRecord]) -> None:
    """Raise RunError where a summary (empty for a run that has not ended) is not of these records."""
    evaluated = [record.evaluation.accuracy for record in rounds if record.evaluation is not None]
    said = (summary.get("final") or {}).get("accuracy")
    if summary and (summary["rounds"] != rounds[-1].round or said != (evaluated[-1] if evaluated else None)):
        raise RunError(
            f"{path}: says accuracy {said} after round {summary['rounds']}, and rounds.jsonl "
            f"{evaluated[-1] if evaluated else None} after {rounds[-1].round}: they do not belong together"
        )


def _check_content(path: Path, content: bytes, mark: Mark) -> None:
    if len(content) < mark.size or xxhash.xxh3_128(content[: mark.size]).hexdigest() != mark.checksum:
        what = "has been cut" if len(content) < mark.size else "has been changed"
        raise RunError(f"{path}: {what} since its checkpoint was written; put it back, or {starting_over(path.parent)}")


def _load_checkpoint(path: Path, template: RunState) -> tuple[RunState, Mark] | None:
    """Read a checkpoint in the shape of a template, on its devices; None if there is none yet."""
    if not path.exists():
        return None
    with reading(path):
        tensors, notes = load_tensors(path)
        return template.restored(tensors, notes["numbers"]), Mark(*notes["records"])


def _mark_of(path: Path) -> Mark | None:
    """Read how far `rounds.jsonl` was at a checkpoint; None if there is none."""
    if not path.exists():
        return None
    with reading(path):
        return Mark(*read_notes(path)["records"])


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


def require_run(path: Path) -> None:
    """Raise RunError where a path is no run folder."""
    if not (path / "config.toml").exists():
        why = "it has no config.toml" if path.exists() else "it does not exist"
        raise RunError(f"{path}: not a run folder ({why})")


def require_end(run: Path) -> None:
    """Raise RunError where the run of a folder has not ended, with the command that goes on with it."""
    if not (run / "summary.json").exists():
        on = _at_sites(run) or f"{command_of(run)} --resume"
        raise RunError(f"{run}: the run is not finished; go on with: {on}")


def parts_of(run: Path) -> list[Any]:
    """Return the names of the seeds' folders in the summary of a run that has no records of its own, or RunError."""
    require_end(run)
    parts = _parsed(run / "summary.json").get("parts")
    if not isinstance(parts, list):
        raise RunError(f"{run / 'rounds.jsonl'}: is missing; put the file back, or {starting_over(run)}")
    return parts


def starting_over(folder: Path) -> str:
    """Return what is advised where the run of a folder can't be gone on with."""
    again = _at_sites(folder)
    return f"move {folder} elsewhere and start over with: {again}" if again else ANEW


def _at_sites(folder: Path) -> str | None:
    """Return the command that trains at the real sites whose server a run folder is of; None: it is of no server."""
    server = folder.absolute().parent.parent
    return shlex.join(["sh", str(server / "run.sh")]) if (server / "superlink.sh").exists() else None


def command_of(folder: Path) -> str:
    """Return the command that the run of a folder belongs to: that of all its seeds, where it is one of several."""
    whole = folder.parent if (folder.parent / "config.toml").exists() else folder
    return shlex.join(["fedskew", "run", str(whole / "config.toml")])
