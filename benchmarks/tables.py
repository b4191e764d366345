"""What a federation costs on tables: FedAvg with small networks, beside scikit-learn on the pooled rows.

    python benchmarks/tables.py [--seeds 3] [--clients 5] [--beta 0.3] [--rounds 20] [--networks table logistic]

Tables that come with scikit-learn: breast_cancer, wine, and diabetes with its target above the median as the class.
Each seed draws a fifth of every class as the test part, and divides the others among clients by Dir(beta) of the
classes. `pooled` is the same network and number of passes at one client that has all rows. LogisticRegression and
HistGradientBoostingClassifier have scikit-learn's defaults (2,000 iterations at most) and the same standardised
columns. Printed: balanced accuracy on the test part in percent, mean and standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score

import fedskew
from fedskew.experiment import load_dataset, resolve

TABLES = {
    "breast_cancer": load_breast_cancer,
    "wine": load_wine,
    "diabetes": load_diabetes,
}


def written(name: str, folder: Path) -> Path:
    """Write a table as CSV."""
    x, y = TABLES[name](return_X_y=True)
    labels = (y > np.median(y)).astype(int) if name == "diabetes" else y.astype(int)
    path = folder / f"{name}.csv"
    lines = [",".join([*map(repr, row), f"c{label}"]) for row, label in zip(x.tolist(), labels, strict=True)]
    path.write_text("\n".join([",".join([*(f"x{column}" for column in range(x.shape[1])), "label"]), *lines]))
    return path


def task(path: Path, seed: int, network: dict[str, object], partition: dict[str, object], rounds: int, lr: float):
    return {
        "seeds": [seed],
        "data": {"name": "csv", "root": str(path)},
        "partition": partition,
        "model": network,
        "training": {"rounds": rounds, "epochs": 2, "batch_size": 16, "lr": lr},
        "evaluation": {"every": rounds},
    }


def trained(tree: dict[str, object]) -> float:
    """Return the balanced accuracy of the final model on the test part."""
    return 100 * fedskew.simulate(tree).summary["final"]["balanced_accuracy"]


def of_scikit_learn(tree: dict[str, object]) -> list[float]:
    data = load_dataset(resolve(tree), tree["seeds"][0])
    parts = [part.numpy() for part in (data.inputs, data.targets, data.test_inputs, data.test_targets)]
    found = []
    for model in (LogisticRegression(max_iter=2000), HistGradientBoostingClassifier(random_state=tree["seeds"][0])):
        predicted = model.fit(parts[0], parts[1]).predict(parts[2])
        found.append(100 * balanced_accuracy_score(parts[3], predicted))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--beta", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--networks", nargs="+", default=["table", "logistic"], help="such as table:width=32,layers=2")
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    split = {"rule": "dirichlet_by_class", "clients": options.clients, "beta": options.beta, "min_size": 5}
    whole = {"rule": "iid", "clients": 1}
    networks = {}
    for text in options.networks:
        name, _, more = text.partition(":")
        values = dict(part.split("=") for part in more.split(",") if part)
        networks[text] = {"name": name} | {
            key: float(value) if "." in value else int(value) for key, value in values.items()
        }
    columns = [f"{name}, {how}" for name in networks for how in ("federated", "pooled")]
    print("| table | " + " | ".join([*columns, "LogisticRegression", "HistGradientBoosting"]) + " |")
    print("|" + "---|" * (len(columns) + 3))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.tables:
            path, rows = written(name, Path(folder)), []
            for seed in range(options.seeds):
                row = [
                    trained(task(path, seed, network, partition, options.rounds, options.lr))
                    for network in networks.values()
                    for partition in (split, whole)
                ]
                rows.append(row + of_scikit_learn(task(path, seed, {"name": "logistic"}, whole, 1, 0.1)))
            mean, spread = np.mean(rows, axis=0), np.std(rows, axis=0, ddof=1)
            cells = [f"{middle:.1f} ± {around:.1f}" for middle, around in zip(mean, spread, strict=True)]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
