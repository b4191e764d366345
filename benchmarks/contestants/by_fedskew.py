"""fedskew, as its user calls it: one `simulate`, FedAvg, the task's cohorts, its network or an `nn.Sequential`."""

from __future__ import annotations

import argparse
import json
import os
from collections import OrderedDict
from typing import Any

from task import Task, Turns
from torch import nn

import fedskew
from fedskew.data import Dataset
from fedskew.selection import INDEX

Recorded = INDEX["recorded"]

FOLDER = "FEDSKEW_BENCH_TASK"


def dataset() -> Dataset:
    """The task's data, read again in every process of the backend."""
    task = Task.read(os.environ[FOLDER])
    return Dataset(
        name="task",
        inputs=task.inputs,
        targets=task.targets,
        test_inputs=task.inputs[:10],
        test_targets=task.targets[:10],
        classes=tuple(map(str, range(int(task.targets.max()) + 1))),
    )


def own_network(task: Task) -> nn.Sequential:
    """The task's untrained network as a user writes it; names of parameters are the task's."""
    if task.settings["model"] in ("head", "whole"):
        blocks, head = map(task.network().get_submodule, ("blocks", "head"))
        return nn.Sequential(OrderedDict([("blocks", blocks), ("flat", nn.Flatten()), ("head", head)]))
    if task.settings["model"] == "lenet5":
        layers = [
            ("conv1", nn.Conv2d(3, 6, 5)), ("relu1", nn.ReLU()), ("pool1", nn.MaxPool2d(2)),
            ("conv2", nn.Conv2d(6, 16, 5)), ("relu2", nn.ReLU()), ("pool2", nn.MaxPool2d(2)),
            ("flat", nn.Flatten()), ("fc1", nn.Linear(400, 120)), ("relu3", nn.ReLU()),
            ("fc2", nn.Linear(120, 84)), ("relu4", nn.ReLU()), ("head", nn.Linear(84, 10)),
        ]  # fmt: skip
    else:
        layers = [
            ("conv1", nn.Conv2d(3, 32, 3)), ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(32, 64, 3)), ("relu2", nn.ReLU()), ("pool", nn.MaxPool2d(2)),
            ("drop1", nn.Dropout(0.25)), ("flat", nn.Flatten()),
            ("fc1", nn.Linear(12544, 128)), ("relu3", nn.ReLU()), ("drop2", nn.Dropout(0.5)),
            ("head", nn.Linear(128, 10)),
        ]  # fmt: skip
    network = nn.Sequential(OrderedDict(layers))
    network.load_state_dict({name: value.cpu() for name, value in task.network().state_dict().items()})
    return network


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("--backend", default="sequential")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--own", action="store_true", help="give an nn.Sequential in place of the network's name")
    parser.add_argument("--anew", action="store_true", help="compute a frozen body's features in every step")
    arguments = parser.parse_args()
    os.environ[FOLDER] = arguments.folder
    task, turns = Task.read(arguments.folder), Turns()
    settings = task.settings
    engine = {
        "backend": arguments.backend,
        "threads": arguments.threads,
        "device": arguments.device,
        "keep_features": not arguments.anew,
    }
    model = own_network(task) if arguments.own else settings["model"]
    if arguments.backend == "processes":
        engine["processes"] = arguments.processes
    turns.wait()

    def after(record: dict[str, Any]) -> None:
        # Round 0 is the untrained model's record.
        if 0 < record["round"] < len(task.cohorts):
            turns.wait()

    result = fedskew.simulate(
        seeds=settings["seed"],
        data="by_fedskew:dataset",
        partition={"rule": "file", "path": str(task.folder / "partition.npz")},
        model={"name": model, "train": ["head.*"]} if settings["model"] == "head" else model,
        method={"selection": Recorded(tuple(tuple(cohort) for cohort in task.cohorts))},
        training={
            "rounds": len(task.cohorts),
            **{key: settings[key] for key in ("epochs", "batch_size", "lr", "momentum", "weight_decay")},
        },
        evaluation={"every": 10**6},
        engine=engine,
        progress=after,
    )
    turns.end()
    task.save(result.model, arguments.name)
    print("backend", json.dumps(result.summary["backend"]), flush=True)


if __name__ == "__main__":
    main()
