"""A target's label mix from unlabelled samples, against other people's solvers and against the truth."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import softmax

from fedskew.errors import ArgumentError
from fedskew.labels import adapt, calibrate, estimate_mix, outcome_cells, outcome_table

# 400 held-out samples of 4 classes by true and predicted class, 300 of a target by predicted class.
TABLE = np.array([[90, 6, 6, 6], [17, 48, 15, 21], [21, 10, 51, 14], [12, 3, 7, 73]])
CELLS = np.array([150, 44, 47, 59])
METHODS = ("gls", "em-cells", "bbse", "em")


def federation(seed: int, classes: int = 5, bins: int = 4) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """A model's outcomes by class, mostly right, and a target's mix."""
    rng = np.random.default_rng(seed)
    profiles = 0.4 * rng.dirichlet(np.full(classes * bins, 0.3), size=classes)
    for c in range(classes):
        profiles[c, c * bins : (c + 1) * bins] += 0.6 * rng.dirichlet(np.ones(bins))
    return profiles, rng.dirichlet(np.ones(classes)), rng


def drawn(profiles: np.ndarray, mix: np.ndarray, rng: np.random.Generator, held_out: int, target: int):
    tables = np.array([rng.multinomial(held_out // len(profiles), row) for row in profiles])
    return tables, rng.multinomial(target, mix @ profiles)


def test_least_squares_is_quapys_adjusted_count() -> None:
    # quapy 0.2.3: ACC.solve_adjustment(rates, shares, method="inversion", solver="minimize")
    expected = [0.49445628, 0.20529849, 0.16737206, 0.13287317]
    np.testing.assert_allclose(estimate_mix(TABLE, CELLS, "bbse").mix, expected, atol=1e-5)


def test_two_classes_by_hand() -> None:
    # 55 % = q 90 % + (1 - q) 20 %: q = 1/2; its variance (p (1 - p) / n + sum q^2 M (1 - M) / n_c) / 0.7^2
    estimate = estimate_mix([[900, 100], [200, 800]], [550, 450], "bbse")
    np.testing.assert_allclose(estimate.mix, [0.5, 0.5], atol=1e-9)
    variance = (0.55 * 0.45 / 1000 + 0.25 * (0.9 * 0.1 + 0.2 * 0.8) / 1000) / 0.7**2
    assert estimate.standard_errors == pytest.approx([variance**0.5] * 2, rel=5e-3)
    assert estimate.covariance[0, 1] == pytest.approx(-variance, rel=1e-2)
    assert estimate.dof == 0
    assert np.isnan(estimate.p_value)
    assert not estimate.misfit
    half = 1.959964 * estimate.standard_errors[0]
    np.testing.assert_allclose(estimate.interval(0.95), [[0.5 - half, 0.5 + half]] * 2, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_cells_that_are_exactly_a_mix_give_it_back(method: str) -> None:
    profiles, mix, _ = federation(3)
    estimate = estimate_mix(1e7 * profiles, 1e7 * mix @ profiles, method)
    np.testing.assert_allclose(estimate.mix, mix, atol=1e-4)
    assert not estimate.misfit
    assert estimate.p_value > 0.99


def test_cells_likelihood_is_the_greatest_by_a_general_solver() -> None:
    tables, cells = drawn(*federation(7), held_out=2000, target=500)
    found = estimate_mix(tables, cells, "em-cells").mix
    profiles = (tables + (tables.sum(axis=0) + cells) / (tables.sum() + cells.sum())) / (
        tables.sum(axis=1, keepdims=True) + 1
    )
    # Joined as documented: the neighbouring bins of a predicted class until thirty samples are in each.
    starts = []
    for first in range(0, 20, 4):
        inside = 0
        for cell in range(first, first + 4):
            if cell == first or inside >= 30:
                starts.append(cell)
                inside = 0
            inside += tables[:, cell].sum() + cells[cell]
        if inside < 30 and starts[-1] != first:
            starts.pop()
    profiles, shares = np.add.reduceat(profiles, starts, axis=1), np.add.reduceat(cells, starts) / cells.sum()
    best = minimize(
        lambda logits: -shares @ np.log(np.exp(logits) / np.exp(logits).sum() @ profiles), np.zeros(5), tol=1e-12
    )
    np.testing.assert_allclose(found, np.exp(best.x) / np.exp(best.x).sum(), atol=1e-4)


def test_generalised_least_squares_is_the_nearest_mix_by_a_general_solver() -> None:
    rng = np.random.default_rng(0)
    rows = rng.dirichlet(np.full(8, 5.0), size=3)
    tables = np.array([rng.multinomial(5000, row) for row in rows])  # every cell has more than thirty: none is joined
    cells = rng.multinomial(2000, [0.02, 0.98, 0] @ rows)
    found = estimate_mix(tables, cells).mix
    profiles = (tables + (tables.sum(axis=0) + cells) / (tables.sum() + 2000)) / 5001
    spread = (np.diag(found @ profiles) - np.outer(found @ profiles, found @ profiles)) / 2000
    for share, row in zip(found, profiles, strict=True):
        spread += share**2 / 5000 * (np.diag(row) - np.outer(row, row))
    weight = np.linalg.inv(spread[:-1, :-1])

    def squares(mix: np.ndarray) -> float:
        residual = (cells / 2000 - mix @ profiles)[:-1]
        return float(residual @ weight @ residual)

    best = minimize(
        squares,
        np.full(3, 1 / 3),
        method="SLSQP",
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda mix: mix.sum() - 1},
        options={"ftol": 1e-12},
    )
    np.testing.assert_allclose(found, best.x, atol=2e-4)
    assert 0 in found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gls", "em-cells"])
def test_intervals_hold_the_truth_and_the_test_rejects_as_often_as_they_say(method: str) -> None:
    held, rejected = [], []
    for seed in range(200):
        profiles, mix, rng = federation(seed % 10)
        rng = np.random.default_rng(seed)
        estimate = estimate_mix(*drawn(profiles, mix, rng, 2000, 1000), method)
        low, high = estimate.interval(0.95).T
        held.append(((low <= mix) & (mix <= high)).mean())
        rejected.append(estimate.p_value < 0.05)
    assert 0.90 <= np.mean(held) <= 0.99
    assert 0.02 <= np.mean(rejected) <= 0.09


def coverage(classes: int, apart: float, held_out: int, samples: int, mix: list[float] | None, draws: int) -> float:
    """How often 95 % intervals hold a class's share: a calibrated model whose scores of true classes are higher."""
    rng, inside = np.random.default_rng([classes, held_out, samples]), []
    for _ in range(draws):
        theirs = rng.dirichlet(np.full(classes, 0.5)) if mix is None else np.array(mix)
        cells, labels = [], []
        for shares, number in ((np.full(classes, 1 / classes), held_out), (theirs, samples)):
            labels.append(rng.choice(classes, number, p=shares))
            scores = rng.normal(size=(number, classes))
            scores[np.arange(number), labels[-1]] += apart
            probabilities = softmax(apart * scores, axis=1)
            cells.append(outcome_cells(probabilities))
        table = outcome_table(labels[0], cells[0], classes, 4)
        low, high = estimate_mix(table, np.bincount(cells[1], minlength=4 * classes)).interval().T
        inside.append((low <= theirs) & (theirs <= high))
    return float(np.mean(inside))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("apart", "held_out", "samples", "prevalence"),
    [(1.64, 2000, 8, 0.5), (2.58, 2000, 20, 0.06), (0.67, 2000, 8, 0.5), (1.64, 500, 50, 0.06), (0.67, 100, 520, 0.06)],
)
def test_intervals_from_few_samples_hold_the_truth(
    apart: float, held_out: int, samples: int, prevalence: float
) -> None:
    assert coverage(2, apart, held_out, samples, [1 - prevalence, prevalence], 200) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("samples", [8, 50])
def test_intervals_of_ten_classes_from_few_samples_hold_the_truth(samples: int) -> None:
    assert coverage(10, 4.0, 2000, samples, None, 25) >= 0.93


def test_a_perfect_models_intervals_are_clopper_and_pearsons() -> None:
    from scipy.stats import binomtest

    estimate = estimate_mix([[4e6, 0], [0, 4e6]], [19, 1])
    exact = binomtest(1, 20).proportion_ci(0.9, "exact")
    np.testing.assert_allclose(estimate.interval(0.9)[1], [exact.low, exact.high], atol=2e-3)
    below, above = estimate.reach([0.0, 1.0], 0.9)
    assert estimate.mix[1] - below == pytest.approx(exact.low, abs=4e-3)
    assert estimate.mix[1] + above == pytest.approx(exact.high, abs=4e-3)


def test_intervals_of_500_samples_and_of_501_are_about_the_same() -> None:
    few, many = (estimate_mix(10 * TABLE, [150 + more, 100, 110, 140]).interval() for more in (0, 1))
    np.testing.assert_allclose(few, many, atol=0.03)


def test_samples_that_no_mix_explains_are_a_misfit() -> None:
    from scipy import stats

    profiles, mix, rng = federation(2)
    tables, _ = drawn(profiles, mix, rng, 2000, 1000)
    strange = rng.multinomial(1000, np.roll(mix @ profiles, 2))
    estimate = estimate_mix(tables, strange)
    assert estimate.misfit
    assert estimate.p_value < 1e-6
    assert estimate.dof > 5
    assert estimate.excess > 0.03
    assert estimate.p_value == pytest.approx(stats.chi2.sf(estimate.statistic, estimate.dof))


def test_a_class_nobody_holds_is_named_and_nothing_is_known_of_it() -> None:
    estimate = estimate_mix([[90, 10, 0], [20, 80, 0], [0, 0, 0]], [55, 45, 0])
    assert estimate.unseen == (2,)
    assert estimate.mix[2] == 0
    assert estimate.interval()[2].tolist() == [0, 1]
    assert estimate.mix[:2].sum() == pytest.approx(1)


def test_predictions_that_are_all_alike_leave_the_held_out_mix_and_say_that_nothing_is_known() -> None:
    estimate = estimate_mix([[50, 0], [30, 0]], [40, 0])
    np.testing.assert_allclose(estimate.mix, [0.625, 0.375])
    np.testing.assert_array_equal(estimate.interval(), [[0, 1], [0, 1]])


def test_a_target_of_ten_samples_has_wide_intervals() -> None:
    low, high = estimate_mix(TABLE, [5, 2, 1, 2]).interval().T
    assert (high - low).min() > 0.3


def test_a_class_at_zero_has_an_interval_that_leaves_zero() -> None:
    estimate = estimate_mix([[95, 5], [5, 95]], [3, 97])
    assert estimate.mix[0] == 0
    assert estimate.interval()[0, 1] > 0.02


@pytest.mark.parametrize(
    ("tables", "cells", "method", "match"),
    [
        ([[1, 2], [3, 4]], [1, 2, 3], "gls", r"cells: must have the shape \(2,\)"),
        ([[1, np.nan], [3, 4]], [1, 2], "gls", r"tables\[0, 1\] is nan"),
        ([[1, 2], [3, 4]], [1, -2], "gls", r"cells\[1\] is -2"),
        ([[0, 0], [0, 0]], [1, 2], "gls", "no held-out sample"),
        ([[1, 2], [3, 4]], [0, 0], "gls", "no sample of the target"),
        ([[1, 2], [3, 4]], [[0.5, 0.5]], "gls", "only method 'em' takes samples"),
        ([[1, 2], [3, 4]], [1, 2], "rlls", "method: must be one of gls, em-cells, bbse, em, not 'rlls'"),
        ([[1, 2], [0, 0]], [[0.5, 0.5], [0.0, 1.0]], "em", "cells: sample 1 has no probability of any class"),
        ([1, 2], [1, 2], "gls", r"tables: must have the shape \(classes, cells\)"),
    ],
)
def test_what_does_not_fit_is_refused(tables: object, cells: object, method: str, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        estimate_mix(tables, cells, method)


def outputs(mix: list[float], samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are twice too sure and prefer classes 0 and 3, rounded as they stand in the oracle's input."""
    classes = rng.choice(4, samples, p=mix)
    logits = rng.normal(size=(samples, 4))
    logits[np.arange(samples), classes] += 1.5
    return (2 * logits + [1.0, -0.5, 0.0, 0.8]).round(2), classes


def test_calibration_and_maximum_likelihood_of_samples_are_abstentions_and_quapys() -> None:
    # abstention 0.1.3.1: TempScaling(bias_positions="all"), EMImbalanceAdapter(tolerance=1e-9); quapy 0.2.3: EMQ.EM;
    # both with the mean calibrated probabilities as the prior.
    rng = np.random.default_rng(5)
    (logits, classes), (unlabelled, _) = outputs([0.25] * 4, 400, rng), outputs([0.6, 0.2, 0.15, 0.05], 300, rng)
    calibration = calibrate(logits, classes, np.ones(400))
    prior = calibration.apply(logits).mean(axis=0)
    likelihoods = calibration.apply(unlabelled) / prior
    table = np.bincount(classes)[:, None] * np.ones((1, 4))
    estimate = estimate_mix(table, likelihoods, "em")
    np.testing.assert_allclose(estimate.mix, [0.51831985, 0.19744074, 0.17471599, 0.10952342], atol=1e-6)
    assert estimate.dof == 0


def test_calibration_has_the_greatest_likelihood_by_a_general_solver_and_a_uniform_prior() -> None:
    logits, classes = outputs([0.6, 0.2, 0.15, 0.05], 500, np.random.default_rng(1))
    weights = 1 / np.bincount(classes)[classes]

    def loss(point: np.ndarray) -> float:
        shares = logits * point[0] + point[1:]
        return float(weights @ (np.log(np.exp(shares).sum(axis=1)) - shares[np.arange(500), classes]))

    best = minimize(loss, np.append(1.0, np.zeros(4)), tol=1e-12).x
    found = calibrate(logits, classes)
    assert found.temperature == pytest.approx(1 / best[0], rel=1e-4)
    np.testing.assert_allclose(found.biases, best[1:] - best[1:].mean(), atol=1e-4)
    balanced = (weights[:, None] * found.apply(logits)).sum(axis=0) / weights.sum()
    np.testing.assert_allclose(balanced, 0.25, atol=1e-6)


def test_calibration_at_its_limits() -> None:
    perfect = calibrate(9 * np.eye(3)[[0, 1, 2]], [0, 1, 2])
    assert perfect.apply(9 * np.eye(3)).min() >= 0
    assert np.isfinite(perfect.apply(9 * np.eye(3))).all()
    says_nothing = calibrate(np.zeros((4, 2)), [0, 1, 1, 1])
    np.testing.assert_allclose(says_nothing.apply([[5.0, -5.0]]).sum(), 1)
    wrong = calibrate(9 * np.eye(2)[[0, 0, 1, 1, 0]], [1, 1, 0, 0, 0])
    np.testing.assert_allclose(wrong.apply([[9.0, 0.0]]), [[0.5, 0.5]])
    unseen = calibrate([[1.0, 0.0, 9.0], [0.0, 1.0, 9.0], [0.0, 1.0, 9.0]], [0, 1, 0])
    assert unseen.apply([[1.0, 0.0, 99.0]])[0, 2] == 0


def test_adapting_multiplies_by_the_new_share_over_the_old_one() -> None:
    np.testing.assert_allclose(adapt([[0.5, 0.3, 0.2]], [1, 1, 1], [1, 2, 0]), [[0.5 / 1.1, 0.6 / 1.1, 0]])
    same = np.array([[0.7, 0.3], [0.1, 0.9]])
    np.testing.assert_allclose(adapt(same, [0.2, 0.8], [0.2, 0.8]), same)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: adapt([[0.5, 0.5]], [1, 0], [0.5, 0.5]), "mix: class 1 has a share, but none in prior"),
        (lambda: adapt([[1.0, 0.0]], [1, 1], [0, 1]), "row 0 has no class that mix has a share of"),
        (lambda: calibrate([[1.0, 0.0]], [0]), "at least two classes, not of 1"),
        (lambda: calibrate([[1.0, 0.0]] * 2, [0, 2]), "targets: must be classes from 0 to 1, not 2"),
        (lambda: calibrate([[1.0, np.inf]] * 2, [0, 1]), r"logits\[0, 1\] is inf"),
        (lambda: calibrate([[1.0, 0.0]] * 2, [0, 1]).apply([[1.0]]), "logits: must have 2 columns"),
        (lambda: calibrate([[1.0, 0.0]] * 2, [0, 1], [1.0]), r"weights: must have the shape \(2,\)"),
    ],
)
def test_what_can_not_be_calibrated_or_adapted_is_refused(call, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        call()
