"""The round, on backends and clients small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import fedskew
from fedskew import methods
from fedskew.engine import Assignment, Federation, Sent, Update
from fedskew.engine.sums import as_matrix
from fedskew.errors import ArgumentError
from fedskew.models import ModelState

COUNTS = np.array([[3.0, 1.0], [0.0, 4.0], [8.0, 0.0]])


@dataclass
class Told:
    """A backend whose clients move the model by what they are told."""

    moves: dict[int, list[float]]
    asked: list[list[int]] = field(default_factory=list)

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        clients = [task.client for task in cohort]
        self.asked.append(clients)
        buffers, integers = sent.model.buffers, sent.model.integers
        return [
            Update(
                client,
                torch.tensor(self.moves[client]),
                torch.tensor(self.moves[client]).norm(),
                buffers + 10.0 * client,
                integers + client,
                1,
                float(client),
            )
            for client in clients
        ]


MOVES = {0: [1.0, 0.0], 1: [0.0, 1.0], 2: [2.0, 2.0]}


def federation(
    preset: str, moves: dict[int, list[float]] = MOVES, counts=COUNTS, target=None, share: float = 1.0
) -> Federation:
    return Federation(methods.build(methods.expand({"preset": preset})), Told(moves), counts, target, share, seed=0)


def start(one: Federation):
    return one.start(ModelState(torch.tensor([10.0, 20.0]), torch.tensor([1.0]), torch.tensor([5])))


def by_client(record) -> dict[int, float]:
    return dict(zip(record.answered, record.weights, strict=True))


def test_fedavg_moves_the_model_by_the_mean_update_weighted_by_samples():
    one = federation("fedavg")
    state, record = one.run_round(start(one))
    # sizes 4, 4, 8: weights 1/4, 1/4, 1/2; change (1/4 + 1, 1/4 + 1); buffers 1 + (0 + 10/4 + 20/2)
    assert by_client(record) == {0: 0.25, 1: 0.25, 2: 0.5}
    torch.testing.assert_close(state.model.parameters, torch.tensor([11.25, 21.25]))
    torch.testing.assert_close(state.model.buffers, torch.tensor([13.5]))
    assert state.model.integers.tolist() == [7]  # counters: the largest
    assert record.loss == pytest.approx(0.25 * 1 + 0.5 * 2)
    assert record.ess == pytest.approx(16.0)
    assert record.ess_share == pytest.approx(1.0)
    # drift: (1 + 1 + 8) / |(3, 3)|^2
    assert record.drift == pytest.approx(10 / 18)
    # pooled labels 11 and 5: entropy of (11/16, 5/16)
    assert record.entropy == pytest.approx(0.8960382325345575)
    assert record.bytes_up == record.bytes_down == 3 * 20


def test_fedla_weighs_by_share_of_each_label():
    one = federation("fedla")
    _, record = one.run_round(start(one))
    # label 0: 3/11, 0, 8/11; label 1: 1/5, 4/5, 0; each sum halved
    expected = {0: (3 / 11 + 1 / 5) / 2, 1: 0.4, 2: 4 / 11}
    assert by_client(record) == pytest.approx(expected)


def test_fedpals_reaches_a_target_inside_the_hull():
    target = np.array([0.25, 0.75])
    one = federation("fedpals", target=target)
    _, record = one.run_round(start(one))
    weights = np.array([by_client(record)[client] for client in range(3)])
    marginals = COUNTS / COUNTS.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights @ marginals, target, atol=1e-7)
    assert record.target_distance == pytest.approx(0.0, abs=1e-12)


def test_a_weighting_towards_a_target_is_refused_without_one():
    with pytest.raises(ArgumentError, match="target"):
        federation("fedpals")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_client_is_left_out_and_recorded(bad):
    one = federation("fedavg", {**MOVES, 1: [bad, 0.0]})
    state, record = one.run_round(start(one))
    assert record.diverged == [1]
    assert sorted(record.answered) == [0, 2]
    torch.testing.assert_close(state.model.parameters, torch.tensor([10 + 5 / 3, 20 + 4 / 3]))


def test_finite_updates_that_lead_to_no_finite_model_all_count_as_diverged():
    one = federation("uniform", {0: [3e38, 0.0], 1: [0.0, 1.0], 2: [3e38, 0.0]})
    before = one.start(ModelState(torch.tensor([3e38, 0.0]), torch.tensor([1.0]), torch.tensor([5])))
    state, record = one.run_round(before)
    assert torch.equal(state.model.parameters, before.model.parameters)
    assert sorted(record.diverged) == [0, 1, 2]
    assert record.answered == record.weights == []


def test_a_round_goes_on_with_those_who_answered_in_whatever_order():
    one = federation("fedavg")
    cohort, state = one.select(start(one))
    sent, asked = one.instruct(state, cohort)
    replies = {update.client: update for update in one.backend.train(state.round, asked, sent)}
    following, outcome = one.aggregate(state, cohort, sent, [replies[2], replies[0]])
    record = one.record(state.round, cohort, outcome)
    assert (record.dropped, record.diverged, sorted(record.answered)) == ([1], [], [0, 2])
    assert record.answered == [client for client in record.cohort if client != 1]
    assert by_client(record) == pytest.approx({0: 1 / 3, 2: 2 / 3})
    torch.testing.assert_close(following.model.parameters, torch.tensor([10 + 5 / 3, 20 + 4 / 3]))


def test_what_clients_keep_may_hold_whole_numbers_and_must_hold_none_that_is_no_number():
    one = federation("fedavg")
    cohort, state = one.select(start(one))
    sent, asked = one.instruct(state, cohort)
    kept = [
        {"counted": torch.tensor(5)},
        {"own": torch.tensor([1.0, float("inf")])},
        {"own": torch.tensor([3e38, 3e38])},
    ]
    replies = [update._replace(state=kept[update.client]) for update in one.backend.train(state.round, asked, sent)]
    record = one.record(state.round, cohort, one.aggregate(state, cohort, sent, replies)[1])
    assert (record.diverged, sorted(record.answered)) == ([1], [0, 2])


def test_a_round_that_nobody_answers_leaves_the_model_as_it_was():
    one = federation("fedavg")
    cohort, state = one.select(start(one))
    sent, _ = one.instruct(state, cohort)
    following, outcome = one.aggregate(state, cohort, sent, [])
    assert torch.equal(following.model.parameters, state.model.parameters)
    assert one.record(state.round, cohort, outcome).dropped == cohort.ids.tolist()


def test_huge_updates_have_a_drift():
    _, record = (one := federation("uniform", {0: [1e30, 0.0], 1: [1e30, 0.0], 2: [1e30, 0.0]})).run_round(start(one))
    assert record.drift == pytest.approx(1 / 3)


def test_a_round_in_which_everyone_diverges_leaves_the_model_as_it_was():
    one = federation("fedavg", {client: [float("nan"), 0.0] for client in range(3)})
    before = start(one)
    state, record = one.run_round(before)
    assert torch.equal(state.model.parameters, before.model.parameters)
    assert state.round == 1
    assert record.answered == []
    assert record.weights == []
    assert record.loss is record.drift is record.ess is None


def test_clients_without_samples_train_but_weigh_nothing():
    counts = np.array([[3.0, 1.0], [0.0, 0.0], [8.0, 0.0]])
    one = federation("fedavg", counts=counts)
    _, record = one.run_round(start(one))
    assert by_client(record) == pytest.approx({0: 1 / 3, 1: 0.0, 2: 2 / 3})


@pytest.mark.parametrize(
    ("rows", "copied"),
    [
        (list(torch.arange(12.0).view(4, 3)[1:]), False),
        ([torch.arange(3.0), torch.arange(3.0) + 5], True),
        ([*torch.arange(12.0).view(4, 3)[[2, 0]], torch.zeros(3)], True),
        ([*torch.arange(12.0).view(4, 3)[::2]], True),
        (list(torch.arange(12.0).view(4, 3))[::-1], True),
        ([*torch.arange(12.0).view(3, 4).T], True),
    ],
    ids=["beside each other", "apart", "mixed", "with gaps", "backwards", "columns"],
)
def test_updates_beside_each_other_are_a_matrix_without_a_copy(rows, copied):
    matrix = as_matrix(rows)
    assert torch.equal(matrix, torch.stack(rows))
    assert (matrix.data_ptr() != rows[0].data_ptr()) == copied


def test_clients_with_quotas_are_weighed_by_their_quotas():
    # Seol and Kim: client 2 (8 samples) first, all of it; then label 1 is the rarest: client 1 gives its 4.
    one = Federation(
        methods.build(methods.expand({"selection": {"name": "seol_kim", "threshold": 0.0}})),
        Told(MOVES),
        COUNTS,
        None,
        1.0,
        0,
    )
    state = start(one)
    quotas = one.method.selection.select(one.method.selection.init(COUNTS), COUNTS, 3, np.random.default_rng(0))[
        1
    ].quotas
    _, record = one.run_round(state)
    np.testing.assert_allclose(record.weights, quotas.sum(axis=1) / quotas.sum())
    assert record.cohort[0] == 2


def test_one_participant_is_the_model_whatever_the_weighting():
    for preset in ("fedavg", "fedla", "uniform", "fedpals"):
        one = federation(preset, target=np.array([0.5, 0.5]), share=0.3)
        state, record = one.run_round(start(one))
        assert record.weights == pytest.approx([1.0])
        moved = torch.tensor([10.0, 20.0]) + torch.tensor(MOVES[record.answered[0]])
        torch.testing.assert_close(state.model.parameters, moved)


def test_the_cohort_is_the_share_rounded_down_and_at_least_one():
    for share, size in ((1.0, 3), (0.67, 2), (0.66, 1), (0.1, 1)):
        assert federation("fedavg", share=share).cohort_size == size


def test_methods_with_the_same_seed_see_the_same_cohorts():
    cohorts = []
    for preset in ("fedavg", "fedla"):
        one = federation(preset, share=0.67)
        state = start(one)
        for _ in range(5):
            state, _ = one.run_round(state)
        cohorts.append(one.backend.asked)
    assert cohorts[0] == cohorts[1]


class Placed(torch.nn.Module):
    """A network with a table of positions, which training leaves as it is, and batch norm, which it does not."""

    def __init__(self, num_classes, in_shape, placed):
        super().__init__()
        self.norm, self.layer = torch.nn.BatchNorm1d(64), torch.nn.Linear(64, num_classes)
        if placed:
            self.register_buffer("places", torch.linspace(0, 1, 64))
            self.register_buffer("visible", torch.ones(64, 64, dtype=torch.bool))

    def forward(self, x):
        x = self.norm(x.flatten(1))
        return self.layer(x + self.places if hasattr(self, "places") else x)


def test_buffers_that_never_change_do_not_travel():
    def sent(placed: bool) -> tuple[int, int]:
        model = {"name": Placed, "placed": placed}
        tree = {"data": {"name": "digits", "rows": 200}, "partition": {"rule": "iid", "clients": 3}, "model": model}
        summary = fedskew.simulate(tree | {"training": {"rounds": 1}}).summary
        return summary["bytes_up"], summary["bytes_down"]

    trained = 64 * 10 + 10 + 2 * 64  # the layer's, and batch norm's scale and shift
    assert sent(True) == sent(False) == (3 * (4 * (trained + 2 * 64) + 8),) * 2
