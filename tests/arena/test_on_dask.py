"""`--on ADDRESS`: an arena and a sweep on two Dask workers, one of which is killed in the middle."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedskew.arena import Arena, run_arena
from fedskew.errors import RunError
from fedskew.executors import executor
from fedskew.experiment import Sweep, run_sweep

ARENA = """
name = "spread"
seeds = [0]
data = {name = "digits", rows = 300}
partition = {rule = "iid", clients = 3}
model = {name = "logistic"}
training = {rounds = 3}
[arena]
partitions = [0, 1, 2]
[sweep]
methods = ["fedavg", "fedla"]
"""
SWEEP = ARENA.replace("[arena]\npartitions = [0, 1, 2]\n", "")


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two workers as a person starts them: the scheduler's address, and the workers."""
    log = folder / "scheduler.log"
    options = ("--host", "127.0.0.1", "--no-dashboard")
    with log.open("wb") as file:
        words = [sys.executable, "-m", "distributed.cli.dask_scheduler", *options, "--port", "0"]
        processes = [subprocess.Popen(words, stdout=file, stderr=file, cwd=folder)]
        try:
            while not (found := re.search(r"tcp://127\.0\.0\.1:\d+", log.read_text())):
                assert processes[0].poll() is None, log.read_text()
                time.sleep(0.1)
            words = [sys.executable, "-m", "distributed.cli.dask_worker", found[0], *options]
            words += ["--nthreads", "1", "--no-nanny"]
            processes += [subprocess.Popen(words, stdout=file, stderr=file, cwd=folder) for _ in range(2)]
            while log.read_text().count("Register worker") < 2:
                assert all(process.poll() is None for process in processes), log.read_text()
                time.sleep(0.1)
            yield found[0], processes[1:]
        finally:
            for process in reversed(processes):
                process.kill()
                process.wait()


class Killing:
    """Kills a worker when the first federation is there."""

    def __init__(self, worker: subprocess.Popen[bytes]) -> None:
        self.worker = worker

    def begin(self, finished: int, runs: int) -> None:
        pass

    def ended(self, results) -> None:
        assert not any(trained.failed for _, trained in results)
        self.worker.kill()


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_arena_and_a_sweep_on_two_workers_survive_the_loss_of_one(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    (tmp_path / "spread.toml").write_text(ARENA)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    with cluster(tmp_path) as (address, workers), executor(1, on=address) as (pool, at_once):
        assert at_once == 2
        state = run_arena(Arena.read(tmp_path / "spread.toml"), tmp_path, pool, at_once, Killing(workers[0]))
        assert workers[0].wait() < 0
        assert state.failures == ()
        assert sorted((line["method"], line["partition"]) for line in state.compared) == [
            (method, partition) for method in ("fedavg", "fedla") for partition in "012"
        ]
        result = run_sweep(Sweep.read(tmp_path / "sweep.toml"), tmp_path / "runs", executor=pool)
        assert (result.failures, [len(row.seeds) for row in result.rows]) == ((), [1, 1])
        here = run_sweep(Sweep.read(tmp_path / "sweep.toml"), tmp_path / "here", processes=1)
    assert [row.values("accuracy") for row in result.rows] == [row.values("accuracy") for row in here.rows]


def test_no_scheduler_is_one_line() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(RunError, match="no Dask scheduler answers there; start one"), executor(1, "127.0.0.1"):
        pass
