"""A target's label mix, estimated in a run from samples whose labels nobody reads."""

import dataclasses
import json
import re
from copy import deepcopy

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedskew
from common import stop_at, task, without_times
from fedskew.cli import app
from fedskew.errors import ConfigError, DataError, RunError
from fedskew.experiment import make_task, make_training_loop, resolve
from fedskew.weighting import fedpals

TRUTH = [0.2, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.03, 0.02]
TASK = task(6, beta=0.5, rounds=5, epochs=2, batch_size=16, lr=1.0) | {
    "name": "shifted",
    "data": {"name": "digits", "validation": 0.3, "held_out": 0.4},
    "method": {"preset": "fedpals"},
    "target": {"mix": "estimate", "truth": TRUTH, "warmup": 2, "every": 2, "unlabelled": 150},
}


def changed(**tables):
    tree = deepcopy(TASK)
    for name, table in tables.items():
        tree[name] = tree[name] | table if isinstance(table, dict) and name in tree else table
    return tree


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fedskew.simulate(TASK, out=tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_clients_are_weighed_towards_the_estimate_once_there_is_one_and_as_fedavg_does_before(whole):
    task = make_task(whole.config, 0)
    rounds = whole.rounds
    assert [record["round"] for record in rounds if "target" in record] == [2, 4]
    for number in (1, 2):
        assert rounds[number]["fallback"] == "the first estimate is made after round 2"
        sizes = task.counts.sum(axis=1)[rounds[number]["answered"]]
        np.testing.assert_allclose(rounds[number]["weights"], sizes / sizes.sum())
    for number, newest in ((3, 2), (4, 2), (5, 4)):
        assert "fallback" not in rounds[number]
        estimate = rounds[newest]["target"]["mix"]
        weights = fedpals(task.counts[rounds[number]["answered"]], estimate)
        np.testing.assert_allclose(rounds[number]["weights"], weights, atol=1e-9)


def test_the_estimate_is_near_the_truth_and_says_how_near(whole):
    for record in (whole.rounds[2]["target"], whole.rounds[4]["target"]):
        away = np.abs(np.array(record["mix"]) - TRUTH)
        assert (away < 4 * np.array(record["se"])).all()
        assert away.sum() < 0.35
        assert (record["misfit"], record["unseen"], record["unused"]) == (False, [], None)
        assert record["p"] > 0.001
        assert record["sites"]["tested"] >= 4


def test_what_the_target_is_made_of(whole):
    task = make_task(whole.config, 0)
    inputs = task.dataset.inputs.flatten(1).numpy()
    rows = [np.flatnonzero((inputs == sample).all(axis=1)) for sample in task.unlabelled.flatten(1).numpy()]
    assert all(np.isin(same, task.validation).any() for same in rows)
    mix = np.bincount(task.dataset.targets.numpy()[[same[0] for same in rows]], minlength=10) / len(rows)
    np.testing.assert_allclose(mix, TRUTH, atol=1 / len(rows))
    np.testing.assert_allclose(task.target, TRUTH)
    assert task.server_target is None
    assert whole.rounds[-1]["target_distance"] is not None
    assert whole.rounds[-1]["validation"]["target_accuracy"] is None  # models are not chosen by what nobody knows


def test_a_trained_model_is_calibrated_on_what_clients_held_out(whole):
    task = make_task(whole.config, 0)
    rows = np.sort(np.concatenate(task.held_out))
    samples, labels = fedskew.load(whole.folder).held_out()
    assert torch.equal(samples, task.dataset.inputs[rows])
    assert labels.tolist() == task.dataset.targets[rows].tolist()


@pytest.mark.slow
def test_nothing_that_is_trained_depends_on_the_truth():
    config = resolve(changed(training={"rounds": 3}))
    task = make_task(config, 0)
    models = []
    for target in (task.target, task.target[::-1], None):
        loop = make_training_loop(config, 0, task=dataclasses.replace(task, target=target))
        loop.run()
        models.append(loop.server.model.parameters)
    assert torch.equal(models[0], models[1])
    assert torch.equal(models[0], models[2])


def test_validation_chooses_models_by_the_mix_that_the_server_is_told_not_by_the_truth():
    told = [1.0, *[0.0] * 9]
    run = fedskew.simulate(changed(target={"mix": told, "truth": TRUTH}, training={"rounds": 1, "lr": 0.1}))
    validation, test = run.rounds[1]["validation"], run.rounds[1]["evaluation"]
    assert validation["target_accuracy"] == pytest.approx(validation["per_class"][0])
    assert test["target_accuracy"] == pytest.approx(np.dot(TRUTH, test["per_class"]))
    assert validation["target_accuracy"] != pytest.approx(np.dot(TRUTH, validation["per_class"]))


def test_the_last_client_of_a_rule_that_has_a_target_is_the_unlabelled_one():
    partition = {"rule": "sparsity", "clients": 5, "labels_per_client": 4}
    config = resolve(
        changed(data={"validation": 0.0}, partition=partition, target={"truth": None}, training={"rounds": 2})
        | {"partition": partition}
    )
    task = make_task(config, 0)
    assert torch.equal(task.unlabelled, task.dataset.inputs[task.partition.indices[-1]])
    np.testing.assert_allclose(task.target, task.partition.counts[-1] / task.partition.counts[-1].sum())
    loop = make_training_loop(config, 0, task=task)
    assert loop.run().rounds[2].target["samples"] == len(task.unlabelled)


@pytest.mark.slow
def test_unlabelled_samples_of_ones_own(whole, tmp_path):
    samples = make_task(whole.config, 0).unlabelled.numpy()  # digits are not normalised
    np.savez(tmp_path / "mine.npz", x=samples)
    tree = changed(target={"unlabelled": str(tmp_path / "mine.npz"), "truth": None}, training={"rounds": 3})
    run = fedskew.simulate(tree, out=tmp_path)
    np.testing.assert_allclose(run.rounds[2]["target"]["mix"], whole.rounds[2]["target"]["mix"], atol=1e-3)
    assert run.rounds[3]["evaluation"]["target_accuracy"] is None
    np.savez(tmp_path / "mine.npz", x=samples[:100])
    with pytest.raises(RunError, match="your data changed"):
        fedskew.simulate(tree, out=tmp_path, resume=True)
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 7), dtype=np.float32))
    with pytest.raises(DataError, match=r"target\.unlabelled: .*mine\.npz: the model takes .* \(1, 8, 8\), not \(7,\)"):
        fedskew.simulate(tree)
    (tmp_path / "mine.npz").unlink()
    with pytest.raises(DataError, match=r"target\.unlabelled: .*mine\.npz"):
        fedskew.simulate(tree)


@pytest.mark.slow
@pytest.mark.parametrize("resumed_at", [2, 3])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(whole, tmp_path, resumed_at):
    with pytest.raises(KeyboardInterrupt):
        fedskew.simulate(TASK, out=tmp_path, progress=stop_at(resumed_at))
    again = fedskew.simulate(TASK, out=tmp_path, resume=True)
    assert without_times(again.rounds) == without_times(whole.rounds)
    for file in ("model.safetensors", "best.safetensors"):
        assert (again.folder / file).read_bytes() == (whole.folder / file).read_bytes()
    states = [load_file(run.folder / "checkpoint" / "state.safetensors") for run in (whole, again)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["target/mix"].tolist() == whole.rounds[4]["target"]["mix"]


@pytest.mark.slow
def test_several_processes_give_the_same_bits(whole):
    other = fedskew.simulate(changed(engine={"backend": "processes", "processes": 2}))
    assert without_times(other.rounds) == without_times(whole.rounds)


@pytest.mark.slow
def test_a_cohort_and_seeds_together_give_the_same_up_to_rounding(whole):
    together = fedskew.simulate(changed(engine={"backend": "cohort", "seeds_together": True}) | {"seeds": [0, 1]})
    for other, one in zip(together.runs[0].rounds, whole.rounds, strict=True):
        np.testing.assert_allclose(other.weights, one["weights"], atol=2e-3)
        if other.target is not None:
            np.testing.assert_allclose(other.target["mix"], one["target"]["mix"], atol=5e-3)
    assert together.runs[1].rounds[4].target["mix"] != together.runs[0].rounds[4].target["mix"]


@pytest.mark.parametrize("estimator", ["em-cells", "bbse", "em"])
def test_every_estimator(estimator, whole):
    bins = {"bins": 1} if estimator == "bbse" else {}
    run = fedskew.simulate(changed(target={"estimator": estimator, **bins}, training={"rounds": 2}))
    record = run.rounds[2]["target"]
    assert np.abs(np.array(record["mix"]) - TRUTH).sum() < 0.4
    assert (record["p"] is None) == (estimator == "em")


def test_a_weighting_that_reads_no_target_goes_on_as_always():
    run = fedskew.simulate(changed(method={"preset": "fedla"}, training={"rounds": 2}))
    plain = fedskew.simulate(changed(method={"preset": "fedla"}, training={"rounds": 2}, target={"mix": "uniform"}))
    assert run.rounds[2]["weights"] == plain.rounds[2]["weights"]
    assert "fallback" not in run.rounds[1]
    assert run.rounds[2]["target"]["mix"]
    assert plain.rounds[2]["evaluation"]["target_accuracy"] == run.rounds[2]["evaluation"]["target_accuracy"]


def test_ten_samples_are_too_few_for_a_target():
    run = fedskew.simulate(changed(target={"unlabelled": 10}, training={"rounds": 3}))
    assert "no estimate is sure enough yet" in run.rounds[2]["target"]["unused"]
    assert run.rounds[3]["fallback"] == run.rounds[2]["target"]["unused"]


def test_fewer_held_out_samples_may_be_asked_for():
    run = fedskew.simulate(changed(target={"ask": 100}, training={"rounds": 2}))
    assert 100 <= run.rounds[2]["target"]["held_out"] < 250


def negatives():
    """Digits whose validation samples, of which the target is drawn, are dark on bright."""
    digits = fedskew.data.load("digits")
    inputs = digits.inputs.clone()
    rows = torch.arange(0, len(inputs), 3)
    inputs[rows] = 1 - inputs[rows]
    return dataclasses.replace(digits, name="negatives", inputs=inputs, validation=rows.numpy())


@pytest.mark.slow
def test_a_target_that_is_no_mix_of_the_clients_classes(tmp_path):
    other = changed(training={"rounds": 4}, target={"truth": "uniform"}) | {
        "data": {"name": negatives, "validation": "own", "held_out": 0.4}
    }
    run = fedskew.simulate(other, out=tmp_path)
    assert run.rounds[2]["target"]["misfit"]
    assert run.rounds[3]["fallback"].startswith("label shift does not hold after round 2")
    stopped = other | {"target": other["target"] | {"on_misfit": "stop"}}
    for again in ({}, {"resume": True}):
        with pytest.raises(RunError, match=r"^target\.on_misfit: label shift does not hold after round 2[^\n]*$"):
            fedskew.simulate(stopped, out=tmp_path, **again)


def test_a_partition_with_a_target_client_takes_no_truth():
    tree = changed(partition={"labels_per_client": 4, "clients": 5, "rule": "sparsity"})
    for key in ("beta", "min_size"):
        del tree["partition"][key]
    with pytest.raises(ConfigError, match=r"target\.truth: the partition has a target client"):
        fedskew.simulate(tree)


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({}, "target: its label mix is estimated from unlabelled samples, after round 2 and every 2 rounds; until an"),
        ({"method": {"preset": "fedla"}}, "target: its label mix is .* every 2 rounds; the weighting does not use it$"),
        ({"target": {"mix": "uniform"}}, "target: all classes alike$"),
        ({"target": {"mix": "pooled"}}, "target: the label mix of all clients together$"),
        ({"target": {"mix": "client"}}, "target: the label mix of the partition's target client$"),
        ({"target": {"mix": "data"}}, "target: the label mix that the data set defines$"),
        ({"target": {"mix": "truth", "truth": "pooled"}}, "target: the label mix of all clients together$"),
        ({"target": {"mix": "truth", "truth": [1, 3]}}, "target: shares of 0.25, 0.75$"),
        ({"target": {"mix": [1, 3]}}, "target: shares of 0.25, 0.75$"),
    ],
)
def test_which_target_a_config_has_is_said(tables, says):
    assert re.match(says, resolve(changed(**tables)).target_in_words())


def test_describe_compares_a_configs_clients_with_its_target(tmp_path):
    tree = task(5, rounds=1) | {"partition": {"rule": "sparsity", "clients": 5, "labels_per_client": 4}}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(tree))
    done = CliRunner().invoke(app, ["describe", str(tmp_path / "mine.toml"), "--no-picture"])
    words = " ".join(done.stdout.split())
    assert "Target: the label mix of the partition's target client; the weighting does not use it." in words
    assert "of the target" in words


def test_a_config_that_estimates_nothing_keeps_its_hash():
    given = changed(target={"mix": "uniform", "truth": None})
    assert resolve(given).hash == resolve(given | {"target": given["target"] | {"every": 9, "ask": 3}}).hash
    assert resolve(TASK).hash != resolve(changed(target={"every": 9})).hash


@pytest.mark.slow
def test_the_page_draws_the_estimates_with_intervals_beside_the_truth(whole):
    page = (whole.folder / "report.html").read_text(encoding="utf-8")
    assert "The target&#39;s label mix, as estimated" in page
    assert "Estimated 2 times, last after round 4" in page
    assert (
        "Clients were weighed as FedAvg does in 2 of 5 rounds; the last time as the first estimate is made after"
        in page
    )
    records = [json.loads(line) for line in (whole.folder / "rounds.jsonl").read_text().splitlines()]
    last = records[4]["target"]
    assert json.dumps(float(f"{100 * last['mix'][0]:.6g}")) in page
    assert json.dumps(float(f"{100 * 1.959964 * last['se'][0]:.6g}")) in page
    assert '"level":20.0' in page
