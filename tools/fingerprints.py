"""Hashes of what a score of small runs write, so that a refactoring can show that it changed no bit.

    python tools/fingerprints.py before.json                    # on the code as it was
    python tools/fingerprints.py after.json --compare before.json

The runs cover every slot, both CPU backends that share bits, the lock-step one, a pipeline, client states, quotas, a
kill and resume, several seeds, a report and a sweep's tables. Seconds, versions and the machine are left out, so the
hashes depend on the code, PyTorch's version and the processor only. Which files differ is printed by run and file;
with --compare, the exit status is 1 where any does. It takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import fedskew
from fedskew.data import Dataset

VOLATILE = {"seconds", "versions", "machine", "revision", "command", "directory", "data_root", "files"}


def pictures() -> Dataset:
    """300 noisy 3 x 32 x 32 pictures of 5 classes."""
    rng = np.random.default_rng(0)
    targets = torch.from_numpy(rng.integers(0, 5, size=300))
    centres = rng.normal(size=(5, 3, 32, 32))
    inputs = torch.from_numpy((centres[targets] + rng.normal(size=(300, 3, 32, 32))).astype(np.float32))
    return Dataset(
        name="pictures",
        inputs=inputs[:240],
        targets=targets[:240],
        test_inputs=inputs[240:],
        test_targets=targets[240:],
        classes=tuple("abcde"),
    )


class Normalised(torch.nn.Sequential):
    """A network with batch norm and dropout."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        width = int(np.prod(in_shape))
        super().__init__(
            torch.nn.Flatten(),
            torch.nn.Linear(width, 24),
            torch.nn.BatchNorm1d(24),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(24, num_classes),
        )


DIRICHLET = {"rule": "dirichlet_by_class", "clients": 12, "beta": 0.2, "min_size": 1}
QUANTITY = {"rule": "quantity", "clients": 12, "labels_per_client": 3}
TRAINING = {"rounds": 4, "participation": 0.5, "epochs": 2, "batch_size": 16, "lr": 0.05}
DIGITS = {"data": "digits", "partition": DIRICHLET, "model": "mlp3", "training": TRAINING}
COHORT = {"backend": "cohort"}
PICTURES: dict[str, Any] = {
    "data": {"name": "fingerprints:pictures"},
    "partition": QUANTITY | {"clients": 5},
    "training": TRAINING | {"rounds": 2, "participation": 1.0, "epochs": 1, "momentum": 0.9, "weight_decay": 1e-4},
}

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": DIGITS | {"method": "fedavg"},
    "fedentopt+fedvls": DIGITS | {"method": "fedentopt+fedvls", "evaluation": {"clients": True, "every": 2}},
    "scaffold+fedla": DIGITS
    | {
        "method": "scaffold+fedla",
        "training": TRAINING | {"momentum": 0.5, "weight_decay": 1e-4, "lr_decay": 0.99},
        "conditions": {"dropout": 0.3, "stragglers": 0.5, "count_epsilon": 1.0, "count_use": "all"},
    },
    "fedpals": DIGITS
    | {
        "method": {"preset": "fedpals+fedprox", "weighting": {"name": "fedpals", "ess": 0.5}},
        "partition": {"rule": "sparsity", "clients": 9, "labels_per_client": 3},
        "target": {"noise": 0.1},
        "data": {"name": "digits", "validation": 0.1},
        "evaluation": {"patience": 3},
    },
    "fedpals-oracle": DIGITS
    | {"method": "fedpals", "partition": DIRICHLET | {"oracle": True}, "target": {"mix": "uniform"}},
    "moon": DIGITS | {"method": "moon"},
    "fpl": DIGITS | {"method": "fpl"},
    "seol_kim": DIGITS | {"method": "seol_kim+fedntd"},
    "greedy_kl+fedlc+fednova": DIGITS | {"method": "greedy_kl+fedlc+fednova", "partition": QUANTITY},
    "fedsam+fedrs+fedexp": DIGITS | {"method": "fedsam+fedrs+fedexp"},
    "fedgf+afl+fedlmd": DIGITS | {"method": "fedgf+afl+fedlmd", "training": TRAINING | {"lr": 0.01}},
    "fedkd+fedekd+feddkd+fedmr": DIGITS | {"method": "fedkd+fedekd+feddkd+fedmr"},
    "fedconcat": DIGITS
    | {"method": {"preset": "fedconcat", "pipeline": {"name": "fedconcat", "clusters": 3, "encoder_rounds": 2}}},
    "tuned": DIGITS
    | {
        "data": {"name": "digits", "validation": 0.1},
        "method": "fedprox",
        "tune": {"key": "method.local_step.mu", "values": [0.01, 0.1]},
    },
    "batch-norm": DIGITS
    | {
        "model": {"name": "fingerprints:Normalised"},
        "method": "fedvls",
        "training": TRAINING | {"persist_momentum": True, "momentum": 0.9, "smallest_batch": 2},
    },
    "two-seeds": DIGITS | {"seeds": [0, 1], "method": "fedentopt"},
    "processes": DIGITS | {"method": "scaffold", "engine": {"backend": "processes", "processes": 2}},
    "cohort": DIGITS | {"method": "fedvls+fedsam", "engine": COHORT | {"chunk": 4}},
    "cohort-scaffold": DIGITS | {"method": "scaffold", "engine": COHORT},
    "cohort-batch-norm": DIGITS
    | {
        "model": {"name": "fingerprints:Normalised"},
        "method": "fedntd",
        "engine": COHORT,
        "training": TRAINING | {"smallest_batch": 2},
    },
    "seeds-together": DIGITS | {"seeds": [0, 1], "method": "fedlc", "engine": COHORT | {"seeds_together": True}},
    "lenet5": PICTURES
    | {"model": "lenet5", "method": "fedvls", "training": PICTURES["training"] | {"augmentation": "crop_flip"}},
    "cnn_w2": PICTURES | {"model": "cnn_w2", "method": "fedavg"},
}


def main() -> int:
    """Run all, write the hashes, and compare them where asked."""
    parser = argparse.ArgumentParser(description="Hash what small runs write.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", help="comma-separated names of runs")
    given = parser.parse_args()
    runs: dict[str, Callable[[Path], None]] = {name: partial(run, tree) for name, tree in RUNS.items()}
    runs |= {"resumed": killed_and_resumed, "sweep": sweep}
    only = given.only.split(",") if given.only else [*runs]
    if unknown := sorted({*only} - runs.keys()):
        parser.error(f"--only: no run is called {', '.join(unknown)}; there are {', '.join(runs)}")
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, write in runs.items():
            if name in only:
                out = Path(scratch) / name.replace("+", "-")
                write(out)
                found[name] = fingerprints(out)
                print(f"{name}: {len(found[name])} files", flush=True)
    given.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if given.compare is None:
        return 0
    before = json.loads(given.compare.read_text(encoding="utf-8"))
    changes = [
        f"{name}: {path}"
        for name in found
        for path in sorted({*found[name], *before.get(name, {})})
        if found[name].get(path) != before.get(name, {}).get(path)
    ]
    print("\n".join(changes) or "no file differs")
    return 1 if changes else 0


def run(tree: dict[str, Any], out: Path, **how: Any) -> None:
    """One config, in a folder."""
    name = {"name": "run"}
    fedskew.simulate(name | tree, out=out, **how)


def killed_and_resumed(out: Path) -> None:
    """A run that is interrupted in round 3 and goes on."""
    tree = DIGITS | {"method": "scaffold+fedentopt"}

    def interrupt(record: Any) -> None:
        number = record["round"] if isinstance(record, dict) else record.round
        if number == 2:
            raise KeyboardInterrupt

    try:
        run(tree, out, progress=interrupt)
    except KeyboardInterrupt:
        run(tree, out, resume=True)


def sweep(out: Path) -> None:
    """The tables of two runs."""
    from fedskew.experiment import Sweep, run_sweep

    out.mkdir()
    text = """
        name = "swept"
        seeds = [0]
        data = {name = "digits"}
        model = {name = "logistic"}
        partition = {rule = "quantity", clients = 10, labels_per_client = 2}
        training = {rounds = 3, participation = 0.5, lr = 0.1}
        [sweep]
        accuracy = 0.5
        methods = ["fedavg", "fedla"]
    """
    (out / "sweep.toml").write_text("\n".join(line.strip() for line in text.splitlines()), encoding="utf-8")
    run_sweep(Sweep.read(out / "sweep.toml"), out / "runs", processes=2)


def fingerprints(folder: Path) -> dict[str, str]:
    """A hash for each file, by its path without hashes of configs."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = re.sub(r"-[0-9a-f]{8}(?=/)", "", str(path.relative_to(folder)))
        found[name] = hashlib.sha256(_content(path)).hexdigest()[:16]
    return found


def _content(path: Path) -> bytes:
    """What a file says, without times, machine and the folder that it happens to be in."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="np") as file:
            parts = [(name, file.get_tensor(name)) for name in sorted(file.keys())]
        return b"".join(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes() for name, array in parts)
    if path.suffix == ".npz":
        with np.load(path) as file:
            return b"".join(name.encode() + np.ascontiguousarray(file[name]).tobytes() for name in sorted(file.files))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        text = "\n".join(json.dumps(_steady(json.loads(line)), sort_keys=True) for line in text.splitlines())
    elif path.suffix == ".json":
        text = json.dumps(_steady(json.loads(text)), sort_keys=True)
    elif path.suffix == ".csv":
        lines = [line.split(",") for line in text.splitlines()]
        kept = [at for at, heading in enumerate(lines[0]) if "seconds" not in heading and heading != "folder"]
        text = "\n".join(",".join(line[at] for at in kept) for line in lines)
    elif path.suffix in (".html", ".md"):
        pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)  # the rest holds seconds and the machine
        text = "\n".join(pictures)
    return text.encode()


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _steady(part) for key, part in value.items() if key not in VOLATILE}
    return [_steady(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.modules["fingerprints"] = sys.modules["__main__"]
    sys.path.insert(0, str(Path(__file__).parent))
    if shutil.which("git") is None:
        print("git is not there: revisions are not recorded", file=sys.stderr)
    sys.exit(main())
