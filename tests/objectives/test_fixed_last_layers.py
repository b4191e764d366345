"""FedETF, FedGELA and FedNH: losses on a network whose last layer is fixed or the server's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedskew
from fedskew.engine import Assignment, LocalTraining, LocalWork, PartitionedData, Sent, SequentialBackend
from fedskew.errors import CombinationError, ComponentError, ConfigError
from fedskew.hooks import Hooks, LocalEnd, Returned, RoundEnd
from fedskew.local_steps import SGD
from fedskew.methods import expand
from fedskew.models import FlatModel, OnPrototypes, build, unit_rows, with_features
from fedskew.objectives import INDEX, Batch, Objective
from fedskew.parameters import component
from losses import balanced_cross_entropy, fedgela

# FedETF and FedGELA, two losses on a network whose last layer is a fixed simplex; and FedRoD's, which is FedETF's.

COUNTS = torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64)
TASK = {
    "data": {"name": "digits"},
    "partition": {"rule": "dirichlet_by_class", "clients": 4, "beta": 0.3, "min_size": 1},
    "model": {"name": "mlp3", "width": 8},
    "training": {"rounds": 1, "batch_size": 64, "lr": 0.1},
}


def test_a_missing_class_is_pushed_down_by_one_samples_share_or_not_at_all():
    for least, expected in ((1.0, 1 / 5), (0.0, 0.0)):
        logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        balanced_cross_entropy(logits, torch.tensor([0]), COUNTS, least).backward()
        assert logits.grad[0, 1].item() == pytest.approx(expected, abs=1e-12)


def test_fedgela_worked_out_by_hand():
    # Phi = 3 (3/4, 0, 1/4): the logits become ln 2, 0 and 0, whatever the missing class's was.
    logits = torch.tensor([[4 / 9 * math.log(2), 100.0, 0.0]], dtype=torch.float64, requires_grad=True)
    value = fedgela(logits, torch.tensor([0]), COUNTS)
    assert value.item() == pytest.approx(math.log(2), abs=1e-12)
    value.backward()
    # Phi (softmax - 1 of the target's class): 9/4 (1/2 - 1), 0, 3/4 (1/4).
    assert logits.grad[0].tolist() == pytest.approx([-9 / 8, 0, 3 / 16], abs=1e-12)


@pytest.mark.parametrize(("name", "scale"), [("fedetf", 1.0), ("fedgela", 5.0)])
def test_a_run_trains_all_but_its_simplex_which_is_its_seeds(name, scale):
    runs = [fedskew.simulate({**TASK, "method": name, "seeds": [seed]}) for seed in (0, 0, 1)]
    ends = [run.model.state_dict() for run in runs]
    heads = [end["head.weight"] for end in ends]
    assert torch.equal(heads[0], heads[1])
    assert not torch.allclose(heads[0], heads[2], atol=0.1)
    gram = heads[0] @ heads[0].T
    torch.testing.assert_close(gram.diagonal(), torch.ones(10))
    torch.testing.assert_close(gram[0, 1:], torch.full((9,), -1 / 9))
    assert (ends[0]["head.scale"].item() == scale) == (name == "fedgela")


@pytest.mark.parametrize("preset", ["fedetf+adapt", "ccvr+fedgela"])
def test_a_finish_is_refused_as_it_makes_another_last_layer(preset):
    with pytest.raises(CombinationError, match=r"it makes another last layer, and the objective's is fixed; take "):
        expand({"preset": preset})


def test_fedconcat_is_refused_as_its_last_layer_is_trained():
    with pytest.raises(CombinationError, match=r"it fixes the last layer, and here that is a trained one .*; take"):
        expand({"preset": "fedconcat+fedetf"})


class Plain(torch.nn.Sequential):
    """A network without a layer `head`."""

    def __init__(self, num_classes, in_shape):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(math.prod(in_shape), num_classes))


def test_a_network_of_ones_own_without_a_head_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"FedETF can't adapt .*Plain: .* give it a linear layer self.head") as error:
        fedskew.simulate({**TASK, "model": {"name": f"{__name__}:Plain"}, "method": "fedetf"})
    assert "\n" not in str(error.value)


CrossEntropy = INDEX["cross_entropy"]
FedNH = INDEX["fednh"]

MEANS, FEDNH_COUNTS = "fednh.means", "fednh.counts"  # as in replies


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reply(counts, *directions) -> dict[str, torch.Tensor]:
    return {MEANS: torch.tensor(directions), FEDNH_COUNTS: torch.tensor(counts)}


def next_prototypes(old, replies, smoothing: float = 0.9, rest=(5.0, 6.0), weight_limit: float | None = None):
    """The prototypes after a round, and the other parameters."""
    sent = torch.cat([torch.tensor(old).flatten(), torch.tensor(rest)])
    new = sent + 1.0
    nobody = np.zeros(len(replies))
    changes = torch.zeros(len(replies), len(sent))
    end = RoundEnd(sent, new, changes, nobody, nobody, replies, clients=9, weight_limit=weight_limit)
    made = FedNH(smoothing=smoothing).next_model(end)
    size = np.size(old)
    assert torch.equal(new, sent + 1.0)
    return made[:size].view(np.shape(old)), made[size:]


ANNA = reply([3.0, 0.0], [0.0, 1.0], [0.0, 0.0])
BERT = reply([1.0, 2.0], [1.0, 0.0], [0.6, 0.8])


def test_a_round_worked_out_by_hand():
    # Class 0: 3 (0, 1) + (1, 0), of length sqrt 10; a tenth of that and nine of (1, 0), of length 0.936442.
    # Class 1: Bert's direction alone; (0.06, 0.98), of length 0.981835.
    made, rest = next_prototypes([[1.0, 0.0], [0.0, 1.0]], [ANNA, BERT])
    np.testing.assert_allclose(made, [[0.994855, 0.101307], [0.061110, 0.998131]], atol=1e-6)
    assert rest.tolist() == [6, 7]  # what the server update made of them


def test_flukes_round_is_that_of_smoothing_01():
    """fluke a0bd26a: counts weigh unit means as here, and 0.1 is the share of the old prototypes."""
    made, _ = next_prototypes([[1.0, 0.0], [0.0, 1.0]], [ANNA, BERT], smoothing=0.1)
    old = np.eye(2)
    for label in range(2):
        total = sum(one[FEDNH_COUNTS][label].item() * one[MEANS][label].numpy() for one in (ANNA, BERT))
        mean = total / sum(one[FEDNH_COUNTS][label].item() for one in (ANNA, BERT))
        moved = 0.9 * mean / np.linalg.norm(mean) + 0.1 * old[label]
        np.testing.assert_allclose(made[label], moved / np.linalg.norm(moved), atol=1e-6)
    np.testing.assert_allclose(made[0], [0.410709, 0.911766], atol=1e-5)


def test_a_class_that_nobody_holds_keeps_its_prototype_at_length_1():
    made, _ = next_prototypes([[1.0, 0.0], [0.0, 0.5]], [ANNA])
    assert made[1].tolist() == [0, 1]


def test_no_client_says_by_its_number_of_samples_where_a_prototype_goes_beyond_the_weight_limit():
    # Nine sites of 100 samples each, and a tenth that tells 3 * 10**8: its share of class 0 is cut to the limit.
    honest = [reply([100.0, 100.0], [1.0, 0.0], [0.0, 1.0]) for _ in range(9)]
    liar = reply([3e8, 0.0], [0.0, 1.0], [0.0, 0.0])
    begin = [[1.0, 0.0], [0.0, 1.0]]
    free, _ = next_prototypes(begin, [*honest, liar], smoothing=0.0)
    np.testing.assert_allclose(free, [[0, 1], [0, 1]], atol=1e-5)
    cut, _ = next_prototypes(begin, [*honest, liar], smoothing=0.0, weight_limit=0.2)
    np.testing.assert_allclose(cut, [np.array([0.8, 0.2]) / math.sqrt(0.68), [0, 1]], atol=1e-6)


def test_the_weight_limit_holds_class_by_class_and_one_that_does_not_bind_changes_nothing():
    # Of class 0 Anna has 3 samples of 4, at most 0.6 of the weight: 0.6 (0, 1) + 0.4 (1, 0). Class 1 is Bert's alone.
    made, _ = next_prototypes([[1.0, 0.0], [0.0, 1.0]], [ANNA, BERT], smoothing=0.0, weight_limit=0.6)
    np.testing.assert_allclose(made, [np.array([0.4, 0.6]) / math.sqrt(0.52), [0.6, 0.8]], atol=1e-6)
    loose, free = (
        next_prototypes([[1.0, 0.0], [0.0, 1.0]], [ANNA, BERT], weight_limit=limit)[0] for limit in (0.75, None)
    )
    np.testing.assert_allclose(loose, free, atol=1e-7)


def test_in_a_run_training_weight_limit_holds_for_prototypes_too():
    bound = {**TASK["training"], "weight_limit": 0.3}  # of four equal weights it binds none
    free, cut = (
        fedskew.simulate({**TASK, "training": training, "method": "fednh"}).model.state_dict()
        for training in (TASK["training"], bound)
    )
    assert {name for name, value in free.items() if not torch.equal(value, cut[name])} == {"head.weight"}


def test_clients_that_took_no_step_change_nothing():
    made, rest = next_prototypes([[1.0, 0.0], [0.0, 1.0]], [{}, {}])
    assert made.tolist() == [[2, 1], [1, 2]]  # the server update's
    assert rest.tolist() == [6, 7]


def test_a_client_returns_unit_mean_directions_of_its_last_epoch_and_its_numbers_of_samples():
    def batch(features, targets, mask=None):
        return Batch(torch.tensor(features), torch.zeros(len(features), 3), torch.tensor(targets), mask)

    gathered = FedNH().gather({}, batch([[9.0, 9.0]], [0]), last_epoch=False)
    for one in (
        batch([[4.0, 0.0], [0.0, 7.0], [3.0, 4.0]], [1, 1, 2]),
        batch([[0.0, 1.0], [math.nan, 1.0]], [1, 1], torch.tensor([True, False])),
    ):
        gathered = FedNH().gather(gathered, one, last_epoch=True)
    zero = torch.zeros(0)
    end = LocalEnd(zero, zero, zero, 3, 0.1, 0.0, {}, {}, gathered, lambda at: at, lambda at: at.sum())
    kept, returned = FedNH().end_local(end)
    assert kept == {}
    assert returned[FEDNH_COUNTS].tolist() == [0, 3, 1]
    # Of class 1 the directions (1, 0), (0, 1) and (0, 1), whatever their lengths.
    expected = [[0, 0], [1 / math.sqrt(5), 2 / math.sqrt(5)], [0.6, 0.8]]
    np.testing.assert_allclose(returned[MEANS], expected, atol=1e-6)
    assert FedNH().end_local(end._replace(gathered={})) == ({}, {})


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda said: said[FEDNH_COUNTS].mul_(0.3), "are not whole, or above 6 together"),
        (lambda said: said[FEDNH_COUNTS].mul_(9), "are not whole, or above 6 together"),
        (lambda said: said[MEANS][0].fill_(1), "a class of which it says that it saw no sample"),
        (lambda said: said[MEANS][1].mul_(1.1), "a class's mean direction is longer than 1"),
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
    gathered = FedNH().gather({}, Batch(torch.tensor(features), torch.zeros(2, 2), torch.tensor([0, 0])), True)
    zero = torch.zeros(0)
    end = LocalEnd(zero, zero, zero, 1, 0.1, 0.0, {}, {}, gathered, lambda at: at, lambda at: at.sum())
    _, returned = FedNH().end_local(end)
    assert returned[FEDNH_COUNTS].tolist() == [2, 0]
    assert FedNH().refuse(returned, Returned(torch.zeros(1), 1, 2, 0.1, 0.0, {})) is None
    made, _ = next_prototypes([[0.6, 0.8], [0.0, 1.0]], [returned])
    np.testing.assert_allclose(made, [[0.6, 0.8], [0, 1]], atol=1e-6)


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
    model.differentiate(model.module(torch.randn(9, 4, generator=drawn())).square().sum())
    moved = {name for name, gradient in model.views(model.gradient).items() if gradient.any()}
    assert moved == set(model.names) - {"head.weight"}


def test_in_a_run_prototypes_move_a_little_to_the_classes_and_stay_unit_whatever_the_weight_decay():
    decayed = [{**TASK["training"], "weight_decay": 0.1, "rounds": rounds} for rounds in (0, 2)]
    runs = [fedskew.simulate({**TASK, "training": training, "method": "fednh"}) for training in decayed]
    before, after = (run.model.state_dict()["head.weight"] for run in runs)
    torch.testing.assert_close(after.norm(dim=1), torch.ones(10))
    moved = (before * after).sum(dim=1)  # every class is held by somebody
    assert ((moved > 0.9) & (moved < 0.9999)).all()


@pytest.mark.parametrize(
    ("most", "told"),
    [
        (2, 8),  # two batches of four of the 18 samples
        (5, 18),  # the epoch
        (6, 18),  # and not only the batch of the second that is begun
        (10, 18),
    ],
)
def test_the_numbers_of_samples_are_of_as_many_steps_as_an_epoch_has_or_of_all_if_they_are_fewer(most, told):
    rows, inputs = np.arange(18), torch.randn(18, 4, generator=drawn(3))
    counts = np.bincount(rows % 3).astype(float)[None]
    model = FlatModel(OnPrototypes(build("mlp3", 3, (4,), width=5), 1.0, drawn()))
    loss = FedNH()
    work = LocalWork(
        PartitionedData(inputs, torch.from_numpy(rows % 3), [rows], counts),
        Objective(loss),
        SGD(),
        LocalTraining(batch_size=4, lr=0.1),
        seed=1,
        hooks={"objective": loss},
    )
    task = Assignment(client=0, epochs=3, samples=18, steps=most)
    update, _ = SequentialBackend(model, work).train_client(1, task, Sent(model.read_state()))
    assert update.steps == most
    assert update.reply[FEDNH_COUNTS].sum() == told


@pytest.mark.parametrize("preset", ["fednh+adapt", "fedconcat+fednh"])
def test_what_makes_another_last_layer_is_refused(preset):
    with pytest.raises(CombinationError, match=r"last layer, and .*; take"):
        expand({"preset": preset})


def test_scaffold_and_fednh_both_weigh_uniformly_and_either_gives_way():
    assert expand({"preset": "fednh+scaffold"})["weighting"] == {"name": "uniform"}
    assert expand({"preset": "fednh+fedla"})["weighting"] == {"name": "fedla"}


@component
class Halved(CrossEntropy, Hooks):
    """A loss of a user's own that sets the whole model."""

    length: int = 0

    def next_model(self, end):
        return end.new[: self.length] if self.length else end.new / 2


def test_a_hook_of_ones_own_sets_the_next_model_and_another_shape_is_one_line():
    plain, halved = (fedskew.simulate({**TASK, "method": {"objective": loss}}) for loss in ("cross_entropy", Halved()))
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(halved.model.state_dict()[name], value / 2)
    with pytest.raises(ComponentError, match=r"^round 1: objective .*:Halved: next_model\(\) must return"):
        fedskew.simulate({**TASK, "method": {"objective": Halved(length=3)}})
