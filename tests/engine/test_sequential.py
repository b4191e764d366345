"""One client after another, against loops written by hand."""

import copy
import dataclasses
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from federates import CLASSES, FEATURES, backends, clients
from torch import nn
from torch.nn import functional

from common import built
from fedskew.engine import Assignment, LocalTraining, Sent, SequentialBackend
from fedskew.errors import RunError
from fedskew.local_steps import SGD
from fedskew.models import build
from fedskew.randomness import Purpose, generator

DATA = clients()
INPUTS, TARGETS, SAMPLES = DATA.inputs, DATA.targets, DATA.rows
TRAINING = {"lr": 0.1, "lr_decay": 0.5, "momentum": 0.9, "weight_decay": 0.01, "seed": 5}


def logistic() -> nn.Module:
    return build("logistic", CLASSES, (FEATURES,), generator=torch.Generator().manual_seed(0))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def alone(preset: str = "fedavg", module: nn.Module | None = None, **parts) -> tuple[SequentialBackend, Sent]:
    both = backends(built(preset), module or logistic(), **TRAINING | parts)
    return both.alone, both.sent


def asked(*ids: int, epochs=3, **parts) -> list[Assignment]:
    return [Assignment(client, epochs, **parts) for client in ids]


def batches(client: int, round: int, epochs: int = 3) -> list[np.ndarray]:
    rng, rows = generator(5, Purpose.SHUFFLE, round, client), SAMPLES[client]
    return [batch for _ in range(epochs) for batch in np.split(rng.permutation(rows), range(8, len(rows), 8))]


@pytest.mark.parametrize("round", [1, 3])
@pytest.mark.parametrize("client", [0, 5])
def test_local_training_takes_the_steps_of_a_hand_written_loop(client, round):
    expected = logistic().train()
    optimiser = torch.optim.SGD(expected.parameters(), lr=0.1 * 0.5 ** (round - 1), momentum=0.9, weight_decay=0.01)
    for batch in batches(client, round):
        optimiser.zero_grad()
        functional.cross_entropy(expected(INPUTS[batch]), TARGETS[batch]).backward()
        optimiser.step()
    one, sent = alone()
    (update,) = one.train(round, asked(client), sent)
    one.model.write(sent.model.parameters + update.change)
    torch.testing.assert_close(dict(one.model.state_dict()), dict(expected.state_dict()))
    assert update.steps == 3 * -(-len(SAMPLES[client]) // 8)


@pytest.mark.parametrize(("threads", "before", "within"), [(1, False, True), (1, True, True), (2, False, False)])
def test_denormal_numbers_are_0_while_clients_train_with_one_thread(monkeypatch, threads, before, within):
    def flushes() -> bool:
        return float(torch.full((), 1e-38) * 0.1) == 0

    found = []
    monkeypatch.setattr(SGD, "direction", lambda self, gradient, *_: found.append(flushes()) or gradient)
    both, theirs = backends(built(), logistic(), **TRAINING), torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(before)
    try:
        for backend in (both.alone, both.together):
            backend.train(1, asked(0, 5, epochs=1), both.sent)
            assert flushes() is before
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(theirs)
    assert set(found) == {within}


def test_what_a_client_sends_batch_norm_statistics_too_does_not_depend_on_who_trained_before_it():
    one, sent = alone("fedvls", normed())
    first, second = one.train(2, asked(0, 5), sent)
    assert not torch.equal(first.buffers, second.buffers)
    for backend in (one, alone("fedvls", normed())[0]):
        (again,) = backend.train(2, asked(5), sent)
        assert torch.equal(again.change, second.change)
        assert torch.equal(again.buffers, second.buffers)


def test_a_client_with_a_quota_trains_on_so_many_samples_of_each_class():
    one, sent = alone(batch_size=100, momentum=0.0, weight_decay=0.0, lr_decay=1.0)
    quota = np.array([3, 0, 2, 0])
    (task,) = asked(0, epochs=1, quota=quota)
    (update,) = one.train(4, [task], sent)
    rows = one.work.samples(4, task).rows
    assert set(rows) <= set(SAMPLES[0])
    assert np.bincount(TARGETS[torch.from_numpy(rows)].numpy(), minlength=4).tolist() == quota.tolist()
    # One full-batch step: lr 0.1 times the mean gradient over these rows.
    module = logistic()
    functional.cross_entropy(module(INPUTS[rows]), TARGETS[rows]).backward()
    torch.testing.assert_close(update.change, -0.1 * torch.cat([p.grad.flatten() for p in module.parameters()]))
    assert not np.array_equal(rows, one.work.samples(5, task).rows)


def test_without_samples_or_epochs_the_model_comes_back_unchanged():
    one, sent = alone()
    (update,) = one.train(1, asked(3), sent)
    assert (update.steps, update.change.any(), update.loss) == (0, False, 0.0)
    assert not one.train(1, asked(0, epochs=0), sent)[0].change.any()


@pytest.mark.parametrize("preset", ["fedlc", "fedvls", "fedprox", "fedlc+fedvls", "fedprox+fedvls"])
def test_every_objective_and_step_trains_and_stays_finite_with_vacant_classes(preset):
    one, sent = alone(preset)
    assert (one.work.data.counts[6] == 0).sum() == 3
    (update,) = one.train(1, asked(6), sent)
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
    module, term = normed(), KeepsTeacher([])
    one, sent = alone(module=copy.deepcopy(module), teacher_train_mode=left, terms=((1.0, term),))
    one.train(1, asked(5), sent)
    for batch, said in zip(batches(5, 1), term.said, strict=True):
        torch.testing.assert_close(said, copy.deepcopy(module).train(left)(INPUTS[batch]))


Unaveraged = partial(nn.BatchNorm1d, track_running_stats=False)


class Centred(nn.Sequential):
    """A network whose outputs depend on the batch, in inference too."""

    def __init__(self):
        super().__init__(nn.Linear(FEATURES, CLASSES))

    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    ("parts", "room", "epochs"),
    [
        ({}, 10_000, 1),
        ({}, 10, 3),
        ({"smallest_batch": 8}, 10_000, 3),
        ({"teacher_train_mode": True}, 10_000, 3),
        ({"module": nn.Sequential(logistic(), Unaveraged(CLASSES)), "batch_size": 9}, 10_000, 3),
        ({"module": Centred()}, 10_000, 3),
    ],
    ids=["kept", "no room", "other samples in each epoch", "left", "batch norm without averages", "a network's own"],
)
def test_what_the_sent_model_says_of_a_sample_is_kept_for_further_epochs(monkeypatch, parts, room, epochs):
    one, sent = alone("fedntd", **parts)
    one._teacher = teacher = Mock(wraps=one._teacher, by_sample=one._teacher.by_sample)
    monkeypatch.setattr("fedskew.engine._sequential.KEPT_NUMBERS", room)
    (update,) = one.train(1, asked(2), sent)
    assert teacher.call_count == epochs * update.steps // 3


def test_momentum_may_persist_between_participations():
    one, sent = alone(keep_optimizer=True, batch_size=100, weight_decay=0.0)
    (first,) = one.train(1, asked(0, epochs=1), sent)
    (second,) = one.train(1, asked(0, epochs=1, state=first.state), sent)
    # One full-batch step from the same model: b' = 0.9 b + g, so the second moves 0.1 * 0.9 b further.
    torch.testing.assert_close(second.change - first.change, -0.1 * 0.9 * first.state["training.momentum"])
    (fresh,) = one.train(1, asked(0, epochs=1), sent)
    torch.testing.assert_close(fresh.change, first.change)


def test_an_observer_sees_each_client_after_its_own_training():
    one, sent = alone(
        observe=lambda round, client, module: (round, client, nn.utils.parameters_to_vector(module.parameters()))
    )
    updates = one.train(3, asked(5, 0), sent)
    assert [update.observed[:2] for update in updates] == [(3, 5), (3, 0)]
    for update in updates:
        torch.testing.assert_close(update.observed[2] - sent.model.parameters, update.change)


def test_an_error_inside_local_training_names_round_client_and_step():
    one, sent = alone(module=normed(), batch_size=39)
    where = r"round 1, client 0, step 1 \(1 sample\)"
    with pytest.raises(RunError, match=rf"{where}: .*more than 1 value.*smallest_batch = 2"):
        one.train(1, asked(0), sent)


def test_a_last_batch_that_is_too_small_is_left_out_of_every_epoch():
    one, sent = alone(batch_size=39, smallest_batch=2)
    (update,) = one.train(1, asked(0), sent)
    of_client = DATA.of(0), SAMPLES[0]
    rows, whole = ([list(own) for own in of.work.epoch_orders(1, 0, *of_client, 3)] for of in (one, alone()[0]))
    assert update.steps == 3
    assert rows == [order[:39] for order in whole]
    kept = [LocalTraining(batch_size=4, smallest_batch=few).samples_of_epoch(7) for few in (1, 3, 4, 9)]
    assert kept == [7, 7, 4, 4]
    nobody = LocalTraining(batch_size=4, smallest_batch=9).samples_of_epoch
    assert (nobody(3), nobody(0), nobody(8)) == (0, 0, 8)
