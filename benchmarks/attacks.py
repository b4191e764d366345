"""What one bad site of ten does to the model that a deployed server makes, under each method.

    python benchmarks/attacks.py                        # the tables of docs/threats.md: three seeds
    python benchmarks/attacks.py --seeds 1 --methods fedavg,fedpals --lies "-8 x"
    python benchmarks/attacks.py --real                 # four SuperNodes on this machine, one of them bad: minutes

Digits, ten sites of three classes each (quantity), ten rounds in which all take part (FedEntOpt: five). Client 0
is the bad one. It changes what it sends, says that it holds samples that it does not, with the steps that follow from
these, or both. A server's own `ReplyValidator` checks what comes back, as at real sites.

Of each method, printed is the test accuracy after the last round, mean over the seeds: with nobody bad, with the checks
alone and the weight limit 0.5; with what `deploy init` writes (the weight limit 2 / cohort, norm clipping where the
method takes it); without the bad site; and the lowest over all lies, in both.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
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
from fedskew.deploy import Address, Agreement, LocalFederation, agree, write_federation
from fedskew.deploy._arrays import ModelLayout
from fedskew.deploy._ask import Replies
from fedskew.deploy._plan import Plan
from fedskew.deploy._rehearsal import with_defences
from fedskew.deploy._validator import ReplyValidator
from fedskew.engine import Assignment, Backend, Federation, Sent, Update, cohort_size
from fedskew.engine.contracts import hooked
from fedskew.experiment import Config, make_task, make_training_loop, resolve

BAD, CLIENTS, CLASSES = 0, 10, 10
AGREEMENT = Agreement(sites=["a", "b"], classes=[str(digit) for digit in range(CLASSES)], shape=[1, 8, 8])


class Network(torch.nn.Sequential):
    """A small network."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        inputs = int(np.prod(in_shape))
        super().__init__(
            torch.nn.Flatten(), torch.nn.Linear(inputs, 32), torch.nn.ReLU(), torch.nn.Linear(32, num_classes)
        )


class Normed(torch.nn.Sequential):
    """The same with batch norm, whose statistics can be attacked."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        inputs = int(np.prod(in_shape))
        first = (torch.nn.Flatten(), torch.nn.Linear(inputs, 32), torch.nn.BatchNorm1d(32))
        super().__init__(*first, torch.nn.ReLU(), torch.nn.Linear(32, num_classes))


TASK: dict[str, Any] = {
    "data": "digits",
    "partition": {"rule": "quantity", "clients": CLIENTS, "labels_per_client": 3},
    "model": {"name": "attacks:Network"},
    "training": {"rounds": 10, "epochs": 3, "batch_size": 64, "smallest_batch": 2, "lr": 0.5},
    "target": {"mix": "uniform"},
    "evaluation": {"every": 10},
    "engine": {"backend": "cohort"},
}

METHODS: dict[str, dict[str, Any]] = {
    **{name: {"method": {"preset": name}} for name in ("fedavg", "uniform", "fedla", "fedpals", "feddisco", "afl")},
    "fedentopt": {"method": {"preset": "fedentopt"}, "training": {"participation": 0.5}},
    **{name: {"method": {"preset": name}} for name in ("fedadam", "fedyogi", "fedadagrad", "fedacg", "fedexp")},
    **{name: {"method": {"preset": name}} for name in ("fednova", "scaffold")},
    "server momentum": {"method": {"server_update": {"name": "plain", "momentum": 0.9}}},
    "fedavg with batch norm": {"model": {"name": "attacks:Normed"}},
}

LIES: dict[str, dict[str, Any]] = {
    "-1 x": {"scale": -1},
    "-3 x": {"scale": -3},
    "-8 x": {"scale": -8},
    "10 of each, -1 x": {"told": 10, "scale": -1},
    "10 of each, -8 x": {"told": 10, "scale": -8},
    "30 of each, -3 x": {"told": 30, "scale": -3},
    "1e7 of each, -100 x": {"told": 1e7, "scale": -100},
    "1e8 of each, -1 x": {"told": 1e8, "scale": -1},
    "garbage statistics": {"buffers": 1e3},
}


class CheckedSites(Backend):
    """A backend one of whose clients changes what it sends to a server that checks replies.

    Args:
        backend: Trains the cohort, the bad client too.
        samples: True number of samples of each client, `(clients,)`.
        validator: Checks the updates.
        scale: Factor of the bad client's update.
        buffers: Size of the noise that it sends as batch-norm statistics; 0: its own.
        told: Samples of each class that it says it has; None: its own.
        absent: Whether it sends nothing.
    """

    def __init__(
        self,
        backend: Backend,
        samples: np.ndarray,
        validator: ReplyValidator,
        scale: float = 1,
        buffers: float = 0,
        told: float | None = None,
        absent: bool = False,
    ) -> None:
        self._backend, self._samples, self._validator = backend, samples, validator
        self._scale, self._buffers, self._told, self._absent = scale, buffers, told, absent

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """Train as the clients are, change the bad one's update, and return what the server accepts."""
        there = [task for task in cohort if not (self._absent and task.client == BAD)]
        self._validator.begin(there, sent)
        true = [task._replace(samples=int(self._samples[task.client])) for task in there]
        updates = self._backend.train(round, true, sent) if true else []
        tasks = {task.client: task for task in there}
        changed = [self._lie(one, tasks[BAD], round) if one.client == BAD else one for one in updates]
        return self._validator.updates(round, Replies({one.client: one for one in changed}, {}, {}, set()))

    def _lie(self, update: Update, task: Assignment, round: int) -> Update:
        change = update.change * self._scale
        drawn = torch.randn(update.buffers.shape, generator=torch.Generator().manual_seed(round))
        buffers = self._buffers * drawn.abs() if self._buffers else update.buffers
        training = self._validator.training
        assert training is not None
        steps = update.steps if self._told is None else training.steps(task.epochs, task.samples)
        return update._replace(change=change, norm=torch.linalg.vector_norm(change), buffers=buffers, steps=steps)


def accuracy(config: Config, seed: int, task: Any, lie: dict[str, Any], directions: bool) -> float:
    """Test accuracy after the last round."""
    loop = make_training_loop(config, seed, task=task)
    federation = loop.runner
    assert isinstance(federation, Federation)
    told = federation.counts.copy()
    if "told" in lie:
        told[BAD] = lie["told"]
    plan = Plan.of(config, AGREEMENT)
    names = [str(client) for client in range(CLIENTS)]
    validator = ReplyValidator(
        names,
        ModelLayout(loop.model),
        plan.returned,
        plan.returned_idle,
        hooked(federation.method),
        training=config.training.local(),
        classes=CLASSES,
        counts=(lambda: told) if directions else None,
    )
    validator.start(loop.untrained)
    sites = CheckedSites(federation.backend, federation.counts.sum(axis=1), validator, **lie)
    loop.runner = dataclasses.replace(federation, backend=sites, counts=told)
    evaluation = loop.run().rounds[-1].evaluation
    assert evaluation is not None
    return float(evaluation.accuracy)


def row(method: str, tasks: Sequence[Any], lies: Sequence[str]) -> str:
    """One method's row of the table."""
    tree = merged(TASK, METHODS[method])
    before = resolve(merged(tree, {"training": {"weight_limit": 0.5}}))
    cohort = cohort_size(before.training.participation, CLIENTS)
    now = with_defences(before.with_value("training.weight_limit", 2 / cohort), CLIENTS)

    def play(config: Config, lie: dict[str, Any], directions: bool) -> float:
        return statistics.mean(accuracy(config, seed, task, lie, directions) for seed, task in enumerate(tasks))

    absent = play(now, {"absent": True}, True)
    worst = [
        min((play(config, LIES[lie], directions), lie) for lie in lies)
        for config, directions in ((before, False), (now, True))
    ]
    found = [play(before, {}, False), play(now, {}, True), absent, *(value for value, _ in worst)]
    cells = [f"{value:.3f}" for value in found]
    return f"| {method} | {' | '.join(cells)} ({worst[1][1]}) | {100 * (absent - worst[1][0]):.0f} |"


SITE = """
from pathlib import Path

from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from fedskew.deploy import site_app
from fedskew.deploy._arrays import unpack

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
    sent = {name: array.numpy() for name, array in unpack(message.content)["arrays"].items()}
    answer = honest(message, context)
    if "sites/bad" in str(context.node_config["data"]):
        answer.content = unpack(answer.content)
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
        folder, port = Path(place) / "federation", LocalFederation.free_port()
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
    for attacked, name in ((False, "mean"), (True, "mean"), (True, "norm_clipping"), (True, "geometric_median")):
        found, weights = real({"method": {"aggregation": {"name": name}}}, attacked)
        who = "one of four sends -3 times its update" if attacked else "nobody is bad"
        print(f"| {who} | {name} | {found:.2f} | {', '.join(f'{weight:.2f}' for weight in weights)} |", flush=True)


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    """Configs one on top of the other, table by table."""
    whole: dict[str, Any] = {}
    for key, value in itertools.chain.from_iterable(tree.items() for tree in trees):
        whole[key] = {**whole[key], **value} if isinstance(value, dict) and key in whole else value
    return whole


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--lies", default=";".join(LIES), help="separated by semicolons")
    parser.add_argument("--real", action="store_true", help="a real federation instead")
    given = parser.parse_args()
    if given.real:
        print_real()
        return
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    lies = given.lies.split(";")
    tasks = [make_task(resolve(TASK), seed) for seed in range(given.seeds)]
    heads = ("method", "nobody, before", "nobody, now", "absent", "worst, before", "worst, now (which)", "points")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for method in METHODS:
        if method in given.methods.split(","):
            own = [lie for lie in lies if "buffers" not in LIES[lie] or "model" in METHODS[method]]
            print(row(method, tasks, own), flush=True)


if __name__ == "__main__":
    main()
