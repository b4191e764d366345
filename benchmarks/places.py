"""Who takes part in an arena's rounds by uniform choice and by FedEntOpt: label counts alone decide, so nothing trains.

    python benchmarks/places.py benchmarks/cifar100-classes.toml [--most 4]

For each partition: the share of all places that as many clients take as most, and the classes of which a cohort has
samples, least, mean and most over the rounds. The data as in the arena.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fedskew import selection
from fedskew.arena import Arena
from fedskew.engine import cohort_size
from fedskew.experiment import make_task
from fedskew.randomness import Purpose, generator

CHOICES = {
    "uniform": selection.Uniform(),
    "FedEntOpt, buffer 0": selection.FedEntOpt(buffer=0.0),
    "FedEntOpt, buffer 0.5": selection.FedEntOpt(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arena", type=Path)
    parser.add_argument("--most", type=int, default=4)
    own = parser.parse_args()
    arena = Arena.read(own.arena)
    config = arena.entries[0].config
    for partition in arena.settings.partitions:
        counts = np.asarray(make_task(config.with_value("partition.seed", partition), config.seeds[0]).counts)
        size = cohort_size(config.training.participation, len(counts))
        print(f"partition {partition}: {np.count_nonzero(counts, axis=1).mean():.1f} classes a client")
        for name, choice in CHOICES.items():
            state, cohorts = choice.init(counts), []
            for round in range(1, config.training.rounds + 1):
                rng = generator(config.seeds[0], Purpose.SELECTION, round)
                ids, state = choice.select(state, counts, size, rng)
                cohorts.append(ids)
            taken = np.sort(np.bincount(np.concatenate(cohorts), minlength=len(counts)))[::-1]
            classes = [np.count_nonzero(counts[ids].sum(0)) for ids in cohorts]
            share = taken[: own.most].sum() / taken.sum()
            print(f"  {name:22} {share:6.1%} of the places by {own.most} clients;", end=" ")
            print(f"classes {min(classes)}, {np.mean(classes):.1f}, {max(classes)}")


if __name__ == "__main__":
    main()
