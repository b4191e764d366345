"""What one bad site of ten does to the model, under each weighting, with and without each defence.

    python benchmarks/attacks.py                        # the tables of docs/threats.md: three seeds
    python benchmarks/attacks.py --seeds 1 --methods fedavg --attacks "flips its sign"
    python benchmarks/attacks.py --real                 # four SuperNodes on this machine, one of them bad: minutes

Digits, ten clients with skewed labels (dirichlet_by_client, beta 0.3), a small network with batch norm, twelve rounds
in which all take part (FedEntOpt: five of them). Client 0 is the bad one. It changes what it sends, or says that it
holds samples that it does not: 1e9 in all at most, as a server refuses more. The attack stands between backend and
server, so nothing of fedskew is changed. What a real server refuses before (see docs/threats.md: lengths, integers,
buffers out of line) is off here: the table shows the methods alone.

Printed: test accuracy after the last round, mean over the seeds and, in brackets, the lowest.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from fedskew import data
from fedskew.deploy import Address, Agreement, LocalFederation, agree, free_port, write_federation
from fedskew.engine import Assignment, Backend, Sent, Update
from fedskew.experiment import make_task, make_training_loop, resolve

BAD, CLIENTS, CLASSES = 0, 10, 10


class Network(torch.nn.Sequential):
    """A small network with batch norm, whose statistics can be attacked."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__(
            torch.nn.Flatten(),
            torch.nn.Linear(int(np.prod(in_shape)), 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.ReLU(),
            torch.nn.Linear(32, num_classes),
        )


TASK: dict[str, Any] = {
    "data": "digits",
    "partition": {"rule": "dirichlet_by_client", "clients": CLIENTS, "beta": 0.3},
    "model": {"name": "attacks:Network"},
    "training": {"rounds": 12, "epochs": 3, "batch_size": 135, "smallest_batch": 2, "lr": 0.5},
    "target": {"mix": "uniform"},
    "evaluation": {"every": 12},
    "engine": {"backend": "cohort"},
}

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedla": {"method": {"preset": "fedla"}},
    "fedpals": {"method": {"preset": "fedpals"}},
    "fedpals, half effective": {"method": {"weighting": {"name": "fedpals", "effective_clients": 0.5}}},
    "fedentopt": {"method": {"preset": "fedentopt"}, "training": {"participation": 0.5}},
}

DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "weight limit .2": {"training": {"weight_limit": 0.2}},
    "clipping": {"method": {"aggregation": {"name": "norm_clipping"}}},
    "median": {"method": {"aggregation": {"name": "median"}}},
    "trimmed mean": {"method": {"aggregation": {"name": "trimmed_mean", "beta": 0.2}}},
    "geometric median": {"method": {"aggregation": {"name": "geometric_median"}}},
    "Krum": {"method": {"aggregation": {"name": "krum"}}},
    "multi-Krum": {"method": {"aggregation": {"name": "krum", "keep": 5}}},
    "geometric + limit": {
        "method": {"aggregation": {"name": "geometric_median"}},
        "training": {"weight_limit": 0.2},
    },
}

ATTACKS: dict[str, dict[str, float]] = {
    "nobody is bad": {},
    "flips its sign": {"scale": -1},
    "sends -3 times its update": {"scale": -3},
    "sends 1e30 times its update": {"scale": 1e30},
    "sends garbage statistics": {"buffers": 1e3},
    "says 30 of each class": {"told": 30},
    "says 1e8 of each class": {"told": 1e8},
    "says 1e8 of each, flips its sign": {"told": 1e8, "scale": -1},
}


class BadSite(Backend):
    """A backend one of whose clients changes what it sends.

    Args:
        backend: Trains the cohort, the bad client too.
        samples: True number of samples of each client, `(clients,)`.
        scale: Factor of the bad client's update.
        buffers: Size of the noise that it sends as batch-norm statistics; 0: its own.
    """

    def __init__(self, backend: Backend, samples: np.ndarray, scale: float = 1, buffers: float = 0) -> None:
        self._backend, self._samples, self._scale, self._buffers = backend, samples, scale, buffers

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """Train as the clients are, and change the bad one's update."""
        true = [task._replace(samples=int(self._samples[task.client])) for task in cohort]
        updates = self._backend.train(round, true, sent)
        return [self._changed(update, round) if update.client == BAD else update for update in updates]

    def _changed(self, update: Update, round: int) -> Update:
        change = update.change * self._scale
        drawn = torch.randn(update.buffers.shape, generator=torch.Generator().manual_seed(round))
        buffers = self._buffers * drawn.abs() if self._buffers else update.buffers
        return update._replace(change=change, norm=torch.linalg.vector_norm(change), buffers=buffers)


def accuracy(config: Any, seed: int, task: Any, attack: dict[str, float]) -> float:
    """Test accuracy after the last round."""
    loop = make_training_loop(config, seed, task=task)
    federation = loop.runner
    told, deeds = federation.counts.copy(), {key: value for key, value in attack.items() if key != "told"}
    if "told" in attack:
        told[BAD] = attack["told"]
    bad = BadSite(federation.backend, federation.counts.sum(axis=1), **deeds)
    loop.runner = dataclasses.replace(federation, backend=bad, counts=told)
    evaluation = loop.run().rounds[-1].evaluation
    return float(evaluation.accuracy)


SITE = """
from pathlib import Path

from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from fedskew.deploy import site_app

honest = site_app(Path(__file__).parents[1])
site = ClientApp()


@site.query()
def query(message, context):
    return honest(message, context)


@site.evaluate()
def evaluate(message, context):
    return honest(message, context)


@site.train()
def train(message, context):
    sent = {name: array.numpy() for name, array in message.content["arrays"].items()}
    answer = honest(message, context)
    if "sites/bad" in str(context.node_config["data"]):
        own = {name: array.numpy() for name, array in answer.content["arrays"].items()}
        answer.content["arrays"] = ArrayRecord({name: Array(sent[name] - 3 * (own[name] - sent[name])) for name in own})
    return answer
"""


def real(defence: dict[str, Any], attacked: bool) -> tuple[float, list[float]]:
    """Accuracy of a federation of four real sites, one of which sends -3 times its update, and the last weights."""
    names = ["bad" if attacked else "fine", "north", "south", "west"]
    digits = data.load("digits", rng=np.random.default_rng(0))
    parts = [np.array_split(np.asarray(part), 4) for part in _shuffled(digits)]
    training = {"rounds": 5, "epochs": 3, "batch_size": 64, "lr": 0.1}
    tree = {"data": {"name": "npz"}, "partition": {"rule": "natural"}, "model": "mlp3", "training": training}
    agreement = Agreement(sites=names, classes=[str(digit) for digit in range(CLASSES)], shape=[1, 8, 8])
    with tempfile.TemporaryDirectory() as place:
        folder, port = Path(place) / "federation", free_port()
        config = resolve(merged(tree, defence))
        write_federation(folder, config, agreement, Address("127.0.0.1", port), {"name": "npz"})
        (folder / "app" / "federation" / "site.py").write_text(SITE)
        for name, x, y, x_test, y_test in zip(names, *parts, strict=True):
            own = Path(place) / f"{name}.npz"
            np.savez(own, x=x, y=y, x_test=x_test, y_test=y_test)
            table = {"server": f"127.0.0.1:{port}", "state": "state", "data": {"name": "npz", "root": str(own)}}
            (folder / "sites" / name / "data.toml").write_text(tomli_w.dumps(table))
            agree(folder / "sites" / name / "data.toml", folder / "app")
        with LocalFederation(folder, port, tuple(names)) as federation:
            federation.wait("run", federation.run(), 1200)
        (rounds,) = (folder / "server" / "runs").glob("*/rounds.jsonl")
        last = json.loads(rounds.read_text().splitlines()[-1])
    return last["evaluation"]["accuracy"], last["weights"]


def _shuffled(digits: Any) -> list[np.ndarray]:
    parts = []
    for inputs, targets in ((digits.inputs, digits.targets), (digits.test_inputs, digits.test_targets)):
        order = np.random.default_rng(0).permutation(len(targets))
        parts += [np.asarray(inputs)[order], np.asarray(targets)[order]]
    return parts


def print_real() -> None:
    """Print the table of a real federation."""
    print("| four real sites | defence | accuracy | weights in the last round |\n|---|---|---|---|", flush=True)
    for attacked, name in ((False, "none"), (True, "none"), (True, "clipping"), (True, "geometric median")):
        found, weights = real(DEFENCES[name], attacked)
        who = "one of four sends -3 times its update" if attacked else "nobody is bad"
        print(f"| {who} | {name} | {found:.2f} | {', '.join(f'{weight:.2f}' for weight in weights)} |", flush=True)


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    """Configs one on top of the other, table by table."""
    whole: dict[str, Any] = {}
    for key, value in itertools.chain.from_iterable(tree.items() for tree in trees):
        whole[key] = {**whole[key], **value} if isinstance(value, dict) and key in whole else value
    return whole


def main() -> None:
    """Print a table for each weighting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
    parser.add_argument("--defences", default=",".join(DEFENCES), help="comma-separated")
    parser.add_argument("--attacks", default=";".join(ATTACKS), help="separated by semicolons")
    parser.add_argument("--real", action="store_true", help="a real federation instead")
    given = parser.parse_args()
    if given.real:
        print_real()
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    defences, attacks = given.defences.split(","), given.attacks.split(";")
    tasks = [make_task(resolve(TASK), seed) for seed in range(given.seeds)]
    for method in given.methods.split(";"):
        print(f"\n| {method} | {' | '.join(defences)} |\n|{'---|' * (1 + len(defences))}", flush=True)
        for attack in attacks:
            cells = []
            for defence in defences:
                config = resolve(merged(TASK, METHODS[method], DEFENCES[defence]))
                found = [accuracy(config, seed, task, ATTACKS[attack]) for seed, task in enumerate(tasks)]
                cells.append(f"{statistics.mean(found):.2f} ({min(found):.2f})".replace("0.", "."))
            print(f"| {attack} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
