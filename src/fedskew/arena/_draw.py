"""Situations drawn at random: evenly spread points (Sobol) of a box of settings; drawing more keeps the first ones.

    [arena.draw]
    points = 256
    seed = 0

    [arena.draw.set]
    training.participation = {low = 0.1, high = 1.0}
    training.epochs = {low = 1, high = 5, whole = true}
    training.lr = {low = 0.01, high = 0.3, log = true}
    task = {one_of = [{data.name = "digits"}, {data.name = "mnist", data.rows = 2_000}]}

A table with `low` and `high` stands for a number between them, `one_of` for one of several values, which may hold such
tables in turn. A key that is no table of a config, such as `task` here, is a label only: the keys in its value are set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedskew.errors import ConfigError
from fedskew.experiment import Config

_NUMBER = ({"low", "high"}, {"low", "high", "log", "whole"})
_DIGITS = 3  # significant digits of a drawn number, which people read and compare


def draw(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Draw points, each as a value of a sweep's axis.

    Args:
        section: The table `[arena.draw]`.

    Returns:
        For each point a label and the keys that it sets.

    Raises:
        ConfigError: Something is wrong; the message begins with the key.
    """
    from scipy.stats import qmc

    wrong = next((key for key in section if key not in {"points", "seed", "set"}), None)
    if wrong is not None:
        raise ConfigError(f"arena.draw.{wrong}: no such key (points, seed, set)")
    points, seed, box = section.get("points"), section.get("seed", 0), section.get("set")
    if isinstance(points, bool) or not isinstance(points, int) or points < 1:
        raise ConfigError(f"arena.draw.points: expected a whole number from 1, such as 256 (got {points!r})")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"arena.draw.seed: expected a whole number from 0 (got {seed!r})")
    if not isinstance(box, dict) or not box:
        raise ConfigError("arena.draw.set: expected a table of keys, such as training.lr = {low = 0.01, high = 0.3}")
    sizes = list(_choices(box, "arena.draw.set"))
    sampler = qmc.Sobol(max(len(sizes), 1), seed=np.random.default_rng(seed))
    rows = sampler.random_base2(max(points - 1, 1).bit_length())[:points]
    return [{"label": f"{at:05d}", "set": _point(box, iter(row.tolist()))} for at, row in enumerate(rows)]


def _choices(value: Any, where: str) -> Iterator[str]:
    """Yield every key of a box whose value is drawn, in the order in which `_drawn` takes their coordinates."""
    if not isinstance(value, dict):
        return
    if "one_of" in value:
        options = value["one_of"]
        if set(value) != {"one_of"} or not isinstance(options, list) or not options:
            raise ConfigError(f"{where}: expected one_of = [...] with the values to choose from, and nothing beside it")
        yield where
        for at, option in enumerate(options):
            yield from _choices(option, f"{where}.one_of[{at}]")
    elif value.keys() & {"low", "high"}:
        least, most = _NUMBER
        low: Any = value.get("low")
        high: Any = value.get("high")
        if not (
            least <= set(value) <= most
            and all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
            and low <= high
            and (low > 0 or not value.get("log"))
        ):
            raise ConfigError(f"{where}: expected low and high, in this order (with log = true, above 0); got {value}")
        yield where
    else:
        for key, own in value.items():
            yield from _choices(own, f"{where}.{key}")


def _point(box: Mapping[str, Any], coordinates: Iterator[float]) -> dict[str, Any]:
    """Return the keys that one point sets."""
    found: dict[str, Any] = {}
    for key, value in box.items():
        drawn = _drawn(value, coordinates)
        if key in Config.model_fields:
            found[key] = {**found.get(key, {}), **drawn} if isinstance(drawn, dict) else drawn
            continue
        for section, table in drawn.items():  # a label for keys that are drawn together
            found[section] = {**found.get(section, {}), **table} if isinstance(table, dict) else table
    return found


def _drawn(value: Any, coordinates: Iterator[float]) -> Any:
    if not isinstance(value, dict):
        return value
    if "one_of" in value:
        at = min(int(next(coordinates) * len(value["one_of"])), len(value["one_of"]) - 1)
        options = [_drawn(option, coordinates) for option in value["one_of"]]  # all: each takes its coordinates
        return options[at]
    if "low" in value:
        return _number(value, next(coordinates))
    return {key: _drawn(own, coordinates) for key, own in value.items()}


def _number(value: Mapping[str, Any], share: float) -> float:
    low, high = value["low"], value["high"]
    if value.get("whole"):
        low, high = low - 0.5, high + 0.5
    number = low * (high / low) ** share if value.get("log") else low + (high - low) * share
    if value.get("whole"):
        return int(min(max(round(number), value["low"]), value["high"]))
    return float(f"{number:.{_DIGITS}g}")
