"""Configs: defaults filled in, mistakes named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedskew.arena import read_arena
from fedskew.errors import CombinationError, ConfigError
from fedskew.experiment import read, read_sweep, resolve, write
from fedskew.trees import line_of, parse_change

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
        "lr_decay": 1.0, "momentum": 0.0, "weight_decay": 0.0, "persist_momentum": False, "teacher_train_mode": False,
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
    write(config, copy)
    assert read(copy) == config
    assert read(copy).hash == config.hash


def test_the_hash_changes_with_what_can_change_the_model_and_not_with_the_name(path):
    config = read(path)
    assert read(path, {"name": "other"}).hash == config.hash
    assert read(path, {"output.checkpoint_every": 5}).hash == config.hash
    for key, value in {"training.lr": 0.2, "seeds": [1], "partition.labels_per_client": 3, "engine.threads": 2}.items():
        assert read(path, {key: value}).hash != config.hash


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"training.lr": -1}, ("training.lr", "greater than 0", "-1")),
        ({"training.learning_rate": 1}, ("training.learning_rate: no such key",)),
        ({"training.lrr": 1}, ("did you mean 'lr'",)),
        ({"trainin.lr": 1}, ("did you mean 'training'",)),
        ({"training.rounds": "many"}, ("training.rounds", "integer")),
        ({"data.name": "digit"}, ("data.name", "did you mean 'digits'")),
        ({"model.name": "mlp"}, ("model.name", "mlp3")),
        ({"partition.rule": "quantities"}, ("partition.rule", "did you mean 'quantity'")),
        ({"partition.label_per_client": 2}, ("partition.label_per_client", "did you mean 'labels_per_client'")),
        ({"partition.labels_per_client": "x"}, ("partition.labels_per_client",)),
        ({"method.preset": "fedvsl"}, ("method.preset", "did you mean 'fedvls'")),
        ({"method.weight": {"name": "fedla"}}, ("method.weight: no such slot",)),
        ({"method.weighting": {"name": "fedpal"}}, ("method.weighting.name", "did you mean 'fedpals'")),
        ({"method.selection": {"name": "fedentopt", "bufer": 1}}, ("method.selection.bufer", "did you mean 'buffer'")),
        ({"method.selection": {"name": "fedentopt", "buffer": 2.0}}, ("buffer",)),
        ({"target.mix": "equal"}, ("target.mix", "uniform")),
        ({"seeds": []}, ("seeds",)),
        ({"seeds": [1, 1]}, ("seeds", "twice")),
        ({"name": "a/b"}, ("name",)),
        ({"schema": 2}, ("schema",)),
        ({"evaluation.patience": 3}, ("evaluation.patience", "data.validation")),
        ({"tune": {"key": "training.lr", "values": [0.1]}}, ("tune.key", "data.validation")),
        ({"tune": {"key": "training.lr", "values": [-1.0]}, "data.validation": 0.1}, ("tune.values", "-1.0")),
        ({"tune": {"key": "training.lr", "valuess": [1]}}, ("tune.valuess: no such key", "values")),
        ({"engine.device": "tpu"}, ("engine.device", "cuda")),
        ({"training.augmentation": "flip"}, ("training.augmentation",)),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_and_what_would_be_right(path, change, says):
    with pytest.raises(ConfigError) as error:
        read(path, change)
    message = str(error.value)
    assert "\n" not in message
    for words in says:
        assert words in message


def test_a_mistake_in_the_file_is_named_with_its_line(path):
    path.write_text(GOOD.replace("lr = 0.1", "lr = -0.1"))
    with pytest.raises(ConfigError, match=r"small.toml, line 20: training.lr: .*greater than 0"):
        read(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"a = = 1", "not valid TOML"), (b"\xff\xfe", "UTF-8"), (b"[data]\nname='digits'", "missing")],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path, content, says):
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read(file)


def test_a_sweep_is_pointed_to_its_own_command():
    recipe = Path(__file__).parents[2] / "recipes" / "compare.toml"
    with pytest.raises(ConfigError, match="fedskew sweep"):
        read(recipe)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("preset", "says"),
    [
        ("fedlc+fedrs+fedprox", "both bring a classification loss"),
        ("fedla+fedpals", "both fill the weighting slot"),
    ],
)
def test_presets_that_claim_one_slot_are_refused(path, preset, says):
    with pytest.raises(CombinationError, match=says):
        read(path, {"method.preset": preset})


def test_two_classification_losses_are_refused_and_a_term_is_no_loss(path):
    both = {"method.objective": {"name": "fedlc", "terms": [{"name": "fedvls_calibration"}]}}
    with pytest.raises(CombinationError, match="second classification loss"):
        read(path, both)
    with pytest.raises(CombinationError, match="is a term"):
        read(path, {"method.objective": {"name": "suppression"}})


def test_presets_compose_and_a_table_replaces_its_slot(path):
    method = read(path, {"method.preset": "fedentopt+fedprox", "method.weighting": {"name": "fedla"}}).method
    assert method["selection"] == {"name": "fedentopt", "buffer": 0.5}
    assert method["local_step"]["name"] == "fedprox"
    assert method["weighting"] == {"name": "fedla"}


def test_quick_applies_the_files_own_table_and_only_when_asked(path):
    path.write_text(GOOD + '\n[quick]\n"training.rounds" = 1\n')
    assert read(path).training.rounds == 2
    assert read(path, quick=True).training.rounds == 1
    assert read(path, {"training.rounds": 7}, quick=True).training.rounds == 7
    path.write_text(GOOD)
    with pytest.raises(ConfigError, match="quick"):
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


class OwnWeighting:
    """Stands for a class that is no component."""


def test_things_of_ones_own_that_a_config_cannot_name_are_refused():
    tree = {
        "data": "digits",
        "partition": {"rule": "quantity", "clients": 5, "labels_per_client": 2},
        "training": {"rounds": 1},
    }
    with pytest.raises(ConfigError, match="partition.rule"):
        resolve({**tree, "partition": {"rule": lambda labels, clients: None, "clients": 5}, "model": "mlp3"})
    with pytest.raises(ConfigError, match="can't be imported"):
        resolve({**tree, "model": "no_such_module:Net"})


@pytest.mark.slow
def test_every_recipe_resolves_and_so_does_its_quick_variant():
    recipes = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
    assert len(recipes) >= 9
    for recipe in recipes:
        text = recipe.read_text(encoding="utf-8")
        reader = read_arena if "[arena]" in text else read_sweep if "[sweep]" in text else read
        reader(recipe)
        reader(recipe, quick=True)
