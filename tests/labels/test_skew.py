"""The report: FedLA's three properties and the rest, by hand, at scale, and in words."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy.optimize import linprog

from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts, describe

COUNTS = LabelCounts(
    [[6, 2, 0, 0], [0, 0, 8, 0], [2, 2, 2, 2], [0, 0, 0, 0]], ["a", "b", "c", "d"], ["w", "x", "y", "z"]
)


def test_label_distribution_by_hand() -> None:
    found = describe(COUNTS).label_distribution
    # pooled (8, 4, 10, 2) of 24
    shares = np.array([8, 4, 10, 2]) / 24
    bits = -(shares * np.log2(shares)).sum()
    np.testing.assert_allclose(found.histogram, shares)
    assert found.richness == 4
    assert found.entropy == pytest.approx(bits)
    assert found.evenness == pytest.approx(bits / 2)
    assert found.client_richness.tolist() == [2, 1, 4, 0]
    # H(3/4, 1/4) = 2 - 3/4 log2 3
    quarters = 2 - 0.75 * math.log2(3)
    np.testing.assert_allclose(found.client_evenness, [quarters / 2, 0, 1, 0], atol=1e-15)
    # mutual information: H(pooled) - mean H(client), sizes 8, 8, 8
    assert found.skew == pytest.approx((bits - (quarters + 0 + 2) / 3) / bits)
    # to first order: 2 x 3 degrees of freedom over 2 x 24 ln 2
    assert found.skew_by_chance == pytest.approx(6 / (48 * math.log(2)) / bits)


def test_client_consistency_by_hand() -> None:
    found = describe(COUNTS).client_consistency
    # sorted mixes (3/4, 1/4, 0, 0), (1, 0, 0, 0), (1/4, 1/4, 1/4, 1/4)
    hellinger = [math.sqrt(1 - math.sqrt(0.75)), math.sqrt(1 - (math.sqrt(0.75 * 0.25) + 0.25)), math.sqrt(1 - 0.5)]
    assert found.hellinger == pytest.approx(np.mean(hellinger))
    # cumulated (.75, 1, 1, 1), (1, 1, 1, 1), (.25, .5, .75, 1): distances 0.25, 1.25, 1.5
    assert found.emd == pytest.approx(1.0)
    assert (found.pairs, found.sampled) == (3, False)


def test_inter_client_distribution_by_hand() -> None:
    found = describe(COUNTS).inter_client
    # Only z has a single holder, c, of whose samples it is a quarter.
    assert found.shared == pytest.approx((1 + 1 + 0.75) / 3)
    # {w,x} and {y}: 0; {w,x} and all: 1/2; {y} and all: 1/4
    assert found.jaccard == pytest.approx(0.25)
    assert found.holders.tolist() == [2, 2, 2, 1]
    np.testing.assert_allclose(found.largest_holding, [0.75, 0.5, 0.8, 1])


def test_quantity_skew_by_hand() -> None:
    found = describe([[1, 0], [2, 1], [0, 8], [0, 0]]).quantity
    assert (found.smallest, found.median, found.mean, found.largest, found.empty) == (0, 2, 3, 8, 1)
    # mean absolute difference over all 16 pairs, over twice the mean: (1+3+8 + 2+7 + 5) x 2 / 16 / 6
    assert found.gini == pytest.approx(2 * 26 / 16 / 6)
    assert found.variation == pytest.approx(math.sqrt((9 + 4 + 0 + 25) / 4) / 3)
    assert found.largest_tenth == pytest.approx(8 / 12)


def test_groups_of_each_client_by_name() -> None:
    by_client = describe(COUNTS).to_dict()["by_client"]
    assert by_client["a"]["majority"] == ["w"]
    assert by_client["a"]["minority"] == ["x"]
    assert by_client["a"]["vacant"] == ["y", "z"]
    assert by_client["c"]["minority"] == ["w", "x", "y", "z"]
    assert by_client["d"]["vacant"] == ["w", "x", "y", "z"]
    assert {name: sizes.tolist() for name, sizes in describe(COUNTS).group_sizes().items()} == {
        "vacant": [2, 3, 0, 4],
        "minority": [1, 0, 4, 0],
        "majority": [1, 1, 0, 0],
    }


def test_coverage_of_a_target_out_of_reach() -> None:
    # Clients hold x only together with as much w: the nearest mix to (0, 1) is (1/2, 1/2).
    found = describe([[5, 5], [9, 0]], [0, 1]).target
    assert found is not None
    np.testing.assert_allclose(found.nearest, [0.5, 0.5], atol=1e-14)
    assert found.distance == pytest.approx(0.5)
    assert found.covered == pytest.approx(0.5)
    np.testing.assert_allclose(found.short, [0, 0.5], atol=1e-14)
    # FedAvg's mix is (14, 5) / 19
    assert found.fedavg_distance == pytest.approx(2 * (14 / 19) ** 2)


def test_what_the_nearest_mix_has_in_common_is_not_called_the_most_that_weights_can_have() -> None:
    counts = np.array([[0, 3, 1, 6], [7, 0, 3, 0], [8, 8, 0, 5], [5, 0, 6, 0], [0, 4, 3, 1]])
    target = np.array([1, 4, 8, 8]) / 21
    mixes = counts / counts.sum(axis=1, keepdims=True)
    clients, classes = counts.shape
    # The linear programme: maximise sum(m) with m <= target and m <= the mix of weights on the simplex.
    most = linprog(
        np.r_[np.zeros(clients), -np.ones(classes)],
        A_ub=np.c_[-mixes.T, np.eye(classes)],
        b_ub=np.zeros(classes),
        A_eq=[[1] * clients + [0] * classes],
        b_eq=[1],
        bounds=[(0, None)] * clients + [(0, share) for share in target],
    )
    report = describe(counts, target)
    assert report.target is not None
    assert report.target.covered < -most.fun - 0.02 < 0.98, "the nearest mix is not the one with most in common"
    assert "in common" in str(report)
    assert "at most" not in str(report)


def test_coverage_of_a_target_within_reach() -> None:
    found = describe([[5, 0], [0, 1]], [3, 1]).target
    assert found is not None
    assert found.covered == pytest.approx(1)
    assert found.distance == pytest.approx(0, abs=1e-28)
    assert not found.short.any()


def test_rare_single_and_absent_classes() -> None:
    report = describe([[50, 50, 3, 0], [50, 50, 0, 0]])
    assert (report.rare.tolist(), report.single_holder.tolist(), report.absent.tolist()) == ([2], [2], [3])
    assert describe([[5, 1]]).single_holder.tolist() == []


def pairwise(counts: np.ndarray) -> tuple[float, float, float]:
    """Mean Hellinger, mean earth mover's distance and mean Jaccard, pair by pair."""
    mixes = [row / row.sum() for row in counts if row.sum()]
    ordered = [np.sort(mix)[::-1] for mix in mixes]
    pairs = list(itertools.combinations(range(len(mixes)), 2))
    return (
        float(np.mean([math.sqrt(max(0, 1 - (np.sqrt(ordered[i] * ordered[j])).sum())) for i, j in pairs])),
        float(np.mean([np.abs(np.cumsum(ordered[i]) - np.cumsum(ordered[j])).sum() for i, j in pairs])),
        float(
            np.mean(
                [((mixes[i] > 0) & (mixes[j] > 0)).sum() / ((mixes[i] > 0) | (mixes[j] > 0)).sum() for i, j in pairs]
            )
        ),
    )


def test_means_over_pairs_are_exact_where_there_are_few() -> None:
    counts = np.random.default_rng(0).integers(0, 3, (40, 6)).astype(float)
    report = describe(counts)
    found = report.client_consistency.hellinger, report.client_consistency.emd, report.inter_client.jaccard
    assert found == pytest.approx(pairwise(counts))


def test_means_over_many_pairs_are_sampled_and_say_so() -> None:
    base = np.random.default_rng(0).integers(0, 3, (60, 6)) + np.eye(6)[np.arange(60) % 6]
    report = describe(np.tile(base, (30, 1)))
    assert report.client_consistency.sampled
    assert report.inter_client.sampled
    assert "sampled pairs" in str(report)
    # 30 copies: of the 1799 others of a client 29 are its equals, for whom distances are 0 and the similarity 1.
    hellinger, emd, jaccard = pairwise(base)
    others = 59 * 30 / 1799
    assert report.client_consistency.emd == pytest.approx(emd * others)
    assert report.client_consistency.hellinger == pytest.approx(hellinger * others, abs=0.003)
    assert report.inter_client.jaccard == pytest.approx(jaccard * others + 29 / 1799, abs=0.003)
    assert str(describe(np.tile(base, (30, 1)))) == str(report)


@pytest.mark.slow
def test_a_hundred_thousand_clients_need_no_matrix_of_clients() -> None:
    rng = np.random.default_rng(0)
    counts = np.floor(rng.random((100_000, 10)) * (rng.random((100_000, 10)) < 0.3) * 50)
    report = describe(counts, np.arange(1, 11))
    assert report.inter_client.pairs == 200_000
    assert report.target is not None
    assert report.target.covered == pytest.approx(1)


def test_figures_of_many_clients_are_those_of_few() -> None:
    # Half of 20,000 clients hold one label, half two evenly, one in ten nothing. Sorted and cumulated these mixes are
    # (1, 1, ...) and (1/2, 1, ...): 1/2 rank apart, in a share n / (2 (n - 1)) of the pairs of n clients.
    counts = np.zeros((20_000, 8))
    counts[::2, 0] = 6
    counts[1::2, 3] = counts[1::2, 5] = 2
    counts[::10] = counts[5::10] = 0
    report = describe(counts)
    assert report.client_consistency.emd == pytest.approx(0.5 * 16_000 / (2 * 15_999))
    assert report.client_consistency.sampled
    # sqrt(1 - sqrt(1/2)) between unlike mixes, half of the pairs
    assert report.client_consistency.hellinger == pytest.approx(math.sqrt(1 - math.sqrt(0.5)) / 2, abs=0.01)
    assert report.inter_client.jaccard == pytest.approx(0.5, abs=0.01)
    for client in (1, 2, 10, 19_998, 19_999):
        alone = describe(counts[[client, 1]])
        assert report.kl_to_uniform[client] == alone.kl_to_uniform[0]
        assert report.groups[client].tolist() == alone.groups[0].tolist()


def test_a_random_division_is_hardly_skewed_and_disjoint_labels_are_wholly() -> None:
    even = np.random.default_rng(0).multinomial(200, np.full(10, 0.1), size=50)
    found = describe(even).label_distribution
    assert found.skew == pytest.approx(found.skew_by_chance, rel=0.2)
    assert describe(np.eye(10) * 7).label_distribution.skew == pytest.approx(1)
    assert describe(np.full((5, 4), 3)).label_distribution.skew == pytest.approx(0, abs=1e-12)


def test_cohort_entropy_is_that_of_a_random_tenth() -> None:
    # Ten clients, a tenth is one: every cohort has a single label.
    assert describe(np.eye(10) * 7).label_distribution.cohort_entropy == 0
    assert describe(np.full((30, 4), 2)).label_distribution.cohort_entropy == pytest.approx(2)
    assert math.isnan(describe(np.full((9, 4), 2)).label_distribution.cohort_entropy)


def test_the_report_is_plain_json_even_where_figures_do_not_exist() -> None:
    report = json.loads(json.dumps(describe([[3, 0]]).to_dict(), allow_nan=False))
    assert report["client_consistency"]["hellinger"] is None
    assert report["inter_client"]["jaccard"] is None
    assert report["label_distribution"]["cohort_entropy"] is None
    assert report["target"] is None
    full = json.loads(json.dumps(describe(COUNTS, [1, 1, 1, 1]).to_dict(), allow_nan=False))
    assert full["target"]["covered"] == pytest.approx(1)
    assert full["inter_client"]["holders"] == {"w": 2, "x": 2, "y": 2, "z": 1}


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (np.eye(10) * 50, "strongly skewed"),
        (np.full((10, 3), 40), "hardly skewed"),
        ([[5, 5]], "One client alone has no skew"),
        (np.eye(10) * 50, "FedVLS"),
        (np.eye(10) * 50, "FedLA"),
        (np.eye(10) * 50, "FedEntOpt"),
        ([[9, 0], [4, 0]], "No client holds class 1"),
        ([[50, 50, 1], [50, 50, 1]], "Rare, below a fifth of an even share: class 2"),
        ([[5, 5, 0], [1, 9, 9]], "1 of them lacks exactly one class"),
        (np.vstack([np.full((1, 2), 500), np.full((11, 2), 5)]), "The largest tenth of the clients (1) holds 90%"),
    ],
)
def test_sentences_name_what_is_there_and_what_addresses_it(counts: object, words: str) -> None:
    assert any(words in sentence for sentence in describe(counts).sentences())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ([1, 1], "Weighing clients can match the target exactly"),
        ([9, 1], "No weighing of clients matches the target. The nearest mix lies at a squared distance of 0.08"),
        ([9, 1], "and has 80% in common with it"),
        ([9, 1], "falls short of class 0 (most of 0: 70.0% instead of 90.0%)"),
        ([11, 9], "FedPALS has nothing to gain"),
        (None, "give that mix as the target"),
    ],
)
def test_sentences_say_what_a_target_needs(target: list[float] | None, words: str) -> None:
    # mixes 70 : 30 and 40 : 60, pooled 55 : 45
    assert any(words in sentence for sentence in describe([[70, 30], [40, 60]], target).sentences())


def test_even_labels_call_for_no_method() -> None:
    text = str(describe(np.full((20, 4), 30)))
    for method in ("FedVLS", "FedLA", "FedEntOpt", "FedPALS"):
        assert method not in text


def test_describe_refuses_a_federation_without_samples() -> None:
    with pytest.raises(ArgumentError, match="counts: no client holds a sample"):
        describe(np.zeros((3, 2)))
    with pytest.raises(ArgumentError, match="target: must have the shape"):
        describe([[1, 2]], [1, 2, 3])


@pytest.mark.parametrize("counts", [[[1]], [[4], [2]], [[0, 0], [3, 1]], [[1, 0]], np.eye(3)])
def test_every_small_federation_can_be_printed(counts: object) -> None:
    assert "label distribution" in str(describe(counts, np.ones(np.shape(counts)[1])))
