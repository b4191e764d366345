"""A cohort at once, held against one client after another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from federates import CLASSES, FEATURES, SIZES, Backends, Normed, Plain, Straight, backends, clients, network
from torch import Tensor, nn
from torch.nn import functional

from common import built
from covering import Cell, covering_set, few
from fedskew.data import AUGMENTATIONS
from fedskew.engine import Assignment, ClientSamples, Conditions, Federation, Update
from fedskew.engine.cohort._graphs import Graphs
from fedskew.engine.cohort._layers import _Conv2d
from fedskew.engine.contracts import hooked
from fedskew.errors import ComponentError, RunError
from fedskew.local_steps import SGD
from fedskew.models import Network, build
from fedskew.objectives import INDEX, Batch, Context, Objective

TARGET = np.array([0.1, 0.2, 0.3, 0.4])
CLOSE = {"rtol": 1e-3, "atol": 2e-5}


def assert_close_updates(ours: Sequence[Update], theirs: Sequence[Update], **close) -> None:
    assert [update.client for update in ours] == [update.client for update in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.steps == other.steps
        assert one.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-6)
        assert torch.equal(one.integers, other.integers)
        for part in ("change", "buffers", "reply", "state"):
            torch.testing.assert_close(getattr(one, part), getattr(other, part), **close or CLOSE)


def assert_alike(both: Backends, asked: Sequence[Assignment], round: int = 1) -> list[Update]:
    ours = both.together.train(round, asked, both.sent)
    assert_close_updates(ours, both.alone.train(round, asked, both.sent))
    return ours


def tasks(epochs: float, *ids: int) -> list[Assignment]:
    return [Assignment(client, epochs) for client in ids]


class Straightened(SGD):
    """A user's, who thinks of one client."""

    def direction(self, gradient: Tensor, parameters: Tensor, settings: Any) -> Tensor:
        return gradient / (gradient.norm() + 1e-6)


def test_a_direction_of_ones_own_is_given_one_client_at_a_time() -> None:
    both = backends(replace(built(), local_step=Straightened()))
    assert_alike(both, tasks(2, 0, 1, 2))


class Failing(SGD):
    """With a correction that fails."""

    takes_rows: ClassVar[bool] = True

    def correction(self, settings: Any) -> Any:
        return settings.client["nothing"]


def test_a_correction_of_ones_own_that_fails_is_blamed() -> None:
    both = backends(replace(built(), local_step=Failing()))
    for backend in (both.alone, both.together):
        with pytest.raises(ComponentError, match=r"^round 1.*Failing: correction\(\) failed: KeyError: 'nothing'"):
            backend.train(1, tasks(1, 0, 1), both.sent)


class Noting(INDEX["fedrod"]):
    """With a value of its own, which is mapped over a stack; notes of which counts it makes something."""

    seen: ClassVar[list[Tensor]] = []

    def change(self, counts: Tensor) -> Any:
        self.seen.append(counts)
        return super().change(counts)

    def value(self, batch: Batch, context: Context) -> Tensor:
        return super().value(batch, context)


def test_what_counts_alone_decide_is_computed_once_a_client_and_is_no_other_clients() -> None:
    both = backends(replace(built(), objective=Objective(Noting())))
    both.alone.train(1, tasks(2, 0, 1, 0), both.sent)
    assert [counts.tolist() for counts in Noting.seen] == both.alone.work.data.counts[[0, 1, 0]].tolist()
    assert_alike(both, tasks(2, 0, 1, 2))


# Rounds of every component.


def play_rounds(federation: Federation, model, rounds: int = 2):
    state, records = federation.start(model), []
    for _ in range(rounds):
        state, record = federation.run_round(state)
        records.append(record)
    return state, records


def assert_trains_alike(cell: Cell, kind: type[Network] = Plain, held: bool = False) -> None:
    method = built(momentum=0.5, **cell.tables())
    *both, sent = backends(method, network(kind), batch_size=20)  # of 40 samples at most: one step or two
    parts = {"seed": 4, "epochs": 1, "conditions": Conditions(dropout=0.2)}
    alone, together = (Federation(method, one, one.work.data.counts, TARGET, 0.5, **parts) for one in both)
    both[1].graphs = Graphs() if held else None
    (state, records), (expected, known) = play_rounds(together, sent.model), play_rounds(alone, sent.model)
    close = CLOSE
    if {"feddecorr", "classifier_variance"} <= set(cell.terms):  # together they amplify rounding
        close = {**CLOSE, "atol": max(CLOSE["atol"], 2 * amplified_rounding(alone, sent.model, expected))}
    torch.testing.assert_close(dict(state.tensors), dict(expected.tensors), **close)
    assert both[1].graphs is None or both[1].graphs.failed is None
    for record, other in zip(records, known, strict=True):
        for key in ("cohort", "answered", "dropped", "diverged", "steps", "bytes_up", "bytes_down"):
            assert getattr(record, key) == getattr(other, key)
        np.testing.assert_allclose(record.weights, other.weights, rtol=1e-3, atol=1e-5)
        losses = [math.nan if one.loss is None else one.loss for one in (record, other)]  # too few for Krum
        np.testing.assert_allclose(*losses, rtol=1e-3, atol=1e-5)


def amplified_rounding(federation: Federation, model, expected) -> float:
    """How far a run ends from where it did, if its first model is off by float32's rounding; the largest of six."""
    found = []
    for seed in range(6):
        noise = 1e-7 * torch.randn(model.parameters.shape, generator=torch.Generator().manual_seed(seed))
        moved, _ = play_rounds(federation, model._replace(parameters=model.parameters * (1 + noise)))
        found.append(float((moved.model.parameters - expected.model.parameters).abs().max()))
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "held"), [(Plain, False), (Straight, False), (Plain, True)])
@pytest.mark.parametrize("cell", few(), ids=str)
def test_every_component_trains_as_one_client_after_another(cell: Cell, kind: type[Network], held: bool):
    assert_trains_alike(cell, kind, held)


@pytest.mark.whole_product
@pytest.mark.parametrize("cell", [cell for cell in covering_set() if cell not in few()], ids=str)
def test_every_accepted_pair_of_components_trains_as_one_client_after_another(cell: Cell):
    assert_trains_alike(cell)


# One round.

TEACHING = built(
    objective={"name": "fedvls_calibration", "terms": [{"name": "vacant_distillation"}, {"name": "suppression"}]}
)
UNEVEN = tasks(3, 2, 0, 7, 3, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "left"),
    [
        ("sgd", False),
        ("fedsam", True),
        *(pytest.param(*way, marks=pytest.mark.whole_product) for way in (("sgd", True), ("fedsam", False))),
    ],
)
def test_batch_norm_is_each_clients_own_and_sees_real_rows_only(step, left):
    """Also of a teacher that is left to normalise by its batch."""
    method = built(objective={"name": "fedvls_calibration", "terms": ["vacant_distillation"]}, local_step=step)
    # The asked have 17, 40, 27, 0 and 24 samples: batches of 9, of 8, 6 and 4, none of a single row.
    both = backends(method, network(Normed), batch_size=9, teacher_train_mode=left)
    ours = assert_alike(both, UNEVEN)
    assert all(torch.equal(update.buffers, both.sent.model.buffers) == (update.steps == 0) for update in ours)


def test_batch_norm_of_a_single_value_is_refused_and_a_last_batch_that_is_too_small_is_left_out():
    _, together, sent = backends(built(), network(Normed), batch_size=13)
    with pytest.raises(RunError, match=r"round 1, clients 0, 7, step 2: .*more than 1 value"):
        together.train(1, tasks(2, 7, 0, 3), sent)
    ours = assert_alike(backends(built(), network(Normed), batch_size=13, smallest_batch=2), tasks(2, 7, 0, 3, 1))
    # 27, 40, 0 and 3 samples: two, three (13, 13 and 13; one sample is left) and one step an epoch.
    assert [update.steps for update in ours] == [4, 6, 0, 2]


def test_a_padded_row_and_a_finished_step_change_nothing():
    alone, together, sent = backends(TEACHING, weight_decay=0.1)
    # 3 and 1 samples beside 40: their single batches are padded to 8 rows, and 4 of 5 steps pass them by.
    for client in (1, 6):
        (beside, _) = together.train(2, tasks(1, client, 0), sent)
        assert_close_updates([beside], alone.train(2, tasks(1, client), sent), rtol=1e-5, atol=1e-7)
        assert beside.steps == 1


@pytest.mark.parametrize("value", [1e6, math.inf])
def test_a_client_that_diverges_and_what_a_padded_row_holds_leave_the_others_as_they_are(value):
    results, odd = [], clients()
    odd.inputs[odd.rows[0]] = value
    for divided in (clients(), odd):
        _, together, sent = backends(built(), divided=divided)
        results.append(together.train(1, tasks(2, 0, 2, 1), sent))
    assert all(torch.equal(one.change, two.change) for one, two in zip(*(of[1:] for of in results), strict=True))
    assert value < math.inf or not results[1][0].change.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3])
def test_order_and_size_of_the_stack_change_results_by_rounding_only(chunk):
    everybody = tasks(2, *range(len(SIZES)))
    _, together, sent = backends(TEACHING)
    whole = together.train(1, everybody, sent)
    chunked = backends(TEACHING, chunk=chunk).together.train(1, everybody[::-1], sent)
    assert_close_updates(chunked[::-1], whole, rtol=1e-4, atol=1e-6)


def test_quotas_steps_and_stragglers_are_those_of_one_client_after_another():
    asked = [
        Assignment(0, 2, quota=np.array([3.0, 0.0, 5.0, 1.0])),
        Assignment(2, 5, steps=4),
        *tasks(1, 5),
        *tasks(0, 7),
        Assignment(4, 3, steps=0),
        *tasks(1.5, 1),
    ]
    ours = assert_alike(backends(built()), asked, round=3)
    assert [update.steps for update in ours[:-1]] == [4, 4, 3, 0, 0]


@pytest.mark.slow
def test_clients_that_kept_something_train_beside_those_that_did_not():
    method = built(objective={"name": "cross_entropy", "terms": [{"name": "moon"}]}, local_step={"name": "scaffold"})
    both = backends(method, keep_optimizer=True)
    model, new = both.sent.model, {}
    for hooks in hooked(method).values():
        new |= hooks.init_client(model.parameters)
    first = both.together.train(1, [Assignment(client, 1, new) for client in (0, 1)], both.sent)
    assert "previous.parameters" in first[0].state
    moved = both.sent._replace(model=model._replace(parameters=model.parameters + 0.1))
    asked = [Assignment(0, 1, first[0].state), Assignment(2, 1, new), Assignment(1, 2, first[1].state)]
    assert_alike(both._replace(sent=moved), asked, round=2)


def test_an_observer_sees_each_client_after_its_own_training():
    def observe(round, client, module):
        return round, client, [value.clone() for value in module.state_dict().values()]

    alone, together, sent = backends(built(), network(Normed), batch_size=9, observe=observe)
    for ours, theirs in zip(together.train(3, UNEVEN, sent), alone.train(3, UNEVEN, sent), strict=True):
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
    augment = None if augmentation is None else partial(AUGMENTATIONS[augmentation]().apply, mean=(), std=())
    both = backends(TEACHING, build(name, CLASSES, shape), divided=clients(*shape), augment=augment)
    assert_alike(both, tasks(2, 1, 2, 5), round=2)


OPTIONS: list[dict[str, Any]] = [
    *({}, {"stride": 2, "padding": (1, 2)}, {"dilation": (1, 2)}, {"padding": "same"}, {"groups": 2})
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_convolution_is_the_convolution(options):
    layers = [nn.Conv2d(2, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 6, 3, **options), nn.Flatten()]
    module, divided = nn.Sequential(*layers, nn.LazyLinear(CLASSES)), clients(2, 9, 7)
    module(divided.inputs[:2])
    assert_alike(backends(built(), module, divided=divided), tasks(1, 1, 2, 7))


@pytest.mark.parametrize(
    ("out", "kernel", "sides", "padding"),
    [(6, 5, (12, 16), 0), (16, (3, 2), (9, 11), 1), (200, 3, (5, 5), 1), (2, 1, (7, 7), 0), (3, 4, (4, 4), (0, 3))],
)
def test_convolutions_of_all_clients_by_one_product_are_each_clients_own(out, kernel, sides, padding):
    layer = nn.Conv2d(3, out, kernel, padding=padding)
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    ones = [drawn(2, 4, 3, *sides), *(drawn(2, *own.shape) for own in (layer.weight, layer.bias))]
    y = _Conv2d(layer)._at_once(*ones)
    expected = torch.stack([functional.conv2d(*own, padding=layer.padding) for own in zip(*ones, strict=True)])
    torch.testing.assert_close(y, expected)
    for ours, theirs in zip(*(torch.autograd.grad(one.sin().sum(), ones) for one in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_of_large_kernels_with_many_channels_no_windows_are_made_which_take_memory(monkeypatch):
    monkeypatch.setattr(_Conv2d, "_at_once", Mock(side_effect=AssertionError))
    layer = _Conv2d(nn.Conv2d(64, 64, 5, device="meta"))  # as on a GPU
    assert layer(torch.empty(2, 64, 9, 9, device="meta")).shape == (2, 64, 5, 5)


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

    assert_alike(backends(built(), Counting(), batch_size=1), tasks(1, 1, 4, 6))  # batches without padding


def test_samples_may_lie_in_data_sets_of_their_own():
    class Apart:
        def of(self, client: int) -> ClientSamples:
            inputs, targets, rows, counts, _ = clients().of(client)
            own = torch.from_numpy(rows)
            return ClientSamples(inputs[own], targets[own], np.arange(len(rows)), counts)

    _, together, sent = backends(built())
    apart = backends(built(), divided=Apart()).together.train(1, UNEVEN, sent)
    pairs = zip(apart, together.train(1, UNEVEN, sent), strict=True)
    assert all(torch.equal(one.change, other.change) for one, other in pairs)


def test_held_steps_take_one_cohort_after_another_and_other_rates():
    both = backends(TEACHING, network(Normed), batch_size=9, lr_decay=0.5)
    both.together.graphs = graphs = Graphs()
    for round, asked in enumerate((UNEVEN, tasks(1, 0, 2), UNEVEN[::-1], tasks(2, 3), tasks(2, 5, 7)), 1):
        assert_alike(both, asked, round)
        assert graphs.failed is None


class Logging(SGD):
    """A step that logs how often it is taken."""

    def step(self, parameters, gradient, carried, settings, log):
        log("ones", torch.ones(()))
        return super().step(parameters, gradient, carried, settings)


def test_steps_that_log_figures_are_not_held_and_say_why():
    both = backends(replace(built(), local_step=Logging()))
    both.together.graphs = graphs = Graphs()
    updates = assert_alike(both, UNEVEN)
    assert graphs.failed == "figures are logged"
    assert updates[0].logged["ones"] == 1


class ByMode(Straight):
    """Other features in training than in inference."""

    def features(self, x):
        return super().features(x) if self.training else 3 * super().features(x)


@pytest.mark.parametrize(
    ("kind", "left"), [(Straight, True), (ByMode, False)], ids=["without batch norm", "another function in inference"]
)
def test_the_teacher_of_a_chain_is_the_sent_model_in_inference(kind, left):
    assert_alike(backends(built("fedntd"), network(kind), batch_size=9, teacher_train_mode=left), UNEVEN)


@dataclass(frozen=True)
class Unit(SGD):
    """Steps of one length."""

    seen: ClassVar[list[int]] = []

    def step(self, parameters, gradient, carried, settings):
        slope = gradient(parameters)
        self.seen.append(parameters.dim())
        return parameters - settings.lr * slope / torch.linalg.vector_norm(slope, dim=-1, keepdim=True), carried


@dataclass(frozen=True)
class UnitOfRows(Unit):
    takes_rows: ClassVar[bool] = True


@pytest.mark.parametrize(("kind", "dims"), [(Unit, 1), (UnitOfRows, 2)])
def test_a_step_of_one_s_own_gets_rows_where_it_says_so(kind, dims):
    both = backends(replace(built(), local_step=kind()))
    Unit.seen.clear()
    assert_alike(both, UNEVEN)
    assert max(Unit.seen) == dims


def test_training_leaves_the_global_generator_and_the_model_sent_alone():
    both = backends(TEACHING, network(Normed), batch_size=9)
    before, copies = torch.get_rng_state(), [part.clone() for part in both.sent.model]
    for backend in both[:2]:
        backend.train(1, UNEVEN, both.sent)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(part, copied) for part, copied in zip(both.sent.model, copies, strict=True))
