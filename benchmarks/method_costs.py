"""What methods cost beyond FedAvg: time of the processor, traffic and state.

    python benchmarks/method_costs.py [METHOD ...] [--task digits|cifar10] [--rounds 20] [--repeat 3]

Each METHOD is a preset, or presets joined by "+". A round has 5 of 20 clients (each class divided by Dir(0.1)), 5 local
epochs of batches of 16, and a network of two hidden layers of 200; on cifar10 2 of 100 clients, batches of 64, and
LeNet-5; one thread. Prints a table in Markdown:

ms a round      processor time of a round without its evaluation, the least of the repeats, and in brackets its ratio to
                FedAvg's in the same repeat (median), since a busy machine slows both
passes          what the method's forward and backward passes take beside FedAvg's, a backward one as two: the ratio
                to be expected of a network that is large beside its loss
up, down        numbers sent by and to a client of the cohort, in models
client, server  numbers kept between rounds at a client that took part, and in the server's checkpoint beyond FedAvg's,
                in models
ms once         of a finish: the least time of the repeats, after the last round
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import safe_open

import fedskew
from fedskew import methods

METHODS = [
    *("fedadagrad", "fedadam", "fedyogi", "feddisco", "feddyn", "fedacg", "fedcbs", "fedentopt", "scaffold"),
    *("feddecorr", "feduv", "fedrod", "fedetf", "fedgela", "fednh", "fedbabu", "ccvr", "fedprox", "fednova", "fedrs"),
    *("fedlc", "fedvls", "fedntd", "fedlmd", "fedkd", "moon", "fedmr", "fpl", "fedsam", "fedgf", "fedla", "fedexp"),
]
TASK: dict[str, Any] = {
    "data": "digits",
    "partition": {"rule": "dirichlet_by_class", "clients": 20, "beta": 0.1, "min_size": 1},
    "model": "mlp3",
    "training": {"participation": 0.25, "epochs": 5, "batch_size": 16, "lr": 0.05},
    "evaluation": {"every": 10_000},
    "engine": {"backend": "sequential"},
}
CIFAR10: dict[str, Any] = {
    "data": "cifar10",
    "partition": {**TASK["partition"], "clients": 100},
    "model": "lenet5",
    "training": {**TASK["training"], "participation": 0.02, "batch_size": 64, "lr": 0.01},
}


def numbers(path: Path) -> int:
    """All numbers in a file of tensors."""
    with safe_open(str(path), framework="numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (no mapping)


def passes(method: str) -> float:
    """The passes of a step, in FedAvg's."""
    cost = methods.cost(methods.build(methods.expand({"preset": method})))
    return 1 + (cost.forward + 2 * cost.backward) / 3


def measure(task: dict[str, Any], method: str, rounds: int) -> dict[str, float]:
    """Train, and read clock, records and checkpoint."""
    clock: list[float] = []
    tree = {**task, "method": method, "training": {**task["training"], "rounds": rounds}}
    with tempfile.TemporaryDirectory() as folder:
        result = fedskew.simulate(tree, out=folder, progress=lambda record: clock.append(time.process_time()))
        assert result.folder is not None
        checkpoint = result.folder / "checkpoint"
        model = sum(value.numel() for value in result.model.state_dict().values())
        clients = [numbers(path) for path in (checkpoint / "clients").glob("*.safetensors")]
        server = numbers(checkpoint / "state.safetensors")
    last = result.rounds[-2]  # the last one is evaluated
    return {
        "ms": 1000 * (clock[-2] - clock[0]) / (len(clock) - 2),
        "up": last["bytes_up"] / len(last["answered"]) / 4 / model,
        "down": last["bytes_down"] / len(last["cohort"]) / 4 / model,
        "client": max(clients, default=0) / model,
        "server": server / model,
        "once": 1000 * result.summary.get("finished", {}).get("seconds", 0.0),
    }


def main() -> None:
    """Measure all, and print the table."""
    parser = argparse.ArgumentParser(description="What methods cost beyond FedAvg.")
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--task", choices=["digits", "cifar10"], default="digits")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    names = ["fedavg", *(name for name in given.methods if name != "fedavg")]
    task = TASK if given.task == "digits" else {**TASK, **CIFAR10}
    runs = [{name: measure(task, name, given.rounds) for name in names} for _ in range(given.repeat)]
    print("| method | ms a round | passes | up | down | client | server | ms once |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in names:
        least = min(run[name]["ms"] for run in runs)
        ratio = median(run[name]["ms"] / run["fedavg"]["ms"] for run in runs)
        found = runs[0][name] | {"server": runs[0][name]["server"] - runs[0]["fedavg"]["server"]}
        rest = " | ".join(f"{found[key]:z.2f}" for key in ("up", "down", "client", "server"))
        once = min(run[name]["once"] for run in runs)
        print(f"| {name} | {least:.0f} ({ratio:.2f}) | {passes(name):.2f} | {rest} | {once:.0f} |")


if __name__ == "__main__":
    main()
