"""FPL's and FedNH's hooks: what clients gather and return, and what the server makes of it."""

import math
import sys

import numpy as np
import pytest
import torch

from common import local_end, round_end
from fedskew.engine import Assignment, LocalTraining, LocalWork, PartitionedData, Sent, SequentialBackend
from fedskew.errors import MissingPackageError
from fedskew.hooks import Returned
from fedskew.local_steps import SGD
from fedskew.models import FlatModel, OnPrototypes, build, unit_rows, with_features
from fedskew.objectives import FPL, INDEX, Batch, Context, Objective
from fedskew.objectives.functional import fpl

FedNH = INDEX["fednh"]
VALUES, CLASSES, MEANS, COUNTS = "fpl.prototypes", "fpl.classes", "fpl.means", "fpl.counts"  # as in checkpoints
NH_MEANS, NH_COUNTS = "fednh.means", "fednh.counts"  # and replies


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(features, targets, classes: int = 4, mask=None) -> Batch:
    features = torch.tensor(features)
    return Batch(features, torch.zeros(len(features), classes), torch.tensor(targets), mask)


def returned(loss, *batches: tuple[Batch, bool]) -> dict[str, torch.Tensor]:
    """What a client returns after these batches, each of the last epoch or not."""
    gathered = {}
    for one, last in batches:
        gathered = loss.gather(gathered, one, last)
    kept, reply = loss.end_local(local_end(torch.zeros(0), gathered=gathered))
    assert kept == {}
    return reply


def unit(*degrees: float):
    return [[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees]


def of_class(label: int, *features) -> dict[str, torch.Tensor]:
    return returned(FPL(), (batch(list(features), [label] * len(features)), True))


def prototypes_of(*replies):
    return FPL().end_round(FPL().init_server(torch.zeros(5), 9), round_end(replies, torch.zeros(5)))


BATCHES = [
    (batch([[100.0, 100.0]], [0]), False),
    (batch([[1.0, 0.0], [3.0, 2.0], [5.0, 5.0]], [1, 1, 3]), True),
    (batch([[math.nan, 9.0], [5.0, 7.0]], [2, 1], mask=torch.tensor([False, True])), True),
]


def test_a_client_returns_means_of_its_last_epoch_and_how_many_real_rows_they_are_of():
    reply = returned(FPL(), *BATCHES)
    assert reply[COUNTS].tolist() == [0, 3, 0, 1]
    assert reply[MEANS].tolist() == [[0, 0], [3, 3], [0, 0], [5, 5]]
    reply = returned(FedNH(), *BATCHES)  # means of directions, whatever their lengths, of length 1
    directions = unit_rows(torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 7.0]])).sum(dim=0, keepdim=True)
    assert reply[NH_COUNTS].tolist() == [0, 3, 0, 1]
    np.testing.assert_allclose(reply[NH_MEANS][[1, 3]], [*unit_rows(directions).tolist(), unit(45)[0]], atol=1e-6)
    assert returned(FPL()) == returned(FedNH()) == {}  # without a step


def test_the_server_makes_the_means_of_a_class_s_clusters_its_prototypes():
    # Class 2 at four clients: pairs near 0 and near 90 degrees. Class 0 at one client: its own mean.
    angles = (0, 10, 90, 105)
    made = prototypes_of(*(of_class(2, *unit(angle)) for angle in angles), of_class(0, [3.0, 4.0]))
    points = np.array(unit(*angles))
    assert made[CLASSES].tolist() == [0, 2, 2]
    np.testing.assert_allclose(made[VALUES], [[3, 4], points[:2].mean(axis=0), points[2:].mean(axis=0)], atol=1e-7)


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
    expected = [points[list(cluster)].mean(axis=0).tolist() for cluster in clusters]
    np.testing.assert_allclose(sorted(made[VALUES].tolist()), sorted(expected), rtol=1e-5, atol=1e-6)


def test_a_client_counts_once_however_many_samples_it_has_and_features_of_0_make_one_prototype():
    made = prototypes_of(of_class(1, *unit(0) * 50), of_class(1, *unit(20)))
    np.testing.assert_allclose(made[VALUES], np.mean(unit(0, 20), axis=0, keepdims=True), atol=1e-6)
    assert prototypes_of(*[of_class(2, [0.0, 0.0])] * 3)[VALUES].tolist() == [[0, 0]]


def test_every_round_has_the_prototypes_of_its_own_cohort():
    first = prototypes_of(of_class(1, [1.0, 0.0]))
    for replies, classes in (([of_class(2, [0.0, 1.0])], [2]), ([{}], [1])):
        assert FPL().end_round(first, round_end(replies))[CLASSES].tolist() == classes


def test_the_component_is_the_loss_of_the_prototypes_that_were_sent_and_padding_changes_nothing():
    made = FPL().broadcast(prototypes_of(of_class(1, [1.0, 0.0]), of_class(3, [0.0, 1.0])))
    one = batch(np.array([[0.3, 0.4], [1.0, -2.0], [2.0, 2.0]], dtype=np.float32), [1, 2, 3])
    expected = fpl(one.features, one.targets, {1: torch.eye(2)[:1], 3: torch.eye(2)[1:]}, temperature=0.3)
    padded = {
        VALUES: torch.cat([made[VALUES][:1], torch.full((2, 2), 5.0), made[VALUES][1:]]),
        CLASSES: torch.tensor([1, -1, -1, 3]),
    }
    for sent in (made, padded):
        found = FPL(temperature=0.3).value(one, Context(torch.ones(4), broadcast=sent))
        torch.testing.assert_close(found, expected)


def test_without_its_extra_a_run_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setitem(sys.modules, "finch", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'fedskew\[fpl\]'"):
        FPL().init_server(torch.zeros(5), 9)


# FedNH.

EVEN = [[1.0, 0.0], [0.0, 1.0]]


def reply(counts, *directions) -> dict[str, torch.Tensor]:
    return {NH_MEANS: torch.tensor(directions), NH_COUNTS: torch.tensor(counts)}


def next_prototypes(replies, old=EVEN, smoothing: float = 0.9, weight_limit: float | None = None) -> torch.Tensor:
    """The prototypes after a round; the other parameters stay what the server update made of them."""
    sent = torch.cat([torch.tensor(old).flatten(), torch.tensor([5.0, 6.0])])
    end = round_end(replies, sent, sent + 1, weight_limit=weight_limit)
    made = FedNH(smoothing=smoothing).next_model(end)
    assert torch.equal(end.new, sent + 1.0)
    assert made[-2:].tolist() == [6, 7]
    return made[:-2].view(np.shape(old))


ANNA = reply([3.0, 0.0], [0.0, 1.0], [0.0, 0.0])
BERT = reply([1.0, 2.0], [1.0, 0.0], [0.6, 0.8])
HONEST, LIAR = reply([100.0, 100.0], [1.0, 0.0], [0.0, 1.0]), reply([3e8, 0.0], [0.0, 1.0], [0.0, 0.0])
CUT = [[0.8 / math.sqrt(0.68), 0.2 / math.sqrt(0.68)], [0, 1]]


@pytest.mark.parametrize(
    ("replies", "options", "expected"),
    [
        # Class 0: 3 (0, 1) + (1, 0), of length sqrt 10; a tenth of that and nine of (1, 0), of length 0.936442.
        # Class 1: Bert's direction alone; (0.06, 0.98), of length 0.981835.
        ([ANNA, BERT], {}, [[0.994855, 0.101307], [0.061110, 0.998131]]),
        # fluke a0bd26a: counts weigh unit means as here, and 0.1 is the share of the old prototypes.
        ([ANNA, BERT], {"smoothing": 0.1}, [[0.410709, 0.911766], [0.549991, 0.835171]]),
        ([ANNA], {"old": [[1.0, 0.0], [0.0, 0.5]]}, [[0.993884, 0.110432], [0, 1]]),  # nobody holds the second
        # Nine sites of 100 samples each, and a tenth that tells 3 * 10**8: its share of class 0 is cut to the limit.
        ([*[HONEST] * 9, LIAR], {"smoothing": 0.0}, [[0, 1], [0, 1]]),
        ([*[HONEST] * 9, LIAR], {"smoothing": 0.0, "weight_limit": 0.2}, CUT),
        # Of class 0 Anna has 3 of 4 samples, at most 0.6 of the weight: 0.6 (0, 1) + 0.4 (1, 0). Class 1: Bert's alone.
        ([ANNA, BERT], {"smoothing": 0.0, "weight_limit": 0.6}, [[0.554700, 0.832050], [0.6, 0.8]]),
        ([ANNA, BERT], {"weight_limit": 0.75}, [[0.994855, 0.101307], [0.061110, 0.998131]]),  # which does not bind
        ([{}, {}], {}, [[2, 1], [1, 2]]),  # without a step: the server update's
    ],
)
def test_a_round_worked_out_by_hand(replies, options, expected):
    np.testing.assert_allclose(next_prototypes(replies, **options), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda said: said[NH_COUNTS].mul_(0.3), "are not whole, or above 6 together"),
        (lambda said: said[NH_COUNTS].mul_(9), "are not whole, or above 6 together"),
        (lambda said: said[NH_MEANS][0].fill_(1), "a class of which it says that it saw no sample"),
        (lambda said: said[NH_MEANS][1].mul_(1.1), "a class's mean direction is longer than 1"),
    ],
)
def test_what_can_t_be_is_refused(lie, reason):
    said = reply([0.0, 4.0], [0.0, 0.0], [0.6, 0.8])
    seen = Returned(torch.zeros(1), 1, 6, 0.1, 0.0, {})
    assert FedNH().refuse(said, seen) is None
    assert FedNH().refuse({}, seen) is None
    lie(said)
    assert reason in FedNH().refuse(said, seen)


@pytest.mark.parametrize(
    "features",
    [
        [[0.0, 0.0], [0.0, 0.0]],  # of a layer that is dead
        [[1.0, 0.0], [-1.0, 0.0]],  # directions that cancel out
        [[1e-30, 0.0], [0.0, 1e-30]],
    ],
)
def test_a_class_without_a_mean_direction_is_accepted_and_keeps_its_prototype(features):
    said = returned(FedNH(), (batch(features, [0, 0], classes=2), True))
    assert said[NH_COUNTS].tolist() == [2, 0]
    assert FedNH().refuse(said, Returned(torch.zeros(1), 1, 2, 0.1, 0.0, {})) is None
    old = [[0.6, 0.8], [0.0, 1.0]]
    np.testing.assert_allclose(next_prototypes([said], old), old, atol=1e-6)


@pytest.mark.parametrize(("name", "shape"), [("logistic", (4,)), ("mlp3", (1, 8, 8)), ("lenet5", (1, 28, 28))])
@pytest.mark.parametrize("classes", [3, 7])
def test_logits_are_scaled_cosines_of_any_networks_features_with_orthonormal_rows(name, shape, classes):
    network = build(name, classes, shape, generator=drawn(1))
    x = torch.randn(6, *shape, generator=drawn(2))
    features, _ = with_features(network)(x)
    adapted = FedNH(scale=2.0).adapt(network, drawn())
    seen = with_features(adapted)(x)
    torch.testing.assert_close(seen.features, features)
    prototypes = adapted.head.weight.detach()
    torch.testing.assert_close(prototypes.norm(dim=1), torch.ones(classes))
    if classes <= features.shape[1]:
        torch.testing.assert_close(prototypes @ prototypes.T, torch.eye(classes), atol=1e-6, rtol=0)
    torch.testing.assert_close(seen.logits, 2 * unit_rows(features) @ prototypes.T)


def test_prototypes_are_the_models_first_parameters_and_get_no_gradient():
    model = FlatModel(OnPrototypes(build("mlp3", 5, (4,), width=9), 1.0, drawn()))
    assert model.names[0] == "head.weight"
    model.differentiate(torch.randn(9, 4, generator=drawn()), lambda outputs: outputs.logits.square().sum())
    moved = {name for name, gradient in model.views(model.gradient).items() if gradient.any()}
    assert moved == set(model.names) - {"head.weight"}


# An epoch has 18 samples in five batches: two batches of four; the epoch; and not only the batch of the second epoch.
@pytest.mark.parametrize(("most", "told"), [(2, 8), (5, 18), (6, 18), (10, 18)])
def test_the_numbers_of_samples_are_of_as_many_steps_as_an_epoch_has_or_of_all_if_they_are_fewer(most, told):
    rows, inputs, loss = np.arange(18), torch.randn(18, 4, generator=drawn(3)), FedNH()
    data = PartitionedData(inputs, torch.from_numpy(rows % 3), [rows], np.bincount(rows % 3).astype(float)[None])
    model = FlatModel(OnPrototypes(build("mlp3", 3, (4,), width=5), 1.0, drawn()))
    training = LocalTraining(batch_size=4, lr=0.1)
    work = LocalWork(data, Objective(loss), SGD(), training, seed=1, hooks={"objective": loss})
    task = Assignment(client=0, epochs=3, samples=18, steps=most)
    update, _ = SequentialBackend(model, work).train_client(1, task, Sent(model.read_state()))
    assert update.steps == most
    assert update.reply[NH_COUNTS].sum() == told
