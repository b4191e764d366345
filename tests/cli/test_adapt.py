"""A trained model moved to the label mix of a target, from unlabelled samples."""

import dataclasses
import json
import shutil
import warnings

import numpy as np
import pytest
import torch
from scipy.special import softmax

import fedskew
from common import save_image, task
from fedskew import experiment
from fedskew.data import load
from fedskew.errors import ArgumentError, DataError, RunError

TASK = task(10, labels=2, rounds=20, lr=0.05, momentum=0.5, participation=0.5, batch_size=16) | {
    "model": {"name": "mlp3"},
    "data": {"name": "digits", "validation": 0.25},
    "seeds": [0],
}
DIGITS = load("digits")
RIGHT = DIGITS.test_targets.numpy()
MIX = np.array([0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.01])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedskew.simulate(TASK, out=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def target():
    """Rows of test digits by a mix."""
    rng = np.random.default_rng(3)
    return np.concatenate(
        [rng.choice(np.flatnonzero(c == RIGHT), round(120 * share), replace=False) for c, share in enumerate(MIX)]
    )


@pytest.mark.slow
def test_the_moved_model_is_as_much_better_as_was_expected_of_it(run, target):
    samples = DIGITS.test_inputs[target]
    found = run.adapt(samples)
    assert np.abs(found.estimate.mix - MIX).sum() < 0.25
    before = (fedskew.load(run.folder).predict(samples).argmax(1) == RIGHT[target]).mean()
    after = (found.model.predict(samples).argmax(1) == RIGHT[target]).mean()
    plain, gain, low, high = found.expected()
    assert plain == pytest.approx(before, abs=0.06)
    assert low - 0.03 <= after - before <= high + 0.03
    assert after > before + 0.03
    assert low < gain < high


def test_its_probabilities_are_the_formula_written_out(run, target):
    samples = DIGITS.test_inputs[target]
    found = run.adapt(samples)
    logits = fedskew.load(run.folder).logits(samples)
    calibration = found.calibration
    with np.errstate(divide="ignore"):
        expected = softmax(logits / calibration.temperature + calibration.biases + np.log(found.estimate.mix), axis=1)
    np.testing.assert_allclose(found.model.predict(samples), expected, atol=1e-6)
    held_out, labels = fedskew.load(run.folder).held_out()
    assert len(labels) == pytest.approx(0.25 * len(DIGITS.targets), rel=0.05)
    by_hand = fedskew.labels.calibrate(fedskew.load(run.folder).logits(held_out, normalised=True), labels)
    assert by_hand.temperature == calibration.temperature
    np.testing.assert_array_equal(found.held_out, np.bincount(labels, minlength=10))


def test_em_estimates_from_calibrated_samples(run, target):
    assert np.abs(run.adapt(DIGITS.test_inputs[target], method="em").estimate.mix - MIX).sum() < 0.25


@pytest.mark.slow
def test_a_run_that_held_nothing_out_asks_for_labelled_samples_and_takes_them(tmp_path, target):
    other = fedskew.simulate({**TASK, "data": {"name": "digits"}}, out=tmp_path)
    with pytest.raises(RunError, match="held no samples out; give labelled ones with --held-out"):
        other.adapt(DIGITS.test_inputs[target])
    labelled = (DIGITS.test_inputs[:150], RIGHT[:150])
    assert other.adapt(DIGITS.test_inputs[target], labelled).held_out.sum() == 150
    with pytest.raises(ArgumentError, match="simulate with out="):
        fedskew.simulate({**TASK, "training": {"rounds": 0}}).adapt(DIGITS.test_inputs)


@pytest.fixture
def folders(run, target, tmp_path):
    """The run, the target's images as an array, and held-out images in a folder for each class."""
    shutil.copytree(run.folder, tmp_path / "run")
    np.savez(tmp_path / "target.npz", x=DIGITS.test_inputs[target].numpy())
    for row in range(0, 360, 2):
        levels = (255 * DIGITS.test_inputs[row, 0]).round().byte()
        save_image(tmp_path / "held" / str(RIGHT[row]) / f"{row}.png", levels)
    return tmp_path


@pytest.mark.slow
def test_the_command_writes_a_model_that_predict_and_python_use(folders, command):
    done = command("adapt", "run", "--target-data", "target.npz")
    assert "Expected accuracy there: " in done.stdout
    assert "adapted: run/adapted.safetensors" in done.stdout
    moved = fedskew.load(folders / "run", adapted=True)
    samples = np.load(folders / "target.npz")["x"]
    said = json.loads(command("predict", "run", "target.npz", "--adapted", "--json").stdout)
    first = list(said["predictions"][0]["probabilities"].values())
    np.testing.assert_allclose(first, moved.predict(samples[:1])[0], atol=1e-6)
    plain = fedskew.load(folders / "run").predict(samples[:1])[0]
    assert np.abs(np.array(first) - plain).max() > 1e-3
    exported = moved.export(folders / "moved.pt", "torchscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's, of torch.jit
        scripted = torch.jit.load(exported)
    np.testing.assert_allclose(scripted(torch.from_numpy(samples)).numpy(), moved.predict(samples), atol=1e-5)


def test_held_out_images_in_folders_or_an_array(folders, command):
    words = ("adapt", "run", "--target-data", "target.npz", "--json", "--fresh", "--held-out")
    by_folder = command(*words, "held")
    rows = sorted(range(0, 360, 2), key=lambda row: (RIGHT[row], str(row)))
    np.savez(folders / "held.npz", x=DIGITS.test_inputs[rows].numpy(), y=RIGHT[rows])
    by_array = command(*words, "held.npz")
    one, other = json.loads(by_folder.stdout), json.loads(by_array.stdout)
    np.testing.assert_allclose(one["mix"], other["mix"], atol=0.02)
    assert one["accuracy"] == pytest.approx(other["accuracy"], abs=0.1)


def test_a_target_of_another_kind_is_refused_unless_asked(folders, command):
    strange = (1 - DIGITS.test_inputs).repeat(3, 1, 1, 1).numpy()  # white on black
    np.savez(folders / "strange.npz", x=strange)
    np.savez(folders / "narrow.npz", x=strange[..., 1:])
    words = ("adapt", "run", "--target-data", "strange.npz")
    assert "strange.npz: Don't trust this mix" in command(*words, status=2).stderr
    done = command(*words, "--target-data", "narrow.npz", status=2)
    assert "narrow.npz: the model takes samples of shape (1, 8, 8), not (1, 8, 7)" in done.stderr
    assert not (folders / "run" / "adapted.safetensors").exists()
    command(*words, "--on-misfit", "warn")


@pytest.mark.slow
def test_what_was_made_of_other_weights_is_refused(folders, command):
    command("adapt", "run", "--target-data", "target.npz")
    assert fedskew.load(folders / "run", adapted=True).classes == DIGITS.classes
    state = fedskew.simulate({**TASK, "training": {"rounds": 1}}, out=folders / "other").folder / "model.safetensors"
    shutil.copy(state, folders / "run" / "model.safetensors")
    with pytest.raises(RunError, match="made of other weights"):
        fedskew.load(folders / "run", adapted=True)
    (folders / "run" / "adapted.safetensors").unlink()
    with pytest.raises(RunError, match="it is missing; make it: fedskew adapt"):
        fedskew.load(folders / "run", adapted=True)


@pytest.mark.parametrize(
    ("labels", "says"),
    [(np.arange(4), "y has the shape"), (np.full(3, 77), "the model has no class 77"), (None, "has no array 'y'")],
)
def test_labelled_samples_that_do_not_fit_are_refused(run, tmp_path, labels, says):
    arrays = {"x": DIGITS.test_inputs[:3].numpy()} | ({} if labels is None else {"y": labels})
    np.savez(tmp_path / "held.npz", **arrays)
    with pytest.raises(DataError, match=says):
        experiment.Adaptation.read_labelled(tmp_path / "held.npz", fedskew.load(run.folder))
    save_image(tmp_path / "held" / "eleven" / "0.png", np.zeros((8, 8), dtype=np.uint8))
    with pytest.raises(DataError, match="no class 'eleven'"):
        experiment.Adaptation.read_labelled(tmp_path / "held", fedskew.load(run.folder))


def few(folders, number):
    np.savez(folders / "few.npz", x=np.load(folders / "target.npz")["x"][:number])


def test_few_samples_are_told_from_none_and_move_no_model(folders, command):
    few(folders, 7)
    done = command("adapt", "run", "--target-data", "few.npz", status=2)
    assert done.stdout == ""
    assert "few.npz: 7 samples of the target can't show its label mix; give 8 at the least" in done.stderr
    few(folders, 8)
    words = ("adapt", "run", "--target-data", "few.npz", "--json")
    done = command(*words, status=2)
    assert "the target's samples, 8, are too few to move a model by; give 30 or more" in done.stderr
    assert not (folders / "run" / "adapted.safetensors").exists()
    said = json.loads(done.stdout)
    assert (said["file"], said["samples"]) == (None, 8)
    assert said["doubt"] in done.stderr
    expected = said["expected"]
    assert expected["gain_interval"][1] - expected["gain_interval"][0] > 0.3
    assert expected["accuracy_interval"][1] - expected["accuracy_interval"][0] > 0.2
    assert json.loads(command(*words, "--force").stdout)["file"] == "run/adapted.safetensors"


def test_an_earlier_adapted_model_is_kept(folders, command):
    words = ("adapt", "run", "--target-data", "target.npz", "--json")
    command(*words)
    first = (folders / "run" / "adapted.safetensors").read_bytes()
    assert "is there already; add --fresh" in command(*words, "--method", "bbse", status=2).stderr
    assert (folders / "run" / "adapted.safetensors").read_bytes() == first
    command(*words, "--method", "bbse", "--fresh")
    assert (folders / "run" / "earlier" / "adapted.safetensors.1").read_bytes() == first


def test_a_move_that_is_expected_to_lose_is_doubted(run, target):
    found = run.adapt(DIGITS.test_inputs[target])
    assert found.doubt is None
    losing = dataclasses.replace(found, gains=-found.gains[:, [0, 2, 1]])
    assert "the moved model is expected to get" in str(losing.doubt)


def test_what_is_said_in_json_agrees_with_itself(folders, command):
    said = json.loads(command("adapt", "run", "--target-data", "target.npz", "--json").stdout)
    mix, expected = np.array(said["mix"]), said["expected"]
    assert expected["accuracy"] == pytest.approx(mix @ said["accuracy"])
    assert expected["adapted_accuracy"] == pytest.approx(mix @ said["adapted_accuracy"])
    assert expected["gain"] == pytest.approx(mix @ np.array(said["gains"])[:, 0])
    assert expected["gain"] == pytest.approx(expected["adapted_accuracy"] - expected["accuracy"])
    low, high = expected["accuracy_interval"]
    assert low < expected["accuracy"] < high
    for share, error, (low, high) in zip(mix, said["standard_errors"], said["interval"], strict=True):
        assert low <= share <= high
        assert error > 0  # also where the share is 0
    assert (said["unseen"], said["p_value"] is None) == ([], said["dof"] == 0)
