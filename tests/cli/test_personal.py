"""A site's own model of the common one: `fedskew personal` and `TrainedModel.personal`."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch

import fedskew
from common import task
from fedskew.data import load
from fedskew.errors import ArgumentError, RunError
from fedskew.labels import calibrate, personal

TASK = task(10, labels=3, rounds=4, lr=0.1, batch_size=32) | {
    "data": {"name": "digits", "held_out": 0.25},
    "method": {"preset": "fedavg", "finish": {"name": "adapt"}},
    "target": {"mix": [3, 1, 1, 1, 1, 1, 1, 1, 1, 0]},
}
DIGITS = load("digits")
RIGHT = DIGITS.test_targets.numpy()
COUNTS = np.array([40, 0, 0, 9, 0, 0, 0, 0, 0, 51])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedskew.simulate(TASK, out=tmp_path_factory.mktemp("runs")).folder


@pytest.fixture
def folder(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "ours.csv").write_text("class,count\n0,40\n3,9\n9,51\n")
    return tmp_path


def at_the_site(model) -> float:
    """Accuracy where classes occur as at the site."""
    right = model.predict(DIGITS.test_inputs, normalised=True).argmax(1) == RIGHT
    return float(COUNTS / COUNTS.sum() @ [right[c == RIGHT].mean() for c in range(10)])


def test_its_probabilities_are_the_formula_written_out(run):
    model = fedskew.load(run)
    samples, labels = model.held_out()
    calibration = calibrate(model.logits(samples, normalised=True), labels, np.ones(len(labels)))
    logits = model.logits(DIGITS.test_inputs, normalised=True)
    expected = personal(logits, calibration, np.bincount(labels, minlength=10), COUNTS)
    ours = model.personal(COUNTS)
    np.testing.assert_allclose(ours.predict(DIGITS.test_inputs, normalised=True), expected, atol=1e-6)
    assert at_the_site(ours) > at_the_site(model) + 0.03
    assert (ours.file, ours.classes) == (model.file, model.classes)


def test_what_was_moved_to_a_target_is_moved_from_where_it_was(run):
    plain, finished = fedskew.load(run), fedskew.load(run, finished=True)
    samples = DIGITS.test_inputs[:50]
    assert not finished.predict(samples)[:, 9].any()  # which the target has none of
    ours = plain.personal(COUNTS).predict(samples)
    for moved in (finished, plain.personal(COUNTS[::-1])):
        np.testing.assert_allclose(moved.personal(COUNTS).predict(samples), ours, atol=1e-6)
    assert ours[:, 9].max() > 0.5


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (np.zeros(10), "counts: are all 0"),
        (COUNTS[:9], "counts: must have the shape"),
        (-COUNTS, "counts: every number must be finite and not negative"),
        ("many", "counts: must be an array of numbers"),
    ],
)
def test_counts_that_can_not_be_are_refused(run, counts, says):
    with pytest.raises(ArgumentError, match=says):
        fedskew.load(run).personal(counts)


def test_a_run_that_held_nothing_out_takes_labelled_samples(tmp_path):
    data = {"data": {"name": "digits"}, "method": {"preset": "fedavg"}, "target": {}}
    model = fedskew.load(fedskew.simulate({**TASK, **data}, out=tmp_path).folder)
    with pytest.raises(RunError, match="held no samples out; give labelled ones with --held-out, or train with"):
        model.personal(COUNTS)
    samples = DIGITS.test_inputs[:200]
    assert at_the_site(model.personal(COUNTS, (samples, RIGHT[:200]))) > at_the_site(model)
    some = RIGHT[:200] < 5
    with pytest.raises(ArgumentError, match="no held-out sample is of a class that they have"):
        model.personal(np.arange(10) // 9, (samples[some], RIGHT[:200][some]))


def test_the_command_writes_a_model_that_predict_python_and_exports_use(folder, command):
    done = command("personal", "run", "--counts", "ours.csv")
    assert "What the site's 100 labels say" in done.stdout
    assert "Expected accuracy there: " in done.stdout
    assert "personal: run/personal.safetensors" in done.stdout
    ours = fedskew.load(folder / "run", personal=True)
    samples = DIGITS.test_inputs[:5].numpy()
    by_hand = fedskew.load(folder / "run").personal(COUNTS)
    np.testing.assert_allclose(ours.predict(samples), by_hand.predict(samples), atol=1e-6)
    np.savez(folder / "new.npz", x=samples)
    said = json.loads(command("predict", "run", "new.npz", "--personal", "--json").stdout)
    found = [list(one["probabilities"].values()) for one in said["predictions"]]
    np.testing.assert_allclose(found, ours.predict(samples), atol=1e-6)
    command("predict", "run", "--personal", "--export", "torchscript")
    alone = command("predict", "run", "--personal", "--export", "weights", status=2).stderr
    assert "weights: export the model before its move (no --adapted, --personal), or take onnx" in alone
    (folder / "one.csv").write_text("class,count\n3,1\n")
    words = ("personal", "run", "--counts", "one.csv", "--fresh", "--force")
    assert "What the site's 1 label says" in command(*words).stdout
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's, of torch.jit
        scripted = torch.jit.load(folder / "run" / "personal.pt")
    np.testing.assert_allclose(scripted(torch.from_numpy(samples)).numpy(), found, atol=1e-5)


def test_what_is_printed_as_json_is_what_was_counted(folder, command):
    said = json.loads(command("personal", "run", "--counts", "ours.csv", "--json").stdout)
    np.testing.assert_allclose(said["mix"], (COUNTS + 0.5) / 105)
    np.testing.assert_allclose(said["interval"], np.stack([said["mix"]] * 2, axis=1))
    assert (said["samples"], said["p_value"], said["misfit"], said["doubt"]) == (100, None, False, None)
    mix, expected = np.array(said["mix"]), said["expected"]
    assert expected["accuracy"] == pytest.approx(mix @ said["accuracy"])
    assert expected["gain"] == pytest.approx(mix @ np.array(said["gains"])[:, 0])
    assert expected["gain_interval"][0] < expected["gain"] < expected["gain_interval"][1]


def test_unlabelled_samples_stand_for_counts_and_an_earlier_model_is_kept(folder, command):
    rows = np.random.default_rng(0).choice(len(RIGHT), 200, p=COUNTS[RIGHT] / COUNTS[RIGHT].sum())
    np.savez(folder / "new.npz", x=DIGITS.test_inputs[rows].numpy())
    command("personal", "run", "--counts", "ours.csv")
    first = (folder / "run" / "personal.safetensors").read_bytes()
    words = ("personal", "run", "--unlabelled", "new.npz", "--force", "--json")
    assert "is there already; add --fresh" in command(*words, status=2).stderr
    assert np.abs(np.array(json.loads(command(*words, "--fresh").stdout)["mix"]) - COUNTS / 100).sum() < 0.4
    assert (folder / "run" / "earlier" / "personal.safetensors.1").read_bytes() == first
    assert at_the_site(fedskew.load(folder / "run", personal=True)) > at_the_site(fedskew.load(folder / "run")) + 0.03


@pytest.mark.parametrize(
    ("words", "text", "says"),
    [
        ("--counts ours.csv", "class,count\nten,4\n", "ours.csv: the model has no class 'ten'"),
        ("--counts ours.csv", "class,count\n1,0\n", "ours.csv: every count is 0; give the site's samples"),
        ("--counts ours.csv", "class,count\n1,-4\n", "ours.csv, line 2, column 'count': -4, expected a finite"),
        ("--counts ours.csv", "\x89PNG\0\n", "ours.csv"),
        ("--counts ours.csv", "client,1\na,2\nb,3\n", "has 2 clients; say which by client (--client), such as a"),
        ("--counts ours.csv --client c", "client,1\na,2\nb,3\n", "has no client 'c'"),
        ("--counts no.csv", "", "no.csv: can't be read: No such file"),
        ("", "", "--counts: give the site's label counts, or unlabelled samples"),
        ("--counts ours.csv --unlabelled ours.csv", "", "--counts: give the site's label counts, or unlabelled"),
        ("--unlabelled new.npz --client a", "", "--client: says whose of the --counts"),
    ],
)
def test_mistakes_are_one_line(folder, command, words, text, says):
    (folder / "ours.csv").write_text(text)
    assert says in command("personal", "run", *words.split(), status=2).stderr
    assert not (folder / "run" / "personal.safetensors").exists()


def test_what_goes_with_a_personal_model(folder, command):
    np.savez(folder / "new.npz", x=DIGITS.test_inputs[:1].numpy())
    words = ("predict", "run", "new.npz", "--personal")
    missing = command(*words, status=2).stderr
    assert "run/personal.safetensors: it is missing; make it: fedskew personal run --counts ..." in missing
    for option, name in (("--adapted", "adapt"), ("--best", "personal"), ("--finished", "personal")):
        said = f"`fedskew {name}` says of which model it is; leave out other options"
        assert said in command(*words, option, status=2).stderr
