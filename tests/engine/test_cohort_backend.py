"""A cohort at once, held against one client after another."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from covering import Cell, covering_set, few
from fedskew import methods
from fedskew.data import AUGMENTATIONS
from fedskew.engine import (
    Assignment,
    ClientSamples,
    Conditions,
    Federation,
    LocalTraining,
    LocalWork,
    PartitionedData,
    Sent,
    SequentialBackend,
    Update,
)
from fedskew.engine.cohort import CohortBackend
from fedskew.engine.contracts import adapting, hooked
from fedskew.errors import RunError
from fedskew.methods import Method
from fedskew.models import Dropout, FlatModel, ModelState, Network, build

ROWS, FEATURES, CLASSES, CLIENTS = 120, 5, 4, 8
SIZES = (40, 3, 17, 0, 8, 24, 1, 27)
TARGET = np.array([0.1, 0.2, 0.3, 0.4])
CLOSE = {"rtol": 1e-3, "atol": 2e-5}


class Normed(Network):
    """Batch norm and dropout between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(8, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(relu(self.norm(self.fc(x))))
        return dropped


class Plain(Normed):
    """The same without batch norm, for batches of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()


def data() -> PartitionedData:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, CLASSES, ROWS)
    inputs = rng.normal(size=(ROWS, FEATURES)) + 2 * np.eye(CLASSES, FEATURES)[targets]
    rows = np.split(rng.permutation(ROWS), np.cumsum(SIZES)[:-1])
    counts = np.stack([np.bincount(targets[own], minlength=CLASSES) for own in rows]).astype(float)
    return PartitionedData(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets), rows, counts)


def backends(
    method: Method, module: nn.Module, divided: PartitionedData | None = None, chunk: int | None = None, **parts
):
    """One client after another, the cohort at once, and the untrained model."""
    drawn = torch.Generator().manual_seed(1)
    for component in adapting(method):
        module = component.adapt(module, drawn)
    settings = {"batch_size": 8, "lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
    augment, observe = parts.pop("augment", None), parts.pop("observe", None)
    work = LocalWork(
        divided or data(),
        method.objective,
        method.local_step,
        LocalTraining(**settings | parts),
        seed=4,
        augment=augment,
        hooks=hooked(method),
    )
    alone = SequentialBackend(FlatModel(copy.deepcopy(module)), work, observe)
    return alone, CohortBackend(FlatModel(module), work, observe, chunk), alone.model.read_state()


def network(kind: type[Network] = Plain) -> Network:
    torch.manual_seed(3)
    return Dropout.swap(kind())


def sent_by(method: Method, model: ModelState) -> Sent:
    """What the server sends in the first round."""
    broadcast = {}
    for hooks in hooked(method).values():
        broadcast |= hooks.broadcast(hooks.init_server(model.parameters, CLIENTS))
    return Sent(model, broadcast)


def fresh(method: Method, model: ModelState) -> dict[str, Tensor]:
    """What a client keeps before its first participation."""
    return {
        key: value for hooks in hooked(method).values() for key, value in hooks.init_client(model.parameters).items()
    }


def assert_close_updates(ours: Sequence[Update], theirs: Sequence[Update], **close) -> None:
    assert [update.client for update in ours] == [update.client for update in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.steps == other.steps
        assert one.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-6)
        assert torch.equal(one.integers, other.integers)
        for part in ("change", "buffers"):
            torch.testing.assert_close(getattr(one, part), getattr(other, part), **close or CLOSE)
        for part in ("reply", "state"):
            named, expected = getattr(one, part), getattr(other, part)
            assert named.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(named[name], value, **close or CLOSE)


def federations(method: Method):
    """The same federation on two backends, and its untrained model."""
    *both, model = backends(method, network(), batch_size=20)  # of 40 samples at most: one step or two
    conditions = Conditions(dropout=0.2)
    return *(
        Federation(method, one, one.work.data.counts, TARGET, 0.5, seed=4, epochs=1, conditions=conditions)
        for one in both
    ), model


def play_rounds(federation: Federation, model, rounds: int):
    state, records = federation.start(model), []
    for _ in range(rounds):
        state, record = federation.run_round(state)
        records.append(record)
    return state, records


def assert_close_runs(one, other, close=CLOSE) -> None:
    (state, records), (expected, known) = one, other
    assert state.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        torch.testing.assert_close(state.tensors[name], value, **close)
    for record, expected_record in zip(records, known, strict=True):
        for key in ("cohort", "answered", "dropped", "diverged", "steps", "bytes_up", "bytes_down"):
            assert getattr(record, key) == getattr(expected_record, key)
        np.testing.assert_allclose(record.weights, expected_record.weights, rtol=1e-3, atol=1e-5)
        losses = [math.nan if one.loss is None else one.loss for one in (record, expected_record)]  # too few for Krum
        np.testing.assert_allclose(*losses, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cell", few(), ids=str)
def test_every_component_trains_as_one_client_after_another(cell: Cell):
    assert_trains_alike(cell)


@pytest.mark.whole_product
@pytest.mark.parametrize("cell", [cell for cell in covering_set() if cell not in few()], ids=str)
def test_every_accepted_pair_of_components_trains_as_one_client_after_another(cell: Cell):
    assert_trains_alike(cell)


def assert_trains_alike(cell: Cell) -> None:
    alone, together, model = federations(methods.build(methods.expand(cell.tables()), 0.5))
    ours, theirs = play_rounds(together, model, 2), play_rounds(alone, model, 2)
    close = CLOSE
    if {"feddecorr", "classifier_variance"} <= set(cell.terms):  # together they amplify rounding
        close = {**CLOSE, "atol": max(CLOSE["atol"], 2 * amplified_rounding(alone, model, theirs))}
    assert_close_runs(ours, theirs, close)


def largest_difference(one, other) -> float:
    return float((one[0].model.parameters - other[0].model.parameters).abs().max())


def amplified_rounding(federation: Federation, model, expected) -> float:
    """How far a run ends from where it did, if its first model is off by float32's rounding; the largest of six."""
    found = []
    for seed in range(6):
        noise = 1e-7 * torch.randn(model.parameters.shape, generator=torch.Generator().manual_seed(seed))
        moved = model._replace(parameters=model.parameters * (1 + noise))
        found.append(largest_difference(play_rounds(federation, moved, 2), expected))
    return max(found)


def built(**tables) -> Method:
    return methods.build(methods.expand(tables), 0.5)


TEACHING = {"name": "fedvls_calibration", "terms": [{"name": "vacant_distillation"}, {"name": "suppression"}]}
UNEVEN = [Assignment(client, 3) for client in (2, 0, 7, 3, 5)]


STEP_AND_TEACHER = [
    pytest.param(step, left, marks=[pytest.mark.whole_product] * more, id=f"{step}, teacher {mode}")
    for step, left, mode, more in [
        ("sgd", False, "in eval mode", False),
        ("fedsam", True, "on batch statistics", False),
        ("sgd", True, "on batch statistics", True),
        ("fedsam", False, "in eval mode", True),
    ]
]
"""Local steps, and whether the teacher normalises by its batch."""


@pytest.mark.slow
@pytest.mark.parametrize(("step", "left"), STEP_AND_TEACHER)
def test_batch_norm_is_each_clients_own_and_sees_real_rows_only(step, left):
    method = built(objective=TEACHING, local_step={"name": step})
    # The asked have 17, 40, 27, 0 and 24 samples: batches of 9, of 8, 6 and 4, none of a single row.
    alone, together, model = backends(method, network(Normed), batch_size=9, teacher_train_mode=left)
    ours = together.train(1, UNEVEN, Sent(model))
    assert_close_updates(ours, alone.train(1, UNEVEN, Sent(model)))
    assert all(torch.equal(update.buffers, model.buffers) == (update.steps == 0) for update in ours)


def test_batch_norm_of_a_single_value_is_refused_as_one_client_after_another_refuses_it():
    _, together, model = backends(built(), network(Normed), batch_size=13)
    with pytest.raises(RunError, match=r"round 1, clients 0, 7, step 2: .*more than 1 value"):
        together.train(1, [Assignment(client, 2) for client in (7, 0, 3)], Sent(model))


def test_a_last_batch_that_is_too_small_is_left_out_of_a_cohort_too():
    asked = [Assignment(client, 2) for client in (7, 0, 3, 1)]
    alone, together, model = backends(built(), network(Normed), batch_size=13, smallest_batch=2)
    ours = together.train(1, asked, Sent(model))
    assert_close_updates(ours, alone.train(1, asked, Sent(model)))
    # 27, 40, 0 and 3 samples: two, three (13, 13 and 13; one sample is left) and one step an epoch.
    assert [update.steps for update in ours] == [4, 6, 0, 2]


def test_a_padded_row_and_a_finished_step_change_nothing():
    alone, together, model = backends(built(objective=TEACHING), network(), weight_decay=0.1)
    # 3 and 1 samples beside 40: their single batches are padded to 8 rows, and 4 of 5 steps pass them by.
    for client in (1, 6):
        (beside, _) = together.train(2, [Assignment(client, 1), Assignment(0, 1)], Sent(model))
        (by_itself,) = alone.train(2, [Assignment(client, 1)], Sent(model))
        assert_close_updates([beside], [by_itself], rtol=1e-5, atol=1e-7)
        assert beside.steps == 1


def test_what_a_padded_row_holds_does_not_matter():
    divided = data()
    other = data()
    other.inputs[divided.rows[0]] = 1e6  # client 0's: it diverges, and nobody else notices
    results = []
    for one in (divided, other):
        _, together, model = backends(built(), network(), one)
        results.append(together.train(2, [Assignment(0, 2), Assignment(2, 2), Assignment(1, 2)], Sent(model))[1:])
    assert all(torch.equal(one.change, two.change) for one, two in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3])
def test_order_and_size_of_the_stack_change_results_by_rounding_only(chunk):
    _, together, model = backends(built(objective=TEACHING), network())
    everybody = [Assignment(client, 2) for client in range(CLIENTS)]
    whole = together.train(1, everybody, Sent(model))
    _, chunked, _ = backends(built(objective=TEACHING), network(), chunk=chunk)
    assert_close_updates(chunked.train(1, everybody[::-1], Sent(model))[::-1], whole, rtol=1e-4, atol=1e-6)


def test_quotas_steps_and_stragglers_are_those_of_one_client_after_another():
    alone, together, model = backends(built(), network())
    asked = [
        Assignment(0, 2, quota=np.array([3.0, 0.0, 5.0, 1.0])),
        Assignment(2, 5, steps=4),
        Assignment(5, 1),
        Assignment(7, 0),
        Assignment(4, 3, steps=0),
        Assignment(1, 1.5),
    ]
    ours = together.train(3, asked, Sent(model))
    assert_close_updates(ours, alone.train(3, asked, Sent(model)))
    assert [update.steps for update in ours[:-1]] == [4, 4, 3, 0, 0]


@pytest.mark.slow
def test_clients_that_kept_something_train_beside_those_that_did_not():
    method = built(objective={"name": "cross_entropy", "terms": [{"name": "moon"}]}, local_step={"name": "scaffold"})
    alone, together, model = backends(method, network(), persist_momentum=True)
    sent, new = sent_by(method, model), fresh(method, model)
    first = together.train(1, [Assignment(client, 1, new) for client in (0, 1)], sent)
    moved = sent._replace(model=model._replace(parameters=model.parameters + 0.1))
    asked = [Assignment(0, 1, first[0].state), Assignment(2, 1, new), Assignment(1, 2, first[1].state)]
    assert "previous.parameters" in first[0].state
    assert_close_updates(together.train(2, asked, moved), alone.train(2, asked, moved))


def test_an_observer_sees_each_client_after_its_own_training():
    def observe(round, client, module):
        return round, client, [value.clone() for value in module.state_dict().values()]

    alone, together, model = backends(built(), network(Normed), batch_size=9, observe=observe)
    for ours, theirs in zip(together.train(3, UNEVEN, Sent(model)), alone.train(3, UNEVEN, Sent(model)), strict=True):
        assert ours.observed[:2] == theirs.observed[:2] == (3, ours.client)
        torch.testing.assert_close(ours.observed[2], theirs.observed[2], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "augmentation"),
    [
        pytest.param(name, augmentation, marks=[pytest.mark.whole_product] * (first != second))
        for first, name in enumerate(("lenet5", "cnn_mnist", "cnn_w2"))
        for second, augmentation in enumerate(("fedentopt", "crop_flip", None))
    ],
)
def test_convolutions_channel_dropout_and_augmentation_are_each_clients_own(name, augmentation):
    shape = (1, 16, 16) if name == "cnn_mnist" else (3, 16, 16)
    flat = data()
    inputs = torch.from_numpy(np.random.default_rng(5).random((ROWS, *shape)).astype(np.float32))
    divided = PartitionedData(inputs, flat.targets, flat.rows, flat.counts)
    augment = None if augmentation is None else partial(AUGMENTATIONS[augmentation]().apply, mean=(), std=())
    module = build(name, CLASSES, shape)
    alone, together, model = backends(built(objective=TEACHING), module, divided, augment=augment)
    asked = [Assignment(client, 2) for client in (1, 2, 5)]
    assert_close_updates(together.train(2, asked, Sent(model)), alone.train(2, asked, Sent(model)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": (1, 2)}, {"dilation": (1, 2)}, {"padding": "same"}, {"groups": 2}],
    ids=str,
)
def test_every_convolution_is_the_convolution(options):
    flat = data()
    inputs = torch.from_numpy(np.random.default_rng(5).normal(size=(ROWS, 2, 9, 7)).astype(np.float32))
    divided = PartitionedData(inputs, flat.targets, flat.rows, flat.counts)
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 6, 3, **options), nn.Flatten(), nn.LazyLinear(CLASSES)
    )
    module(inputs[:2])
    alone, together, model = backends(built(), module, divided)
    asked = [Assignment(client, 1) for client in (1, 2, 7)]
    assert_close_updates(together.train(1, asked, Sent(model)), alone.train(1, asked, Sent(model)))


def test_layers_of_a_users_own_that_write_buffers_are_each_clients_own():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(FEATURES, CLASSES)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.abs().mean().detach())
            out: Tensor = self.fc(x)
            return out

    alone, together, model = backends(built(), Counting(), batch_size=1)  # batches without padding
    asked = [Assignment(client, 1) for client in (1, 4, 6)]
    assert_close_updates(together.train(1, asked, Sent(model)), alone.train(1, asked, Sent(model)))


def test_a_client_that_diverges_leaves_the_others_as_they_are():
    _, together, model = backends(built(), network(), lr=0.05)
    calm = together.train(1, [Assignment(2, 1), Assignment(5, 1)], Sent(model))
    divided = data()
    divided.inputs[divided.rows[5]] = float("inf")
    _, together, _ = backends(built(), network(), divided)
    mixed = together.train(1, [Assignment(2, 1), Assignment(5, 1)], Sent(model))
    assert torch.equal(mixed[0].change, calm[0].change)
    assert not mixed[1].change.isfinite().all()


def test_samples_may_lie_in_data_sets_of_their_own():
    class Apart:
        def of(self, client: int) -> ClientSamples:
            inputs, targets, rows, counts = data().of(client)
            own = torch.from_numpy(rows)
            return ClientSamples(inputs[own], targets[own], np.arange(len(rows)), counts)

    _, together, model = backends(built(), network())
    _, apart, _ = backends(built(), network(), Apart())
    pairs = zip(apart.train(1, UNEVEN, Sent(model)), together.train(1, UNEVEN, Sent(model)), strict=True)
    assert all(torch.equal(one.change, other.change) for one, other in pairs)


def test_training_leaves_the_global_generator_and_the_model_sent_alone():
    _, together, model = backends(built(objective=TEACHING), network(Normed), batch_size=9)
    before, copies = torch.get_rng_state(), [part.clone() for part in model]
    together.train(1, UNEVEN, Sent(model))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(part, copied) for part, copied in zip(model, copies, strict=True))
