"""Federations in which one class is rare: weights of classes, the balanced sampler, thresholds, and what is said."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from sklearn.utils.class_weight import compute_class_weight

import fedskew
from common import built, refused, same
from fedskew.data import Dataset
from fedskew.errors import ConfigError
from fedskew.experiment import resolve
from fedskew.hooks import Batch
from fedskew.objectives import Context

SICK = 0.1
TASK = {
    "data": {"name": f"{__name__}:clinic"},
    "partition": {"rule": "dirichlet_by_class", "beta": 0.5, "clients": 6, "min_size": 5},
    "model": "logistic",
    "method": "fedavg",
    "training": {"rounds": 10, "participation": 0.5, "lr": 0.1, "batch_size": 16},
}


def clinic() -> Dataset:
    """300 patients and 400 to test, of whom one in ten is ill; four measurements tell a little of it."""
    rng = np.random.default_rng(0)
    targets = torch.from_numpy((rng.random(700) < SICK).astype(np.int64))
    inputs = torch.from_numpy(rng.normal(size=(700, 4)).astype(np.float32)) + 0.6 * targets.unsqueeze(1)
    parts = inputs[:300], targets[:300], inputs[300:], targets[300:]
    return Dataset("clinic", *parts, classes=("healthy", "ill"))


def run(**tables):
    merged = {key: value | tables.pop(key, {}) if isinstance(value, dict) else value for key, value in TASK.items()}
    out = tables.pop("out", None)
    return fedskew.simulate(merged | tables, out=out)


def test_a_run_has_figures_of_its_probabilities_and_is_ranked_by_balanced_accuracy():
    result, data = run(), clinic()
    last = result.rounds[-1]["evaluation"]
    with torch.inference_mode():
        probabilities = result.model.eval()(data.test_inputs).softmax(dim=1).numpy()
    truth = data.test_targets.numpy()
    assert last["auroc"] == pytest.approx(roc_auc_score(truth, probabilities[:, 1]), abs=1e-6)
    assert last["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(truth, probabilities.argmax(axis=1)))
    assert next(iter(result.headline())) == "balanced accuracy"
    assert {"AUROC", "PR-AUC", "macro F1", "calibration error", "accuracy"} < set(result.headline())
    intervals = result.summary["intervals"]
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "pr_auc", "loss"):
        low, high = intervals[name]
        assert low <= result.summary["final"][name] <= high, name
    assert run().summary["intervals"] == intervals


def test_weights_are_scikit_learns_of_all_clients_labels_and_change_only_the_loss():
    data = clinic()
    known = compute_class_weight("balanced", classes=np.arange(2), y=data.targets.numpy())
    balanced = run(training={"class_weights": "balanced"})
    assert same(balanced.model, run(training={"class_weights": known.tolist()}).model)
    assert not same(balanced.model, run().model)
    assert same(run(training={"class_weights": [1.0, 1.0]}).model, run().model)
    assert balanced.summary["final"]["balanced_accuracy"] > run().summary["final"]["balanced_accuracy"] + 0.1


@pytest.mark.parametrize("preset", ["fedavg", "fedrs", "fednh", "fedgela"])
def test_a_weighed_loss_is_the_mean_of_weighed_rows_and_its_slope_is_its_gradient(preset):
    generator = torch.Generator().manual_seed(0)
    targets, counts = torch.tensor([0, 2, 1, 2, 0]), torch.tensor([5.0, 0.0, 3.0])
    logits = torch.randn(5, 3, generator=generator, dtype=torch.float64).requires_grad_()
    weights, loss = torch.tensor([0.5, 2.0, 4.0], dtype=torch.float64), built(preset).objective.loss
    context = Context(counts.double())

    def value(part: slice, mask=None, weighed=None):
        return loss.value(Batch(logits[part], logits[part], targets[part], mask, weighed), context)

    rows = torch.stack([value(slice(at, at + 1)) for at in range(5)])
    whole = value(slice(5), None, weights)
    assert whole.item() == pytest.approx((rows * weights[targets]).mean().item())
    mask = torch.tensor([True, True, False, True, False])
    masked = value(slice(5), mask, weights)
    assert masked.item() == pytest.approx((rows * weights[targets])[mask].mean().item())
    if hasattr(loss, "slope"):
        for found, real in ((whole, None), (masked, mask)):
            (gradient,) = torch.autograd.grad(found, logits, retain_graph=True)
            number, slope = loss.slope(Batch(logits.detach(), logits.detach(), targets, real, weights), context)
            assert number.item() == pytest.approx(found.item())
            assert torch.allclose(slope, gradient)


@pytest.mark.parametrize("tables", [{"class_weights": "balanced"}, {"sampler": "balanced"}], ids=str)
@pytest.mark.parametrize("model", ["logistic", {"name": "mlp3", "width": 8}], ids=["logistic", "mlp3"])
def test_every_backend_trains_alike(tables, model):
    runs = [run(training=tables, model=model, engine={"backend": one}) for one in ("sequential", "cohort")]
    torch.testing.assert_close(*(one.model.state_dict() for one in runs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_processes_have_the_bits_of_one():
    tables = {"class_weights": [1.0, 5.0], "sampler": "balanced"}
    engine = {"backend": "processes", "processes": 2}
    assert same(run(training=tables).model, run(training=tables, engine=engine).model)


def test_a_balanced_sampler_draws_the_classes_of_each_client_equally_often():
    seen = []

    class Seeing(torch.nn.Linear):
        def forward(self, x):
            if self.training:
                seen.extend(x[:, 3].tolist())
            return super().forward(x)

    rng = np.random.default_rng(1)
    targets = (rng.random(200) < SICK).astype(np.int64)
    inputs = rng.normal(size=(200, 4)).astype(np.float32)
    inputs[:, 3] = targets
    data = Dataset("seen", *map(torch.from_numpy, (inputs, targets, inputs, targets)), classes=("no", "yes"))
    own = {"data": data, "model": lambda num_classes, in_shape: torch.nn.Sequential(Seeing(4, num_classes))}
    training = {"rounds": 20, "lr": 0.01, "batch_size": 16, "sampler": "balanced"}
    fedskew.simulate(method="fedavg", partition={"rule": "iid", "clients": 2}, training=training, **own)
    drawn = np.round(np.array(seen) * np.std(targets) + np.mean(targets)) if len(set(seen)) > 2 else np.array(seen)
    assert len(drawn) >= 20 * 200
    assert (drawn > np.median([drawn.min(), drawn.max()])).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"training": {"class_weights": [0.0, 0.0]}}, "training.class_weights: expected 2 weights"),
        ({"training": {"class_weights": [1.0, 2.0, 3.0]}}, "training.class_weights: expected 2 weights"),
        ({"training": {"class_weights": [-1.0, 1.0]}}, "training.class_weights"),
        ({"training": {"class_weights": "equal"}}, "training.class_weights"),
        ({"training": {"class_weights": "balanced", "sampler": "balanced"}}, "would count twice"),
        ({"training": {"class_weights": "balanced"}, "method": "fedvls"}, "makes up for the shares"),
        ({"training": {"sampler": "balanced"}, "method": "fedlc"}, "makes up for the shares"),
        ({"training": {"sampler": "balanced"}, "method": "seol_kim"}, "training.sampler: SeolKim says itself"),
        ({"evaluation": {"measure": "target_accuracy"}}, "evaluation.measure: there is no target"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(tables, says):
    with refused(ConfigError, match=says):
        run(**tables)


def test_a_threshold_is_chosen_on_validation_and_decides(tmp_path):
    result = run(data={"validation": 0.3}, out=tmp_path)
    model = fedskew.load(result.folder)
    threshold, said = model.info.threshold, result.summary["threshold"]
    assert threshold is not None
    assert 0 < threshold < 0.5
    assert said["class"] == "ill"
    assert said["probability"] == threshold
    data = clinic()
    decided = model.decide(model.predict(data.test_inputs, normalised=True))
    assert said["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(data.test_targets, decided))
    assert said["balanced_accuracy"] > result.summary["final"]["balanced_accuracy"]
    assert fedskew.load(result.folder, best=True).info.threshold is not None
    assert model.personal([10, 10]).info.threshold is None
    assert run(out=tmp_path / "without").summary.get("threshold") is None
    assert json.loads((result.folder / "summary.json").read_text())["threshold"] == said


def test_validation_chooses_by_the_measure():
    result = run(data={"validation": 0.3})
    found = [record["validation"]["balanced_accuracy"] for record in result.rounds]
    assert result.summary["best_by_validation"]["round"] == int(np.argmax(found))
    lowest = run(data={"validation": 0.3}, evaluation={"measure": "ece"})
    errors = [record["validation"]["ece"] for record in lowest.rounds]
    assert lowest.summary["best_by_validation"]["round"] == int(np.argmin(errors))


def test_a_config_is_the_same_run_whatever_ranks_it_where_nothing_is_chosen_by_it():
    plain, ranked = (resolve(TASK | {"evaluation": table}) for table in ({}, {"measure": "auroc"}))
    assert plain.hash == ranked.hash
    chosen = [
        resolve(TASK | {"data": TASK["data"] | {"validation": 0.2}, "evaluation": one})
        for one in ({}, {"measure": "auroc"})
    ]
    assert chosen[0].hash != chosen[1].hash


def test_the_page_and_the_tables_show_the_figures(tmp_path):
    result = run(data={"validation": 0.3}, out=tmp_path)
    page = (result.folder / "report.html").read_text()
    majority = 100 * float((clinic().test_targets == 0).float().mean())
    drawn = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    levels = [
        shape["y0"] for chart in drawn["charts"] for shape in chart["layout"].get("shapes", []) if shape.get("xref")
    ]
    assert pytest.approx(majority) in levels, "the dashed line of the most frequent class"
    low, high = result.summary["intervals"]["auroc"]
    assert f"({100 * low:.1f} to {100 * high:.1f})" in page
    for words in ("Reliability", "AUROC on the test set", "PR-AUC on the test set", "as validation samples chose"):
        assert words in page
    assert page.index("balanced accuracy</span>") < page.index(
        "accuracy</span>", page.index("balanced accuracy</span>") + 30
    )
