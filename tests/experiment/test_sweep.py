"""Sweeps: which runs a file asks for, what is refused before any of them, and what the tables say."""

import csv
import html
import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common import refused
from fedskew import methods, models, simulate
from fedskew.engine import Evaluation, RoundRecord
from fedskew.errors import ArgumentError, CombinationError, ConfigError, FedskewError, MissingPackageError, RunError
from fedskew.experiment import Job, RunFolder, Sweep, SweepResult, resolve, run_sweep
from fedskew.methods.catalogue import COMBINATIONS
from fedskew.report import SeedRun
from fedskew.trees import parse_change

TASK = """\
schema = 1
name = "small"
seeds = [0, 1]
[data]
name = "digits"
[partition]
rule = "dirichlet_by_class"
clients = 8
beta = 0.3
min_size = 1
[model]
name = "logistic"
[training]
rounds = 3
participation = 0.5
batch_size = 16
lr = 0.1
"""

REFUSED = tomllib.loads(Path(__file__).with_name("refused_sweeps.toml").read_text(encoding="utf-8"))["sweeps"]


def written(folder: Path, tables: str) -> Path:
    path = folder / "small.toml"
    path.write_text(TASK + tables, encoding="utf-8")
    return path


def sweep_of(folder: Path, tables: str, **options) -> Sweep:
    return Sweep.read(written(folder, tables), **options)


def test_every_method_meets_every_value_of_the_grid_in_the_files_order(tmp_path):
    sweep = sweep_of(
        tmp_path,
        """
        [sweep]
        methods = ["fedavg", "fedentopt+fedprox"]
        [sweep.grid]
        partition.beta = [0.1, 0.5]
        "training.lr" = [0.01, 0.1]
        """,
    )
    assert sweep.axes == ("method", "beta", "lr")
    assert [cell.label for cell in sweep.cells] == [
        f"{method}, beta={beta}, lr={lr}"
        for method in ("fedavg", "fedentopt+fedprox")
        for beta in (0.1, 0.5)
        for lr in (0.01, 0.1)
    ]
    config = sweep.cells[6].config
    assert config.name == "small-fedentopt+fedprox-beta-0.5-lr-0.01"
    assert config.method["local_step"]["name"] == "fedprox"
    assert (config.partition.parameters["beta"], config.training.lr, config.seeds) == (0.5, 0.01, [0, 1])


def test_a_method_can_be_a_table_with_a_label_and_keys_of_its_own(tmp_path):
    sweep = sweep_of(
        tmp_path,
        """
        [target]
        mix = "uniform"
        [sweep]
        methods = [
            {label = "pals, half", weighting = {name = "fedpals", ess = 0.5}},
            {label = "slow prox", preset = "fedprox", set = {training.lr = 0.01, "method.local_step.mu" = 0.2}},
            {label = "tuned", preset = "fedprox", set = {"data.validation" = 0.1, tune = {key = "training.lr", values = [0.1, 0.2]}}},
        ]
        """,  # noqa: E501
    )
    half, slow, tuned = (cell.config for cell in sweep.cells)
    assert [cell.label for cell in sweep.cells] == ["pals, half", "slow prox", "tuned"]
    assert half.method["weighting"] == {**half.method["weighting"], "name": "fedpals", "ess": 0.5}
    assert half.name == "small-pals-half"
    assert (slow.training.lr, slow.method["local_step"]["mu"]) == (0.01, 0.2)
    assert tuned.tune is not None


def test_the_grid_reaches_into_methods_whatever_they_are_called(tmp_path):
    sweep = sweep_of(
        tmp_path,
        """
        [sweep]
        methods = ["fedprox", "fedentopt+fedprox"]
        [sweep.grid]
        method.local_step.mu = [0.1, 0.2]
        """,
    )
    assert [cell.config.method["local_step"]["mu"] for cell in sweep.cells] == [0.1, 0.2, 0.1, 0.2]
    alone = sweep_of(tmp_path, '[method]\npreset = "fedprox"\n[sweep.grid]\nmethod.local_step.mu = [0.3]\n')
    assert [cell.config.method["local_step"]["mu"] for cell in alone.cells] == [0.3]


def test_a_whole_table_is_a_value_too(tmp_path):
    sweep = sweep_of(
        tmp_path,
        """
        [sweep.grid]
        "partition.clients" = [10, 20]
        "partition" = [
            {label = "two labels each", rule = "quantity", labels_per_client = 2},
            {rule = "dirichlet_by_client", beta = 0.1},
        ]
        """,
    )
    assert [cell.label for cell in sweep.cells[:2]] == [
        "clients=10, two labels each",
        "clients=10, rule=dirichlet_by_client beta=0.1",
    ]
    assert [(cell.config.partition.rule, cell.config.partition.clients) for cell in sweep.cells] == [
        ("quantity", 10),
        ("dirichlet_by_client", 10),
        ("quantity", 20),
        ("dirichlet_by_client", 20),
    ]


def test_keys_of_one_short_name_are_told_apart(tmp_path):
    grid = "[sweep.grid]\nmethod.server_update.lr = [1.0]\ntraining.lr = [0.1]\n"
    assert sweep_of(tmp_path, grid).axes == ("method.server_update.lr", "training.lr")


def test_a_sweep_without_axes_is_the_seeds_of_one_run(tmp_path):
    sweep = sweep_of(tmp_path, "[sweep]\naccuracy = 0.5\n")
    assert [(cell.label, cell.config.name) for cell in sweep.cells] == [("small", "small")]
    assert sweep.axes == ("run",)


def test_quick_and_set_change_the_sweep_itself(tmp_path):
    tables = """
    [sweep.grid]
    partition.beta = [0.1, 0.5]
    [quick]
    "training.rounds" = 1
    "sweep.grid.partition.beta" = [0.3]
    """
    sweep = sweep_of(tmp_path, tables, quick=True, changes={"sweep.accuracy": 0.7, "data.root": "somewhere"})
    assert [cell.config.training.rounds for cell in sweep.cells] == [1]
    assert sweep.accuracy == 0.7
    assert sweep.command.endswith("small.toml --quick --set sweep.accuracy=0.7")


def test_long_names_that_differ_at_their_end_are_folders_of_their_own(tmp_path):
    label = "a label that says so much of its cell that its name is longer than the name of a folder may be"
    methods = [{"label": label, "set": {"training.smallest_batch": size}} for size in (1, 2)]
    methods[1]["label"] += " indeed"
    sweep = sweep_of(tmp_path, "[sweep]\n", changes={"sweep.methods": methods})
    first, second = (cell.config.folder(tmp_path).name for cell in sweep.cells)
    assert first != second
    assert first.startswith("small-a-label-that-says-so-much-of-its-cell-that-its-name-is-longer")
    assert all(len(cell.config.name) <= 80 for cell in sweep.cells)
    exact = sweep_of(tmp_path, "[sweep]\n", changes={"sweep.methods": [{"label": "a" * 74}]})
    assert exact.cells[0].config.name == f"small-{'a' * 74}"


def test_what_can_change_the_tables_changes_the_folder(tmp_path):
    tables = "[sweep.grid]\npartition.beta = [0.1, 0.5]\n"
    folders = {
        sweep_of(tmp_path, tables, changes=changes).folder(tmp_path)
        for changes in (
            {},
            {"seeds": [0]},
            {"sweep.accuracy": 0.5},
            {"training.rounds": 2},
            {"sweep.grid.training.lr": [0.1]},
        )
    }
    assert len(folders) == 5
    assert all(folder.name.startswith("sweep-small-") for folder in folders)


@pytest.mark.parametrize("known", REFUSED, ids=lambda known: known["says"])
def test_a_mistake_in_the_file_is_one_line_that_says_where_and_what_would_be_right(tmp_path, known):
    with refused(ConfigError, known["says"], "small.toml"):
        sweep_of(tmp_path, known["tables"])


def test_a_mistake_in_the_task_names_its_own_line_and_one_from_outside_none(tmp_path):
    file = written(tmp_path, "[sweep]\nmethods = ['fedavg']\n")
    file.write_text(file.read_text().replace("lr = 0.1", "lr = 0"))
    with pytest.raises(ConfigError, match=r"small.toml, line 17: cell 'fedavg': training.lr: "):
        Sweep.read(file)
    for key in ("training.lr", "sweep.accuracy"):
        with pytest.raises(ConfigError, match=rf"small.toml: (cell 'fedavg': )?{key}: "):
            Sweep.read(written(tmp_path, "[sweep]\nmethods = ['fedavg']\n"), {key: -1})


def test_a_combination_that_makes_no_sense_is_refused_as_such(tmp_path):
    with pytest.raises(CombinationError, match=r"sweep.methods\[0\]"):
        sweep_of(tmp_path, "[sweep]\nmethods = ['fedla+fedpals']\n")


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ("[sweep]\nmethods = ['fedpals']\n", "cell 'fedpals': target"),
        ("[sweep.grid]\ndata.name = ['digits', 'mnist']\n", "cell 'name=mnist': "),
        ("[sweep.grid]\npartition.min_size = [1000]\n", "cell 'min_size=1000': "),
        (
            '[sweep.grid]\n"partition" = [{rule = "natural"}]\n',
            "cell 'rule=natural': partition.rule: data set 'digits' defines no clients",
        ),
    ],
)
def test_what_cannot_be_set_up_is_refused_before_anything_runs(tmp_path, monkeypatch, tables, says):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    with refused(FedskewError, says):
        run_sweep(sweep_of(tmp_path, tables), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


REFUSED = """
[sweep]
methods = ["fedla+fedpals", "fedavg", "fedpals"]
[sweep.grid]
partition.min_size = [1, 1000]
"""


@pytest.mark.slow
def test_what_makes_no_sense_or_cannot_be_set_up_is_a_row_with_its_reason_while_the_others_run(tmp_path):
    changes = {"training.rounds": 1, "seeds": [0], "partition.max_tries": 9}
    sweep, progress = sweep_of(tmp_path, REFUSED, changes=changes), Recorded()
    result = run_sweep(sweep, tmp_path / "runs", processes=1, progress=progress)
    assert progress.begun() == [(["fedavg, min_size=1, seed 0"], 0)]
    assert result.failures == ()
    reasons = dict(line.split(": ", 1) for line in result.refused)
    assert dict(progress.of("refused")) == reasons
    assert list(reasons) == [
        "fedla+fedpals, min_size=1", "fedla+fedpals, min_size=1000",
        "fedavg, min_size=1000", "fedpals, min_size=1", "fedpals, min_size=1000",
    ]  # fmt: skip
    assert "'fedla' and 'fedpals' both fill the weighting slot" in reasons["fedla+fedpals, min_size=1"]
    assert "target" in reasons["fedpals, min_size=1"]
    assert "min_size" in reasons["fedavg, min_size=1000"]
    with (result.folder / "table.csv").open() as table, (result.folder / "runs.csv").open() as folders:
        rows, lines = list(csv.DictReader(table)), list(csv.DictReader(folders))
    assert sorted((row["seeds"], row["failed"]) for row in rows) == [*[("0", "1")] * 5, ("1", "0")]
    assert sorted(line["failure"][:8] for line in lines) == ["", *["refused:"] * 5]
    text, page = (result.folder / "table.md").read_text(), result.report.read_text()
    for label, reason in reasons.items():
        assert f"| {label.replace(', min_size=', ' | ')} | refused | - |" in text
        assert f"Refused: {label}: {reason}" in text
        assert html.escape(f"Refused: {label}: {reason}").replace("&#x27;", "&#39;") in page


def test_the_comparison_in_the_recipes_names_every_method_and_the_papers_combinations():
    recipe = Path(__file__).parents[2] / "recipes" / "compare.toml"
    cells = {cell.label for cell in Sweep.read(recipe).cells}
    common = {name for name, tables in methods.PRESETS.items() if "personal" not in tables}
    assert common | set(COMBINATIONS) <= cells
    assert {cell.label for cell in Sweep.read(recipe, quick=True).cells} == cells


def test_a_number_of_processes_below_one_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="processes: must be at least 1, not 0"):
        run_sweep(sweep_of(tmp_path, "[sweep]\n"), tmp_path / "runs", processes=0)


def run_of(
    seed: int, accuracies: list[float], last: float, *, worst: float, megabytes: float, seconds: float
) -> SeedRun:
    """A finished run with these test accuracies at rounds 0, 2, 4 ..., and this summary."""
    rounds = [
        RoundRecord(seed, at, evaluation=None if at % 2 else Evaluation(accuracies[at // 2], None, 0.0, 0.0, [], []))
        for at in range(2 * len(accuracies) - 1)
    ]
    summary = {
        "final": {"accuracy": last, "worst_class": worst, "target_accuracy": None},
        "bytes_up": int(megabytes * 4e5),
        "bytes_down": int(megabytes * 6e5),
        "seconds": seconds,
        "machine": {"processor": "a processor", "device": "cpu", "threads": 1},
        "versions": {"fedskew": "0", "torch": "1"},
        "revision": None,
    }
    return SeedRun("", seed, {}, rounds, np.zeros((1, 1)), ("0",), ("0",), None, summary)


def test_a_row_is_the_mean_and_standard_deviation_of_its_seeds(tmp_path):
    sweep = sweep_of(
        tmp_path, "[sweep]\naccuracy = 0.5\nmethods = ['fedavg', 'fedprox', 'fedla']\n", changes={"seeds": [0, 1, 2]}
    )
    runs = [
        [
            run_of(0, [0.1, 0.4, 0.6, 0.4, 0.7], 0.5, worst=0.0, megabytes=3, seconds=1.0),  # reaches 0.5 in round 4
            run_of(1, [0.1, 0.5, 0.5, 0.5, 0.5], 0.6, worst=0.1, megabytes=3, seconds=2.0),  # in round 2
            run_of(2, [0.1, 0.2, 0.3, 0.4, 0.49], 0.7, worst=0.2, megabytes=3, seconds=3.0),  # never
        ],
        [run_of(1, [0.1, 0.2], 0.25, worst=0.0, megabytes=1234.5, seconds=61.0)],  # the other two seeds failed
        [],
    ]
    labelled = [replace(run, label=cell.label) for cell, own in zip(sweep.cells, runs, strict=True) for run in own]
    result = SweepResult.of(sweep, labelled, tmp_path)
    # By hand: 0.5, 0.6, 0.7 have mean 0.6 and deviation sqrt((0.01 + 0 + 0.01) / 2) = 0.1; rounds 4 and 2 have mean 3
    # and deviation sqrt((1 + 1) / 1) = 1.414.
    assert result.table() == (
        ["method", "seeds", "accuracy", "worst class", "rounds to 50 %", "MB", "seconds"],
        [
            ["fedavg", "3", "60.0 ± 10.0", "10.0 ± 10.0", "3.0 ± 1.4 (2/3)", "3.0 ± 0.0", "2.0 ± 1.0"],
            ["fedprox", "1 of 3", "25.0", "0.0", "-", "1,234.5", "61.0"],
            ["fedla", "0 of 3", "-", "-", "-", "-", "-"],
        ],
    )
    assert [note for note in result.notes() if note.startswith("Missing")] == [
        f"Missing, as it failed: {label}, seed {seed}."
        for label, seed in [("fedprox", 0), ("fedprox", 2), ("fedla", 0), ("fedla", 1), ("fedla", 2)]
    ]
    configs = [sweep.cells[0].config.with_value("model.name", name) for name in ("resnet50", "mlp3", "resnet50")]
    assert SweepResult.model_notes(configs) == [f"Network: {models.note('resnet50', {})}."]
    result.write_tables()
    with (result.folder / "table.csv").open() as file:
        first, second, third = csv.DictReader(file)
    assert list(first)[:2] == ["method", "seeds"]
    assert list(first)[-2:] == ["seconds_mean", "seconds_std"]
    assert float(first["accuracy_mean"]) == pytest.approx(0.6)
    assert float(first["accuracy_std"]) == pytest.approx(0.1)
    assert (float(first["rounds_to_accuracy_mean"]), first["reached"]) == (3.0, "2")
    assert (second["accuracy_mean"], second["accuracy_std"], second["reached"]) == ("0.25", "", "0")
    assert set(third.values()) == {"fedla", "0", "3", ""}
    with (result.folder / "runs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["method"], line["seed"], line["rounds_to_accuracy"]) for line in lines] == [
        ("fedavg", "0", "4.0"), ("fedavg", "1", "2.0"), ("fedavg", "2", ""), ("fedprox", "1", ""),
    ]  # fmt: skip
    assert lines[0]["folder"] == sweep.cells[0].config.for_seed(0).folder(tmp_path).name


def written_with_one_run(sweep: Sweep, out: Path, failed=None) -> SweepResult:
    run = run_of(0, [0.1], 0.1, worst=0.0, megabytes=1, seconds=1.0)
    result = SweepResult.of(sweep, [replace(run, label=sweep.cells[0].label)], out, failed)
    result.write_tables()
    return result


def test_labels_are_text_in_every_format(tmp_path):
    sweep = sweep_of(tmp_path, "[sweep]\nmethods = [{label = 'a | b <i>, [red]'}]\n")
    result = written_with_one_run(sweep, tmp_path)
    assert "| a \\| b <i>, [red] | 1 of 2 |" in (result.folder / "table.md").read_text()
    assert '"a | b <i>, [red]",1,' in (result.folder / "table.csv").read_text()


def test_a_failed_seed_stands_in_every_table_with_its_reason(tmp_path):
    sweep = sweep_of(tmp_path, "[sweep]\nmethods = ['fedavg']\n")
    folder = written_with_one_run(sweep, tmp_path, {("fedavg", 1): "it was lost"}).folder
    text = (folder / "table.md").read_text()
    assert "| fedavg | 1 of 2 |" in text
    assert "Missing, as it failed: fedavg, seed 1: it was lost" in text
    assert "fedavg,1,1," in (folder / "table.csv").read_text()
    assert (folder / "runs.csv").read_text().splitlines()[-1].endswith("it was lost")


def test_what_failed_is_said_once_where_a_finish_gives_a_cell_two_rows(tmp_path):
    sweep = sweep_of(tmp_path, "[sweep]\nmethods = ['ccvr']\n")
    run = replace(run_of(0, [0.1], 0.1, worst=0.0, megabytes=1, seconds=1.0), label="ccvr")
    figures = vars(run.rounds[-1].evaluation)
    after = {"name": "ccvr", "evaluation": figures, "seconds": 1.0}
    run = replace(run, summary=run.summary | {"finished": after})
    result = SweepResult.of(sweep, [run], tmp_path, {("ccvr", 1): "it was lost"})
    assert [row.label for row in result.rows] == ["ccvr, as trained", "ccvr, after ccvr"]
    said = [note for note in result.notes() if "lost" in note]
    assert said == ["Missing, as it failed: ccvr, seed 1: it was lost"]


@pytest.mark.parametrize("name", ["finch", "tensorboard"])
def test_a_row_whose_extra_is_missing_is_refused_before_any_run(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # as where it isn't installed
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    tables = {"finch": "methods = ['fedavg', 'fpl']", "tensorboard": "methods = ['fedavg']"}[name]
    changes = {"output.trackers": ["tensorboard"]} if name == "tensorboard" else {}
    with pytest.raises(MissingPackageError, match=r"cell '(fpl|fedavg)': .*pip install 'fedskew"):
        run_sweep(sweep_of(tmp_path, f"[sweep]\n{tables}\n", changes=changes), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_infinity_is_a_value_in_file_grid_and_command_line(tmp_path):
    grid = "[target]\nmix = 'uniform'\n[sweep]\nmethods = ['fedpals']\n[sweep.grid]\n"
    grid += "method.weighting.strength = [0.0, inf]\n"
    sweep = sweep_of(tmp_path, grid)
    assert [cell.label for cell in sweep.cells] == ["fedpals, strength=0.0", "fedpals, strength=inf"]
    assert resolve(sweep.cells[1].config.tree()).method["weighting"]["strength"] == np.inf
    one = sweep_of(
        tmp_path,
        "[sweep]\n",
        changes=dict([parse_change("method.weighting.strength=inf")])
        | {"method.preset": "fedpals", "target.mix": "uniform"},
    )
    assert one.cells[0].config.method["weighting"]["strength"] == np.inf


def test_tables_that_cannot_be_written_are_one_line(tmp_path):
    sweep = sweep_of(tmp_path, "[sweep]\n")
    sweep.folder(tmp_path).write_text("in the way")
    with pytest.raises(RunError, match="sweep-small.*: can't be written: "):
        SweepResult.of(sweep, [], tmp_path).write_tables()


OWN = """import os, signal
from dataclasses import dataclass
import numpy as np

@dataclass(frozen=True)
class Own:
    \"\"\"Weights that end in {how}, but for equal weights.\"\"\"
    how: str = "weights"
    needs_target = False

    def weigh(self, answered):
        if self.how == "an error":
            raise KeyError("lost")
        if self.how == "a kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(len(answered.sizes), 1 / len(answered.sizes))
"""


COUNTED = """import os
from common import refused
from fedskew import data

def make():
    with open(os.environ["LOADS"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    return data.load("digits")
"""


@pytest.mark.slow
def test_own_components_work_and_a_run_that_fails_stops_no_other(tmp_path, monkeypatch):
    (tmp_path / "own_weights.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    tables = """
    [sweep]
    methods = [
        {label = "bad", weighting = {name = "own_weights:Own", how = "an error"}},
        {label = "dead", weighting = {name = "own_weights:Own", how = "a kill"}},
        {label = "own", weighting = {name = "own_weights:Own"}},
    ]
    """
    sweep = sweep_of(tmp_path, tables, changes={"seeds": [0]})
    result = run_sweep(sweep, tmp_path / "runs", processes=2)
    bad, dead = result.failures
    assert bad.startswith(
        "bad, seed 0: round 1: weighting own_weights:Own: weigh() failed: KeyError: 'lost' (own_weights.py"
    )
    assert dead.startswith("dead, seed 0: its process ended early (SIGKILL, perhaps for want of memory)")
    assert [len(row.seeds) for row in result.rows] == [0, 0, 1]
    (own,) = RunFolder.read_runs(sweep.cells[2].config.folder(tmp_path / "runs"))
    uniform = simulate(sweep.cells[2].config, method="uniform")
    assert [record.evaluation for record in own.rounds] == [record.evaluation for record in uniform.runs[0].rounds]


@pytest.mark.slow
def test_data_are_loaded_once_by_each_process_that_needs_them(tmp_path, monkeypatch):
    (tmp_path / "counted_data.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOADS", str(tmp_path / "loads"))
    changes = {"data.name": "counted_data:make", "training.rounds": 1, "seeds": [0]}
    run_sweep(sweep_of(tmp_path, "[sweep]\nmethods = ['fedavg', 'fedla']\n", changes=changes), tmp_path / "runs", 1)
    loads = (tmp_path / "loads").read_text().splitlines()
    assert len(loads) == len(set(loads)) == 2  # this process, and the one that trains both


class Recorded(list):
    """Progress callbacks that record their calls: the name, then the arguments."""

    def __getattr__(self, name):
        return lambda *arguments: self.append((name, *arguments))

    def of(self, name):
        return [call[1:] for call in self if call[0] == name]

    def begun(self):
        return [([job.name for job in jobs], finished) for jobs, finished in self.of("begin")]


@pytest.mark.slow
def test_a_sweep_is_ordinary_runs_which_another_sweep_may_share(tmp_path):
    tables = "[sweep]\naccuracy = 0.3\nmethods = ['fedavg']\n"
    sweep, progress = sweep_of(tmp_path, tables), Recorded()
    first = run_sweep(sweep, tmp_path / "runs", processes=1, progress=progress)
    names = ["fedavg, seed 0", "fedavg, seed 1"]
    assert progress.begun() == [(names, 0)]
    ended = [(job.name, round) for job, round, accuracy in progress.of("round") if 0 <= accuracy <= 1]
    assert sorted(ended) == [(name, round) for name in names for round in range(4)]
    assert sorted((job.name, failure) for job, failure, _ in progress.of("ended")) == [(name, None) for name in names]
    assert first.failures == ()

    alone = simulate(sweep.cells[0].config.for_seed(1), out=tmp_path / "alone")
    run = alone.config.folder(tmp_path / "runs")
    for file in ("model.safetensors", "config.toml", "partition.npz"):
        assert (run / file).read_bytes() == (alone.folder / file).read_bytes()
    assert json.loads((run / "summary.json").read_text())["headline"] == alone.runs[0].summary["headline"]
    accuracies = [seed["accuracy"] for seed in first.rows[0].seeds.values()]
    assert accuracies[1] == alone.runs[0].summary["final"]["accuracy"]
    (shown,) = csv.DictReader((first.folder / "table.csv").read_text().splitlines())
    assert float(shown["accuracy_mean"]) == pytest.approx(np.mean(accuracies))
    assert float(shown["accuracy_std"]) == pytest.approx(np.std(accuracies, ddof=1))

    more = sweep_of(tmp_path, tables, changes={"seeds": [0, 2], "sweep.methods": ["fedavg", "fedla"]})
    missing = [job for job in Job.of(more) if not job.is_finished(tmp_path / "runs")]
    assert [(config.name, config.seeds) for config in Job.configs(missing)] == [
        ("small-fedavg", [2]), ("small-fedla", [0, 2]),
    ]  # fmt: skip

    part, progress = sweep_of(tmp_path, tables, changes={"seeds": [0], "sweep.accuracy": 0.9}), Recorded()
    again = run_sweep(part, tmp_path / "runs", progress=progress)
    assert progress.begun() == [([], 1)]
    assert again.folder != first.folder
    assert again.table()[1][0][:2] == ["fedavg", "1"]
    assert "fedavg" in again.report.read_text()
