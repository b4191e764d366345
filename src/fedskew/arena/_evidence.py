"""The table of evidence that `fedskew advise` reads, made from an arena's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean

import numpy as np

from fedskew.advice import TEXTS, Evidence
from fedskew.arena._compare import scores
from fedskew.arena._files import OF_FEDERATION
from fedskew.arena._jobs import Line
from fedskew.arena._run import ArenaState


def evidence(state: ArenaState) -> Evidence | None:
    """Return what every method gained over the reference in every federation; None where no gain is known.

    Args:
        state: Where the arena stands.
    """
    arena = state.arena
    known = [key for key, line in state.federations.items() if line]
    methods = tuple(method for method in arena.methods if method != arena.reference)
    gains, worst = _gains(state, methods, known), _gains_of_worst(state, methods, known)
    some = [at for at, row in enumerate(gains) if np.isfinite(row).any()]
    if not some:
        return None
    lines = [state.federations[known[at]] for at in some]
    figures = [name for name in lines[0] if name.startswith(OF_FEDERATION)]
    names = [name for name in figures if name.removeprefix(OF_FEDERATION) not in TEXTS]
    texts = {name: tuple(line[f"{OF_FEDERATION}{name}"] for line in lines) for name in TEXTS}
    return Evidence(
        federations=texts["federation"],
        tasks=texts["task"],
        rules=texts["rule"],
        names=tuple(name.removeprefix(OF_FEDERATION) for name in names),
        features=np.array([[float(line[name]) for name in names] for line in lines]),
        methods=methods,
        gains=gains[some],
        worst=worst[some],
    )


def _gains(state: ArenaState, methods: Iterable[str], federations: list[tuple[str, ...]]) -> np.ndarray:
    """Points ahead of the reference, mean over seeds, `(federations, methods)`."""
    arena = state.arena
    values = scores(state.compared, arena.axes, arena.reference, last=arena.last).values

    def gain(federation: tuple[str, ...], method: str) -> float:
        seeds = values.get(method, {}).get((federation[:-1], federation[-1]), {})
        known = [one.difference for one in seeds.values() if one.difference is not None]
        return fmean(known) if known else np.nan

    return _table(gain, federations, methods)


def _gains_of_worst(state: ArenaState, methods: Iterable[str], federations: list[tuple[str, ...]]) -> np.ndarray:
    """Points by which the worst class is ahead of the reference's, mean over seeds, `(federations, methods)`."""
    arena = state.arena
    values: dict[tuple[tuple[str, ...], str, str], float] = {}
    for line in state.compared:
        if line["worst_class"] and line["stage"] == "run":
            values[_federation(line, arena.axes), line["method"], line["seed"]] = 100 * float(line["worst_class"])
    seeds = list(dict.fromkeys(seed for _, _, seed in values))

    def gain(federation: tuple[str, ...], method: str) -> float:
        both = [
            values[federation, method, seed] - values[federation, arena.reference, seed]
            for seed in seeds
            if (federation, method, seed) in values and (federation, arena.reference, seed) in values
        ]
        return fmean(both) if both else np.nan

    return _table(gain, federations, methods)


def _table(
    gain: Callable[[tuple[str, ...], str], float], federations: list[tuple[str, ...]], methods: Iterable[str]
) -> np.ndarray:
    names = list(methods)
    table = [[gain(federation, method) for method in names] for federation in federations]
    return np.array(table).reshape(len(federations), len(names))


def _federation(line: Line, axes: Iterable[str]) -> tuple[str, ...]:
    return (*(line[axis] for axis in axes), line["partition"])
