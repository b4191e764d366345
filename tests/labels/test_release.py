"""Private release: the noise's scale, clamping, and where the noise comes from."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fedskew.errors import ArgumentError, MissingPackageError
from fedskew.labels import LabelCounts, privatize

HIGH = np.full((200, 200), 1e6)
"""Far from 0, so that clamping touches nothing."""


@pytest.mark.parametrize(("neighbours", "sensitivity"), [("add-remove", 1), ("replace", 2)])
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_seeded_noise_is_laplace_of_scale_sensitivity_over_epsilon(
    neighbours: str, sensitivity: int, epsilon: float
) -> None:
    noise = privatize(HIGH, epsilon, np.random.default_rng(1), neighbours) - HIGH
    scale = sensitivity / epsilon
    # Of Laplace(b): mean 0, E|x| = b with standard deviation b, P(|x| > 2b) = exp(-2); 40,000 draws, five deviations.
    assert noise.mean() == pytest.approx(0, abs=5 * np.sqrt(2) * scale / 200)
    assert np.abs(noise).mean() == pytest.approx(scale, rel=5 / 200)
    assert (np.abs(noise) > 2 * scale).mean() == pytest.approx(np.exp(-2), abs=5 * 0.342 / 200)


@pytest.mark.parametrize(("neighbours", "scale"), [("add-remove", 2.0), ("replace", 4.0)])
def test_secure_noise_has_the_same_scale(neighbours: str, scale: float) -> None:
    pytest.importorskip("opendp")
    noise = privatize(HIGH[:60, :60], 0.5, neighbours=neighbours) - 1e6
    # 3,600 draws; eight deviations, since the secure generator takes no seed.
    assert np.abs(noise).mean() == pytest.approx(scale, rel=8 / 60)
    assert noise.mean() == pytest.approx(0, abs=8 * np.sqrt(2) * scale / 60)


def test_noise_is_clamped_at_zero_and_not_rounded() -> None:
    noisy = privatize(np.zeros((100, 100)), 0.5, np.random.default_rng(0))
    assert noisy.min() == 0
    assert (noisy == 0).mean() == pytest.approx(0.5, abs=0.03)
    assert not np.array_equal(noisy, np.round(noisy))


def test_a_seed_gives_the_same_noise_and_none_gives_other_noise() -> None:
    counts = np.full((3, 4), 50.0)
    first, again = (privatize(counts, 1.0, np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(first, again)
    pytest.importorskip("opendp")
    assert not np.array_equal(privatize(counts, 1.0), privatize(counts, 1.0))


def test_a_record_keeps_its_names() -> None:
    record = LabelCounts([[5, 0], [1, 2]], ["a", "b"], ["x", "y"])
    noisy = privatize(record, 1.0, np.random.default_rng(0))
    assert isinstance(noisy, LabelCounts)
    assert (noisy.clients, noisy.classes) == (("a", "b"), ("x", "y"))
    assert isinstance(privatize([[5, 0]], 1.0, np.random.default_rng(0)), np.ndarray)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon": -1}, "epsilon"),
        ({"epsilon": np.inf}, "epsilon"),
        ({"epsilon": np.nan}, "epsilon"),
        ({"epsilon": "1"}, "epsilon"),
        ({"epsilon": 1, "neighbours": "add"}, "neighbours"),
        ({"epsilon": 1, "rng": 3}, "rng"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        privatize([[1, 2]], **arguments)


def test_without_opendp_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp", None)
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'fedskew\[dp\]'"):
        privatize([[1, 2]], 1.0)
    privatize([[1, 2]], 1.0, np.random.default_rng(0))
