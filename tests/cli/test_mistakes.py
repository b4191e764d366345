"""Sixty realistic mistakes, each answered by one line that says what is wrong and what to do: no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Command

CONFIG = """\
name = "my"
[data]
name = "digits"
[partition]
rule = "dirichlet_by_class"
clients = 10
beta = 0.3
[model]
name = "logistic"
[training]
rounds = 1
"""

OWN = """\
from dataclasses import dataclass

from torch import nn

from fedskew.local_steps import SGD


@dataclass(frozen=True)
class Still:
    def init(self, settings):
        return None

    def step(self, parameters, gradient, carried, settings):
        return parameters, carried


@dataclass(frozen=True)
class Odd(Still):
    def init(self, settings):
        return ()


@dataclass(frozen=True)
class Half:
    def weigh(self, answered):
        return answered.sizes[:1]


class Plain:
    def weigh(self, answered):
        return answered.sizes


class Narrow(nn.Linear):
    def __init__(self, num_classes, in_shape):
        super().__init__(7, num_classes)


def nothing(root=None):
    return None
"""

TABLE = "lab_0,lab_1,lab_9\n1,2,3\n4,5,6\n"

SETS = [  # a changed key of the config, and words of the answer
    ("training.rounds=-1", ["training.rounds", "greater than or equal to 0"]),
    ("training.rounds=many", ["training.rounds", "valid integer", "'many'"]),
    ("training.round=5", ["training.round", "no such key", "'rounds'"]),
    ("training.lr=0", ["training.lr", "greater than 0"]),
    ("training.lr=-0.1", ["training.lr", "greater than 0"]),
    ("training.learning_rate=0.1", ["training.learning_rate", "no such key"]),
    ("training.participation=2", ["training.participation", "less than or equal to 1"]),
    ("training.participation=0", ["training.participation", "greater than 0"]),
    ("training.batch_size=0", ["training.batch_size", "greater than or equal to 1"]),
    ("training.momentum=1", ["training.momentum", "less than 1"]),
    ("training.epochs=-1", ["training.epochs", "greater than or equal to 0"]),
    ("training.augmentation=flip", ["training.augmentation", "unknown name 'flip'"]),
    ("trainig.rounds=5", ["trainig", "no such key", "'training'"]),
    ("data.name=digit", ["data.name", "unknown name 'digit'", "'digits'"]),
    ("data.name=mnist", ["'mnist'", "FEDSKEW_DATA"]),
    ("data.test_file=x.csv", ["data.test_file", "'digits' has no such option"]),
    ("data.validation=1.5", ["data.validation", "less than 1"]),
    ("data.rows=0", ["data.rows", "greater than or equal to 1"]),
    ("partition.rule=dirichlet", ["partition.rule", "unknown name 'dirichlet'", "did you mean"]),
    ("partition.rule=own:Plain", ["partition.rule", "no component", "dataclass"]),
    ("partition.rule=natural", ["partition", "natural"]),
    ("partition.beta=0", ["partition.beta", "greater than 0"]),
    ("partition.alpha=0.3", ["partition.alpha", "no such parameter"]),
    ("partition.clients=0", ["partition.clients", "greater than or equal to 1"]),
    ("partition.clients=5000", ["5,000 clients", "min_size"]),
    ("model.name=resnet", ["model.name", "unknown name 'resnet'", "did you mean"]),
    ("model.name=own:Missing", ["model.name", "can't be imported", "Missing"]),
    ("model.name=absent:Net", ["model.name", "can't be imported", "absent"]),
    ("model.name=own:Narrow", ["model.name", "fails on samples"]),
    ("model.name=fasttext", ["model", "texts"]),
    ("model.width=100", ["model.width", "no such option"]),
    ("method.preset=fedag", ["method.preset", "'fedag'", "'fedavg'"]),
    ("method.preset=fedpals", ["FedPALS", "set [target] mix"]),
    ("method.preset=fedentopt", ["method.selection.buffer", "training.participation"]),
    ("method.preset=fedlc+fedrs", ["fedlc", "fedrs"]),
    ("method.weighting.name=own:Plain", ["method.weighting", "dataclass"]),
    ("method.weighting.name=own:Half", ["weighting own:Half", "one weight for each of the 10 clients"]),
    ("method.weighting.name=own:Still", ["method.weighting", "Still", "no weigh()"]),
    ("method.local_step.name=own:Still", ["Still.step() never called gradient(parameters)"]),
    ("method.local_step.name=own:Odd", ["Odd", "init() must return"]),
    ("method.local_step=sdg", ["method.local_step.name", "'sdg'", "'sgd'"]),
    ("target.mix=[1,2]", ["target.mix", "10"]),
    ("target.mix=even", ["target.mix", "'uniform'"]),
    ("evaluation.patience=3", ["evaluation.patience", "data.validation"]),
    ("engine.device=gpu", ["engine.device", "'gpu'"]),
    ("engine.backend=threads", ["engine.backend", "'sequential'"]),
    ("engine.seeds_together=true", ["engine.seeds_together", "cohort"]),
    ('output.trackers=["wand"]', ["output.trackers", "'wand'"]),
    ("seeds=[0,0]", ["seeds", "twice"]),
    ("training.rounds", ["--set 'training.rounds'", "key=value"]),
]

COMMANDS = [  # a command, and words of the answer
    ("run missing.toml", ["missing.toml", "No such file"]),
    ("run table.csv", ["table.csv"]),
    ("run my.toml --seeds a,b", ["--seeds 'a,b'", "whole numbers"]),
    ("run my.toml --method fedavg --method fedentopt", ["'my-fedentopt'", "training.participation"]),
    ("run @nothing", ["nothing", "no config of this name"]),
    ("run my.toml --device tpu", ["engine.device", "tpu"]),
    ("run my.toml --set data.name=mnist --data-root nowhere", ["nowhere"]),
    ("report runs", ["runs", "not a run folder"]),
    ("report x=my.toml", ["not a run folder"]),
    ("predict runs/none table.csv", ["runs/none"]),
    ("new my.toml", ["my.toml", "--force"]),
    ("new b.toml --data csv --root table.csv", ["no column 'label'", "data.label", "lab_0, lab_1, lab_9"]),
    ("describe table.tsv", ["table.tsv"]),
    ("sweep my.toml", ["my.toml", "[sweep]"]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    for name, text in (("my.toml", CONFIG), ("own.py", OWN), ("table.csv", TABLE)):
        (tmp_path / name).write_text(text)
    return tmp_path


def check(done: subprocess.CompletedProcess[str], words: list[str]) -> None:
    assert done.stderr.startswith("fedskew: ")
    assert [word for word in words if word not in done.stderr] == [], done.stderr


@pytest.mark.parametrize(("change", "words"), SETS, ids=[change for change, _ in SETS])
def test_a_wrong_value_is_answered_in_one_line(
    change: str, words: list[str], folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "own", raising=False)
    check(command("run", "my.toml", "--set", change, cwd=folder, status=2), words)


@pytest.mark.parametrize(("line", "words"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_wrong_command_is_answered_in_one_line(line: str, words: list[str], folder: Path, command: Command) -> None:
    check(command(*line.split(), cwd=folder, status=2), words)
