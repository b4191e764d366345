"""The finishes by themselves: their layers are those that formulas and other estimators give."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import softmax
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from fedskew.errors import ArgumentError
from fedskew.finish import CCVR, Adapt, FedCOF, GaussianHead, Head, Known, Observed, RidgeHead
from fedskew.labels import EDGES, NEVER, adapt, calibrate, estimate_mix, outcome_cells, outcome_table

ALL = frozenset({"training", "held_out", "target"})


def known(target=None, sources=ALL) -> Known:
    return Known(frozenset(sources), None if target is None else np.asarray(target), False, np.random.default_rng(5))


def asking(component, holders):
    """Ask holders, by source, as the engine does: their answers added up."""

    def ask(source, **question):
        answers = [component.summand(question, component.statistics(question, one)) for one in holders[source]]
        return {name: sum(answer[name].double() for answer in answers) for name in answers[0]}

    return ask


# ---- CCVR


def gaussian_sums(sizes, means, covariance):
    """The sums of samples that have exactly these means, and this covariance in every class."""
    sizes, means = torch.tensor(sizes, dtype=torch.float64), torch.tensor(means, dtype=torch.float64)
    covariance = torch.tensor(covariance, dtype=torch.float64)
    outer = means[:, :, None] * means[:, None, :]
    products = (sizes - 1)[:, None, None] * covariance + sizes[:, None, None] * outer
    return {"sizes": sizes, "sums": sizes[:, None] * means, "products": products}


def new_head(classes, dim) -> Head:
    return Head(torch.zeros(classes, dim, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64))


@pytest.mark.parametrize(("mix", "logarithm"), [(None, 0.0), ([0.9, 0.1], np.log(0.1 / 0.9))])
def test_ccvr_of_two_gaussians_is_their_linear_discriminant(mix, logarithm):
    means, covariance = np.array([[1.0, 10.0], [2.0, 9.0]]), np.array([[1.0, 0.3], [0.3, 0.5]])
    sums = gaussian_sums([50.0, 400.0], means.tolist(), covariance.tolist())
    component = CCVR(samples=40_000, target=mix is not None, ridge=0.0)
    head = component.finish(new_head(2, 2), lambda source: sums, known(mix)).head
    slope = np.linalg.solve(covariance, means[1] - means[0])
    offset = logarithm - slope @ (means[0] + means[1]) / 2
    np.testing.assert_allclose((head.weight[1] - head.weight[0]).numpy(), slope, atol=0.06)
    boundary = (head.weight[1] - head.weight[0]).numpy() @ means.mean(axis=0) + float(head.bias[1] - head.bias[0])
    assert boundary == pytest.approx(offset + slope @ means.mean(axis=0), abs=0.04)


def test_ccvrs_sums_are_those_of_all_samples_whoever_holds_them():
    rng = np.random.default_rng(0)
    features, targets = rng.normal(3.0, 2.0, (60, 4)), rng.integers(0, 3, 60)
    parts = [slice(0, 5), slice(5, 31), slice(31, 60)]
    logits = torch.zeros(60, 3)
    holders = [Observed(torch.tensor(features)[at].float(), logits[at], torch.tensor(targets)[at]) for at in parts]
    found = asking(CCVR(), {"training": holders})("training")
    for label in range(3):
        own = features[targets == label]
        assert found["sizes"][label] == len(own)
        mean = (found["sums"][label] / len(own)).numpy()
        covariance = (found["products"][label].numpy() - len(own) * np.outer(mean, mean)) / (len(own) - 1)
        np.testing.assert_allclose(mean, own.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(covariance, np.cov(own.T), rtol=1e-4)


def test_ccvr_leaves_out_who_nobody_holds_and_takes_single_samples_and_dead_features():
    sums = gaussian_sums([1.0, 0.0, 7.0], [[1.0, 0.0], [0.0, 0.0], [3.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]])
    head = CCVR().finish(new_head(3, 2), lambda source: sums, known()).head
    assert all(part.isfinite().all() for part in head)
    assert head.bias[1] == NEVER
    logits = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64) @ head.weight.T + head.bias
    assert logits.argmax(1).tolist() == [0, 2]
    towards = CCVR(target=True).finish(new_head(3, 2), lambda source: sums, known([0.0, 0.5, 0.5])).head
    assert towards.bias[:2].tolist() == [NEVER, NEVER]
    with pytest.raises(ArgumentError, match="no client holds a class"):
        CCVR(target=True).finish(new_head(3, 2), lambda source: sums, known([0.0, 1.0, 0.0]))
    assert "there is none; set target.mix" in CCVR(target=True).lacks(known())
    unsure = CCVR(target=True).finish(new_head(3, 2), lambda source: sums, known())
    assert torch.equal(unsure.head.weight, head.weight)
    assert "is not used" in unsure.notes["mix"]


def test_ccvr_draws_from_the_generator_that_it_is_given():
    sums = gaussian_sums([50.0, 40.0], [[1.0, 0.0], [2.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    drawn = (Known(ALL, None, False, np.random.default_rng(seed)) for seed in (1, 1, 2))
    one, same, other = (CCVR().finish(new_head(2, 2), lambda source: sums, each).head.weight for each in drawn)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# ---- adapt

CLASSES, DIM = 4, 6


def biased_model(samples: int, mix, seed: int, scale: float = 3.0):
    """Features of classes in a mix, and the logits of a layer that is too sure and prefers the first class."""
    rng = np.random.default_rng(seed)
    targets = rng.choice(CLASSES, samples, p=mix)
    features = (rng.normal(size=(samples, DIM)) + 1.5 * np.eye(CLASSES, DIM)[targets]).astype("float32")
    return features, features @ LAYER[0].T * scale + LAYER[1], targets


LAYER = np.eye(CLASSES, DIM, dtype="float32"), np.array([2.0, 0.0, -1.0, 0.0], dtype="float32")
HEAD = Head(torch.tensor(3 * LAYER[0]).double(), torch.tensor(LAYER[1]).double())
MIX = [0.05, 0.15, 0.3, 0.5]


def held(data, parts: int, labelled: bool = True) -> list[Observed]:
    features, logits, targets = (np.array_split(part, parts) for part in data)
    return [
        Observed(torch.tensor(one), torch.tensor(two), torch.tensor(three) if labelled else None)
        for one, two, three in zip(features, logits, targets, strict=True)
    ]


@pytest.mark.parametrize("estimator", ["gls", "em-cells", "bbse"])
def test_adapt_by_sums_is_what_labels_does_with_all_samples_at_hand(estimator):
    ours, theirs = biased_model(1200, [0.25] * 4, 0), biased_model(500, MIX, 1)
    component = Adapt(estimator=estimator)
    ask = asking(component, {"held_out": held(ours, 7), "target": held(theirs, 1, labelled=False)})
    finished = component.finish(HEAD, ask, known())

    calibration = calibrate(ours[1], ours[2])
    own, new = calibration.apply(ours[1]), calibration.apply(theirs[1])
    bins = len(EDGES) + 1
    cells = [outcome_cells(shares) for shares in (own, new)]
    tables = outcome_table(ours[2], cells[0], CLASSES, bins)
    estimate = estimate_mix(tables, np.bincount(cells[1], minlength=CLASSES * bins), estimator)
    assert finished.notes["temperature"] == pytest.approx(calibration.temperature, rel=1e-5)
    np.testing.assert_allclose(finished.notes["mix"], estimate.mix, atol=2e-3)
    moved = torch.tensor(theirs[0]).double() @ finished.head.weight.T + finished.head.bias
    expected = adapt(new, [0.25] * 4, finished.notes["mix"])
    np.testing.assert_allclose(softmax(moved.numpy(), axis=1), expected, atol=1e-4)
    better = (moved.numpy().argmax(axis=1) == theirs[2]).mean() - (theirs[1].argmax(axis=1) == theirs[2]).mean()
    assert better > 0.1


def test_without_unlabelled_samples_adapt_takes_the_mix_that_the_server_knows():
    component = Adapt()
    ask = asking(component, {"held_out": held(biased_model(800, [0.25] * 4, 0), 3)})
    finished = component.finish(HEAD, ask, known(MIX, {"held_out"}))
    np.testing.assert_allclose(finished.notes["mix"], MIX)
    with pytest.raises(ArgumentError, match="neither unlabelled samples of it nor a mix"):
        component.finish(HEAD, ask, known(None, {"held_out"}))


def test_a_target_that_is_no_mix_leaves_the_model_as_it_was_unless_asked():
    ours = biased_model(1500, [0.25] * 4, 0)
    strange = biased_model(800, MIX, 1)
    strange = strange[0], strange[1] * 8 + np.array([0, 0, 9, 0], dtype="float32"), strange[2]  # sure, and of one class
    holders = {"held_out": held(ours, 2), "target": held(strange, 1, labelled=False)}
    kept = Adapt().finish(HEAD, asking(Adapt(), holders), known())
    assert kept.head is HEAD
    assert kept.notes["misfit"]
    assert "no mix of the held-out classes" in kept.notes["kept"]
    moved = Adapt(on_misfit="warn").finish(HEAD, asking(Adapt(), holders), known())
    assert not torch.equal(moved.head.bias, HEAD.bias)
    assert moved.notes["misfit"]


def test_a_class_that_nobody_held_out_is_never_predicted_and_one_class_is_too_few():
    features, logits, targets = biased_model(900, [0.4, 0.3, 0.3, 0.0], 0)
    holders = {"held_out": held((features, logits, targets), 3), "target": held(biased_model(300, MIX, 1), 1, False)}
    component = Adapt(on_misfit="warn")
    finished = component.finish(HEAD, asking(component, holders), known())
    assert finished.head.bias[3] == NEVER
    assert finished.notes["unseen"] == [3]
    assert finished.notes["biases"][3] is None
    one = targets == 0
    alone = {"held_out": held((features[one], logits[one], targets[one]), 2)}
    with pytest.raises(ArgumentError, match="at least two classes, not of 1"):
        component.finish(HEAD, asking(component, alone), known(MIX, {"held_out"}))


def test_a_calibration_of_classes_that_a_holder_is_said_not_to_have_leaves_its_samples_out():
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.5], [0.3, 0.1, 2.0]])
    question = {
        "slope": torch.tensor(1.0),
        "biases": torch.tensor([0.0, 0.0, NEVER]),
        "weights": torch.tensor([0.5, 0.5, 0.0]),
    }
    every = Adapt().statistics(question, Observed(logits, logits, torch.tensor([0, 1, 2])))
    two = Adapt().statistics(question, Observed(logits[:2], logits[:2], torch.tensor([0, 1])))
    for name, part in two.items():
        torch.testing.assert_close(every[name], part)


def test_an_honest_answer_is_never_refused():
    rng = np.random.default_rng(4)
    for length in (1e-3, 1.0, 1e3):
        features, logits = torch.tensor(rng.normal(size=(40, 5)) * length), torch.tensor(rng.normal(size=(40, 3)))
        observed = Observed(features.float(), (logits * length).float(), torch.tensor(rng.integers(0, 3, 40)))
        sizes = np.bincount(observed.targets, minlength=3).astype(float)
        assert CCVR().refuse({}, CCVR().statistics({}, observed), sizes) is None
        calibrated = {"slope": torch.tensor(1.0), "biases": torch.zeros(3)}
        for question in ({}, calibrated, calibrated | {"weights": torch.full((3,), 0.01)}):
            assert Adapt().refuse(question, Adapt().statistics(question, observed), sizes) is None


@pytest.mark.parametrize("tables", [-1.0, 0.5, 1e30])
def test_what_is_no_table_or_no_cells_is_refused(tables):
    for name in ("tables", "cells"):
        assert "no numbers of samples" in Adapt().refuse({}, {name: torch.full((3,), tables)}, None)


# ---- Gaussian and ridge heads


def several_holders(rng, features, targets, classes):
    parts = np.split(rng.permutation(len(targets)), [7, 60])
    logits = torch.zeros(len(targets), classes)
    return [Observed(torch.tensor(features[at]), logits[at], torch.tensor(targets[at])) for at in parts]


@pytest.fixture(scope="module")
def clouds():
    rng = np.random.default_rng(3)
    targets = np.repeat([0, 2, 3], [90, 50, 20])  # nobody holds class 1
    features = rng.normal(size=(160, 5)) @ rng.normal(size=(5, 5)) + rng.normal(5, 2, (4, 5))[targets]
    return features, targets, several_holders(rng, features, targets, 4)


@pytest.mark.parametrize("mix", [None, [0.2, 0.3, 0.5, 0.0]])
def test_the_gaussian_head_is_scikit_learns_linear_discriminant(clouds, mix):
    features, targets, holders = clouds
    component = GaussianHead(shrinkage=0.2, target=mix is not None)
    head = component.finish(new_head(4, 5), asking(component, {"training": holders}), known(mix)).head
    classes = [0, 2, 3] if mix is None else [0, 2]
    priors = np.array([90, 50, 20]) / 160 if mix is None else np.array([0.2, 0.5]) / 0.7
    spread = sum(np.cov(features[targets == c].T, bias=True) * (targets == c).mean() for c in (0, 2, 3))
    means = np.stack([features[targets == c].mean(axis=0) for c in classes])
    expected = stats.multivariate_normal
    shrunk = 0.8 * spread + 0.2 * np.trace(spread) / 5 * np.eye(5)
    logits = np.stack([expected.logpdf(features, m, shrunk) + np.log(p) for m, p in zip(means, priors, strict=True)], 1)
    got = softmax(features @ head.weight.numpy().T + head.bias.numpy(), axis=1)
    np.testing.assert_allclose(got[:, classes], softmax(logits, axis=1), atol=1e-9)
    assert not got[:, [c for c in range(4) if c not in classes]].any()
    if mix is None:
        peer = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.2).fit(features, targets)
        assert np.array_equal(peer.predict(features), got.argmax(axis=1))


@pytest.mark.parametrize("mix", [None, [0.2, 0.3, 0.5, 0.0]])
def test_the_ridge_head_is_scikit_learns_ridge_regression(clouds, mix):
    features, targets, holders = clouds
    component = RidgeHead(ridge=0.05, target=mix is not None)
    head = component.finish(new_head(4, 5), asking(component, {"training": holders}), known(mix)).head
    shares = np.array([0.9, 0, 0.5, 0.2]) / 1.6 if mix is None else np.array([0.2, 0, 0.5, 0]) / 0.7
    weights = (shares / np.maximum(np.bincount(targets, minlength=4), 1))[targets]
    centre = weights @ features
    alpha = 0.05 * (weights @ (features - centre) ** 2).mean()
    peer = Ridge(alpha=alpha).fit(features, np.eye(4)[targets], sample_weight=weights)
    kept = shares > 0
    np.testing.assert_allclose(head.weight.numpy()[kept], peer.coef_[kept], atol=1e-10)
    np.testing.assert_allclose(head.bias.numpy()[kept], peer.intercept_[kept], atol=1e-9)
    assert (head.bias.numpy()[~kept] == NEVER).all()


@pytest.mark.parametrize("component", [GaussianHead(), RidgeHead()])
def test_these_heads_do_not_depend_on_the_partition_or_the_scale(clouds, component):
    features, targets, holders = clouds
    alone = [Observed(torch.tensor(1000 * features), torch.zeros(160, 4), torch.tensor(targets))]
    heads = [
        component.finish(new_head(4, 5), asking(component, {"training": who}), known()).head for who in (holders, alone)
    ]
    torch.testing.assert_close(heads[0].weight, 1000 * heads[1].weight, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(heads[0].bias, heads[1].bias, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("component", [GaussianHead(), RidgeHead()])
def test_these_heads_take_a_single_sample_and_dead_features(component):
    one = [Observed(torch.tensor([[3.0, 0.0]]), torch.zeros(1, 2), torch.tensor([1]))]
    head = component.finish(new_head(2, 2), asking(component, {"training": one}), known()).head
    assert all(part.isfinite().all() for part in head)
    assert float((head.weight[1] @ torch.tensor([3.0, 0.0], dtype=torch.float64)) + head.bias[1]) > NEVER


def test_products_that_no_samples_have_are_refused(clouds):
    component, (_, _, holders) = GaussianHead(), clouds
    answer = component.statistics({}, holders[2])
    counts = np.bincount(holders[2].targets, minlength=4).astype(float)
    assert component.refuse({}, answer, counts) is None
    assert "no samples have" in component.refuse({}, answer | {"products": 0.5 * answer["products"]}, counts)
    assert "as many samples" in component.refuse({}, answer, counts[::-1].copy())
    assert "has no samples" in component.refuse({}, answer | {"sums": answer["sums"] + 1}, counts)


# ---- FedCOF


def spread_over(clients, seed=0, each=40, root=None):
    """Clients' samples of three classes, all of one covariance; the last class is held by the last client alone."""
    rng = np.random.default_rng(seed)
    centres = np.array([[3.0, 0.0, 1.0, 0.0], [0.0, 2.0, 0.0, 1.0], [1.0, 1.0, 4.0, 0.0]])
    root = np.diag([1.0, 0.5, 2.0, 1.0]) if root is None else root
    held = [rng.choice(3 if client == clients - 1 else 2, each) for client in range(clients)]
    return [(centres[targets] + rng.normal(size=(each, 4)) @ root, targets) for targets in held]


def observed(held):
    return [Observed(torch.tensor(own), torch.zeros(len(own), 3), torch.tensor(targets)) for own, targets in held]


@pytest.mark.parametrize("mix", [None, [0.2, 0.3, 0.5]])
@pytest.mark.parametrize("shrinkage", [0.0, 1.0])
def test_fedcofs_layer_is_that_of_its_formulas_client_by_client(shrinkage, mix):
    held = spread_over(5)
    asked = asking(FedCOF(), {"training": observed(held)})
    head = FedCOF(shrinkage, mix is not None).finish(new_head(3, 4), asked, known(mix)).head
    sizes = np.array([[np.sum(targets == label) for label in range(3)] for _, targets in held])
    total = sizes.sum(axis=0)
    shares = total / total.sum() if mix is None else np.array(mix)
    gram, means = np.zeros((4, 4)), []
    for label in range(3):
        own = [features[targets == label] for features, targets in held if (targets == label).any()]
        mean = np.concatenate(own).mean(axis=0)
        covariance = sum(len(one) * np.outer(one.mean(0) - mean, one.mean(0) - mean) for one in own)
        covariance = covariance / max(len(own) - 1, 1) + shrinkage * np.eye(4)
        gram += shares[label] * (total[label] - 1) / total[label] * covariance
        means.append(mean)
    centre = shares @ np.array(means)
    rows = np.linalg.solve(gram + np.outer(centre, centre), np.array(means).T).T
    np.testing.assert_allclose(head.weight.numpy(), rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-9)
    assert not head.bias.any()


def test_fedcofs_covariance_is_that_of_the_samples_on_average_and_0_where_one_client_holds_a_class():
    root = np.array([[1.0, 0.3, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 2.0, 0.4], [0.0, 0.0, 0.0, 1.0]])
    found = []
    for seed in range(200):
        sums = asking(FedCOF(), {"training": observed(spread_over(8, seed, 20, root))})("training")
        means = sums["sums"] / sums["sizes"][:, None]
        scatter = sums["products"] - sums["sizes"][:, None, None] * means[:, :, None] * means[:, None]
        assert scatter[2].abs().max() < 1e-9
        found.append((scatter[:2] / (sums["holders"][:2, None, None] - 1)).numpy())
    np.testing.assert_allclose(np.mean(found, axis=(0, 1)), root.T @ root, atol=0.25)


def test_fedcof_sends_means_alone_and_refuses_sums_of_no_samples():
    held = observed(spread_over(2))[0]
    answer = FedCOF().statistics({}, held)
    assert {name: tuple(part.shape) for name, part in answer.items()} == {"sizes": (3,), "sums": (3, 4)}
    assert FedCOF().refuse({}, answer, answer["sizes"].numpy()) is None
    assert "sums for classes" in FedCOF().refuse({}, {**answer, "sums": answer["sums"] + 1}, None)
    nobody = {
        name: part * torch.tensor([1.0, 0.0, 0.0]).reshape(-1, *[1] * (part.ndim - 1)) for name, part in answer.items()
    }
    head = FedCOF().finish(new_head(3, 4), lambda source: FedCOF().summand({}, nobody), known()).head
    assert head.bias.tolist() == [0.0, NEVER, NEVER]
    with pytest.raises(ArgumentError, match="fedcof needs 3 x 20000 x 20000 numbers"):
        FedCOF().summand({}, {"sizes": torch.ones(3), "sums": torch.zeros(3, 20_000)})
