"""Weights from sums of counts: equal to those from the counts themselves; and what sums of cohorts would tell."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fedskew import sums, weighting
from fedskew.errors import ArgumentError
from fedskew.weighting import FedLA, Question, fedla_share, fedpals_answer, fedpals_from_sums, fedpals_weight

FloatArray = NDArray[np.float64]


def skewed(clients: int, seed: int, classes: int = 10) -> FloatArray:
    rng = np.random.default_rng(seed)
    mixes = rng.dirichlet(np.full(classes, 0.3), clients)
    return np.array([rng.multinomial(rng.integers(50, 900), mix) for mix in mixes], dtype=np.float64)


def test_fedla_shares_are_fedla_s_weights() -> None:
    counts = skewed(12, 0)
    counts[:, 4] = 0  # a class that nobody holds
    shares = np.array([fedla_share(own, counts.sum(axis=0)) for own in counts])
    assert shares / shares.sum() == pytest.approx(weighting.fedla(counts), abs=1e-15)
    assert shares.sum() == pytest.approx(9)
    # By hand: 3 of 4 and 0 of 2.
    assert fedla_share([3, 0], [4, 2]) == 0.75
    balanced = np.array([[10.0, 30.0], [40.0, 20.0]])
    assert [fedla_share(own, [50, 50]) for own in balanced] == pytest.approx([40 / 50, 60 / 50])  # FedAvg


def test_fedla_s_shares_with_masked_totals() -> None:
    pytest.importorskip("cryptography")
    counts = skewed(4, 1)
    keys = [sums.Key.generate() for _ in counts]
    peers = {str(at): key.public for at, key in enumerate(keys)}
    context = sums.SumContext("run", 0, 1, "counts", tuple(peers))
    both = [sums.mask(sums.COUNTS.encode(own), key, peers, context) for own, key in zip(counts, keys, strict=True)]
    opened = sums.unmask(
        {str(at): masked for at, (masked, _) in enumerate(both)},
        {str(at): sums.answer(pending, peers) for at, (_, pending) in enumerate(both)},
        context,
    )
    assert opened.tolist() == counts.sum(axis=0).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_fedpals_from_sums_is_fedpals(seed: int) -> None:
    counts = skewed(10 + 15 * seed, seed)
    rng = np.random.default_rng(seed)
    target = rng.dirichlet(np.ones(10))
    strength = float(10.0 ** rng.uniform(-2.5, 0.5)) * counts.sum()
    solved = fedpals_from_sums(
        lambda question: sum(fedpals_answer(own, question) for own in counts), target, strength, len(counts)
    )
    weights = np.array([fedpals_weight(own, solved.question) for own in counts])
    assert np.abs(weights - weighting.fedpals(counts, target, strength)).sum() < 1e-6
    assert solved.exchanges <= 40


@pytest.mark.parametrize("clients", [10, *(pytest.param(many, marks=pytest.mark.slow) for many in (30, 100, 300))])
@pytest.mark.parametrize("strength", [1e-8, 1e-4, 1.0, 1e3])
def test_fedpals_from_sums_is_exact_at_every_strength_and_size(strength: float, clients: int) -> None:
    counts = skewed(clients, clients)
    target = np.random.default_rng(clients).dirichlet(np.ones(10))

    def ask(question: Question) -> FloatArray:
        answers = (fedpals_answer(own, question) for own in counts)
        form = sums.AMOUNTS if question.direction is None else sums.SHARES  # as at real sites
        return form.decode(sums.add(form.encode(answer) for answer in answers))

    solved = fedpals_from_sums(ask, target, strength, clients)
    weights = np.array([fedpals_weight(own, solved.question) for own in counts])

    assert np.abs(weights - weighting.fedpals(counts, target, strength)).sum() < 1e-6
    assert solved.exchanges < 100


def test_answers_in_fixed_point_do_as_well() -> None:
    counts = skewed(20, 3)
    form = sums.FixedPoint(64, 30, 1e6)

    def ask(question: Question) -> FloatArray:
        return form.decode(sums.add(form.encode(fedpals_answer(own, question)) for own in counts))

    strength = 0.05 * counts.sum()
    solved = fedpals_from_sums(ask, np.full(10, 0.1), strength, 20, tolerance=1e-6)
    weights = np.array([fedpals_weight(own, solved.question) for own in counts])
    assert np.abs(weights - weighting.fedpals(counts, np.full(10, 0.1), strength)).sum() < 1e-4


def test_few_clients_are_refused() -> None:
    with pytest.raises(ArgumentError, match="clients: 9 are too few, as the sums would tell their counts"):
        fedpals_from_sums(lambda question: np.zeros(1), [1, 1], 1.0, 9)
    for of_told in (weighting.FedLA(), weighting.FedAvg()):  # of three, two that work together know the third's
        with pytest.raises(ArgumentError, match="clients: 9 are too few, as the sums would tell their counts"):
            of_told.announce(lambda question: np.ones(2), None, 9)
        assert of_told.announce(lambda question: np.ones(2), None, 10)["totals"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("strength", "why"), [(0.0, "strength: must be above 0"), (np.inf, "strength: must be above 0")]
)
def test_strengths_that_it_can_not_do(strength: float, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        fedpals_from_sums(lambda question: np.zeros(1), [1, 1], strength, 10)


def test_mistakes_are_said() -> None:
    for own, totals, why in (
        ([1, 2], [1, 1], "totals: are below the client's own"),
        ([1, 2], [1, 2, 3], "totals: expected shape"),
        ([1, -2], [3, 3], "counts: expected a finite number"),
        ([[1, 2]], [3, 3], "counts: expected a finite number"),
    ):
        with pytest.raises(ArgumentError, match=why):
            fedla_share(own, totals)
    with pytest.raises(ArgumentError, match="question: expected a direction"):
        fedpals_weight([1, 2], Question())
    with pytest.raises(ArgumentError, match="no client holds a sample"):
        fedpals_from_sums(lambda question: np.zeros((3, 3)), [1, 1], 1.0, 10)
    assert fedpals_answer([0, 0], Question(np.ones(3), np.zeros(3), 1.0, 5.0)).tolist() == [0] * 3


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
    seen: list[tuple[Question, FloatArray]] = []

    def ask(question: Question) -> FloatArray:
        seen.append((question, sum(fedpals_answer(own, question) for own in counts)))
        return seen[-1][1]

    fedpals_from_sums(ask, [0.02] * 5 + [0.18] * 5, 60.0, len(counts))

    moments, found = seen[0][1], []
    for question, answer in seen[1:]:
        assert question.direction is not None
        without = moments @ question.direction - question.samples * question.kappa * answer
        if abs(without[-1]) > 1e-6:
            mix = without[:-1] / without[-1]  # of one client, where it is one
            found.append(mix * without[-1] / (np.append(mix, 1) @ question.direction))
    assert min(np.abs(one - own).max() for one in found for own in counts) < 1e-3


def test_a_curious_server_reads_the_counts_of_a_client_that_alone_holds_a_class_in_the_first_sum() -> None:
    """No lie, and no second question: a class's row of the moments is the mix of those who hold it."""
    counts = skewed(12, 5)
    counts[:, 3] = 0
    counts[7, 3] = 40
    moments = sum(fedpals_answer(own, Question()) for own in counts)
    mix = moments[3, :-1] / moments[3, -1]
    samples = moments[3, -1] / mix[3]
    assert samples * mix == pytest.approx(counts[7], abs=1e-9)


def test_a_server_that_lies_reads_one_client_s_mix_in_a_sum_over_all() -> None:
    """The attack that docs/label-counts.md names: a question to which one client alone answers with more than 0."""
    counts = np.random.default_rng(4).integers(1, 50, size=(12, 4)).astype(float)
    mixes = counts / counts.sum(axis=1, keepdims=True)
    victim = int(mixes[:, 0].argmax())
    second = np.partition(mixes[:, 0], -2)[-2]
    made = Question(np.array([1.0, 0, 0, 0, -(mixes[victim, 0] + second) / 2]), np.zeros(5), 0.1, counts.sum())
    total = sum(fedpals_answer(own, made) for own in counts)
    assert total[:4] / total[4] == pytest.approx(mixes[victim])


def test_false_totals_make_no_client_fail_that_holds_more() -> None:
    """An error would tell a server that lies, one question a bit, how many samples a client has."""
    own = np.array([5.0, 3.0])
    assert FedLA().own_weight(own, {"totals": np.array([4.0, 1e9])}) == pytest.approx(0.5, abs=1e-8)
    assert FedLA().own_weight(own, {"totals": np.array([6.0, 1e9])}) == pytest.approx(5 / 12, abs=1e-8)
