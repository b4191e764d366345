"""Partitions that ask the data set whose a sample is, or where it comes from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew.data import Dataset
from fedskew.errors import PartitionError
from fedskew.experiment import make_task, resolve


def cameras() -> Dataset:
    """Six cameras with 60, 50 ... 10 samples in three domains, of two cameras each."""
    clients = np.repeat(np.arange(6), [60, 50, 40, 30, 20, 10])
    inputs, labels = torch.zeros(210, 4), torch.arange(210) % 3
    return Dataset(
        name="cameras",
        inputs=inputs,
        targets=labels,
        test_inputs=inputs,
        test_targets=labels,
        classes=("a", "b", "c"),
        clients=clients,
        client_names=tuple(f"camera {number}" for number in range(6)),
        domains=clients // 2,
        test_domains=clients // 2,
        domain_names=("north", "south", "west"),
    )


def task(**partition):
    tree = {"data": {"name": cameras}, "partition": partition, "model": "logistic", "method": "fedavg"}
    return make_task(resolve(tree | {"training": {"rounds": 1}}), seed=0)


@pytest.mark.parametrize("number", [{}, {"clients": 6}])
def test_natural_clients_keep_their_order_and_names(number):
    made = task(rule="natural", **number)
    assert made.counts.sum(axis=1).tolist() == [60, 50, 40, 30, 20, 10]
    assert made.client_names == tuple(f"camera {number}" for number in range(6))


def test_fewer_clients_than_cameras_put_whole_cameras_together():
    # 60, 50, 40; then 30 joins 40, 20 joins 50, 10 joins 60
    made = task(rule="natural", clients=3)
    assert made.counts.sum(axis=1).tolist() == [70, 70, 70]
    assert made.client_names == ("0", "1", "2")
    assert [sorted(set(cameras().clients[rows].tolist())) for rows in made.partition.indices] == [
        [0, 5],
        [1, 4],
        [2, 3],
    ]


def test_more_clients_than_cameras_are_refused():
    with pytest.raises(PartitionError, match="names 6 clients, which can't be merged into 7"):
        task(rule="natural", clients=7)


def test_a_rule_within_domains_is_told_the_domains():
    made = task(rule="dirichlet_within_domains", beta=1.0, clients=6, min_size=1)
    assert [set(cameras().domains[rows].tolist()) for rows in made.partition.indices] == [{0}, {0}, {1}, {1}, {2}, {2}]


def test_a_data_set_without_domains_is_refused():
    tree = {"data": "digits", "model": "logistic", "method": "fedavg", "training": {"rounds": 1}}
    tree["partition"] = {"rule": "dirichlet_within_domains", "beta": 1.0, "clients": 4}
    with pytest.raises(PartitionError, match="has no domains"):
        make_task(resolve(tree), seed=0)
