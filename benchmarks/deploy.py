"""What our own code costs on a real federation, beside plain Flower FedAvg with the same model.

    python benchmarks/deploy.py [--sites 10] [--rounds 20]      in process: what a server does in a round, without sites
    python benchmarks/deploy.py --real [--rounds 10]            three SuperNodes on loopback with TLS, rounds in turns

In process, both strategies get the same replies (arrays of the model's shape), and take turns: `configure_train` and
`aggregate_train` of Flower's FedAvg, and of `fedskew.deploy.strategy("fedavg")`, which checks every array it receives.
With real processes one server plays a round of each in turns, on the same nodes and the same samples: plain rounds are
Flower's own strategy with a ClientApp as its tutorials have it, ours are those of `server_app` with `site_app`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from fedskew import data, models
from fedskew.deploy import Address, Agreement, LocalFederation, agree, strategy, write_federation
from fedskew.experiment import resolve

NETWORKS = {"lenet5": (3, 32, 32), "cnn_w2": (3, 32, 32), "resnet18": (3, 32, 32)}
NAMES = ("ash", "birch", "cedar")


class Nodes:
    """A grid whose nodes are there, and say nothing by themselves."""

    def __init__(self, number: int) -> None:
        self.ids = [1000 + place for place in range(number)]

    def get_node_ids(self) -> list[int]:
        return self.ids

    def get_nodes(self) -> list[object]:
        return [type("Node", (), {"node_id": node, "name": f"site-{node}"})() for node in self.ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--real", action="store_true")
    arguments = parser.parse_args()
    if arguments.real:
        real(arguments.rounds or 10)
        return
    torch.set_num_threads(1)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    print(f"{'network':10} {'parameters':>11} {'Flower ms':>10} {'fedskew ms':>11}   server's work in a round, median")
    for name in NETWORKS:
        in_process(name, arguments.sites, arguments.rounds or 20)


def in_process(name: str, sites: int, rounds: int) -> None:
    network = models.build(name, 10, NETWORKS[name], generator=torch.Generator().manual_seed(0))
    arrays = ArrayRecord(network.state_dict())
    grid = Nodes(sites)
    contestants = {
        "flower": FedAvg(min_train_nodes=sites, min_available_nodes=sites),
        "fedskew": strategy("fedavg", model=network, min_nodes=sites),
    }
    trained = [
        ArrayRecord({key: Array(noisy(array.numpy(), place)) for key, array in arrays.items()})
        for place in range(sites)
    ]
    seconds: dict[str, list[float]] = {key: [] for key in contestants}
    for round in range(1, rounds + 2):
        for key, contestant in contestants.items():
            began = time.perf_counter()
            questions = list(contestant.configure_train(round, arrays, ConfigRecord(), grid))  # type: ignore[arg-type]
            asked = time.perf_counter() - began
            replies = [
                answer(question, trained[grid.ids.index(question.metadata.dst_node_id)]) for question in questions
            ]
            began = time.perf_counter()
            contestant.aggregate_train(round, replies)
            if round > 1:
                seconds[key].append(asked + time.perf_counter() - began)
    flower, fedskew = (1000 * statistics.median(seconds[key]) for key in ("flower", "fedskew"))
    size = sum(parameter.numel() for parameter in network.parameters())
    print(f"{name:10} {size:11,} {flower:10.1f} {fedskew:11.1f}")


def noisy(values: np.ndarray, seed: int) -> np.ndarray:
    if not np.issubdtype(values.dtype, np.floating):
        return values
    noise = np.random.default_rng(seed).normal(size=values.shape).astype(values.dtype)
    return np.asarray(values + 0.01 * noise, dtype=values.dtype)


def answer(question: Message, arrays: ArrayRecord) -> Message:
    question.metadata.__dict__["_message_id"] = f"to-{question.metadata.dst_node_id}"
    metrics = MetricRecord({"num-examples": 100, "train_loss": 1.0})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=question)


SERVER = """
import json, time
from pathlib import Path

from flwr.app import ArrayRecord, MessageType
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fedskew.deploy import Agreement, make_deployed_loop
from fedskew.experiment import read

FOLDER = Path(__file__).parents[1]
server = ServerApp()


@server.main()
def main(grid, context):
    out = Path(context.run_config["out"])
    run = make_deployed_loop(read(FOLDER / "run.toml"), Agreement.read(FOLDER / "deploy.toml"), grid, out / "run", None)
    state = run.runner.start(run.untrained)
    plain = FedAvg(min_train_nodes=3, min_available_nodes=3, fraction_evaluate=0.0)
    arrays = ArrayRecord(run.model.state_dict())
    figures = {"flower": [], "fedskew": [], "own": []}
    validator = run.runner.sites.validator
    updates = validator.updates

    def timed(round, replies):
        began = time.perf_counter()
        found = updates(round, replies)
        figures["own"].append(time.perf_counter() - began)
        return found

    validator.updates = timed
    for round in range(1, run.config.training.rounds + 1):
        began = time.perf_counter()
        messages = plain.configure_train(round, arrays, run_config(), grid)
        arrays, _ = plain.aggregate_train(round, grid.send_and_receive(messages, timeout=120))
        figures["flower"].append(time.perf_counter() - began)
        began = time.perf_counter()
        state, record = run.runner.run_round(state)
        assert len(record.answered) == 3, record
        figures["fedskew"].append(time.perf_counter() - began)
    (out / "figures.json").write_text(json.dumps(figures))


def run_config():
    from flwr.app import ConfigRecord

    return ConfigRecord({"lr": 0.05})
"""

SITE = """
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional

from fedskew import models
from fedskew.deploy import Agreement, SiteData, site_app

FOLDER = Path(__file__).parents[1]
ours = site_app(FOLDER)
site = ClientApp()


@site.query()
def query(message, context):
    return ours(message, context)


@site.train()
def train(message, context):
    if "fedskew-client" in message.content["config"]:
        return ours(message, context)
    held = SiteData.load(Path(context.node_config["data"]), Agreement.read(FOLDER / "deploy.toml"))
    model = models.build("mlp3", 10, (1, 8, 8))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
    for rows in torch.randperm(len(held.targets)).split(32):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(held.inputs[rows]), held.targets[rows])
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(held.targets), "train_loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
"""


def real(rounds: int) -> None:
    config = resolve(
        {
            "name": "turns",
            "data": {"name": "npz"},
            "partition": {"rule": "natural"},
            "model": {"name": "mlp3"},
            "training": {"rounds": rounds, "lr": 0.05, "batch_size": 32},
        }
    )
    digits = data.load("digits", rng=np.random.default_rng(0))
    classes = [str(digit) for digit in range(10)]
    agreement = Agreement(sites=list(NAMES), classes=classes, shape=[1, 8, 8], start_timeout=120.0, round_timeout=120.0)
    with tempfile.TemporaryDirectory() as place:
        folder, port = Path(place) / "federation", LocalFederation.free_port()
        write_federation(folder, config, agreement, Address("127.0.0.1", port), {"name": "npz"})
        (folder / "app" / "federation" / "server.py").write_text(SERVER)
        (folder / "app" / "federation" / "site.py").write_text(SITE)
        inputs, targets = np.asarray(digits.inputs), np.asarray(digits.targets)
        for name, rows in zip(NAMES, np.array_split(np.arange(len(targets)), 3), strict=True):
            own = Path(place) / f"{name}.npz"
            np.savez(own, x=inputs[rows], y=targets[rows])
            described = folder / "sites" / name / "data.toml"
            server = f"127.0.0.1:{port}"
            table = {"server": server, "state": "state", "data": {"name": "npz", "root": str(own)}}
            described.write_text(tomli_w.dumps(table))
            agree(described, folder / "app")
        with LocalFederation(folder, port, NAMES) as federation:
            federation.wait("run", federation.run(), 60.0 + 90.0 * rounds)
        figures = json.loads((folder / "server" / "runs" / "figures.json").read_text())
    middle: Callable[[str], float] = lambda key: statistics.median(figures[key])  # noqa: E731
    print(f"three SuperNodes on loopback, mlp3, {rounds} rounds of each in turns, median seconds a round:")
    print(f"plain Flower FedAvg {middle('flower'):.2f}, fedskew {middle('fedskew'):.2f}")
    print(f"of which fedskew's own code at the server: {1000 * middle('own'):.1f} ms")


if __name__ == "__main__":
    main()
