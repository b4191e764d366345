"""What a lie about label counts or a loss gains a site, by numbers that follow from each method's formula."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from fedskew import methods

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are in the repository only")

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
