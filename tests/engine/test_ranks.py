"""A cohort over the ranks of torchrun: the bits of one process, and no hang when a rank dies."""

import atexit
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributed

import fedskew
from common import records_of
from fedskew import torchrun
from fedskew.cli import main

CONFIG = """
schema = 1
name = "task"
data = {name = "digits", validation = 0.2, held_out = 0.2}
target = {mix = "estimate", truth = "uniform", warmup = 1, every = 1}
partition = {rule = "dirichlet_by_class", clients = 8, beta = 0.3, min_size = 1}
model = {name = "fragile:Fragile", flag = "flag"}
training = {rounds = 4, participation = 0.6, epochs = 2, batch_size = 32, lr = 0.05, momentum = 0.5}
conditions = {stragglers = 0.5, dropout = 0.2}
evaluation = {clients = true, every = 2}
engine = {backend = "sequential", device = "cpu"}
output = {checkpoint_every = 3}

[method]
selection = {name = "seol_kim"}
objective = {name = "fedvls_calibration", terms = [{name = "moon"}, {name = "fpl"}, {name = "vacant_distillation"}]}
local_step = {name = "scaffold"}
"""
"""Quotas, a teacher, a previous model, states of two components, replies of two, evaluations of every client, and an
estimated target."""

FRAGILE = """
import os, pathlib, signal
from torch import nn


class Fragile(nn.Module):
    def __init__(self, num_classes, in_shape, flag):
        super().__init__()
        self.layer, self.head = nn.Linear(64, 12), nn.Linear(12, num_classes)
        self.passes, self.flag = 0, pathlib.Path(flag)

    def features(self, x):
        self.passes += self.training
        if os.environ.get("RANK") == "1" and self.flag.exists() and self.passes > 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x.flatten(1)).relu()

    def forward(self, x):
        return self.head(self.features(x))
"""
"""A model that ends the second rank after some 30 steps, as the kernel does for want of memory, while a file exists."""


RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(["torch"])  # heeded if the first child that this process starts is ours


def set_up(folder: Path) -> Path:
    """Write the config and the model, which ends the second rank, and return its flag."""
    (folder / "task.toml").write_text(CONFIG)
    (folder / "fragile.py").write_text(FRAGILE)
    (folder / "flag").touch()
    return folder / "flag"


def assert_said_once(stderr: str) -> None:
    """What the rank that is left says."""
    told = [line for line in stderr.splitlines() if line.startswith("fedskew: ")]
    assert len(told) == 1, stderr
    assert "another rank has" in told[0]
    assert "with --resume, on any number of ranks" in told[0]


def of_rank(rank: int, ranks: int, port: int = 0) -> dict[str, str]:
    """What torchrun says to a rank by its environment."""
    said = {"TORCHELASTIC_RUN_ID": "a job", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    return {name: str(value) for name, value in (said | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items()}


def play(folder: Path, rank: int, port: int) -> None:
    """What one of two ranks does, in a process that torchrun has not started but which has its environment."""
    os.environ.update(of_rank(rank, 2, port))
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["fedskew", "run", "task.toml"]
    with Path(f"said-{rank}").open("w") as said:
        os.dup2(said.fileno(), sys.stderr.fileno())
    main()


@contextmanager
def only_rank() -> Iterator[None]:
    """Inside, this process is the only rank of a job: the environment is what torchrun gives it."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in of_rank(0, 1).items():
            environment.setenv(name, value)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            if distributed.is_initialized():
                distributed.destroy_process_group()
                atexit.unregister(distributed.destroy_process_group)


def left(folder: Path) -> tuple:
    """What a run leaves behind, seconds aside."""
    (place,) = folder.glob("task-*")
    return records_of(place), (place / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_ends_and_goes_on_over_another_number_with_the_bits_of_one_process(
    tmp_path, monkeypatch
):
    flag = set_up(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [RANKS.Process(target=play, args=(tmp_path, rank, port)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    assert [rank.exitcode for rank in ranks] == [2, -signal.SIGKILL]
    assert_said_once((tmp_path / "said-0").read_text())
    (place,) = (tmp_path / "runs").iterdir()
    assert (place / "checkpoint" / "state.safetensors").exists()
    assert not (place / "model.safetensors").exists()

    flag.unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    fedskew.simulate("task.toml", out="alone")
    with only_rank():
        fedskew.simulate("task.toml", out="runs", resume=True)
    assert (place / "report.html").exists()
    assert left(tmp_path / "runs") == left(tmp_path / "alone")
    said = {"name": "sequential", "network": {"as_written": "it changes its own attributes"}, "ranks": 1}
    assert json.loads((place / "summary.json").read_text())["backend"] == said


@pytest.mark.slow
@pytest.mark.faults  # torchrun starts three processes, each of which imports PyTorch
def test_torchrun_ends_a_run_whose_rank_is_killed(tmp_path):
    set_up(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command, environment = [*launcher, "-m", "fedskew", "run", "task.toml"], {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, env=environment)
    assert killed.returncode != 0
    assert_said_once(killed.stderr)


def assigned_to(ranks: int, work: list[int]) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in of_rank(0, ranks).items():
            environment.setenv(name, value)
        return torchrun.assign(work)


def test_clients_are_assigned_to_the_rank_with_least_work_the_longest_first():
    # 9 to the first, 5 to the second, which has less and gets 4 too; of two with 9, the first gets the last.
    assert assigned_to(2, [4, 9, 1, 5]) == [[1, 2], [3, 0]]
    assert assigned_to(3, []) == [[], [], []]


@pytest.mark.slow
@settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(work=st.lists(st.integers(0, 100)), ranks=st.integers(1, 9))
def test_every_client_is_assigned_once_and_no_rank_has_more_than_another_by_over_one_client(work, ranks):
    assigned = assigned_to(ranks, work)
    assert sorted(place for own in assigned for place in own) == list(range(len(work)))
    loads = [sum(work[place] for place in own) for own in assigned]
    assert max(loads) - min(loads) <= max(work, default=0)
