"""What a summary counts, and what the terminal and the page say it is."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from statistics import fmean

import pytest
from example_runs import example_run
from rich.console import Console

from fedskew import simulate
from fedskew.cli.tables import results_table
from fedskew.experiment import over_seeds
from fedskew.report import averaged_over, write_report

TASK = {
    "data": {"name": "digits"},
    "partition": {"rule": "dirichlet_by_class", "clients": 6, "beta": 0.2, "min_size": 1},
    "model": {"name": "logistic"},
    "method": "fedavg",
    "training": {"rounds": 3, "participation": 0.34, "lr": 0.05},
}


def accuracies(result):
    return [record["evaluation"]["accuracy"] for record in result.rounds if record["evaluation"]]


def printed(*results):
    console = Console(file=io.StringIO(), width=200)
    console.print(results_table(results))
    return console.file.getvalue()


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
    target = {"mix": [0.9] + [0.1] * 9}  # the round that is best on the target is not the best on all classes
    result = simulate({**TASK, "seeds": [3], "training": {**TASK["training"], "rounds": 6}, "target": target})
    final, most = result.summary["final"], result.summary["max"]
    evaluations = [record["evaluation"] for record in result.rounds]
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "target_accuracy"):
        assert most[name] == max(evaluation[name] for evaluation in evaluations) >= final[name], name
    assert most["loss"] == min(evaluation["loss"] for evaluation in evaluations)


def test_terminal_and_page_show_the_same_headline_figure(tmp_path):
    result = simulate({**TASK, "seeds": [0, 1]})
    mean = over_seeds([run.summary for run in result.runs])["last10"]["accuracy"]
    figure = f"{100 * mean['mean']:.1f} ± {100 * mean['std']:.1f}"
    assert figure in printed(result)
    assert "mean of the last 3 rounds" in printed(result)
    page = re.sub(r"<[^>]+>", "", write_report(result.runs, tmp_path / "page.html", "a page").read_text())
    head = page[: page.index("In numbers")]
    assert f"{figure} %" in head
    assert "mean of the last 3 rounds" in head


def test_runs_of_different_lengths_stand_in_one_table_with_the_range():
    one, two = simulate(TASK), simulate({**TASK, "training": {"rounds": 1}})
    text = printed(one, replace(two, config=two.config.model_copy(update={"name": "short"})))
    assert "mean of the last 1 to 3 rounds" in text
