from __future__ import annotations

import numpy as np
import pytest

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition import INDEX, DirichletByClass

DirichletWithinDomains = INDEX["dirichlet_within_domains"]

# Four domains of unequal size, interleaved.
DOMAINS = np.random.default_rng(1).permutation(np.repeat([0, 1, 2, 3], [3000, 1000, 2000, 1500]))
LABELS = np.random.default_rng(2).integers(0, 10, len(DOMAINS))


def test_six_clients_a_domain_in_the_order_of_the_domains() -> None:
    split = DirichletWithinDomains(0.1).split_domains(LABELS, DOMAINS, 24, np.random.default_rng(0))
    assert [set(DOMAINS[held]) for held in split] == [{client // 6} for client in range(24)]
    np.testing.assert_array_equal(np.sort(np.concatenate(split)), np.arange(len(LABELS)))
    assert min(map(len, split)) >= 10
    assert all(np.all(np.diff(held) > 0) for held in split)


def test_within_a_domain_it_is_the_dirichlet_by_class() -> None:
    split = DirichletWithinDomains(0.5).split_domains(LABELS, DOMAINS, 8, np.random.default_rng(7))
    first = np.flatnonzero(DOMAINS == 0)
    expected = DirichletByClass(0.5).split(LABELS[first], 2, np.random.default_rng(7))
    for held, own in zip(split[:2], expected, strict=True):
        np.testing.assert_array_equal(held, first[own])


def test_a_domain_that_is_held_out_as_a_whole_has_no_clients() -> None:
    kept = DOMAINS != 2
    split = DirichletWithinDomains(0.5).split_domains(LABELS[kept], DOMAINS[kept], 6, np.random.default_rng(0))
    assert [set(DOMAINS[kept][held]) for held in split] == [{0}, {0}, {1}, {1}, {3}, {3}]


def test_refuses_clients_that_do_not_divide_evenly() -> None:
    with pytest.raises(PartitionError, match="10 clients .* 4 domains: take a multiple of 4"):
        DirichletWithinDomains(0.1).split_domains(LABELS, DOMAINS, 10, np.random.default_rng(0))


def test_says_in_which_domain_the_draws_fail() -> None:
    with pytest.raises(PartitionError, match="in domain 1: .* lower min_size"):
        DirichletWithinDomains(0.5, min_size=200).split_domains(LABELS, DOMAINS, 24, np.random.default_rng(0))


@pytest.mark.parametrize("domains", [[0, 1], ["a"] * len(DOMAINS)])
def test_refuses_domains_that_are_not_one_integer_a_sample(domains) -> None:
    with pytest.raises(ArgumentError, match="domains: must be one integer a sample"):
        DirichletWithinDomains(0.1).split_domains(LABELS, domains, 4, np.random.default_rng(0))
