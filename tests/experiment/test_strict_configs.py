"""A config takes numbers, switches and words for what they are: nothing that only stands for another."""

from __future__ import annotations

import numpy as np
import pytest

from fedskew import data, models
from fedskew.deploy import Agreement
from fedskew.errors import ArgumentError, ConfigError, FedskewError
from fedskew.experiment import read, resolve
from fedskew.trees import parse_change, put

TASK = """
name = "task"
seeds = [0]
data = {name = "digits"}
partition = {rule = "paired_shards", clients = 10, classes_per_client = 2}
model = {name = "mlp3"}
training = {rounds = 2}
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("training.lr=true", "training.lr: input should be a valid number (got True)"),
        ("training.rounds='3'", "training.rounds: input should be a valid integer (got '3')"),
        ("training.rounds=3.0", "training.rounds: input should be a valid integer (got 3.0)"),
        ("training.epochs='1'", "training.epochs"),
        ("training.participation='0.5'", "training.participation"),
        ("training.persist_momentum=1", "training.persist_momentum: input should be a valid boolean (got 1)"),
        ("training.persist_momentum='yes'", "training.persist_momentum"),
        ("seeds=['0']", "seeds: input should be a valid integer"),
        ("seeds=[true]", "seeds: input should be a valid integer"),
        ("name=3", "name: input should be a valid string (got 3)"),
        ("data.rows='100'", "data.rows"),
        ("data.validation=true", "data.validation"),
        ("data.held_out='0.1'", "data.held_out"),
        ("partition.clients=true", "partition.clients"),
        ("partition.seed='1'", "partition.seed"),
        ("partition.oracle='true'", "partition.oracle"),
        ("partition.low=true", "partition.low"),
        ("target.warmup='3'", "target.warmup"),
        ("target.noise=true", "target.noise"),
        ("conditions.dropout='0.1'", "conditions.dropout"),
        ("conditions.stragglers=true", "conditions.stragglers"),
        ("privacy={clip='1', noise=1, epsilon=1}", "privacy.clip"),
        ("evaluation.every=true", "evaluation.every"),
        ("evaluation.clients=1", "evaluation.clients"),
        ("engine.threads='1'", "engine.threads"),
        ("engine.seeds_together='no'", "engine.seeds_together"),
        ("output.checkpoint_every=true", "output.checkpoint_every"),
        ("method={local_step={name='fedprox', mu=true}}", "method.local_step.mu"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_one_line(tmp_path, change, says):
    (tmp_path / "task.toml").write_text(TASK)
    with pytest.raises(ConfigError) as raised:
        read(tmp_path / "task.toml", dict([parse_change(change)]))
    assert f": {says}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_whole_numbers_and_numpys_are_numbers_and_a_tuple_is_a_list():
    tree = {"name": "a", "data": "digits", "model": "mlp3", "partition": {"rule": "iid", "clients": np.int64(3)}}
    made = resolve(tree | {"seeds": (np.int64(1), 2), "training": {"rounds": np.int32(1), "lr": 1, "epochs": 2.0}})
    assert (made.seeds, made.training.lr, made.training.epochs, made.partition.clients) == ([1, 2], 1.0, 2, 3)
    assert resolve(tree | {"seeds": range(2), "training": {"rounds": 1}}).seeds == [0, 1]


def test_options_of_networks_and_data_are_as_strict():
    with pytest.raises(ArgumentError, match="width"):
        models.build("mlp3", 10, (64,), width="64")
    with pytest.raises(ArgumentError, match="width"):
        models.build("mlp3", 10, (64,), width=True)
    with pytest.raises(ArgumentError, match="delta"):
        data.load("synthetic", delta="0.5", rng=np.random.default_rng(0))
    data.load("synthetic", delta=1, rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("key", "value"), [("min_sites", "2"), ("tokens", 1), ("round_timeout", True), ("sum_sites", 3.0), ("classes", [1])]
)
def test_the_agreement_of_a_federation_is_as_strict(tmp_path, key, value):
    tree = {"schema": 1, "sites": ["a", "b", "c"], "classes": ["x", "y"], "shape": [4]}
    put(tree, key, value)
    with pytest.raises((FedskewError, ValueError), match=key):
        Agreement.model_validate(tree)
