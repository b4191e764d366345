"""fedskew, as its user calls it: one `simulate`, FedAvg, the task's cohorts."""

from __future__ import annotations

import argparse
import json
import os

from task import Task, Turns

import fedskew
from fedskew.data import Dataset
from fedskew.selection import Recorded

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
        classes=tuple("0123456789"),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("--backend", default="sequential")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--capture", action="store_true")
    arguments = parser.parse_args()
    os.environ[FOLDER] = arguments.folder
    task, turns = Task.read(arguments.folder), Turns()
    settings = task.settings
    engine = {
        "backend": arguments.backend,
        "threads": arguments.threads,
        "device": arguments.device,
        "capture": arguments.capture,
    }
    if arguments.backend == "processes":
        engine["processes"] = arguments.processes
    turns.wait()

    def after(record: fedskew.Round) -> None:
        # Round 0 is the untrained model's record.
        if 0 < record["round"] < len(task.cohorts):
            turns.wait()

    result = fedskew.simulate(
        seeds=settings["seed"],
        data="by_fedskew:dataset",
        partition={"rule": "file", "path": str(task.folder / "partition.npz")},
        model=settings["model"],
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
