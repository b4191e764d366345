"""What a curious server learns of each client's label mix, from plain, noisy and masked federations.

    python benchmarks/curious_server.py [--rounds 60]

Digits on 20 clients by Dir(0.3), one linear layer, 10 clients a round, one epoch of batches of 16, learning rate 0.05,
FedLA by exact counts; seeds 0, 1, 2. The server uses what it has: models, updates or their sum, weights, numbers of
samples, and its test set. Printed: how far the best guess is from a client's label mix (L1 distance from 0 to 2, mean
over clients and seeds), by

- *guess*: every client's mix is taken for the pooled one, which a masked round tells anyway;
- *last layer*: from the last layer's bias of one update, b / (lr steps) = q - M'q, where M are the model's mean softmax
  outputs on test samples of each class;
- *last layer, masked*: the same of one client's masked integers;
- *all rounds, masked*: the same of every round's sum, which is a known mix of the clients' mixes, and least squares
over the rounds; - *all rounds, private*: that with [privacy] noise = 1, clip = 0.5, weight_limit = 0.15;
- *noisy counts*: the released counts themselves;
- *summed*: label counts that are only ever summed, so that the server is told neither weights nor sizes. Where cohorts
differ, the rounds' sums of weights and of steps are equations for single clients'; with these, the rounds are read as
above. FedPALS (target 2 % or 18 % of a class) also asks its questions before the first round: what the first answer
leaves over after a later one is the part of the clients whose weight is 0 there, and of one alone it gives the exact
counts.

Then what a server that lies gets by asking to open sums (`fedskew.sums`): each request, and what comes of it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from fedskew.engine import Assignment, Backend, Federation, Sent, Update
from fedskew.engine.sums import FixedPoint, answers_in_sum
from fedskew.experiment import make_task, make_training_loop, resolve
from fedskew.labels import privatize
from fedskew.sums.fixed_point import UPDATES
from fedskew.weighting import BySums, Facts

CLIENTS, CLASSES, BATCH, LR = 20, 10, 16, 0.05
TASK: dict[str, Any] = {
    "schema": 1,
    "data": "digits",
    "partition": {"rule": "dirichlet_by_class", "clients": CLIENTS, "beta": 0.3, "min_size": 1},
    "model": "logistic",
    "method": "fedla",
    "training": {"rounds": 1, "participation": 0.5, "batch_size": BATCH, "lr": LR},
    "engine": {"updates": "masked"},
}
PRIVACY = {"clip": 0.5, "noise": 1.0, "epsilon": 1e4, "delta": 1e-3}
TARGET = np.array([0.02] * 5 + [0.18] * 5)
SUMMED: dict[str, tuple[Any, float, float]] = {  # method, participation, dropout
    "FedLA, all in every round": ("fedla", 1.0, 0.0),
    "FedLA, a tenth away": ("fedla", 1.0, 0.1),
    "FedAvg, half of them": ("fedavg", 0.5, 0.0),
    "FedPALS, strength 300, half": ({"weighting": {"name": "fedpals", "strength": 300.0}}, 0.5, 0.0),
    "FedPALS, strength 72, half": ({"weighting": {"name": "fedpals", "strength": 72.0}}, 0.5, 0.0),
}
"""Federations whose label counts are only ever summed."""


@dataclass
class Listening(Backend):
    """A backend that also keeps what it trained in the last round."""

    backend: Backend
    heard: list[Update] = field(default_factory=list)

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        self.heard = [
            update._replace(change=update.change.clone()) for update in self.backend.train(round, cohort, sent)
        ]
        return self.heard


def outputs(parameters: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    """M: the model's mean softmax outputs on samples of each class, `(classes, classes)`."""
    weight, bias = parameters[:-CLASSES].view(CLASSES, -1), parameters[-CLASSES:]
    shares = (inputs.flatten(1) @ weight.T + bias).softmax(dim=1).double()
    return np.array([shares[targets == label].mean(dim=0).numpy() for label in range(CLASSES)])


def mix_of(bias: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The mix q >= 0 of sum 1 whose q - M'q is nearest to a bias's change per step and learning rate."""
    heavy = 10.0
    rows, aims = np.vstack([np.eye(CLASSES) - seen.T, np.full(CLASSES, heavy)]), np.append(bias, heavy)
    found, _ = nnls(rows, aims)
    return np.asarray(found / found.sum())


def over_rounds(shares: np.ndarray, pooled: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """Every client's mix, from the clients' shares in each round and that round's pooled mix; near the guess in
    doubt."""
    ridge = 0.05
    found = np.linalg.solve(shares.T @ shares + ridge * np.eye(CLIENTS), shares.T @ (pooled - guess)) + guess
    found = np.maximum(found, 0)
    return np.asarray(found / found.sum(axis=1, keepdims=True))


def played(seed: int, rounds: int, private: bool) -> dict[str, float]:
    """The L1 errors of one federation."""
    training = TASK["training"] | ({"weight_limit": 0.15} if private else {})
    config = resolve(TASK | {"training": training} | ({"privacy": PRIVACY} if private else {}))
    task = make_task(config, seed)
    loop = make_training_loop(config, seed, task=task)
    federation = loop.runner
    assert isinstance(federation, Federation)
    ear = Listening(federation.backend)
    federation = dataclasses.replace(federation, backend=ear)
    truth, sizes = task.counts / task.counts.sum(axis=1, keepdims=True), task.counts.sum(axis=1)
    inputs, targets = task.dataset.test_inputs, task.dataset.test_targets
    assert isinstance(inputs, torch.Tensor)
    steps = np.ceil(sizes / BATCH)
    pooled = task.counts.sum(axis=0) / task.counts.sum()
    state, shares, sums = federation.start(loop.untrained), list[np.ndarray](), list[np.ndarray]()
    errors: dict[str, list[float]] = {"last layer": [], "last layer, masked": []}
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        sent = state.model.parameters.clone()
        state, record = federation.run_round(state)
        seen = (outputs(sent, inputs, targets) + outputs(state.model.parameters, inputs, targets)) / 2
        if len(shares) < 3:
            for update in ear.heard:
                bias = update.change[-CLASSES:].double().numpy() / (LR * update.steps)
                errors["last layer"].append(np.abs(mix_of(bias, seen) - truth[update.client]).sum())
                uniform = rng.integers(-(2**31), 2**31, CLASSES).astype(np.int32)  # a mask; see tests/sums
                bias = UPDATES.decode(uniform + UPDATES.encode(update.change[-CLASSES:].numpy(), 0.1)) / (
                    LR * update.steps
                )
                errors["last layer, masked"].append(np.abs(mix_of(bias, seen) - truth[update.client]).sum())
        part = np.zeros(CLIENTS)
        part[record.answered] = np.array(record.weights) * steps[record.answered]
        bias = (state.model.parameters - sent)[-CLASSES:].double().numpy() / (LR * part.sum())
        shares.append(part / part.sum())
        sums.append(mix_of(bias, seen))
    found = {name: float(np.mean(values)) for name, values in errors.items()}
    for count in sorted({10, rounds // 2, rounds}):
        guessed = over_rounds(np.array(shares[:count]), np.array(sums[:count]), pooled)
        found[f"all of {count} rounds, {'private' if private else 'masked'}"] = float(
            np.abs(guessed - truth).sum(axis=1).mean()
        )
    found["guess"] = float(np.abs(pooled - truth).sum(axis=1).mean())
    for epsilon in (1.0, 0.1):
        noisy = privatize(task.counts, epsilon, rng)
        noisy = noisy / np.maximum(noisy.sum(axis=1, keepdims=True), 1e-9)
        found[f"noisy counts, epsilon {epsilon:g}"] = float(np.abs(noisy - truth).sum(axis=1).mean())
    return found


def of_each(there: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Each client's number, from who was there in each round and the sums over those; in doubt all alike."""
    middle = np.full(CLIENTS, totals.sum() / there.sum())
    found = middle + np.linalg.solve(there.T @ there + 1e-9 * np.eye(CLIENTS), there.T @ (totals - there @ middle))
    return np.asarray(np.maximum(found, 1e-9))


def alone_without_weight(weighting: BySums, counts: np.ndarray) -> list[np.ndarray]:
    """The counts, `(classes,)`, of clients that FedPALS's questions give away, as whole numbers of sum N or fewer."""
    heard: list[tuple[Facts, np.ndarray]] = []

    def ask(question: Facts) -> np.ndarray:
        heard.append((dict(question), answers_in_sum(weighting, counts, question)))
        return heard[-1][1]

    weighting.announce(ask, TARGET, len(counts))
    (_, moments), *later = heard
    found = []
    for question, answer in later:
        direction, scale = question["direction"], float(question["samples"][0] * question["kappa"][0])
        without = moments @ direction - scale * answer  # sum of n S~ (S~ . z) over those whose weight is 0
        if abs(without[-1]) < 1e-3:
            continue
        mix = without / without[-1]
        own = without[-1] / (mix @ direction) * mix[:-1]
        if own.min() > -0.01 and np.abs(own - np.rint(own)).max() < 0.01:  # of one client: whole numbers
            found.append(np.rint(own))
    return found


def summed(seed: int, rounds: int, name: str) -> dict[str, float]:
    """The L1 errors of one federation whose label counts are only ever summed, and how many clients' are known."""
    method, participation, dropout = SUMMED[name]
    training = TASK["training"] | {"participation": participation}
    engine = {"updates": "masked", "label_counts": "summed"}
    more = {"conditions": {"dropout": dropout}, "target": {"mix": TARGET.tolist()}}
    config = resolve(TASK | more | {"method": method, "training": training, "engine": engine})
    task = make_task(config, seed)
    loop = make_training_loop(config, seed, task=task)
    federation = loop.runner
    assert isinstance(federation, Federation)
    assert isinstance(federation.codec, FixedPoint)
    weighting, announced = federation.method.weighting, federation.codec.announced
    assert isinstance(weighting, BySums)
    assert announced is not None
    sizes = task.counts.sum(axis=1)
    truth, pooled = task.counts / sizes[:, None], task.counts.sum(axis=0) / sizes.sum()
    own = np.array([weighting.own_weight(counts, announced) for counts in task.counts.astype(np.float64)])
    inputs, targets = task.dataset.test_inputs, task.dataset.test_targets
    assert isinstance(inputs, torch.Tensor)
    state, there, moved = federation.start(loop.untrained), np.zeros((0, CLIENTS)), []
    for _ in range(rounds):
        sent = state.model.parameters.clone()
        state, record = federation.run_round(state)
        seen = (outputs(sent, inputs, targets) + outputs(state.model.parameters, inputs, targets)) / 2
        there = np.vstack([there, np.isin(np.arange(CLIENTS), record.answered)])
        moved.append(((state.model.parameters - sent)[-CLASSES:].double().numpy() / LR, seen))
    told = there @ own, there @ np.ceil(sizes / BATCH)  # what opens beside the updates: sums of weights and of steps
    found = {}
    for count in sorted({10, rounds // 2, rounds}):
        weights, steps = (of_each(there[:count], sums[:count]) for sums in told)
        parts = there[:count] * weights * steps
        whole = parts.sum(axis=1)
        sums = [
            mix_of(bias * (took @ weights) / part, seen)
            for (bias, seen), took, part in zip(moved[:count], there[:count], whole, strict=True)
        ]
        guessed = over_rounds(parts / whole[:, None], np.array(sums), pooled)
        found[f"summed, {name}, {count} rounds"] = float(np.abs(guessed - truth).sum(axis=1).mean())
    if weighting.most_questions > 1:
        known = alone_without_weight(weighting, task.counts.astype(np.float64))
        exact = [(task.counts == counts).all(axis=1).any() for counts in known]
        assert all(exact), "found whole numbers that are no client's"
        found[f"summed, {name}, clients of {CLIENTS} whose exact counts are known"] = float(
            len({tuple(counts) for counts in known})
        )
    return found


def main() -> None:
    said = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    said.add_argument("--rounds", type=int, default=60)
    rounds = said.parse_args().rounds
    rows: dict[str, list[float]] = {}
    for seed in range(3):
        for private in (False, True):
            for name, value in played(seed, rounds, private).items():
                if not private or "private" in name:
                    rows.setdefault(name, []).append(value)
        for federation in SUMMED:
            for name, value in summed(seed, rounds, federation).items():
                rows.setdefault(name, []).append(value)
    print("| attack | L1 error of a client's label mix |")
    print("| --- | ---: |")
    for name, values in rows.items():
        print(f"| {name} | {np.mean(values):.2f} |")


if __name__ == "__main__":
    main()
