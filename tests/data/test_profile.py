"""What samples look like: cells that add up, and which changes of later samples are found."""

import json

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_breast_cancer

from fedskew.data import Change, Profile
from fedskew.errors import ArgumentError

TABLE = load_breast_cancer()


def columns(values: np.ndarray) -> dict[str, np.ndarray]:
    return {str(name): column for name, column in zip(TABLE.feature_names, values.T, strict=False)}


def halves(seed: int, size: int = 269) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(seed).permutation(len(TABLE.data))
    return TABLE.data[rows[:size]], TABLE.data[rows[size : size + 300]]


def found(changes: list[Change]) -> set[str]:
    return {change.what for change in changes if change.p < 0.01}


def test_a_shift_by_four_units_a_flipped_value_and_swapped_columns_are_found_in_300_rows() -> None:
    before, later = halves(0)
    profile = Profile.of(columns(before))
    assert not found(profile.changes(columns(later)))
    shifted, flipped, swapped = later.copy(), later.copy(), later.copy()
    shifted[:, 0] += 4
    assert "mean radius" in found(profile.changes(columns(shifted)))
    flipped[:, 5] = 2 * before[:, 5].mean() - flipped[:, 5]  # its own distribution hardly changes
    assert "mean compactness with mean concavity" in found(profile.changes(columns(flipped)))
    swapped[:, [8, 18]] = swapped[:, [18, 8]]
    assert {"mean symmetry", "symmetry error"} <= found(profile.changes(columns(swapped)))


@pytest.mark.slow
def test_where_nothing_changed_a_hundredth_is_found() -> None:
    alarms = 0
    for seed in range(1000, 1040):
        before, later = (half[:, ::3] for half in halves(seed))
        alarms += bool(found(Profile.of(columns(before)).changes(columns(later))))
    assert alarms <= 2  # of 40


def test_profiles_of_clients_add_up() -> None:
    whole = columns(TABLE.data)
    profile = Profile.of(whole)
    one, other = (Profile.of({name: row[part] for name, row in whole.items()}, profile.cells)
                  for part in (slice(0, 100), slice(100, None)))  # fmt: skip
    assert one.samples + other.samples == profile.samples
    for name, counts in profile.counts.items():
        assert sum(counts) == profile.samples
        assert tuple(np.add(one.counts[name], other.counts[name])) == counts
    np.testing.assert_allclose(np.add(one.products, other.products), profile.products)
    assert Profile.of_plain(json.loads(json.dumps(profile.plain()))) == profile


def test_cells_are_deciles_of_normal_numbers_and_p_is_chi_squared_s() -> None:
    numbers = np.append(stats.norm.ppf((np.arange(1000) + 0.5) / 1000), [np.nan] * 10)
    texts = np.array(["a"] * 600 + ["b"] * 400 + [""] * 10, dtype=object)
    profile = Profile.of({"x": numbers, "kind": texts})
    assert profile.counts["x"] == (100,) * 10 + (10,)
    assert profile.counts["kind"] == (600, 400, 10)
    later = {"x": numbers[:500], "kind": np.array(["a"] * 400 + ["new"] * 100, dtype=object)}
    changes = {change.what: change for change in profile.changes(later)}
    p = stats.chi2_contingency([[600, 400, 10], [400, 0, 100]], correction=False).pvalue
    lower = stats.chi2_contingency([[100] * 10 + [10], [100] * 5 + [0] * 6], correction=False).pvalue
    assert p < lower
    assert changes["kind"].p == pytest.approx(2 * min(p, lower))  # Holm
    assert changes["x"].p == pytest.approx(lower)
    assert changes["kind"].unit == "share of b"
    assert (changes["kind"].before, changes["kind"].now) == (pytest.approx(400 / 1010), 0)
    assert changes["x"].now == pytest.approx(numbers[:500].mean())


def test_what_is_compared_of_pictures_and_of_texts() -> None:
    images = torch.rand(6, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    found = Profile.columns(images)
    assert sorted(found) == sorted(f"{what} of channel {at}" for what in ("brightness", "contrast") for at in range(3))
    assert found["contrast of channel 1"][2] == pytest.approx(images[2, 1].std().item(), rel=1e-6)
    texts = Profile.columns(torch.tensor([[5, 1, 1, 0], [0, 0, 0, 0]]))
    assert texts["words"].tolist() == [3, 0]
    np.testing.assert_allclose(texts["share of unknown words"], [2 / 3, 0])


def test_columns_that_can_t_be_compared() -> None:
    with pytest.raises(ArgumentError, match="expected at least one, all of the same number"):
        Profile.of({"x": np.zeros(2), "y": np.zeros(3)})
    with pytest.raises(ArgumentError, match="y is missing"):
        Profile.of({"x": np.zeros(2), "y": np.zeros(2)}).changes({"x": np.ones(2)})
    assert Profile.of({"x": np.zeros(2)}).changes({"x": np.zeros(3)}) == [Change("x", 1.0, 0.0, 0.0, "mean")]
