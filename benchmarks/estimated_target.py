"""What an estimated target mix is worth: FedPALS that is told the truth, FedPALS with the estimate, a model adapted.

    python benchmarks/estimated_target.py [--seeds 5] [--rounds 45] [--only MNIST] [--out FOLDER]

Twelve federations: MNIST and Fashion-MNIST; Dir(0.1), Dir(0.5), two labels a client; a target of a mix from Dir(0.5)
(another for each seed) and one in which classes 5 to 9 are nine times as frequent. 20 clients with about 500 samples,
of which a fifth is held out, 10 a round; 784-100-100-10, 2 epochs, batch 32, learning rate 0.05; 1,000 unlabelled ones.
Printed, as one JSON line for each federation and method: accuracy on the target and on all classes alike, mean of the
evaluations in the last 10 rounds, as means over seeds; the same for the last round's model and for what `fedskew adapt`
makes of it; the mean L1 distance of the last estimate from the truth; seconds of the process. Then the mean over the
federations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedskew
from fedskew.engine import predict
from fedskew.experiment import Result, adaptation, held_out_of, make_task
from fedskew.metrics import per_class_accuracy, target_accuracy

RULES: dict[str, dict[str, Any]] = {
    "Dir(0.1)": {"rule": "dirichlet_by_class", "beta": 0.1, "min_size": 1},
    "Dir(0.5)": {"rule": "dirichlet_by_class", "beta": 0.5, "min_size": 1},
    "two labels": {"rule": "quantity", "labels_per_client": 2},
}
DATA = {"MNIST": "mnist", "Fashion-MNIST": "fashion_mnist"}
NINE_TO_ONE = [1.0] * 5 + [9.0] * 5
METHODS = {
    "FedAvg": ("fedavg", "estimate"),
    "FedPALS, truth": ("fedpals", "truth"),
    "FedPALS, estimate": ("fedpals", "estimate"),
}


def config(data: str, rule: str, target: list[float], method: str, seed: int, rounds: int) -> dict[str, Any]:
    """The config of one run."""
    weighs, told = METHODS[method]
    mix: dict[str, Any] = {"mix": "estimate", "truth": target} if told == "estimate" else {"mix": target}
    return {
        "data": {"name": DATA[data], "rows": 14_300, "validation": 0.3, "held_out": 0.2},
        "partition": RULES[rule] | {"clients": 20},
        "model": {"name": "mlp3", "width": 100},
        "method": weighs,
        "training": {"rounds": rounds, "participation": 0.5, "epochs": 2, "batch_size": 32, "lr": 0.05},
        "target": mix,
        "evaluation": {"every": 2},
        "engine": {"backend": "cohort"},
        "seeds": [seed],
    }


def adapted(run: Result, samples: torch.Tensor, mix: np.ndarray) -> tuple[float, float]:
    """Accuracy of the adapted model on the target and on all classes alike."""
    assert run.folder is not None
    model = fedskew.load(run.folder)
    found = adaptation(model, samples, held_out_of(model), normalised=(True, True))
    dataset = make_task(run.config, run.config.seeds[0]).dataset
    confusion, _ = predict(found.model.network, dataset.test_inputs, dataset.test_targets, len(model.classes))
    return target_accuracy(confusion, mix), float(np.nanmean(per_class_accuracy(confusion)))


def measured(tree: dict[str, Any], target: list[float], out: Path) -> dict[str, float]:
    """What one run gives."""
    began = time.process_time()
    run = fedskew.simulate(tree, out=out, progress=False)
    estimated = tree | {"target": {"mix": "estimate", "truth": target}}
    task = make_task(fedskew.experiment.resolve(estimated), tree["seeds"][0])
    mix = np.array(target) / sum(target)
    assert isinstance(task.unlabelled, torch.Tensor)
    after = adapted(run, task.unlabelled, mix)
    estimates = [record["target"]["mix"] for record in run.rounds if record.get("target", {}).get("mix")]
    return {
        "target": run.summary["last10"]["target_accuracy"],
        "all": run.summary["last10"]["balanced_accuracy"],
        "target, last": run.summary["final"]["target_accuracy"],
        "all, last": run.summary["final"]["balanced_accuracy"],
        "target, adapted": after[0],
        "all, adapted": after[1],
        "L1": float(np.abs(np.array(estimates[-1]) - mix).sum()) if estimates else np.nan,
        "seconds": time.process_time() - began,
    }


def means(found: list[dict[str, float]]) -> dict[str, float | None]:
    """The mean of each figure; None where it is nowhere known."""
    columns = {key: np.array([entry[key] for entry in found], dtype=float) for key in found[0]}
    return {
        key: None if np.isnan(values).all() else round(float(np.nanmean(values)), 4) for key, values in columns.items()
    }


def main() -> None:
    """Run all, and print the table."""
    parser = argparse.ArgumentParser(description="What an estimated target mix is worth in training.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--only", choices=DATA)
    parser.add_argument("--out", type=Path, help="where the runs are written, and kept")
    given = parser.parse_args()
    torch.set_num_threads(1)
    federations = itertools.product([given.only] if given.only else DATA, RULES, ("Dir(0.5)", "9:1"))
    whole: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    with tempfile.TemporaryDirectory() as scratch:
        for data, rule, kind in federations:
            for method in METHODS:
                found = []
                for seed in range(given.seeds):
                    drawn = np.random.default_rng(seed).dirichlet(np.full(10, 0.5)).tolist()
                    target = drawn if kind == "Dir(0.5)" else NINE_TO_ONE
                    tree = config(data, rule, target, method, seed, given.rounds)
                    found.append(measured(tree, target, given.out or Path(scratch)))
                whole[method] += found
                said = {"data": data, "partition": rule, "mix": kind, "method": method} | means(found)
                print(json.dumps(said), flush=True)
    for method, found in whole.items():
        print(json.dumps({"method": method, "runs": len(found)} | means(found)))


if __name__ == "__main__":
    main()
