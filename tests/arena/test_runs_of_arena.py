"""An arena run: every federation is a line as soon as it ends, and what joins later costs only its own runs."""

import csv
import gzip
import math
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any

import numpy as np
import pytest

from fedskew import simulate
from fedskew.arena import Arena, ArenaState, Scores, run_arena, write_comparison
from fedskew.arena._advice import read_evidence
from fedskew.arena._run import _RUN, FIGURES, train
from fedskew.errors import ConfigError, RunError
from fedskew.executors import Processes, executor
from fedskew.experiment import Sweep, _simulate, make_task, make_training_loop, resolve, run_sweep, simulate_together

ROOT = Path(__file__).parents[2]
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
        self.begun, self.finished, self.runs = finished, finished, runs

    def ended(self, results, runs: int) -> None:
        assert not any(trained.failed for _, trained in results)
        self.finished += runs
        self.jobs += [f"{job.entry.method} {job.stage}" for job, _ in results]


def run(tmp_path: Path, text: str, **more: object) -> tuple[ArenaState, Heard]:
    (tmp_path / "tiny.toml").write_text(text)
    arena, heard = Arena.read(tmp_path / "tiny.toml", **more), Heard()
    with ThreadPoolExecutor(1) as pool:  # any executor will do
        return run_arena(arena, tmp_path / "runs", pool, 1, heard), heard


def read(tmp_path: Path, runs: str, text: str = FILE) -> ArenaState:
    """The state of an arena with this text in `runs.csv`; nothing is trained."""
    (tmp_path / "tiny.toml").write_text(text)
    folder = tmp_path / "runs" / "arena-tiny"
    folder.mkdir(parents=True)
    (folder / "runs.csv").write_text(runs)
    return ArenaState.read(Arena.read(tmp_path / "tiny.toml"), tmp_path / "runs")


def setting(seed: int = 0, **data: float) -> dict[str, Any]:
    """The task of FILE, for `simulate`."""
    partition = {"rule": "quantity", "clients": 10, "labels_per_client": 2, "seed": seed}
    return {"data": {"name": "digits", **data}, "partition": partition, "model": "logistic"}


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
    method, data = {"preset": "fedla", "personal": "prior"}, {"rows": 300, "client_test": 0.3, "held_out": 0.3}
    result = simulate(**setting(**data), method=method, training={"rounds": 2, "batch_size": 32}, progress=False)
    for row in ("common", "personal"):
        accuracy = fmean(one["accuracy"] for one in result.sites() if one["row"] == row)
        assert float(line[row]) == pytest.approx(accuracy, abs=1e-5)
    write_comparison(state, tmp_path / "runs")
    page = (tmp_path / "runs" / "arena-tiny" / "table.md").read_text()
    assert "## Personal models" in page
    assert "## The common model at the clients" in page
    assert len(ArenaState.read(state.arena, tmp_path / "runs").runs) == 4


def test_clients_that_train_alone_are_one_row_of_their_mean(tmp_path) -> None:
    text = FILE.replace("training.participation = [0.4, 1.0]", "training.epochs = [2]").replace(', "fedla"]', "]")
    own = '{label = "alone", preset = "fedavg", set = {partition.baseline = "alone", training.lr = 0.2}}'
    text = text.replace("rates = [0.1, 1.0]\nbudget = 3\n", "").replace('"fedavg"]', f'"fedavg", {own}]')
    row = run(tmp_path, text)[0].compared[-1]
    task, training = setting(rows=300, validation=0.3), {"rounds": 2, "batch_size": 32, "epochs": 2, "lr": 0.2}
    task["partition"] |= {"baseline": "alone"}
    each = simulate(**task, training=training, seeds=list(range(10, 20)), progress=False)  # the ten clients, seed 1
    score = fmean(one.rounds[-1].evaluation.accuracy for one in each.runs)
    assert (row["method"], row["seed"], float(row["score"])) == ("alone", "1", pytest.approx(score, abs=2e-5))
    assert int(row["steps"]) == sum(sum(record["steps"]) for record in each.rounds)


def test_scores_that_nobody_reads_are_not_computed_and_change_no_row(monkeypatch) -> None:
    task = setting(rows=300, validation=0.3) | {"training": {"rounds": 12, "lr": 10.0}, "seeds": [1]}
    task |= {"engine": {"backend": "cohort", "seeds_together": True}}
    trees = [task | {"evaluation": {"patience": 1, "measure": measure}} for measure in ("accuracy", "auroc")]
    results = simulate_together([resolve(tree) for tree in trees])
    assert [result.runs[0].rounds[-1].evaluation.auroc is None for result in results] == [True, False]
    rows = [own.rows for (own,) in train([(tree, [tree]) for tree in trees], last=2)]
    scored = partial(make_training_loop, ranks=True)
    monkeypatch.setattr(_simulate, "make_training_loop", lambda config, seed, ranks: scored(config, seed))
    with_scores = [own.rows for (own,) in train([(tree, [tree]) for tree in trees], last=2)]
    assert [own[1] | {"seconds": ""} for own in rows] == [own[1] | {"seconds": ""} for own in with_scores]
    assert rows[0][1]["curve"].count(" ") < 11  # it stopped early


def test_a_federation_says_its_local_steps_and_compares_them_as_epochs() -> None:
    task = setting(rows=300, validation=0.3)
    task |= {"training": {"rounds": 1, "steps": 6, "batch_size": 8}}
    [[found]] = train([(task, [task])], last=1)
    samples = make_task(resolve(task), 0).sizes
    assert "steps 6" in found.federation["federation"]
    assert float(found.federation["epochs_log"]) == pytest.approx(math.log(6 * 8 / np.mean(samples)), rel=1e-5)


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
    assert heard.begun == 9
    assert heard.finished == 20
    assert sorted(heard.jobs) == sorted(["fedavg run", *[*["fedla tune"] * 3, "fedla run"] * 2])
    assert (len(state.runs), state.number) == (20, 20)
    same = [{**line, "seconds": ""} for line in lines(tmp_path) if line["method"] == "fedavg"]
    assert {tuple(line.values()) for line in same} == {tuple({**line, "seconds": ""}.values()) for line in before}

    state, heard = run(tmp_path, FILE)
    assert heard.jobs == []

    # a line is what fedskew run gives with the values that were chosen
    line = next(line for line in lines(tmp_path) if line["stage"] == "run" and line["method"] == "fedla")
    own = setting(int(line["partition"]), rows=300, validation=0.3)
    training = {"rounds": 2, "batch_size": 32, **{key: float(line[key]) for key in ("lr", "participation")}}
    result = simulate(**own, method="fedla", training=training, seeds=[int(line["seed"])], progress=False)
    assert float(line["score"]) == pytest.approx(result.summary["final"]["accuracy"], abs=2e-5)
    assert line["curve"].split()[-1] == f"{1e4 * float(line['score']):.0f}"
    assert int(line["steps"]) == sum(sum(record["steps"]) for record in result.rounds)

    # and what all of them say is written
    files = write_comparison(state, tmp_path / "runs")
    assert {file.name for file in files} == {
        *("table.md", "standings.csv", "choices.csv", "evidence.csv.gz", "differences.png")
    }
    page = (tmp_path / "runs" / "arena-tiny" / "table.md").read_text()
    assert "fedskew arena" in page
    assert "20 of 20 runs done" in page
    again = runpy.run_path(str(ROOT / "tools" / "recompute_arena.py"))
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("other,method\nx,fedavg\n", "belongs to an arena with other columns than participation,method"),
        ("0.4,fedavg,tune,0\n", "its header is missing, a first line that begins with participation,method,stage"),
    ],
)
def test_runs_of_another_arena_or_without_a_header_are_refused(tmp_path, text: str, says: str) -> None:
    with pytest.raises(RunError, match=f"runs.csv: {says}"):
        read(tmp_path, text)


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

    def ended(self, results, runs: int) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), [("arena", None), ("heads", "task"), ("words", "task")])
def test_what_is_published_is_what_another_program_makes_of_the_runs(name, blocks) -> None:
    again = runpy.run_path(str(ROOT / "tools" / "recompute_arena.py"))
    with (ROOT / "docs" / "measured" / f"{name}-runs.csv").open(newline="", encoding="utf-8") as file:
        table = again["Table"]([line for line in csv.DictReader(file) if not line["failure"]], 3, blocks, "fedavg")
    keys = {tuple(line[axis] for axis in table.axes) for line in table.runs}
    trainings = {key: key[:-1] if table.axes[-1] == "target" else key for key in keys}
    for view in again["VIEWS"]:
        rows = Scores.of(table.runs, table.axes, "fedavg", view, 3, trainings, blocks).standings("fedavg")
        theirs = table.standings(view)
        assert {row.method for row in rows} == theirs.keys()
        for row in rows:
            exact = row.trainings, row.federations, row.score, row.difference, row.median, row.p
            shares = 100 * row.ahead, 100 * row.harmed
            *first, interval, median, p, ahead, harmed, collapsed = theirs[row.method]
            assert (*exact, *shares) == pytest.approx((*first, median, p, ahead, harmed), nan_ok=True, abs=1e-6)
            assert f"{row.collapsed} of {row.runs}" == collapsed
            near = max(0.2, 0.1 * (row.high - row.low))
            assert (row.low, row.high) == pytest.approx(interval, nan_ok=True, abs=near)


@pytest.mark.slow
def test_the_page_s_tables_are_those_of_the_published_runs() -> None:
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "tools" / "compared_methods.py"))["with_tables"](page) == page


@pytest.mark.slow
def test_the_evidence_that_ships_is_of_the_published_runs(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    tools = {name: runpy.run_path(str(ROOT / "tools" / f"{name}.py")) for name in ("publish_arena", "compared_methods")}
    gains: list[float] = []
    for name in tools["publish_arena"]["EVIDENCE"]:
        axes, every = tools["compared_methods"]["published"](name)
        lines = [line for line in every if line["stage"] != "tune"]
        scores = Scores.of(lines, axes, "fedavg", last=tools["compared_methods"]["LAST"].get(name, 3))
        for method in scores.values.keys() - {"fedavg", "pooled", "alone"}:
            gains += scores.gains(method).values()
    shipped = [gain for own in read_evidence().gains.values() for gain in own if np.isfinite(gain)]
    assert sorted(shipped) == pytest.approx(sorted(gains), abs=1e-3)


def test_targets_are_views_of_one_training(tmp_path) -> None:
    mix = [0.02] * 5 + [0.18] * 5
    targets = f'target = [{{label = "none"}}, {{label = "9:1", mix = {mix}}}]'
    text = FILE.replace("training.participation = [0.4, 1.0]", targets).replace('"fedla"]', '"fedpals"]')
    text = text.replace("budget = 3", "budget = 2")
    before = read(tmp_path, "", text)
    assert (before.number, [runs for _, runs in before.missing]) == (16, [4, 4, 4])  # FedAvg's two are one training
    state, heard = run(tmp_path, text)
    assert (heard.finished, heard.runs, state.number, len(state.runs)) == (16, 16, 14, 14)  # two are not needed
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


def test_lines_of_views_that_nobody_asks_for_are_not_counted(tmp_path) -> None:
    targets = f'target = [{{label = "none"}}, {{label = "one", mix = {[0] * 8 + [1, 0]}}}]'
    text = FILE.replace("training.participation = [0.4, 1.0]", targets).replace(', "fedla"]', "]")
    state, heard = run(tmp_path, text)
    assert len({line["lr"] for line in state.compared}) == 2  # each target has its own rate, and lines of the other's
    assert heard.finished == state.number == len(state.runs) == 2 * (3 + 2) < len(lines(tmp_path))


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
    ).replace("budget = 3", "budget = 4\nwiden = true")
    state, _ = run(tmp_path, text)
    assert {line["target"] for line in state.compared} == {"none"}
    refused = [line for line in lines(tmp_path) if line["target"] == "x"]
    assert all("target.mix" in line["failure"] for line in refused)
    # it has no score that could choose a value, so its plan ends with the rates, and trains none of its own
    asked = {line["config"] for line in state.runs}
    assert {line["config"] for line in lines(tmp_path) if line["target"] == "none"} <= asked


@pytest.mark.slow
def test_a_process_that_is_being_started_ends_with_its_executor() -> None:
    pool = Processes(1)
    pool.submit(os.getpid)
    end = Thread(target=pool.shutdown, kwargs={"wait": False}, daemon=True)
    end.start()
    end.join(30)
    assert not end.is_alive()


@pytest.mark.parametrize(
    ("said", "cells"),
    [
        ("its stage can't be 'runn'", {"stage": "runn"}),
        ("its seed can't be 'x'", {"seed": "x"}),
        ("its validation can't be '0.1?'", {"validation": "0.1?"}),
        ("its curve can't be '100 2OO'", {"curve": "100 2OO"}),
        ("it has too few or too many cells", {"made": "a,b"}),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(tmp_path, said: str, cells: dict[str, str]) -> None:
    line = {"participation": "0.4", "method": "fedavg", "stage": "run", "partition": "0", "seed": "0", "lr": "1e-05"}
    line = dict.fromkeys([*line, "own", "config", *FIGURES], "") | line
    rows = [line, *(row.values() for row in (line, line, line | cells))]
    with pytest.raises(RunError, match=rf"runs\.csv, line 4: {re.escape(said)}; mend it, or move the file away"):
        read(tmp_path, "".join(",".join(row) + "\n" for row in rows))


def test_who_only_reads_leaves_a_line_that_is_being_written(tmp_path) -> None:
    text = "\ufeff" + ",".join(["participation", "method", *_RUN, *FIGURES]) + "\n0.4,fedavg,run,0,0,0."
    assert read(tmp_path, text).runs == ()  # with the mark that Excel writes in front
    assert (tmp_path / "runs" / "arena-tiny" / "runs.csv").read_text() == text


def test_a_rate_without_end_is_refused(tmp_path) -> None:
    (tmp_path / "tiny.toml").write_text(FILE.replace("1.0]\nbudget", "inf]\nbudget"))
    with pytest.raises(ConfigError, match=r"arena\.rates"):
        Arena.read(tmp_path / "tiny.toml")


def test_an_axis_with_the_name_of_a_column_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"the axis 'steps' has the name of a column of runs\.csv"):
        read(tmp_path, "", FILE + "training.steps = [2, 3]\n")
