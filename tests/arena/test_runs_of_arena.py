"""An arena run: every federation is a line as soon as it ends, and what joins later costs only its own runs."""

from __future__ import annotations

import csv
import gzip
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
from scipy import stats

from fedskew import simulate
from fedskew.arena import Arena, ArenaState, Scores, run_arena, write_comparison
from fedskew.errors import RunError
from fedskew.executors import executor
from fedskew.experiment import Sweep, run_sweep

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


def test_models_at_clients_are_columns_and_tables(tmp_path) -> None:
    own = FILE.replace("validation = 0.3", "client_test = 0.3, held_out = 0.3").replace("[0.4, 1.0]", "[1.0]")
    own = own.replace("rates = [0.1, 1.0]\nbudget = 3\n", "")
    for name in ("fedavg", "fedla"):
        own = own.replace(f'"{name}"', f'{{label = "{name}", preset = "{name}", personal = "prior"}}')
    state, _ = run(tmp_path, own)
    line = next(line for line in lines(tmp_path) if line["method"] == "fedla")
    result = simulate(
        data={"name": "digits", "rows": 300, "client_test": 0.3, "held_out": 0.3},
        partition={"rule": "quantity", "clients": 10, "labels_per_client": 2},
        model="logistic",
        method={"preset": "fedla", "personal": "prior"},
        training={"rounds": 2, "batch_size": 32},
        progress=False,
    )
    for row in ("common", "personal"):
        accuracy = fmean(one["accuracy"] for one in result.sites() if one["row"] == row)
        assert float(line[row]) == pytest.approx(accuracy, abs=1e-5)
    write_comparison(state, tmp_path / "runs")
    page = (tmp_path / "runs" / "arena-tiny" / "table.md").read_text()
    assert "## Personal models" in page
    assert "## The common model at the clients" in page
    assert len(ArenaState.read(state.arena, tmp_path / "runs").runs) == 4


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
    again = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "recompute_arena.py"))
    with (tmp_path / "runs" / "arena-tiny" / "runs.csv").open() as file:
        table = again["Table"](list(csv.DictReader(file)), 1, None, "fedavg")
    compared, wrong = again["check"](table, page)
    assert (compared > 20, wrong) == (True, [])
    assert "2 trainings, on 2 partitions" in " ".join(again["answers"](table))
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
        if any("fedla" in str(tree["method"]) for tree, _ in trees):
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


# `--on ADDRESS`: an arena and a sweep on two Dask workers, one of which is killed in the middle.

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


# The published comparison: worked out again from the published runs, without a line of fedskew's arithmetic.

RUNS = Path(__file__).parents[2] / "docs" / "measured" / "arena-runs.csv"
AXES = ("task", "rule", "participation", "target")


@pytest.fixture(scope="module")
def compared():
    with RUNS.open(newline="", encoding="utf-8") as file:
        return [line for line in csv.DictReader(file) if line["stage"] != "tune" and not line["failure"]]


@pytest.fixture(scope="module")
def gains(compared):
    """By method, training, partition and seed, the difference from FedAvg: the mean of both scorings."""
    curves = {}
    for line in compared:
        if line["stage"] == "run":
            key = tuple(line[axis] for axis in (*AXES, "partition", "seed"))
            curves[line["method"], key] = [float(value) / 100 for value in line["curve"].split()]
    found = defaultdict(lambda: defaultdict(list))
    for (method, key), curve in curves.items():
        reference = curves["fedavg", key]
        last = 1 if method.startswith("ccvr") else 3
        found[method][*key[:3], *key[4:]].append(fmean(curve[-last:]) - fmean(reference[-last:]))
    return {method: {key: fmean(values) for key, values in own.items()} for method, own in found.items()}


@pytest.fixture(scope="module")
def means(gains):
    """By method and training; all of them have two partitions of three seeds."""
    return {
        method: {key: fmean(value for run, value in own.items() if run[:3] == key) for key in {run[:3] for run in own}}
        for method, own in gains.items()
    }


@pytest.fixture(scope="module")
def found(compared):
    trainings = {key: key[:3] for key in {tuple(line[axis] for axis in AXES) for line in compared}}
    return Scores.of(compared, AXES, "fedavg", last=3, trainings=trainings)


@pytest.mark.slow
def test_the_published_differences_and_p_values_are_those_of_trainings(found, gains, means) -> None:
    rows = {row.method: row for row in found.standings("fedavg")}
    units = {method: list(own.values()) for method, own in means.items() if method != "fedavg"}
    assert {method: row.trainings for method, row in rows.items()} == {name: len(own) for name, own in units.items()}
    assert max(map(len, units.values())) == 22
    for method, own in units.items():
        assert rows[method].difference == pytest.approx(fmean(own), abs=1e-9)
        runs = gains[method].values()
        assert rows[method].median == pytest.approx(median(runs), abs=1e-9)
        assert (rows[method].collapsed, rows[method].runs) == (sum(gain < -20 for gain in runs), len(runs))
    raw = sorted((stats.wilcoxon(own).pvalue, method) for method, own in units.items())
    corrected, least = {}, 0.0
    for place, (value, method) in enumerate(raw):
        least = corrected[method] = max(least, min(1.0, (len(raw) - place) * value))
    assert {method: row.p for method, row in rows.items()} == pytest.approx(corrected)


@pytest.mark.slow
def test_the_published_ranks_are_those_of_trainings(found, means) -> None:
    made = found.ranks()
    table = np.array([[means[method][training] for method in made.methods] for training in means["fedavg"]])
    assert dict(zip(made.methods, made.ranks, strict=True)) == pytest.approx(
        dict(zip(made.methods, stats.rankdata(-table.round(9), axis=1).mean(axis=0).tolist(), strict=True))
    )
    assert made.p == pytest.approx(stats.friedmanchisquare(*table.T).pvalue)


def test_targets_are_views_of_one_training(tmp_path) -> None:
    mix = [0.02] * 5 + [0.18] * 5
    targets = f'target = [{{label = "none"}}, {{label = "9:1", mix = {mix}}}]'
    text = FILE.replace("training.participation = [0.4, 1.0]", targets).replace('"fedla"]', '"fedpals"]')
    text = text.replace("budget = 3", "budget = 2")
    state, _ = run(tmp_path, text)
    assert not state.failures
    assert not state.missing
    tuned = [line for line in lines(tmp_path) if line["stage"] == "tune"]
    # two rates on one partition and seed; FedPALS is refused where it is told no target
    known = [line["config"] for line in lines(tmp_path) if not line["failure"]]
    assert len(known) == len(set(known)) == 12
    trained = {(line["accuracy"], line["seconds"]) for line in tuned if line["method"] == "fedavg"}
    assert len(trained) == 2  # each rate once, for both targets
    rows = {(line["method"], line["target"], line["seed"]): line for line in state.compared}
    for (method, target, seed), line in rows.items():
        config = next(e.config for e in state.arena.entries if (e.method, e.situation["target"]) == (method, target))
        one = config.with_value("training.lr", float(line["lr"])).with_value("partition.seed", int(line["partition"]))
        alone = simulate(one.tree(), seeds=[int(seed)], engine={"backend": "sequential"}).runs[0].rounds[-1]
        assert float(line["score"]) == pytest.approx(alone.evaluation.score, abs=0.005)
        assert float(line["accuracy"]) == pytest.approx(alone.evaluation.accuracy, abs=0.005)
        assert line["target_accuracy"] == ("" if target == "none" else line["score"])
    assert len(rows) == 6  # FedPALS without a target is refused


def test_a_target_that_joins_later_leaves_the_lines_that_are_there(tmp_path) -> None:
    targets = f'target = [{{label = "none"}}, {{label = "9:1", mix = {[0.02] * 5 + [0.18] * 5}}}]'
    text = FILE.replace("training.participation = [0.4, 1.0]", targets).replace(', "fedla"]', "]")
    run(tmp_path, text, only={"target": "none"})
    before = lines(tmp_path)
    assert not run(tmp_path, text)[0].missing
    after = lines(tmp_path)
    assert after[: len(before)] == before
    assert len({line["config"] for line in after}) == len(after)


def test_a_mix_that_does_not_fit_is_refused_in_its_view_alone(tmp_path) -> None:
    text = FILE.replace(
        "training.participation = [0.4, 1.0]", 'target = [{label = "none"}, {label = "x", mix = [0.5, 0.5]}]'
    )
    state, _ = run(tmp_path, text)
    assert {line["target"] for line in state.compared} == {"none"}
    refused = {line["failure"] for line in state.runs if line["target"] == "x"}
    assert len(refused) == 1
    assert "target.mix" in refused.pop()
