"""Divide one labelled data set among clients: rules, and a record of the split that can be saved.

A rule's `split(labels, clients, rng, num_classes=None)` returns an ascending array of indices for each client.
"""

from fedskew.partition._dirichlet import DirichletByClass, DirichletByClient, DirichletWithinDomains
from fedskew.partition._fedpals import OneLabelMissing, oracle
from fedskew.partition._few_labels import PairedShards, Quantity, Shards, Sparsity
from fedskew.partition._iid import IID, IIDAndExclusive
from fedskew.partition._natural import Natural, grouped, natural_split
from fedskew.partition._partition import Partition
from fedskew.partition._rule import hold_out, stratified

INDEX: dict[str, type] = {
    "dirichlet_by_class": DirichletByClass,
    "dirichlet_by_client": DirichletByClient,
    "quantity": Quantity,
    "shards": Shards,
    "paired_shards": PairedShards,
    "sparsity": Sparsity,
    "iid_and_exclusive": IIDAndExclusive,
    "one_label_missing": OneLabelMissing,
    "dirichlet_within_domains": DirichletWithinDomains,
    "iid": IID,
    "natural": Natural,
}
"""The rules by the name that a config gives them."""

__all__ = [
    "INDEX",
    "DirichletByClass",
    "DirichletByClient",
    "IIDAndExclusive",
    "PairedShards",
    "Partition",
    "Quantity",
    "Shards",
    "Sparsity",
    "grouped",
    "hold_out",
    "natural_split",
    "oracle",
    "stratified",
]
