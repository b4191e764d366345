"""The CSV files of an arena: one line for each run and each federation, added whole and never changed."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedskew.arena._arena import Arena
from fedskew.arena._federation import FIGURES, Trained
from fedskew.arena._jobs import ArenaJob
from fedskew.errors import RunError
from fedskew.files import append, write_text, writing
from fedskew.tables import csv_text

OF_FEDERATION = "of:"
"""Prefix of the columns of a federation's figures, since an axis may have the same name as one of them."""

_RUN = ("stage", "partition", "seed", "lr", "own", "config")


class ArenaFiles:
    """The runs and federations in an arena's folder.

    Args:
        arena: The arena.
        folder: Its folder.

    Raises:
        RunError: The files are damaged, or belong to an arena with other axes.
    """

    def __init__(self, arena: Arena, folder: Path) -> None:
        self._arena = arena
        self._runs_file, self._federations_file = folder / "runs.csv", folder / "federations.csv"
        self.runs: dict[str, dict[str, str]] = {}
        self.federations: dict[tuple[str, ...], dict[str, str]] = {}
        for line in self._read(self._runs_file, [*arena.axes, "method", *_RUN, *FIGURES]):
            self.runs[line["config"]] = line
        for line in self._read(self._federations_file, [*arena.axes, "partition"]):
            self.federations[self._federation(line)] = line

    def add(self, trained: Sequence[tuple[ArenaJob, Trained]]) -> None:
        """Add the runs of some jobs, and their federations if they are new, all at once.

        Args:
            trained: The jobs and their results.
        """
        runs: list[dict[str, str]] = []
        federations: list[dict[str, str]] = []
        for job, result in trained:
            config = job.config
            partition = str(config.partition.seed)
            for seed, figures in result.rows.items():
                own = [job.stage, partition, str(seed), f"{config.training.lr:g}", job.own, job.keys[seed]]
                head = {**job.entry.situation, "method": job.entry.method, **dict(zip(_RUN, own, strict=True))}
                runs.append(head | figures)
            federation = {**job.entry.situation, "partition": partition}
            key = self._federation(federation)
            if result.federation and job.stage == "run" and key not in self.federations:
                of = {f"{OF_FEDERATION}{name}": value for name, value in result.federation.items()}
                self.federations[key] = federation | of
                federations.append(self.federations[key])
        self._add(self._runs_file, runs)
        self._add(self._federations_file, federations)
        self.runs |= {line["config"]: line for line in runs}

    def _federation(self, line: Mapping[str, str]) -> tuple[str, ...]:
        return (*(line[axis] for axis in self._arena.axes), line["partition"])

    def _read(self, path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{path}: can't be read: {error}") from None
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the line that was being written when the machine or its power failed
            write_text(path, whole)
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        if whole and list(reader.fieldnames or [])[: len(columns)] != list(columns):
            raise RunError(
                f"{path}: belongs to an arena with other columns than {', '.join(columns)}; write elsewhere with "
                "--out, or give this arena another name"
            )
        lines = list(reader)
        if any(None in line or None in line.values() for line in lines):
            raise RunError(f"{path}: a line has too few or too many cells; mend it, or move the file away")
        return lines

    def _add(self, path: Path, lines: Sequence[Mapping[str, str]]) -> None:
        if not lines:
            return
        head = [] if path.exists() and path.stat().st_size else [list(lines[0])]
        with writing(path):
            append(path, csv_text([*head, *(list(line.values()) for line in lines)]).encode())
