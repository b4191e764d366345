"""An arena run: every federation is a line as soon as it ends, and what joins later costs only its own runs."""

from __future__ import annotations

import csv
import gzip
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fedskew import simulate
from fedskew.arena import Arena, ArenaState, run_arena, write_comparison
from fedskew.errors import RunError
from fedskew.executors import executor

FILE = """
name = "tiny"
seeds = [0, 1]
data = {name = "digits", rows = 300, validation = 0.3}
partition = {rule = "quantity", clients = 10, labels_per_client = 2}
model = {name = "logistic"}
training = {rounds = 2, batch_size = 32}
engine = {backend = "cohort", seeds_together = true}
[arena]
rates = [0.1, 1.0]
budget = 3
last = 1
[sweep]
methods = ["fedavg", "fedla"]
[sweep.grid]
training.participation = [0.4, 1.0]
"""


class Heard:
    """What an arena says of its progress."""

    def __init__(self) -> None:
        self.jobs: list[str] = []

    def begin(self, finished: int, runs: int) -> None:
        self.finished = finished

    def ended(self, results) -> None:
        assert not any(trained.failed for _, trained in results)
        self.jobs += [f"{job.entry.method} {job.stage}" for job, _ in results]


def run(tmp_path: Path, text: str, **more: object) -> tuple[ArenaState, Heard]:
    (tmp_path / "tiny.toml").write_text(text)
    arena, heard = Arena.read(tmp_path / "tiny.toml", **more), Heard()
    with ThreadPoolExecutor(1) as pool:  # any executor will do
        return run_arena(arena, tmp_path / "runs", pool, 1, heard), heard


def lines(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "runs" / "arena-tiny" / "runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_an_arena_trains_only_what_is_missing(tmp_path) -> None:
    part = FILE.replace(', "fedla"]', "]")
    state, heard = run(tmp_path, part)
    assert (len(state.runs), state.number, state.failures) == (10, 10, ())
    assert sorted(heard.jobs) == sorted([*["fedavg tune"] * 3, "fedavg run"] * 2)
    before = lines(tmp_path)
    assert len(before) == 2 * (3 + 2)

    # the last line was being written when the power failed
    file = tmp_path / "runs" / "arena-tiny" / "runs.csv"
    file.write_bytes(file.read_bytes()[:-30])
    state, heard = run(tmp_path, FILE)
    assert heard.finished == 9
    assert sorted(heard.jobs) == sorted(["fedavg run", *[*["fedla tune"] * 3, "fedla run"] * 2])
    assert (len(state.runs), state.number) == (20, 20)
    same = [{**line, "seconds": ""} for line in lines(tmp_path) if line["method"] == "fedavg"]
    assert {tuple(line.values()) for line in same} == {tuple({**line, "seconds": ""}.values()) for line in before}

    state, heard = run(tmp_path, FILE)
    assert heard.jobs == []

    # a line is what fedskew run gives with the values that were chosen
    line = next(line for line in lines(tmp_path) if line["stage"] == "run" and line["method"] == "fedla")
    result = simulate(
        data={"name": "digits", "rows": 300, "validation": 0.3},
        partition={"rule": "quantity", "clients": 10, "labels_per_client": 2, "seed": int(line["partition"])},
        model="logistic",
        method="fedla",
        training={
            "rounds": 2,
            "batch_size": 32,
            "lr": float(line["lr"]),
            "participation": float(line["participation"]),
        },
        seeds=[int(line["seed"])],
        progress=False,
    )
    assert float(line["score"]) == pytest.approx(result.summary["final"]["accuracy"], abs=2e-5)
    assert line["curve"].split()[-1] == f"{1e4 * float(line['score']):.0f}"
    assert int(line["steps"]) == sum(sum(record["steps"]) for record in result.rounds)

    # and what all of them say is written
    files = write_comparison(state, tmp_path / "runs")
    assert {file.name for file in files} == {
        *("table.md", "standings.csv", "choices.csv", "evidence.csv.gz", "differences.png", "ranks.png")
    }
    page = (tmp_path / "runs" / "arena-tiny" / "table.md").read_text()
    assert "fedskew arena" in page
    assert "20 of 20 runs done" in page
    with gzip.open(tmp_path / "runs" / "arena-tiny" / "evidence.csv.gz", "rt") as file:
        few, everyone = csv.DictReader(file)
    assert (float(few["participation"]), float(everyone["participation"])) == (0.4, 1.0)
    assert few["federation"].startswith("digits, quantity")
    score = {(line["method"], line["participation"], line["seed"]): float(line["score"]) for line in state.compared}
    gains = [100 * (score["fedla", "0.4", seed] - score["fedavg", "0.4", seed]) for seed in "01"]
    assert float(few["gain:fedla"]) == pytest.approx(np.mean(gains), abs=1e-2)  # curves have hundredths
    assert len(ArenaState.read(state.arena, tmp_path / "runs").runs) == 20


@pytest.mark.slow
def test_what_can_never_be_trained_is_noted_and_not_tried_again(tmp_path) -> None:
    text = FILE.replace('"fedla"]', '"fedla", "fedpals"]')  # there is no target
    state, _ = run(tmp_path, text, only={"participation": "1.0"})
    refused = [line for line in lines(tmp_path) if line["method"] == "fedpals"]
    assert all("target" in line["failure"] for line in refused)
    assert {line["method"] for line in state.compared} == {"fedavg", "fedla"}
    write_comparison(state, tmp_path / "runs")
    page = (tmp_path / "runs" / "arena-tiny" / "table.md").read_text()
    assert f"runs done, {len(refused)} of them refused" in page
    assert run(tmp_path, text, only={"participation": "1.0"})[1].jobs == []


class Fragile(ThreadPoolExecutor):
    """An executor whose process dies of one method."""

    def submit(self, fn, /, trees, *more):
        if any("fedla" in str(tree["method"]) for tree in trees):
            return super().submit(end_or_not, "raise")
        return super().submit(fn, trees, *more)


def test_a_run_that_ends_its_process_fails_alone(tmp_path) -> None:
    (tmp_path / "tiny.toml").write_text(FILE)
    arena = Arena.read(tmp_path / "tiny.toml", only={"participation": "1.0"})
    with Fragile(1) as pool:
        state = run_arena(arena, tmp_path / "runs", pool, 1)
    assert {line["method"] for line in state.compared} == {"fedavg"}
    assert [failure.split(",")[0] for failure in state.failures] == ["fedla in participation=1.0"] * 2
    assert all(failure.endswith("no room") for failure in state.failures)


def test_runs_of_another_arena_are_refused(tmp_path) -> None:
    folder = tmp_path / "runs" / "arena-tiny"
    folder.mkdir(parents=True)
    (folder / "runs.csv").write_text("other,method\nx,fedavg\n")
    with pytest.raises(RunError, match="runs.csv: belongs to an arena with other columns than participation, method"):
        run(tmp_path, FILE)


def end_or_not(how: str) -> int:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise RunError("no room")
    return os.getpid()


@pytest.mark.slow
def test_a_process_that_is_killed_fails_its_own_call_alone() -> None:
    with executor(1) as (pool, at_once):
        assert at_once == 1
        first = pool.submit(end_or_not, "").result()
        assert first != os.getpid()
        with pytest.raises(RunError, match="no room"):
            pool.submit(end_or_not, "raise").result()
        assert pool.submit(end_or_not, "").result() == first  # an error ends no process
        killed, after = pool.submit(end_or_not, "kill"), pool.submit(end_or_not, "")
        with pytest.raises(RunError, match="its process ended early"):
            killed.result()
        assert after.result() not in (first, os.getpid())
    assert not any(child.pid == first for child in multiprocessing.active_children())


def stopped_while_it_works() -> None:
    with executor(1) as (pool, _):
        pool.submit(time.sleep, 60)
        time.sleep(0.5)
        raise KeyboardInterrupt


@pytest.mark.slow
def test_an_error_ends_what_runs_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stopped_while_it_works()
    assert time.monotonic() - began < 30
