from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedskew
from fedskew.components import has
from fedskew.experiment import RunFolder
from fedskew.models import Outputs
from fedskew.objectives import INDEX, MOON, Batch, Context
from fedskew.objectives.functional import fedmr, moon
from losses import classifier_variance, feddecorr, uniformity


def by_formula(features, targets):
    """Methods 2.11, class by class, with the correlation matrices written out."""
    total, used = 0.0, 0
    for label in set(targets.tolist()):
        of_class = features[targets == label]
        if len(of_class) < 2:
            continue
        scaled = (of_class - of_class.mean(axis=0)) / np.sqrt(of_class.var(axis=0, ddof=1) + 1e-8)
        matrix = scaled.T @ scaled
        total += (matrix[~np.eye(len(matrix), dtype=bool)] ** 2).mean()
        used += len(of_class)
    return total / used if used else 0.0


@pytest.mark.parametrize("targets", [[0, 0, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0], [0, 1, 2, 0, 3, 0], [5, 9, 9, 5, 2, 2]])
@pytest.mark.parametrize("dim", [2, 5])
def test_the_formula(targets, dim):
    features = np.random.default_rng(4).normal(size=(6, dim)) * [10.0**at for at in range(dim)]
    value = fedmr(torch.tensor(features), torch.tensor(targets))
    assert value.item() == pytest.approx(by_formula(features, np.array(targets)), rel=1e-9)


def test_classes_of_one_sample_and_features_that_never_vary_add_nothing():
    features = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = fedmr(features, torch.tensor([0, 1, 2, 3]))
    value.backward()
    assert value == 0
    assert (features.grad == 0).all()
    same = torch.ones(4, 3, requires_grad=True)
    fedmr(same, torch.zeros(4, dtype=torch.int64)).backward()
    assert same.grad.isfinite().all()


def test_in_float32_it_keeps_its_digits_at_the_size_of_a_real_layer():
    features = np.random.default_rng(4).normal(size=(64, 84))
    targets = np.arange(64) % 3
    value = fedmr(torch.tensor(features, dtype=torch.float32), torch.tensor(targets))
    assert value.item() == pytest.approx(by_formula(features, targets), rel=1e-4)


def by_formula_of_feddecorr(features):
    """The authors' code (bytedance/FedDecorr 973e4af), with the correlation matrix written out."""
    scaled = (features - features.mean(axis=0)) / np.sqrt(1e-8 + features.var(axis=0, ddof=1))
    matrix = scaled.T @ scaled
    return (matrix[~np.eye(len(matrix), dtype=bool)] ** 2).mean() / len(features)


@pytest.mark.parametrize("rows", [2, 6, 40])
@pytest.mark.parametrize("dim", [2, 5])
def test_the_formula_of_feddecorr(rows, dim):
    features = np.random.default_rng(4).normal(size=(rows, dim)) * [10.0**at for at in range(dim)]
    assert feddecorr(torch.tensor(features)).item() == pytest.approx(by_formula_of_feddecorr(features), rel=1e-9)


def test_a_single_sample_and_features_that_never_vary_add_nothing():
    one = torch.ones(1, 3, requires_grad=True)
    value = feddecorr(one)
    value.backward()
    assert value == 0
    assert (one.grad == 0).all()
    same = torch.ones(4, 3, requires_grad=True)
    feddecorr(same).backward()
    assert same.grad.isfinite().all()


def test_in_float32_it_keeps_its_digits_at_the_size_of_a_real_layer_of_feddecorr():
    features = np.random.default_rng(4).normal(size=(64, 512))
    value = feddecorr(torch.tensor(features, dtype=torch.float32))
    assert value.item() == pytest.approx(by_formula_of_feddecorr(features), rel=1e-4)


RNG = np.random.default_rng(6)


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("rows", [2, 7, 40])
@pytest.mark.parametrize("classes", [2, 5])
def test_the_variance_term_is_the_authors(rows, classes):
    """sonhamin/FedUV dd2e3c5: gamma is the mean standard deviation, unbiased, of the columns of an identity matrix."""
    logits = RNG.normal(scale=2, size=(rows, classes))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    gamma = np.eye(classes).std(axis=0, ddof=1).mean()
    expected = np.maximum(gamma - shares.std(axis=0, ddof=1), 0).mean()
    assert classifier_variance(double(logits)).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rows", [2, 3, 8, 20])
def test_the_uniformity_term_is_the_authors(rows):
    """The median of squared distances that aren't 0 (PyTorch's: the lower middle one) is the bandwidth."""
    features = RNG.normal(size=(rows, 4)).round(1)
    features[-1] = features[0]  # a pair at distance 0
    distances = torch.pdist(double(features)).pow(2)
    apart = distances[distances != 0]
    expected = (-distances / (apart.median() if len(apart) else 1)).exp().mean()
    assert uniformity(double(features)).item() == pytest.approx(expected.item(), rel=1e-9)


def test_features_have_no_scale_and_no_origin():
    features = double(RNG.normal(size=(9, 5)))
    torch.testing.assert_close(uniformity(1000 * features + 7), uniformity(features))
    features.requires_grad_()
    uniformity(features).backward()
    # Along the features themselves, and along a shift of all of them, nothing changes.
    assert (features.grad * features.detach()).sum().abs() < 1e-12
    assert features.grad.sum(dim=0).abs().max() < 1e-12


@pytest.mark.parametrize("function", [classifier_variance, uniformity])
@pytest.mark.parametrize("rows", [torch.zeros(1, 3), torch.ones(5, 3), torch.tensor([[1e-20, 0, 0], [0, 0, 0]])])
def test_rows_that_are_alone_or_equal_or_nearly_have_finite_gradients(function, rows):
    rows = rows.clone().requires_grad_()
    value = function(rows)
    value.backward()
    assert value.isfinite()
    assert rows.grad.isfinite().all()
    assert rows.grad.abs().max() <= 1


def test_equal_features_count_as_distance_0_also_where_rounding_makes_it_something():
    features = torch.tensor(RNG.normal(size=(3, 300)), dtype=torch.float32).repeat(7, 1) + 100
    distances = torch.cdist(features.double(), features.double())[np.triu_indices(21, 1)].square()
    apart = distances[distances > 1e-6]
    expected = torch.where(distances > 1e-6, (-distances / apart.median()).exp(), 1).mean()
    assert uniformity(features).item() == pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.slow
def test_batches_whose_medians_lie_at_other_places_are_mapped_at_once():
    rows = double(RNG.normal(size=(5, 8, 3)))
    rows[1, 4:] = rows[1, :4]
    masks = torch.arange(8) < torch.tensor([8, 8, 5, 2, 1]).unsqueeze(1)
    together = torch.func.vmap(torch.func.grad_and_value(uniformity))(rows, masks)
    alone = [torch.func.grad_and_value(uniformity)(*one) for one in zip(rows, masks, strict=True)]
    torch.testing.assert_close(together[1], torch.stack([value for _, value in alone]))
    torch.testing.assert_close(together[0], torch.stack([gradient for gradient, _ in alone]))


MOON_RNG = np.random.default_rng(2)
Z, SENT, PREVIOUS = (torch.tensor(MOON_RNG.normal(size=(6, 4))) for _ in range(3))


@pytest.mark.parametrize("temperature", [0.5, 0.05])
def test_the_formula_of_moon(temperature):
    total = 0.0
    for z, sent, previous in zip(Z, SENT, PREVIOUS, strict=True):
        near = math.exp(F.cosine_similarity(z, sent, dim=0).item() / temperature)
        far = math.exp(F.cosine_similarity(z, previous, dim=0).item() / temperature)
        total -= math.log(near / (near + far))
    assert moon(Z, SENT, PREVIOUS, temperature).item() == pytest.approx(total / 6, abs=1e-9)


def test_a_zero_representation_has_cosine_0_and_a_finite_gradient():
    z = torch.zeros(2, 3, requires_grad=True)
    value = moon(z, torch.ones(2, 3), torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    value.backward()
    assert value.item() == pytest.approx(math.log(2), abs=1e-6)
    assert z.grad.abs().max() < 10


def test_a_small_temperature_does_not_overflow():
    assert moon(Z.float(), -Z.float(), Z.float(), temperature=1e-3).item() == pytest.approx(2000, rel=1e-5)


def batch(features: torch.Tensor) -> Batch:
    return Batch(features, torch.zeros(len(features), 3), torch.zeros(len(features), dtype=torch.int64))


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_without_a_previous_model_it_is_exactly_0_and_moves_nothing(bad):
    z = (Z + bad).requires_grad_()
    value = MOON().value(batch(z), Context(torch.ones(3), teacher=Outputs(SENT, SENT)))
    value.backward()
    assert value == 0
    assert (z.grad == 0).all()


# Terms that act on the features alone do nothing where no layer before the last is trained, and a run says so.

TASK: dict[str, Any] = {
    "data": "digits",
    "partition": {"rule": "iid", "clients": 6},
    "training": {"rounds": 1, "batch_size": 256, "lr": 0.1},
}
SMALL = {"name": "mlp3", "width": 4}


def test_terms_declare_it():
    assert {name for name, kind in INDEX.items() if has(kind, "shapes_features")} == {
        *("fedmr", "fpl", "feddecorr", "uniformity"),
    }


@pytest.mark.parametrize("term", ["feddecorr", "uniformity"])
def test_without_a_trained_layer_before_the_last_they_change_nothing_and_the_run_says_so(term: str, tmp_path: Path):
    weighted = {"preset": "fedavg", "objective": {"extra_terms": [{"name": term, "weight": 9.0}]}}
    plain, ours = (
        fedskew.simulate({**TASK, "model": "logistic", "method": one}, out=tmp_path) for one in ("fedavg", weighted)
    )
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, ours.model.state_dict()[name])
    (note,) = RunFolder.notes(ours.folder, 0)
    assert note == (
        f"{term} acts on the features before the last layer, and Logistic trains no layer before that: the term "
        "changes nothing. Take another model, or leave it out."
    )
    assert RunFolder.notes(plain.folder, 0) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method"),
    [
        (SMALL, "feddecorr"),
        ("logistic", "moon+feddecorr"),
        ("logistic", "fedetf+feddecorr"),
        (SMALL, "fedconcat+feduv"),
    ],
)
def test_where_such_a_layer_is_trained_nothing_is_said(model: Any, method: str, tmp_path: Path):
    task = {**TASK, "training": {**TASK["training"], "rounds": 2}}
    run = fedskew.simulate({**task, "model": model, "method": method}, out=tmp_path)
    assert not any("acts on the features" in note for note in RunFolder.notes(run.folder, 0))
