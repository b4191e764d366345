"""What holds for every partition rule."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import CIFAR_LABELS, IID, DirichletWithinDomains, Natural, OneLabelMissing

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition import (
    DirichletByClass,
    DirichletByClient,
    IIDAndExclusive,
    PairedShards,
    Quantity,
    Shards,
    Sparsity,
)

RULES = [
    DirichletByClass(0.5),
    DirichletByClient(0.5),
    Quantity(2),
    Shards(2),
    PairedShards(2),
    Sparsity(3),
    IIDAndExclusive(0.3, 2, 1000),
    OneLabelMissing(0.1),
    IID(),
]
USES_ALL = (IID, DirichletByClass, DirichletByClient, Quantity, Shards, PairedShards)

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def assert_lawful(split: list[np.ndarray], clients: int, samples: int) -> None:
    assert len(split) == clients
    for held in split:
        assert held.dtype == np.int64
        assert held.ndim == 1
        assert np.all(np.diff(held) > 0)
    dealt = np.concatenate(split)
    assert len(np.unique(dealt)) == len(dealt)
    assert dealt.size == 0 or (dealt.min() >= 0 and dealt.max() < samples)


@every_rule
def test_clients_get_disjoint_ascending_indices(rule) -> None:
    labels = np.random.default_rng(3).permutation(CIFAR_LABELS)
    split = rule.split(labels, 10, np.random.default_rng(0))
    assert_lawful(split, 10, len(labels))
    if isinstance(rule, USES_ALL):
        assert sum(map(len, split)) == len(labels)


@every_rule
def test_is_a_function_of_its_rng(rule) -> None:
    np.random.seed(1)  # noqa: NPY002 (the global generator must not matter)
    first = rule.split(CIFAR_LABELS, 10, np.random.default_rng(7))
    np.random.seed(2)  # noqa: NPY002
    again = rule.split(CIFAR_LABELS, 10, np.random.default_rng(7))
    other = rule.split(CIFAR_LABELS, 10, np.random.default_rng(8))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@every_rule
def test_any_integer_type_and_a_tensor_give_the_same_split(rule) -> None:
    expected = rule.split(CIFAR_LABELS, 10, np.random.default_rng(0), num_classes=10)
    for labels in (CIFAR_LABELS.astype(np.uint8), torch.from_numpy(CIFAR_LABELS), CIFAR_LABELS.tolist()):
        split = rule.split(labels, 10, np.random.default_rng(0))
        assert all(np.array_equal(a, b) for a, b in zip(split, expected, strict=True))


@every_rule
def test_does_not_change_the_labels(rule) -> None:
    labels = CIFAR_LABELS.copy()
    labels.setflags(write=False)
    rule.split(labels, 10, np.random.default_rng(0))


@every_rule
@pytest.mark.parametrize(
    ("labels", "clients", "num_classes", "named"),
    [
        ([[0, 1], [1, 0]], 2, None, "labels: must be one-dimensional"),
        ([], 2, None, "labels: there is no sample"),
        ([0.0, 1.0], 2, None, "labels: must be integers"),
        ([True, False], 2, None, "labels: must be integers"),
        ([0, -1], 2, None, "labels: must be class ids from 0, but -1"),
        ([0, 5], 2, 5, "labels: class id 5 occurs, but num_classes is 5"),
        ([0, 1], 0, None, "clients: input should be greater than or equal to 1 .got 0."),
        ([0, 1], 2.0, None, "clients: input should be a valid integer .got 2.0."),
        ([0, 1], 2, 0, "num_classes: input should be greater than or equal to 1 .got 0."),
    ],
)
def test_refuses_bad_arguments_by_name(rule, labels, clients, num_classes, named) -> None:
    with pytest.raises(ArgumentError, match=named):
        rule.split(labels, clients, np.random.default_rng(0), num_classes=num_classes)


@every_rule
def test_refuses_a_seed_in_place_of_a_generator(rule) -> None:
    with pytest.raises(ArgumentError, match=r"rng: must be a numpy\.random\.Generator, not int"):
        rule.split(CIFAR_LABELS, 10, 0)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    clients=st.integers(1, 9),
    extra=st.integers(0, 2),
    seed=st.integers(0, 5),
    rule=st.sampled_from(
        [
            DirichletByClass(0.1, min_size=0),
            DirichletByClass(0.5, min_size=2, max_tries=20),
            DirichletByClass(0.1, min_size=1, balance=False, max_tries=20),
            DirichletByClient(0.01),
            DirichletByClient(1.0),
            Quantity(1),
            Quantity(3),
            Shards(1),
            Shards(3),
            PairedShards(1),
            PairedShards(2, low=0.0, high=1.0),
            PairedShards(2, low=0.0, high=0.5),
            Sparsity(1),
            Sparsity(3),
            IIDAndExclusive(0.5, 1, 2),
            IIDAndExclusive(1.0, 1, 1),
            OneLabelMissing(0.3),
        ]
    ),
)
def test_ends_with_a_lawful_split_or_says_what_to_change(labels, clients, extra, seed, rule) -> None:
    classes = max(labels) + 1 + extra
    message = None
    try:
        split = rule.split(labels, clients, np.random.default_rng(seed), num_classes=classes)
    except PartitionError as error:
        message = str(error)
    if message is not None:
        assert "\n" not in message
        assert any(hint in message for hint in ("lower", "raise", "take", "choose"))
        return
    assert_lawful(split, clients, len(labels))
    if isinstance(rule, USES_ALL) and not isinstance(rule, DirichletByClient):
        assert sum(map(len, split)) == len(labels)


@pytest.mark.parametrize(
    ("rule", "clients", "labels", "says"),
    [
        (DirichletByClass(0.1, min_size=200, max_tries=3), 200, CIFAR_LABELS,
         r"none of 3 draws gave 200 samples to each of 200 .* lower min_size"),
        (DirichletByClass(0.5), 3, np.zeros(20, dtype=int), "20 samples can't give 10 to each of 3 clients"),
        (DirichletByClient(0.1, sizes=(2, 2)), 2, [0, 1, 2], "sizes ask for 4 samples of 3"),
        (DirichletByClient(0.1), 3, [0, 1], "clients: 3 are more than there are samples, 2"),
        (DirichletWithinDomains(0.1), 4, CIFAR_LABELS, "no domains: choose another partition rule"),
        (Quantity(2), 5, CIFAR_LABELS, "5 clients leave some of 10 classes without a holder: take at least 10"),
        (Quantity(11), 20, CIFAR_LABELS, "a client can't hold 11 of 10 classes: lower labels_per_client"),
        (Sparsity(2), 3, np.repeat([0, 1], [100, 2]),
         "class 1 has 2 samples for 3 holders: lower clients or labels_per_client"),
        (Sparsity(11), 10, CIFAR_LABELS, "a client can't hold 11 of 10 classes"),
        (Sparsity(2), 1, CIFAR_LABELS, "the last client is the target"),
        *((Shards(each), clients, CIFAR_LABELS,
           "choose per_client or clients so that their product is a multiple of 10")
          for clients, each in [(7, 1), (3, 2), (4, 1)]),
        # floor(2 * 8 / 10) = floor(2 * 9 / 10) = 1: each class to one client, five clients; with 12 clients five pairs
        *((PairedShards(2), clients, CIFAR_LABELS,
           rf"leave over {left} clients and 0 classes: take 10 clients in pairs")
          for clients, left in [(8, 3), (9, 4), (12, 2)]),
        (PairedShards(2), 3, CIFAR_LABELS, "leave over 3 clients and 10 classes"),
        (PairedShards(2, high=1.0), 10, np.repeat(np.arange(4), 3000),
         r"5 clients share a class.*lower high to 0\.625 or less"),
        (PairedShards(2, high=0.626), 10, np.repeat(np.arange(4), 3000), "lower high"),
        (IIDAndExclusive(0.5, 2, 10), 4, np.repeat(np.arange(4), 100), "lower exclusive_share or labels_per_client"),
        (IIDAndExclusive(0.25, 2, 200), 4, np.repeat(np.arange(5), 100),
         "have 300 samples and 3 clients need 600: lower samples_per_client"),
        (IIDAndExclusive(0.3, 1, 1000), 10, np.repeat(np.arange(100), 500),
         "has 500 samples and its owner needs 1000: lower samples_per_client"),
        *((OneLabelMissing(), clients, np.arange(7), "take at least 2 and at most 7") for clients in (1, 8)),
        (IID(), 4, [0, 1, 2], "clients: 4 are more than there are samples, 3"),
        (Natural(), 2, [0, 1], "choose another partition rule"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "split") else None,
)  # fmt: skip
def test_what_can_not_be_divided_is_refused_and_what_to_change_is_said(rule, clients, labels, says) -> None:
    with pytest.raises(PartitionError, match=says):
        rule.split(labels, clients, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("rule", "arguments", "says"),
    [
        *((DirichletByClass, (beta,), "^beta: input should be (greater than 0|a finite number|a valid number)")
          for beta in (0, -1.0, float("nan"), float("inf"), "0.1", True)),
        (DirichletByClass, (0.1, -1), "min_size"),
        (DirichletByClass, (0.1, 10, "no"), "balance"),
        (DirichletByClass, (0.1, 10, True, 0), "max_tries"),
        (DirichletWithinDomains, (0.0,), "^beta: input should be greater than 0"),
        (DirichletByClient, (0.0,), "beta"),
        (DirichletByClient, (0.1, "yes"), "target_client"),
        (DirichletByClient, (0.1, False, (-1, 2)),
         r"^sizes\.0: input should be greater than or equal to 0 \(got -1\)"),
        (Quantity, (0,), "^labels_per_client: input should be greater than or equal to 1"),
        (Sparsity, (2.5,), "labels_per_client"),
        (Shards, (0,), "per_client"),
        *((PairedShards, (2, low, high), "low, high: must satisfy 0 <= low < high <= 1|low: input should be a finite")
          for low, high in [(0.5, 0.5), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 0.5)]),
        *((IIDAndExclusive, (share, 1, 1), "exclusive_share") for share in (1.1, -0.1, float("nan"))),
        (IIDAndExclusive, (0.5, 0, 1), "labels_per_client"),
        (IIDAndExclusive, (0.5, 1, 0), "samples_per_client"),
        *((OneLabelMissing, (kept,), "^kept: input should be (greater than 0|less than or equal to 1)")
          for kept in (0.0, 1.1, float("nan"))),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(rule, arguments, says) -> None:
    with pytest.raises(ArgumentError, match=says):
        rule(*arguments)


def test_sizes_must_be_as_many_as_clients() -> None:
    with pytest.raises(ArgumentError, match="sizes: has 2 entries for 3 clients"):
        DirichletByClient(0.1, sizes=(1, 2)).split([0, 1, 2], 3, np.random.default_rng(0))


def test_only_fedpals_rules_have_a_target_client() -> None:
    with_target = [rule for rule in RULES if rule.target_client]
    assert with_target == [Sparsity(3)]
    assert DirichletByClient(0.1, target_client=True).target_client
