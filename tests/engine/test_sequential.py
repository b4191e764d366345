"""One client after another, against loops written by hand."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedskew import methods
from fedskew.engine import Assignment, LocalTraining, LocalWork, PartitionedData, Sent, SequentialBackend
from fedskew.errors import RunError
from fedskew.models import FlatModel, ModelState, build
from fedskew.randomness import Purpose, generator

ROWS, CLASSES = 60, 4
INPUTS = torch.from_numpy(np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32))
TARGETS = torch.from_numpy(np.random.default_rng(1).integers(0, 3, ROWS))  # class 3 is vacant everywhere
SAMPLES = [np.arange(0, 26), np.arange(26, 60), np.arange(0, 0)]
TRAINING = LocalTraining(batch_size=8, lr=0.1, lr_decay=0.5, momentum=0.9, weight_decay=0.01)


def counts() -> np.ndarray:
    return np.stack(
        [np.bincount(TARGETS[torch.from_numpy(rows)].numpy(), minlength=CLASSES) for rows in SAMPLES]
    ).astype(float)


def backend(preset: str = "fedavg", module: nn.Module | None = None, **changes) -> tuple[SequentialBackend, ModelState]:
    method = methods.build(methods.expand({"preset": preset}))
    module = module or build("logistic", CLASSES, (6,), generator=torch.Generator().manual_seed(0))
    model = FlatModel(module)
    observe = changes.pop("observe", None)
    data = PartitionedData(INPUTS, TARGETS, SAMPLES, counts())
    objective = dataclasses.replace(method.objective, terms=changes.pop("terms", method.objective.terms))
    parts = {"training": TRAINING, "seed": 5} | changes
    work = LocalWork(data, objective, method.local_step, **parts)
    return SequentialBackend(model, work, observe), model.read_state()


def asked(*clients: int, quota=None, **parts) -> list[Assignment]:
    return [Assignment(client, parts.get("epochs", 3), quota=quota) for client in clients]


def by_hand(module: nn.Module, client: int, round: int, seed: int = 5) -> nn.Module:
    module = copy.deepcopy(module).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1 * 0.5 ** (round - 1), momentum=0.9, weight_decay=0.01)
    rng = generator(seed, Purpose.SHUFFLE, round, client)
    rows = SAMPLES[client]
    for _ in range(3):
        for batch in np.split(rng.permutation(rows), range(8, len(rows), 8)):
            optimiser.zero_grad()
            functional.cross_entropy(module(INPUTS[batch]), TARGETS[batch]).backward()
            optimiser.step()
    return module


@pytest.mark.parametrize("round", [1, 3])
@pytest.mark.parametrize("client", [0, 1])
def test_local_training_takes_the_steps_of_a_hand_written_loop(client, round):
    module = build("logistic", CLASSES, (6,), generator=torch.Generator().manual_seed(0))
    expected = by_hand(module, client, round)
    one, sent = backend(module=module)
    (update,) = one.train(round, asked(client), Sent(sent))
    one.model.write(sent.parameters + update.change)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(one.model.state_dict()[name], value)
    assert update.steps == 3 * -(-len(SAMPLES[client]) // 8)


def test_what_a_client_sends_does_not_depend_on_who_trained_before_it():
    one, sent = backend("fedvls")
    together = one.train(2, asked(0, 1), Sent(sent))
    alone, _ = backend("fedvls")
    assert torch.equal(together[1].change, alone.train(2, asked(1), Sent(sent))[0].change)


def test_a_client_with_a_quota_trains_on_so_many_samples_of_each_class():
    one, sent = backend(training=LocalTraining(batch_size=100))
    quota = np.array([3, 0, 2, 0])
    (update,) = one.train(4, asked(0, quota=quota, epochs=1), Sent(sent))
    rows = one.work.samples(4, asked(0, quota=quota)[0]).rows
    assert set(rows) <= set(SAMPLES[0])
    assert np.bincount(TARGETS[torch.from_numpy(rows)].numpy(), minlength=4).tolist() == quota.tolist()
    # One full-batch step: lr 0.1 times the mean gradient over these rows.
    module = build("logistic", CLASSES, (6,), generator=torch.Generator().manual_seed(0))
    functional.cross_entropy(module(INPUTS[rows]), TARGETS[rows]).backward()
    gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
    torch.testing.assert_close(update.change, -0.01 * gradient)
    assert not np.array_equal(rows, one.work.samples(5, asked(0, quota=quota)[0]).rows)


def test_a_client_without_samples_returns_the_model_unchanged():
    one, sent = backend()
    (update,) = one.train(1, asked(2), Sent(sent))
    assert update.steps == 0
    assert not update.change.any()
    assert update.loss == 0.0


def test_no_local_epochs_change_nothing():
    one, sent = backend()
    assert not one.train(1, asked(0, epochs=0), Sent(sent))[0].change.any()


@pytest.mark.parametrize("preset", ["fedlc", "fedvls", "fedprox", "fedlc+fedvls", "fedprox+fedvls"])
def test_every_objective_and_step_trains_and_stays_finite_with_a_vacant_class(preset):
    one, sent = backend(preset)
    (update,) = one.train(1, asked(0), Sent(sent))
    assert torch.isfinite(update.change).all()
    assert update.change.any()


@dataclasses.dataclass
class KeepsTeacher:
    """A term of one's own that keeps what the teacher said of each batch, and is worth nothing."""

    said: list[torch.Tensor]
    role = "term"
    reads = frozenset({"teacher"})

    def value(self, batch, context):
        self.said.append(context.teacher.logits)
        return 0 * batch.logits.sum()


@pytest.mark.parametrize("left", [False, True])
def test_the_teacher_is_the_sent_model_in_eval_mode_unless_it_is_left_on_batch_statistics(left):
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    term = KeepsTeacher([])
    training = dataclasses.replace(TRAINING, teacher_train_mode=left)
    one, sent = backend(module=copy.deepcopy(module), training=training, terms=((1.0, term),))
    one.train(1, asked(1), Sent(sent))
    rng, rows = generator(5, Purpose.SHUFFLE, 1, 1), SAMPLES[1]
    batches = [batch for _ in range(3) for batch in np.split(rng.permutation(rows), range(8, len(rows), 8))]
    for batch, said in zip(batches, term.said, strict=True):
        expected = copy.deepcopy(module).train(left)(INPUTS[batch])
        torch.testing.assert_close(said, expected)


def test_momentum_may_persist_between_participations():
    training = dataclasses.replace(TRAINING, persist_momentum=True, batch_size=100, weight_decay=0.0)
    one, sent = backend(training=training)
    (first,) = one.train(1, asked(0, epochs=1), Sent(sent))
    (second,) = one.train(1, [Assignment(0, 1, state=first.state)], Sent(sent))
    # One full-batch step from the same model: b' = 0.9 b + g, so the second moves 0.1 * 0.9 b further.
    torch.testing.assert_close(second.change - first.change, -0.1 * 0.9 * first.state["training.momentum"])
    (fresh,) = one.train(1, asked(0, epochs=1), Sent(sent))
    torch.testing.assert_close(fresh.change, first.change)


def test_batch_norm_statistics_travel_with_the_client():
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    one, sent = backend(module=module)
    first, second = one.train(1, asked(0, 1), Sent(sent))
    assert not torch.equal(first.buffers, second.buffers)
    one.model.write(sent.parameters)
    assert torch.equal(one.train(1, asked(1), Sent(sent))[0].buffers, second.buffers)


def test_an_observer_sees_each_client_after_its_own_training():
    one, sent = backend(observe=lambda round, client, module: (round, client, one.model.read()))
    updates = one.train(3, asked(1, 0), Sent(sent))
    assert [update.observed[:2] for update in updates] == [(3, 1), (3, 0)]
    for update in updates:
        torch.testing.assert_close(update.observed[2] - sent.parameters, update.change)


def test_an_error_inside_local_training_names_round_client_and_step():
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    one, sent = backend(module=module, training=LocalTraining(batch_size=25))
    where = r"round 1, client 0, step 1 \(1 samples\)"
    with pytest.raises(RunError, match=rf"{where}: .*more than 1 value.*smallest_batch = 2"):
        one.train(1, asked(0), Sent(sent))


def test_a_last_batch_that_is_too_small_is_left_out_of_every_epoch():
    assert len(SAMPLES[0]) == 26
    one, sent = backend(training=LocalTraining(batch_size=25, smallest_batch=2))
    (update,) = one.train(1, asked(0), Sent(sent))
    rows = [order.tolist() for order in one.work.epoch_orders(1, 0, SAMPLES[0], 3)]
    assert update.steps == 3
    assert [len(order) for order in rows] == [25] * 3
    assert rows == [order.tolist()[:25] for order in backend()[0].work.epoch_orders(1, 0, SAMPLES[0], 3)]
    kept = [LocalTraining(batch_size=4, smallest_batch=few).samples_of_epoch(7) for few in (1, 3, 4, 9)]
    assert kept == [7, 7, 4, 4]
    nobody = LocalTraining(batch_size=4, smallest_batch=9).samples_of_epoch
    assert (nobody(3), nobody(0), nobody(8)) == (0, 0, 8)


def test_training_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    one, sent = backend("fedvls")
    one.train(1, asked(0, 1), Sent(sent))
    assert torch.equal(before, torch.get_rng_state())
