"""A result, looked at in a notebook or from Python."""

import re
import sys
from dataclasses import replace
from statistics import fmean, stdev

import matplotlib
import numpy as np
import pytest

import fedskew
from common import task
from fedskew.errors import ArgumentError, MissingPackageError

matplotlib.use("Agg")

TASK = task(10, labels=5, rounds=3, lr=0.1, participation=0.5) | {
    "name": "digits",
    "seeds": [0, 4],
    "evaluation": {"every": 2},
}


@pytest.fixture(scope="module")
def result():
    return fedskew.simulate(TASK)


def headline(result):
    means = [run.summary["final"]["accuracy"] for run in result.runs]
    return f"{100 * fmean(means):.1f} ± {100 * stdev(means):.1f} %"


def test_its_repr_is_one_short_line_with_the_headline_figure(result, tmp_path):
    assert "\n" not in repr(result)
    assert len(repr(result)) < 200
    assert repr(result).startswith(f"<Result of 'digits': accuracy {headline(result)}; worst class ")
    assert "the final model, 2 seeds" in repr(result)


def test_a_notebook_shows_a_small_table(result):
    page = result._repr_html_()
    words = re.sub(r"<[^>]+>", " ", page)
    assert headline(result) in words
    for fact in ("2 seeds, 3 rounds, 10 clients, 10 classes", "the final model", "± standard deviation"):
        assert fact in words
    assert len(page) < 1500
    assert page.count("<div") == page.count("</div>")


def test_one_of_something_is_not_called_several(tmp_path):
    single = fedskew.simulate({**TASK, "name": "one", "seeds": [0], "training": {"rounds": 1}})
    words = re.sub(r"<[^>]+>", " ", single._repr_html_())
    assert "1 seed, 1 round, 10 clients" in words
    assert "±" not in words
    assert "the final model, 1 seed" in repr(single)


def test_the_frame_is_tidy_a_row_a_round_and_numbers_only(result):
    frame = result.to_frame()
    assert frame[["run", "seed", "round"]].values.tolist() == [["digits", s, r] for s in (0, 4) for r in range(4)]
    assert all(kind.kind in "ifb" for name, kind in frame.dtypes.items() if name != "run")
    records = result.rounds
    expected = [np.nan if record["evaluation"] is None else record["evaluation"]["accuracy"] for record in records]
    np.testing.assert_array_equal(frame["evaluation.accuracy"], expected)
    np.testing.assert_array_equal(frame["bytes_up"], [record["bytes_up"] for record in records])
    assert frame["loss"].isna().tolist() == [record["loss"] is None for record in records]
    worst = frame["evaluation.worst_class"].dropna()
    assert (worst <= frame["evaluation.balanced_accuracy"].dropna()).all()


def test_a_record_that_says_everything_has_the_numbers_of_any_other(result):
    run = result.runs[0]
    said = {
        "limited": [1],
        "unmoved": "few",
        "fallback": "no target",
        "target": {"mix": [1.0]},
        "privacy": {"epsilon": 1},
    }
    records = [replace(record, **said, deployment={}, steps_summed=7) for record in run.rounds]
    full = replace(result, runs=(replace(run, rounds=records),))
    assert full.to_frame().columns.tolist() == result.to_frame().columns.tolist()
    assert set(full.to_frame()["steps_summed"]) == {7}
    with pytest.raises(ArgumentError, match="figure: no round has 'privacy'"):
        full.plot("privacy")


def test_classes_are_rows_with_what_was_trained_and_what_was_right(result):
    frame = result.per_class()
    assert len(frame) == 20
    assert frame.columns.tolist() == [
        "run", "seed", "round", "class", "accuracy", "test_samples", "predicted", "training_samples", "clients",
    ]  # fmt: skip
    assert set(frame["round"]) == {3}
    for run in result.runs:
        rows = frame[frame["seed"] == run.seed]
        last = run.rounds[-1].evaluation
        assert rows["class"].tolist() == list("0123456789")
        assert rows["accuracy"].tolist() == last.per_class
        assert rows["training_samples"].tolist() == run.counts.sum(axis=0).tolist()
        assert rows["clients"].tolist() == (run.counts > 0).sum(axis=0).tolist()
        assert rows["test_samples"].sum() == rows["predicted"].sum() == 445
        right = (rows["accuracy"] * rows["test_samples"]).sum()
        assert right / 445 == pytest.approx(last.accuracy)
    assert set(result.per_class(2)["round"]) == {2}
    with pytest.raises(ArgumentError, match=r"round: 1 was not evaluated \(evaluated: 0, 2, 3\)"):
        result.per_class(1)


@pytest.mark.slow
def test_a_plot_has_the_mean_over_seeds_and_a_second_result_goes_beside_it(result):
    from matplotlib import pyplot

    axes = result.plot()
    drawn = [line for line in axes.lines if line.get_label() == "digits"]
    assert len(drawn) == 1
    assert drawn[0].get_xdata().tolist() == [0, 2, 3]
    frame = result.to_frame().groupby("round")["evaluation.accuracy"].mean().dropna()
    np.testing.assert_allclose(drawn[0].get_ydata(), 100 * frame)
    assert result.plot(ax=axes) is axes
    colors = {line.get_color() for line in axes.lines if line.get_label() == "digits"}
    assert len(colors) == 2
    assert result.plot("drift").get_title() == "drift"
    assert result.plot("worst_class").get_title() == "worst class, %"
    with pytest.raises(ArgumentError, match="figure: no round has 'accurac' .did you mean 'accuracy'?"):
        result.plot("accurac")
    pyplot.close("all")


def test_without_pandas_the_extra_is_named(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for method in ("to_frame", "per_class"):
        with pytest.raises(MissingPackageError, match=rf"Result.{method} needs pandas: pip install 'fedskew\[frames"):
            getattr(result, method)()


@pytest.mark.slow
def test_a_bar_is_shown_where_it_is_asked_for_and_a_script_prints_nothing(capsys):
    task = {**TASK, "seeds": [0], "training": {"rounds": 2}}
    fedskew.simulate(task)
    fedskew.simulate(task, progress=False)
    assert capsys.readouterr() == ("", "")
    fedskew.simulate(task, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"digits: 2 of 2 rounds  seed 0  accuracy 0\.\d{3}\n", err)
    seen = []
    fedskew.simulate(task, progress=seen.append)
    assert [record["round"] for record in seen] == [0, 1, 2]
    assert capsys.readouterr() == ("", "")
