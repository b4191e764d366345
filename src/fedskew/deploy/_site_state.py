"""What a site keeps between rounds, in its own folder, so that it outlives the process that trained.

A round that the server did not count must not be believed: the site may have been killed before it replied, its reply
may have come too late, or have been refused. So what a training ends with is written beside what the last counted round
ended with, and the server says in its next instruction which round was the last that it counted: the site goes on from
just that one and deletes the others. A server that was killed asks for the round after its checkpoint again, and names
a round whose state the site still has, since it deletes one only when it is told of a later one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

LOG = logging.getLogger("flwr")
RELEASE = "label-counts.json"


class SiteStates:
    """Named tensors by round, of one federation's run: files `<run>/<round>.safetensors` below a site's folder."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder / run

    @property
    def newest(self) -> int:
        """The last round that ended with something to keep; 0 where none did."""
        return max((int(path.stem) for path in self._folder.glob("*.safetensors")), default=0)

    def load(self, round: int) -> dict[str, Tensor]:
        """What that round ended with; nothing where it is 0 or what was kept is gone. What isn't of it is deleted."""
        for path in self._folder.glob("*.safetensors"):
            if int(path.stem) != round:
                path.unlink()
        if round == 0:
            return {}
        path = self._path(round)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            LOG.warning("%s can't be read (%s); this site begins anew", path, type(error).__name__)
            return {}

    def keep(self, round: int, state: Mapping[str, Tensor]) -> None:
        """Write what a round ended with, whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(round)
        aside = path.with_suffix(f".{os.getpid()}.part")
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, aside)
        aside.replace(path)

    def _path(self, round: int) -> Path:
        return self._folder / f"{round}.safetensors"


def released_once(
    folder: Path,
    counts: NDArray[np.float64],
    how: Mapping[str, Any],
    draw: Callable[[], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Noisy label counts as this site first released them `how`; drawn now where it never did, or has other data now.

    Noise that were drawn again for every question would average out.
    """
    path = folder / RELEASE
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if kept is not None and kept["of"] == counts.tolist() and kept["how"] == dict(how):
        return np.array(kept["released"], dtype=np.float64)
    if kept is not None:
        LOG.warning("%s: the data or the privacy has changed; new noise is drawn, which costs epsilon once more", path)
    released = draw()
    folder.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps({"of": counts.tolist(), "how": dict(how), "released": released.tolist()}), "utf-8")
    os.replace(aside, path)
    return released
