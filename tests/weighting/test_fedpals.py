"""FedPALS: judged by a general solver, by its properties, and by certificates where problems are hard."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts, effective_sample_size, projection_distance
from fedskew.mixing import Programme
from fedskew.weighting import INDEX, Answered, fedavg, fedpals, fedpals_solve, fedpals_strength
from programmes import minimum

FedPALS = INDEX["fedpals"]

QUICK = settings(max_examples=100, deadline=None, derandomize=True)
FEWER = settings(QUICK, max_examples=40)  # each solves several times
SEEDS = st.integers(0, 10**6)


def federation(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Label counts and a target of one of many kinds: duplicates, empty clients, uneven sizes, targets on the hull."""
    rng = np.random.default_rng(seed)
    clients, classes = int(rng.integers(1, 25)), int(rng.integers(1, 9))
    kind = rng.integers(5)
    if kind == 0:
        counts = rng.integers(0, 4, (clients, classes)).astype(float)
    elif kind == 1:
        counts = np.floor(rng.dirichlet(np.full(classes, 0.1), clients) * rng.integers(1, 1000, (clients, 1)))
    elif kind == 2:
        counts = np.eye(classes)[rng.integers(0, classes, clients)] * rng.integers(1, 10, (clients, 1))
    elif kind == 3:
        counts = rng.dirichlet(np.ones(classes), clients) * 10.0 ** rng.integers(0, 7, (clients, 1))
    else:
        counts = np.tile(rng.integers(0, 5, (max(1, clients // 3), classes)), (3, 1)) * 10.0 ** rng.integers(0, 4)
    counts[0, 0] += 1
    if rng.random() < 0.2:
        counts[rng.integers(len(counts))] *= 0
        counts[0, 0] += 1
    marginals = LabelCounts(counts).marginals[counts.sum(axis=1) > 0]
    target = [
        rng.dirichlet(np.ones(classes)),
        np.eye(classes)[rng.integers(classes)],
        rng.dirichlet(np.ones(len(marginals))) @ marginals,
        marginals[-1],
        np.full(classes, 1 / classes),
    ][rng.integers(5)]
    return counts, target


def judged(
    counts: np.ndarray,
    linear: float | np.ndarray,
    penalty: float,
    fit: float,
    reach: np.ndarray | None = None,
    limit: float | None = None,
) -> np.ndarray:
    """A general solver's weights: min fit ||S^T a||^2 + linear S a + penalty a^2 / n, S^T a = reach if given."""
    sizes = counts.sum(axis=1)
    present = sizes > 0
    mixes = LabelCounts(counts[present]).marginals
    quadratic = 2 * fit * mixes @ mixes.T + 2 * np.diag(np.maximum(penalty / sizes[present], 1e-10))
    found = np.zeros(len(counts))
    towards = np.broadcast_to(linear, counts.shape[1])
    found[present] = minimum(quadratic, mixes @ towards, None if reach is None else mixes.T, reach, limit)
    found = np.clip(found, 0, limit)
    return found / found.sum()


def objective(counts: np.ndarray, target: np.ndarray, weights: np.ndarray, strength: float) -> float:
    missing = target - weights @ LabelCounts(counts).marginals
    return float(missing @ missing) + strength / effective_sample_size(weights, counts.sum(axis=1))


def assert_certified(found, counts: np.ndarray, target: np.ndarray, limit: float = 1.0, close: float = 1e-9) -> None:
    """Weights are weights, and what is said of them is true."""
    sizes = counts.sum(axis=1)
    assert max(found.gap, found.kkt) <= close
    assert 0 <= found.weights.min() <= found.weights.max() <= limit * (1 + 1e-12)
    assert found.weights.sum() == pytest.approx(1, abs=1e-12)
    assert (found.weights[sizes == 0] == 0).all()
    assert found.ess == pytest.approx(effective_sample_size(found.weights, sizes))
    assert found.ess <= sizes.sum() * (1 + 1e-12)
    missing = target - found.weights @ LabelCounts(counts).marginals
    assert found.distance == pytest.approx(float(missing @ missing), abs=1e-15)


@pytest.mark.slow
@QUICK
@given(SEEDS, st.floats(-3, 3))
def test_no_general_solver_does_better_and_none_finds_other_weights(seed: int, magnitude: float) -> None:
    counts, target = federation(seed)
    sizes = counts.sum(axis=1)
    strength = 10**magnitude * sizes[sizes > 0].mean()
    found = fedpals_solve(counts, target, strength)
    other = judged(counts, -2 * target, strength, 1.0)
    assert objective(counts, target, found.weights, strength) <= objective(counts, target, other, strength) + 1e-12
    # The penalty is strongly convex: weights as near in objective as the judge's tolerance are near in a.
    np.testing.assert_allclose(found.weights, other, atol=1e-4)


@pytest.mark.slow
@FEWER
@given(SEEDS)
def test_at_strength_zero_the_fit_is_best_and_of_those_the_effective_sample_size_largest(seed: int) -> None:
    counts, target = federation(seed)
    sizes = counts.sum(axis=1)
    found = fedpals_solve(counts, target)
    assert found.distance == pytest.approx(projection_distance(counts, target), abs=1e-12)
    # Among weights with the same mix, a general solver finds none that are worth more samples.
    mixes = LabelCounts(counts).marginals
    other = judged(counts, 0.0, sizes.sum(), 0.0, found.weights @ mixes)
    assert_certified(found, counts, target)
    assume(np.abs(other @ mixes - found.weights @ mixes).max() <= 1e-9)  # else the judge gave up: a corner of the hull
    assert found.ess >= effective_sample_size(other, sizes) * (1 - 1e-8)
    # And it is the limit: a tiny strength trades no more distance than its penalty is worth.
    strength = 1e-9 * sizes.sum()
    near = fedpals_solve(counts, target, strength)
    assert near.ess >= found.ess * (1 - 1e-9)
    assert near.distance <= found.distance + strength / found.ess + 1e-12


@pytest.mark.slow
@QUICK
@given(SEEDS, st.sampled_from([0.0, 1e-300, 1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e12, 1e18, 1e300, math.inf]))
def test_every_solution_is_certified_and_tells_the_truth(seed: int, strength: float) -> None:
    counts, target = federation(seed)
    found = fedpals_solve(counts, target, strength)
    assert_certified(found, counts, target)
    sizes, mixes = counts.sum(axis=1), LabelCounts(counts).marginals
    if 1e-6 * sizes.sum() <= strength <= 1e3 * sizes.sum():  # the residual is what the weights themselves violate
        present, shares = sizes > 0, np.divide(found.weights, sizes, out=np.zeros(len(sizes)), where=sizes > 0)
        gradient = -2 * mixes @ (target - found.weights @ mixes) + 2 * strength * shares
        above = found.weights @ gradient - gradient
        violated = np.where(found.weights > 0, np.abs(above), np.maximum(above, 0))[present].max()
        assert violated / max(1, strength / sizes.sum()) == pytest.approx(found.kkt, abs=1e-13)
    pooled = fedpals(counts, counts.sum(axis=0), strength)  # as target it gives FedAvg at every strength
    np.testing.assert_allclose(pooled, fedavg(counts), atol=1e-8)


@pytest.mark.slow
@FEWER
@given(SEEDS)
def test_the_effective_sample_size_never_falls_as_the_strength_grows(seed: int) -> None:
    counts, target = federation(seed)
    sizes = [fedpals_solve(counts, target, strength).ess for strength in (0, 1e-3, 0.1, 10, 1e3, math.inf)]
    assert (np.diff(sizes) >= -1e-9 * counts.sum()).all()


@pytest.mark.parametrize("delta", [0.0, 0.3, 1.0])
def test_the_synthetic_task_weighs_both_clients_alike(delta: float) -> None:
    # By symmetry the nearest mix is (.5, .25, .25), half of each client, at a squared distance of 3/8 delta^2.
    target = (1 - delta) * np.array([0.5, 0.25, 0.25]) + delta * np.array([0, 0.5, 0.5])
    found = fedpals_solve([[20, 20, 0], [9, 0, 9]], target)
    np.testing.assert_allclose(found.weights, [0.5, 0.5], atol=1e-12)
    assert found.distance == pytest.approx(0.375 * delta**2, abs=1e-15)


@pytest.mark.parametrize("strength", [0.0, 1e-3, 10.0])
def test_sizes_from_one_to_a_million_are_certified(strength: float) -> None:
    rng = np.random.default_rng(3)
    counts = rng.dirichlet(np.full(10, 0.3), 200) * 10.0 ** rng.uniform(0, 6, (200, 1))
    for target in (np.full(10, 0.1), np.eye(10)[0], counts[7]):
        found = fedpals_solve(counts, target, strength)
        assert max(found.gap, found.kkt) <= 1e-9


@pytest.mark.parametrize("strength", [0.0, 2000.0])
def test_twenty_thousand_clients_are_certified(strength: float) -> None:
    rng = np.random.default_rng(0)
    counts = np.floor(rng.dirichlet(np.full(30, 0.1), 20_000) * rng.integers(20, 500, (20_000, 1)))
    for target in (rng.dirichlet(np.ones(30)), np.eye(30)[0] * 0.9 + 1 / 300):
        found = fedpals_solve(counts, target, strength)
        assert max(found.gap, found.kkt) <= 1e-12


@pytest.mark.slow
@FEWER
@given(SEEDS, st.floats(0.01, 0.99))
def test_the_strength_for_a_share_is_the_smallest_that_reaches_it(seed: int, share: float) -> None:
    counts, target = federation(seed)
    samples = counts.sum()
    strength = fedpals_strength(counts, target, share)
    assert fedpals_solve(counts, target, strength).ess >= share * samples * (1 - 2e-9)
    if strength > 0:
        assert fedpals_solve(counts, target, strength * (1 - 1e-6)).ess < share * samples


def test_strengths_at_the_ends() -> None:
    counts = [[10, 0], [0, 30]]
    assert fedpals_strength(counts, [1, 1], 0) == 0
    # Equal weights are worth 1 / (0.25 / 10 + 0.25 / 30) = 30 of 40 samples.
    assert fedpals_strength(counts, [1, 1], 0.75) == 0
    assert fedpals_strength(counts, [1, 1], 0.7501) > 0
    assert fedpals_strength(counts, [1, 1], 1) == math.inf
    assert fedpals_strength(counts, [1, 3], 1) == 0
    # a = (7/18, 11/18) at strength 12 is worth 1 / (49 / 3240 + 121 / 9720) = 9720 / 268 samples.
    assert fedpals_strength(counts, [1, 1], 9720 / 268 / 40) == pytest.approx(12, rel=1e-8)


SIZES, HALVES = np.array([10.0, 30.0]), np.array([0.5, 0.5])


@pytest.mark.parametrize(
    ("parameters", "weights"),
    [
        ({}, [0.5, 0.5]),
        ({"strength": 12}, [7 / 18, 11 / 18]),
        ({"ess": 9720 / 268 / 40}, [7 / 18, 11 / 18]),
        ({"ess": 1.0}, [0.25, 0.75]),
    ],
)
def test_the_component_weighs_by_strength_or_by_share_of_effective_samples(parameters, weights) -> None:
    for counts in ([[10.0, 0], [0, 30]], [[0.5, 0], [0, 2.5]]):  # noisy ones by exact sizes
        found = FedPALS(**parameters).weigh(Answered(np.array(counts), SIZES, HALVES))
        np.testing.assert_allclose(found, weights, rtol=1e-7)


def test_the_component_says_what_it_needs_and_what_to_do() -> None:
    assert FedPALS.needs_target
    with pytest.raises(ArgumentError, match=r"target: .*set \[target\] mix, or choose a weighting that needs none"):
        FedPALS().weigh(Answered(np.ones((2, 2)), np.ones(2)))
    with pytest.raises(ArgumentError, match=r"^ess: "):
        FedPALS(strength=1, ess=0.5)
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ArgumentError, match="^ess_fraction: must be a share from 0 to 1"):
            fedpals_strength([[1, 2]], [1, 1], share)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEEDS, st.one_of(st.just(0.0), st.floats(1e-3, 1)), st.sampled_from([0.0, 1e-12, 1e-6, 1e-3, 1.0]))
def test_under_a_limit_no_general_solver_does_better_and_the_certificate_says_so(
    seed: int, share: float, kappa: float
) -> None:
    counts, target = federation(seed)
    sizes = counts.sum(axis=1)
    limit = share + (1 - share) / (sizes > 0).sum()  # from where it binds all to where it binds none
    strength = kappa * sizes.sum()
    found = fedpals_solve(counts, target, strength, limit=limit)
    reached = objective(counts, target, found.weights, strength)
    assert_certified(found, counts, target, limit, close=1e-6 * max(1, reached))
    other = judged(counts, -2 * target, strength, 1.0, limit=limit)
    assert reached <= objective(counts, target, other, strength) + 1e-7 * max(1, reached)


def test_so_many_effective_clients_at_least_at_the_least_cost() -> None:
    def weigh(counts: list, target: list, **options: float) -> np.ndarray:
        table = np.array(counts, dtype=float)
        return FedPALS(**options).weigh(Answered(table, table.sum(axis=1), np.array(target)))

    # (a, 1 - a) with 1 / (a^2 + (1 - a)^2) = 1.8 has a = 2 / 3; without the floor it is 1.
    np.testing.assert_allclose(weigh([[5, 0], [0, 5]], [1, 0], effective_clients=0.9), [2 / 3, 1 / 3], atol=1e-8)
    np.testing.assert_allclose(weigh([[5, 0], [0, 5]], [1, 0], effective_clients=0.5), [1, 0], atol=1e-8)
    np.testing.assert_allclose(weigh([[5, 0], [0, 5]], [1, 0], effective_clients=1.0), [0.5, 0.5], atol=1e-6)
    # Who says 1e12 of each class has all the weight, and an effective sample size of 1e12; now that of five of ten.
    honest = np.random.default_rng(0).integers(1, 30, (9, 2)).tolist()
    for strength in (0.0, math.inf):
        assert weigh([[1e12, 1e12], *honest], [0.5, 0.5], strength=strength)[0] > 0.99
        weights = weigh([[1e12, 1e12], *honest], [0.5, 0.5], strength=strength, effective_clients=0.5)
        assert 1 / (weights @ weights) == pytest.approx(5, rel=1e-6)
        assert weights @ LabelCounts([[1e12, 1e12], *honest]).marginals == pytest.approx([0.5, 0.5], abs=0.05)


def test_the_limit_of_a_round_is_solved_with_and_not_cut_afterwards() -> None:
    counts = np.eye(3)
    weights = FedPALS().weigh(Answered(counts, counts.sum(axis=1), np.array([0.6, 0.3, 0.1]), limit=0.5))
    np.testing.assert_allclose(weights, [0.5, 0.35, 0.15], atol=1e-12)  # by their weights it would be .5, .375, .125
    ess = FedPALS(ess=0.9).solve(Answered(counts, counts.sum(axis=1), np.array([0.6, 0.3, 0.1]), limit=0.5))[0]
    assert ess.ess >= 0.9 * 3 * (1 - 1e-9)
    assert ess.weights.max() <= 0.5
    counts = np.array([[30, 49, 41], [8, 23, 6], [9, 20, 49]])  # FedAvg within the limit, however large the strength
    for kappa in (1e11, 5e13, 9.9e13, np.inf):
        weights = fedpals_solve(counts, [0.5, 0.1, 0.4], kappa * counts.sum(), limit=0.5).weights
        np.testing.assert_allclose(weights, [0.5, 37 / 230, 78 / 230], atol=1e-10)


# The projection of a target on the hull of the clients' mixes, in real and in degenerate federations.


RNG = np.random.default_rng(5)
SPARSE = np.floor(RNG.dirichlet(np.full(20, 0.1), size=3000) * 300)


@pytest.mark.parametrize(
    ("counts", "target"),
    [
        (SPARSE, np.full(20, 0.05)),
        (SPARSE, np.eye(20)[3] * 0.9 + 0.005),
        (SPARSE, SPARSE[0] / SPARSE[0].sum()),
        (RNG.dirichlet(np.full(20, 5.0), size=3000), RNG.dirichlet(np.ones(20))),
        (np.tile([[2.0, 1.0, 1.0]], (9, 1)), np.array([0.2, 0.4, 0.4])),
        (np.array([[1.0]]), np.array([1.0])),
        (np.eye(6), np.full(6, 1 / 6)),
        (np.vstack([np.eye(3), np.eye(3), [[1, 1, 0]]]), np.array([0.5, 0.5, 0.0])),
    ],
    ids=["inside", "outside", "a client", "dense", "identical", "one", "vertices", "duplicates on a face"],
)
def test_nobody_can_lessen_the_distance(counts: np.ndarray, target: np.ndarray) -> None:
    found = Programme(counts, target).projection
    marginals = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    scores = marginals @ found.residual
    # Optimal exactly where every client with weight has the best score on the residual (Wolfe's criterion).
    best = scores[counts.sum(axis=1) > 0].max()
    assert best - scores[found.weights > 0].min() <= 1e-13
    assert found.weights.sum() == pytest.approx(1, abs=1e-13)
    assert found.weights.min() >= 0
    assert max(found.gap, found.kkt) <= 1e-13
    np.testing.assert_allclose(found.residual, target - found.weights @ marginals, atol=1e-13)
