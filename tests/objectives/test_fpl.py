from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from fedskew.errors import MissingPackageError
from fedskew.hooks import LocalEnd, RoundEnd
from fedskew.objectives import FPL, Batch, Context
from fedskew.objectives.functional import fpl

VALUES, CLASSES = "fpl.prototypes", "fpl.classes"  # as in checkpoints and replies
MEANS, COUNTS = "fpl.means", "fpl.counts"

RNG = np.random.default_rng(9)
FEATURES = RNG.normal(size=(7, 3))
TARGETS = np.array([0, 1, 2, 3, 1, 0, 2])
PROTOTYPES = {2: RNG.normal(size=(1, 3)), 0: RNG.normal(size=(2, 3)), 1: RNG.normal(size=(4, 3))}


def cosine(a, b):
    return a @ b / math.sqrt((a @ a) * (b @ b))


def by_formula(temperature):
    """Methods 2.13, row by row. Class 3 has no prototype: its row adds nothing, but is counted."""
    total = 0.0
    for row, y in zip(FEATURES, TARGETS.tolist(), strict=True):
        if y not in PROTOTYPES:
            continue
        everyone = sum(math.exp(cosine(row, p) / temperature) for of_class in PROTOTYPES.values() for p in of_class)
        own = sum(math.exp(cosine(row, p) / temperature) for p in PROTOTYPES[y])
        total += -math.log(own / everyone) + ((row - PROTOTYPES[y].mean(axis=0)) ** 2).mean()
    return total / len(FEATURES)


def as_tensors(prototypes):
    return {label: torch.tensor(of_class) for label, of_class in prototypes.items()}


@pytest.mark.parametrize("temperature", [0.02, 0.5])
def test_the_formula(temperature):
    value = fpl(torch.tensor(FEATURES), torch.tensor(TARGETS), as_tensors(PROTOTYPES), temperature)
    assert value.item() == pytest.approx(by_formula(temperature), rel=1e-10)


@pytest.mark.parametrize("prototypes", [{}, {5: torch.ones(1, 3, dtype=torch.float64)}], ids=["none", "of others"])
def test_without_prototypes_of_its_classes_a_batch_is_worth_nothing_and_moves_nothing(prototypes):
    features = torch.tensor(FEATURES, requires_grad=True)
    value = fpl(features, torch.tensor(TARGETS), prototypes)
    value.backward()
    assert value == 0
    assert (features.grad == 0).all()


def test_a_zero_feature_has_a_finite_gradient():
    features = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    fpl(features, torch.tensor([0, 1]), as_tensors(PROTOTYPES)).backward()
    assert features.grad.isfinite().all()
    assert features.grad.abs().max() < 1e3


def test_padding_of_the_flat_form_changes_nothing():
    values = torch.tensor(np.concatenate([PROTOTYPES[0], np.full((2, 3), 5.0), PROTOTYPES[1], PROTOTYPES[2]]))
    classes = torch.tensor([0, 0, -1, -1, 1, 1, 1, 1, 2])
    batch = Batch(torch.tensor(FEATURES), torch.zeros(7, 4, dtype=torch.float64), torch.tensor(TARGETS))
    flat = FPL().value(batch, Context(torch.ones(4), broadcast={VALUES: values, CLASSES: classes}))
    torch.testing.assert_close(flat, fpl(torch.tensor(FEATURES), torch.tensor(TARGETS), as_tensors(PROTOTYPES)))


def batch(features, targets, classes: int = 4, mask=None) -> Batch:
    features, targets = torch.tensor(features), torch.tensor(targets)
    return Batch(features, torch.zeros(len(features), classes), targets, mask)


def reply_of(*batches: tuple[Batch, bool]):
    """What a client returns after these batches, each of the last epoch or not."""
    gathered = {}
    for one, last in batches:
        gathered = FPL().gather(gathered, one, last)
    zero = torch.zeros(0)
    end = LocalEnd(zero, zero, zero, len(batches), 0.1, 0.0, {}, {}, gathered, lambda at: at, lambda at: at.sum())
    kept, reply = FPL().end_local(end)
    assert kept == {}
    return reply


def prototypes_of(*replies):
    state = FPL().init_server(torch.zeros(5), 9)
    nobody = np.zeros(len(replies))
    end = RoundEnd(torch.zeros(5), torch.zeros(5), torch.zeros(len(replies), 5), nobody, nobody, replies, clients=9)
    return FPL().end_round(state, end)


def unit(*degrees: float):
    return [[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees]


def of_class(label: int, *features) -> dict[str, torch.Tensor]:
    return reply_of((batch(list(features), [label] * len(features)), True))


def test_a_client_returns_its_mean_features_of_the_last_epoch_and_how_many_they_are_of():
    reply = reply_of(
        (batch([[100.0, 100.0]], [0]), False),
        (batch([[1.0, 0.0], [3.0, 2.0], [5.0, 5.0]], [1, 1, 3]), True),
        (batch([[5.0, 7.0]], [1]), True),
    )
    assert reply[COUNTS].tolist() == [0, 3, 0, 1]
    assert reply[MEANS].tolist() == [[0, 0], [3, 3], [0, 0], [5, 5]]


def test_padded_rows_are_not_gathered():
    mask = torch.tensor([True, False])
    reply = reply_of((batch([[1.0, 2.0], [math.nan, 9.0]], [2, 2], mask=mask), True))
    assert reply[COUNTS].tolist() == [0, 0, 1, 0]
    assert reply[MEANS][2].tolist() == [1, 2]


def test_a_client_that_took_no_step_returns_nothing():
    assert reply_of() == {}


def test_the_server_makes_the_means_of_a_class_s_clusters_its_prototypes():
    # Class 2 at four clients: pairs near 0 and near 90 degrees. Class 0 at one client: its own mean.
    angles = (0, 10, 90, 105)
    made = prototypes_of(*(of_class(2, *unit(angle)) for angle in angles), of_class(0, [3.0, 4.0]))
    points = np.array(unit(*angles))
    assert made[CLASSES].tolist() == [0, 2, 2]
    np.testing.assert_allclose(made[VALUES][0], [3, 4])
    np.testing.assert_allclose(made[VALUES][1:], [points[:2].mean(axis=0), points[2:].mean(axis=0)], atol=1e-7)


@pytest.mark.parametrize(
    ("angles", "clusters"),
    [
        # Neighbours 0-1, 2-3. The two means are each other's neighbours: one cluster, which isn't a partition.
        ((0, 10, 90, 105), [{0, 1}, {2, 3}]),
        # Eight points in four pairs; their means at 5, 35, 125 and 155 degrees make two.
        ((0, 10, 30, 40, 120, 130, 150, 160), [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ((0, 30, 50, 60), [{0, 1, 2, 3}]),  # a chain: 0's neighbour is 1, 1's is 2, 2's is 3 and back
        ((20,), [{0}]),
        ((0, 170), [{0, 1}]),
        ((7, 7, 7), [{0, 1, 2}]),
    ],
)
@pytest.mark.parametrize("lengths", [(1.0,), (1.0, 5.0, 0.1, 30.0)])
def test_clusters_are_finchs_whatever_the_lengths(angles, clusters, lengths):
    points = np.array(unit(*angles)) * np.resize(lengths, (len(angles), 1))
    made = prototypes_of(*(of_class(2, point.tolist()) for point in points))
    expected = [points[list(cluster)].mean(axis=0) for cluster in clusters]
    np.testing.assert_allclose(sorted(made[VALUES].tolist()), sorted(np.array(expected).tolist()), rtol=1e-5, atol=1e-6)


def test_clients_whose_features_are_all_0_make_one_prototype():
    assert prototypes_of(*[of_class(2, [0.0, 0.0])] * 3)[VALUES].tolist() == [[0, 0]]


def test_a_client_counts_once_however_many_samples_it_has():
    made = prototypes_of(of_class(1, *unit(0) * 50), of_class(1, *unit(20)))
    np.testing.assert_allclose(made[VALUES], np.mean(unit(0, 20), axis=0, keepdims=True), atol=1e-6)


def test_every_round_has_the_prototypes_of_its_own_cohort():
    first = prototypes_of(of_class(1, [1.0, 0.0]))
    end = RoundEnd(*[torch.zeros(1)] * 3, np.zeros(1), np.zeros(1), [of_class(2, [0.0, 1.0])], clients=9)
    assert FPL().end_round(first, end)[CLASSES].tolist() == [2]
    nobody = end._replace(replies=[{}])
    assert FPL().end_round(first, nobody)[CLASSES].tolist() == [1]


def test_the_component_is_the_loss_of_the_prototypes_that_were_sent():
    made = prototypes_of(of_class(1, [1.0, 0.0]), of_class(3, [0.0, 1.0]))
    one = batch(np.array([[0.3, 0.4], [1.0, -2.0], [2.0, 2.0]], dtype=np.float32), [1, 2, 3])
    context = Context(torch.ones(4), broadcast=FPL().broadcast(made))
    prototypes = {1: torch.tensor([[1.0, 0.0]]), 3: torch.tensor([[0.0, 1.0]])}
    torch.testing.assert_close(
        FPL(temperature=0.3).value(one, context), fpl(one.features, one.targets, prototypes, temperature=0.3)
    )


def test_without_its_extra_a_run_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setitem(sys.modules, "finch", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'fedskew\[fpl\]'"):
        FPL().init_server(torch.zeros(5), 9)
