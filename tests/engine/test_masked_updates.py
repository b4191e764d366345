"""Rounds whose updates are masked: sums over clients in fixed point, the same integers as on real sites."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fedskew
from fedskew import methods, sums, weighting
from fedskew.engine import Assignment, Federation, Sent, Update
from fedskew.engine.sums import FixedPoint, Floats, add_up, encode_update
from fedskew.errors import ArgumentError, ComponentError, ConfigError
from fedskew.models import ModelState
from fedskew.sums import fixed_point

COUNTS = np.array([[3.0, 1.0], [0.0, 4.0], [8.0, 0.0], [2.0, 2.0]])
MOVES = {0: [1.0, 0.0], 1: [0.0, 1.0], 2: [2.0, 2.0], 3: [0.3, -9.5]}

TASK = {
    "data": "digits",
    "partition": {"rule": "dirichlet_by_class", "clients": 8, "beta": 0.3, "min_size": 1},
    "model": "logistic",
    "training": {"rounds": 2, "participation": 0.5, "epochs": 2, "batch_size": 16, "lr": 0.05},
}


@dataclass
class Told:
    """A backend whose clients move the model by what they are told; some don't reply."""

    moves: dict[int, list[float]]
    silent: tuple[int, ...] = ()

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        return [
            Update(
                client=task.client,
                change=torch.tensor(self.moves[task.client]),
                norm=torch.tensor(self.moves[task.client]).norm(),
                buffers=sent.model.buffers + 10.0 * task.client,
                integers=sent.model.integers + task.client,
                steps=1 + task.client,
                loss=float(task.client),
            )
            for task in cohort
            if task.client not in self.silent
        ]


def federation(preset: str = "fedavg", silent: tuple[int, ...] = (), **others: Any) -> Federation:
    method = methods.build(methods.expand({"preset": preset}))
    return Federation(method, Told(MOVES, silent), COUNTS, None, 1.0, seed=0, codec=FixedPoint(), **others)


def start(one: Federation) -> Any:
    return one.start(ModelState(torch.tensor([10.0, 20.0]), torch.tensor([1.0]), torch.tensor([5])))


def test_the_model_moves_by_the_clipped_weighted_mean() -> None:
    one = federation()
    state, record = one.run_round(start(one))
    # sizes 4, 4, 8, 4: weights .2, .2, .4, .2; the coordinate -9.5 is clipped to -8
    change = [0.2 * 1 + 0.4 * 2 + 0.2 * 0.3, 0.2 * 1 + 0.4 * 2 - 0.2 * 8]
    bound = fixed_point.UPDATES.error(4)
    assert np.abs(state.model.parameters.double().numpy() - [10 + change[0], 20 + change[1]]).max() < bound + 1e-6
    assert state.model.buffers.tolist() == [pytest.approx(1 + 0.2 * 10 + 0.4 * 20 + 0.2 * 30)]
    assert state.model.integers.tolist() == [7]  # counters: the mean of 5, 6, 7, 8, rounded up
    assert record.loss == pytest.approx(0.2 * 1 + 0.4 * 2 + 0.2 * 3)
    assert dict(zip(record.answered, record.weights, strict=True)) == pytest.approx({0: 0.2, 1: 0.2, 2: 0.4, 3: 0.2})
    # What only one client's update would tell is in no record.
    assert (record.steps, record.steps_summed, record.drift) == ([], 1 + 2 + 3 + 4, None)


def test_those_that_replied_are_weighed_anew_as_at_real_sites() -> None:
    one = federation("fedla", silent=(1,))
    state, record = one.run_round(start(one))
    there = weighting.fedla(COUNTS[[0, 2, 3]])
    assert dict(zip(record.answered, record.weights, strict=True)) == pytest.approx(
        dict(zip((0, 2, 3), there, strict=True))
    )
    all_asked = weighting.fedla(COUNTS)[[0, 2, 3]]
    assert not np.allclose(there, all_asked / all_asked.sum())
    moved = there @ [[1.0, 0.0], [2.0, 2.0], [0.3, -8.0]]
    assert state.model.parameters.tolist() == pytest.approx([10 + moved[0], 20 + moved[1]], abs=1e-5)
    assert record.dropped == [1]


def test_the_weight_limit_holds_for_those_that_replied() -> None:
    one = federation(silent=(1,), weight_limit=0.4)  # 4, 8 and 4 samples: .25, .5, .25 without the limit
    _, record = one.run_round(start(one))
    assert dict(zip(record.answered, record.weights, strict=True)) == pytest.approx({0: 0.3, 2: 0.4, 3: 0.3})
    few = federation(silent=(1,), weight_limit=0.3)
    state, record = few.run_round(start(few))
    assert record.unmoved == (
        "one of the 3 clients that replied has 0.333 of the weight, and training.weight_limit is 0.3"
    )
    assert state.model.parameters.tolist() == [10.0, 20.0]


def test_with_fewer_than_three_replies_the_model_stays() -> None:
    one = federation(silent=(1, 2))
    state, record = one.run_round(start(one))
    assert state.model.parameters.tolist() == [10.0, 20.0]
    assert record.unmoved == "a masked sum is over 3 clients at least, and there are 2"
    assert (record.weights, record.loss) == ([], None)


def test_the_report_of_rounds_that_did_not_move_the_model_is_written(tmp_path: Path) -> None:
    result = fedskew.simulate(TASK, out=tmp_path, engine={"updates": "masked"}, conditions={"dropout": 0.5})
    assert all("there are 2" in record["unmoved"] for record in result.rounds[1:])
    assert next(tmp_path.glob("**/report.html")).stat().st_size > 0


def test_a_diverged_client_sends_nothing() -> None:
    one = federation()
    one.backend.moves = MOVES | {2: [float("nan"), 0.0]}
    _, record = one.run_round(start(one))
    assert (record.diverged, record.answered) == ([2], [client for client in record.cohort if client != 2])


@pytest.mark.parametrize("masked", [True, False])
def test_the_states_of_all_but_the_diverged_client_are_kept(masked: bool) -> None:
    @dataclass
    class Keeping(Told):
        def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
            return [
                one._replace(state={"of": torch.tensor([one.client])}) for one in super().train(round, cohort, sent)
            ]

    one = federation()
    first, *others = one.select(start(one))[0].ids.tolist()
    told = Keeping(MOVES | {first: [float("nan"), 0.0]})
    one = dataclasses.replace(one, backend=told, codec=FixedPoint() if masked else Floats())

    one.run_round(start(one))

    assert {client: one.clients.get(client) for client in range(4) if one.clients.get(client)} == {
        client: {"of": torch.tensor([client])} for client in others
    }


@pytest.mark.parametrize("preset", ["fedavg", "fednova", "fedexp", "fedacg"])
def test_a_simulated_sum_is_the_unmasked_one_to_the_last_integer(preset: str) -> None:
    pytest.importorskip("cryptography")
    method = methods.build(methods.expand({"preset": preset}), momentum=0.5)
    one = Federation(method, Told(MOVES, silent=(3,)), COUNTS, None, 1.0, seed=0, codec=FixedPoint())
    cohort, state = one.select(start(one))
    sent, tasks = one.instruct(state, cohort)
    members = cohort.take(cohort.ids != 3)
    weights = one.codec.weigh(one, state, members)
    updates = {update.client: update for update in one.backend.train(1, tasks, sent)}
    keys = {str(client): sums.Key.generate() for client in cohort.ids.tolist()}
    peers = {name: key.public for name, key in keys.items()}
    by_client = dict(zip(members.ids.tolist(), weights.values.tolist(), strict=True))
    encoded = {str(client): encode_update(method, update, by_client[client], 3) for client, update in updates.items()}
    context = sums.SumContext("run", 1, 1, "train", tuple(encoded))
    sealed = {name: sums.mask(arrays, keys[name], peers, context) for name, arrays in encoded.items()}
    openings = {name: opening for name, (_, opening) in sealed.items()}
    opened = sums.unmask({name: masked for name, (masked, _) in sealed.items()}, openings, context)
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
    task = {**TASK, "method": preset, "target": {"mix": "uniform"}}
    plain, masked = (fedskew.simulate(task, engine={"updates": updates}) for updates in ("plain", "masked"))
    one, other = (torch.cat([part.flatten() for part in run.model.state_dict().values()]) for run in (plain, masked))
    # Two rounds of at most 4 * 2**-25 a coordinate, times up to about 30 where FedNova multiplies it by its steps.
    assert 0 < (one - other).abs().max() < 1e-5
    assert plain.rounds[-1]["evaluation"]["accuracy"] == pytest.approx(
        masked.rounds[-1]["evaluation"]["accuracy"], abs=0.01
    )


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("afl", "afl reads what each client returned by itself"),
        ("fpl", "fpl reads what each client returned by itself"),
        ("fednh", "fednh reads what each client returned by itself"),
        ("fedgf", "fedgf reads what each client returned by itself"),
        ("fedconcat", "FedConcat trains a model for each cluster"),
        ("feddyn", "feddyn reads each client's update .* take the preset scaffold or fedavg"),
        ({"aggregation": {"name": "krum"}}, "krum works on each client's update"),
        ({"aggregation": {"name": "geometric_median"}}, "geometric_median works on each client's update"),
        ({"aggregation": {"name": "norm_clipping"}}, "norm_clipping works on each client's update"),
    ],
)
def test_what_needs_single_updates_is_refused_in_one_line(method: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.updates: {why}.*plain") as found:
        fedskew.simulate(TASK, method=method, engine={"updates": "masked"})
    assert "\n" not in str(found.value)


def test_too_small_a_cohort_is_refused() -> None:
    with pytest.raises(ArgumentError, match="updates are masked: a sum over 2 .* let 3 clients or more take part"):
        fedskew.simulate(TASK, engine={"updates": "masked"}, training={**TASK["training"], "participation": 0.25})


def test_a_component_of_ones_own_that_reads_replies_is_refused_until_it_says_that_it_adds_up() -> None:
    from dataclasses import dataclass as frozen_dataclass

    from fedskew.hooks import Hooks
    from fedskew.local_steps import SGD

    @frozen_dataclass(frozen=True)
    class Own(Hooks, SGD):
        def end_round(self, state: Any, end: Any) -> dict[str, torch.Tensor]:
            return {}

    method = methods.build(methods.expand({"preset": "fedavg"}))
    own = methods.Method(**{**vars(method), "local_step": Own()})
    assert "does not declare adds_up" in (methods.masks_refused(own) or "")
    Own.adds_up = True  # type: ignore[attr-defined]
    assert methods.masks_refused(own) is None


@dataclass(frozen=True)
class Shared:
    """A server update of a user's own, whose functions for sums return what they are told."""

    shared: Any = (1.0, {"one": 1.0})
    moved: Any = None

    reads_each_update: ClassVar[bool] = True

    def init(self, parameters: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def share(self, update: torch.Tensor, steps: int, weight: float) -> Any:
        return self.shared(update) if callable(self.shared) else self.shared

    def move(self, state: Any, parameters: Any, change: Any, extras: Any) -> Any:
        return self.moved


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (Shared((1.5, {})), r"share\(\) must return \(a factor from 0 to 1, finite numbers by name\), not \(1.5, {}\)"),
        (Shared((1.0, {"one": math.nan})), r"share\(\) must return .*nan"),
        (Shared(0.5), r"share\(\) must return .*not 0.5"),
        (Shared(lambda update: 1 / 0), r"share\(\) failed: ZeroDivisionError"),
        (Shared(), r"move\(\) must return \(next model, next state\)"),
    ],
)
def test_what_a_server_update_of_ones_own_gives_for_sums_is_checked(update: Shared, message: str) -> None:
    method = dataclasses.replace(methods.build(methods.expand({"preset": "fedavg"})), server_update=update)
    one = Federation(method, Told(MOVES), COUNTS, None, 1.0, seed=0, codec=FixedPoint())
    state = start(one)
    with pytest.raises(ComponentError, match=f".*server_update test_masked_updates:Shared: {message}"):
        one.run_round(state)
