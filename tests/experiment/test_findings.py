"""Runs on samples of several labels, or none: counts, weights, figures, backends, resume, the model, refusals."""

import json
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, roc_auc_score

import fedskew
from common import as_bits, bits, exported, refused, stop_at
from fedskew import findings
from fedskew.cli import app
from fedskew.data import Dataset
from fedskew.engine import ClientSamples, LocalTraining, LocalWork
from fedskew.errors import ArgumentError, CombinationError, ConfigError, RunError
from fedskew.experiment import Adaptation, RunFolder
from fedskew.hooks import Batch
from fedskew.labels import privatize
from fedskew.methods import objective_in_words
from fedskew.metrics import FindingScores, finding_figures
from fedskew.objectives import INDEX, Context
from fedskew.parameters import component
from fedskew.weighting import INDEX as WEIGHTINGS

NAMES = ("Edema", "Effusion", "Hernia")
SIZES = (40, 10, 25, 25)


def chests() -> Dataset:
    """Four clients' samples, whose features show three findings, the last one rare; the second client has none."""
    rng = np.random.default_rng(0)
    clients = np.repeat(np.arange(4), SIZES)
    shares = np.array([[0.6, 0.3, 0.1], [0, 0, 0], [0.2, 0.8, 0.1], [0.1, 0.1, 0.2]])
    table = rng.random((100, 3)) < shares[clients]
    test = rng.random((60, 3)) < [0.4, 0.3, 0.15]

    def inputs(flags):
        return torch.from_numpy((flags @ (3 * np.eye(3, 5)) + rng.normal(size=(len(flags), 5))).astype(np.float32))

    targets, test_targets = (torch.from_numpy(as_bits(flags)) for flags in (table, test))
    return Dataset(
        "chests", inputs(table), targets, inputs(test), test_targets, NAMES, clients=clients,
        client_names=tuple("nswe"), multi_label=True,
    )  # fmt: skip


CHESTS = chests()


@component
class Shares(WEIGHTINGS["fedla"]):
    """A weighting of one's own that says nothing of several labels in sums."""

    sums_labels: ClassVar[bool] = False


def run(out=None, method="fedavg", rounds=4, resume=False, progress=None, **sections):
    tables = {
        "data": {"name": CHESTS},
        "partition": {"rule": "natural"},
        "model": {"name": "mlp3", "width": 8},
        "method": {"preset": method} if isinstance(method, str) else method,
        "training": {"rounds": rounds, "batch_size": 8, "lr": 0.3},
    }
    tables |= {key: {**tables.get(key, {}), **values} for key, values in sections.items()}
    return fedskew.simulate(out=out, resume=resume, progress=progress, **tables)


def weights_of(result, round=1):
    """The weights of the clients in a round, in the order of their ids."""
    record = result.rounds[round]
    return np.array(record["weights"])[np.argsort(record["answered"])]


def test_counts_are_of_labels_and_sizes_of_samples():
    found = run(method="fedavg")
    table = CHESTS.labels
    expected = [table[CHESTS.clients == client].sum(axis=0).tolist() for client in range(4)]
    (seed,) = found.runs
    assert seed.counts.tolist() == expected
    assert seed.samples.tolist() == list(SIZES)
    assert weights_of(found) == pytest.approx([0.4, 0.1, 0.25, 0.25])  # by samples, not by labels


def test_fedla_and_fedpals_weigh_by_counts_of_labels():
    counts = np.array(run().runs[0].counts, dtype=float)
    shares = (counts / counts.sum(axis=0)).sum(axis=1)
    assert weights_of(run(method="fedla", rounds=1)) == pytest.approx(shares / shares.sum())
    mix = [0.2, 0.3, 0.5]
    weights = weights_of(run(method="fedpals", rounds=1, target={"mix": mix}))
    assert weights[1] == 0  # of its samples none has a label
    mixes = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)

    def distance(given):
        return np.square(given @ mixes - mix).sum()

    for other in np.random.default_rng(0).dirichlet(np.ones(3), 500):
        assert distance(weights) <= distance(np.insert(other, 1, 0)) + 1e-9
    alone = run(method="fedla", rounds=6, training={"participation": 0.25}).rounds[1:]
    silent = [one for one in alone if one["answered"] == [1]]
    assert all(one["weights"] == [1.0] and "has a label" in one["fallback"] for one in silent)


def test_figures_are_scikit_learns():
    rng = np.random.default_rng(1)
    table = rng.random((80, 4)) < [0.5, 0.2, 0.05, 0.0]  # the last one has no sample
    logits = np.round(rng.normal(size=(80, 4)) + 2 * table, 1)  # with ties
    found = finding_figures(logits, as_bits(table))
    each = [roc_auc_score(table[:, at], logits[:, at]) for at in range(3)]
    assert found["aurocs"][:3] == pytest.approx(each)
    assert np.isnan(found["aurocs"][3])
    assert found["auroc"] == pytest.approx(np.mean(each))
    precisions = [average_precision_score(table[:, at], logits[:, at]) for at in range(3)]
    assert found["pr_auc"] == pytest.approx(np.mean(precisions))
    said = logits >= 0
    assert found["accuracy"] == pytest.approx((said == table).all(axis=1).mean())
    assert found["macro_f1"] == pytest.approx(f1_score(table, said, average="macro"))
    balanced = [balanced_accuracy_score(table[:, at], said[:, at]) for at in range(3)]
    assert found["balanced_accuracy"] == pytest.approx(np.mean(balanced))
    bce = torch.nn.BCEWithLogitsLoss()(torch.from_numpy(logits), torch.from_numpy(table.astype(float)))
    assert found["loss"] == pytest.approx(bce.item())


def test_predict_shows_the_labels_of_each_sample(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = run("runs", rounds=30).folder
    np.savez("new.npz", x=CHESTS.test_inputs)
    app(["predict", str(folder), "new.npz"], standalone_mode=False)
    heading, *lines = (line.split() for line in capsys.readouterr().out.splitlines()[2:])
    own = ["|".join(np.array(NAMES)[line >= 0.5]) for line in fedskew.load(folder).predict(CHESTS.test_inputs)]
    assert heading == ["file", "labels"]
    assert [line[1:] for line in lines[:10]] == [[label] if label else [] for label in own[:10]]
    assert {"", "Edema", "Effusion"} <= {*own[:10]}


def test_the_record_has_the_figures_of_the_model(tmp_path):
    found = run(tmp_path, rounds=10)
    model = fedskew.load(found.folder)
    assert model.info.multi_label
    probabilities = model.predict(CHESTS.test_inputs)
    truth = findings.as_table(CHESTS.test_targets, 3)
    last = found.rounds[-1]["evaluation"]
    assert last["auroc"] == pytest.approx(roc_auc_score(truth, probabilities, average="macro"), abs=1e-6)
    assert last["per_class_auroc"] == pytest.approx(roc_auc_score(truth, probabilities, average=None), abs=1e-6)
    assert last["accuracy"] == pytest.approx(((probabilities >= 0.5) == truth).all(axis=1).mean())
    assert last["auroc"] > max(0.7, found.rounds[0]["evaluation"]["auroc"])
    assert probabilities.sum(axis=1).max() > 1  # no shares of one whole
    assert found.per_class()["auroc"].tolist() == pytest.approx(last["per_class_auroc"])
    (stored,) = RunFolder.read_runs(found.folder)
    assert stored.samples.tolist() == list(SIZES)
    assert "100 samples" in (found.folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_gives_the_same_bits(processes):
    assert bits(run(engine={"backend": "processes", "processes": processes})) == bits(
        run(engine={"backend": "sequential"})
    )


def test_a_cohort_agrees():
    one, other = (run(engine={"backend": backend}) for backend in ("sequential", "cohort"))
    torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), rtol=1e-4, atol=1e-6)


def test_a_run_goes_on_to_the_same_bits(tmp_path):
    whole = run(tmp_path / "whole")

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "part", progress=stop_at(2))
    assert bits(run(tmp_path / "part", resume=True)) == bits(whole)


@pytest.mark.parametrize("method", ["fedentopt+fedprox", "fedcbs", "scaffold", "moon", "feddecorr", "fedgf"])
def test_methods_that_read_no_class_train(method):
    training = {"participation": 0.5}
    assert np.isfinite(run(method=method, rounds=2, training=training).rounds[-1]["loss"])


def test_rules_divide_by_the_rarest_label_of_each_sample():
    found = run(partition={"rule": "quantity", "clients": 4, "labels_per_client": 2}, rounds=1)
    assert found.runs[0].samples.sum() == 100
    apart = run(partition={"rule": "iid", "clients": 5}, rounds=1, data={"name": CHESTS, "validation": 0.2})
    assert apart.rounds[-1]["validation"]["auroc"] > 0


@pytest.mark.parametrize("personal", ["finetune", "ditto", "partial"])
def test_models_at_the_clients_are_compared_by_the_same_figures(personal):
    found = run(
        data={"name": CHESTS, "client_test": 0.4, "held_out": 0.1},
        method={"personal": personal},
        evaluation={"baselines": ["alone", "pooled"]},
        rounds=3,
    )
    rows = found.sites()
    assert {row["row"] for row in rows} == {"alone", "common", "personal", "pooled"}
    table, clients = CHESTS.labels, range(4)
    for client in clients:
        of_client = [row for row in rows if row["client"] == client]
        assert len({row["samples"] for row in of_client}) == 1
        assert all(np.isfinite(row["loss"]) for row in of_client)
        has_some = table[CHESTS.clients == client].any()
        assert all(np.isfinite(row["auroc"]) == has_some for row in of_client)


@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True, True, False])])
def test_a_label_counts_for_its_weight_as_in_bce_with_logits_and_the_slope_is_the_gradient(mask):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=generator, dtype=torch.float64).requires_grad_()
    table, weights = (
        torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 1], [1, 0, 1]]),
        torch.tensor([0.5, 3.0, 9.0]),
    )
    targets, real = torch.from_numpy(as_bits(table.numpy())), slice(None) if mask is None else mask
    loss = INDEX["cross_entropy"]().of_findings()
    expected = torch.nn.BCEWithLogitsLoss(pos_weight=weights.double())(logits[real], table[real].double())
    (gradient,) = torch.autograd.grad(expected, logits)
    batch = Batch(logits.detach(), logits.detach(), targets, mask, weights.double())
    assert loss.value(batch, Context(torch.zeros(3))).item() == pytest.approx(expected.item())
    number, slope = loss.slope(batch, Context(torch.zeros(3)))
    assert number.item() == pytest.approx(expected.item())
    torch.testing.assert_close(slope, gradient)


def test_balanced_is_the_samples_without_a_label_by_those_with_it():
    having = CHESTS.labels.sum(axis=0)
    balanced = run(training={"class_weights": "balanced"})
    assert bits(balanced) == bits(run(training={"class_weights": ((100 - having) / having).tolist()}))
    assert bits(balanced)[1] != bits(run())[1]
    for ours, theirs in zip(
        balanced.model.parameters(),
        run(training={"class_weights": "balanced"}, engine={"backend": "cohort"}).model.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_balanced_sampler_draws_samples_by_their_rarest_label_and_those_without_any_as_often():
    table = np.repeat(np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0]]), (400, 80, 20), axis=0)  # the third label has none
    samples = ClientSamples(torch.zeros(500, 1), torch.from_numpy(as_bits(table)), np.arange(500), np.zeros(3))
    work = LocalWork(None, None, None, LocalTraining(sampler="balanced"), seed=0)  # no other part is read
    (rows,) = work.epoch_orders(1, 0, samples._replace(several=True), np.arange(500), 1)
    shares = [(table[rows] == kind).all(axis=1).mean() for kind in table[[0, 400, 480]]]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.07)  # three deviations
    assert bits(run(training={"sampler": "balanced"}))[1] != bits(run())[1]


def test_noisy_counts_have_the_noise_of_a_sample_that_has_all_labels_and_sizes_are_exact():
    privatized = privatize(np.zeros((4000, 3)) + 1e6, 2.0, rng=np.random.default_rng(0), each=3) - 1e6
    assert np.abs(privatized).mean() == pytest.approx(3 / 2, rel=0.03)  # the mean of |Laplace| is its scale
    noisy = run(rounds=2, method="fedla", conditions={"count_epsilon": 0.5, "count_use": "all"})
    assert not np.allclose(weights_of(noisy), weights_of(run(rounds=2, method="fedla")))
    assert noisy.runs[0].samples.tolist() == list(SIZES)


@pytest.mark.parametrize("weighting", ["fedla", "fedavg", "uniform", {"name": "fedpals", "strength": 20.0}], ids=str)
def test_counts_of_labels_in_sums_give_the_weights_of_counts_that_are_told(weighting):
    method = {"preset": "fedavg", "weighting": weighting}
    split = {"partition": {"rule": "dirichlet_by_client", "beta": 0.5, "clients": 10}, "method": method, "rounds": 1}
    split |= {"target": {"mix": [0.2, 0.5, 0.3]}, "training": {"weight_limit": 0.5}}
    summed = run(engine={"updates": "masked", "label_counts": "summed"}, **split)
    assert weights_of(summed) == pytest.approx(weights_of(run(**split)), abs=1e-6)
    with pytest.raises(ConfigError, match="target.mix: a mix is estimated of classes that exclude each other"):
        run(target={"mix": "estimate"})


def test_intervals_are_quantiles_of_figures_of_samples_drawn_again():
    rng = np.random.default_rng(3)
    table = rng.random((60, 3)) < [0.5, 0.2, 0.1]
    logits, flags = np.round(rng.normal(size=(60, 3)) + 2 * table, 1), as_bits(table)
    found = FindingScores(logits, flags).intervals(np.random.default_rng(0))
    places = np.random.default_rng(0).integers(60, size=(60, 500))  # draws as they are made, a column each
    each = [finding_figures(logits[rows], flags[rows]) for rows in places.T]
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "pr_auc", "loss"):
        assert found[name] == pytest.approx(np.nanquantile([one[name] for one in each], [0.025, 0.975])), name
    result = run()
    for name, (low, high) in result.summary["intervals"].items():
        assert low <= result.summary["final"][name] <= high, name


REFUSED = [
    ({"method": "fedlc"}, CombinationError, "method.objective: fedlc is for samples of one class"),
    ({"method": "fedvls"}, CombinationError, "fedvls_calibration is for samples of one class"),
    ({"method": "fedetf"}, CombinationError, "take cross_entropy"),
    (
        {"method": {"objective": {"name": "cross_entropy", "extra_terms": ["fedntd"]}}},
        CombinationError,
        "fedntd is for",
    ),
    ({"method": "fedavg+ccvr"}, CombinationError, "method.finish: ccvr is for samples of one class"),
    ({"method": "seol_kim"}, CombinationError, "method.selection: seol_kim is for"),
    ({"method": "fedconcat"}, CombinationError, "method.pipeline: fedconcat"),
    (
        {
            "engine": {"updates": "masked", "label_counts": "summed"},
            "training": {"weight_limit": 0.5},
            "method": {"preset": "fedavg", "weighting": {"name": f"{__name__}:Shares"}},
        },
        CombinationError,
        "declares neither sums_labels nor sums_mixes, and counts of several labels don't add up to samples",
    ),
    ({"evaluation": {"clients": True}}, ConfigError, "evaluation.clients"),
    (
        {"data": {"name": CHESTS, "client_test": 0.3, "held_out": 0.2}, "method": {"personal": "prior"}},
        CombinationError,
        "method.personal: prior is for samples of one class",
    ),
    ({"partition": {"oracle": True}, "target": {"mix": "uniform"}}, ConfigError, "partition.oracle"),
]


@pytest.mark.parametrize(("sections", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_needs_one_class_is_refused_by_name(sections, error, words):
    with refused(error, words):
        run(**sections)


def test_a_label_mix_is_of_one_class(tmp_path):
    found = run(tmp_path, rounds=1, data={"name": CHESTS, "validation": 0.2})
    model = fedskew.load(found.folder)
    with pytest.raises(RunError, match="several labels, so that there is no label mix"):
        model.held_out()
    with pytest.raises((RunError, ArgumentError), match="several labels"):
        model.personal([1, 2, 3])
    with pytest.raises(RunError, match="so that there is no label mix"):
        Adaptation.read_labelled(tmp_path / "new.csv", model)


@pytest.mark.parametrize("kind", ["torchscript", pytest.param("onnx", marks=pytest.mark.slow)])
def test_an_exported_model_gives_each_label_a_probability(kind, tmp_path):
    found = run(tmp_path, rounds=1)
    model = fedskew.load(found.folder)
    said, notes = exported(model, tmp_path / "model.file", kind, CHESTS.test_inputs)
    np.testing.assert_allclose(said, model.predict(CHESTS.test_inputs), atol=1e-6)
    assert json.loads(notes["classes"]) == list(NAMES)
    assert notes["probabilities"] == "of each label by itself; a sample has those at 0.5 or more"
    summary = json.loads((found.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["final"]["accuracy"] == found.rounds[-1]["evaluation"]["accuracy"]


def test_what_is_minimised_is_said():
    method = {"objective": {"name": "cross_entropy", "terms": [{"name": "feddecorr", "weight": 0.1}]}}
    assert objective_in_words(method, several=True) == "cross_entropy (a sigmoid for each label) + 0.1 feddecorr"
