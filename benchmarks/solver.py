"""How the FedPALS solver grows with the number of clients: seconds, memory, and certificates.

    python benchmarks/solver.py [--largest 1000000] [--classes 100]

Clients draw their label mix from Dir(0.1) (sparse) or Dir(5) (dense) and hold 20 to 500 samples; the target is one draw
from Dir(1). Each case is solved at strength = samples / 1000 and at strength 0, in a process of its own, so that its
peak memory is its own; on one thread unless OMP_NUM_THREADS says otherwise. `counts_mb` is the input, `extra_mb` what
the solve needed beyond it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

import numpy as np
from numpy.typing import NDArray

from fedskew.weighting import fedpals_solve

CONCENTRATION = {"sparse": 0.1, "dense": 5.0}
AT_ONCE = 20_000


def federation(kind: str, clients: int, classes: int, rng: np.random.Generator) -> NDArray[np.float64]:
    counts = np.empty((clients, classes))
    for first in range(0, clients, AT_ONCE):
        block = counts[first : first + AT_ONCE]
        block[:] = rng.dirichlet(np.full(classes, CONCENTRATION[kind]), size=len(block))
        block *= rng.integers(20, 500, size=(len(block), 1))
        block += rng.random(block.shape)
        np.floor(block, out=block)
    return counts


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(kind: str, clients: int, classes: int, share: float) -> dict[str, object]:
    rng = np.random.default_rng(0)
    counts = federation(kind, clients, classes, rng)
    target = rng.dirichlet(np.ones(classes))
    samples = counts.sum()
    before = peak_mb()
    began = time.perf_counter()
    solution = fedpals_solve(counts, target, strength=share * samples)
    seconds = time.perf_counter() - began
    return {
        "counts": kind,
        "clients": clients,
        "classes": classes,
        "strength": "samples / 1000" if share else "0",
        "seconds": round(seconds, 4),
        "counts_mb": round(counts.nbytes / 2**20),
        "extra_mb": round(peak_mb() - before),
        "peak_mb": round(peak_mb()),
        "gap": solution.gap,
        "kkt": solution.kkt,
        "ess_share": solution.ess / samples,
        "distance": solution.distance,
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--only", help="one case as JSON (what each child process runs)")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(**json.loads(arguments.only))))
        return
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size < arguments.largest] + [arguments.largest]
    for kind in CONCENTRATION:
        for share in (1e-3, 0.0):
            seconds = []
            for clients in sizes:
                case = {"kind": kind, "clients": clients, "classes": arguments.classes, "share": share}
                child = [sys.executable, __file__, "--only", json.dumps(case)]
                done = subprocess.run(child, check=True, capture_output=True, text=True, env=environment)
                line = done.stdout.strip()
                found = json.loads(line)
                seconds.append(found["seconds"])
                print(line)
                print(
                    f"  {kind}, {clients:,} clients x {found['classes']} classes, strength {found['strength']}: "
                    f"{found['seconds']:.3g} s, peak {found['peak_mb']:,} MB ({found['counts_mb']:,} of them the "
                    f"counts), gap {found['gap']:.1e}, KKT {found['kkt']:.1e}",
                    flush=True,
                )
            if len(sizes) > 1:
                slope = np.log(seconds[-1] / seconds[-2]) / np.log(sizes[-1] / sizes[-2])
                print(f"  time grows as clients to the power {slope:.2f} (last two sizes)", flush=True)


if __name__ == "__main__":
    main()
