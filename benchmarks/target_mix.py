"""How good the estimated label mix of a target is, and whether its test notices that label shift does not hold.

    python benchmarks/target_mix.py [--draws 200] [--quick]

Twelve models: MNIST and Fashion-MNIST, 20 clients by Dir(0.1) or with two labels each, after 3, 10 and 30 rounds of
FedAvg (784-200-200-10, half of the clients, one epoch, batch 32, learning rate 0.05). For each, 2,000 held-out and 1000
target samples are drawn from the test set again and again, the target's by a mix from Dir(0.5) that changes with every
20th draw. Printed, as one JSON line for each model: the mean L1 distance of the estimate from the mix, how often 95 %
intervals hold a class's true share, how often the tests at 5 % and 1 % reject; then how often the one at 5 % rejects
where the target's images are rotated by 15 degrees, have 0.6 times their contrast, or carry noise of standard deviation
0.5 (on values from 0 to 1), and `misfit`, which also asks for an effect of 3 points.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedskew
from fedskew.labels import MixEstimate, estimate_mix

EDGES = torch.tensor([0.5, 0.8, 0.95])
CLASSES, CELLS = 10, 10 * (len(EDGES) + 1)
HELD_OUT, TARGET, DRAWS_A_MIX = 2000, 1000, 20
RULES = {
    "Dir(0.1)": {"rule": "dirichlet_by_class", "beta": 0.1, "min_size": 1},
    "two labels": {"rule": "quantity", "labels_per_client": 2},
}


def rotated(images: Tensor) -> Tensor:
    angle = math.radians(15)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = nn.functional.affine_grid(turn.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid, align_corners=False)


def noisy(images: Tensor) -> Tensor:
    return images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda images: images,
    "rotated by 15 degrees": rotated,
    "contrast x 0.6": lambda images: 0.6 * images,
    "noise of sd 0.5": noisy,
}


@torch.inference_mode()
def outcome_cells(network: nn.Module, images: Tensor) -> np.ndarray:
    """Each sample's outcome cell."""
    shares = torch.cat([network(part).softmax(dim=1) for part in images.split(1000)])
    sure, predicted = shares.max(dim=1)
    return (predicted * (len(EDGES) + 1) + torch.bucketize(sure, EDGES, right=True)).numpy()


def drawn(labels: np.ndarray, held: np.ndarray, new: np.ndarray, draws: int) -> list[tuple[np.ndarray, MixEstimate]]:
    """True mixes and their estimates."""
    rng, found = np.random.default_rng(0), []
    by_class = [np.flatnonzero(labels == label) for label in range(CLASSES)]
    for draw in range(draws):
        if draw % DRAWS_A_MIX == 0:
            mix = rng.dirichlet(np.full(CLASSES, 0.5))
        rows = rng.integers(0, len(labels), HELD_OUT)
        tables = np.bincount(labels[rows] * CELLS + held[rows], minlength=CLASSES * CELLS).reshape(CLASSES, CELLS)
        sizes = rng.multinomial(TARGET, mix)
        rows = np.concatenate([rng.choice(own, size) for own, size in zip(by_class, sizes, strict=True)])
        found.append((mix, estimate_mix(tables, np.bincount(new[rows], minlength=CELLS))))
    return found


def figures(found: list[tuple[np.ndarray, MixEstimate]]) -> dict[str, float]:
    inside = [
        ((mix >= ends[:, 0]) & (mix <= ends[:, 1])).mean()
        for mix, estimate in found
        for ends in [estimate.interval(0.95)]
    ]
    return {
        "l1": float(np.mean([np.abs(mix - estimate.mix).sum() for mix, estimate in found])),
        "coverage": float(np.mean(inside)),
        "rejected_5": float(np.mean([estimate.p_value < 0.05 for _, estimate in found])),
        "rejected_1": float(np.mean([estimate.p_value < 0.01 for _, estimate in found])),
        "misfit": float(np.mean([estimate.misfit for _, estimate in found])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="one model")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FEDSKEW_DATA", ".data")))
    arguments = parser.parse_args()
    tasks = [(name, rule, rounds) for name in ("mnist", "fashion_mnist") for rule in RULES for rounds in (3, 10, 30)]
    for name, rule, rounds in tasks[: 1 if arguments.quick else None]:
        result = fedskew.simulate(
            data={"name": name, "root": str(arguments.data)},
            partition={**RULES[rule], "clients": 20},
            model="mlp3",
            training={"rounds": rounds, "participation": 0.5, "batch_size": 32, "lr": 0.05},
            evaluation={"every": rounds},
        )
        network = result.model.eval()
        data = fedskew.data.load(name, arguments.data)
        labels = data.test_targets.numpy()
        inputs = data.test_inputs.index_select(0, torch.arange(len(labels)))
        mean, std = torch.tensor(data.mean).view(-1, 1, 1), torch.tensor(data.std).view(-1, 1, 1)
        held = outcome_cells(network, inputs)
        line: dict[str, object] = {"data": name, "rule": rule, "rounds": rounds}
        line["accuracy"] = float((held // (len(EDGES) + 1) == labels).mean())
        for shift, change in SHIFTS.items():
            new = outcome_cells(network, (change(inputs * std + mean) - mean) / std)
            line[shift] = {
                key: round(value, 3) for key, value in figures(drawn(labels, held, new, arguments.draws)).items()
            }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
