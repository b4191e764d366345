"""Weights from sums of counts: equal to those from the counts themselves; and what sums of cohorts would tell."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fedskew import weighting
from fedskew.errors import ArgumentError
from fedskew.sums import fixed_point
from fedskew.weighting import INDEX, Facts

FedLA = INDEX["fedla"]
FedPALS = INDEX["fedpals"]

FloatArray = NDArray[np.float64]


def skewed(clients: int, seed: int, classes: int = 10) -> FloatArray:
    rng = np.random.default_rng(seed)
    mixes = rng.dirichlet(np.full(classes, 0.3), clients)
    return np.array([rng.multinomial(rng.integers(50, 900), mix) for mix in mixes], dtype=np.float64)


def in_sum(counts: FloatArray, question: Facts) -> FloatArray:
    return sum(FedPALS().answer(own, question) for own in counts)


def weights_of(counts: FloatArray, target: FloatArray, strength: float, ask) -> FloatArray:
    component = FedPALS(strength=strength)
    announced = component.announce(ask, target, len(counts))
    return np.array([component.own_weight(own, announced) for own in counts])


def test_fedla_shares_are_fedla_s_weights() -> None:
    counts = skewed(12, 0)
    counts[:, 4] = 0  # a class that nobody holds
    shares = [FedLA().own_weight(own, {"totals": counts.sum(axis=0)}) for own in counts]
    assert shares == pytest.approx(weighting.fedla(counts), abs=1e-15)
    # By hand: 3 of 4 and 0 of 2, of two classes.
    assert FedLA().own_weight([3, 0], {"totals": np.array([4.0, 2])}) == 0.375


@pytest.mark.parametrize("seed", range(6))
def test_fedpals_from_sums_is_fedpals(seed: int) -> None:
    counts = skewed(10 + 15 * seed, seed)
    rng = np.random.default_rng(seed)
    target = rng.dirichlet(np.ones(10))
    strength = float(10.0 ** rng.uniform(-2.5, 0.5)) * counts.sum()
    asked: list[Facts] = []
    weights = weights_of(counts, target, strength, lambda question: asked.append(question) or in_sum(counts, question))
    assert np.abs(weights - weighting.fedpals(counts, target, strength)).sum() < 1e-6
    assert len(asked) <= 40


@pytest.mark.parametrize("clients", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strength", [1e-8, 1e-4, 1.0, 1e3])
def test_fedpals_from_sums_is_exact_at_every_strength_and_size(strength: float, clients: int) -> None:
    counts = skewed(clients, clients)
    target = np.random.default_rng(clients).dirichlet(np.ones(10))

    asked: list[Facts] = []

    def ask(question: Facts) -> FloatArray:
        asked.append(question)
        form = fixed_point.SHARES if question else fixed_point.AMOUNTS  # as at real sites
        return form.decode(fixed_point.add(form.encode(FedPALS().answer(own, question)) for own in counts))

    weights = weights_of(counts, target, strength, ask)
    assert np.abs(weights - weighting.fedpals(counts, target, strength)).sum() < 1e-6
    assert len(asked) < 100


def test_few_clients_are_refused() -> None:
    with pytest.raises(ArgumentError, match="clients: 9 are too few, as the sums would tell their counts"):
        FedPALS(strength=1.0).announce(lambda question: np.zeros(1), np.ones(2), 9)
    for of_told in (FedLA(), weighting.FedAvg()):  # of three, two that work together know the third's
        with pytest.raises(ArgumentError, match="clients: 9 are too few, as the sums would tell their counts"):
            of_told.announce(lambda question: np.ones(2), None, 9)
        assert of_told.announce(lambda question: np.ones(2), None, 10)["totals"].tolist() == [1, 1]


@pytest.mark.parametrize("strength", [0.0, np.inf])
def test_strengths_that_it_can_not_do(strength: float) -> None:
    with pytest.raises(ArgumentError, match="strength: must be above 0"):
        FedPALS(strength=strength).announce(lambda question: np.zeros(1), np.ones(2), 10)


def test_mistakes_are_said() -> None:
    component = FedPALS(strength=1.0)
    for own in ([1, -2], [[1, 2]]):
        with pytest.raises(ArgumentError, match="counts: expected a finite number"):
            component.answer(own, {})
    for question in ({}, {"direction": np.ones(2), "rest": np.ones(3)}):
        with pytest.raises(ArgumentError, match="question: expected a direction"):
            component.own_weight([1, 2], question)
    with pytest.raises(ArgumentError, match="no client holds a sample"):
        component.announce(lambda question: np.zeros((3, 3)), np.ones(2), 10)
    said = {"direction": np.ones(3), "rest": np.zeros(3), "kappa": np.ones(1), "samples": np.full(1, 5.0)}
    assert component.answer([0, 0], said).tolist() == [0] * 3


@pytest.mark.parametrize(("clients", "cohort"), [(20, 10), (20, 5)])
def test_totals_of_a_few_cohorts_tell_everybody_s_counts(clients: int, cohort: int) -> None:
    """Why counts are summed once over all clients and never over a cohort."""
    counts, rng = skewed(clients, 7), np.random.default_rng(11)
    took_part = np.zeros((0, clients))
    needed = 0
    while np.linalg.matrix_rank(took_part) < clients:
        row = np.isin(np.arange(clients), rng.choice(clients, cohort, replace=False))
        took_part, needed = np.vstack([took_part, row]), needed + 1
    assert needed <= clients + 5
    totals = took_part @ counts  # what the server would see, in as many rounds
    found = np.linalg.lstsq(took_part, totals, rcond=None)[0]
    assert np.array_equal(np.rint(found), counts)


def test_a_curious_server_reads_the_counts_of_a_client_that_alone_has_no_weight() -> None:
    """No lie: the first moments less a later answer are the part of those whose weight is 0 at that question."""
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(200, mix) for mix in rng.dirichlet([0.3] * 10, size=10)], 1).astype(float)
    seen: list[tuple[Facts, FloatArray]] = []

    def ask(question: Facts) -> FloatArray:
        seen.append((question, in_sum(counts, question)))
        return seen[-1][1]

    FedPALS(strength=60.0).announce(ask, np.array([0.02] * 5 + [0.18] * 5), len(counts))

    moments, found = seen[0][1], []
    for question, answer in seen[1:]:
        direction, shrunk = question["direction"], question["samples"] * question["kappa"]
        without = moments @ direction - shrunk * answer
        if abs(without[-1]) > 1e-6:
            mix = without[:-1] / without[-1]  # of one client, where it is one
            found.append(mix * without[-1] / (np.append(mix, 1) @ direction))
    assert min(np.abs(one - own).max() for one in found for own in counts) < 1e-3


def test_a_curious_server_reads_the_counts_of_a_client_that_alone_holds_a_class_in_the_first_sum() -> None:
    """No lie, and no second question: a class's row of the moments is the mix of those who hold it."""
    counts = skewed(12, 5)
    counts[:, 3] = 0
    counts[7, 3] = 40
    moments = in_sum(counts, {})
    mix = moments[3, :-1] / moments[3, -1]
    samples = moments[3, -1] / mix[3]
    assert samples * mix == pytest.approx(counts[7], abs=1e-9)


def test_a_server_that_lies_reads_one_client_s_mix_in_a_sum_over_all() -> None:
    """The attack that docs/label-counts.md names: a question to which one client alone answers with more than 0."""
    counts = np.random.default_rng(4).integers(1, 50, size=(12, 4)).astype(float)
    mixes = counts / counts.sum(axis=1, keepdims=True)
    victim = int(mixes[:, 0].argmax())
    second = np.partition(mixes[:, 0], -2)[-2]
    direction = np.array([1.0, 0, 0, 0, -(mixes[victim, 0] + second) / 2])
    scale = {"kappa": np.full(1, 0.1), "samples": np.full(1, counts.sum())}
    total = in_sum(counts, {"direction": direction, "rest": np.zeros(5), **scale})
    assert total[:4] / total[4] == pytest.approx(mixes[victim])


def test_false_totals_make_no_client_fail_that_holds_more() -> None:
    """An error would tell a server that lies, one question a bit, how many samples a client has."""
    own = np.array([5.0, 3.0])
    assert FedLA().own_weight(own, {"totals": np.array([4.0, 1e9])}) == pytest.approx(0.5, abs=1e-8)
    assert FedLA().own_weight(own, {"totals": np.array([6.0, 1e9])}) == pytest.approx(5 / 12, abs=1e-8)
