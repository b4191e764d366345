"""Divide one labelled data set among clients: rules, and a record of the split that can be saved.

A rule's `split(labels, clients, rng, num_classes=None)` returns an ascending array of indices for each client.
"""

from fedskew.partition._dirichlet import DirichletByClass as DirichletByClass
from fedskew.partition._dirichlet import DirichletByClient as DirichletByClient
from fedskew.partition._dirichlet import DirichletWithinDomains
from fedskew.partition._fedpals import OneLabelMissing
from fedskew.partition._fedpals import oracle as oracle
from fedskew.partition._few_labels import PairedShards as PairedShards
from fedskew.partition._few_labels import Quantity as Quantity
from fedskew.partition._few_labels import Shards as Shards
from fedskew.partition._few_labels import Sparsity as Sparsity
from fedskew.partition._iid import IID
from fedskew.partition._iid import IIDAndExclusive as IIDAndExclusive
from fedskew.partition._natural import Natural
from fedskew.partition._natural import grouped as grouped
from fedskew.partition._natural import natural_split as natural_split
from fedskew.partition._partition import Partition as Partition
from fedskew.partition._rule import hold_out as hold_out
from fedskew.partition._rule import stratified as stratified

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
