"""FedPer, FedRep and Ditto beside fluke's, on one stored partition; the table of docs/sites.md.

    python benchmarks/personal_peers.py [--data .data] [--name fashion_mnist] [--seeds 0 1 2]

Twenty clients share 12,000 samples by Dir(0.1) and test on 30 % of their own. All take part in 20 rounds of two local
epochs, batches of 32, SGD 0.05; one thread. Both have the same partition, network, first weights of a seed and weights
of clients; shuffles are their own. FedRep: one epoch of the head, one of the body. Ditto: strength 0.1, two epochs.
Printed: over clients the mean of accuracy on their own test samples and, after the slash, of the worst tenth; over
seeds mean and sample standard deviation, and in the last column the same of the differences, paired by seed.

fluke 0.8.1 is installed into .bench/ by pip when first needed, without its dependencies but four: the others that these
three methods need are in this Python (torchvision is not: they only import it).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import subprocess
import sys
import tempfile
import types
from collections import OrderedDict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from simulators import cpu
from sites import worst_tenth
from torch import nn

import fedskew
from fedskew import data
from fedskew.data import Dataset
from fedskew.partition import Partition

PEER = Path(__file__).resolve().parent.parent / ".bench" / "fluke"
PACKAGES = ("fluke-fl==0.8.1", "antlr4-python3-runtime==4.9.3", "cerberus", "diskcache", "omegaconf", "seaborn")
PERSONAL: dict[str, dict[str, Any]] = {
    "FedPer": {"name": "partial"},
    "FedRep": {"name": "partial", "head_epochs": 1},
    "Ditto": {"name": "ditto", "strengths": [0.1]},
}
THEIRS: dict[str, dict[str, Any]] = {
    "FedPer": {"local_epochs": 2},
    "FedRep": {"local_epochs": 1, "tau": 1},
    "Ditto": {"local_epochs": 2, "tau": 2, "lam": 0.1},
}
TRAINING = {"rounds": 20, "epochs": 2, "batch_size": 32, "lr": 0.05}


def network(seed: int) -> nn.Sequential:
    """An untrained network; a seed's is the same for both."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [
            ("flat", nn.Flatten()), ("fc1", nn.Linear(784, 200)), ("relu1", nn.ReLU()),
            ("fc2", nn.Linear(200, 100)), ("relu2", nn.ReLU()), ("head", nn.Linear(100, 10)),
        ]  # fmt: skip
        return nn.Sequential(OrderedDict(layers))


def ours(method: str, seed: int, dataset: dict[str, Any], partition: dict[str, Any]) -> list[float]:
    """Every client's accuracy by fedskew."""
    result = fedskew.simulate(
        data=dataset,
        partition=partition,
        model=network(seed),
        method={"preset": "fedavg", "personal": PERSONAL[method]},
        training={**TRAINING, "participation": 1.0},
        evaluation={"every": 10**6},
        engine={"backend": "sequential"},
        seeds=[seed],
    )
    return [one["accuracy"] for one in result.sites() if one["row"] == "personal"]


def theirs(method: str, seed: int, dataset: Dataset, partition: Partition) -> list[float]:
    """Every client's accuracy by fluke: its algorithm as it is, and at last the common part sent once more."""
    algorithms, nets = import_module("fluke.algorithms"), import_module("fluke.nets")
    loader, common = import_module("fluke.data").FastDataLoader, import_module("fluke")
    untrained = network(seed)
    whole = nets.EncoderHeadNet(untrained[:-1], untrained[-1])
    settings = {
        "client": {
            "model": whole, "batch_size": 32, "loss": "CrossEntropyLoss",
            "optimizer": {"name": "SGD", "lr": TRAINING["lr"]}, "scheduler": {"step_size": 1, "gamma": 1},
            **THEIRS[method],
        },
        "server": {"weighted": True},
        "model": copy.deepcopy(whole if method == "Ditto" else whole.encoder),
    }  # fmt: skip

    def samples(rows: Any) -> Any:
        chosen = dataset.inputs.index_select(0, torch.from_numpy(rows)), dataset.targets[rows]
        return loader(*chosen, num_labels=10, batch_size=32, shuffle=True, skip_singleton=False)

    class Given:
        """What divides the samples, for fluke."""

        def assign(self, clients: int, batch_size: int) -> Any:
            return ([samples(rows) for rows in partition.indices], [None] * clients), None

    class Algorithm(getattr(import_module(f"fluke.algorithms.{method.lower()}"), method)):  # type: ignore[misc]
        # FedRep's own would give all clients one network, of which each then trains the others' head.
        init_clients = algorithms.PersonalizedFL.init_clients

    common.FlukeENV().set_seed(seed)
    with contextlib.redirect_stdout(io.StringIO()):
        federation = Algorithm(len(partition.indices), Given(), settings)
        federation.run(int(TRAINING["rounds"]), 1.0)
    accuracies = []
    for client, rows in zip(federation.clients, partition.test, strict=True):
        if not len(rows):
            continue
        with torch.no_grad():
            outputs = client.local_model.eval()(dataset.inputs.index_select(0, torch.from_numpy(rows)))
        accuracies.append(float((outputs.argmax(1) == dataset.targets[rows]).double().mean()))
    return accuracies


def install() -> None:
    """Make fluke importable, behind this Python's own packages."""
    if not PEER.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(PEER), *PACKAGES]
        subprocess.run(command, check=True, stdout=sys.stderr)
    sys.path.append(str(PEER))
    import_module("torchmetrics")  # it looks for torchvision's own
    if "torchvision" not in sys.modules:
        models: Any = types.ModuleType("torchvision.models")
        models.resnet18 = models.resnet34 = models.resnet50 = None
        sys.modules.update({"torchvision": types.ModuleType("torchvision"), "torchvision.models": models})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=".data")
    parser.add_argument("--name", choices=("mnist", "fashion_mnist"), default="fashion_mnist")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    install()
    source = {"name": arguments.name, "root": arguments.data, "client_test": 0.3}
    dataset = data.load(arguments.name, arguments.data)
    figures: dict[str, dict[str, list[list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        divided = {"rule": "dirichlet_by_class", "beta": 0.1, "clients": 20}
        first = fedskew.simulate(
            data={**source, "rows": 12_000}, partition=divided, model="mlp3", training={"rounds": 1}, out=folder
        )
        assert first.folder is not None
        path = first.folder / "partition.npz"
        partition, stored = Partition.load(path), {"rule": "file", "path": str(path)}
        for seed in arguments.seeds:
            for method in PERSONAL:
                accuracies = {
                    "fedskew": ours(method, seed, source, stored),
                    "fluke": theirs(method, seed, dataset, partition),
                }
                for side, own in accuracies.items():
                    both = [100 * float(np.mean(own)), 100 * worst_tenth(np.array(own))]
                    figures.setdefault(method, {}).setdefault(side, []).append(both)
                    print(seed, method, side, *(f"{value:.2f}" for value in both), file=sys.stderr, flush=True)
    print(f"{arguments.name}; seeds {arguments.seeds}; {cpu()}; PyTorch {torch.__version__}\n")
    print("| method | fedskew | fluke | difference |\n| --- | ---: | ---: | ---: |")
    for method, sides in figures.items():
        us, them = np.array(sides["fedskew"]), np.array(sides["fluke"])
        cells = [
            " / ".join(
                f"{mean:{sign}.1f} ± {spread:.1f}"
                for mean, spread in zip(of.mean(axis=0), of.std(axis=0, ddof=1), strict=True)
            )
            for of, sign in ((us, ""), (them, ""), (us - them, "+"))
        ]
        print(f"| {method} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
