"""Configs: defaults filled in, mistakes named in one line."""

import re
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from common import refused, task
from fedskew import data, models
from fedskew.arena import Arena
from fedskew.deploy import Agreement
from fedskew.errors import ArgumentError, CombinationError, ConfigError, FedskewError
from fedskew.experiment import Sweep, read, resolve
from fedskew.tables import flatten
from fedskew.trees import line_of, parse_change, put

GOOD = """\
schema = 1
name = "small"

[data]
name = "digits"

[partition]
rule = "quantity"
clients = 5
labels_per_client = 2

[model]
name = "logistic"

[method]
preset = "fedvls"

[training]
rounds = 2
lr = 0.1
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(GOOD)
    return file


def test_a_resolved_config_holds_every_default_and_replays_itself(path, tmp_path):
    config = read(path)
    tree = config.tree()
    assert tree["training"] == {
        "rounds": 2, "participation": 1.0, "epochs": 1, "batch_size": 64, "smallest_batch": 1, "lr": 0.1,
        "lr_decay": 1.0, "optimizer": "sgd", "momentum": 0.0, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0,
        "keep_optimizer": False, "teacher_train_mode": False,
    }  # fmt: skip
    assert tree["method"]["objective"] == {
        "name": "fedvls_calibration",
        "prior_eps": 1e-9,
        "terms": [
            {"weight": 0.1, "name": "vacant_distillation"},
            {"weight": 0.005, "name": "suppression", "form": "official", "prior_eps": 1e-9},
        ],
    }
    copy = tmp_path / "copy.toml"
    config.write(copy)
    assert read(copy) == config
    assert read(copy).hash == config.hash


def test_keys_of_optimisers_that_a_run_does_not_use_are_not_in_its_hash_nor_a_key_s_new_name(path):
    before = read(path).hash
    assert read(path, {"training.optimizer": "adam"}).hash != before
    assert read(path, {"training.optimizer": "adam", "training.eps": 1e-7}).hash != before
    kept = [read(path, {f"training.{key}": True}) for key in ("keep_optimizer", "persist_momentum")]
    assert kept[0] == kept[1]
    assert kept[0].hash != before


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"betas": [0.5, 0.9]}, "training.betas: are Adam's; set optimizer = "),
        ({"eps": 1e-3}, "training.eps: is Adam's"),
        ({"optimizer": "adamw", "momentum": 0.9}, "training.momentum: is SGD's; the first of adamw's betas"),
        ({"optimizer": "adam", "betas": [0.9, 1.0]}, "training.betas"),
        ({"optimizer": "adam", "betas": [0.9]}, "training.betas: its value 2 is missing"),
        ({"optimizer": "adagrad"}, "training.optimizer: "),
        ({"schedule": "cosine", "warmup": 2}, "training.warmup: 2, of 2 in all, leaves no round for"),
        ({"groups": [{"match": "head.*", "rl": 0.1}]}, "training.groups[0].rl: no such key (known: lr"),
        ({"groups": [{"lr": 0.1}]}, "training.groups[0].match: missing"),
        ({"groups": [{"match": "head.*", "lr": -1.0}]}, "training.groups[0].lr: input should be greater than 0"),
        ({"keep_optimizer": True, "persist_momentum": True}, "training.persist_momentum: no such key"),
    ],
)
def test_what_makes_no_sense_of_an_optimiser_is_refused(path, training, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        read(path, {f"training.{key}": value for key, value in training.items()})


def test_a_table_has_no_keys_with_dots():
    with pytest.raises(ConfigError, match=r"^training\.lr: keys with dots are tables in tables here, such as \{"):
        resolve({"training.lr": 0.1})


@pytest.mark.parametrize("method", ["scaffold", "fednova"])
def test_methods_that_count_gradients_refuse_adam(path, method):
    with pytest.raises(CombinationError, match=r"with training\.optimizer: .* set training\.optimizer = 'sgd'"):
        read(path, {"training.optimizer": "adamw", "method": {"preset": method}})


def test_the_hash_changes_with_what_can_change_the_model_and_not_with_the_name(path):
    config = read(path)
    assert read(path, {"name": "other"}).hash == config.hash
    assert read(path, {"output.checkpoint_every": 5}).hash == config.hash
    for key, value in {"training.lr": 0.2, "seeds": [1], "partition.labels_per_client": 3, "engine.threads": 2}.items():
        assert read(path, {key: value}).hash != config.hash


WRONG = [  # beside those of cli/test_mistakes.py
    ("partition={rule='iid'}", "partition.clients: missing"),
    ("partition.label_per_client=2", "did you mean 'labels_per_client'"),
    ("method.weight={name='fedla'}", "method.weight: no such slot"),
    ("method.weighting={name='fedpal'}", "method.weighting.name: unknown name 'fedpal' (did you mean 'fedpals'"),
    ("method.selection={name='fedentopt', bufer=1}", "method.selection.bufer: fedentopt has no such parameter"),
    ("method.selection={name='fedentopt', buffer=2.0}", "method.selection.buffer"),
    ("seeds=[]", "seeds: list should have at least 1 item"),
    ("name=a/b", "name: string should match pattern"),
    ("schema=2", "schema: input should be 1 (got 2)"),
    ("tune={key='training.lr', values=[0.1]}", "tune.key: there is no validation set; set data.validation"),
    ("tune={key='training.lr', valuess=[1]}", "tune.valuess: no such key (did you mean 'values'?)"),
    ("training.rounds=3.0", "training.rounds: input should be a valid integer (got 3.0)"),
    ("seeds=['0']", "seeds: input should be a valid integer"),
    ("data.rows='100'", "data.rows"),
    ("partition.seed='1'", "partition.seed"),
    ("privacy={clip='1', noise=1, epsilon=1}", "privacy.clip"),
    ("method={local_step={name='fedprox', mu=true}}", "method.local_step.mu"),
]


@pytest.mark.parametrize(("change", "says"), WRONG)
def test_a_mistake_is_one_line_that_names_the_key_and_what_would_be_right(path, change, says):
    with refused(ConfigError, says):
        read(path, dict([parse_change(change)]))


OTHERS = {bool: [1, "yes"], int: [True, "3"], float: [True, "0.5"], str: [3, True]}
"""What only looks like a value of a type."""


def test_a_value_of_another_type_is_refused_whatever_it_looks_like(path):
    tree = read(path).tree()
    del tree["schema"], tree["target"]["unlabelled"]  # which may be a path
    for key, value in flatten({name: table for name, table in tree.items() if name != "method"}).items():
        for other in OTHERS.get(type(value), []):
            changed = deepcopy(tree)
            put(changed, key, other)
            with pytest.raises(ConfigError, match=f"^{key}: "):
                resolve(changed)


def test_a_value_that_cannot_be_tuned_is_named(path):
    with pytest.raises(ConfigError, match=r"tune.values: -1.0 is not valid: training.lr"):
        read(path, {"tune": {"key": "training.lr", "values": [-1.0]}, "data.validation": 0.1})


def test_a_mistake_in_the_file_is_named_with_its_line(path):
    path.write_text(GOOD.replace("lr = 0.1", "lr = -0.1"))
    with pytest.raises(ConfigError, match=r"small.toml, line 20: training.lr: .*greater than 0"):
        read(path)


@pytest.mark.parametrize(
    ("content", "says"), [(b"a = = 1", "not valid TOML"), (b"\xff\xfe", "UTF-8"), (b"\xef\xbb\xbf[data]", "missing")]
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path, content, says):
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read(file)


def test_quick_applies_the_files_own_table_and_only_when_asked(path):
    path.write_text(GOOD + '\n[quick]\n"training.rounds" = 1\n')
    assert read(path).training.rounds == 2
    assert read(path, quick=True).training.rounds == 1
    assert read(path, {"training.rounds": 7}, quick=True).training.rounds == 7
    path.write_text(GOOD)
    with pytest.raises(ConfigError, match=r"small.toml: there is no \[quick\] table"):
        read(path, quick=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.lr=0.5", ("training.lr", 0.5)),
        ("name=abc", ("name", "abc")),
        ("seeds=[1, 2]", ("seeds", [1, 2])),
        ("method.preset=fedentopt+fedprox", ("method.preset", "fedentopt+fedprox")),
        ("a.b=true", ("a.b", True)),
    ],
)
def test_changes_of_the_command_line_are_read_as_toml(text, expected):
    assert parse_change(text) == expected


@pytest.mark.parametrize("text", ["training.lr", "=3", "a b=1", "a..b=1"])
def test_a_change_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="key=value"):
        parse_change(text)


def test_lines_of_keys_are_found_in_tables_and_arrays():
    text = "a = 1\n[b]\nc = 2\n[b.d]\ne = 3\n"
    assert [line_of(text, key) for key in ("a", "b.c", "b.d.e", "b.missing", "none")] == [1, 3, 5, 2, None]


def test_things_of_ones_own_that_a_config_cannot_name_are_refused():
    with pytest.raises(ConfigError, match="partition.rule"):
        resolve(task(5, rounds=1) | {"partition": {"rule": lambda labels, clients: None, "clients": 5}})


@pytest.mark.slow
def test_every_recipe_resolves_and_so_does_its_quick_variant():
    recipes = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
    assert len(recipes) >= 9
    for recipe in recipes:
        text = recipe.read_text(encoding="utf-8")
        reader = Arena.read if "[arena]" in text else Sweep.read if "[sweep]" in text else read
        reader(recipe)
        if recipe.stem not in ("demo", "local"):  # quick as they are
            reader(recipe, quick=True)


def test_whole_numbers_and_numpys_are_numbers_and_a_tuple_or_an_array_is_a_list():
    tree = {"name": "a", "data": "digits", "model": "mlp3", "partition": {"rule": "iid", "clients": np.int64(3)}}
    made = resolve(tree | {"seeds": (np.int64(1), 2), "training": {"rounds": np.int32(1), "lr": 1, "epochs": 2.0}})
    assert (made.seeds, made.training.lr, made.training.epochs, made.partition.clients) == ([1, 2], 1.0, 2, 3)
    assert resolve(tree | {"seeds": range(2), "training": {"rounds": 1}}).seeds == [0, 1]
    weighed = {"training": {"rounds": 1, "class_weights": np.ones(10)}, "target": {"mix": np.full(10, 0.1)}}
    made = resolve(tree | weighed)
    assert (made.training.class_weights, made.target.mix) == ([1.0] * 10, [0.1] * 10)


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
