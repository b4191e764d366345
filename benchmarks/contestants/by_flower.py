"""Flower's simulation (flwr and the ray that it pins), its FedAvg, one actor a CPU."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # for the actors

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from task import Task, Turns
from torch.nn.functional import cross_entropy

FOLDER = "FEDSKEW_BENCH_TASK"
client_app = ClientApp()
server_app = ServerApp()
held: dict[str, Task] = {}


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    config = message.content.config_records["config"]
    folder, client = str(config["folder"]), int(str(config["client"]))
    if folder not in held:
        held[folder] = Task.read(folder)
    task = held[folder]
    settings, network = task.settings, task.network()
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    rows = torch.from_numpy(task.clients[client])
    optimiser = task.optimiser(network)
    network.train()
    for _ in range(settings["epochs"]):
        for batch in rows[torch.randperm(len(rows))].split(settings["batch_size"]):
            optimiser.zero_grad()
            cross_entropy(network(task.inputs[batch]), task.targets[batch]).backward()
            optimiser.step()
    metrics = MetricRecord({"num-examples": len(rows)})
    reply = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(reply, reply_to=message)


class Cohorts(FedAvg):
    """FedAvg on the task's cohorts: the i-th node is told which client it is."""

    def __init__(self, task: Task) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.task = task

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        cohort = self.task.cohorts[server_round - 1]
        sizes = [len(rows) for rows in self.task.clients]
        # The largest first, so that the actors end at about the same time.
        for node, client in zip(grid.get_node_ids(), sorted(cohort, key=lambda one: -sizes[one]), strict=False):
            told = ConfigRecord({"client": client, "folder": str(self.task.folder)})
            content = RecordDict({"arrays": arrays, "config": told})
            yield Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    task, turns = Task.read(os.environ[FOLDER]), Turns()
    last = len(task.cohorts)

    def after(server_round: int, arrays: ArrayRecord) -> None:
        # Called before the first round too, as round 0.
        if server_round < last:
            turns.wait()

    network = task.network()
    result = Cohorts(task).start(grid, ArrayRecord(network.state_dict()), num_rounds=last, evaluate_fn=after)
    turns.end()
    network.load_state_dict(result.arrays.to_torch_state_dict())
    task.save(network, os.environ["FEDSKEW_BENCH_NAME"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    os.environ[FOLDER], os.environ["FEDSKEW_BENCH_NAME"] = arguments.folder, arguments.name
    logging.getLogger("flwr").setLevel(logging.WARNING)
    nodes = max(len(cohort) for cohort in Task.read(arguments.folder).cohorts)
    run_simulation(
        server_app,
        client_app,
        num_supernodes=nodes,
        backend_config={
            "init_args": {"num_cpus": arguments.processes, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
