"""What holds for every partition rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition import (
    IID,
    INDEX,
    DirichletByClass,
    DirichletByClient,
    IIDAndExclusive,
    OneLabelMissing,
    PairedShards,
    Quantity,
    Rule,
    Shards,
    Sparsity,
)

CIFAR_LABELS = np.repeat(np.arange(10), 5000)

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
def test_clients_get_disjoint_ascending_indices(rule: Rule) -> None:
    labels = np.random.default_rng(3).permutation(CIFAR_LABELS)
    split = rule.split(labels, 10, np.random.default_rng(0))
    assert_lawful(split, 10, len(labels))
    if isinstance(rule, USES_ALL):
        assert sum(map(len, split)) == len(labels)


@every_rule
def test_is_a_function_of_its_rng(rule: Rule) -> None:
    np.random.seed(1)  # noqa: NPY002 (the global generator must not matter)
    first = rule.split(CIFAR_LABELS, 10, np.random.default_rng(7))
    np.random.seed(2)  # noqa: NPY002
    again = rule.split(CIFAR_LABELS, 10, np.random.default_rng(7))
    other = rule.split(CIFAR_LABELS, 10, np.random.default_rng(8))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@every_rule
def test_any_integer_type_and_a_tensor_give_the_same_split(rule: Rule) -> None:
    expected = rule.split(CIFAR_LABELS, 10, np.random.default_rng(0), num_classes=10)
    for labels in (CIFAR_LABELS.astype(np.uint8), torch.from_numpy(CIFAR_LABELS), CIFAR_LABELS.tolist()):
        split = rule.split(labels, 10, np.random.default_rng(0))
        assert all(np.array_equal(a, b) for a, b in zip(split, expected, strict=True))


@every_rule
def test_does_not_change_the_labels(rule: Rule) -> None:
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
        ([0, float("nan")], 2, None, "labels: must be integers"),
        ([0, -1], 2, None, "labels: must be class ids from 0, but -1"),
        ([0, 5], 2, 5, "labels: class id 5 occurs, but num_classes is 5"),
        ([0, 1], 0, None, "clients: must be a whole number of at least 1"),
        ([0, 1], 2.0, None, "clients: must be a whole number"),
        ([0, 1], 2, 0, "num_classes: must be a whole number of at least 1"),
    ],
)
def test_refuses_bad_arguments_by_name(rule: Rule, labels, clients, num_classes, named) -> None:
    with pytest.raises(ArgumentError, match=named):
        rule.split(labels, clients, np.random.default_rng(0), num_classes=num_classes)


@every_rule
def test_refuses_a_seed_in_place_of_a_generator(rule: Rule) -> None:
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


def test_the_index_names_every_rule() -> None:
    assert sorted(INDEX) == [
        "dirichlet_by_class",
        "dirichlet_by_client",
        "dirichlet_within_domains",
        "iid",
        "iid_and_exclusive",
        "natural",
        "one_label_missing",
        "paired_shards",
        "quantity",
        "shards",
        "sparsity",
    ]


def test_only_fedpals_rules_have_a_target_client() -> None:
    with_target = [rule for rule in RULES if rule.target_client]
    assert with_target == [Sparsity(3)]
    assert DirichletByClient(0.1, target_client=True).target_client
