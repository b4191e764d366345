"""Seconds of several seeds trained as one cohort, against the same seeds one after another.

    python benchmarks/seeds_together.py --seeds 8

Digits, logistic regression, 10 of 100 clients a round, 20 rounds, one thread; the ways take turns. Data are loaded and
divided in both, nothing is written.
"""

from __future__ import annotations

import argparse
import statistics
import time

import fedskew

WAYS = {
    "one after another, sequential": {"backend": "sequential"},
    "one after another, cohort": {"backend": "cohort"},
    "together": {"backend": "cohort", "seeds_together": True},
}

parser = argparse.ArgumentParser()
parser.add_argument("--seeds", type=int, default=8)
parser.add_argument("--turns", type=int, default=5)
given = parser.parse_args()
seconds: dict[str, list[float]] = {way: [] for way in WAYS}
for _ in range(given.turns):
    for way, engine in WAYS.items():
        began = time.perf_counter()
        fedskew.simulate(
            data="digits",
            partition={"rule": "dirichlet_by_class", "clients": 100, "beta": 0.3, "min_size": 1},
            model="logistic",
            method="fedavg",
            training={"rounds": 20, "participation": 0.1, "batch_size": 10, "lr": 0.1},
            seeds=list(range(given.seeds)),
            engine=engine,
        )
        seconds[way].append(time.perf_counter() - began)
for way, own in seconds.items():
    print(f"{way}: median {statistics.median(own):.2f} s, least {min(own):.2f} s of {given.turns} turns")
