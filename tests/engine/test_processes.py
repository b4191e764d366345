"""A cohort in several processes: the bits of one client after another, and no process left behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from federates import SIZES, network, work_of
from torch import Tensor, nn

import fedskew
from common import bits, built, task
from fedskew.engine import Assignment, ProcessBackend, Sent, SequentialBackend, predict
from fedskew.engine.workers import _work
from fedskew.errors import ArgumentError, ConfigError, RunError
from fedskew.executors import _serve
from fedskew.models import FlatModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="memory is shared by file descriptors"),
]

TASK = task(8, beta=0.3, width=16, rounds=3, participation=0.6, epochs=2, batch_size=32, lr=0.05, momentum=0.5) | {
    "name": "task",
    "conditions": {"stragglers": 0.5, "dropout": 0.2},
}
EVERYTHING_KEPT_AND_SENT = {
    "selection": {"name": "seol_kim"},
    "objective": {
        "name": "fedvls_calibration",
        "terms": [{"name": "moon"}, {"name": "fpl"}, {"name": "vacant_distillation"}],
    },
    "local_step": {"name": "scaffold"},
}
"""Quotas by client, a teacher, a previous model, states of two components, replies of two, prototypes for everybody."""


def tree(processes: int | None = None, **tables) -> dict:
    engine = {"backend": "sequential"} if processes is None else {"backend": "processes", "processes": processes}
    return {**TASK, **tables, "engine": engine}


@pytest.mark.parametrize(
    ("processes", "tables"),
    [
        (1, {"method": {"pipeline": {"name": "fedconcat", "clusters": 2}}}),
        (2, {"method": {"local_step": {"name": "fedgf"}}, "training": TASK["training"] | {"keep_optimizer": True}}),
        (3, {"method": EVERYTHING_KEPT_AND_SENT, "evaluation": {"clients": True, "every": 2}}),
    ],
    ids=["one with FedConcat", "two with FedGF", "three with everything"],
)
def test_any_number_of_processes_gives_the_bits_of_one_client_after_another(processes, tables):
    assert bits(fedskew.simulate(tree(processes, **tables))) == bits(fedskew.simulate(tree(**tables)))


def test_the_number_of_processes_is_no_part_of_a_runs_name(tmp_path):
    names = {fedskew.experiment.resolve(tree(processes)).folder(tmp_path) for processes in (None, 1, 7)}
    assert len(names) == 1


class Fragile(nn.Module):
    """A linear model that ends a process that trains it, as the kernel does for want of memory, while a file exists."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], flag: str) -> None:
        super().__init__()
        self.layer = nn.Linear(int(np.prod(in_shape)), num_classes)
        self.passes, self.flag = 0, Path(flag)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1  # so that its graph can't be read, and this function is called in every step
        if multiprocessing.parent_process() is not None and self.flag.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x.flatten(1))


def test_a_run_whose_process_is_killed_says_so_and_goes_on_with_another_number_from_its_checkpoint(tmp_path):
    flag = tmp_path / "flag"
    model = {"name": f"{__name__}:Fragile", "flag": str(flag)}

    def lift(record):
        if record["round"] == 1:
            flag.touch()

    ended = r"round 2, client \d: the process that trained it ended early \(SIGKILL, perhaps"
    with pytest.raises(RunError, match=ended):
        fedskew.simulate(tree(2, model=model), out=tmp_path, progress=lift)
    assert not multiprocessing.active_children()
    flag.unlink()
    resumed = fedskew.simulate(tree(1, model=model), out=tmp_path, resume=True)
    assert bits(resumed) == bits(fedskew.simulate(tree(model=model)))


def backend(terms=None, observe=None, processes: int = 1) -> tuple[ProcessBackend, SequentialBackend, Sent]:
    model, work = FlatModel(network()), work_of(built(), terms=terms)
    alone = SequentialBackend(model, work, observe)
    return ProcessBackend(model, work, processes, observe), alone, Sent(model.read_state())


def process_and_threads(round: int, client: int, module: nn.Module) -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def test_processes_and_the_one_that_waits_for_them_predict_with_the_bits_of_one():
    several, alone, sent = backend(processes=2)
    x = torch.randn(4_500, 5, generator=torch.Generator().manual_seed(1))
    y = torch.arange(4_500) % 4
    try:
        found = several.predict(sent.model, x, y, 4)
        assert several.predict(sent.model, x[:1000], y[:1000], 4) is None  # no work for several
    finally:
        several.close()
    one = predict(alone.model.network, x, y, 4)
    assert found is not None
    assert found.confusion.tolist() == one.confusion.tolist()
    assert found.loss == one.loss
    assert np.array_equal(found.logits, one.logits)


def test_a_cohort_is_dealt_out_over_processes_that_compute_with_as_many_threads_as_this_one():
    several, alone, sent = backend(observe=process_and_threads, processes=2)
    cohort = [Assignment(client, 100, samples=SIZES[client]) for client in (0, 2, 4, 0)]
    try:
        updates = several.train(1, cohort, sent)
        assert [update.client for update in updates] == [0, 2, 4, 0]
        for one, other in zip(updates, alone.train(1, cohort, sent), strict=True):
            assert torch.equal(one.change, other.change)
        ids, threads = zip(*(update.observed for update in updates), strict=True)
        assert len(set(ids)) == 2
        assert os.getpid() not in ids
        assert set(threads) == {torch.get_num_threads()}
        held = [update.change.clone() for update in updates]
        several.train(2, cohort, sent)  # while the updates of the round before are held
        assert all(torch.equal(update.change, before) for update, before in zip(updates, held, strict=True))
        assert several.train(1, [], sent) == []
    finally:
        several.close()
    assert not multiprocessing.active_children()


def test_a_call_that_is_left_in_the_middle_leaves_nothing_to_the_next():
    several, alone, sent = backend(processes=2)
    cohort = [Assignment(client, 3) for client in (3, 1, 4)]
    left = several.train_each(1, [Assignment(client, 50) for client in (0, 2, 4, 1, 3, 0)], sent)
    try:
        assert next(left).client == 0
        updates = several.train(2, cohort, sent)
        for one, other in zip(updates, alone.train(2, cohort, sent), strict=True):
            assert one.client == other.client
            assert torch.equal(one.change, other.change)
    finally:
        several.close()


class Broken:
    """A term with a mistake in it."""

    reads = frozenset()

    def value(self, batch, context):
        return batch.logits.sum() + [][1]


def refused(message: str, several: ProcessBackend, sent: Sent) -> RunError:
    with pytest.raises(RunError, match=message) as error:
        several.train(1, [Assignment(0, 1)], sent)
    assert not multiprocessing.active_children()
    return error.value


def test_a_mistake_in_a_users_own_code_is_the_error_that_it_is_elsewhere_with_its_traceback():
    several, alone, sent = backend(((1.0, Broken()),))
    with pytest.raises(RunError, match=r"client 0, step 0 .*IndexError: .* \(test_processes.py, line \d+\)") as here:
        alone.train(1, [Assignment(0, 1)], sent)
    there = refused("IndexError", several, sent)
    assert str(there) == str(here.value)
    assert "return batch.logits.sum() + [][1]" in str(there.__cause__)


def test_what_cannot_be_sent_and_too_little_shared_memory_are_said_with_what_to_do(monkeypatch):
    several, _, sent = backend(observe=lambda round, client, module: None)
    refused(r"engine.backend: .*at the top level of a module, or use the backend 'seq", several, sent)

    def full(self):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch>: No space left on device (28)")

    several, _, sent = backend()
    monkeypatch.setattr(Tensor, "share_memory_", full)
    refused(r"engine.backend: /dev/shm is too small .*--shm-size", several, sent)

    def used_up(self):
        raise RuntimeError("unable to open shared memory object </torch> in read-write mode: Too many open files (24)")

    several, _, sent = backend()
    monkeypatch.setattr(Tensor, "share_memory_", used_up)
    refused(r"engine.backend: too many files are open; allow more, as by: ulimit -n", several, sent)


def test_a_process_whose_parent_was_killed_says_nothing():
    signals = signal.getsignal(signal.SIGINT)
    for target, arguments, job in ((_work, (torch.get_num_threads(),), (None, None)), (_serve, (), (len, ([],), {}))):
        parent = Mock()
        parent.recv.side_effect = [job, EOFError]
        parent.send.side_effect = BrokenPipeError
        target(parent, *arguments)
        parent.send.assert_called_once()
    signal.signal(signal.SIGINT, signals)


def test_a_script_without_a_guard_is_told_of_it(tmp_path):
    settings = "partition={'rule': 'iid', 'clients': 2}, model='logistic', method='fedavg', training={'rounds': 1}"
    script = tmp_path / "script.py"
    script.write_text(
        f"import fedskew\nfedskew.simulate(data='digits', {settings}, engine={{'backend': 'processes'}})\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert 'exit status 1; put what trains below `if __name__ == "__main__":`' in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each process loads what it needs")
@pytest.mark.parametrize(
    ("called", "by_server"), [("fedskew.models import has_kernels", True), ("loads import has_kernels", False)]
)
def test_what_of_ours_an_executor_calls_is_loaded_once_for_all_its_processes(called, by_server, tmp_path):
    (tmp_path / "loads.py").write_text("import torch\n\n\ndef has_kernels():\n    return torch.ones(2).sum() == 2\n")
    said = "from multiprocessing.forkserver import _forkserver\nfrom pathlib import Path\n"
    said += f"from fedskew.executors import executor\nfrom {called}\nwith executor(1) as (pool, _):\n"
    said += "    pool.submit(has_kernels).result()\n"
    said += "    loaded = Path(f'/proc/{_forkserver._forkserver_pid}/maps').read_text()\n"
    said += f"    assert ('libtorch' in loaded) == {by_server}"
    done = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_senseless_numbers_of_processes_are_refused():
    with pytest.raises(ArgumentError, match="processes: must be at least 1, not 0"):
        backend(processes=0)
    with pytest.raises(ConfigError, match="engine.processes"):
        fedskew.experiment.resolve(tree(0))


@contextmanager
def started(
    folder: Path, rounds: int, *words: str, more: int = 0
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """`fedskew run` over two processes, in a group of its own as in a terminal, some rounds on, and its children.

    `more` lines of `rounds.jsonl` are there before.
    """
    (folder / "task.toml").write_text(
        f"""
        schema = 1
        data.name = "digits"
        partition = {{rule = "quantity", clients = 10, labels_per_client = 2}}
        model.name = "mlp3"
        training = {{rounds = {rounds}, participation = 0.2}}
        engine = {{backend = "processes", processes = 2}}
        """
    )
    command = [sys.executable, "-m", "fedskew", "run", "task.toml", *words]
    run = subprocess.Popen(
        command, cwd=folder, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        _wait_until(lambda: any(len(_lines(path)) > more + 2 for path in folder.glob("runs/*/rounds.jsonl")))
        family = psutil.Process(run.pid).children(recursive=True)
        assert len(family) >= 2
        yield run, family
        _wait_until(lambda: not any(map(_is_running, family)))
    finally:
        run.kill()
        run.communicate()


@pytest.mark.faults
def test_no_process_outlives_its_run(tmp_path):
    with started(tmp_path, 100_000) as (run, _):
        run.kill()


@pytest.mark.faults
def test_control_c_ends_all_processes_after_a_checkpoint_and_resume_goes_on(tmp_path):
    with started(tmp_path, 100_000) as (run, _):
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does it
        said, _ = run.communicate(timeout=30)
    assert run.returncode == 130
    assert "stopped; continue with --resume" in said
    assert "Traceback" not in said
    (records,) = tmp_path.glob("runs/*/rounds.jsonl")
    played = len(_lines(records))
    # The command goes on from there, until it is stopped once more: no machine is so fast that the run has ended.
    with started(tmp_path, 100_000, "--resume", more=played) as (run, _):
        os.killpg(run.pid, signal.SIGINT)
        said, _ = run.communicate(timeout=30)
    assert run.returncode == 130
    assert "Traceback" not in said
    assert [json.loads(line)["round"] for line in _lines(records)] == list(range(len(_lines(records))))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)
