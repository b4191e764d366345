"""How selection, weights, skew report and a whole round grow with pool, cohort and classes, up to a million clients.

    python benchmarks/million.py [--largest 1000000] [--parts choice cohort ...]

Every case runs in a process of its own, on one thread unless OMP_NUM_THREADS says otherwise, so that its peak memory is
its own: `counts_mb` are the label counts, `extra_mb` what the part needed beyond them; `cpu` are seconds of the
processor, which a busy machine lengthens less. Each prints a JSON line; tables follow, with the slope of time on
logarithmic axes between the last two sizes.

choice          FedEntOpt: the preparation and one choice among all clients; `each`: one of the next ten choices
cohort          FedEntOpt: a whole cohort, the preparation included
candidates      the same with a draw of 20,000 candidates (20 for each of the cohort where that is more)
seol_kim        Seol and Kim's cohort
fedla, fedpals, fedpals_limit    weights of that many participants, FedPALS at strength samples / 1000 and at 0
describe        the skew report
round           a federation's second round with FedEntOpt and FedAvg, logistic regression on 8 features, clients' data
                made when they take part, one epoch; its record as JSON and its checkpoint on disk included
fedpals_round   the same with a uniform cohort and FedPALS

Clients hold a label mix from Dir(0.1) and 20 to 500 samples (`sizes` "differ"), 50 each ("equal"), or 50 each of which
the server knows counts with Laplace noise (epsilon 1, "noisy", which are no whole numbers).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew import methods, models
from fedskew.engine import Assignment, Backend, ClientSamples, Federation, LocalTraining, LocalWork, Sent, Update
from fedskew.engine.cohort import CohortBackend
from fedskew.engine.contracts import hooked
from fedskew.experiment import RunFolder
from fedskew.experiment._folder import RunState
from fedskew.labels import LabelCounts, describe, privatize
from fedskew.models import FlatModel
from fedskew.randomness import Purpose, generator
from fedskew.selection import FedEntOpt, Selection, SeolKim
from fedskew.weighting import fedla, fedpals

FEATURES = 8
AT_ONCE = 20_000
Case = Mapping[str, Any]


def federation(sizes: str, clients: int, classes: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(0)
    counts = np.empty((clients, classes))
    for first in range(0, clients, AT_ONCE):
        block = counts[first : first + AT_ONCE]
        mixes = rng.standard_gamma(0.1, size=block.shape, dtype=np.float32).astype(np.float64) + 1e-9
        mixes /= mixes.sum(axis=1, keepdims=True)
        block[:] = mixes * (rng.integers(20, 500, size=(len(block), 1)) if sizes == "differ" else 50)
        block += rng.random(block.shape)
        np.floor(block, out=block)
    return privatize(counts, 1.0, rng) if sizes == "noisy" else counts


class Generated:
    """Clients whose samples are drawn around the means of their classes when they are requested."""

    def __init__(self, counts: NDArray[np.float64]) -> None:
        self.counts = counts
        self.means = np.random.default_rng(1).normal(size=(counts.shape[1], FEATURES))

    def of(self, client: int) -> ClientSamples:
        held = self.counts[client]
        labels = np.repeat(np.arange(len(held)), held.astype(np.int64))
        rng = generator(0, Purpose.DATA, client=client)
        inputs = (self.means[labels] + rng.normal(size=(len(labels), FEATURES))).astype(np.float32)
        return ClientSamples(torch.from_numpy(inputs), torch.from_numpy(labels), np.arange(len(labels)), held)


class Timed(Backend):
    """A backend, and the seconds that its last cohort took."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.seconds = backend, 0.0

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        began = time.perf_counter()
        updates = self.backend.train(round, cohort, sent)
        self.seconds = time.perf_counter() - began
        return updates


def run_round(counts: NDArray[np.float64], cohort: int, preset: str) -> dict[str, float]:
    """Seconds of a federation's second round and of its parts."""
    classes = counts.shape[1]
    method = methods.build(methods.expand({"preset": preset}))
    model = FlatModel(models.build("logistic", classes, (FEATURES,), generator=torch.Generator().manual_seed(0)))
    work = LocalWork(
        Generated(counts),
        method.objective,
        method.local_step,
        LocalTraining(batch_size=50),
        seed=0,
        hooks=hooked(method),
    )
    target = np.random.default_rng(1).dirichlet(np.ones(classes))
    began = time.perf_counter()
    backend = Timed(CohortBackend(model, work, chunk=200))
    runner = Federation(method, backend, counts, target, participation=cohort / len(counts), seed=0)
    state, _ = runner.run_round(runner.start(model.read_state()))
    first, nobody = time.perf_counter() - began, np.zeros((0, 2), dtype=np.int64)
    with tempfile.TemporaryDirectory() as folder:
        began, busy = time.perf_counter(), time.process_time()
        chosen, state = runner.select(state)
        select = time.perf_counter() - began
        state, outcome = runner.train(state, chosen)
        run, record = RunFolder(Path(folder)), runner.record(state.round, chosen, outcome)
        run.append(record)
        trained = time.perf_counter() - began
        run.save_checkpoint(RunState(state, state.model, -1.0, -1, 0, nobody, nobody))
        seconds = time.perf_counter() - began
    assert len(record.answered) == cohort
    return {
        "seconds": seconds,
        "cpu": time.process_time() - busy,
        "start_and_first": first,
        "select": select,
        "train": backend.seconds,
        "aggregate_and_record": trained - select - backend.seconds,
        "checkpoint": seconds - trained,
    }


def timed(part: Callable[[], object]) -> dict[str, float]:
    began, busy = time.perf_counter(), time.process_time()
    part()
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - busy}


def choice(record: LabelCounts) -> dict[str, float]:
    one = timed(lambda: chosen(FedEntOpt(), record, 2, first=0))
    eleven = timed(lambda: chosen(FedEntOpt(), record, 12, first=0))
    return one | {"each": (eleven["seconds"] - one["seconds"]) / 10}


def chosen(selection: Selection, record: LabelCounts, cohort: int, first: int | None = None) -> object:
    return selection.select(selection.init(record), record, cohort, np.random.default_rng(0), first)


def measure(case: Case, stored: str) -> dict[str, Any]:
    counts = np.load(stored)
    cohort = case["cohort"]
    target = np.random.default_rng(1).dirichlet(np.ones(counts.shape[1]))
    record = LabelCounts(counts)
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "choice": lambda: choice(record),
        "cohort": lambda: timed(lambda: chosen(FedEntOpt(), record, cohort)),
        "candidates": lambda: timed(lambda: chosen(FedEntOpt(candidates=max(20_000, 20 * cohort)), record, cohort)),
        "seol_kim": lambda: timed(lambda: chosen(SeolKim(threshold=0), record, cohort)),
        "fedla": lambda: timed(lambda: fedla(record)),
        "fedpals": lambda: timed(lambda: fedpals(record, target, strength=counts.sum() / 1000)),
        "fedpals_limit": lambda: timed(lambda: fedpals(record, target)),
        "describe": lambda: timed(lambda: describe(record)),
        "round": lambda: run_round(counts, cohort, "fedentopt"),
        "fedpals_round": lambda: run_round(counts, cohort, "fedpals"),
    }
    before = peak_mb()
    found = parts[case["part"]]()
    return {
        **case,
        **{name: float(f"{seconds:.4g}") for name, seconds in found.items()},
        "counts_mb": round(counts.nbytes / 2**20),
        "extra_mb": round(peak_mb() - before),
        "peak_mb": round(peak_mb()),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
    }


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def sweeps(largest: int) -> Iterator[tuple[str, str, list[Case]]]:
    """Part, what varies, and the cases in which it does."""
    pools = [size for size in (1_000, 10_000, 100_000) if size < largest] + [largest]
    few = min(100, largest // 10)
    many = min(1_000, largest // 10)

    def cases(part: str, varies: str, values: Sequence[Any], **fixed: Any) -> tuple[str, str, list[Case]]:
        usual = {"sizes": "differ", "pool": largest, "cohort": few, "classes": 100}
        return part, varies, [{"part": part, **usual, **fixed, varies: value} for value in values]

    yield cases("choice", "pool", pools, cohort=2)
    for sizes in ("differ", "equal"):
        yield cases("cohort", "pool", pools, sizes=sizes)
        yield cases("cohort", "cohort", [many // 10, many], sizes=sizes)
    yield cases("cohort", "pool", pools, sizes="noisy", cohort=10)
    yield cases("cohort", "classes", [10, 100], cohort=many)
    yield cases("candidates", "cohort", [many // 10, many])
    yield cases("seol_kim", "pool", pools, cohort=many)
    for part in ("fedla", "fedpals", "fedpals_limit", "describe"):
        yield cases(part, "pool", pools, cohort=0)
    yield cases("round", "pool", pools)
    yield cases("round", "cohort", [many // 10, many])
    yield cases("fedpals_round", "cohort", [largest // 1000, largest // 100, largest // 10], sizes="equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=1_000_000)
    parser.add_argument("--parts", nargs="*", help="only these; all without")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        np.save(arguments.make[1], federation(**json.loads(arguments.make[0])))
    elif arguments.only:
        print(json.dumps(measure(json.loads(arguments.only[0]), arguments.only[1])))
    else:
        run(arguments.largest, arguments.parts)


def run(largest: int, parts: Sequence[str] | None) -> None:
    tables, done = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for part, varies, cases in sweeps(largest):
            if parts and part not in parts:
                continue
            rows = []
            for case in cases:
                key = json.dumps(case)
                if key not in done:
                    done[key] = child("--only", key, stored(case, Path(folder)))
                    print(done[key].strip(), flush=True)
                rows.append(json.loads(done[key]))
            tables.append(table(part, varies, rows))
    print("\n\n".join(tables))


def stored(case: Case, folder: Path) -> str:
    """The file of a case's label counts, made once."""
    path = folder / f"{case['sizes']}-{case['pool']}-{case['classes']}.npy"
    if not path.exists():
        whole = {"sizes": case["sizes"], "clients": case["pool"], "classes": case["classes"]}
        child("--make", json.dumps(whole), str(path))
    return str(path)


def child(*arguments: str) -> str:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={"OMP_NUM_THREADS": "1", **os.environ})
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: ended with {done.returncode}")
    return done.stdout


def table(part: str, varies: str, rows: Sequence[Case]) -> str:
    fixed = {name: rows[0][name] for name in ("sizes", "pool", "cohort", "classes") if name != varies and rows[0][name]}
    lines = [f"{part}, {', '.join(f'{name} {value}' for name, value in fixed.items())}"]
    lines.append(f"  {varies:>9}  {'seconds':>9}  {'cpu':>9}  {'extra MB':>8}  {'peak MB':>8}")
    lines += [
        f"  {row[varies]:>9,}  {row['seconds']:>9.4g}  {row['cpu']:>9.4g}  {row['extra_mb']:>8,}  {row['peak_mb']:>8,}"
        for row in rows
    ]
    if len(rows) > 1:
        last, before = rows[-1], rows[-2]
        slope = math.log(last["seconds"] / before["seconds"]) / math.log(last[varies] / before[varies])
        lines.append(f"  time grows as {varies} to the power {slope:.2f} (last two)")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
