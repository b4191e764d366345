"""Updates that are added up as they come: the bits of a matrix of all, in the memory of a few models."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import fedskew
from common import Told, built, start, task
from fedskew.engine import Federation, sums

TRAINING = {"rounds": 2, "participation": 0.6, "batch_size": 16, "lr": 0.05, "momentum": 0.5}
TASK = task(12, beta=0.3, **TRAINING) | {"target": {"mix": "uniform"}}


def bits(engine: dict[str, Any], method: str) -> tuple[Any, ...]:
    """Everything that a run leaves, seconds aside, and the last digits of the drift."""
    result = fedskew.simulate(TASK, method=method, engine=engine)
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


COUNTS = np.array([[3.0, 1.0], [0.0, 4.0], [8.0, 0.0]])


MOVES = {0: [1.0, 0.0], 1: [0.0, 1.0], 2: [2.0, 2.0]}


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
