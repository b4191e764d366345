"""What a summary counts, and what the terminal and the page say it is."""

import io
import re
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from example_runs import example_run

from common import task
from fedskew import simulate
from fedskew.cli.page import Console
from fedskew.cli.run import print_results
from fedskew.errors import ConfigError
from fedskew.experiment import Sweep, run_sweep
from fedskew.report import SeedRun, write_report

TASK = task(6, beta=0.2, rounds=3, participation=0.34, lr=0.05) | {"method": "fedavg"}


def accuracies(result):
    return [record["evaluation"]["accuracy"] for record in result.rounds if record["evaluation"]]


def printed(*results, width=200):
    console = Console(file=io.StringIO(), width=width)
    print_results(console, results)
    return console.file.getvalue()


def averaged_over(runs: list[SeedRun]) -> str:
    return SeedRun.headline_in_words(run.summarised("last 10") for run in runs)


def test_the_mean_of_the_last_rounds_leaves_out_the_untrained_model_and_says_over_how_many_it_is():
    result = simulate(TASK)
    assert len(accuracies(result)) == 4
    assert result.summary["last10"]["accuracy"] == pytest.approx(fmean(accuracies(result)[1:]))
    assert result.summary["last10"]["evaluations"] == 3
    assert averaged_over(result.runs) == "mean of the last 3 rounds"


def test_without_a_trained_round_there_is_no_such_mean():
    result = simulate({**TASK, "training": {"rounds": 0}})
    assert result.summary["last10"]["evaluations"] == 0
    assert result.summary["last10"]["accuracy"] is None
    assert result.summary["final"]["accuracy"] == accuracies(result)[0]
    assert averaged_over(result.runs) == "no trained round"


def test_a_mean_over_fewer_evaluations_than_rounds_says_both():
    one, other = example_run(rounds=12, evaluate_every=5), example_run(rounds=40)
    assert averaged_over([one]) == "mean of 3 evaluations in the last 10 rounds"  # 5, 10 and 12
    assert averaged_over([other]) == "mean of the last 10 rounds"
    assert averaged_over([example_run(rounds=1)]) == "last round"
    assert averaged_over([example_run(rounds=12, evaluate_every=20)]) == "one evaluation in the last 10 rounds"
    assert averaged_over([one, other]) == "mean of 3 to 10 evaluations in the last 10 rounds"
    assert averaged_over([example_run(rounds=2), other]) == "mean of the last 2 to 10 rounds"


def test_the_maximum_is_never_below_the_final_figure():
    target = {"mix": [0.5] + [1 / 18] * 9}  # the round that is best on the target is not the best on all classes
    result = simulate({**TASK, "seeds": [3], "training": {**TASK["training"], "rounds": 6}, "target": target})
    final, most = result.summary["final"], result.summary["max"]
    evaluations = [record["evaluation"] for record in result.rounds]
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "target_accuracy"):
        assert most[name] == max(evaluation[name] for evaluation in evaluations) >= final[name], name
    assert most["loss"] == min(evaluation["loss"] for evaluation in evaluations)


class Ends:
    """Hears of a sweep no more than which accuracy each run ends with."""

    def __init__(self):
        self.accuracies = []

    def ended(self, job, failure, accuracy):
        self.accuracies.append(accuracy)

    def __getattr__(self, name):
        return lambda *_: None


SWEEP = """
name = "task"
data = {name = "digits", validation = 0.2, rows = 500}
partition = {rule = "quantity", clients = 10, labels_per_client = 2}
model = {name = "logistic"}
training = {rounds = 30, participation = 0.2, lr = 0.1}
seeds = [0, 1]
evaluation.summary = "KIND"
[sweep]
methods = ["fedavg"]
"""
WORDS = {
    "final": "the final model",
    "last 10": "mean of the last 10 rounds",
    "best on validation": "the model that is best on validation",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(WORDS))
def test_every_place_shows_the_same_headline_under_the_same_name_and_the_last_tenth_beside_it(kind, tmp_path):
    (tmp_path / "sweep.toml").write_text(SWEEP.replace("KIND", kind))
    sweep, ends = Sweep.read(tmp_path / "sweep.toml"), Ends()
    done = run_sweep(sweep, tmp_path / "runs", processes=1, progress=ends)
    result = simulate(sweep.cells[0].config)
    by_hand = {
        "final": [records[-1] for records in evaluations_of(result)],
        "last 10": [fmean(records[-10:]) for records in evaluations_of(result)],
        "best on validation": [run.summary["best_by_validation"]["accuracy"] for run in result.runs],
    }[kind]
    assert [run.summary["headline"]["accuracy"] for run in result.runs] == pytest.approx(by_hand)
    assert {run.summary["headline"]["of"] for run in result.runs} == {kind}
    assert sorted(ends.accuracies) == pytest.approx(sorted(by_hand))
    figure = f"{100 * fmean(by_hand):.1f} ± {100 * stdev(by_hand):.1f}"
    tenth = [fmean(records[-3:]) for records in evaluations_of(result)]
    beside = f"{100 * fmean(tenth):.1f} ± {100 * stdev(tenth):.1f}"
    table = (done.folder / "table.md").read_text()
    assert f"| {figure} |" in table
    assert f"| {beside} |" in table
    page = write_report(result.runs, tmp_path / "page.html", "a page").read_text()
    page = re.sub(r"<[^>]+>", "", page)
    for text in (table, done.report.read_text(), printed(result), repr(result), result._repr_html_(), page):
        assert figure in text
        assert WORDS[kind] in " ".join(text.split())
    assert f"{beside} %" in page
    assert "last tenth" in page


def evaluations_of(result):
    return [
        [record.evaluation.accuracy for record in run.rounds if record.evaluation is not None] for run in result.runs
    ]


def test_differences_are_tested_by_the_headline_figure(tmp_path):
    result = simulate({**TASK, "seeds": [0, 1, 2], "training": {**TASK["training"], "rounds": 12}})
    other = [replace(run, label="other") for run in simulate({**TASK, "seeds": [0, 1, 2]}).runs]
    pages = {}
    for kind in ("final", "last 10"):
        runs = [run.summarised(kind) for run in (*result.runs, *other)]
        pages[kind] = re.sub(r"<[^>]+>", "", write_report(runs, tmp_path / "page.html", "a page").read_text())
        gains = [
            100 * (mine.headline["accuracy"] - its.headline["accuracy"])
            for mine, its in zip(*halves(runs), strict=True)
        ]
        assert f"{fmean(gains):+.1f} (" in pages[kind] or f"{-fmean(gains):+.1f} (" in pages[kind]
    assert pages["final"] != pages["last 10"]


def halves(runs):
    return runs[: len(runs) // 2], runs[len(runs) // 2 :]


def test_the_best_on_validation_needs_validation_samples():
    with pytest.raises(ConfigError, match=r"^evaluation.summary: there is no validation set; set data.validation to"):
        simulate({**TASK, "evaluation": {"summary": "best on validation"}})


@pytest.mark.slow
def test_what_is_said_of_a_run_is_no_other_run(tmp_path):
    done = simulate(TASK, out=tmp_path)
    said = simulate({**TASK, "evaluation": {"summary": "last 10"}}, out=tmp_path, resume=True)
    assert said.folder == done.folder
    assert said.summary["headline"] == {"of": "last 10", **done.summary["last10"]}
    assert said.headline()["accuracy"].mean == done.summary["last10"]["accuracy"]


def test_runs_of_different_lengths_stand_in_one_table_with_the_range():
    short = {**TASK, "training": {"rounds": 1}, "name": "short"}
    text = printed(*(simulate(one, evaluation={"summary": "last 10"}) for one in (TASK, short)))
    assert "mean of the last 1 to 3 rounds" in text


def test_the_intervals_over_test_samples_stand_beside_the_figures_that_have_one():
    result = simulate(TASK | {"seeds": [0, 1]})
    low, high = (fmean(run.summary["intervals"]["accuracy"][end] for run in result.runs) for end in (0, 1))
    assert result.intervals()["accuracy"] == (pytest.approx(low), pytest.approx(high))
    text = printed(result)
    assert f"{result.headline()['accuracy'].text(scale=100)} ({100 * low:.1f}-{100 * high:.1f})" in text
    assert "in brackets 95 %" in text
    last = simulate(TASK | {"evaluation": {"summary": "last 10"}})
    assert last.intervals() == {}
    assert "brackets" not in printed(last)
    narrow = printed(result, width=44)
    shown = [*re.findall(r"[(]\d+[.]\d-\d+[.]\d[)]", text), "accuracy", "seconds"]
    assert [one for one in shown if one not in narrow] == []
    assert narrow.count(" run ") > 1
    assert max(map(len, narrow.splitlines())) <= 44
