"""What a run divides and holds out, and batches of its clients that can't be trained on."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import fedskew
from fedskew.data import Dataset
from fedskew.errors import ConfigError, DataError, PartitionError
from fedskew.experiment import make_task, resolve
from fedskew.partition import INDEX, Partition

DirichletWithinDomains = INDEX["dirichlet_within_domains"]


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


def task(run=0, **partition):
    tree = {"data": {"name": cameras}, "partition": partition, "model": "logistic", "method": "fedavg"}
    return make_task(resolve(tree | {"training": {"rounds": 1}}), seed=run)


@pytest.mark.parametrize("number", [{}, {"clients": 6}])
def test_natural_clients_keep_their_order_and_names(number):
    made = task(rule="natural", **number)
    assert made.counts.sum(axis=1).tolist() == [60, 50, 40, 30, 20, 10]
    assert made.client_names == tuple(f"camera {number}" for number in range(6))


def test_baselines_pool_all_samples_and_leave_each_client_alone_once():
    rule = {"rule": "dirichlet_by_class", "clients": 5, "beta": 0.5, "seed": 7}
    whole, pooled = task(**rule), task(**rule, baseline="pooled")
    assert pooled.counts.tolist() == [whole.counts.sum(axis=0).tolist()] == [[70, 70, 70]]
    alone = [rows for seed in range(3, 8) for rows in task(seed, **rule, baseline="alone").partition.indices]
    assert sorted(rows.tolist() for rows in alone) == sorted(rows.tolist() for rows in whole.partition.indices)


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
    with pytest.raises(PartitionError, match="names, 6, can't be merged into 7"):
        task(rule="natural", clients=7)


def test_a_rule_within_domains_is_told_the_domains():
    made = task(rule="dirichlet_within_domains", beta=1.0, clients=6, min_size=1)
    assert [set(cameras().domains[rows].tolist()) for rows in made.partition.indices] == [{0}, {0}, {1}, {1}, {2}, {2}]


@dataclass(frozen=True)
class ByParity(DirichletWithinDomains):
    def split(self, labels, clients, rng, num_classes=None):
        return [np.arange(first, len(labels), clients) for first in range(clients)]


def test_a_rule_that_overrides_split_divides_by_it_though_there_are_domains():
    assert task(rule=ByParity, beta=1.0, clients=2).partition.indices[1].tolist() == list(range(1, 210, 2))


def test_a_data_set_without_domains_is_refused():
    tree = {"data": "digits", "model": "logistic", "method": "fedavg", "training": {"rounds": 1}}
    tree["partition"] = {"rule": "dirichlet_within_domains", "beta": 1.0, "clients": 4}
    with pytest.raises(PartitionError, match="has no domains"):
        make_task(resolve(tree), seed=0)


DIGITS = {"data": {"name": "digits"}, "model": "logistic", "training": {"rounds": 1}}


def digits(run_seed=0, data=None, **partition):
    tree = DIGITS | {"partition": {"rule": "dirichlet_by_class", "beta": 0.5, "clients": 5} | partition}
    return make_task(resolve(tree | {"data": {"name": "digits"} | (data or {})}), run_seed)


def test_a_partitions_own_seed_decides_who_holds_what_whatever_the_runs_seed():
    fixed = [digits(seed, {"validation": 0.1}, seed=3) for seed in (0, 1)]
    assert fixed[0].partition.hash == fixed[1].partition.hash
    assert fixed[0].validation.tolist() == fixed[1].validation.tolist()
    assert fixed[0].partition.hash == digits(3, {"validation": 0.1}).partition.hash
    assert fixed[0].partition.hash != digits(0, {"validation": 0.1}).partition.hash


def test_runs_of_one_partition_and_two_seeds_differ_in_training_only():
    config = DIGITS | {"partition": {"rule": "iid", "clients": 5, "seed": 0}, "seeds": [0, 1]}
    first, second = fedskew.simulate(config).runs
    assert (first.counts == second.counts).all()
    assert first.rounds[1].loss != second.rounds[1].loss


def iid(rows, **data):
    tree = DIGITS | {"data": {"name": "digits", "rows": rows} | data, "partition": {"rule": "iid", "clients": 1}}
    return make_task(resolve(tree), 0)


@pytest.mark.parametrize("rows", [1, 10, 100, 777, 1352])
def test_rows_are_drawn_with_the_same_share_of_every_class(rows):
    task = iid(rows)
    counts = task.partition.counts.sum(axis=0)
    every = np.bincount(task.dataset.targets.numpy(), minlength=10)
    share = every * rows / every.sum()
    assert counts.sum() == rows
    assert ((np.floor(share) <= counts) & (counts <= np.ceil(share))).all()


def test_validation_samples_are_among_the_rows():
    task = iid(500, validation=0.2)
    assert len(task.validation) + task.partition.counts.sum() == 500
    with pytest.raises(ConfigError, match="data.rows: 5,000 are more than 'digits' has training samples"):
        iid(5000)


def test_what_clients_hold_out_is_neither_trained_on_nor_counted():
    whole, kept = digits(), digits(data={"held_out": 0.2})
    for client, (before, own, held) in enumerate(
        zip(whole.partition.indices, kept.partition.indices, kept.held_out, strict=True)
    ):
        assert sorted([*own, *held]) == before.tolist()
        assert abs(len(held) - 0.2 * len(before)) < 1
        labels = kept.dataset.targets.numpy()[own]
        assert kept.counts[client].tolist() == np.bincount(labels, minlength=10).tolist()
    assert [len(held) for held in whole.held_out] == [0] * 5


def test_what_is_held_out_depends_on_the_partitions_seed_alone():
    fixed = [digits(seed, {"held_out": 0.2}, seed=3).held_out for seed in (0, 1)]
    other = digits(0, {"held_out": 0.2}, seed=4).held_out
    assert all((one == two).all() for one, two in zip(*fixed, strict=True))
    assert any(one.tolist() != two.tolist() for one, two in zip(fixed[0], other, strict=True))


def test_each_client_is_tested_on_samples_of_its_own_that_it_neither_trains_on_nor_holds_out():
    whole, apart = digits(), digits(data={"client_test": 0.3, "held_out": 0.2})
    labels = whole.dataset.targets.numpy()
    tested = digits(data={"client_test": 0.3}).client_test
    for client, before in enumerate(whole.partition.indices):
        own, held, test = apart.partition.indices[client], apart.held_out[client], apart.client_test[client]
        assert sorted([*own, *held, *test]) == before.tolist()
        assert apart.counts[client].tolist() == np.bincount(labels[own], minlength=10).tolist()
        classes = np.unique(labels[before])
        assert set(labels[own]) == set(classes)  # a class of one sample is trained on
        at = [np.bincount(labels[rows], minlength=10)[classes] for rows in (before, held, test)]
        assert (np.abs(at[2] - 0.3 * at[0]) <= 1).all()
        assert abs(len(held) - 0.2 * len(before)) <= 1 + len(classes)
        assert test.tolist() == tested[client].tolist()  # whatever is held out


def test_a_stored_partition_keeps_what_it_has_apart(tmp_path):
    shares = {"client_test": 0.3, "held_out": 0.2}
    made = digits(data=shares).partition
    made.save(tmp_path / "own.npz")
    stored = {"rule": "file", "path": str(tmp_path / "own.npz")}

    def task(**data):
        return make_task(resolve(DIGITS | {"data": {"name": "digits", **data}, "partition": stored}), 7)

    assert task(**shares).partition.hash == made.hash
    assert Partition.load(tmp_path / "own.npz").hash == made.hash
    plain = task()
    assert plain.partition.hash == Partition.of(made.indices, plain.dataset.targets, 10).hash
    assert [len(rows) for rows in plain.client_test] == [0] * 5
    made.check(plain.dataset.targets)
    with pytest.raises(DataError, match="made for another data set"):
        replace(made, test=(made.indices[0], *made.test[1:])).check(plain.dataset.targets)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"data": {"name": "digits", "client_test": 0.001}}, r"data\.client_test: 0\.001 of each client is not one"),
        ({"data": {"name": "digits", "client_test": 0.5, "held_out": 0.5}}, r"data\.client_test: .* smaller shares"),
        ({"evaluation": {"sites": True}}, r"evaluation\.sites: .* set data\.client_test = 0\.3"),
    ],
)
def test_test_samples_that_there_are_not_are_refused(tables, message):
    with pytest.raises(ConfigError, match=message):
        make_task(resolve(DIGITS | {"partition": {"rule": "iid", "clients": 20}} | tables), 0)


def test_a_target_client_holds_nothing_out():
    rule = {"rule": "sparsity", "labels_per_client": 3, "clients": 5}
    made = make_task(resolve(DIGITS | {"data": {"name": "digits", "held_out": 0.5}, "partition": rule}), 0)
    assert len(made.held_out) == len(made.counts) == 4


# Batches of one sample and batch norm: found before the first round


def few() -> Dataset:
    """Clients of 8, 9 and 12 samples: of batches of 4, the second has a last one of one sample."""
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(29, 6)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, size=29))
    clients = np.repeat([0, 1, 2], [8, 9, 12])
    return Dataset(
        "few", inputs, labels, inputs[:9], labels[:9], ("a", "b", "c"), clients=clients, client_names=("x", "y", "z")
    )


class Normalised(nn.Sequential):
    """Batch norm, which refuses a single sample."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, num_classes))


FEW = {
    "name": "few",
    "data": {"name": few},
    "partition": {"rule": "natural"},
    "model": {"name": Normalised},
    "training": {"rounds": 2, "batch_size": 4, "lr": 0.1},
}


def training(**changes):
    return {"training": {**FEW["training"], **changes}}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_a_batch_of_one_is_found_before_the_first_round_and_leaving_it_out_is_the_cure(tmp_path, backend):
    engine = {"backend": backend}
    says = r"training.smallest_batch: client y has a batch of one .*Normalised can't be trained; set training.small"
    with pytest.raises(ConfigError, match=says):
        fedskew.simulate(FEW, engine=engine, out=tmp_path)
    assert not any(tmp_path.iterdir())
    result = fedskew.simulate(FEW, **training(smallest_batch=2), engine=engine)
    assert sorted(result.rounds[1]["steps"]) == [2, 2, 3]


def test_a_part_of_an_epoch_that_reaches_the_batch_of_one_is_found_too():
    """0.9 of three batches, rounded up, is all three."""
    with pytest.raises(ConfigError, match="client y has a batch of one"):
        fedskew.simulate(FEW, **training(epochs=0.9))


@pytest.mark.parametrize(
    "changes", [{"epochs": 0.5}, {"batch_size": 5}, {"steps": 1}, {"epochs": 0}, {"smallest_batch": 4}]
)
def test_what_brings_no_batch_of_one_trains(changes):
    fedskew.simulate(FEW, **training(**changes))


def test_batches_of_one_throughout_have_another_cure():
    with pytest.raises(ConfigError, match="3 clients, such as x, have .*; set training.batch_size to 2 or more"):
        fedskew.simulate(FEW, **training(batch_size=1))


def test_images_that_stay_larger_than_one_pixel_may_come_alone():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(x.view(len(x), 2, 3)).flatten(1))

    fedskew.simulate(FEW, model=Wide())
