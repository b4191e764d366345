"""A trained model, read back and used: it answers as it was evaluated, on samples in their own units."""

import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import fedskew
from common import exported, refused, task
from fedskew.data import ByteImages, Dataset
from fedskew.errors import ArgumentError, ConfigError, DataWarning, MissingPackageError, RunError
from fedskew.experiment import RunFolder

IMAGES = task(10, labels=4, rounds=2, lr=0.1, momentum=0.9) | {"model": {"name": "mlp3"}}
DIGITS = fedskew.data.load("digits")
RIGHT = DIGITS.test_targets.numpy()


def trained(out, **tables):
    return fedskew.simulate({**IMAGES, **tables}, out=out)


def accuracy(model, inputs, targets=RIGHT, **how):
    return float((model.predict(inputs, **how).argmax(axis=1) == targets).mean())


class Square(nn.Module):
    """A network of a user's own."""

    def __init__(self, num_classes, in_shape):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(math.prod(in_shape), num_classes))

    def forward(self, images):
        return self.layers(images)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs"))


def test_a_loaded_model_gives_probabilities_and_is_as_good_as_it_was_evaluated(run):
    model = fedskew.load(run.folder)
    assert model.classes == DIGITS.classes
    assert model.in_shape == (1, 8, 8)
    found = model.predict(DIGITS.test_inputs)
    assert found.dtype == np.float64
    assert found.shape == (len(RIGHT), 10)
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1)
    run.model.eval()
    with torch.no_grad():
        expected = torch.softmax(run.model(DIGITS.test_inputs).double(), 1)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-9)
    assert accuracy(model, DIGITS.test_inputs) == run.summary["final"]["accuracy"]


def test_arrays_lists_bytes_and_images_without_a_channel_are_understood(run):
    model = fedskew.load(str(run.folder))
    images = DIGITS.test_inputs[:5]
    expected = model.predict(images)
    for same in (images.numpy(), images.double(), images.tolist(), images[:, 0], images[:, 0].numpy()[:, ::1]):
        np.testing.assert_array_equal(model.predict(same), expected)
    levels = (images * 255).round().to(torch.uint8)
    np.testing.assert_allclose(model.predict(levels.numpy()), model.predict(levels / 255))
    np.testing.assert_array_equal(model.predict(ByteImages(levels, (0.0,), (1.0,))), model.predict(levels))
    assert model.predict(images[:0]).shape == (0, 10)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (np.zeros((8, 8)), "expected (samples, 1, 8, 8), got (8, 8)"),
        (np.zeros((3, 3, 8, 8)), "expected (samples, 1, 8, 8), got (3, 3, 8, 8)"),
        (np.zeros(()), "expected (samples, 1, 8, 8), got ()"),
        (np.full((1, 1, 8, 8), np.nan), "a value is NaN or infinite"),
        ("images", "not an array of numbers"),
    ],
)
def test_samples_of_another_form_are_refused_in_one_line(run, inputs, words):
    with refused(ArgumentError, words):
        fedskew.load(run.folder).predict(inputs)


def test_images_in_other_units_than_those_of_training_are_warned_of(tmp_path):
    images, labels = DIGITS.inputs.numpy(), DIGITS.targets.numpy()
    levels = (255 * images).round().astype(np.uint8)
    np.savez(tmp_path / "own.npz", x=levels, y=labels)
    result = trained(tmp_path, data={"name": "npz", "root": str(tmp_path / "own.npz")},
                     training={**IMAGES["training"], "rounds": 0})  # fmt: skip
    model = fedskew.load(result.folder)
    expected = model.predict(levels[:9])
    np.testing.assert_allclose(model.predict(levels[:9] / 255), expected, atol=1e-6)
    for others in (levels[:9].astype(np.float32), levels[:9].astype(np.int64)):
        with pytest.warns(DataWarning, match=r"images are given in \[0, 1\] or as uint8"):
            model.predict(others)


def test_features_in_their_own_units_are_normalised_as_in_training(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 300)
    x = np.c_[1e4 + 50 * y + rng.normal(0, 20, 300), 1e-3 * (y == 1) + rng.normal(0, 1e-4, 300)]
    names = np.array(["healthy", "ill", "uncertain"])[y]
    np.savez(tmp_path / "own.npz", x=x[:200], y=names[:200], x_test=x[200:], y_test=names[200:])
    result = trained(tmp_path, data={"name": "npz", "root": str(tmp_path / "own.npz")}, model="logistic",
                     partition={"rule": "quantity", "clients": 3, "labels_per_client": 2})  # fmt: skip
    model = fedskew.load(result.folder)
    assert model.classes == ("healthy", "ill", "uncertain")
    np.testing.assert_allclose(model.info.mean, x[:200].mean(axis=0))
    assert accuracy(model, x[200:], y[200:]) == result.summary["final"]["accuracy"] > 0.5
    normalised = (x[200:] - model.info.mean) / model.info.std
    np.testing.assert_allclose(model.predict(normalised, normalised=True), model.predict(x[200:]), atol=1e-6)


def test_the_files_metadata_say_what_goes_in_and_what_comes_out(run):
    with safe_open(run.folder / "model.safetensors", framework="np") as file:
        said = json.loads(file.metadata()["fedskew"])["notes"]
    nothing = {"mean": [], "std": [], "window": [], "multi_label": False}
    assert said == {"classes": list("0123456789"), "in_shape": [1, 8, 8], "tokens": False} | nothing


@pytest.mark.parametrize("at", [-100, 100])  # a weight; a class's name
def test_a_model_with_a_flipped_bit_is_refused_in_one_line(tmp_path, run, at):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[at if at < 0 else content.index(b'\\"7\\"') + 2] ^= 4
    (folder / "model.safetensors").write_bytes(content)
    says = "model.safetensors: can't be read (its content does not match its checksum); put it back"
    with refused(RunError, says):
        fedskew.load(folder)


@pytest.mark.parametrize(
    ("model", "method", "rounds"),
    [
        ({"name": "mlp3"}, "moon", 1),  # its projection head is part of the model
        ({"name": "mlp3"}, "fedetf", 1),  # its fixed layer, too
        ({"name": "mlp3"}, {"pipeline": {"name": "fedconcat", "clusters": 2, "batches": 2}}, 2),
        ({"name": f"{__name__}:Square"}, "fedavg", 1),
    ],
)
def test_networks_that_a_method_changes_and_ones_own_are_built_again(tmp_path, model, method, rounds):
    result = trained(tmp_path, model=model, method=method, training={"rounds": rounds, "lr": 0.1})
    assert accuracy(fedskew.load(result.folder), DIGITS.test_inputs) == result.summary["final"]["accuracy"]


def words() -> Dataset:
    """A task of words: class 1 has word 5."""
    ids = torch.arange(60).reshape(20, 3) % 5
    ids[::2, 0] = 5
    labels = (ids[:, 0] == 5).long()
    return Dataset("words", ids, labels, ids, labels, ("no", "yes"))


@pytest.mark.slow
def test_a_model_of_words_takes_token_ids(tmp_path):
    result = trained(tmp_path, data={"name": f"{__name__}:words"}, model={"name": "fasttext", "vocabulary": 6},
                     partition={"rule": "quantity", "clients": 2, "labels_per_client": 1})  # fmt: skip
    model = fedskew.load(result.folder)
    held = words()
    assert accuracy(model, held.inputs.numpy(), held.targets.numpy()) == result.summary["final"]["accuracy"]
    with pytest.raises(ArgumentError, match="takes token ids, whole numbers; got torch.float64"):
        model.predict(np.zeros((1, 3)))


@pytest.mark.slow
def test_the_first_seed_or_the_one_that_is_asked_for(tmp_path):
    result = trained(tmp_path, seeds=[3, 5], model="logistic", training={"rounds": 1})
    for seed, given in ((3, None), (3, 3), (5, 5)):
        model = fedskew.load(result.folder, seed=given)
        assert model.seed == seed
        at = [run.seed for run in result.runs].index(seed)
        assert accuracy(model, DIGITS.test_inputs) == result.runs[at].summary["final"]["accuracy"]
    with pytest.raises(RunError, match="has no seed 4; its seeds: 3, 5"):
        fedskew.load(result.folder, seed=4)


def test_the_best_by_validation_and_a_value_that_validation_chose(tmp_path):
    tune = {"key": "training.lr", "values": [1e-6, 0.1]}
    result = trained(
        tmp_path, tune=tune, data={"name": "digits", "validation": 0.2}, model="logistic", training={"rounds": 2}
    )
    model = fedskew.load(result.folder)
    assert "lr-0.1" in str(model.file)
    chosen = result.runs[0].summary
    assert accuracy(model, DIGITS.test_inputs) == chosen["final"]["accuracy"]
    best = fedskew.load(result.folder, best=True)
    assert accuracy(best, DIGITS.test_inputs) == chosen["best_by_validation"]["accuracy"]


def test_a_seed_that_is_missing_is_trained_by_the_command_that_is_named(tmp_path):
    def interrupt(record):
        if record["seed"] == 5:
            raise KeyboardInterrupt

    tables = {**IMAGES, "seeds": [3, 5], "model": "logistic", "training": {"rounds": 1}}
    with pytest.raises(KeyboardInterrupt):
        fedskew.simulate(tables, out=tmp_path / "my runs", progress=interrupt)
    (folder,) = (tmp_path / "my runs").iterdir()
    for place, seed in ((folder, None), (folder, 5), (folder / "seed-5", None)):
        says = rf"the run is not finished; go on with: fedskew run '{folder}/config.toml' --resume$"
        with pytest.raises(RunError, match=says):
            fedskew.load(place, seed=seed)
    fedskew.simulate(folder / "config.toml", out=folder.parent, resume=True)
    assert list(folder.parent.iterdir()) == [folder]
    assert fedskew.load(folder, seed=5).seed == 5


def test_a_run_of_real_sites_is_finished_and_begun_anew_by_its_servers_script(run, tmp_path):
    folder = tmp_path / "runs" / "sites"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_bytes((run.folder / "config.toml").read_bytes())
    (tmp_path / "run.sh").touch()  # of which anybody may have one
    with pytest.raises(RunError, match="the run is not finished; go on with: fedskew run .*--resume"):
        fedskew.load(folder)
    (tmp_path / "superlink.sh").touch()
    with pytest.raises(RunError, match=rf"the run is not finished; go on with: sh {tmp_path}/run\.sh$"):
        fedskew.load(folder)
    anew = rf"or move {folder} elsewhere and start over with: sh {tmp_path}/run\.sh"
    for summary in ("{}", "["):
        (folder / "summary.json").write_text(summary)
        with pytest.raises(RunError, match=rf" back, {anew}$"):
            RunFolder.read_runs(folder)


def test_what_is_no_finished_run_is_said_in_one_line(run, tmp_path):
    with pytest.raises(RunError, match="not a run folder"):
        fedskew.load(tmp_path)
    with pytest.raises(RunError, match="no validation samples were held out"):
        fedskew.load(run.folder, best=True)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.toml", "rounds.jsonl"):
        (copy / name).write_bytes((run.folder / name).read_bytes())
    with pytest.raises(RunError, match="the run is not finished; go on with: fedskew run .*--resume"):
        fedskew.load(copy)
    (copy / "model.safetensors").write_bytes((run.folder / "model.safetensors").read_bytes()[:500])
    with pytest.raises(RunError, match="model.safetensors: can't be read"):
        fedskew.load(copy)
    (copy / "model.safetensors").write_bytes((run.folder / "model.safetensors").read_bytes())
    (copy / "config.toml").write_text((run.folder / "config.toml").read_text().replace('"mlp3"', '"nowhere:Net"'))
    with pytest.raises(ConfigError, match="'nowhere:Net' can't be imported"):
        fedskew.load(copy)
    (copy / "config.toml").write_text((run.folder / "config.toml").read_text().replace('"mlp3"', '"logistic"'))
    with pytest.raises(RunError, match="not the weights of the config's network"):
        fedskew.load(copy)


def test_torchscript_answers_as_the_model_does_for_any_number_of_samples(run, tmp_path):
    model = fedskew.load(run.folder)
    for samples in (DIGITS.test_inputs[:1], DIGITS.test_inputs):
        found, notes = exported(model, tmp_path / "model.pt", "torchscript", samples)
        np.testing.assert_allclose(found, model.predict(samples), atol=1e-6)
        assert json.loads(notes["classes"]) == list(model.classes)
    with pytest.raises(ArgumentError, match="can't export as 'tflite'"):
        model.export(tmp_path / "model.tflite", "tflite")
    with pytest.raises(RunError, match="can't be written"):
        model.export(tmp_path / "none" / "model.pt", "torchscript")


@pytest.mark.slow
def test_torchscript_takes_bytes_and_features_of_any_type_as_the_model_does(run, tmp_path):
    levels = (DIGITS.test_inputs[:9] * 255).round().to(torch.uint8)
    images, labels = DIGITS.inputs.numpy(), DIGITS.targets.numpy()
    np.savez(tmp_path / "own.npz", x=(255 * images).round().astype(np.uint8), y=labels)
    own = {"data": {"name": "npz", "root": str(tmp_path / "own.npz")}, "training": {"rounds": 1}}
    table = np.random.default_rng(0).normal(1e6, 1.0, (60, 3))
    np.savez(tmp_path / "table.npz", x=table, y=np.arange(60) % 3)
    features = {"data": {"name": "npz", "root": str(tmp_path / "table.npz")}, "model": "logistic",
                "partition": {"rule": "iid", "clients": 2}, "training": {"rounds": 1}}  # fmt: skip
    cases = [
        (run.folder, [levels, levels / 255, (levels / 255).double(), levels[:, 0]]),
        (trained(tmp_path / "images", **own).folder, [levels, levels / 255, levels[:, 0], (levels / 255)[:, 0]]),
        (trained(tmp_path / "features", **features).folder, [torch.from_numpy(table)]),
    ]
    for folder, inputs in cases:
        model = fedskew.load(folder)
        for samples in inputs:
            found, _ = exported(model, folder / "model.pt", "torchscript", samples)
            np.testing.assert_allclose(found, model.predict(samples), atol=1e-6)


@pytest.mark.slow
def test_onnx_answers_as_the_model_does_and_normalises_by_itself(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(40, 9, (80, 1, 16, 16)).astype(np.float32), np.arange(80) % 2
    np.savez(tmp_path / "own.npz", x=x, y=y)
    result = trained(tmp_path, data={"name": "npz", "root": str(tmp_path / "own.npz")}, model="lenet5",
                     partition={"rule": "quantity", "clients": 2, "labels_per_client": 1},
                     training={"rounds": 1})  # fmt: skip
    model = fedskew.load(result.folder)
    for samples in (x[:1], x):  # with many, LeNet-5's own faster pooling would be another path
        found, notes = exported(model, tmp_path / "model.onnx", "onnx", samples)
        assert json.loads(notes["classes"]) == ["0", "1"]
        np.testing.assert_allclose(found, model.predict(samples), atol=1e-5)


def test_without_the_package_onnx_the_extra_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)  # as Python finds it where it is not installed
    with pytest.raises(MissingPackageError, match=r"pip install 'fedskew\[onnx\]'"):
        fedskew.load(run.folder).export(tmp_path / "model.onnx", "onnx")
