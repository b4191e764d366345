"""A body pretrained on 50 classes of CIFAR-100, then federated on the other 50: its head alone, LoRA, all of it.

    python benchmarks/pretrained.py body FOLDER [--data .data]       # trains FOLDER/body.safetensors, or goes on
    python benchmarks/pretrained.py tune FOLDER RESULTS.jsonl        # learning rates, on validation samples of seed 100
    python benchmarks/pretrained.py train FOLDER RESULTS.jsonl [--seeds 0 1 2]
    python benchmarks/pretrained.py table RESULTS.jsonl              # Markdown: accuracy, MB, seconds
    python benchmarks/pretrained.py features FOLDER                  # FOLDER/cifar10.npz and more, for heads.toml

Twenty clients hold the 25,000 samples by Dir(0.1) a class, a quarter takes part in each of 20 rounds of one epoch, in
batches of 32, SGD with momentum 0.9; one thread. A line of RESULTS is a training; what is there is not trained again.
`gaussian` trains nothing: its head is computed from sums over the clients in one exchange. `features` are what the body
makes of 12,000 training and 5,000 test samples of four data sets; grey ones get margins and three channels. Of texts
(AG News, 4,000 and 5,000) the body is a latent semantic analysis, 128 numbers a text, fitted to 4,815 other training
texts without their labels; `words.npz`, for words.toml, says which of the 1,000 words that are commonest there each of
the same texts has. Tables, scikit-learn's digits and breast_cancer, are their standardised columns; a fifth
is the test part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch import Tensor, nn

import fedskew
from fedskew.data import Dataset, load, take

Key = tuple[str, float, int]
TUNING = 100
WIDTHS = (3, 32, 64, 128, 256)


class Body(nn.Module):
    """Four convolutions of 3 x 3, each with batch norm, ReLU and pooling; 256 features."""

    def __init__(self, num_classes: int = 50) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for place, (ins, outs) in enumerate(itertools.pairwise(WIDTHS)):
            pool = nn.MaxPool2d(2) if place < 3 else nn.AvgPool2d(4)
            layers += [nn.Conv2d(ins, outs, 3, padding=1), nn.BatchNorm2d(outs), nn.ReLU(), pool]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTHS[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.blocks(x).flatten(1))
        return outputs


def half(classes: Sequence[int], root: str) -> Dataset:
    """CIFAR-100 with some of its classes, numbered in their order."""
    whole = load("cifar100", root)
    number = torch.full((len(whole.classes),), -1)
    number[list(classes)] = torch.arange(len(classes))
    parts: dict[str, Any] = {}
    for part in ("", "test_"):
        targets = number[getattr(whole, f"{part}targets")]
        rows = torch.nonzero(targets >= 0).flatten()
        parts |= {f"{part}inputs": take(getattr(whole, f"{part}inputs"), rows), f"{part}targets": targets[rows]}
    return replace(whole, name="cifar100-half", classes=tuple(whole.classes[i] for i in classes), **parts)


def pretrain(folder: Path, root: str) -> None:
    """Train the body in one place on the first 50 classes."""
    result = fedskew.simulate(
        data=half(range(50), root),
        partition={"rule": "iid", "clients": 1},
        model=Body(),
        training={
            "rounds": 24,
            "batch_size": 64,
            "lr": 0.1,
            "lr_decay": 0.85,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "augmentation": "crop_flip",
        },
        evaluation={"every": 4},
        engine={"backend": "sequential"},
        out=folder / "run",
        resume=True,
    )
    whole = result.model.state_dict()
    body = {name: values.contiguous() for name, values in whole.items() if not name.startswith("head.")}
    save_file(body, folder / "body.safetensors")
    print(result.summary["final"]["accuracy"])


WAYS: dict[str, dict[str, Any]] = {
    "gaussian": {"train": ["head.*"]},
    "head": {"train": ["head.*"]},
    "head, features anew": {"train": ["head.*"]},
    "LoRA": {
        "adapters": {
            "kind": "lora",
            "rank": 8,
            "targets": ["blocks.4", "blocks.8", "blocks.12"],
            "modules_to_save": ["head"],
        }
    },
    "all": {},
}
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)


def federate(way: str, lr: float, seed: int, validation: float, body: Path, root: str) -> dict[str, float]:
    """Train one way on the other classes; return accuracies, megabytes up in all, parameters, and seconds."""
    one_pass = way == "gaussian"
    began = time.perf_counter()
    result = fedskew.simulate(
        data={"name": half(range(50, 100), root), "validation": validation},
        partition={"rule": "dirichlet_by_class", "clients": 20, "beta": 0.1},
        model={"name": Body(), "weights": str(body), **WAYS[way]},
        method={"preset": "fedavg", **({"finish": "gaussian"} if one_pass else {})},
        training={
            "rounds": 0 if one_pass else 20,
            "participation": 0.25,
            "batch_size": 32,
            "lr": lr,
            "momentum": 0.9,
        },
        evaluation={"every": 20},
        engine={"backend": "sequential", "keep_features": way != "head, features anew"},
        seeds=[seed],
    )
    seconds = time.perf_counter() - began
    summary = result.summary
    final = summary["finished"]["evaluation"] if one_pass else summary["final"]
    sent = summary["finished"]["bytes_up"] if one_pass else sum(one["bytes_up"] for one in result.rounds)
    validated = result.rounds[-1]["validation"]
    judged = 0.0 if validated is None else validated["accuracy"]
    return {"accuracy": final["accuracy"], "validation": judged, "mb_up": sent / 1e6, "seconds": round(seconds, 1)}


def featured(dataset: Dataset, body: nn.Module) -> dict[str, Any]:
    """Return what the body makes of some of a data set's samples, and their labels, as an .npz file has them."""
    rng, made = np.random.default_rng(0), dict[str, Any]()
    for part, number in (("", 12_000), ("_test", 5_000)):
        prefix = "test_" if part else ""
        targets = getattr(dataset, f"{prefix}targets")
        rows = torch.from_numpy(rng.permutation(len(targets))[:number])
        inputs = getattr(dataset, f"{prefix}inputs").index_select(0, rows)
        margin = (32 - inputs.shape[-1]) // 2
        whole = nn.functional.pad(inputs, [margin] * 4).expand(-1, 3, -1, -1)
        with torch.no_grad():
            made[f"x{part}"] = torch.cat([body(some).flatten(1) for some in whole.split(64)]).numpy()
        made[f"y{part}"] = targets[rows].numpy()
    return made


def featured_texts(root: str, analysis: Any) -> dict[str, Any]:
    """Return the features of AG News, and its labels."""
    news, rng = load("ag_news", root, subset=True), np.random.default_rng(0)
    order, test = rng.permutation(len(news.targets)), rng.permutation(len(news.test_targets))[:5_000]
    encoder: Any = news.encoder
    texts, other = (np.array(encoder.decode(part)) for part in (news.inputs, news.test_inputs))
    analysis.fit(texts[order[4_000:]])
    rows = order[:4_000]
    return {
        "x": analysis.transform(texts[rows]).astype(np.float32),
        "y": news.targets.numpy()[rows],
        "x_test": analysis.transform(other[test]).astype(np.float32),
        "y_test": news.test_targets.numpy()[test],
    }


def featured_table(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Return a table's standardised columns, and its labels."""
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    scaled = StandardScaler().fit(x)
    columns = {"x": scaled.transform(x), "x_test": scaled.transform(x_test)}
    return {name: part.astype(np.float32) for name, part in columns.items()} | {"y": y, "y_test": y_test}


def write_features(folder: Path, root: str) -> None:
    """Write the features of each data set."""
    analysis = make_pipeline(TfidfVectorizer(sublinear_tf=True), TruncatedSVD(128, random_state=0), StandardScaler())
    np.savez(folder / "ag_news.npz", **featured_texts(root, analysis))
    dense = FunctionTransformer(methodcaller("toarray"), accept_sparse=True)
    words = make_pipeline(CountVectorizer(binary=True, max_features=1_000), dense)
    np.savez(folder / "words.npz", **featured_texts(root, words))
    np.savez(folder / "digits.npz", **featured_table(*load_digits(return_X_y=True)))
    np.savez(folder / "breast_cancer.npz", **featured_table(*load_breast_cancer(return_X_y=True)))
    body = Body().eval()
    body.load_state_dict(load_file(folder / "body.safetensors"), strict=False)
    for name in ("mnist", "fashion_mnist", "cifar10", "cifar100"):
        dataset = half(range(50, 100), root) if name == "cifar100" else load(name, root)
        np.savez(folder / f"{name}.npz", **featured(dataset, body.blocks))
        print(folder / f"{name}.npz", flush=True)


def known(results: Path) -> dict[Key, dict[str, float]]:
    """Read what has been trained."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {(one["way"], one["lr"], one["seed"]): one for one in map(json.loads, lines)}


def extend(results: Path, keys: Iterable[Key], validation: float, body: Path, root: str) -> None:
    """Train what is not there yet."""
    for way, lr, seed in keys:
        if (way, lr, seed) not in known(results):
            figures = federate(way, lr, seed, validation, body, root)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"way": way, "lr": lr, "seed": seed, **figures}) + "\n")
            print(way, lr, seed, figures, flush=True)


def best_rate(way: str, results: Path) -> float:
    """Return the rate that was best on validation samples."""
    if way == "gaussian":
        return RATES[2]  # of which nothing depends
    tuned = {
        lr: one["validation"] for (name, lr, seed), one in known(results).items() if seed == TUNING and name == way
    }
    return max(tuned, key=tuned.__getitem__)


def print_table(results: Path) -> None:
    """Print mean and standard deviation over seeds."""
    print("| what trains | rate | seeds | accuracy, % | MB up | seconds |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for way in WAYS:
        found = [one for (name, _, seed), one in known(results).items() if name == way and seed != TUNING]
        if found:
            figures = {key: [one[key] for one in found] for key in ("accuracy", "mb_up", "seconds")}
            spread = f" ± {100 * stdev(figures['accuracy']):.1f}" if len(found) > 1 else ""
            print(
                f"| {way} | {found[0]['lr']:g} | {len(found)} | {100 * mean(figures['accuracy']):.1f}{spread} | "
                f"{mean(figures['mb_up']):.1f} | {mean(figures['seconds']):.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["body", "tune", "train", "table", "features"])
    parser.add_argument("paths", type=Path, nargs="+", metavar="FOLDER RESULTS.jsonl")
    parser.add_argument("--data", default=".data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    folder, results = arguments.paths[0], arguments.paths[-1]
    body = folder / "body.safetensors"
    trained = [way for way in WAYS if way not in ("gaussian", "head, features anew")]
    if arguments.what == "body":
        pretrain(folder, arguments.data)
    elif arguments.what == "features":
        write_features(folder, arguments.data)
    elif arguments.what == "tune":
        extend(results, itertools.product(trained, RATES, [TUNING]), 0.1, body, arguments.data)
    elif arguments.what == "train":
        rates = {way: best_rate("head" if way.startswith("head") else way, results) for way in WAYS}
        keys = ((way, rates[way], seed) for seed in arguments.seeds for way in WAYS)
        extend(results, keys, 0.0, body, arguments.data)
    else:
        print_table(results)


if __name__ == "__main__":
    main()
