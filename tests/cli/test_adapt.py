"""A trained model moved to the label mix of a target, from unlabelled samples."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax

import fedskew
from common import exported, save_image, task
from fedskew import experiment
from fedskew.data import load
from fedskew.errors import ArgumentError, DataError, RunError
from fedskew.labels import Outcomes, estimate_mix

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
    scripted, _ = exported(moved, folders / "moved.pt", "torchscript", samples)
    np.testing.assert_allclose(scripted, moved.predict(samples), atol=1e-5)


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


# `fedskew target`: predictions made elsewhere in, a label mix with its intervals and a verdict out.


NAMES = ("cat", "dog", "owl", "fox")
UNIFORM, SKEWED = [0.25] * 4, [0.6, 0.2, 0.15, 0.05]


def sample(mix: Sequence[float], size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes, and a model's probabilities."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(4, size, p=mix)
    logits = rng.normal(size=(size, 4))
    logits[np.arange(size), labels] += 2
    return labels, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def table(path: Path, columns: dict[str, Sequence[object]], separator: str = ",") -> None:
    lines = [separator.join(columns), *(separator.join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    labels, held_out = sample(UNIFORM, 800, 0)
    _, unlabelled = sample(SKEWED, 500, 1)
    table(
        tmp_path / "held.csv",
        {"label": [NAMES[y] for y in labels], **dict(zip(NAMES, held_out.round(6).T, strict=True))},
    )
    table(tmp_path / "new.csv", {"id": range(500), **dict(zip(NAMES, unlabelled.round(6).T, strict=True))})
    return tmp_path


@pytest.mark.slow
def test_the_page_says_the_verdict_and_each_class_and_writes_a_mix_that_other_commands_take(home, command):
    done = command("target", "new.csv", "--tables", "held.csv", "--out", "mix.csv")
    assert "Label mix of 500 samples" in done.stdout
    assert "look like a mix of the held-out classes (p = " in done.stdout
    assert (home / "target-mix.png").stat().st_size > 5000
    (home / "counts.csv").write_text("client,cat,dog,owl,fox\na,5,1,0,2\nb,0,4,4,1\n")
    command("describe", "counts.csv", "--target", "mix.csv", "--no-picture")

    values = json.loads(command("target", "new.csv", "--tables", "held.csv", "--json").stdout)
    np.testing.assert_allclose(values["mix"], SKEWED, atol=0.08)
    assert values["misfit"] is False
    assert f"{values['mix'][0]:.1%}" in done.stdout
    shares = [float(line.split(",")[1]) for line in (home / "mix.csv").read_text().splitlines()[1:]]
    assert shares == values["mix"]


def test_probabilities_predictions_with_confidence_and_counts_are_the_same_samples(home):
    by_probability = Outcomes.read(home / "new.csv", home / "held.csv")
    labels, held_out = sample(UNIFORM, 800, 0)
    _, unlabelled = sample(SKEWED, 500, 1)
    columns = [
        {"Predicted": [NAMES[y] for y in each.argmax(axis=1)], "confidence": each.round(6).max(axis=1)}
        for each in (held_out, unlabelled)
    ]
    table(home / "held2.csv", {"label": [NAMES[y] for y in labels], **columns[0]}, ";")
    table(home / "new2.csv", columns[1])
    by_prediction = Outcomes.read(home / "new2.csv", home / "held2.csv")
    assert by_prediction.classes == tuple(sorted(NAMES))  # no column says their order
    order = [by_prediction.classes.index(name) for name in by_probability.classes]
    np.testing.assert_array_equal(
        by_prediction.tables.reshape(4, 4, 4)[np.ix_(order, order)].reshape(4, 16), by_probability.tables
    )
    assert (by_probability.tables.sum(), by_probability.cells.sum()) == (800, 500)

    written = {"file": range(800), "class": columns[0]["Predicted"]}  # as by `fedskew predict --csv`
    shares = dict(zip(NAMES, held_out.round(6).T, strict=True))
    table(home / "held4.csv", written | shares | {"label": [NAMES[y] for y in labels]})
    np.testing.assert_array_equal(Outcomes.read(home / "new.csv", home / "held4.csv").tables, by_probability.tables)
    table(home / "held4.csv", written | shares)
    with pytest.raises(ArgumentError, match="no column 'label' in the header: the true class of each held-out sample"):
        Outcomes.read(home / "new.csv", home / "held4.csv")

    names = [f"cell {at}" for at in range(16)]
    table(home / "held3.csv", {"class": NAMES, **dict(zip(names, by_probability.tables.T.astype(int), strict=True))})
    table(home / "new3.csv", {name: [int(count)] for name, count in zip(names, by_probability.cells, strict=True)})
    counted = Outcomes.read(home / "new3.csv", home / "held3.csv")
    np.testing.assert_array_equal(counted.tables, by_probability.tables)
    np.testing.assert_array_equal(counted.cells, by_probability.cells)
    np.testing.assert_allclose(counted.estimate().mix, estimate_mix(by_probability.tables, by_probability.cells).mix)


def test_without_confidence_there_is_an_estimate_and_nothing_to_test(home, command):
    labels, held_out = sample(UNIFORM, 800, 0)
    table(home / "h.csv", {"class": labels, "prediction": held_out.argmax(axis=1)})
    table(home / "n.csv", {"prediction": sample(SKEWED, 500, 1)[1].argmax(axis=1)})
    done = command("target", "n.csv", "--tables", "h.csv", "--no-picture")
    assert "can't be tested" in done.stdout
    assert "the predictions' confidence where the files lack it" in done.stdout


def test_em_takes_all_probabilities(home, command):
    done = command("target", "new.csv", "--tables", "held.csv", "--method", "em", "--json")
    np.testing.assert_allclose(json.loads(done.stdout)["mix"], SKEWED, atol=0.08)
    table(home / "h.csv", {"label": [0, 1], "predicted": [0, 1]})
    table(home / "n.csv", {"predicted": [0, 1]})
    refused = command("target", "n.csv", "--tables", "h.csv", "--method", "em", status=2)
    assert "em takes each sample's probability of every class" in refused.stderr


def test_samples_of_another_kind_are_not_trusted(home, command):
    _, unlabelled = sample(SKEWED, 500, 1)
    strange = 0.7 * unlabelled + 0.3 * np.roll(unlabelled, 1, axis=1)
    table(home / "new.csv", dict(zip(NAMES, strange.round(6).T, strict=True)))
    assert "Don't trust this mix" in command("target", "new.csv", "--tables", "held.csv", "--no-picture").stdout


@pytest.mark.parametrize(
    ("held_out", "new", "says"),
    [
        ("predicted\n1\n", "predicted\n1\n", "held.csv, line 1: no column 'label' in the header"),
        ("label,predicted\n1,1\n", "guess\n1\n", "new.csv, line 1: no column 'predicted'"),
        ("label,predicted,confidence\n1,1,0.5\n", "predicted\n1\n", "new.csv, line 1: no column 'confidence'"),
        ("label,predicted,confidence\n1,1,1.5\n", "predicted,confidence\n1,1\n", "1.5, expected a probability"),
        ("label,a,b\na,0.5,0.5\nc,0.5,0.5\n", "a,b\n0.5,0.5\n", "held.csv, line 3: the label 'c' has no column"),
        ("label,a,b\na,0.5,0.5\n", "a,b\n0.5,0.1\n", "new.csv, line 2: the probabilities sum to 0.6, not to 1"),
        ("label,a,b\na,0.5,0.5\n", "a\n1\n", "new.csv, line 1: no column 'b'"),
        ("label,a,b\na,0.5,0.2\na,0.5,0.5\n", "a,b\n1,0\n", "held.csv, line 2: the row sums to 0.7"),
        ("label,a,b\na,5,2\nb,1,4\n", "a,b\n1,2\n3,4\n", "new.csv, line 3: a second row"),
        ("label,a,b\n", "a,b\n1,2\n", "held.csv, line 1: nothing below the header"),
        ("label,a,b\na,0.5,nan\n", "a,b\n1,0\n", "held.csv, line 2, column 'b': nan"),
        ("label,a,b\n,0.5,0.5\n", "a,b\n1,0\n", "column 'label': empty"),
    ],
)
def test_a_mistake_is_one_line_that_says_where(tmp_path, command, held_out, new, says):
    (tmp_path / "held.csv").write_text(held_out)
    (tmp_path / "new.csv").write_text(new)
    assert says in command("target", "new.csv", "--tables", "held.csv", status=2).stderr
