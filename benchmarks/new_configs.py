"""What configs as `fedskew new` writes them reach, beside the same network trained on all samples in one place.

    python benchmarks/new_configs.py                        # the tables and images that come with packages
    python benchmarks/new_configs.py --data-root DATA       # MNIST and AG News too

Every line is one config, with every rule on `digits`; accuracies are of the final model, mean over the seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn import datasets

import fedskew
from fedskew.cli import app
from fedskew.partition import INDEX

STEPS = 2000  # of the pooled training


def write_data(folder: Path) -> None:
    """Write tables of scikit-learn as CSV files, and its digits as a folder of images."""
    for name in ("iris", "wine", "breast_cancer"):
        found = getattr(datasets, f"load_{name}")()
        with (folder / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow([*found.feature_names, "label"])
            rows.writerows([*x, found.target_names[y]] for x, y in zip(found.data, found.target, strict=True))
    found = datasets.load_digits()
    for number, (image, label) in enumerate(zip(found.images, found.target, strict=True)):
        place = folder / "images" / f"digit {label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).resize((16, 16)).save(place / f"{number}.png")


def lines(root: str | None) -> list[list[str]]:
    """Return the options of `fedskew new` for every line."""
    found = [["--rule", rule] for rule in INDEX if rule not in ("natural", "dirichlet_within_domains")]
    found += [["--model", "logistic"]]
    found += [["--method", name] for name in ("fedentopt", "fedvls", "fedpals")]
    found += [["--data", "csv", "--root", f"{name}.csv"] for name in ("iris", "wine", "breast_cancer")]
    found += [["--data", "csv", "--root", "breast_cancer.csv", "--model", "logistic"]]
    found += [["--data", "folder", "--root", "images", "--model", name] for name in ("mlp3", "lenet5")]
    if root is not None:
        mnist = ["--data", "mnist", "--root", root, "--set", "data.rows=5000"]
        found += [[*mnist, "--model", name] for name in ("mlp3", "cnn_mnist")]
        found += [["--data", "ag_news", "--root", root, "--set", "data.subset=true"]]
    return found


def accuracy(config: dict[str, Any], seeds: list[int]) -> float:
    """Return the final model's accuracy in percent, mean over the seeds."""
    seen = {"every": config["training"]["rounds"]}
    found = [fedskew.simulate(config | {"seeds": [seed], "evaluation": seen}).summary["final"] for seed in seeds]
    return float(100 * statistics.mean(summary["accuracy"] for summary in found))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=lambda text: str(Path(text).resolve()))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="Only lines with these words.")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    torch.set_num_threads(1)
    print("| with | clients | rounds | batch | accuracy, % | pooled, % | share, % |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        write_data(Path())
        for words in lines(given.data_root):
            if given.only not in " ".join(words):
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                app(["new", "my.toml", "--force", *words], standalone_mode=False)
            config = tomllib.loads(Path("my.toml").read_text(encoding="utf-8"))
            training = config["training"]
            one = {"partition": {"rule": "iid", "clients": 1}, "method": "fedavg", "target": {}}
            steps = {"rounds": 10, "steps": STEPS // 10, "batch_size": training["batch_size"], "lr": training["lr"]}
            ours, pooled = accuracy(config, seeds), accuracy(config | one | {"training": steps}, seeds)
            said = " ".join(Path(word).name if word == given.data_root else word for word in words)
            shape = f"{config['partition']['clients']} | {training['rounds']} | {training['batch_size']}"
            print(f"| `{said}` | {shape} | {ours:.1f} | {pooled:.1f} | {100 * ours / pooled:.0f} |", flush=True)


if __name__ == "__main__":
    main()
