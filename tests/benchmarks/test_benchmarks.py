"""Benchmarks: their loops train the same model as fedskew, and what a lie gains a site follows from formulas."""

import io
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from fedskew import methods

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are in the repository only")


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A folder with a small task of the first workload: 4 clients, 400 random images, 2 rounds of 2 clients."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import dataclasses

    import simulators

    small = dataclasses.replace(simulators.WORKLOADS["w1"], clients=4, cohort=2, samples=400, epochs=1, dirichlet=None)
    assert simulators.prepare(small, 2, "random", tmp_path) == "random images"
    return tmp_path


def trained_by(task: Path, script: str, name: str, *options: str) -> dict[str, np.ndarray]:
    """The parameters that a contestant trained in two rounds, started one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS / "contestants")
        patch.chdir(BENCHMARKS / "contestants")
        patch.setenv("FEDSKEW_BENCH_TASK", "")  # set by the program: to be taken back
        patch.setattr(sys, "argv", [script, str(task), name, *options])
        patch.setattr(sys, "stdin", io.StringIO("1\n1\n"))
        out = io.StringIO()
        with redirect_stdout(out):
            import_module(script).main()
    assert sum(line.startswith("@ ") for line in out.getvalue().splitlines()) == 2
    return dict(np.load(task / f"trained-{name}.npz"))


@pytest.mark.whole_product  # what only `make bench` and benchmarks/ run
def test_the_hand_written_loops_and_fedskew_train_the_same_model(task):
    plain = trained_by(task, "by_hand", "plain")
    others = {
        "tuned": trained_by(task, "by_hand", "tuned", "--tuned"),
        "processes": trained_by(task, "by_hand", "processes", "--processes", "2"),
        "fedskew": trained_by(task, "by_fedskew", "fedskew"),
    }
    untrained = dict(np.load(task / "weights.npz"))
    assert max(np.abs(plain[key] - untrained[key]).max() for key in plain) > 5e-4
    for values in others.values():
        for key in plain:
            # A ReLU's or a pool's choice may flip by rounding; without that the largest difference is 1e-7.
            np.testing.assert_allclose(values[key], plain[key], atol=2e-5)


def test_two_parts_of_a_cohort_have_about_as_much_work(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "contestants")
    from by_hand import shares

    assert shares([0, 1, 2, 3], [5, 100, 60, 50], 2) == [[1, 0], [2, 3]]


# What a lie about label counts or a loss gains a site, by numbers that follow from each method's formula.


COUNTS = np.array([[10.0, 0.0], [45.0, 0.0], [0.0, 45.0]])
TARGET = np.array([0.5, 0.5])
MADE_UP = "10**9 samples, as many of each class"


@pytest.fixture
def gained(monkeypatch):
    """What each lie gains the smallest site, as a share of the weight."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    lies = import_module("lies").lies

    def of(name, **given):
        method = methods.build(methods.expand({"preset": name}))
        return {lie.what: lie.weight for lie in lies(method, COUNTS, TARGET, **given)}

    return of


def test_fedavgs_weight_is_the_share_of_the_samples_that_a_site_tells(gained):
    found = gained("fedavg")
    assert found[""] == pytest.approx(10 / 100)
    assert found["1,000 times its samples"] == pytest.approx(10_000 / 10_090)
    assert found["30 samples of each class"] == pytest.approx(60 / 150)
    assert 1 - found[MADE_UP] == pytest.approx(90 / (10**9 + 90))  # more a server refuses


@pytest.mark.slow
def test_thirty_of_each_class_are_all_of_fedpalss_weight_but_for_its_limit(gained):
    """The true sites fit the target together, and the liar alone does; by samples then, as the limit of lambda is."""
    assert gained("fedpals")[MADE_UP] == pytest.approx(1, abs=1e-6)
    assert gained("fedpals", weight_limit=0.5)[MADE_UP] == pytest.approx(0.5, abs=1e-6)


def test_uniform_weights_ignore_what_is_told(gained):
    assert list(gained("uniform").values()) == [pytest.approx(1 / 3)] * 5


def test_afl_gives_a_loss_that_stays_larger_all_of_the_weight(gained):
    found = gained("afl", rounds=20)
    assert found["a loss 10 times the others'"] > 0.9
    assert found[MADE_UP] == pytest.approx(1 / 3)
