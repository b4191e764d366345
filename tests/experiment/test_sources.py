"""Networks of other packages: a small transformer from its folder to predictions on texts; nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedskew
from common import task
from fedskew.errors import ConfigError, MissingPackageError
from fedskew.experiment import make_training_loop, read, resolve
from fedskew.own_code import is_name
from texts import write_texts


def has(package: str) -> bool:
    try:
        __import__(package)
    except (ImportError, RuntimeError):
        return False
    return True


needs_transformers = [
    pytest.mark.slow,  # to import transformers takes seconds
    pytest.mark.skipif(not has("tokenizers"), reason="not installed: pip install 'fedskew[transformers]'"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("texts")
    write_texts(place)
    return place


@pytest.mark.usefixtures("folder")
class TestTexts:
    pytestmark = needs_transformers

    def test_from_a_config_to_predictions_on_texts(self, folder, tmp_path, monkeypatch):
        monkeypatch.chdir(folder)
        config = read(folder / "run.toml")
        run = config.folder(tmp_path)
        fedskew.simulate(config, out=tmp_path)
        monkeypatch.chdir(tmp_path)  # away from texts, tokeniser and weights
        model = fedskew.load(run)
        found = model.predict(["good good film", "the bank was money", "sport goal the goal"]).argmax(1)
        assert [model.classes[label] for label in found] == ["films", "banks", "sports"]
        notes = fedskew.experiment.RunFolder.notes(run, 0)
        assert "classifier starts as it was drawn: model.safetensors has no such layer of these classes." in notes
        first = load_file(folder / "tiny" / "model.safetensors")
        plain = load_file(model.export(tmp_path / "all.safetensors", "weights"))
        assert plain.keys() == first.keys()  # as transformers reads it

    def test_dropout_by_calls_has_the_same_bits_in_processes(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        config = read(folder / "run.toml", {"training.rounds": 1})
        engines = {"backend": "sequential"}, {"backend": "processes", "processes": 1}  # each imports transformers
        states = [fedskew.simulate(config.with_value("engine", one)).model.state_dict() for one in engines]
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())

    def test_adapters_and_the_new_last_layer_alone_travel(self, folder, monkeypatch):
        pytest.importorskip("peft", reason="peft is not installed: pip install 'fedskew[peft]'")
        monkeypatch.chdir(folder)
        wanted = {"kind": "lora", "rank": 2, "targets": ["q_lin", "v_lin"]}
        config = read(folder / "run.toml", {"training.rounds": 1, "model.adapters": wanted})
        trained = 2 * 2 * (16 + 16) + 16 * 16 + 16 + 16 * 3 + 3  # pre_classifier and classifier are peft's choice
        assert fedskew.simulate(config).rounds[1]["bytes_up"] == 3 * 4 * trained

    def test_the_folder_s_place_does_not_name_a_run_and_its_content_does(self, folder, monkeypatch, tmp_path):
        monkeypatch.chdir(folder)
        config = read(folder / "run.toml")
        (tmp_path / "moved").symlink_to(folder / "tiny")
        assert read(folder / "run.toml", {"model.name": f"transformers:{tmp_path / 'moved'}"}).hash == config.hash
        said = json.loads((folder / "tiny" / "config.json").read_text())
        assert config.model.architecture == {name: value for name, value in said.items() if value is not None}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model.name": "transformers:none"}, "model.name: .*none/config.json: can't be read"),
            ({"data.tokenizer": "texts"}, "data.tokenizer: texts/tokenizer.json: is no tokeniser that can be read"),
            ({"model.architecture": {"model_type": "none"}}, "model.name: transformers:tiny can't be made"),
        ],
    )
    def test_what_is_not_there_is_one_line(self, folder, monkeypatch, changes, message):
        monkeypatch.chdir(folder)
        with pytest.raises(ConfigError, match=message):
            make_training_loop(read(folder / "run.toml", changes), 0)

    def test_weights_of_another_body_are_refused(self, folder, monkeypatch, tmp_path):
        monkeypatch.chdir(folder)
        state = load_file(folder / "tiny" / "model.safetensors")
        body = {name.removeprefix("distilbert."): one for name, one in state.items() if name.startswith("distilbert.")}
        save_file(body | {"vocab_projector.bias": torch.ones(3)}, tmp_path / "w.safetensors")
        with pytest.raises(ConfigError, match="model.weights: .*it has 'distilbert.vocab_projector.bias', which"):
            make_training_loop(read(folder / "run.toml", {"model.weights": str(tmp_path / "w.safetensors")}), 0)


def pictures(name: str, **model: Any) -> dict[str, Any]:
    made = task(3, rounds=1, batch_size=32, smallest_batch=2)
    return made | {"model": {"name": name, **model}}


@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_networks_of_packages_by_name(source):
    if not has(source):
        with pytest.raises(MissingPackageError, match=rf"{source}:resnet18 needs {source}: pip install 'fedskew"):
            make_training_loop(resolve(pictures(f"{source}:resnet18")), 0)
        pytest.skip(f"{source} is not installed: its wheels for torch without CUDA are on no package index")
    with pytest.raises(ConfigError, match="no network 'resnet81'"):
        make_training_loop(resolve(pictures(f"{source}:resnet81")), 0)


def test_such_a_name_is_no_code_of_one_s_own():
    assert [is_name(name) for name in ("timm:resnet18", "transformers:bert", "own:Net")] == [False, False, True]
