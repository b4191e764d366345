"""FedAvg written by hand, as a researcher writes it; tuned: channels-last, fused SGD, no denormals; any processes."""

from __future__ import annotations

import argparse
import multiprocessing
from typing import Any

import torch
from task import Task, Turns
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedskew.randomness import Purpose, generator

State = dict[str, Tensor]


class Loop:
    """One process's part of every round."""

    def __init__(self, folder: str, device: str, tuned: bool) -> None:
        self.task, self.tuned = Task.read(folder, device), tuned
        torch.set_flush_denormal(tuned)
        self.layout = torch.channels_last if tuned else torch.contiguous_format
        self.network = self.task.network().to(memory_format=self.layout).train()  # type: ignore[call-overload]

    def train(self, round: int, clients: list[int], sent: State) -> State:
        """The sum of the clients' models, each times its number of samples."""
        total = {name: torch.zeros_like(value) for name, value in sent.items()}
        for client in clients:
            self.network.load_state_dict(sent)
            self._epochs(round, client)
            for name, value in self.network.state_dict().items():
                total[name] += value * len(self.task.clients[client])
        return total

    def _epochs(self, round: int, client: int) -> None:
        task, rows = self.task, self.task.clients[client]
        optimiser = task.optimiser(self.network, fused=self.tuned)
        # The order of fedskew, so that the same model can be expected.
        shuffle = generator(task.settings["seed"], Purpose.SHUFFLE, round, client)
        for _ in range(task.settings["epochs"]):
            order = torch.from_numpy(rows[shuffle.permutation(len(rows))]).to(task.inputs.device)
            for batch in order.split(task.settings["batch_size"]):
                optimiser.zero_grad()
                x = task.inputs[batch].contiguous(memory_format=self.layout)
                cross_entropy(self.network(x), task.targets[batch]).backward()
                optimiser.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    others = [start(arguments) for _ in range(arguments.processes - 1)]
    torch.set_num_threads(arguments.threads)
    loop = Loop(arguments.folder, arguments.device, arguments.tuned)
    sizes, turns = [len(rows) for rows in loop.task.clients], Turns()
    state = {name: value.clone() for name, value in loop.network.state_dict().items()}
    for round, cohort in enumerate(loop.task.cohorts, start=1):
        turns.wait()
        parts = shares(cohort, sizes, arguments.processes)
        for pipe, part in zip(others, parts[1:], strict=True):
            pipe.send((round, part, state))
        sums = [loop.train(round, parts[0], state), *(pipe.recv() for pipe in others)]
        samples = sum(sizes[client] for client in cohort)
        state = {name: sum(one[name] for one in sums) / samples for name in state}
    turns.end()
    loop.network.load_state_dict(state)
    loop.task.save(loop.network, arguments.name)


def shares(cohort: list[int], sizes: list[int], processes: int) -> list[list[int]]:
    """The cohort divided so that the parts have about as much work: the largest client first, to who has least."""
    parts: list[list[int]] = [[] for _ in range(processes)]
    for client in sorted(cohort, key=lambda one: -sizes[one]):
        min(parts, key=lambda part: sum(sizes[one] for one in part)).append(client)
    return parts


def start(arguments: argparse.Namespace) -> Any:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=serve, args=(there, arguments), daemon=True).start()
    return here


def serve(pipe: Any, arguments: argparse.Namespace) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    torch.set_num_threads(arguments.threads)
    loop = Loop(arguments.folder, arguments.device, arguments.tuned)
    while True:
        pipe.send(loop.train(*pipe.recv()))


def parameters(network: nn.Module) -> int:
    return sum(value.numel() for value in network.parameters())


if __name__ == "__main__":
    main()
