"""The data set of a config; runs that follow each other inside `shared_data` load it once."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedskew import components, data
from fedskew.data import Dataset
from fedskew.errors import ArgumentError, ConfigError
from fedskew.experiment._config import Config
from fedskew.experiment._identity import Content, Present, changed_since, checksum, files_of, own_target
from fedskew.randomness import Purpose, generator


@dataclass
class _Last:
    """The data set that was loaded last, what config it is of, and its content once that was asked for."""

    key: str = ""
    dataset: Dataset | None = None
    files: dict[str, str] | None = None
    content: Content | None = None


_last: ContextVar[_Last | None] = ContextVar("_last", default=None)


@contextmanager
def shared_data() -> Iterator[None]:
    """Keep the data set that was loaded last while the block runs, for the next that needs the same one."""
    token = _last.set(_last.get() or _Last())
    try:
        yield
    finally:
        _last.reset(token)


def keep_data() -> None:
    """Keep the data set that was loaded last from now on, in a process that only works through runs."""
    if _last.get() is None:
        _last.set(_Last())


def data_seed(config: Config, seed: int) -> int:
    """Return the seed of data set and partition: the config's `partition.seed`, else that of the run."""
    return seed if config.partition.seed is None else config.partition.seed


def load_dataset(config: Config, seed: int) -> Dataset:
    """Load the data set of a config, with a seed for those that are drawn at random (see `data_seed`).

    Raises:
        DataError: The data can't be loaded.
        ConfigError: The config names no such data set, or a function that returns no `data.Dataset`.
    """
    last = _last.get()
    if last is None:
        return _load(config, seed)
    if last.dataset is None or last.key != _key(config, seed):
        last.dataset = last.content = None  # only one in memory
        files = files_of(config)  # as they are before they are read: a change meanwhile shows
        last.key, last.dataset, last.files = _key(config, seed), _load(config, seed), files
    return last.dataset


def content_of(config: Config, dataset: Dataset) -> Content:
    """Return what the data are that a run of a config is made from; `dataset` is as `load_dataset` returned it."""
    last = _last.get()
    more = config.partition.rule == "file" or own_target(config) is not None
    if last is None or last.dataset is not dataset or more:
        return Content(checksum(config, dataset), files_of(config))
    if last.content is None:
        last.content = Content(checksum(config, dataset), last.files)
    return last.content


def changes_since(folder: Path, config: Config) -> list[str]:
    """List what has changed since the run in a folder was made, a line each: its code, its data or fedskew.

    The config is that run's, and its components have been imported.
    """
    parts = {seed: folder / f"seed-{seed}" for seed in config.seeds}
    if not parts[config.seeds[0]].exists():
        parts = {config.seeds[0]: folder}
    present = Present()

    def checksum_of(seed: int) -> str:
        return content_of(config, load_dataset(config, data_seed(config, seed))).checksum

    found = [changed_since(part, config, partial(checksum_of, seed), present) for seed, part in parts.items()]
    return list(dict.fromkeys(change for changes in found for change in changes))


def _key(config: Config, seed: int) -> str:
    """Everything that a data set depends on, as one text."""
    name = config.data.name
    drawn = ":" in name or name not in data.INDEX or "rng" in inspect.signature(data.INDEX[name]).parameters
    places = [config.data.root, str(config.origin), os.environ.get("FEDSKEW_DATA"), os.getcwd()]
    return json.dumps([name, config.data.parameters, *places, seed if drawn else None])


def _load(config: Config, seed: int) -> Dataset:
    load = components.find(data.INDEX, config.data.name, "data.name")
    options, rng = config.data.parameters, generator(seed, Purpose.DATA)
    if ":" not in config.data.name:
        try:
            return data.load(config.data.name, _data_root(config), rng=rng, **options)
        except ArgumentError as error:
            raise ConfigError(f"data.{error}") from None
    dataset = components.call(load, config.data.name, "data", {"rng": rng}, options)
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"data.name: {config.data.name} returned {type(dataset).__name__}, not a fedskew.data.Dataset"
        )
    return dataset


def _data_root(config: Config) -> str | None:
    if config.data.root is not None:
        return config.place(config.data.root)
    recorded = None if config.origin is None else config.origin.data
    return None if recorded is None or os.environ.get("FEDSKEW_DATA") else str(recorded)
