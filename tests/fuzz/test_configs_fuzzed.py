"""Configs changed or damaged at random: accepted ones say the same when they are written and read again, and train.

Each seed makes its own cases; a failure names the seed and the case, which make the same config again.
"""

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import fedskew
from common import one_line, task
from fedskew import methods
from fedskew.cli.config_keys import choices, tables
from fedskew.errors import FedskewError
from fedskew.experiment import read, resolve
from fedskew.papers import config_file, config_names
from fedskew.trees import put

pytestmark = [pytest.mark.fuzz, pytest.mark.filterwarnings("ignore")]

SEEDS = range(10)
CASES = 400
TRAINED = 12  # of each seed's accepted cases

SMALL = task(4, rounds=1, participation=0.5) | {
    "name": "small",
    "data": {"name": "digits", "rows": 120},
    "method": {"preset": "fedavg"},
}
VALUES: list[Any] = [
    0, 1, -1, 2, 3, 7, 0.0, 0.1, 0.5, 1.0, 1.5, -0.5, 1e-9, 1e300, float("inf"), float("nan"), 10**30, True, False,
    "", "a", "None", "fedavg", "uniform", "pooled", "client", "data", "own", "auto", ":x", "x:", "a:b", "os:path",
    "fedskew:simulate", "../x", "é", "x" * 200, [], [0], [0.1] * 10, [-1], ["a"], [[1]], {}, {"name": "fedla"},
]  # fmt: skip


def keys() -> list[str]:
    """Dotted keys of every table, of every name's own parameters, and of slots."""
    found = [f"{table.name}.{key.name}".strip(".") for table in tables() for key in table.keys]
    found += [
        f"{place.rpartition('.')[0]}.{key.name}" for place, all in choices().items() for one in all for key in one.keys
    ]
    found += ["data.root", "method", "method.preset", "method.objective.terms", "method.objective.extra_terms"]
    found += [f"method.{slot}" for slot in methods.PLACES] + ["training", "data", "partition", "nothing", "a.b.c"]
    return sorted(set(found) - {"output.trackers", "engine.device", "engine.backend", "engine.processes"})


def changed(rng: np.random.Generator, tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with one to four keys set, removed, or given a name that exists."""
    tree = copy.deepcopy(tree)
    every, names = keys(), {place: [entry.name for entry in entries] for place, entries in choices().items()}
    for _ in range(int(rng.integers(1, 5))):
        key = every[int(rng.integers(len(every)))]
        kind = rng.random()
        try:
            if kind < 0.35:
                place = list(names)[int(rng.integers(len(names)))]
                put(tree, place, names[place][int(rng.integers(len(names[place])))])
            elif kind < 0.45:
                tree.pop(list(tree)[int(rng.integers(len(tree)))], None)
            elif kind < 0.6:
                put(tree, "method.preset", list(methods.PRESETS)[int(rng.integers(len(methods.PRESETS)))])
            else:
                put(tree, key, copy.deepcopy(VALUES[int(rng.integers(len(VALUES)))]))
        except FedskewError:
            continue
    return tree


@pytest.mark.parametrize("seed", SEEDS)
def test_a_changed_config_is_refused_in_one_line_or_replays(seed: int, tmp_path: Path) -> None:
    shipped = [tomllib.loads(config_file(name).read_text(encoding="utf-8")) for name in config_names()]
    trees = [SMALL, *({key: value for key, value in tree.items() if key not in ("sweep", "quick")} for tree in shipped)]
    accepted = trained = 0
    for case in range(CASES):
        rng = np.random.default_rng([seed, case])
        small = bool(rng.random() < 0.5)
        tree = changed(rng, SMALL if small else trees[int(rng.integers(len(trees)))])
        try:
            config = resolve(tree)
            accepted += 1
            config.write(tmp_path / "config.toml")
            again = read(tmp_path / "config.toml")
            before, after = (json.dumps(one.tree(), sort_keys=True) for one in (config, again))  # text: NaN is NaN
            assert before == after, (seed, case, tree)
            assert again.hash == config.hash, (seed, case, tree)
            if small and trained < TRAINED and config.data.name == "digits" and config.training.rounds <= 2:
                trained += 1
                fedskew.simulate(config)
        except FedskewError as error:
            one_line(error, (seed, case, tree))
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError((seed, case, tree)) from error
    assert accepted > CASES / 20


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_file_is_refused_in_one_line(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    text = tomli_w.dumps(resolve(SMALL).tree()).encode()
    for case in range(CASES):
        rng = np.random.default_rng([seed, case, 1])
        content = bytearray(text)
        for _ in range(int(rng.integers(1, 4))):
            place = int(rng.integers(0, len(content)))
            if rng.random() < 0.5:
                content[place] = int(rng.integers(0, 256))
            else:
                del content[place : place + int(rng.integers(1, 20))]
        path.write_bytes(content)
        try:
            read(path)
        except FedskewError as error:
            one_line(error, (seed, case, bytes(content)))
        except Exception as error:
            raise AssertionError((seed, case, bytes(content))) from error
