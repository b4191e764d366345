"""Losses by their formulas, by hand and at their edges, what relates them to one another, and what they refuse."""

import math
from dataclasses import replace
from math import e, log, sqrt
from typing import Any

import formulas
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedskew.components import covers
from fedskew.errors import ArgumentError
from fedskew.models import FlatModel, Outputs
from fedskew.objectives import INDEX, Batch, Context, Objective
from fedskew.objectives import functional as fn
from losses import OF_CLASSES, PROTOTYPES, VACANT, client, slope_of, value_of
from losses import value_by_name as loss

TEMPERATURES = [{"temperature": temperature} for temperature in (1.0, 3.0, 0.5)]
PARAMETERS: dict[str, list[dict[str, Any]]] = {name: [{}] for name in INDEX} | {
    "fedrs": [{"alpha": alpha, "graded": graded} for alpha in (0.0, 0.5, 0.9) for graded in (False, True)],
    "fedlc": [{"tau": tau, "exclude_target": exclude} for tau in (0.5, 1.0, 3.0) for exclude in (False, True)],
    "fedrod": [{"least": least} for least in (0.0, 1.0, 2.0)],
    "fedvls_calibration": [{"prior_eps": eps} for eps in (1e-9, 1e-3, 0.0)],
    "suppression": [{}, {"prior_eps": 1e-3}, {"prior_eps": 0.0}, {"form": "printed"}],
    **dict.fromkeys(("fedkd", "fedekd", "fedntd", "fedlmd"), TEMPERATURES),
    "feddkd": [one | {"target_weight": 2.0, "rest_weight": 8.0} for one in TEMPERATURES],
    "moon": [{"temperature": 0.5}, {"temperature": 0.05}],
    "fpl": [{"temperature": 0.02}, {"temperature": 0.5}],
}
FUNCTIONS = {
    "cross_entropy": lambda f, y, g, n, **p: fn.cross_entropy(f, y),
    "fedrs": lambda f, y, g, n, **p: fn.fedrs(f, y, n, **p),
    "fedlc": lambda f, y, g, n, **p: fn.fedlc(f, y, n, **p),
    "fedvls_calibration": lambda f, y, g, n, **p: fn.fedvls_calibration(f, y, n, **p),
    "vacant_distillation": lambda f, y, g, n, **p: fn.fedvls_distillation(f, g, n),
    "suppression": lambda f, y, g, n, **p: fn.fedvls_suppression(f, y, n, **p),
    "fedntd": lambda f, y, g, n, **p: fn.not_true_distillation(f, y, g, **p),
    "fedlmd": lambda f, y, g, n, **p: fn.label_masking_distillation(f, y, g, n, **p),
    "fedkd": lambda f, y, g, n, **p: fn.distillation(f, g, **p),
    "fedekd": lambda f, y, g, n, **p: fn.distillation(f, g, classes=n > 0, **p),
    "feddkd": lambda f, y, g, n, **p: fn.decoupled_distillation(f, y, g, **p),
    "moon": lambda f, y, g, n, **p: fn.moon(f, g, g.flip(1), **p),
    "fedmr": lambda f, y, g, n, **p: fn.fedmr(f, y),
    "fpl": lambda f, y, g, n, **p: fn.fpl(f, y, {c: tensor(PROTOTYPES[c == OF_CLASSES]) for c in (2, 4, 0, 1)}, **p),
}


def tensor(value) -> Tensor:
    """Floats as float64, class ids as they are; by class id too."""
    if isinstance(value, dict):
        return {label: tensor(rows) for label, rows in value.items()}
    return torch.from_numpy(np.array(value))


@pytest.mark.parametrize("counts", [*VACANT.values(), (1.0, 8.0, 1.0, 1.0, 1.0), (90.0, 1.0, 60.0, 0.0, 4.0)], ids=str)
@pytest.mark.parametrize("name", PARAMETERS)
def test_components_and_functions_are_the_formulas(name, counts):
    for rows in (2, 7, 40):
        of = client(counts, rows)
        of.inputs[-1] = of.inputs[0]  # features at distance 0
        if name in ("fedmr", "feddecorr", "fpl", "moon", "uniformity"):
            of.inputs.mul_(10.0 ** torch.arange(5))
        batch = (of.inputs, of.targets, of.teacher, of.counts)
        for parameters in PARAMETERS[name]:
            expected = getattr(formulas, name)(*(part.numpy() for part in batch), **parameters)
            found = [value_of(INDEX[name](**parameters), of)]
            found += [FUNCTIONS[name](*batch, **parameters)] if name in FUNCTIONS else []
            assert [one.item() for one in found] == pytest.approx([expected] * len(found), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("parameters", [{}, {"form": "printed", "prior_eps": 1e-3}], ids=str)
def test_an_objective_is_its_loss_plus_its_weighted_terms_and_so_is_fedvls(parameters):
    of = client(VACANT["two vacant classes"])._replace(mask=torch.arange(7) != 4)
    batch = (of.inputs, of.targets, of.teacher, of.counts)
    eps = {name: value for name, value in parameters.items() if name == "prior_eps"}
    parts = (INDEX["fedvls_calibration"](**eps), INDEX["vacant_distillation"](), INDEX["suppression"](**parameters))
    for distilled, suppressed in ((0.1, 0.005), (0.5, 1.0)):
        objective = Objective(parts[0], ((distilled, parts[1]), (suppressed, parts[2])))
        assert objective.reads == {"teacher"}
        values = [value_of(part, of) for part in parts]
        ours = fn.fedvls(
            of.inputs, of.targets, of.teacher, of.counts, distilled, suppressed, mask=of.mask, **parameters
        )
        expected = values[0] + distilled * values[1] + suppressed * values[2]
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(value_of(objective, of), expected)
    if not parameters:  # by default the paper's weights
        expected = values[0] + 0.1 * values[1] + 0.005 * values[2]
        torch.testing.assert_close(fn.fedvls(*batch, mask=of.mask), expected)


@pytest.mark.parametrize(("name", "width"), [("fedmr", 84), ("feddecorr", 512)])
def test_in_float32_it_keeps_its_digits_at_the_size_of_a_real_layer(name, width):
    features, targets = np.random.default_rng(4).normal(size=(64, width)), np.arange(64) % 3
    expected = getattr(formulas, name)(features, targets, None, None)
    assert loss(name, tensor(features).float(), tensor(targets)).item() == pytest.approx(expected, rel=1e-4)


SIGNS = [[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]
OWN_ROWS = [[5.0, log(7)], [log(3), -2.0]]


@pytest.mark.parametrize(
    ("name", "tensors", "parameters", "expected"),
    [
        # Row 1: probabilities 1/6, 2/6, 3/6, class 2. Row 2: 1/2, 1/4, 1/4, class 1.
        ("cross_entropy", (np.log([[1.0, 2, 3], [2, 1, 1]]), [2, 1]), {}, (log(2) + log(4)) / 2),
        # Class 1 is missing and its logit ln 9 halves to ln 3: 1 / (1 + 3).
        ("fedrs", ([[0.0, log(9)]], [0], [5.0, 0.0]), {}, log(4)),
        # Margins 16^-1/4 = 1/2 and 1^-1/4 = 1, class 2 missing: logits 0.5 and 1 become equal.
        ("fedlc", ([[0.5, 1.0, 9.0]], [0], [16.0, 1.0, 0.0]), {}, log(2)),
        ("fedlc", ([[0.5, 1.0, 2.0]], [0], [16.0, 1.0, 0.0]), {"floor": 1 / 16}, log(3)),  # the margins: 1/2, 1, 2
        ("fedlc", ([[1e4, 0.0]], [0], [1.0, 1.0]), {"exclude_target": True}, -1e4),  # no lower bound
        # Shares 3 : 1 : 1, a missing class counting as one sample; 3 : 0 : 1 without it; 3 : 2 : 2.
        ("fedrod", ([[0.0, 0, 0]], [0], [3.0, 0, 1]), {"least": 1}, log(5 / 3)),
        ("fedrod", ([[0.0, 0, 0]], [0], [3.0, 0, 1]), {}, log(4 / 3)),
        ("fedrod", ([[0.0, 0, 0]], [0], [3.0, 0, 1]), {"least": 2}, log(7 / 3)),
        # Phi = 3 (3/4, 0, 1/4): the logits become ln 2, 0 and 0, whatever the missing class's was.
        ("fedgela", ([[4 / 9 * log(2), 100, 0]], [0], [3.0, 0, 1]), {}, log(2)),
        # Prior 3/4, 1/4, 0 with equal logits: the shifted softmax is the prior itself.
        ("fedvls_calibration", ([[0.0, 0, 0]], [1], [3.0, 1, 0]), {}, log(4)),
        # Prior 1/2, 1/2 of 2 classes, so h = f. Class 0: exponents 0 (own row) and ln 3; class 1: ln 7 and 0.
        # Official: 1/2 ln((1 + 3) / 2) + 1/2 ln((7 + 1) / 2). Printed, without the own rows: ln(3/2), ln(7/2).
        ("suppression", (OWN_ROWS, [0, 1], [4.0, 4]), {}, 1.5 * log(2)),
        ("suppression", (OWN_ROWS, [0, 1], [4.0, 4]), {"form": "printed"}, (log(1.5) + log(3.5)) / 2),
        # The printed form skips class 0, to which every row belongs: 1/2 ln((e + e^2) / 2). Official: bounded below.
        ("suppression", ([[9.0, 1, 5], [7, 2, 6]], [0, 0], [4.0, 4, 0]), {"form": "printed"}, log((e + e**2) / 2) / 2),
        ("suppression", ([[-1e4, -1e4], [-1e4, -1e4]], [0, 1], [1.0, 1]), {}, -log(2)),
        ("suppression", ([[-1e4, -1e4], [-1e4, -1e4]], [0, 1], [1.0, 1]), {"form": "printed"}, -1e4 - log(2)),
        # Centred (-1, -2) and (1, 2), variances 2 and 8: scaled rows are +-(1, 1) / sqrt 2, so M is 1 everywhere.
        ("fedmr", ([[0.0, 0], [2, 4]], [3, 3]), {}, 0.5),
        ("fedmr", ([[0.0], [2], [5]], [0, 0, 0]), {}, 0),  # one feature has nothing to be correlated with
        # Columns (0, 1, 2) and (0, 0, 3): variances 1 and 3, product 3; the entry's square is 3, by three rows 1.
        ("feddecorr", ([[0.0, 0], [1, 0], [2, 3]],), {}, 1),
        ("feddecorr", (SIGNS,), {}, 0),
        ("feddecorr", ([[row[0]] * 2 for row in SIGNS],), {}, 9 / 4),  # correlation 1: rows less one, 3; 9 / 4
        # Two classes, shares (3/4, 1/4) and (1/4, 3/4): deviations sqrt(2 (1/4)^2) = sqrt 2 / 4, wanted 1 / sqrt 2.
        ("classifier_variance", ([[log(3), 0], [0.0, log(3)]],), {}, sqrt(2) / 4),
        ("classifier_variance", (np.eye(4) * 100,), {}, 0),
        ("classifier_variance", ([[1.0] * 4] * 6,), {}, 1 / 2),
        # Points 0, 1 and 3 of a line: squared distances 1, 4 and 9, of which 4 is the median.
        ("uniformity", ([[0.0], [1], [3]],), {}, (e ** (-1 / 4) + e**-1 + e ** (-9 / 4)) / 3),
        # Four points, six distances: 1, 1, 4 | 4, 9, 16: the lower middle one is 4.
        ("uniformity", ([[0.0], [1], [2], [4]],), {}, (2 * e**-0.25 + 2 / e + e**-2.25 + e**-4) / 6),
    ],
)
def test_worked_out_by_hand(name, tensors, parameters, expected):
    assert loss(name, *map(tensor, tensors), **parameters).item() == pytest.approx(expected, abs=1e-7)


def test_functions_worked_out_by_hand():
    # Cosines 1 and 0, temperature 1/2: -log(e^2 / (e^2 + 1)).
    near, far = tensor([[7.0, 0]]), tensor([[0.0, 3]])
    assert fn.moon(tensor([[2.0, 0]]), near, far).item() == pytest.approx(log(1 + e**-2))
    assert fn.moon(near, -near, near, temperature=1e-3).item() == pytest.approx(2000, rel=1e-5)  # and no overflow
    # Cosine 1 with its own prototype and 0 with the other, T = 1; the squared distance is 1 over 2 dimensions.
    prototypes = {0: tensor([[1.0, 0]]), 1: tensor([[0.0, 1]])}
    value = fn.fpl(tensor([[2.0, 0]]), tensor([0]), prototypes, temperature=1.0)
    assert value.item() == pytest.approx(log(1 + 1 / e) + 0.5)
    # Majority {0, 1}; true class 0 leaves the teacher class 2.
    left = fn.label_masking_distillation(torch.zeros(1, 3), tensor([0]), torch.ones(1, 3), torch.tensor([9.0, 9, 1]))
    assert left.item() == pytest.approx(log(2), abs=1e-6)


def test_gradients_worked_out_by_hand():
    def gradient(name, logits, counts, **parameters):
        (found,) = torch.autograd.grad(
            loss(name, logits.requires_grad_(), tensor([0]), tensor(counts), **parameters), logits
        )
        return found[0].tolist()

    # Phi (softmax - 1 of the target's class): 9/4 (1/2 - 1), 0, 3/4 (1/4).
    stretched = tensor([[4 / 9 * log(2), 100.0, 0.0]])
    assert gradient("fedgela", stretched, [3.0, 0, 1]) == pytest.approx([-9 / 8, 0, 3 / 16], abs=1e-12)
    # A missing class is pushed down by one sample's share, or not at all.
    for least, expected in ((1.0, 1 / 5), (0.0, 0.0)):
        assert gradient("fedrod", torch.zeros(1, 3).double(), [3.0, 0, 1], least=least)[1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("fedlc", {"tau": tau}) for tau in (0, 1, 4)),
        *(("fedrod", {"least": least}) for least in (0, 1)),
        *(("fedrs", {"graded": graded}) for graded in (False, True)),
        ("fedgela", {}),
        ("fedvls_calibration", {}),
        ("fednh", {}),
    ],
)
def test_with_even_counts_it_is_cross_entropy(name, parameters):
    logits, targets = torch.tensor(np.random.default_rng(5).normal(size=(6, 3))), torch.tensor([0, 2, 2, 1, 0, 2])
    even = loss(name, logits, targets, torch.full((3,), 7.0, dtype=torch.float64), **parameters)
    torch.testing.assert_close(even, fn.cross_entropy(logits, targets))


def test_cross_entropy_is_pytorch_s_to_the_bit_and_distillation_its_kl_div_times_the_squared_temperature():
    logits, targets = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10
    assert torch.equal(fn.cross_entropy(logits, targets), torch.nn.functional.cross_entropy(logits, targets))
    for t in (1.0, 3.0, 0.5):
        teacher = (logits.flip(0) / t).softmax(1)
        peer = t**2 * torch.nn.functional.kl_div((logits / t).log_softmax(1), teacher, reduction="batchmean")
        torch.testing.assert_close(fn.distillation(logits, logits.flip(0), t), peer)


def test_losses_are_one_another_where_their_margins_and_classes_are():
    of = client(VACANT["two vacant classes"])
    batch = (of.inputs, of.targets)
    # ln n_c and ln(n_c / n) differ by a constant, which a softmax doesn't see.
    torch.testing.assert_close(loss("fedrod", *batch, of.counts), fn.fedvls_calibration(*batch, of.counts, prior_eps=0))
    torch.testing.assert_close(fn.fedlc(*batch, of.counts + 1, tau=0), fn.cross_entropy(*batch))
    torch.testing.assert_close(fn.fedrs(*batch, of.counts, alpha=1.0), fn.cross_entropy(*batch))
    # At alpha 0 a missing class still counts.
    missing = torch.where(of.counts > 0, of.inputs, 0)
    torch.testing.assert_close(fn.fedrs(*batch, of.counts, alpha=0.0), fn.cross_entropy(missing, of.targets))
    # A class with exactly the mean count is no majority.
    ntd = fn.not_true_distillation(*batch, of.teacher)
    torch.testing.assert_close(fn.label_masking_distillation(*batch, of.teacher, torch.full_like(of.counts, 5)), ntd)
    # Classes are ids or a mask, and distil as if the others were sliced away.
    ids = torch.tensor([4, 0, 2])
    sliced = fn.distillation(of.inputs[:, ids], of.teacher[:, ids], 3.0)
    torch.testing.assert_close(fn.distillation(of.inputs, of.teacher, 3.0, classes=ids), sliced)


F = torch.randn(4, 3, generator=torch.Generator().manual_seed(8))
G, Y, ONES = F.flip(0), torch.arange(4) % 3, torch.ones(4, 1)
EMPTY = torch.tensor([], dtype=torch.int64)


@pytest.mark.parametrize(
    ("rows", "value"),
    [
        (1e3 * F, lambda f: fn.fedvls_distillation(f, -f.detach(), torch.tensor([3.0, 2, 1]))),
        (1e3 * F, lambda f: fn.fedvls_distillation(f, -f.detach(), torch.tensor([3.0, 0, 1]))),  # one vacant class
        (F, lambda f: fn.fedlc(f, torch.full((4,), 2), torch.tensor([0.0, 0, 3]), exclude_target=True)),
        (F, lambda f: fn.fpl(f, Y, {})),
        (F, lambda f: fn.fpl(f, Y, {5: torch.ones(1, 3)})),  # a prototype of another class
        (F, lambda f: fn.fedmr(f, torch.arange(4))),  # classes of one sample
        (F[:1], lambda f: loss("feddecorr", f)),
        *((F, lambda f, among=among: fn.distillation(f, G, classes=among)) for among in (EMPTY, Y[2:3], Y[:3] > 9)),
        (F[:1], lambda f: fn.label_masking_distillation(f, Y[2:3], G[:1], torch.tensor([9.0, 9, 1]))),
        # A single class has nothing to distil.
        (F[:, :1], lambda f: fn.not_true_distillation(f, 0 * Y, ONES)),
        (F[:, :1], lambda f: fn.decoupled_distillation(f, 0 * Y, ONES)),
        (F[:, :1], lambda f: fn.label_masking_distillation(f, 0 * Y, ONES, torch.ones(1))),
        # Nor is there a previous model.
        *((F + bad, lambda f: loss("moon", f, teacher=G)) for bad in (0.0, math.nan, math.inf)),
    ],
)
def test_where_there_is_nothing_to_compare_it_is_worth_nothing_and_moves_nothing(rows, value):
    rows = rows.clone().requires_grad_()
    found = value(rows)
    found.backward()
    assert found == 0
    assert (rows.grad == 0).all()


@pytest.mark.parametrize("form", ["official", "printed"])
def test_a_single_class_client_has_nothing_to_suppress(form):
    logits = F.clone().requires_grad_()
    value = fn.fedvls_suppression(logits, torch.full((4,), 1), torch.tensor([0.0, 4, 0]), form=form)
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-6)
    assert logits.grad.abs().max() < 1e-6


ODD_ROWS = [torch.zeros(1, 3), torch.zeros(2, 3), torch.ones(5, 3), torch.tensor([[1e-20, 0, 0], [0, 0, 0]])]


@pytest.mark.parametrize("rows", ODD_ROWS)
@pytest.mark.parametrize(
    ("value", "most"),
    [
        (lambda z: loss("classifier_variance", z), 1),
        (lambda z: loss("uniformity", z), 1),
        (lambda z: loss("feddecorr", z), math.inf),
        (lambda z: fn.fedmr(z, torch.zeros(len(z), dtype=torch.int64)), math.inf),
        (lambda z: fn.moon(z, torch.ones_like(z), torch.zeros_like(z)), 10),
        (lambda z: fn.fpl(z, torch.zeros(len(z), dtype=torch.int64), {0: torch.eye(2, 3), 1: F}), 1e3),
    ],
    ids=["classifier_variance", "uniformity", "feddecorr", "fedmr", "moon", "fpl"],
)
def test_rows_that_are_alone_or_equal_or_next_to_nothing_have_finite_gradients(value, most, rows):
    rows = rows.clone().requires_grad_()
    found = value(rows)
    found.backward()
    assert found.isfinite()
    assert rows.grad.isfinite().all()
    assert rows.grad.abs().max() <= most


def test_features_have_no_scale_and_no_origin_and_near_ones_are_equal():
    rng = np.random.default_rng(6)
    features = tensor(rng.normal(size=(9, 5)))
    torch.testing.assert_close(loss("uniformity", 1000 * features + 7), loss("uniformity", features))
    (gradient,) = torch.autograd.grad(loss("uniformity", features.requires_grad_()), features)
    # Along the features themselves, and along a shift of all of them, nothing changes.
    assert (gradient * features).sum().abs() < 1e-12
    assert gradient.sum(dim=0).abs().max() < 1e-12
    # Equal features count as distance 0 also where rounding makes it something.
    repeated = tensor(rng.normal(size=(3, 300))).float().repeat(7, 1) + 1000
    expected = formulas.uniformity(repeated.double().numpy(), None, None, None)
    assert loss("uniformity", repeated).item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_batches_whose_medians_lie_at_other_places_are_mapped_at_once():
    rows = tensor(np.random.default_rng(6).normal(size=(5, 8, 3)))
    rows[1, 4:] = rows[1, :4]
    masks = torch.arange(8) < torch.tensor([8, 8, 5, 2, 1]).unsqueeze(1)
    both = torch.func.grad_and_value(lambda rows, mask: loss("uniformity", rows, mask=mask))
    alone = [both(*one) for one in zip(rows, masks, strict=True)]
    for together, parts in zip(torch.func.vmap(both)(rows, masks), zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(parts))


def vacant_share(form: str, weight: float) -> float:
    """The share of its own data that softmax regression predicts as one of two vacant classes after 500 steps."""
    counts = torch.tensor([200.0, 100.0, 40.0, 10.0, 0.0, 0.0])
    targets = np.repeat(np.arange(6), counts.long())
    angle = 2 * np.pi * targets / 6
    noise = np.random.default_rng(0).normal(size=(len(targets), 2))
    points = 5 * np.stack([np.cos(angle), np.sin(angle)], axis=1) + noise
    inputs = torch.tensor(np.column_stack([points, np.ones(len(points))]), dtype=torch.float32)
    weights = torch.zeros(6, 3, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.01, momentum=0.9)
    for _ in range(500):
        logits, labels = inputs @ weights.T, torch.tensor(targets)
        suppressed = fn.fedvls_suppression(logits, labels, counts, form=form)
        optimizer.zero_grad()
        (fn.fedvls_calibration(logits, labels, counts) + weight * suppressed).backward()
        optimizer.step()
    return (inputs @ weights.T).argmax(dim=1).ge(4).float().mean().item()


@pytest.mark.slow
def test_at_weight_1_the_printed_form_makes_the_client_predict_classes_that_it_lacks():
    assert vacant_share("printed", 1.0) > 0.4
    assert vacant_share("official", 0.005) == 0


LOGITS, TARGETS, FOUR = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.ones(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fn.cross_entropy(LOGITS[0], TARGETS), "logits: expected a non-empty float tensor"),
        (lambda: fn.cross_entropy(LOGITS.long(), TARGETS), "logits: expected"),
        (lambda: fn.cross_entropy(LOGITS[:0], TARGETS[:0]), "logits: expected"),
        (lambda: fn.cross_entropy([[0.0, 1.0]], TARGETS[:1]), "logits: expected"),
        (lambda: fn.cross_entropy(LOGITS, TARGETS[:1]), r"targets: expected one torch.int64 for each row of logits"),
        (lambda: fn.cross_entropy(LOGITS, TARGETS.float()), "targets: expected"),
        (lambda: fn.cross_entropy(LOGITS, [0, 1]), "targets: expected"),
        (lambda: fn.cross_entropy(LOGITS, TARGETS, torch.ones(2)), r"mask: expected one torch.bool .* shape \(2,\)"),
        *(
            (lambda counts=counts: fn.fedlc(LOGITS, TARGETS, counts), r"counts: expected one client's .* \(4,\) and d")
            for counts in (torch.ones(3), FOUR.double(), torch.ones(2, 4), [1, 1, 1, 1])
        ),
        (lambda: fn.fedmr(LOGITS, TARGETS[:1]), "targets: expected one torch.int64 for each row of features"),
        (lambda: fn.fedvls_distillation(LOGITS, LOGITS[:1], FOUR), r"teacher_logits: expected .* \(2, 4\)"),
        (lambda: fn.moon(LOGITS, LOGITS, LOGITS[:1]), r"z_previous: expected torch.float32 \(2, 4\)"),
        *(
            (lambda among=among: fn.distillation(LOGITS, LOGITS, classes=among), r"classes: expected .* shape \(4,\)")
            for among in (torch.ones(5).bool(), torch.ones(2, 2, dtype=torch.int64), FOUR, [0, 1])
        ),
        *(
            (lambda rows=rows: fn.fpl(LOGITS, TARGETS, {0: rows}), r"prototypes\[0\]: expected")
            for rows in (FOUR, torch.ones(1, 3), FOUR[None].double(), [[1.0] * 4])
        ),
        (lambda: fn.fpl(LOGITS, TARGETS, {-1: FOUR[None]}), "prototypes: expected class ids"),
        (lambda: fn.fedvls_suppression(LOGITS, TARGETS, FOUR, form="paper"), "form: input should be 'official'"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(call, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        call()


@pytest.mark.parametrize("name", [name for name, kind in INDEX.items() if "teacher" in kind.reads])
def test_a_loss_that_reads_the_sent_model_says_where_it_is_missing(name):
    with pytest.raises(ArgumentError, match=r"^context.teacher: "):
        INDEX[name]().value(Batch(LOGITS, LOGITS, TARGETS), Context(FOUR, previous=Outputs(LOGITS, LOGITS)))


def test_the_gradient_that_cross_entropy_knows_has_the_bits_of_autograds():
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    batch, context = Batch(logits, logits, torch.arange(7) % 5), Context(torch.ones(5))
    value = INDEX["cross_entropy"]().value(batch, context)
    expected = value, *torch.autograd.grad(value, logits)
    with torch.no_grad():
        found = INDEX["cross_entropy"]().slope(batch, context)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("rows", [3, 10, 33])
def test_rows_that_are_equal_are_not_moved_by_what_rounding_leaves_of_their_variance(rows):
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(1)).expand(rows, -1)
    loss, batch = INDEX["classifier_variance"](), Batch(logits, logits, torch.zeros(rows, dtype=torch.int64))
    assert slope_of(loss, batch, Context(torch.ones(10)))[2].abs().max() < 1e-9


def test_a_prior_that_rounds_to_0_takes_missing_classes_out():
    of = client(VACANT["two vacant classes"], dtype=torch.float32)
    assert torch.equal(*(value_of(INDEX["fedvls_calibration"](prior_eps=eps), of) for eps in (0.0, 1e-50)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        *(kind() for kind in INDEX.values() if getattr(kind, "takes_stacks", False)),
        INDEX["fpl"](),
        *(INDEX["fedlc"](**own) for own in ({"exclude_target": True}, {"floor": 0.5})),
        INDEX["fedrs"](graded=True),
        INDEX["suppression"](form="printed"),
    ],
    ids=repr,
)
def test_a_loss_of_several_clients_at_once_is_that_of_each(loss, masked):
    drawn = torch.Generator().manual_seed(0)
    parts = torch.randn(6, 3, 7, 5, generator=drawn, dtype=torch.float64)
    outputs = Outputs(*(3 * part for part in parts[:2])), Outputs(*parts[2:4]), Outputs(*parts[4:])
    counts = torch.tensor([[7.0, 2, 0, 0, 5], [1, 1, 1, 1, 1], [0, 0, 0, 9, 0]], dtype=torch.float64)
    targets = torch.stack([torch.multinomial(own, 7, replacement=True, generator=drawn) for own in counts])
    mask = torch.rand(3, 7, generator=drawn) < torch.tensor([[0.5], [1.0], [0.0]]) if masked else None  # the last: none

    def value(own, number, counts):
        features, logits = (part[number].requires_grad_() for part in own[0])
        sent, previous = (Outputs(*(part[number] for part in other)) for other in own[1:])
        batch = Batch(features, logits, targets[number], None if mask is None else mask[number])
        prototypes = {"fpl.prototypes": tensor(PROTOTYPES), "fpl.classes": tensor(OF_CLASSES)}
        context = Context(counts, sent, previous, prototypes)
        total = loss.value(batch, context)
        gradients = torch.autograd.grad(total.sum(), (features, logits), materialize_grads=True)
        if covers(loss, "slope", "value"):
            torch.testing.assert_close(slope_of(loss, batch, context), (total, *gradients), rtol=1e-12, atol=1e-12)
        return total, gradients

    values, gradients = value(outputs, slice(None), counts.unsqueeze(1))
    for number in range(3):
        alone, expected = value(outputs, number, counts[number])
        torch.testing.assert_close(values[number], alone)
        torch.testing.assert_close(tuple(part[number] for part in gradients), expected)


def test_a_loss_of_ones_own_takes_autograds_gradient_unless_it_says_its_own():
    class Own(INDEX["cross_entropy"]):
        def value(self, batch, context):
            return 2 * super().value(batch, context)

    class Logged(Own):
        takes_stacks = True

        def value(self, batch, context, log):
            return super().value(batch, context)

    plain = Objective(INDEX["cross_entropy"](), ((1.0, INDEX["feddecorr"]()),))
    assert plain.is_sloped
    assert not Objective(Own()).is_sloped
    taken = [one.takes_stacks for one in (plain, Objective(Own()), Objective(Logged()))]  # a figure is one client's
    assert taken == [True, False, False]
    assert not replace(plain, terms=((1.0, Own()),)).is_sloped


class Squares:
    """A loss of one's own, of logits alone."""

    role, reads = "classification", frozenset[str]()

    def value(self, batch, context):
        return batch.logits.square().sum()

    def slope(self, batch, context):
        return self.value(batch, context), 2 * batch.logits


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)),
        (nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5)),
        (nn.Linear(8, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 5)),
        (nn.Linear(8, 10), nn.Tanh(), nn.AvgPool1d(2)),
    ],
    ids=["a chain", "no chain", "a frozen body", "no head: features are logits"],
)
@pytest.mark.parametrize("knows", [True, False])
def test_a_network_s_gradient_by_the_slopes_of_losses_is_autograds(layers, knows):
    model, x = FlatModel(nn.Sequential(*layers)), torch.randn(7, 8, generator=torch.Generator().manual_seed(1))
    seen = [Outputs(*(part.detach().flip(0) ** number for part in model.outputs(x))) for number in (2, 3)]
    context = Context(torch.ones(5), *(seen if knows else seen[:1]))
    terms = {"feddecorr": 0.1, "moon": 5.0, "fpl": 1.0, "fedmr": 0.3, "uniformity": 0.5, "classifier_variance": 2.5}
    objective = Objective(Squares(), tuple((weight, INDEX[name]()) for name, weight in terms.items()))

    def of(compute):
        return lambda outputs: compute(Batch(*outputs, torch.arange(7) % 3), context)

    value, _ = model.differentiate(x, of(objective.value))
    expected = model.gradient.clone()
    found, _ = model.differentiate(x, of(objective.value), of(objective.slope))
    torch.testing.assert_close((found, model.gradient), (value, expected), rtol=1e-4, atol=1e-5)
