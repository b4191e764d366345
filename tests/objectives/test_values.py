"""Losses whose values are worked out by hand, what relates them to cross-entropy, and what they refuse."""

from __future__ import annotations

import math
from math import e, log, sqrt

import numpy as np
import pytest
import torch

import losses
from fedskew.errors import ArgumentError
from fedskew.models import Outputs
from fedskew.objectives import INDEX, Batch, Context
from fedskew.objectives import functional as fn

SIGNS = [[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]
OWN_ROWS = [[5.0, log(7)], [log(3), -2.0]]


def tensor(value):
    """Floats as float64, class ids as they are; by class id too."""
    if isinstance(value, dict):
        return {label: tensor(rows) for label, rows in value.items()}
    made = torch.tensor(value)
    return made.double() if made.is_floating_point() else made


@pytest.mark.parametrize(
    ("loss", "tensors", "parameters", "expected"),
    [
        # Row 1: probabilities 1/6, 2/6, 3/6, class 2. Row 2: 1/2, 1/4, 1/4, class 1.
        (fn.cross_entropy, (np.log([[1.0, 2, 3], [2, 1, 1]]).tolist(), [2, 1]), {}, (log(2) + log(4)) / 2),
        # Class 1 is missing and its logit ln 9 halves to ln 3: 1 / (1 + 3).
        (fn.fedrs, ([[0.0, log(9)]], [0], [5.0, 0.0]), {}, log(4)),
        # Margins 16^-1/4 = 1/2 and 1^-1/4 = 1, class 2 missing: logits 0.5 and 1 become equal.
        (fn.fedlc, ([[0.5, 1.0, 9.0]], [0], [16.0, 1.0, 0.0]), {}, log(2)),
        (fn.fedlc, ([[1e4, 0.0]], [0], [1.0, 1.0]), {"exclude_target": True}, -1e4),  # no lower bound
        # Shares 3 : 1 : 1, a missing class counting as one sample; 3 : 0 : 1 without it; 3 : 2 : 2.
        (losses.balanced_cross_entropy, ([[0.0, 0, 0]], [0], [3.0, 0, 1]), {"least": 1}, log(5 / 3)),
        (losses.balanced_cross_entropy, ([[0.0, 0, 0]], [0], [3.0, 0, 1]), {}, log(4 / 3)),
        (losses.balanced_cross_entropy, ([[0.0, 0, 0]], [0], [3.0, 0, 1]), {"least": 2}, log(7 / 3)),
        # Prior 3/4, 1/4, 0 with equal logits: the shifted softmax is the prior itself.
        (fn.fedvls_calibration, ([[0.0, 0, 0]], [1], [3.0, 1, 0]), {}, log(4)),
        # Prior 1/2, 1/2 of 2 classes, so h = f. Class 0: exponents 0 (own row) and ln 3; class 1: ln 7 and 0.
        # Official: 1/2 ln((1 + 3) / 2) + 1/2 ln((7 + 1) / 2). Printed, without the own rows: ln(3/2), ln(7/2).
        (fn.fedvls_suppression, (OWN_ROWS, [0, 1], [4.0, 4]), {}, 1.5 * log(2)),
        (fn.fedvls_suppression, (OWN_ROWS, [0, 1], [4.0, 4]), {"form": "printed"}, (log(1.5) + log(3.5)) / 2),
        # Cosines 1 and 0, temperature 1/2: -log(e^2 / (e^2 + 1)).
        (fn.moon, ([[2.0, 0]], [[7.0, 0]], [[0.0, 3]]), {}, log(1 + e**-2)),
        # Centred (-1, -2) and (1, 2), variances 2 and 8: scaled rows are +-(1, 1) / sqrt 2, so M is 1 everywhere.
        (fn.fedmr, ([[0.0, 0], [2, 4]], [3, 3]), {}, 0.5),
        (fn.fedmr, ([[0.0], [2], [5]], [0, 0, 0]), {}, 0),  # one feature has nothing to be correlated with
        # Columns (0, 1, 2) and (0, 0, 3): variances 1 and 3, product 3; the entry's square is 3, by three rows 1.
        (losses.feddecorr, ([[0.0, 0], [1, 0], [2, 3]],), {}, 1),
        (losses.feddecorr, (SIGNS,), {}, 0),
        (losses.feddecorr, ([[row[0]] * 2 for row in SIGNS],), {}, 9 / 4),  # correlation 1: rows less one, 3; 9 / 4
        # Two classes, shares (3/4, 1/4) and (1/4, 3/4): deviations sqrt(2 (1/4)^2) = sqrt 2 / 4, wanted 1 / sqrt 2.
        (losses.classifier_variance, ([[log(3), 0], [0.0, log(3)]],), {}, sqrt(2) / 4),
        (losses.classifier_variance, (np.eye(4) * 100,), {}, 0),
        (losses.classifier_variance, ([[1.0] * 4] * 6,), {}, 1 / 2),
        # Points 0, 1 and 3 of a line: squared distances 1, 4 and 9, of which 4 is the median.
        (losses.uniformity, ([[0.0], [1], [3]],), {}, (e ** (-1 / 4) + e**-1 + e ** (-9 / 4)) / 3),
        # Four points, six distances: 1, 1, 4 | 4, 9, 16: the lower middle one is 4.
        (losses.uniformity, ([[0.0], [1], [2], [4]],), {}, (2 * e**-0.25 + 2 / e + e**-2.25 + e**-4) / 6),
        # Cosine 1 with its own prototype and 0 with the other, T = 1; the squared distance is 1 over 2 dimensions.
        (fn.fpl, ([[2.0, 0]], [0], {0: [[1.0, 0]], 1: [[0.0, 1]]}), {"temperature": 1.0}, log(1 + 1 / e) + 0.5),
    ],
)
def test_worked_out_by_hand(loss, tensors, parameters, expected):
    assert loss(*map(tensor, tensors), **parameters).item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    "loss",
    [
        *(lambda f, y, n, tau=tau: fn.fedlc(f, y, n, tau=tau) for tau in (0, 1, 4)),
        *(lambda f, y, n, least=least: losses.balanced_cross_entropy(f, y, n, least) for least in (0, 1)),
        *(lambda f, y, n, graded=graded: fn.fedrs(f, y, n, graded=graded) for graded in (False, True)),
        losses.fedgela,
        fn.fedvls_calibration,
        lambda f, y, n: losses.value_of("fednh", f, y, n),
    ],
)
def test_with_even_counts_it_is_cross_entropy(loss):
    logits, targets = torch.tensor(np.random.default_rng(5).normal(size=(6, 3))), torch.tensor([0, 2, 2, 1, 0, 2])
    even = torch.full((3,), 7.0, dtype=torch.float64)
    torch.testing.assert_close(loss(logits, targets, even), fn.cross_entropy(logits, targets))


def test_the_calibrated_losses_are_one_where_their_margins_are():
    logits, targets = torch.tensor(np.random.default_rng(5).normal(size=(6, 3))), torch.tensor([0, 2, 2, 0, 0, 2])
    counts = torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64)
    # ln n_c and ln(n_c / n) differ by a constant, which a softmax doesn't see.
    balanced = losses.balanced_cross_entropy(logits, targets, counts, least=0)
    torch.testing.assert_close(balanced, fn.fedvls_calibration(logits, targets, counts, prior_eps=0))
    held = counts + torch.tensor([0.0, 9.0, 0.0])
    torch.testing.assert_close(fn.fedlc(logits, targets, held, tau=0), fn.cross_entropy(logits, targets))


def test_cross_entropy_is_pytorch_s_to_the_bit():
    logits, targets = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10
    assert torch.equal(fn.cross_entropy(logits, targets), torch.nn.functional.cross_entropy(logits, targets))


LOGITS, TARGETS = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)


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
            (
                lambda counts=counts: fn.fedlc(LOGITS, TARGETS, counts),
                r"counts: expected one client's .* \(4,\) and dtype",
            )
            for counts in (torch.ones(3), torch.ones(4, dtype=torch.float64), torch.ones(2, 4), [1, 1, 1, 1])
        ),
        (lambda: fn.fedmr(LOGITS, TARGETS[:1]), "targets: expected one torch.int64 for each row of features"),
        (lambda: fn.fedvls_distillation(LOGITS, LOGITS[:1], torch.ones(4)), r"teacher_logits: expected .* \(2, 4\)"),
        (lambda: fn.moon(LOGITS, LOGITS, LOGITS[:1]), r"z_previous: expected torch.float32 \(2, 4\)"),
        *(
            (lambda among=among: fn.distillation(LOGITS, LOGITS, classes=among), r"classes: expected .* shape \(4,\)")
            for among in (torch.ones(5).bool(), torch.ones(2, 2, dtype=torch.int64), torch.ones(4), [0, 1])
        ),
        *(
            (lambda rows=rows: fn.fpl(LOGITS, TARGETS, {0: rows}), r"prototypes\[0\]: expected")
            for rows in (torch.ones(4), torch.ones(1, 3), torch.ones(1, 4).double(), [[1.0] * 4])
        ),
        (lambda: fn.fpl(LOGITS, TARGETS, {-1: torch.ones(1, 4)}), "prototypes: expected class ids"),
        (
            lambda: fn.fedvls_suppression(LOGITS, TARGETS, torch.ones(4), form="paper"),
            "form: input should be 'official'",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(call, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("names", "parameter", "wrong"),
    [
        (("fedkd", "fedekd", "fedntd", "fedlmd", "feddkd", "moon", "fpl"), "temperature", (0.0, -1.0, math.nan)),
        (("feddkd",), "target_weight", (-1.0, math.inf)),
        (("feddkd",), "rest_weight", (-1.0, math.inf)),
        (("fedlc",), "tau", (-1.0, math.nan, math.inf)),
        (("fedrs",), "alpha", (-0.1, 1.1, math.nan)),
        (("fedrod", "fedetf"), "least", (-1.0,)),
        (("fedetf", "fedgela", "fednh"), "scale", (0.0, -1.0)),
        (("fedvls_calibration", "suppression"), "prior_eps", (-1e-9, math.nan)),
        (("fednh",), "smoothing", (1.1, -0.1)),
    ],
)
def test_senseless_parameters_are_refused_by_name(names, parameter, wrong):
    for name in names:
        for value in wrong:
            with pytest.raises(ArgumentError, match=f"^{parameter}: input should be (greater|less|a finite number)"):
                INDEX[name](**{parameter: value})


@pytest.mark.parametrize("name", [name for name, kind in INDEX.items() if "teacher" in kind.reads])
def test_a_loss_that_reads_the_sent_model_says_where_it_is_missing(name):
    rows = Batch(LOGITS, LOGITS, TARGETS)
    with pytest.raises(ArgumentError, match=r"^context.teacher: "):
        INDEX[name]().value(rows, Context(torch.ones(4), previous=Outputs(LOGITS, LOGITS)))
