"""Eight clients, networks for them, and what trains them, without rounds."""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from fedskew.engine import LocalTraining, LocalWork, PartitionedData, Sent, SequentialBackend
from fedskew.engine.cohort import CohortBackend
from fedskew.engine.contracts import adapting, hooked
from fedskew.methods import Method
from fedskew.models import Dropout, FlatModel, Network

ROWS, FEATURES, CLASSES = 120, 5, 4
SIZES = (40, 3, 17, 0, 8, 24, 1, 27)


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


class Straight(Network):
    """A chain of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return relu(self.fc(x))


def network(kind: type[Network] = Plain) -> Network:
    torch.manual_seed(3)
    return Dropout.swap(kind())


def clients(*shape: int) -> PartitionedData:
    """Separable rows of so many clients; where a shape is given, of noise."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, CLASSES, ROWS)
    inputs = rng.normal(size=(ROWS, FEATURES)) + 2 * np.eye(CLASSES, FEATURES)[targets]
    rows = np.split(rng.permutation(ROWS), np.cumsum(SIZES)[:-1])
    counts = np.stack([np.bincount(targets[own], minlength=CLASSES) for own in rows]).astype(float)
    inputs = np.random.default_rng(5).random((ROWS, *shape)) if shape else inputs
    return PartitionedData(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets), rows, counts)


class Backends(NamedTuple):
    """One client after another, the cohort at once, and what the server sends."""

    alone: SequentialBackend
    together: CohortBackend
    sent: Sent


def work_of(
    method: Method, divided: Any = None, seed: int = 4, augment: Any = None, terms: Any = None, **training: Any
) -> LocalWork:
    settings = {"batch_size": 8, "lr": 0.05, "momentum": 0.5, "weight_decay": 0.01} | training
    objective = method.objective if terms is None else type(method.objective)(method.objective.loss, terms)
    divided = clients() if divided is None else divided
    return LocalWork(
        divided, objective, method.local_step, LocalTraining(**settings), seed, augment=augment, hooks=hooked(method)
    )


def backends(
    method: Method, module: nn.Module | None = None, observe: Any = None, chunk: int | None = None, **parts: Any
) -> Backends:
    module = network() if module is None else module
    for _, component in adapting(method):
        module = component.adapt(module, torch.Generator().manual_seed(1))
    work = work_of(method, **parts)
    alone = SequentialBackend(FlatModel(copy.deepcopy(module)), work, observe)
    model, broadcast = alone.model.read_state(), {}
    for hooks in hooked(method).values():
        broadcast |= hooks.broadcast(hooks.init_server(model.parameters, len(SIZES)))
    return Backends(alone, CohortBackend(FlatModel(module), work, observe, chunk), Sent(model, broadcast))
