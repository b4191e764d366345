"""`fedskew new` writes a config that runs; `fedskew list` and the schema hold every key that there is."""

import json
import os
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fedskew
from fedskew import data, models, partition
from fedskew.cli.config_keys import choices, json_schema, tables
from fedskew.experiment import Config, read, resolve


def test_a_new_config_runs_and_replays_as_the_defaults(tmp_path, command):
    done = command("new", "my run.toml", "--rounds", "1", "--model", "logistic")
    few = "note: 1 round won't do: these data take about 56\n"
    assert done.stdout == f"written: my run.toml\n{few}train it: fedskew run 'my run.toml'\n"
    text = (tmp_path / "my run.toml").read_text()
    assert text.count("# Share of the clients that is selected in each round.") == 1
    assert fedskew.simulate(tmp_path / "my run.toml").summary["final"]["accuracy"] > 0
    plain = {"name": "my-run", "data": {"name": "digits"}, "model": {"name": "logistic"}}
    plain["training"] = {"rounds": 1, "participation": 0.5, "epochs": 2, "batch_size": 16, "lr": 0.1}
    plain["partition"] = {"rule": "dirichlet_by_class", "clients": 10, "beta": 0.3}
    assert read(tmp_path / "my run.toml") == resolve(plain)


def test_a_folder_of_the_sites_of_images_is_read_as_such(tmp_path, command):
    command("new", "a.toml", "--data", "folder", "--root", "hospitals", "--rule", "natural")
    assert read(tmp_path / "a.toml").data.parameters["client_level"] is True
    command("new", "b.toml", "--data", "folder", "--root", "classes")
    assert read(tmp_path / "b.toml").data.parameters.get("client_level", False) is False


def test_data_that_name_clients_run_by_their_own(tmp_path, command):
    command("new", "a.toml", "--data", "synthetic", "--rule", "natural", "--rounds", "1")
    assert len(fedskew.simulate(tmp_path / "a.toml").runs[0].client_names) == 2


@pytest.mark.parametrize("rule", list(partition.INDEX))
def test_every_rule_has_values_to_begin_with(rule, tmp_path, command):
    data = {"natural": "synthetic", "dirichlet_within_domains": "digit_domains"}.get(rule, "digits")
    words = ["--data", data]
    command("new", "a.toml", "--rule", rule, "--method", "fedentopt+fedvls", *words)
    assert read(tmp_path / "a.toml").partition.rule == rule


def test_the_keys_behind_a_comment_sign_are_all_others_and_valid(tmp_path, command):
    command("new", "a.toml", "--model", "resnet18")
    lines = (tmp_path / "a.toml").read_text().splitlines()
    bare = [line.removeprefix("# ") for line in lines if line[:2] != "# " or (" = " in line and "..." not in line)]
    tree = tomllib.loads("\n".join(line for line in bare if " = " in line.split("#")[0] or line.startswith("[")))
    for entry in tables():
        if entry.name in ("method", "tune", "privacy"):
            continue
        given = tree if not entry.name else tree[entry.name]
        assert {key.name for key in entry.keys if key.value} <= set(given), entry.name
    assert tree["model"]["stem"] == "imagenet"


def test_it_asks_on_a_terminal_for_what_no_option_says(tmp_path, command, monkeypatch):
    ours, theirs = os.openpty()
    os.write(ours, b"\niid\n7\nlogistic\nfedla\n3\n")
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert "dirichlet_by_class" in command("new", "a.toml").stdout
        made = read(tmp_path / "a.toml")
        assert (made.partition.rule, made.partition.clients, made.model.name) == ("iid", 7, "logistic")
        assert made.training.rounds == 3
        os.write(ours, b"\niid\nmany\n7\nlogistic\nfedla\n3\n")
        assert "'many' is not a valid" in command("new", "b.toml").stdout


@pytest.mark.slow
def test_lists_hold_every_name_and_its_own_keys(tmp_path, command):
    for what, index in (("data", data.INDEX), ("partitions", partition.INDEX), ("models", models.INDEX)):
        page = command("list", what).stdout
        assert all(name in page for name in index)
    page = " ".join(command("list", "partitions", "dirichlet_by_class").stdout.split())
    assert "min_size = 10 whole number >= 0 Samples that every client must hold" in page
    assert "[training]" in command("list", "keys", "training").stdout
    trackers = json.loads(command("list", "trackers", "--json").stdout)
    assert [tracker["name"] for tracker in trackers] == ["tensorboard", "mlflow", "wandb"]
    assert '"layer4.*", "head.*"' in " ".join(command("list", "models", "resnet18").stdout.split())
    assert "did you mean 'lenet5'?" in command("list", "models", "lenet", status=2).stderr


def test_every_key_has_a_meaning():
    for entry in [*tables(), *(entry for entries in choices().values() for entry in entries)]:
        assert entry.summary, entry.name
        assert not [key.name for key in entry.keys if not key.meaning], entry.name
        assert "None:" not in "".join(key.meaning for key in entry.keys)


def test_the_schema_accepts_what_a_config_does(tmp_path, command):
    schema = json.loads(command("list", "schema").stdout)
    assert schema == json.loads(json.dumps(json_schema()))
    assert set(schema["properties"]) == {field.alias or name for name, field in Config.model_fields.items()} | {
        "sweep",
        "quick",
    }
    command("new", "a.toml", "--schema")
    assert (tmp_path / "a.toml").read_text().startswith("#:schema ./fedskew.schema.json\n")
    assert json.loads((tmp_path / "fedskew.schema.json").read_text()) == schema
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema)
    recipes = Path(__file__).resolve().parents[2] / "recipes"
    for path in [tmp_path / "a.toml", *recipes.glob("*.toml")]:
        assert not list(validator.iter_errors(tomllib.loads(path.read_text()))), path
    good = tomllib.loads((tmp_path / "a.toml").read_text())
    for wrong in (
        {"training": {"rounds": -1}},
        {"training": {"rounds": 1, "epoch": 2}},
        {"model": {"name": "mlp4"}},
        {"partition": {"rule": "dirichlet_by_class", "clients": 3}},
    ):
        assert list(validator.iter_errors(good | wrong)), wrong


TABLE = "a,b,kind\n" + "\n".join(f"{at % 7},{at % 5},{'xyz'[at % 3]}" for at in range(120))


@pytest.mark.parametrize("method", ["fedavg", "fedentopt", "fedpals", "adapt", "fedentopt+fedvls", "krum"])
@pytest.mark.parametrize("clients", [3, 5, 10])
def test_a_new_config_can_be_run_with_its_method(method, clients, tmp_path, command):
    words = ["--method", method, "--clients", clients, "--rule", "iid", "--model", "logistic"]
    done = command("new", "a.toml", *words, status=None)
    if (method, clients) == ("krum", 3):  # which needs five
        assert done.returncode == 2
        assert "krum needs 5 clients" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    config = tomllib.loads((tmp_path / "a.toml").read_text())
    fedskew.simulate({**config, "training": config["training"] | {"rounds": 0}})


def test_a_table_of_one_s_own_is_read_before_its_config_is_written(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)  # as the schema's file is named from there
    (tmp_path / "own.csv").write_text(TABLE)
    words = ["new", "a.toml", "--data", "csv", "--root", "own.csv"]
    done = command(*words, status=2)
    assert "own.csv: no column is called label; say which it is: --set data.label=NAME (of a, b, kind)" in done.stderr
    assert not (tmp_path / "a.toml").exists()
    command(*words, "--set", "data.label=kind")
    config = read(tmp_path / "a.toml")
    assert config.data.parameters["schema"]["columns"]["kind"]["kind"] == "label"
    assert config.model.name == "table"
    assert (config.partition.clients, config.training.batch_size) == (2, 8)  # of 96 samples to train on


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], None),
        (["--rounds", "3"], "3 rounds won't do: these data take about 56"),
        (["--model", "resnet18"], "resnet18 was never measured with such rounds and rate, so it may not learn"),
        (["--data", "mnist"], "data set 'mnist' is not there, so clients, rounds and batches are guesses"),
        (["--rule", "sparsity"], "the test set has classes that the few labels"),
    ],
)
def test_it_says_where_a_config_may_not_learn(words, says, tmp_path, command, monkeypatch):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    done = command("new", "a.toml", *words)
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert len(notes) == (says is not None), notes
    assert says is None or says in notes[0]


def test_it_says_that_texts_learn_slowly(tmp_path, command, monkeypatch):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    done = command("new", "a.toml", "--data", "ag_news", "--model", "fasttext")
    assert "note: texts learn slowly with fasttext" in done.stdout


def test_a_network_for_texts_has_as_many_words_as_they_have(tmp_path, command):
    for number in range(40):
        (text := tmp_path / "texts" / "ab"[number % 2] / f"{number}.txt").parent.mkdir(parents=True, exist_ok=True)
        text.write_text(["fever and cough", "a broken arm"][number % 2])
    command("new", "a.toml", "--data", "folder", "--root", tmp_path / "texts", "--set", "data.test_share=0.25")
    assert tomllib.loads((tmp_path / "a.toml").read_text())["model"] == {"name": "fasttext", "vocabulary": 8}


@pytest.mark.slow
@pytest.mark.parametrize("data", ["digits", "table"])
def test_a_new_config_reaches_four_fifths_of_what_pooled_training_does(data, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)  # as the schema's file is named from there
    rng = np.random.default_rng(0)
    middles = rng.normal(size=(4, 6))
    rows = [(*(middles[label] + 0.7 * rng.normal(size=6)), label) for label in rng.integers(0, 4, 400)]
    lines = ["a,b,c,d,e,f,label", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "own.csv").write_text("\n".join(lines))
    words = ["--data", "csv", "--root", tmp_path / "own.csv"] if data == "table" else []
    command("new", "a.toml", *words)
    config = tomllib.loads((tmp_path / "a.toml").read_text())
    training = config["training"] | {"participation": 1.0, "rounds": 20, "epochs": 1}
    pooled = config | {"partition": {"rule": "iid", "clients": 1}, "training": training}
    ours, theirs = (
        fedskew.simulate(tree | {"evaluation": {"every": 100}}).summary["final"]["accuracy"]
        for tree in (config, pooled)
    )
    assert ours >= 0.8 * theirs
