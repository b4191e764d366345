"""A cohort at once, held against one client after another."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from covering import Cell, covering_set
from fedskew import methods
from fedskew.engine import (
    Cohort,
    Conditions,
    Divided,
    Federation,
    LocalTraining,
    LocalWork,
    Sequential,
    hooked,
)
from fedskew.methods import Method
from fedskew.models import FlatModel, swap_dropout
from fedskew.models._network import Network

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


def data() -> Divided:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, CLASSES, ROWS)
    inputs = rng.normal(size=(ROWS, FEATURES)) + 2 * np.eye(CLASSES, FEATURES)[targets]
    rows = np.split(rng.permutation(ROWS), np.cumsum(SIZES)[:-1])
    counts = np.stack([np.bincount(targets[own], minlength=CLASSES) for own in rows]).astype(float)
    return Divided(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets), rows, counts)


def federations(method: Method, network: type[Network] = Plain, chunk: int | None = None, **training):
    """The same federation on two backends, and its untrained model."""
    torch.manual_seed(3)
    module = swap_dropout(network())
    drawn = torch.Generator().manual_seed(1)
    for filler in hooked(method).values():
        module = filler.adapt(module, drawn)
    divided = data()
    settings = LocalTraining(**{"batch_size": 8, "lr": 0.05, "momentum": 0.5, "weight_decay": 0.01} | training)
    work = LocalWork(divided, method.objective, method.local_step, settings, seed=4, hooks=hooked(method))
    backends = [make(FlatModel(copy.deepcopy(module)), work) for make in (Sequential, Cohort)]
    backends[1].chunk = chunk
    conditions = Conditions(dropout=0.2, stragglers=0.5)
    whole = [
        Federation(method, one, divided.counts, TARGET, 0.5, seed=4, epochs=2, conditions=conditions)
        for one in backends
    ]
    return (*whole, backends[0].model.read_state())


def play(federation: Federation, model, rounds: int):
    state, records = federation.start(model), []
    for _ in range(rounds):
        state, record = federation.play(state)
        records.append(record)
    return state, records


def assert_close_runs(one, other) -> None:
    (state, records), (expected, known) = one, other
    for part, other_part in zip(state.model, expected.model, strict=True):
        torch.testing.assert_close(part, other_part, **CLOSE)
    assert state.hooks.keys() == expected.hooks.keys()
    for name, kept in expected.hooks.items():
        for key, value in kept.items():
            torch.testing.assert_close(state.hooks[name][key], value, **CLOSE)
    for record, expected_record in zip(records, known, strict=True):
        for key in ("cohort", "answered", "dropped", "diverged", "steps", "bytes_up", "bytes_down"):
            assert record[key] == expected_record[key]
        np.testing.assert_allclose(record["weights"], expected_record["weights"], rtol=1e-3, atol=1e-5)
        assert record["loss"] == pytest.approx(expected_record["loss"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("cell", covering_set(), ids=str)
def test_every_accepted_pair_of_fillers_trains_as_one_client_after_another(cell: Cell):
    alone, together, model = federations(methods.build(methods.expand(cell.tables()), 0.5))
    assert_close_runs(play(together, model, 2), play(alone, model, 2))
