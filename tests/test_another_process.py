"""What only another process shows: what it was killed at, and its hashes of strings.

One process, with hashes of its own, imports PyTorch, and runs each script in a fork of it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fedskew
from common import records_of

pytestmark = [pytest.mark.slow, pytest.mark.first]
FORKS = """
import json, os, sys
import scipy.optimize, torch
import fedskew
from fedskew import engine, experiment, methods
fedskew.simulate, engine.RoundRunner, methods.check  # imported here once, not in every child
for line in sys.stdin:
    script, out, words = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        exec(compile(script, "script", "exec"), {"__name__": "__main__", "words": words})
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[int, str]]]:
    """Run a script with these `words` in another process; return how it ended, and what it printed."""
    out = tmp_path_factory.mktemp("elsewhere") / "out"
    command, environment = [sys.executable, "-c", FORKS], os.environ | {"PYTHONHASHSEED": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes) as process:

        def run(script: str, *words: object) -> tuple[int, str]:
            process.stdin.write(json.dumps([script, str(out), list(map(str, words))]) + "\n")
            return int(process.stdout.readline()), out.read_text()

        yield run


DIES = """
import os, signal
from pathlib import Path
import torch
import fedskew
config, out, moment, round = words
round = int(round)
def killed():
    os.kill(os.getpid(), signal.SIGKILL)
last, replace = [-1], Path.replace
def after_a_record(record):
    last[0] = record["round"]
    if moment == "between its record and its checkpoint" and last[0] >= round:
        killed()
def in_training(module, inputs):
    if module.training and last[0] >= round:
        killed()
def before_a_rename(path, target):
    if Path(target).name == "state.safetensors" and last[0] >= round:
        if moment == "after the checkpoint":
            replace(path, target)
        killed()
    return replace(path, target)
if moment == "inside the round":
    torch.nn.modules.module.register_module_forward_pre_hook(in_training)
elif "the checkpoint" in moment:
    Path.replace = before_a_rename
fedskew.simulate(config, out=out, resume=True, progress=after_a_record)
"""
MOMENTS = [
    "inside the round",
    "while the checkpoint is written",
    "between its record and its checkpoint",
    "after the checkpoint",
]


def test_a_run_killed_in_every_part_of_a_round_ends_with_the_same_bytes(elsewhere, tmp_path):
    config = Path(__file__).parent / "experiment" / "killed.toml"
    whole = fedskew.simulate(config, out=tmp_path / "whole")
    folder = tmp_path / "killed" / whole.folder.name
    for at, moment in enumerate(MOMENTS, 1):
        assert elsewhere(DIES, config, tmp_path / "killed", moment, 2 * at)[0] == -9, moment
    assert 8 < len((folder / "rounds.jsonl").read_text().splitlines()) < 13
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"seed": 0, "rou')  # a kill while a record is written
    fedskew.simulate(config, out=tmp_path / "killed", resume=True)
    assert records_of(folder) == records_of(whole.folder)
    for file in ("model.safetensors", "best.safetensors", "partition.npz"):
        assert (folder / file).read_bytes() == (whole.folder / file).read_bytes()


MADE = """
from fedskew.experiment import resolve
class Of:
    def __init__(self, *names): self.names = set(names)
names = {"pear", "apple", "fig", "plum"}
made = Of("kiwi", "lime", "date")
task = {"data": {"name": "digits"}, "partition": {"rule": "iid", "clients": 2}, "training": {"rounds": 1}}
print(resolve(task | {"model": (lambda names, made: lambda: (names, made, "x" in {"u", "v", "w"}))(names, made)}).hash)
"""


def test_the_name_of_a_closure_is_the_same_in_every_process(elsewhere, capsys):
    exec(compile(MADE, "<string>", "exec"), {"__name__": "__main__"})
    assert elsewhere(MADE) == (0, capsys.readouterr().out)
