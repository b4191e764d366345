"""A site's own samples, as the agreement wants them.

A site describes them in a file of its own, `data.toml`, which never leaves it:

    state = "state"             where the site keeps what it must remember, beside this file unless absolute

    [data]                      as in the config of a simulation
    name = "folder"
    root = "pictures"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew import components, data
from fedskew.data import Dataset, Inputs
from fedskew.deploy._agreement import Agreement
from fedskew.engine import ClientSamples
from fedskew.errors import ArgumentError, ConfigError, DataError, nearest
from fedskew.experiment._config import read_tree
from fedskew.randomness import Purpose, generator


@dataclass(frozen=True, eq=False)
class SiteData:
    """One site's samples.

    `inputs`, `(samples, *shape)`, and `targets`, `(samples,)` int64, for training; `test_inputs` and `test_targets` for
    evaluation, which may be empty; `num_classes`: how many classes there are, with samples here or without; `state`:
    the site's own folder, None where it keeps nothing.
    """

    inputs: Inputs
    targets: Tensor
    test_inputs: Inputs
    test_targets: Tensor
    num_classes: int
    state: Path | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def counts(self) -> NDArray[np.float64]:
        """Training samples of each class, `(classes,)`."""
        counts: NDArray[np.float64] = np.bincount(self.targets.cpu().numpy(), minlength=self.num_classes).astype(float)
        return counts

    def of(self, client: int) -> ClientSamples:
        """All of its samples, whichever client it is (see `engine.ClientData`)."""
        return ClientSamples(self.inputs, self.targets, np.arange(len(self.targets)), self.counts)


def load_site(path: Path, agreement: Agreement) -> SiteData:
    """The samples that a site's `data.toml` describes, with the agreement's class ids and normalisation.

    Raises ConfigError or DataError naming what does not fit: an unreadable file, a class that the federation does not
    know, samples of another shape or kind, no sample at all.
    """
    tree, _, _ = read_tree(path, "site's data", None, False)
    state = tree.pop("state", "state")
    table = tree.pop("data", None)
    if tree:
        raise ConfigError(f"{path}: {next(iter(tree))}: no such key{nearest(next(iter(tree)), ['state', 'data'])}")
    if not isinstance(table, dict) or not isinstance(table.get("name"), str) or not isinstance(state, str):
        raise ConfigError(f"{path}: expected a table [data] with a name and what its reader takes, and state, a folder")
    try:
        dataset = _read(table, path.parent)
        return _fitted(dataset, agreement, path.parent / state)
    except (ArgumentError, ConfigError) as error:
        raise ConfigError(f"{path}: data.{error}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _read(table: dict[str, Any], beside: Path) -> Dataset:
    options = dict(table)
    name, root = options.pop("name"), options.pop("root", None)
    place = None if root is None else beside / Path(root).expanduser()
    rng = generator(0, Purpose.DATA)
    load = components.find(data.INDEX, name, "name")
    if ":" not in name:
        return data.load(name, place, rng=rng, **options)
    made = load(**options) if place is None else load(root=place, **options)
    if not isinstance(made, Dataset):
        raise ConfigError(f"name: {name} returned {type(made).__name__}, not a fedskew.data.Dataset")
    return made


def _fitted(dataset: Dataset, agreement: Agreement, state: Path) -> SiteData:
    unknown = [name for name in dataset.classes if name not in agreement.classes]
    used = {dataset.classes[label] for label in set(torch.cat([dataset.targets, dataset.test_targets]).tolist())}
    strange = sorted(used & set(unknown))
    if strange:
        raise DataError(
            f"class {strange[0]!r} is not one of the federation's classes{nearest(strange[0], agreement.classes)}"
        )
    if dataset.in_shape != tuple(agreement.shape):
        raise DataError(f"samples are {dataset.in_shape}; the federation's are {tuple(agreement.shape)}")
    ids = torch.tensor([agreement.classes.index(name) if name in agreement.classes else -1 for name in dataset.classes])
    return SiteData(
        inputs=_normalised(dataset.inputs, dataset, agreement),
        targets=ids[dataset.targets],
        test_inputs=_normalised(dataset.test_inputs, dataset, agreement),
        test_targets=ids[dataset.test_targets],
        num_classes=len(agreement.classes),
        state=state,
        mean=tuple(agreement.mean),
        std=tuple(agreement.std),
    )


def _normalised(inputs: Inputs, dataset: Dataset, agreement: Agreement) -> Inputs:
    """The samples normalised by the agreement's mean and deviation, in place of the reader's own."""
    if not isinstance(inputs, Tensor):
        if (dataset.mean, dataset.std) != (tuple(agreement.mean), tuple(agreement.std)):
            raise DataError(
                f"reader {dataset.name!r} leaves samples on disk and normalises them by {dataset.mean}, "
                f"{dataset.std}; the federation by {agreement.mean}, {agreement.std}"
            )
        return inputs
    if agreement.tokens != (inputs.dtype == torch.int64):
        kinds = ("floats", "token ids")
        raise DataError(f"samples are {kinds[not agreement.tokens]}; the federation's are {kinds[agreement.tokens]}")
    if agreement.tokens:
        return inputs
    values = inputs.double()
    if dataset.mean:
        values = values * _by_channel(dataset.std, inputs) + _by_channel(dataset.mean, inputs)
    if agreement.mean:
        values = (values - _by_channel(agreement.mean, inputs)) / _by_channel(agreement.std, inputs)
    return values.float()


def _by_channel(values: tuple[float, ...] | list[float], inputs: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(1, -1, *(1 for _ in inputs.shape[2:]))
