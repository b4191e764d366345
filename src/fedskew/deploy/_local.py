"""A whole federation on this machine: SuperLink and SuperNodes on loopback, with TLS and node keys.

The processes are started by the scripts that `fedskew deploy init` writes for real sites.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedskew import findings
from fedskew.data import Dataset, Inputs, Profile, TableSchema, Texts, in_own_units
from fedskew.errors import ConfigError, DataWarning, RunError
from fedskew.files import write_text
from fedskew.names import SYSTEM_FOLDERS
from fedskew.tables import csv_text

STARTUP = 60.0
"""Seconds that a process may take to start."""

GRACE = 15.0
"""Seconds that processes may take to end before they are killed."""

PR_SET_PDEATHSIG = 1

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^\s*(?:INFO|WARNING|ERROR)\s*:\s*")
_WARNING = re.compile(r"^\s*(?:WARNING|ERROR)\s*:")
_REASON = re.compile(r"^fedskew: |ERROR|\[code: \d+\]|\w(?:Error|Exception)\b|_FAILED\b")
_NOISE = re.compile(
    r"|For more information.*|.*(?:terminated gracefully|Shutting down|[Ll]ifespan|Finished server process|SuperExec"
    r"|[Aa]pplication (?:shutdown|startup)|retrying in).*"
)

FILES = {"train": "data.csv", "test": "test.csv"}
NONE = "no finding"

FOLDER_NAME = re.compile(r"(?!\.)[^/\\<>:\"|?*]{0,60}[^/\\<>:\"|?*. ]")
"""Names of classes that a folder can have on any system, and that the reader "folder" does not leave out."""

IntArray = NDArray[np.int64]


class LocalFederation:
    """The processes of a federation folder, by name, all on this machine; a context manager. On entry the SuperLink is
    started, and every site is registered and started. On exit, also after an error, all processes are ended; on Linux,
    where this process is killed, too. Each process writes to `logs/NAME.log` in the folder."""

    def __init__(self, folder: Path, port: int, sites: tuple[str, ...]) -> None:
        self.folder = folder.resolve()
        self.port = port
        self.sites = sites
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "LocalFederation":
        try:
            self.start_server()
            self.wait("register", self.start("register", "server/register.sh"), STARTUP * len(self.sites))
            for name in self.sites:
                self.start_site(name)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start_server(self) -> None:
        """Start the SuperLink, and wait until it listens; RunError if it does not start."""
        process = self.start("superlink", "server/superlink.sh")
        until = time.monotonic() + STARTUP
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.1)
        raise RunError(f"the SuperLink did not start: {self.last_message('superlink')}")

    def start_site(self, name: str) -> subprocess.Popen[bytes]:
        """Start a site's SuperNode."""
        return self.start(name, f"sites/{name}/supernode.sh", {"PORT": str(LocalFederation.free_port())})

    def run(self) -> subprocess.Popen[bytes]:
        """Start the training; the process ends with it."""
        return self.start("run", "server/run.sh")

    def start(self, name: str, script: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start one of the folder's scripts, in a process group of its own."""
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        with log.open("ab") as out:
            self.processes[name] = subprocess.Popen(
                ["sh", str(self.folder / script)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": path, **(environment or {})},
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        return self.processes[name]

    def wait(self, name: str, process: subprocess.Popen[bytes], seconds: float) -> None:
        """Wait for a process to end; RunError if it failed, or did not end in time."""
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RunError(f"{name} did not end within {seconds:.0f} s; see {self.log(name)}") from None
        if status != 0:
            raise RunError(f"{name} failed: {self.last_message(name)}; see {self.log(name)}")

    def check(self) -> None:
        """Raise RunError if the server or a site has ended, with the last message in its log."""
        for name, process in self.processes.items():
            code = process.poll()
            if name in ("superlink", *self.sites) and code is not None:
                by = f" by {signal.Signals(-code).name}" if code < 0 else ""
                raise RunError(f"{name} ended{by}: {self.last_message(name)}; see {self.log(name)}")

    def stop(self) -> None:
        """End all processes, the sites before the server; kill them at an interrupt."""
        try:
            self.end([name for name in self.processes if name != "superlink"])
            self.end(list(self.processes))
        except BaseException:
            self.end(list(self.processes), signal.SIGKILL)
            raise

    def end(self, names: list[str], by: signal.Signals = signal.SIGTERM) -> None:
        """End processes and all their descendants; kill those that do not end within `GRACE` seconds."""
        ending = {name: self.processes[name] for name in names}
        # Flower starts processes in sessions of their own; some of them run on for a while after Flower has ended.
        started = [child for process in ending.values() for child in _descendants(process.pid)]
        for process in ending.values():
            _signal(process, by)
        until = time.monotonic() + GRACE
        for name, process in ending.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.wait()
            del self.processes[name]
        for how in (signal.SIGTERM, signal.SIGKILL):
            for child in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(how)
            _, started = psutil.wait_procs(started, timeout=GRACE)

    def log(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.folder / "logs" / f"{name}.log"

    def last_message(self, name: str) -> str:
        """Return the last line of a process's log that names an error; else the last line."""
        lines = [line for line in self._lines(name)[-40:] if not _NOISE.fullmatch(_plain(line))]
        last = next((line for line in reversed(lines) if _REASON.search(line)), lines[-1] if lines else "")
        return _plain(last) or "it wrote nothing"

    def warnings(self, name: str) -> list[str]:
        """Return the warnings in a process's log, without repetitions."""
        found = (line for line in self._lines(name)[:-1] if _WARNING.match(_COLOUR.sub("", line)))
        return list(dict.fromkeys(map(_plain, found)))

    def _lines(self, name: str) -> list[str]:
        log = self.log(name)
        return log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []

    @staticmethod
    def free_port() -> int:
        """Find a TCP port of this machine that is free at the moment."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return int(listener.getsockname()[1])


def _plain(line: str) -> str:
    return _LEVEL.sub("", _COLOUR.sub("", line)).strip()


def _end_with_parent() -> None:
    """Have Linux kill this process, whatever it executes, when its parent ends: a killed one leaves nobody to do so."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], by: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, by)


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def write_samples(
    dataset: Dataset, shares: Sequence[IntArray], sites: Sequence[Path], separator: str | None = None
) -> None:
    """Write each site's samples to its folder: a table as `data.csv` and `test.csv`, texts or pictures in folders.

    `shares` are rows of the training part; of the test part of n sites, site k gets samples k, k + n, k + 2n and so on.
    Numbers have seven digits, as a network has them, and texts the words that it is given; a DataWarning says of how
    many these come back as others. `separator` stands between several labels in one cell. Raises ConfigError where the
    samples are none of these, or there are fewer test samples of a table than sites.
    """
    schema: Any = dataset.encoder
    write: Callable[[Path, str, Inputs, Tensor, IntArray], int]  # returns how many would be read as others
    if isinstance(schema, Texts):
        write = partial(_write_texts, dataset, schema)
    elif isinstance(schema, TableSchema):
        if len(dataset.test_targets) < len(sites):
            raise ConfigError(
                f"data.test_share: test samples can't be divided among {len(sites)} sites, as there are "
                f"{len(dataset.test_targets)}; set a larger share, or give fewer sites (--sites)"
            )
        write = partial(_write_table, dataset, schema, separator)
    elif len(dataset.in_shape) != 3 or dataset.in_shape[0] not in (1, 3):
        raise ConfigError(
            f"data.name: samples of {dataset.name!r} have shape {dataset.in_shape} and are neither images nor a table "
            "(csv); describe each site's data in its data.toml, as fedskew deploy init lays it out"
        )
    elif dataset.multi_label:
        raise ConfigError(
            "data.name: images of several labels can't be told apart by folders; write the federation with fedskew "
            "deploy init, and give each site an .npz file of its own"
        )
    else:
        write = partial(_write_images, dataset)
    other = 0
    for place, (rows, site) in enumerate(zip(shares, sites, strict=True)):
        dealt = np.arange(place, len(dataset.test_targets), len(sites))
        other += write(site, "train", dataset.inputs, dataset.targets, np.asarray(rows))
        other += write(site, "test", dataset.test_inputs, dataset.test_targets, dealt)
    if other:
        said = f"{other:,} texts of the sites have other numbers than those of {dataset.name}, by their tokeniser"
        warnings.warn(said, DataWarning, stacklevel=2)


def _write_images(dataset: Dataset, site: Path, part: str, inputs: Inputs, targets: Tensor, rows: IntArray) -> int:
    """Write `images/PART/CLASS/ROW.png`."""
    folders = _class_folders(dataset, site / "images" / part)
    for row in rows.tolist():
        sample = in_own_units(inputs.index_select(0, torch.tensor([row])), dataset.mean, dataset.std)[0]
        levels = (sample.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        image = Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels)
        image.save(folders[int(targets[row])] / f"{row:06d}.png")
    return 0


def _write_texts(
    dataset: Dataset, encoder: Texts, site: Path, part: str, inputs: Inputs, targets: Tensor, rows: IntArray
) -> int:
    """Write `texts/PART/CLASS/ROW.txt`; return how many would be read as other numbers."""
    folders = _class_folders(dataset, site / "texts" / part)
    ids = inputs.index_select(0, torch.from_numpy(rows))
    texts = encoder.decode(ids)
    for row, text in zip(rows.tolist(), texts, strict=True):
        write_text(folders[int(targets[row])] / f"{row:06d}.txt", text, private=True)
    return int((encoder.encode(texts) != ids).any(1).sum()) if texts else 0


def _class_folders(dataset: Dataset, folder: Path) -> list[Path]:
    """Make a folder for each class; return them by class id."""
    renamed = {name: place for place, name in renamed_folders(dataset.classes).items()}
    places = [folder / renamed.get(name, name) for name in dataset.classes]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    return places


def renamed_folders(classes: Sequence[str]) -> dict[str, str]:
    """Name folders for classes whose names can't be those of folders, as of `Sci/Tech`; return the class of each."""
    folders: dict[str, str] = {}
    for label, name in enumerate(classes):
        if not (FOLDER_NAME.fullmatch(name) and name.isprintable()) or name in SYSTEM_FOLDERS:
            folder = f"class-{label}"
            while folder in classes:
                folder += "-"
            folders[folder] = name
    return folders


def _write_table(
    dataset: Dataset,
    schema: TableSchema,
    separator: str | None,
    site: Path,
    part: str,
    inputs: Inputs,
    targets: Tensor,
    rows: IntArray,
) -> int:
    chosen = torch.from_numpy(rows)
    columns = Profile.columns(in_own_units(inputs.index_select(0, chosen), dataset.mean, dataset.std), schema)
    cells = {name: _cells(schema, name, values) for name, values in columns.items()}
    each = zip(*cells.values(), *_labels(dataset, targets[chosen], separator), strict=True)
    lines = [[*cells, *schema.labelled], *map(list, each)]
    write_text(site / FILES[part], csv_text(lines), private=True)
    return 0


def _cells(schema: TableSchema, name: str, values: NDArray[Any]) -> list[str]:
    column = schema.columns[name]
    if column.kind == "category":
        return list(values)
    low, high = column.range or (-np.inf, np.inf)
    there = np.clip(values, low, high)  # single precision may be beyond the end by a digit
    if column.kind == "date":
        return ["" if np.isnan(day) else str(np.datetime64("1970-01-01") + int(np.rint(day))) for day in there]
    return ["" if np.isnan(value) else f"{value:.7g}" for value in there]


def _labels(dataset: Dataset, targets: Tensor, separator: str | None) -> list[list[Any]]:
    """Return the columns of labels: of classes, of 0 and 1 for each label, or of several in each cell."""
    if not dataset.multi_label:
        return [[dataset.classes[label] for label in targets.tolist()]]
    table = findings.as_table(targets.numpy(), dataset.num_classes)
    if separator is None:
        return [list(column) for column in table.T.tolist()]
    named = [[name for name, has in zip(dataset.classes, row, strict=True) if has] for row in table.tolist()]
    return [[separator.join(names) or NONE for names in named]]
