"""What a federation costs on tables: FedAvg with small networks, beside scikit-learn on the pooled rows.

    python benchmarks/tables.py [--seeds 3] [--clients 5] [--beta 0.3] [--rounds 20] [--networks table logistic]
    python benchmarks/tables.py --choose [--seeds 5] [--lr 0.05 0.2]

Tables that come with scikit-learn: breast_cancer, wine, diabetes with its target above the median as the class, digits,
and breast_cancer and diabetes again with every number cut at its quintiles, as categories.
Each seed draws a fifth of every class as the test part, and divides the others among clients by Dir(beta) of the
classes. `pooled` is the same network and number of passes at one client that has all rows. LogisticRegression and
HistGradientBoostingClassifier have scikit-learn's defaults (2,000 iterations at most) and the same standardised
columns. Printed: balanced accuracy on the test part in percent, mean and standard deviation over seeds.

`--choose` compares shapes of `table` with `logistic`, which has no hidden layer, by samples held out of the training
part: 20 % of it, each shape at the best of its learning rates.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score

import fedskew
from fedskew.experiment import load_dataset, resolve

TABLES = {
    "breast_cancer": load_breast_cancer,
    "wine": load_wine,
    "diabetes": load_diabetes,
    "digits": load_digits,
    "breast_cancer, cut": load_breast_cancer,
    "diabetes, cut": load_diabetes,
}
SHAPES = {
    (1, 16): [0.0],
    (1, 64): [0.1, 0.0, 0.3],
    (1, 128): [0.1, 0.0],
    (2, 64): [0.1, 0.0],
}
"""Hidden layers, their units, and the dropouts that are tried with them."""


def written(name: str, folder: Path) -> dict[str, Any]:
    """Write a table as CSV; return the section `data` that reads it."""
    x, y = TABLES[name](return_X_y=True)
    labels = (y > np.median(y)).astype(int) if name.startswith("diabetes") else y.astype(int)
    path, cells = folder / f"{name}.csv", x.tolist()
    columns = {f"x{column}": {"kind": "number"} for column in range(x.shape[1])}
    if name.endswith("cut"):
        names = np.array(["a", "b", "c", "d", "e"])
        places = [np.searchsorted(np.quantile(column, (0.2, 0.4, 0.6, 0.8)), column) for column in x.T]
        cells = names[np.stack(places, axis=1)].tolist()
        columns = {column: {"kind": "category", "categories": names.tolist()} for column in columns}
    lines = [",".join([*map(str, row), f"c{label}"]) for row, label in zip(cells, labels, strict=True)]
    path.write_text("\n".join([",".join([*columns, "label"]), *lines]))
    classes = {"kind": "label", "categories": [f"c{label}" for label in np.unique(labels)]}
    return {"name": "csv", "root": str(path), "schema": {"columns": columns | {"label": classes}}}


def task(
    data: dict[str, Any], seed: int, network: dict[str, Any], partition: dict[str, Any], rounds: int, lr: float
) -> dict[str, Any]:
    return {
        "seeds": [seed],
        "data": data,
        "partition": partition,
        "model": network,
        "training": {"rounds": rounds, "epochs": 2, "batch_size": 16, "lr": lr},
        "evaluation": {"every": rounds},
    }


def trained(tree: dict[str, Any]) -> float:
    """Return the balanced accuracy of the final model on the test part."""
    return float(100 * fedskew.simulate(tree).summary["final"]["balanced_accuracy"])


def validated(tree: dict[str, Any]) -> float:
    """Return the balanced accuracy of the final model on the validation part."""
    tree["data"] = tree["data"] | {"validation": 0.2}
    return float(100 * fedskew.simulate(tree).rounds[-1]["validation"]["balanced_accuracy"])


def choose(networks: dict[str, dict[str, Any]], options: argparse.Namespace, split: dict[str, Any]) -> None:
    """Print what each network reaches on validation samples, by table and in the mean over them."""
    print("| network | " + " | ".join([*options.tables, "mean", "beside the first: mean, standard error"]) + " |")
    print("|" + "---|" * (len(options.tables) + 3))
    base = None
    with tempfile.TemporaryDirectory() as folder:
        data = [written(name, Path(folder)) for name in options.tables]
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        for name, network in networks.items():
            by_rate = np.array([
                [[validated(task(one, seed, network, split, options.rounds, lr)) for seed in seeds] for one in data]
                for lr in options.lr
            ])  # fmt: skip
            best = by_rate.mean(axis=2).argmax(axis=0)  # of each table
            found = by_rate[best, np.arange(len(data))]
            cells = [
                f"{row.mean():.1f} ± {row.std(ddof=1):.1f} ({options.lr[at]:g})"
                for row, at in zip(found, best, strict=True)
            ]
            base = found if base is None else base
            gain = (found - base).mean(axis=0)  # of each seed
            error = gain.std(ddof=1) / np.sqrt(len(gain))
            print(
                f"| {name} | " + " | ".join([*cells, f"{found.mean():.1f}", f"{gain.mean():+.2f}, {error:.2f}"]) + " |",
                flush=True,
            )


def of_scikit_learn(tree: dict[str, Any]) -> list[float]:
    data = load_dataset(resolve(tree), tree["seeds"][0])
    parts = [np.asarray(part) for part in (data.inputs, data.targets, data.test_inputs, data.test_targets)]
    found = []
    for model in (LogisticRegression(max_iter=2000), HistGradientBoostingClassifier(random_state=tree["seeds"][0])):
        predicted = model.fit(parts[0], parts[1]).predict(parts[2])
        found.append(100 * balanced_accuracy_score(parts[3], predicted))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choose", action="store_true", help="compare shapes on samples held out for validation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--beta", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.05], help="several with --choose")
    parser.add_argument("--networks", nargs="+", help="such as table:width=32,layers=2")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    split = {"rule": "dirichlet_by_class", "clients": options.clients, "beta": options.beta, "min_size": 5}
    whole = {"rule": "iid", "clients": 1}
    networks = {}
    shapes = [
        f"table:layers={shape[0]},width={shape[1]},dropout={share}" for shape in SHAPES for share in SHAPES[shape]
    ]
    for text in options.networks or (["logistic", *shapes] if options.choose else ["table", "logistic"]):
        name, _, more = text.partition(":")
        values = dict(part.split("=") for part in more.split(",") if part)
        networks[text] = {"name": name} | {
            key: float(value) if "." in value else int(value) for key, value in values.items()
        }
    if options.choose:
        choose(networks, options, split)
        return
    columns = [f"{name}, {how}" for name in networks for how in ("federated", "pooled")]
    print("| table | " + " | ".join([*columns, "LogisticRegression", "HistGradientBoosting"]) + " |")
    print("|" + "---|" * (len(columns) + 3))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.tables:
            data, rows = written(name, Path(folder)), []
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                row = [
                    trained(task(data, seed, network, partition, options.rounds, options.lr[0]))
                    for network in networks.values()
                    for partition in (split, whole)
                ]
                rows.append(row + of_scikit_learn(task(data, seed, {"name": "logistic"}, whole, 1, 0.1)))
            mean, spread = np.mean(rows, axis=0), np.std(rows, axis=0, ddof=1)
            cells = [f"{middle:.1f} ± {around:.1f}" for middle, around in zip(mean, spread, strict=True)]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
