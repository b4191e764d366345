"""A simulated division, laid out as sites hold it: one folder of pictures for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedskew.data import Dataset, Inputs
from fedskew.deploy._folder import SITE_NAME
from fedskew.errors import ConfigError


def site_names(clients: Sequence[str]) -> list[str]:
    """A site's name for each client, sorted as the clients are (see `Agreement.names`): its own, or a number."""
    width = len(str(len(clients) - 1))
    fit = all(SITE_NAME.fullmatch(name) and not name.isdecimal() for name in clients)
    own = fit and sorted(set(clients)) == list(clients)
    return list(clients) if own else [f"site-{place:0{width}d}" for place in range(len(clients))]


def write_pictures(dataset: Dataset, shares: Sequence[NDArray[np.int64]], folders: Sequence[Path]) -> None:
    """`train/CLASS/ROW.png` of the rows of each share in its folder, and of the test part dealt to all in turn.

    Raises ConfigError where samples are no pictures, grey or in colour.
    """
    if len(dataset.in_shape) != 3 or dataset.in_shape[0] not in (1, 3):
        raise ConfigError(
            f"data.name: samples of {dataset.name!r} are {dataset.in_shape}, no pictures; describe each site's data in "
            "its data.toml, as fedskew deploy init lays it out"
        )
    for place, (rows, folder) in enumerate(zip(shares, folders, strict=True)):
        _write(dataset, dataset.inputs, dataset.targets, np.asarray(rows), folder / "train")
        dealt = np.arange(place, len(dataset.test_targets), len(folders))
        _write(dataset, dataset.test_inputs, dataset.test_targets, dealt, folder / "test")


def _write(dataset: Dataset, inputs: Inputs, targets: Tensor, rows: NDArray[np.int64], folder: Path) -> None:
    for name in dataset.classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for row in rows.tolist():
        (sample,) = inputs.index_select(0, torch.tensor([row]))
        if dataset.mean:
            by_channel = (-1, 1, 1)
            sample = sample * torch.tensor(dataset.std).view(by_channel) + torch.tensor(dataset.mean).view(by_channel)
        levels = (sample.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        picture = Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels)
        picture.save(folder / dataset.classes[int(targets[row])] / f"{row:06d}.png")
