"""What methods keep between rounds: one state for each client that took part, and nothing lost to a kill."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedskew
from common import Told, built, records_of, start, stop_at, task
from fedskew.engine import Assignment, ClientStates, Federation, Sent, Update


def state(client: int, round: int) -> dict[str, torch.Tensor]:
    return {"kept": torch.full((25,), float(client)), "round": torch.tensor(round), "empty": torch.zeros(0)}


@dataclass
class Remembering(Told):
    """A backend whose clients keep their id and how often they took part."""

    def train_each(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> Iterator[Update]:
        states = {task.client: task.state for task in cohort}
        assert all(state["client"].item() == client for client, state in states.items() if state)
        self.also = lambda client: {
            "state": {
                "client": torch.tensor([float(client)]),
                "times": states[client]["times"] + 1 if states[client] else torch.tensor([1.0]),
            }
        }
        yield from super().train_each(round, cohort, sent)


def federation(clients: int, size: int, states: ClientStates) -> Federation:
    nowhere = dict.fromkeys(range(clients), (0.0, 0.0))
    return Federation(built(), Remembering(nowhere), np.ones((clients, 2)), None, size / clients, 0, clients=states)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_pool_of_100_000_clients_of_which_1_000_took_part_costs_1_000_states(tmp_path):
    states = ClientStates(tmp_path / "clients")
    one = federation(100_000, 250, states)
    now, seen = start(one), set()
    for _ in range(4):
        now, record = one.run_round(now)
        seen |= set(record.answered)
    assert 990 <= len(seen) <= 1000  # four draws of 250 hardly meet
    assert set(states.save()[:, 0].tolist()) == seen
    assert len(list((tmp_path / "clients").iterdir())) == len(seen)
    assert all(states.get(client) is None for client in set(range(2000)) - seen)


@pytest.mark.parametrize("memory", [0, 30, 2**30])
def test_each_client_gets_its_own_state_back_however_little_memory_there_is(tmp_path, memory):
    states = ClientStates(tmp_path, memory)
    one = federation(20, 7, states)
    now, times = start(one), np.zeros(20)
    for _ in range(12):
        now, record = one.run_round(now)
        times[record.answered] += 1
    for client in np.flatnonzero(times):
        assert states.get(client)["times"].item() == times[client]


def test_beyond_its_memory_the_longest_unused_are_in_files_and_read_back_the_same(tmp_path):
    states = ClientStates(tmp_path / "clients", memory=250)
    for client in range(5):
        states.put(client, 1, state(client, 1))
    assert names(tmp_path / "clients") == [f"{c}-1.safetensors" for c in range(3)]  # two of 108 bytes stay
    for client in range(5):
        torch.testing.assert_close(states.get(client), state(client, 1), rtol=0, atol=0)


def test_without_a_folder_files_are_aside_and_go_with_the_states(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    states = ClientStates(memory=0)
    for client in range(3):
        states.put(client, 1, state(client, 1))
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 2
    assert states.get(0)["kept"][0] == 0
    del states
    assert not folder.exists()


def test_a_client_that_keeps_nothing_has_no_state():
    states = ClientStates()
    states.put(3, 1, {})
    assert states.get(3) is None
    assert len(states.save()) == 0
    assert states.newest == 0


def test_going_back_to_a_checkpoint_forgets_what_came_later(tmp_path):
    states = ClientStates(tmp_path, memory=0)
    for client in (0, 1):
        states.put(client, 1, state(client, 1))
    kept = states.save()
    for client in (1, 2, 3):
        states.put(client, 2, state(client, 2))
    assert states.newest == 2
    again = ClientStates(tmp_path, memory=0)
    again.restore(kept)
    assert again.newest == 1
    assert again.get(2) is again.get(3) is None
    assert [again.get(client)["round"].item() for client in (0, 1)] == [1, 1]
    assert names(tmp_path) == ["0-1.safetensors", "1-1.safetensors"]


def test_replaced_files_go_once_a_checkpoint_stands(tmp_path):
    states = ClientStates(tmp_path)
    states.put(0, 1, state(0, 1))
    states.save()
    states.put(0, 2, state(0, 2))
    states.save()
    assert len(list(tmp_path.iterdir())) == 2
    states.drop_stale()
    assert names(tmp_path) == ["0-2.safetensors"]


TASK = task(8, beta=0.3, width=16, rounds=6, participation=0.4, epochs=1, batch_size=32, lr=0.05, momentum=0.9) | {
    "name": "states"
}

METHODS = {
    "scaffold": {"preset": "scaffold"},
    "fedgf": {"local_step": {"name": "fedgf", "threshold": 0.1, "window": 3}},
    "scaffold, moon, fpl, afl and fedexp": {
        "objective": {"name": "cross_entropy", "terms": [{"name": "moon"}, {"name": "fpl"}]},
        "local_step": {"name": "scaffold", "option": "one"},
        "weighting": {"name": "afl"},
        "server_update": {"name": "fedexp", "average_last_two": True},
    },
}
"""Everything that keeps something between rounds."""

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


class Killed(Exception):  # noqa: N818 (it stands for a process that ends here, not for an error)
    """Nothing is saved on the way out."""


def assert_same(one: Path, other: Path) -> None:
    assert records_of(one) == records_of(other)
    files = [{path.name: path.read_bytes() for path in folder.rglob("*-*.safetensors")} for folder in (one, other)]
    assert files[0] == files[1]
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.slow
@every_method
def test_a_run_killed_between_checkpoint_and_end_resumes_to_the_same_bytes(tmp_path, method):
    tree = {**TASK, "method": method, "output": {"checkpoint_every": 2}}
    whole = fedskew.simulate(tree, out=tmp_path / "whole")
    assert all(not record["diverged"] for record in whole.rounds)
    # Three times: in the round after a checkpoint, when a whole round is done, and by Ctrl-C.
    for last, error in ((3, Killed), (5, Killed), (6, KeyboardInterrupt)):
        with pytest.raises(error):
            fedskew.simulate(tree, out=tmp_path / "killed", resume=last > 3, progress=stop_at(last, error))
    resumed = fedskew.simulate(tree, out=tmp_path / "killed", resume=True)
    assert_same(resumed.folder, whole.folder)


class Interrupted(nn.Module):
    """A network during one of whose evaluations somebody presses Ctrl-C."""

    evaluations = 0
    press_at: int | None = None

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.head = nn.Linear(int(np.prod(in_shape)), num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            type(self).evaluations += 1
            if type(self).evaluations == type(self).press_at:
                raise KeyboardInterrupt
        return self.head(x.flatten(1)).clone()  # no chain of layers: each evaluation calls this


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4])
def test_an_interrupt_when_clients_are_ahead_of_the_server_resumes_to_the_same_bytes(tmp_path, every):
    tree = {**TASK, "model": Interrupted, "method": "scaffold", "output": {"checkpoint_every": every}}
    Interrupted.evaluations = 0
    whole = fedskew.simulate(tree, out=tmp_path / "whole")
    Interrupted.evaluations, Interrupted.press_at = 0, Interrupted.evaluations - 1
    with pytest.raises(KeyboardInterrupt):
        fedskew.simulate(tree, out=tmp_path / "stopped")
    Interrupted.press_at = None
    assert [*tmp_path.glob("stopped/*/checkpoint/clients/*")]  # it was training
    resumed = fedskew.simulate(tree, out=tmp_path / "stopped", resume=True)
    assert_same(resumed.folder, whole.folder)


@pytest.mark.slow
@every_method
@pytest.mark.parametrize(
    "odd",
    [
        {"training": {"participation": 0.01}},  # one participant
        {"training": {"epochs": 0}},  # no step
        {"data": {"name": "digits", "rows": 400}, "training": {"batch_size": 1, "lr": 0.005, "participation": 0.2}},
        {"training": {"batch_size": 10_000}},  # one batch
        {"partition": {"rule": "quantity", "clients": 10, "labels_per_client": 1}},
        {"conditions": {"dropout": 0.7, "dropout_rule": "bernoulli"}},  # nobody may answer
    ],
    ids=["one participant", "no step", "batches of one", "one batch", "single class", "nobody may answer"],
)
def test_degenerate_federations_train_and_stay_finite(method, odd):
    training = {**TASK["training"], "rounds": 3, "epochs": 1, **odd.get("training", {})}
    result = fedskew.simulate({**TASK, **odd, "training": training, "method": method})
    assert all(not record["diverged"] for record in result.rounds)
    assert all(value.isfinite().all() for value in result.model.state_dict().values())


@pytest.mark.slow
def test_models_and_traffic_are_what_the_methods_say(tmp_path):
    tree = {**TASK, "training": {**TASK["training"], "rounds": 2, "epochs": 1}}
    plain, scaffold, afl, fedgf = (
        fedskew.simulate({**tree, "method": METHODS.get(name, name)}, out=tmp_path)
        for name in ("fedavg", "scaffold", "afl", "fedgf")
    )
    model, cohort = plain.rounds[1]["bytes_up"] // 3, 3
    assert scaffold.rounds[1]["bytes_up"] == scaffold.rounds[1]["bytes_down"] == 2 * model * cohort
    assert afl.rounds[1]["bytes_up"] == (model + 4) * cohort
    assert fedgf.rounds[1]["bytes_down"] == (2 * model + 4) * cohort
    took_part = {client for record in scaffold.rounds for client in record["answered"]}
    files = list((scaffold.folder / "checkpoint" / "clients").iterdir())
    assert {int(path.name.split("-")[0]) for path in files} == took_part
    assert not list((afl.folder / "checkpoint").glob("clients/*"))


@pytest.mark.parametrize("memory", [0, 2**30])
def test_what_a_round_that_goes_on_stages_is_not_there_until_it_is_settled(tmp_path, memory):
    states = ClientStates(tmp_path, memory)
    states.put(0, 1, state(0, 1))
    lazy = states.of(0)
    for client in (0, 1, 2):
        states.stage(client, 2, state(client, 2))
    assert (lazy["round"].item(), states.of(1), len(states.save())) == (1, None, 1)
    states.settle(keep=False)
    assert (states.get(0)["round"].item(), states.get(1), states.newest) == (1, None, 1)
    states.drop_stale()
    assert [path.name for path in tmp_path.iterdir()] == ["0-1.safetensors"]
    states.stage(0, 3, state(0, 3))
    states.settle()
    assert {name: part.tolist() for name, part in lazy.items()} == {
        name: part.tolist() for name, part in state(0, 3).items()
    }
    states.save()
    states.drop_stale()
    assert [path.name for path in tmp_path.iterdir()] == ["0-3.safetensors"]
