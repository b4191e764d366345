"""Rounds per second against hand-written loops, pfl and Flower, on the same data, partition and cohorts.

    python benchmarks/simulators.py w1|w2|w3 [--quick] [--device cuda] [--only NAME ...] [--turns 3]

- w1: CIFAR-10, 100 clients by Dir(0.1), 10 a round, 5 epochs, batch 64, SGD 0.01 / 0.9 / 5e-4, LeNet-5.
- w2: pfl's own benchmark: 1000 users x 50 images, 50 a round, 1 epoch, batch 10, SGD 0.1, CNN of 1,626,442 parameters.
- w3: 100 clients x 500 images, all in every round, 5 epochs, batch 50, SGD 0.01, LeNet-5 (62,006 parameters).

`own` is fedskew with an `nn.Sequential` given as the model, as a user writes one, instead of the name of its network.

All contestants are started first and play one round, which is not counted; then they take turns, so that whatever else
the machine does falls on all of them. Printed: one JSON line for each, and a table with medians over turns of seconds,
ratios to the plain loop in the same turn, and the time from a process's start to the end of its first round. CPU
seconds, of all its processes, hardly depend on what else the machine does (but threads that wait for each other count).

CIFAR-10 is read from $FEDSKEW_DATA, --data or .data/; where it is absent, random images of its shape are as good for
speed. pfl and Flower are installed by pip into .bench/ in environments of their own when first needed, with this
PyTorch; with `--installed` they are taken from this Python. A contestant that fails is left out, with its reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew import data, models
from fedskew.errors import FedskewError
from fedskew.partition import DirichletByClass, Partition
from fedskew.randomness import Purpose, generator, stream_key

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".bench"
SEED = 0


@dataclass(frozen=True)
class Workload:
    """`dirichlet`: concentration of the split of each class; None: equal shares. `rounds`: in one turn."""

    model: str
    clients: int
    cohort: int
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    dirichlet: float | None
    rounds: int
    samples: int = 50_000


WORKLOADS = {
    "w1": Workload("lenet5", 100, 10, 5, 64, 0.01, 0.9, 5e-4, 0.1, rounds=3),
    "w2": Workload("cnn_w2", 1000, 50, 1, 10, 0.1, 0.0, 0.0, None, rounds=1),
    "w3": Workload("lenet5", 100, 100, 5, 50, 0.01, 0.0, 0.0, None, rounds=1),
}


@dataclass(frozen=True)
class Contestant:
    """`script` in contestants/, its options, the environment it runs in, and on which devices it is compared."""

    name: str
    script: str
    options: tuple[str, ...]
    work: str
    environment: str = "fedskew"
    devices: tuple[str, ...] = ("cpu",)
    launcher: tuple[str, ...] = ()


def contestants(device: str) -> list[Contestant]:
    """Every contestant on a device, the plain loop first. On the CPU each has two threads at work."""
    two, each = ("--threads", "2"), ("--processes", "2")
    if device == "cuda":
        on = ("--device", "cuda")
        return [
            Contestant("plain", "by_hand", on, "1 process"),
            Contestant("tuned", "by_hand", ("--tuned", *on), "1 process"),
            Contestant("fedskew", "by_fedskew", on, "1 process"),
            Contestant("fedskew-cohort", "by_fedskew", ("--backend", "cohort", *on), "1 process"),
            Contestant("pfl", "by_pfl", on, "1 process", "pfl"),
        ]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29577")
    return [
        Contestant("plain", "by_hand", two, "1 process x 2 threads"),
        Contestant("plain-processes", "by_hand", each, "2 processes x 1 thread"),
        Contestant("tuned", "by_hand", ("--tuned", *two), "1 process x 2 threads"),
        Contestant("tuned-processes", "by_hand", ("--tuned", *each), "2 processes x 1 thread"),
        Contestant("fedskew", "by_fedskew", two, "1 process x 2 threads"),
        Contestant("fedskew-processes", "by_fedskew", ("--backend", "processes", *each), "2 processes x 1 thread"),
        Contestant("fedskew-cohort", "by_fedskew", ("--backend", "cohort", *two), "1 process x 2 threads"),
        Contestant("own", "by_fedskew", ("--own", *two), "1 process x 2 threads"),
        Contestant("own-processes", "by_fedskew", ("--own", "--backend", "processes", *each), "2 processes x 1 thread"),
        Contestant("pfl", "by_pfl", two, "1 process x 2 threads", "pfl"),
        Contestant("pfl-processes", "by_pfl", (), "2 processes x 1 thread", "pfl", launcher=torchrun),
        Contestant("flower", "by_flower", each, "2 processes x 1 thread", "flower"),
    ]


ENVIRONMENTS = {"pfl": ["pfl[pytorch]==0.6.0"], "flower": ["flwr[simulation]"]}


class Player:
    """A contestant at work; `backend`: what fedskew's record says of its own, once it has ended."""

    def __init__(self, contestant: Contestant, python: Path, folder: Path) -> None:
        self.contestant, self.log = contestant, folder / f"{contestant.name}.log"
        script = str(HERE / "contestants" / f"{contestant.script}.py")
        command = [str(python), *contestant.launcher, script, str(folder), contestant.name, *contestant.options]
        paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, paths)))
        began = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env=environment,
            cwd=HERE / "contestants",
        )
        self.play(1)
        self.start = time.perf_counter() - began
        self.cpu: list[float] = []
        self.backend: dict[str, Any] | None = None

    def play(self, rounds: int) -> float:
        """Seconds of the next rounds. Raises RuntimeError where the contestant ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{rounds}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("@ "):
                return float(json.loads(line[2:])["seconds"])
        said = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        raise RuntimeError(said[-1] if said else "it ended without a word")

    def cpu_seconds(self) -> float:
        """What it and all its processes have used; 0 where /proc is not there."""
        parents: dict[int, int] = {}
        used: dict[int, float] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            process = int(path.parent.name)
            parents[process] = int(fields[1])
            used[process] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # children that have ended too
        total = 0.0
        for process, seconds in used.items():
            ancestor = process
            while ancestor > 1 and ancestor != self.process.pid:
                ancestor = parents.get(ancestor, 0)
            total += seconds * (ancestor == self.process.pid)
        return total

    def end(self) -> None:
        """Let it save its model and end."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("backend "):
                self.backend = json.loads(line.removeprefix("backend "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data and a fifth of the clients, one turn")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contestants beside plain")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="rounds in a turn")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no turn is begun")
    parser.add_argument("--data", help="where CIFAR-10 lies; 'random' for random images")
    parser.add_argument("--installed", action="store_true", help="pfl and Flower are in this Python already")
    arguments = parser.parse_args()
    until = time.perf_counter() + arguments.budget
    workload = WORKLOADS[arguments.workload]
    turns = 1 if arguments.quick else arguments.turns
    if arguments.quick:
        workload = dataclasses.replace(
            workload, clients=workload.clients // 5, cohort=max(2, workload.cohort // 5), samples=5_000, rounds=1
        )
    if arguments.rounds:
        workload = dataclasses.replace(workload, rounds=arguments.rounds)
    asked = contestants(arguments.device)
    if arguments.only:
        unknown = set(arguments.only) - {one.name for one in asked}
        if unknown:
            parser.error(f"--only: no contestant {', '.join(sorted(unknown))}; {', '.join(c.name for c in asked)}")
        asked = [one for one in asked if one.name == "plain" or one.name in arguments.only]
    with tempfile.TemporaryDirectory(dir=_made(CACHE)) as place:
        folder = Path(place)
        source = prepare(workload, 1 + turns * workload.rounds, arguments.data, folder)
        players, seconds = play(asked, turns, until, workload.rounds, folder, arguments.installed)
        agree = agreement(folder, [player.contestant.name for player in players])
    report(arguments.workload, arguments.quick, workload, source, players, seconds, agree, arguments.device)


def prepare(workload: Workload, rounds: int, root: str | None, folder: Path) -> str:
    """Write the task into a folder (see contestants/task.py); what the data are."""
    inputs, targets, source = images(workload.samples, root)
    if workload.dirichlet is None:
        order = np.random.default_rng(SEED).permutation(len(targets))
        rows = [np.sort(part) for part in np.array_split(order, workload.clients)]
    else:
        rng = generator(SEED, Purpose.PARTITION)
        rows = DirichletByClass(workload.dirichlet).split(targets, workload.clients, rng, num_classes=10)
    rng = np.random.default_rng(SEED + 1)
    cohorts = [rng.choice(workload.clients, workload.cohort, replace=False).tolist() for _ in range(rounds)]
    cohorts[0] = cohorts[0][:10]  # the round that is not counted need not be long
    settings = {"seed": SEED, **dataclasses.asdict(workload)}
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "targets.npy", targets)
    held: dict[str, Any] = {str(client): own for client, own in enumerate(rows)}
    np.savez(folder / "clients.npz", **held)
    Partition.of(rows, targets, 10).save(folder / "partition.npz")
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "cohorts.json").write_text(json.dumps(cohorts))
    drawn = torch.Generator().manual_seed(stream_key(SEED, Purpose.MODEL_INIT))
    network = models.build(workload.model, 10, (3, 32, 32), generator=drawn)
    np.savez(folder / "weights.npz", **{name: value.numpy() for name, value in network.state_dict().items()})
    return source


def images(samples: int, root: str | None) -> tuple[NDArray[np.float32], NDArray[np.int64], str]:
    """Inputs `(samples, 3, 32, 32)`, labels, and where they are from."""
    try:
        if root == "random":
            raise FileNotFoundError
        held = data.load("cifar10", root or os.environ.get("FEDSKEW_DATA", HERE.parent / ".data"))
        inputs = held.inputs.index_select(0, torch.arange(samples)).numpy()
        return inputs, held.targets[:samples].numpy(), "CIFAR-10"
    except (FedskewError, FileNotFoundError):
        rng = np.random.default_rng(SEED)
        inputs = rng.standard_normal((samples, 3, 32, 32), dtype=np.float32)
        return inputs, np.arange(samples) % 10, "random images"


def play(
    asked: list[Contestant], turns: int, until: float, rounds: int, folder: Path, installed: bool
) -> tuple[list[Player], dict[str, list[float]]]:
    """Everybody's seconds a round, by turn."""
    players: list[Player] = []
    for contestant in asked:
        try:
            players.append(Player(contestant, python_of(contestant.environment, installed), folder))
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            print(json.dumps({"contestant": contestant.name, "left_out": " ".join(str(error).split())}), flush=True)
    seconds: dict[str, list[float]] = {player.contestant.name: [] for player in players}
    for turn in range(turns):
        if turn and time.perf_counter() > until:
            break
        for player in list(players):
            try:
                before = player.cpu_seconds()
                seconds[player.contestant.name].append(player.play(rounds) / rounds)
                player.cpu.append((player.cpu_seconds() - before) / rounds)
            except (RuntimeError, OSError) as error:
                players.remove(player)
                print(json.dumps({"contestant": player.contestant.name, "left_out": str(error)}), flush=True)
        print({name: round(own[-1], 3) for name, own in seconds.items() if own}, file=sys.stderr, flush=True)
    for player in players:
        player.end()
    return players, seconds


def python_of(environment: str, installed: bool) -> Path:
    """The Python of an environment, made and filled when it is not there yet."""
    if environment == "fedskew" or installed:
        return Path(sys.executable)
    python = CACHE / environment / "bin" / "python"
    if not (CACHE / environment / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", CACHE / environment], check=True)
        version = torch.__version__.partition("+")[0]
        what = [*ENVIRONMENTS[environment], f"torch=={version}"]
        print(f"installing {' and '.join(what)} into {CACHE / environment}", file=sys.stderr, flush=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True, stdout=sys.stderr)
        (CACHE / environment / "ready").touch()
    return python


def agreement(folder: Path, names: list[str]) -> dict[str, float | None]:
    """How far each trained model is from the plain loop's: the largest difference of a parameter."""
    kept = {name: folder / f"trained-{name}.npz" for name in names}
    models_of = {name: dict(np.load(path)) for name, path in kept.items() if path.exists()}
    plain = models_of.get("plain")
    if plain is None:
        return {}
    return {
        name: max(float(np.abs(values[key] - plain[key]).max()) for key in plain) for name, values in models_of.items()
    }


def report(
    name: str,
    quick: bool,
    workload: Workload,
    source: str,
    players: list[Player],
    seconds: dict[str, list[float]],
    agree: dict[str, float | None],
    device: str,
) -> None:
    """JSON lines, then the table."""
    rows = []
    for player in players:
        own = seconds[player.contestant.name]
        ratios = [mine / plain for mine, plain in zip(own, seconds["plain"], strict=True)]
        row: dict[str, Any] = {
            "workload": name,
            "quick": quick,
            "contestant": player.contestant.name,
            "work": player.contestant.work,
            "rounds_per_second": round(1 / statistics.median(own), 4),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
            "seconds_a_round": [round(value, 4) for value in own],
            "cpu_seconds_a_round": [round(value, 3) for value in player.cpu],
            "start_to_first_round": round(player.start, 2),
            "from_plain": agree.get(player.contestant.name),
            "backend": player.backend,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{cpu()}, {os.cpu_count()} cores"
    print(f"\n{name.upper()}{' (quick)' if quick else ''}: {source}; {where}; PyTorch {torch.__version__}; medians of "
          f"{len(rows[0]['seconds_a_round'])} turns of {workload.rounds} rounds\n")  # fmt: skip
    print("| contestant | at work | rounds / s | time, plain = 1 | CPU s a round | start to round 1, s | from plain |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in sorted(rows, key=lambda one: one["ratio"]):
        low, high = row["ratio_spread"]
        distance = "-" if row["from_plain"] is None else f"{row['from_plain']:.1e}"
        print(
            f"| {row['contestant']} | {row['work']} | {row['rounds_per_second']:.3g} | {row['ratio']:.2f} "
            f"({low:.2f} to {high:.2f}) | {statistics.median(row['cpu_seconds_a_round']):.2f} | "
            f"{row['start_to_first_round']:.1f} | {distance} |"
        )


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


if __name__ == "__main__":
    main()
