"""Run folders that are damaged at random, and runs that are killed at random: one line or the true numbers, no third.

Each seed is one case, so that a failure is repeated by its name. `make test-fuzz FUZZ=500` has more of them.
"""

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

import fedskew
from common import records_of, task
from fedskew.errors import FedskewError
from fedskew.experiment import RunFolder

pytestmark = pytest.mark.fuzz
SEEDS = range(int(os.environ.get("FUZZ", "40")))

TASK = task(5, beta=0.5, rounds=6, participation=0.6, batch_size=32, lr=0.1, momentum=0.5) | {
    "name": "fuzzed",
    "data": {"name": "digits", "validation": 0.1},
    "method": "scaffold+fedentopt",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedskew.simulate(TASK, out=tmp_path_factory.mktemp("finished")).folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, interrupt_after: Callable[..., Path]) -> Path:
    return interrupt_after(3, TASK, tmp_path_factory.mktemp("interrupted"))


def damage(folder: Path, rng: random.Random) -> str:
    """Change one file at random; return what was done."""
    # Names in task.json, and the page, are not looked at again: they hold no figure that a run goes on from.
    files = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in ("report.html", "task.json")
    ]
    path, content = (chosen := rng.choice(files)), bytearray(chosen.read_bytes())
    at = rng.randrange(len(content) + 1)
    how = rng.choice(["delete", "empty", "cut", "flip", "insert", "drop", "repeat", "exchange", "line"])
    if how == "delete":
        path.unlink()
        return f"delete {path.name}"
    if how == "empty":
        content.clear()
    elif how == "cut":
        del content[at:]
    elif how == "flip" and content:
        content[min(at, len(content) - 1)] ^= 1 << rng.randrange(8)
    elif how == "insert":
        content[at:at] = rng.randbytes(rng.randrange(1, 50))
    elif how == "drop":
        del content[at : at + rng.randrange(1, 200)]
    elif how == "repeat":
        content[at:at] = content[at : at + rng.randrange(1, 500)]
    elif how == "exchange":
        content[:] = rng.choice(files).read_bytes()
    elif how == "line":
        lines = content.splitlines(keepends=True)
        rng.shuffle(lines)
        content[:] = b"".join(lines)
    path.write_bytes(content)
    return f"{how} {path.relative_to(folder)} at {at}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["finished", "interrupted"])
def test_a_damaged_folder_is_one_line_or_the_true_numbers(tmp_path, request, finished, kind, seed):
    rng = random.Random(f"{kind} {seed}")
    given = request.getfixturevalue(kind)
    folder = shutil.copytree(given, tmp_path / given.name)
    done = [damage(folder, rng) for _ in range(rng.choice([1, 1, 2]))]
    truth, whole = RunFolder.read_runs(finished)[0], load_file(finished / "model.safetensors")
    said = ""
    try:
        (read,) = RunFolder.read_runs(folder)
        assert [one.evaluation for one in read.rounds] == [
            one.evaluation for one in truth.rounds[: len(read.rounds)]
        ], done
        if read.summary:
            assert read.summary["final"]["accuracy"] == truth.summary["final"]["accuracy"], done
    except FedskewError as error:
        said = str(error)
    assert "\n" not in said, done
    try:
        result = fedskew.simulate(TASK, out=tmp_path, resume=True)
    except FedskewError as error:
        said = str(error)
    else:
        assert records_of(folder) == records_of(finished), done
        assert all(value.equal(whole[name]) for name, value in result.model.state_dict().items()), done
        assert (folder / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes(), done
    assert "\n" not in said, done


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("seed", SEEDS[: len(SEEDS) // 4])
def test_a_run_that_is_killed_or_out_of_space_at_any_time_ends_with_the_same_bytes(tmp_path, finished, seed):
    rng = random.Random(f"kill {seed}")
    begin = time.monotonic()
    fedskew.simulate(TASK, out=tmp_path / "timed")
    whole = time.monotonic() - begin
    for _ in range(rng.randrange(2, 8)):
        child = os.fork()
        if not child:
            if rng.random() < 0.3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(100, 20_000),) * 2)
            try:
                fedskew.simulate(TASK, out=tmp_path, resume=True)
            except FedskewError as error:
                os._exit(0 if "can't be written" in str(error) else 1)
            os._exit(0)
        rng.random()  # as the child has drawn
        time.sleep(rng.uniform(0, whole))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    folder = fedskew.simulate(TASK, out=tmp_path, resume=True).folder
    assert records_of(folder) == records_of(finished)
    for file in ("model.safetensors", "best.safetensors", "partition.npz"):
        assert (folder / file).read_bytes() == (finished / file).read_bytes()
