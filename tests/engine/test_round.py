"""The round, on backends and clients small enough to work out by hand: floats, and sums in fixed point."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedskew
from common import Told, built, start, task, under_masks, weights_by_client
from fedskew import methods, weighting
from fedskew.engine import Federation, sums
from fedskew.engine.sums import FixedPoint, Floats, add_up, encode_update
from fedskew.engine.totals import as_matrix
from fedskew.errors import ArgumentError
from fedskew.hooks import Hooks
from fedskew.local_steps import SGD
from fedskew.sums import fixed_point

COUNTS = np.array([[3.0, 1.0], [0.0, 4.0], [8.0, 0.0]])
MOVES = {0: [1.0, 0.0], 1: [0.0, 1.0], 2: [2.0, 2.0]}


def federation(
    preset: str = "fedavg", moves=MOVES, counts=COUNTS, target=None, share: float = 1.0, momentum: float = 0.0, **others
) -> Federation:
    return Federation(built(preset, momentum), Told(moves), counts, target, share, seed=0, **others)


def test_fedavg_moves_the_model_by_the_mean_update_weighted_by_samples():
    one = federation()
    state, record = one.run_round(start(one))
    # sizes 4, 4, 8: weights 1/4, 1/4, 1/2; change (1/4 + 1, 1/4 + 1); buffers 1 + (0 + 10/4 + 20/2)
    assert weights_by_client(record) == {0: 0.25, 1: 0.25, 2: 0.5}
    assert state.model.parameters.tolist() == [11.25, 21.25]
    assert state.model.buffers.tolist() == [13.5]
    assert state.model.integers.tolist() == [7]  # counters: the largest
    assert record.loss == pytest.approx(0.25 * 1 + 0.5 * 2)
    assert (record.ess, record.ess_share) == pytest.approx((16.0, 1.0))
    # drift: (1 + 1 + 8) / |(3, 3)|^2
    assert record.drift == pytest.approx(10 / 18)
    # pooled labels 11 and 5: entropy of (11/16, 5/16)
    assert record.entropy == pytest.approx(0.8960382325345575)
    assert record.bytes_up == record.bytes_down == 3 * 20


def test_the_training_loss_is_that_of_the_clients_that_took_a_step():
    def loss(*clients):
        one = federation(moves={client: MOVES[client] for client in clients})
        cohort, state = one.select(start(one))
        sent, asked = one.instruct(state, cohort)
        told = one.backend.train(1, asked, sent)
        replies = [update._replace(steps=update.client % 2, loss=3.0 * (update.client % 2)) for update in told]
        return one.record(1, cohort, one.aggregate(state, cohort, sent, replies)[1]).loss

    assert loss(0, 1, 2) == pytest.approx(3.0)  # of client 1 alone
    assert loss(0, 2) is None


def test_fedla_weighs_by_share_of_each_label_and_fedpals_reaches_a_target_inside_the_hull():
    one = federation("fedla")
    # label 0: 3/11, 0, 8/11; label 1: 1/5, 4/5, 0; each sum halved
    expected = {0: (3 / 11 + 1 / 5) / 2, 1: 0.4, 2: 4 / 11}
    assert weights_by_client(one.run_round(start(one))[1]) == pytest.approx(expected)
    target = np.array([0.25, 0.75])
    one = federation("fedpals", target=target)
    _, record = one.run_round(start(one))
    weights = [weights_by_client(record)[client] for client in range(3)]
    np.testing.assert_allclose(weights @ (COUNTS / COUNTS.sum(axis=1, keepdims=True)), target, atol=1e-7)
    assert record.target_distance == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ArgumentError, match="target"):
        federation("fedpals")


@pytest.mark.parametrize("preset", ["fedla", "fedpals", "feddisco"])
def test_where_noise_left_no_label_count_above_0_the_weights_are_fedavgs(preset):
    held, told = np.array([[3.0, 1.0], [4.0, 8.0], [0.0, 0.0]]), np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]])
    one = federation(preset, counts=held, target=np.array([0.25, 0.75]), weighed=told)
    record = one.run_round(start(one))[1]
    assert weights_by_client(record) == {0: 0.25, 1: 0.75, 2: 0.0}
    assert record.fallback == "with noise all label counts of clients with samples are 0"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_client_is_left_out_and_recorded(bad):
    one = federation(moves={**MOVES, 1: [bad, 0.0]})
    state, record = one.run_round(start(one))
    assert record.diverged == [1]
    assert sorted(record.answered) == [0, 2]
    torch.testing.assert_close(state.model.parameters, torch.tensor([10 + 5 / 3, 20 + 4 / 3]))


@pytest.mark.parametrize(
    ("parameters", "moves"),
    [
        ((3e38, 0.0), {0: [3e38, 0.0], 1: [0.0, 1.0], 2: [3e38, 0.0]}),  # finite updates that lead to no finite model
        ((10.0, 20.0), {client: [float("nan"), 0.0] for client in range(3)}),
    ],
)
def test_a_round_in_which_everyone_diverges_leaves_the_model_as_it_was(parameters, moves):
    one = federation("uniform", moves)
    before = start(one, *parameters)
    state, record = one.run_round(before)
    assert torch.equal(state.model.parameters, before.model.parameters)
    assert (state.round, sorted(record.diverged)) == (1, [0, 1, 2])
    assert record.answered == record.weights == []
    assert record.loss is record.drift is record.ess is None


def test_a_round_goes_on_with_those_who_answered_in_whatever_order_or_leaves_the_model_as_it_was():
    one = federation()
    cohort, state = one.select(start(one))
    sent, asked = one.instruct(state, cohort)
    replies = {update.client: update for update in one.backend.train(state.round, asked, sent)}
    following, outcome = one.aggregate(state, cohort, sent, [replies[2], replies[0]])
    record = one.record(state.round, cohort, outcome)
    assert (record.dropped, record.diverged, sorted(record.answered)) == ([1], [], [0, 2])
    assert record.answered == [client for client in record.cohort if client != 1]
    assert weights_by_client(record) == pytest.approx({0: 1 / 3, 2: 2 / 3})
    torch.testing.assert_close(following.model.parameters, torch.tensor([10 + 5 / 3, 20 + 4 / 3]))
    following, outcome = one.aggregate(state, cohort, sent, [])
    assert torch.equal(following.model.parameters, state.model.parameters)
    assert one.record(state.round, cohort, outcome).dropped == cohort.ids.tolist()


def test_what_clients_keep_may_hold_whole_numbers_and_must_hold_none_that_is_no_number():
    kept = [{"counted": torch.tensor(5)}, {"own": torch.tensor([1.0, np.inf])}, {"own": torch.tensor([3e38, 3e38])}]
    one = dataclasses.replace(federation(), backend=Told(MOVES, also=lambda client: {"state": kept[client]}))
    _, record = one.run_round(start(one))
    assert (record.diverged, sorted(record.answered)) == ([1], [0, 2])


def test_huge_updates_have_a_drift():
    one = federation("uniform", {client: [1e30, 0.0] for client in range(3)})
    assert one.run_round(start(one))[1].drift == pytest.approx(1 / 3)


def test_clients_without_samples_train_but_weigh_nothing():
    one = federation(counts=np.array([[3.0, 1.0], [0.0, 0.0], [8.0, 0.0]]))
    assert weights_by_client(one.run_round(start(one))[1]) == pytest.approx({0: 1 / 3, 1: 0.0, 2: 2 / 3})


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
    method = built(selection={"name": "seol_kim", "threshold": 0.0})
    one = Federation(method, Told(MOVES), COUNTS, None, 1.0, 0)
    selection = one.method.selection
    quotas = selection.select(selection.init(COUNTS), COUNTS, 3, np.random.default_rng(0))[1].quotas
    _, record = one.run_round(start(one))
    np.testing.assert_allclose(record.weights, quotas.sum(axis=1) / quotas.sum())
    assert record.cohort[0] == 2


def test_one_participant_is_the_model_whatever_the_weighting():
    for preset in ("fedavg", "fedla", "uniform", "fedpals"):
        one = federation(preset, target=np.array([0.5, 0.5]), share=0.3)
        state, record = one.run_round(start(one))
        assert record.weights == pytest.approx([1.0])
        moved = torch.tensor([10.0, 20.0]) + torch.tensor(MOVES[record.answered[0]])
        torch.testing.assert_close(state.model.parameters, moved)


def test_the_cohort_is_the_share_rounded_down_and_at_least_one_and_the_same_for_all_methods_of_a_seed():
    assert [federation(share=share).cohort_size for share in (1.0, 0.67, 0.66, 0.1)] == [3, 2, 1, 1]
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
    tree = task(3, rounds=1) | {"data": {"name": "digits", "rows": 200}}
    both = [fedskew.simulate(tree, model={"name": Placed, "placed": placed}).summary for placed in (True, False)]
    trained = 64 * 10 + 10 + 2 * 64  # the layer's, and batch norm's scale and shift
    for summary in both:
        assert summary["bytes_up"] == summary["bytes_down"] == 3 * (4 * (trained + 2 * 64) + 8)


# Rounds whose updates are masked: sums over clients in fixed point, the same integers as on real sites.

FOUR = np.array([*COUNTS, [2.0, 2.0]])
FAR = MOVES | {3: [0.3, -9.5]}
TASK = task(8, beta=0.3, rounds=2, participation=0.5, epochs=2, batch_size=16, lr=0.05)
MASKED = {"updates": "masked"}


def masked(preset: str = "fedavg", silent: tuple[int, ...] = (), **others: Any) -> Federation:
    moves = {client: move for client, move in FAR.items() if client not in silent}
    return federation(preset, moves, FOUR, codec=FixedPoint(), **others)


def test_the_model_moves_by_the_clipped_weighted_mean() -> None:
    one = masked()
    state, record = one.run_round(start(one))
    # sizes 4, 4, 8, 4: weights .2, .2, .4, .2; the coordinate -9.5 is clipped to -8
    change = [0.2 * 1 + 0.4 * 2 + 0.2 * 0.3, 0.2 * 1 + 0.4 * 2 - 0.2 * 8]
    bound = fixed_point.UPDATES.error(4)
    assert np.abs(state.model.parameters.double().numpy() - [10 + change[0], 20 + change[1]]).max() < bound + 1e-6
    assert state.model.buffers.tolist() == [pytest.approx(1 + 0.2 * 10 + 0.4 * 20 + 0.2 * 30)]
    assert state.model.integers.tolist() == [7]  # counters: the mean of 5, 6, 7, 8, rounded up
    assert record.loss == pytest.approx(0.2 * 1 + 0.4 * 2 + 0.2 * 3)
    assert weights_by_client(record) == pytest.approx({0: 0.2, 1: 0.2, 2: 0.4, 3: 0.2})
    # What only one client's update would tell is in no record.
    assert (record.steps, record.steps_summed, record.drift) == ([], 1 + 2 + 3 + 4, None)


def test_those_that_replied_are_weighed_anew_as_at_real_sites() -> None:
    one = masked("fedla", silent=(1,))
    state, record = one.run_round(start(one))
    there = weighting.fedla(FOUR[[0, 2, 3]])
    assert weights_by_client(record) == pytest.approx(dict(zip((0, 2, 3), there, strict=True)))
    all_asked = weighting.fedla(FOUR)[[0, 2, 3]]
    assert not np.allclose(there, all_asked / all_asked.sum())
    moved = there @ [[1.0, 0.0], [2.0, 2.0], [0.3, -8.0]]
    assert state.model.parameters.tolist() == pytest.approx([10 + moved[0], 20 + moved[1]], abs=1e-5)
    assert record.dropped == [1]
    # 4, 8 and 4 samples: .25, .5, .25 without the limit.
    one = masked(silent=(1,), weight_limit=0.4)
    assert weights_by_client(one.run_round(start(one))[1]) == pytest.approx({0: 0.3, 2: 0.4, 3: 0.3})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"silent": (1,), "weight_limit": 0.3},
            "one of the 3 clients that replied has 0.333 of the weight, and training.weight_limit is 0.3",
        ),
        ({"silent": (1, 2)}, "a masked sum is over 3 clients at least, and there are 2"),
    ],
)
def test_where_a_sum_would_tell_too_much_the_model_stays_and_the_record_says_why(options, why) -> None:
    one = masked(**options)
    state, record = one.run_round(start(one))
    assert state.model.parameters.tolist() == [10.0, 20.0]
    assert (record.unmoved, record.weights, record.loss) == (why, [], None)


def test_the_report_of_rounds_that_did_not_move_the_model_is_written(tmp_path: Path) -> None:
    result = fedskew.simulate(TASK, out=tmp_path, engine=MASKED, conditions={"dropout": 0.5})
    assert all("there are 2" in record["unmoved"] for record in result.rounds[1:])
    assert next(tmp_path.glob("**/report.html")).stat().st_size > 0


@pytest.mark.parametrize("codec", [FixedPoint(), Floats()], ids=["masked", "plain"])
def test_a_diverged_client_sends_nothing_and_the_states_of_all_others_are_kept(codec) -> None:
    told = Told(FAR | {2: [float("nan"), 0.0]}, also=lambda client: {"state": {"of": torch.tensor([client])}})
    one = dataclasses.replace(masked(), backend=told, codec=codec)
    _, record = one.run_round(start(one))
    assert (record.diverged, record.answered) == ([2], [client for client in record.cohort if client != 2])
    kept = {client: one.clients.get(client) for client in range(4) if one.clients.get(client)}
    assert kept == {client: {"of": torch.tensor([client])} for client in (0, 1, 3)}


@pytest.mark.parametrize("preset", ["fedavg", "fednova", "fedexp", "fedacg"])
def test_a_simulated_sum_is_the_unmasked_one_to_the_last_integer(preset: str) -> None:
    pytest.importorskip("cryptography")
    one = masked(preset, silent=(3,), momentum=0.5)
    cohort, state = one.select(start(one))
    sent, tasks = one.instruct(state, cohort)
    members = cohort.only({*cohort.ids.tolist()} - {3})
    weights = one.codec.weigh(one, state, members)
    updates = {update.client: update for update in one.backend.train(1, tasks, sent)}
    shares = dict(zip(members.ids.tolist(), weights.values.tolist(), strict=True))
    encoded = {str(client): encode_update(one.method, update, shares[client], 3) for client, update in updates.items()}
    opened = under_masks(encoded, absent=["3"])
    added = add_up(encoded.values())
    assert {name: array.tolist() for name, array in opened.items()} == {
        name: array.tolist() for name, array in added.items()
    }

    by_sites, _ = one.move(state, cohort, sent, one.codec.opened(state.model, members, weights, opened))
    simulated, _ = one.aggregate(state, cohort, sent, list(updates.values()))
    assert torch.equal(by_sites.model.parameters, simulated.model.parameters)
    assert torch.equal(by_sites.model.buffers, simulated.model.buffers)


@pytest.mark.parametrize("preset", ["fedpals", "scaffold", "fednova", "fedexp", "fedacg"])
def test_a_run_with_masked_updates_stays_beside_the_plain_one(preset: str) -> None:
    tree = {**TASK, "method": preset, "target": {"mix": "uniform"}}
    both = [fedskew.simulate(tree, engine={"updates": updates}) for updates in ("plain", "masked")]
    one, other = (torch.nn.utils.parameters_to_vector(run.model.parameters()) for run in both)
    # Two rounds of at most 4 * 2**-25 a coordinate, times up to about 30 where FedNova multiplies it by its steps.
    assert 0 < (one - other).abs().max() < 1e-5
    accuracies = [run.rounds[-1]["evaluation"]["accuracy"] for run in both]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.01)


def test_a_component_of_ones_own_that_reads_replies_is_refused_until_it_says_that_it_adds_up() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(Hooks, SGD):
        def end_round(self, state: Any, end: Any) -> dict[str, torch.Tensor]:
            return {}

    own = dataclasses.replace(built(), local_step=Own())
    assert "does not declare adds_up" in (methods.masks_refused(own) or "")
    Own.adds_up = True  # type: ignore[attr-defined]
    assert methods.masks_refused(own) is None


# Updates that are added up as they come: the bits of a matrix of all, in the memory of a few models.


TRAINING = {"rounds": 2, "participation": 0.6, "batch_size": 16, "lr": 0.05, "momentum": 0.5}
TWELVE = task(12, beta=0.3, **TRAINING) | {"target": {"mix": "uniform"}}


def bits(engine: dict[str, Any], method: str) -> tuple[Any, ...]:
    """Everything that a run leaves, seconds aside, and the last digits of the drift."""
    result = fedskew.simulate(TWELVE, method=method, engine=engine)
    records = [{**record, "seconds": None, "drift": f"{record['drift'] or 0:.5f}"} for record in result.rounds]
    return records, [value.numpy().tobytes() for value in result.model.state_dict().values()]


@pytest.mark.parametrize("method", [*["fedpals+fedprox", "scaffold", "fednova", "fedexp", "feddyn"], "fedacg+moon"])
def test_it_has_the_bits_of_a_matrix(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"backend": "sequential"}
    matrix = bits(alone, method)
    monkeypatch.setattr(sums, "MATRIX", -1)
    monkeypatch.setattr("fedskew.engine.SequentialBackend.train", None)
    assert bits(alone, method) == matrix


@pytest.mark.slow
def test_several_processes_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = bits({"backend": "sequential"}, "scaffold")
    monkeypatch.setattr(sums, "MATRIX", -1)
    monkeypatch.setattr("fedskew.engine.workers.AT_ONCE", 1)
    assert bits({"backend": "processes", "processes": 2}, "scaffold") == matrix


def beside(client: int) -> dict[str, Any]:
    return {"state": {"own": torch.tensor([client])}, "reply": {"said": torch.tensor([client + 1.0])}}


def played(moves: dict[int, list[float]], matrix: int, monkeypatch: pytest.MonkeyPatch, counts: Any = COUNTS) -> Any:
    """The model after a round, its record, the clients' states, and who was asked."""
    monkeypatch.setattr(sums, "MATRIX", matrix)
    one = Federation(built("fedla"), Told(moves, also=beside), counts, None, 1.0, seed=0)
    state, record = one.run_round(start(one))
    record.seconds = 0.0
    kept = [one.clients.get(client) for client in range(3)]
    return [part.tolist() for part in state.model], record, kept, one.backend.asked


@pytest.mark.parametrize("bad", [[float("nan"), 0.0], [0.0, float("inf")]])
@pytest.mark.parametrize("diverged", [[1], [0, 2], [0, 1, 2]])
def test_where_a_client_diverges_the_others_train_again_with_their_weights(
    bad: list[float], diverged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = MOVES | dict.fromkeys(diverged, bad)
    *found, asked = played(moves, -1, monkeypatch)
    *matrix, _ = played(moves, 2**20, monkeypatch)
    assert found == matrix
    assert sorted(found[1].diverged) == diverged
    assert [sorted(clients) for clients in asked] == [[0, 1, 2], sorted({0, 1, 2} - set(diverged))]


def test_clients_that_hold_nothing_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert played(MOVES, -1, monkeypatch, 0 * COUNTS) == played(MOVES, 2**20, monkeypatch, 0 * COUNTS)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the largest resident memory is in kB there")
def test_memory_does_not_grow_with_the_cohort() -> None:
    script = """
import resource, torch
import fedskew
from fedskew.data import Dataset
from fedskew.engine import sums
sums.MATRIX = 0
for clients in (8, 8, 40):
    x, y = torch.randn(clients, 1000), torch.arange(clients) % 10
    fedskew.simulate(
        data=Dataset("wide", x, y, x, y, tuple("abcdefghij")), model={"name": "mlp3", "width": 1000},
        partition={"rule": "iid", "clients": clients}, training={"rounds": 1}, method="fedavg",
        engine={"backend": "sequential"},
    )
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    _, few, many = map(int, said.split())
    assert many - few < 20_000  # 32 more updates are 250 MB
