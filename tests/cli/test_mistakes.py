"""Mistakes as people make them, each answered by one line that says what is wrong and what to do: no traceback."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.cli.conftest import DIGITS

import fedskew
from common import save_image, task
from fedskew.data import OWN as OWN_DATA

CONFIG = DIGITS.replace('rule = "iid"', 'rule = "dirichlet_by_class", beta = 0.3')

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

SETS = [  # a changed key of the config, and words of the answer
    ("training.rounds=-1", ["training.rounds", "greater than or equal to 0"]),
    ("training.rounds=many", ["training.rounds", "valid integer", "'many'"]),
    ("training.round=5", ["training.round", "no such key", "'rounds'"]),
    ("training.lr=0", ["training.lr", "greater than 0"]),
    ("training.learning_rate=0.1", ["training.learning_rate", "no such key"]),
    ("training.participation=2", ["training.participation", "less than or equal to 1"]),
    ("training.participation=0", ["training.participation", "greater than 0"]),
    ("training.batch_size=0", ["training.batch_size", "greater than or equal to 1"]),
    ("training.momentum=1", ["training.momentum", "less than 1"]),
    ("training.epochs=-1", ["training.epochs", "greater than or equal to 0"]),
    ("training.augmentation=flip", ["training.augmentation", "unknown name 'flip'"]),
    ("trainig.rounds=5", ["trainig", "no such key", "'training'"]),
    ("rounds=5", ["rounds: no such key (did you mean 'training.rounds'?)"]),
    ("preset=fedla", ["preset: no such key (did you mean 'method.preset'?)"]),
    ("training.beta=0.1", ["training.beta: no such key (did you mean 'partition.beta'?)"]),
    ("training.clients=5", ["training.clients: no such key", "'partition.clients' or 'evaluation.clients'"]),
    ("training.seeds=[1]", ["training.seeds: no such key (did you mean 'seeds'?)"]),
    ("data.name=digit", ["data.name", "unknown name 'digit'", "'digits'"]),
    ("data.name=mnist", ["'mnist'", "FEDSKEW_DATA"]),
    ("data={name='mnist',root='nowhere'}", ["nowhere"]),
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
    ("training.class_weights=[1]", ["training.class_weights", "expected 10 weights"]),
    ("training.class_weights=heavy", ["training.class_weights", "'balanced'", "'heavy'"]),
    ("training.sampler=even", ["training.sampler", "known: balanced", "'even'"]),
    ("evaluation.measure=auc", ["evaluation.measure", "'auroc'", "'auc'"]),
    ("seeds=[0,0]", ["seeds", "twice"]),
    ("training.rounds", ["--set 'training.rounds'", "key=value"]),
]

ARENA = f"""{DIGITS}
[sweep]
methods = ["fedavg", "fedla"]
[sweep.grid]
training.participation = [0.4, 1.0]
[arena]
"""

TABLE = "age,sex,diagnosis\n" + "".join(f"{30 + row},{'fm'[row % 2]},{('ill', 'well')[row % 2]}\n" for row in range(24))
SCHEMA = """
[columns]
age = {kind = "number", range = [0, 120]}
sex = {kind = "category", categories = ["f", "m"]}
diagnosis = {kind = "label", categories = ["ill", "well"]}
"""
LABELS = {
    "measured": [f"{row / 7:.3f}" for row in range(24)],
    "named": [f"p{row}" for row in range(24)],
    "joined": ["Edema|Effusion", "Edema", "Effusion"] * 8,
    "gone": ["a", "nan", "b"] * 8,
    "written": ["1", "1.0", "2"] * 8,
}

FILES = {
    "my.toml": CONFIG,
    "own.py": OWN,
    "table.csv": "lab_0,lab_1,lab_9\n1,2,3\n4,5,6\n",
    "arena.toml": ARENA,
    "sweep.toml": ARENA.replace("[arena]\n", ""),
    "counts.csv": "client,cat,dog\nParis,30,10\nRome,0,40\n",
    "none_held.csv": "client,cat,dog\nParis,0,0\nRome,0,0\n",
    "target.csv": "class,share\ncat,1\ndog,3\n",
    "held.csv": "label,a,b\n" + "a,0.9,0.1\nb,0.2,0.8\n" * 10,
    "new.csv": "a,b\n" + "0.7,0.3\n" * 12,
    "ab.csv": "a,b\n1,2\n",
    "empty.csv": "label,client\nx,a\n,a\n",
    "short.csv": "label,client\nx,a\ny\n",
    "two.csv": "diagnosis,disease\nx,a\n",
    "word.csv": "client,x\na,one\n",
    "ok.csv": TABLE,
    "schema.toml": SCHEMA,
    "table.toml": DIGITS.replace('"digits"', '"csv", root = "ok.csv", schema = "schema.toml"').replace("= 10", "= 2"),
    "found.csv": "x,y,Edema,Effusion\n"
    + "".join(f"{row % 7},{row % 5},{row % 2},{row % 3 % 2}\n" for row in range(24)),
    "found.toml": DIGITS.replace('"digits"', '"csv", root = "found.csv", label = ["Edema", "Effusion"]'),
    "sent.toml": DIGITS.replace('"logistic"', '"logistic", weights = "less.csv"'),
    "less.csv": "age,diagnosis\n1,ill\n2,well\n",
    "unit.csv": TABLE.replace("30,", "3000,"),
    "hole.csv": TABLE.replace("30,", ","),
    **{
        f"{name}.csv": "x,label\n" + "".join(f"{row * 7 % 24},{label}\n" for row, label in enumerate(labels))
        for name, labels in LABELS.items()
    },
}
PALS = "weights counts.csv --method fedpals"
TARGET = "target new.csv --tables held.csv"

COMMANDS = [  # a command, and words of the answer
    ("run missing.toml", ["missing.toml", "No such file"]),
    ("run table.csv", ["table.csv"]),
    ("run my.toml --seeds a,b", ["--seeds 'a,b'", "whole numbers"]),
    ("run my.toml --resume", ["--resume: runs has no run of this config to go on with; leave out --resume to start a"]),
    ("run my.toml --device tpu", ["engine.device", "tpu"]),
    # every method is checked before the first one trains
    (
        "run my.toml --method fedavg --method fedentopt",
        ["'my-fedentopt'", "method.selection.buffer: 0.5", "training.participation = 0.5"],
    ),
    ("run my.toml --method fedavg --method adapt", ["'my-adapt'", "method.finish: adapt needs a target"]),
    (
        "run my.toml --method rare:RareFirst",
        [
            "method.preset: 'rare:RareFirst' is a class, and presets have plain names; give it to the slot that it "
            "fills, such as --set method.weighting.name=rare:RareFirst"
        ],
    ),
    ("run my.toml --method fedavg --set method.weighting.name=fedla", ["--set method.weighting.name", "would be lost"]),
    ("run @nothing", ["nothing", "no config of this name"]),
    ("run @fedvls-mnist-dir0.06", ["comes with fedskew (did you mean 'fedvls-mnist-dir0.05'?)"]),
    ("run @fedvls-table1", ["is a table or figure of a paper; use: fedskew reproduce fedvls-table1"]),
    ("run @compare", ["use: fedskew sweep"]),
    ("sweep none.toml", ["none.toml"]),
    ("methods fedproxx", ["did you mean 'fedprox'"]),
    ("methods fedlc+fedrs", ["take 'fedlc' or 'fedrs'"]),
    ("check nowhere.py", ["is no Python file"]),
    ("report runs", ["runs", "not a run folder (it does not exist)"]),
    ("report x=my.toml", ["not a run folder"]),
    ("predict runs/none table.csv", ["runs/none: not a run folder (it does not exist)"]),
    ("recipes --rows mnist", ["--rows, --config: need the name of a recipe"]),
    ("reproduce fedpals-fig99", ["did you mean 'fedpals-fig9'?"]),
    ("reproduce fedvls-table1 --rows mnits", ["did you mean 'mnist'?"]),
    ("reproduce fedvls-table1 --rows mnist", ["MNIST/raw/train-images-idx3-ubyte"]),
    ("reproduce fedpals-fig9 --rounds 0", ["rounds: must be at least 1, not 0"]),
    ("new -", ["-: is no file's name here; give one"]),
    ("new my.toml", ["my.toml: is there already; write elsewhere, or add --force"]),
    ("new my/", ["my: a config is a .toml file; write to one, such as my.toml"]),
    ("new a.toml --model mlp4", ["model.name: unknown name 'mlp4' (did you mean 'mlp3'?)"]),
    ("new a.toml --clients 0", ["partition.clients: input should be greater than or equal to 1"]),
    ("new none/a.toml", ["none/a.toml: can't be written: No such file or directory"]),
    *((f"new a.toml --data {name} --rule natural", [f"'{name}' names no clients"]) for name in ("digits", "mnist")),
    *((f"new a.toml --data {name}", [f"--root: data set '{name}' is a folder or file of yours"]) for name in OWN_DATA),
    ("new b.toml --data csv --root table.csv", ["no column is called label", "data.label", "lab_0, lab_1, lab_9"]),
    ("counts none.csv", ["none.csv: can't be read: No such file or directory"]),
    ("counts ab.csv --label c", ["ab.csv: no column 'c' for label (known: a, b)"]),
    ("counts ab.csv --label a --client z", ["no column 'z' for client"]),
    ("counts empty.csv", ["empty.csv: 1 sample without a label", "first in empty.csv, line 3); take them out"]),
    ("counts short.csv", ["short.csv, line 3: 1 cell where the header has 2"]),
    ("counts two.csv", ["several columns may be the label (diagnosis, disease); say by --label"]),
    ("counts word.csv", ["line 2, column 'x': 'one', expected a number"]),
    ("describe table.tsv", ["table.tsv: can't be read"]),
    ("describe counts.csv --target counts.csv", ["counts.csv, line 2, column 'client': 'Paris', expected a number"]),
    ("describe counts.csv --target 0.2,0.8", ["--target 0.2,0.8: no such file; give a CSV of columns class,share"]),
    ("describe counts.csv --picture who.xyz", ["who.xyz: the page is to be looked at in a browser"]),
    ("describe counts.csv --picture a.png --no-picture", ["--no-picture: contradicts --picture"]),
    *((f"{command} none_held.csv", ["none_held.csv: no client holds a sample"]) for command in ("describe", "advise")),
    ("weights none_held.csv --method fedavg", ["none_held.csv: no client holds a sample"]),
    ("advise counts.csv --participation 0", ["participation: input should be greater than 0 (got 0.0)"]),
    ("describe counts.csv --participation 0", ["participation: input should be greater than 0 (got 0.0)"]),
    ("advise counts.csv --without bb", ["the table has no method 'bb'"]),
    ("advise counts.csv --network lenet", ["--network: the table has logistic, mlp3, lenet5 (did you mean 'lenet5'?)"]),
    ("advise counts.csv --table counts.csv", ["counts.csv: the table of evidence can't be read"]),
    ("weights counts.csv --method fedpal", ["--method: unknown name 'fedpal' (did you mean 'fedpals'?)"]),
    ("weights counts.csv --method fedla --ess 0.5", ["--ess: fedla has no such parameter"]),
    ("weights counts.csv --method fedavg --strength 1", ["--strength: fedavg has no such parameter"]),
    ("weights counts.csv --method afl", ["--method: afl learns its weights during training"]),
    ("weights counts.csv --method nowhere:Rule", ["--method: 'nowhere:Rule' can't be imported"]),
    ("weights counts.csv --method fedla --csv none/w.csv", ["none/w.csv: can't be written"]),
    ("weights counts.csv --method fedla --csv .", [".: can't be written: it is a folder"]),
    ("weights counts.csv --method fedla --csv pipe", ["pipe: can't be written: it is not a plain file"]),
    ("weights counts.csv --method fedla --csv -", ["-: is no file's name here; give one"]),
    (f"{PALS} --set strength=200 --strength 1", ["--strength: is given by --set, too"]),
    (f"{TARGET} --picture a.svg --out ./a.svg", ["--out: a.svg is where --picture draws"]),
    (PALS, ["--target: fedpals weighs clients towards a target"]),
    (f"{PALS} --target target.csv --ess 2", ["--ess: input should be less than or equal to 1"]),
    (f"{PALS} --target target.csv --strength -1", ["--strength: input should be greater than or equal to 0"]),
    (f"{PALS} --target target.csv --strength 1 --ess 0.5", ["--ess: finds the strength"]),
    (f"{PALS} --set strenght=1", ["--set strenght: fedpals has no such parameter"]),
    (f"{PALS} --set strength", ["--set 'strength': expected key=value"]),
    (f"{TARGET} --bins 0.9,0.5", ["bins: must rise"]),
    (f"{TARGET} --bins half", ["--bins 'half': expected numbers between 0 and 1, separated by commas"]),
    (f"{TARGET} --picture a.png --no-picture", ["--no-picture: contradicts"]),
    (f"{TARGET} --picture a.docx", ["a.docx"]),
    (f"{TARGET} --out nowhere/mix.csv --no-picture", ["nowhere/mix.csv"]),
    ("sweep my.toml", ["my.toml", "[sweep]"]),
    ("sweep sweep.toml --seeds a", ["--seeds"]),
    ("sweep sweep.toml --set data.name=mnist --data-root nowhere", ["nowhere"]),
    ("sweep arena.toml", ["it has an [arena] table, so use: fedskew arena"]),
    ("arena sweep.toml", ["an arena needs a table [arena]"]),
    ("arena arena.toml --only participation", ["--only 'participation': expected AXIS=LABEL"]),
    ("arena arena.toml --only participatoin=1.0", ["has no such axis (did you mean 'participation'?)"]),
    ("arena arena.toml --only participation=0.9", ["--only participation=0.9: no such label"]),
    ("arena arena.toml --processes 0", ["--processes: must be at least 1"]),
    ("arena arena.toml --processes 1 --on tcp://x:1", ["--processes: is for this machine, and --on for others"]),
    ("run table.toml --set data.root=less.csv", ["less.csv, line 1: no column 'sex', which the schema has"]),
    ("run table.toml --set data.root=unit.csv", ["3000", "outside the schema's range, 0 to 120", "another unit"]),
    ("run table.toml --set data.root=hole.csv", ["line 2, column 'age': empty", "missing = true in the schema"]),
    ("run table.toml --set data.label=sex", ["data.label: the schema says which columns hold labels"]),
    ("run table.toml --set data.schema=no.toml", ["data.schema: no.toml: the schema can't be read"]),
    ("run table.toml --set data.schema=my.toml", ["data.schema: my.toml", "no such parameter"]),
    ("schema none.csv", ["none.csv: can't be read"]),
    ("schema ok.csv my.toml", ["my.toml: is TOML, and no table; give CSV or Parquet files, or a folder of them"]),
    ("schema ok.csv --label dx", ["ok.csv: no column 'dx' of labels"]),
    ("schema measured.csv", ["'0.143' is a measurement", "regression is not what fedskew does"]),
    ("schema named.csv", ["24 different labels", "hardly classes", "names of samples?"]),
    ("schema joined.csv", ["'Edema|Effusion' looks like several", "(--separator)"]),
    ("describe joined.csv --separator ;", ["'Edema|Effusion' looks like several", "(--separator)"]),
    (f"{PALS} --target target.csv --csv target.csv", ["target.csv: is there already, among what the command reads"]),
    ("counts counts.csv --out counts.csv", ["counts.csv: is there already, among what the command reads"]),
    ("counts sent.toml --out less.csv", ["less.csv: is there already, among what the command reads"]),
    ("counts table.toml --out ok.csv", ["ok.csv: is there already, among what the command reads"]),
    ("weights table.toml --method fedavg --csv schema.toml", ["schema.toml: is there already, among what the command"]),
    ("counts les?.csv --client age --label diagnosis --out less.csv", ["less.csv: is there already, among"]),
    (f"{TARGET} --out held.csv --no-picture", ["held.csv: is there already, among what the command reads"]),
    ("schema joined.csv --separator ; --label dx", ["joined.csv: no column 'dx' of labels"]),
    ("new a.toml --data csv --root joined.csv --set data.separator=;", ["'Edema|Effusion' looks like several"]),
    ("run found.toml --set data.separator=|", ["data.separator: is for one column of labels", "of 0 and 1"]),
    ("run found.toml --set data.label=['Edema','Efusion']", ["no column 'Efusion'"]),
    ("run found.toml --set data.label=['Edema','x']", ["line 4 has '2' for 'x'", "columns of 0 and 1"]),
    ("new a.toml --data csv --root gone.csv", ["gone.csv: 8 samples without a label", "data.missing_labels = 'drop'"]),
    ("new a.toml --data csv --root ok.csv --set data.label=dx", ["no column 'dx' of labels"]),
    ("arena arena.toml --set arena.lats=3", ["arena.lats: no such key (did you mean 'last'?)"]),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def check(done: subprocess.CompletedProcess[str], words: list[str]) -> None:
    assert done.stderr.startswith("fedskew: ")
    assert [word for word in words if word not in done.stderr] == [], done.stderr


@pytest.mark.parametrize(("change", "words"), SETS, ids=[change for change, _ in SETS])
def test_a_wrong_value_is_answered_in_one_line(change, words, folder, command):
    check(command("run", "my.toml", "--set", change, status=2), words)


@pytest.mark.parametrize(("line", "words"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_wrong_command_is_answered_in_one_line_and_writes_nothing(line, words, folder, command):
    done = command(*line.split(), status=2)
    check(done, words)
    assert done.stdout == ""
    assert {path.name: path.read_text() for path in folder.iterdir() if path.is_file()} == FILES
    assert {path.name for path in folder.iterdir() if path.is_dir()} <= {"__pycache__"}


RUN_PICTURES = "run pictures.toml --set data.root="
PREDICT = "predict trained "

PICTURES = [  # a command, and words of the answer
    (f"{RUN_PICTURES}nowhere", ["nowhere", "does not exist"]),
    (
        f"{RUN_PICTURES}broken",
        ["2 of 4 pictures can't be read", "empty.png: the file is empty", "words.png", "--skip-broken"],
    ),
    (f"{RUN_PICTURES}nothing", ["nothing: found no images, and no texts (.txt), in CLASS folders"]),
    (f"{RUN_PICTURES}whole --set data.window=lung", ["data.window", "valid tuple", "'lung'"]),
    (f"{RUN_PICTURES}whole --set data.skip_broken=maybe", ["data.skip_broken", "valid boolean"]),
    ("run my.toml --skip-broken", ["data.skip_broken: data set 'digits' has no such option"]),
    ("new p.toml --data folder --root broken", ["2 of 4 pictures can't be read", "data.skip_broken = true"]),
    (f"{PREDICT}broken", ["2 of 4 pictures can't be read", "empty.png", "words.png", "skip"]),
    (f"{PREDICT}notes.txt", ["notes.txt: ", "what it holds is in no format of images"]),
    (f"{PREDICT}nothing", ["nothing: holds no images"]),
    ("adapt trained --target-data broken", ["this run held no samples out"]),
    ("new p.toml --data folder --root texts", ["2 of 4 texts can't be read", "is not in UTF-8", "the file is empty"]),
    (f"{RUN_PICTURES}texts --set data.size=8", ["data.size, window: are for images, and texts holds texts"]),
    (f"{RUN_PICTURES}words --set data.length=0", ["data.length: must be at least 1"]),
    (f"{RUN_PICTURES}words", ["model.name: logistic takes numbers, and these samples are texts", "take fasttext"]),
    (f"{RUN_PICTURES}mixed", ["one of train/ and test/ holds images, and the other texts"]),
    ("predict reads texts", ["2 of 4 texts can't be read", "--skip-broken"]),
    ("predict reads other.csv", ["other.csv, line 1: no column 'text'", "columns: author, body"]),
    ("predict reads whole", ["whole: holds no texts (.txt)"]),
    ("predict reads nowhere.txt", ["nowhere.txt: there is no such file or folder"]),
    ("adapt reads --target-data words --held-out other.csv", ["no column 'text'"]),
]


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of pictures, each with one fault, and a model trained on the one without."""
    top, levels = tmp_path_factory.mktemp("pictures"), np.arange(64, dtype=np.uint8).reshape(8, 8)
    for label in "ab":
        for number in range(4):
            save_image(top / "whole" / label / f"{number}.png", levels + number)
        save_image(top / "broken" / label / "0.png", levels)
        for number in range(4):
            written(top / "words" / label / f"{number}.txt", f"{label} text {number}")
        written(top / "texts" / label / "0.txt", "a text")
        save_image(top / "mixed" / "train" / label / "0.png", levels)
        written(top / "mixed" / "test" / label / "0.txt", "a text")
    (top / "broken" / "a" / "empty.png").touch()
    (top / "broken" / "b" / "words.png").write_text("not a picture")
    (top / "texts" / "a" / "empty.txt").touch()
    (top / "texts" / "b" / "latin.txt").write_bytes("k\u00fchl".encode("latin-1"))
    (top / "other.csv").write_text("author,body\nx,a text\n")
    (top / "nothing").mkdir()
    (top / "notes.txt").write_text("not a picture")
    (top / "my.toml").write_text(CONFIG)
    data = '{name = "folder", root = "whole"}'
    (top / "pictures.toml").write_text(DIGITS.replace('{name = "digits"}', data).replace("clients = 10", "clients = 2"))
    for name, root, model in (("trained", "whole", "logistic"), ("reads", "words", {"name": "fasttext", "dim": 2})):
        data = {"name": "folder", "root": str(top / root)}
        done = fedskew.simulate(task(2, rounds=1), data=data, model=model, out=top)
        assert done.folder is not None
        done.folder.rename(top / name)
    return top


@pytest.mark.parametrize(("line", "words"), PICTURES, ids=[line for line, _ in PICTURES])
def test_a_mistake_with_pictures_is_answered_in_one_line(line, words, pictures, command, tmp_path):
    shutil.copytree(pictures, tmp_path, dirs_exist_ok=True)
    done = command(*line.split(), status=2)
    check(done, words)
