"""pfl-research 0.6.0, with its FederatedAveraging and SimulatedBackend, as its CIFAR-10 benchmark sets them up.

Its users' data are not shuffled, as pfl iterates a data set in order.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import HyperParam, NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from task import Task, Turns
from torch import Tensor
from torch.nn.functional import cross_entropy

MAIN = os.environ.get("RANK", "0") == "0"


class Pause(HyperParam, TrainingProcessCallback):  # type: ignore[misc]  # pfl is not here when types are checked
    """Waits for the benchmark's turn after every round, as the first process alone does; and is the cohort's size."""

    def __init__(self, turns: Turns, sizes: list[int]) -> None:
        self.turns, self.sizes, self.round = turns, sizes, 0

    def value(self) -> int:
        return self.sizes[self.round]

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.round = central_iteration + 1
        if self.round < len(self.sizes):
            self.wait()
        return False, Metrics()

    def wait(self) -> None:
        """Nobody begins before the first process is told to."""
        if MAIN:
            self.turns.wait()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    os.environ["PFL_PYTORCH_DEVICE"] = arguments.device
    torch.set_num_threads(arguments.threads)
    task = Task.read(arguments.folder, arguments.device)
    settings, network = task.settings, task.network()
    network.loss = loss.__get__(network)
    network.metrics = metrics.__get__(network)
    sgd = functools.partial(torch.optim.SGD, momentum=settings["momentum"], weight_decay=settings["weight_decay"])
    model = PyTorchModel(network, sgd, torch.optim.SGD(network.parameters(), lr=1.0))
    sizes = [len(rows) for rows in task.clients]
    asked = itertools.cycle(itertools.chain.from_iterable(in_turn(cohort, sizes) for cohort in task.cohorts))
    users = FederatedDataset(functools.partial(user, task), lambda: next(asked))
    backend = SimulatedBackend(training_data=users, val_data=None, postprocessors=[WeightByDatapoints()])
    turns = Turns()
    pause = Pause(turns, [len(cohort) for cohort in task.cohorts])
    pause.wait()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=len(task.cohorts),
            evaluation_frequency=10**6,
            train_cohort_size=pause,
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_batch_size=settings["batch_size"],
            local_num_epochs=settings["epochs"],
            local_learning_rate=settings["lr"],
        ),
        NNEvalHyperParams(local_batch_size=1000),
        [pause],
        send_metrics_to_platform=False,
    )
    if MAIN:
        turns.end()
        task.save(network, arguments.name)


def loss(self: torch.nn.Module, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
    self.train(not eval)
    return cross_entropy(self(x), y)


@torch.no_grad()
def metrics(self: torch.nn.Module, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Weighted]:
    return {"loss": Weighted(float(loss(self, x, y, eval)) * len(y), len(y))}


def in_turn(cohort: list[int], sizes: list[int]) -> list[int]:
    """The cohort so ordered that, dealt to two processes in turn as pfl does, they have about as much work."""
    ordered = sorted(cohort, key=lambda client: -sizes[client])
    return [ordered[place ^ 1 if place & 2 and place | 1 < len(ordered) else place] for place in range(len(ordered))]


def user(task: Task, client: int) -> Dataset:
    rows = torch.from_numpy(task.clients[client]).to(task.inputs.device)
    return Dataset(raw_data=[task.inputs[rows], task.targets[rows]], user_id=str(client))


if __name__ == "__main__":
    main()
