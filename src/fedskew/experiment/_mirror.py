"""Where a rank of torchrun keeps its run: only the first writes the folder that the user named."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedskew import torchrun
from fedskew.engine import from_the_first
from fedskew.experiment._config import Config, OutputSection

_NEVER = 10**9


@contextmanager
def own_place(config: Config, folder: Path | None, resume: bool) -> Iterator[tuple[Config, Path | None]]:
    """The config and the run folder of this rank: those given, or for other ranks than the first a folder of their own
    that goes when they end, with what the first one's holds where a run is resumed.
    """
    if not torchrun.launched() or folder is None:
        yield config, folder
        return
    files = _files(folder) if resume and torchrun.rank() == 0 else []
    names = from_the_first([str(path.relative_to(folder)) for path in files])
    if torchrun.rank() == 0:
        for path in files:
            from_the_first(path.read_bytes())
        yield config, folder
        return
    with tempfile.TemporaryDirectory(prefix="fedskew-") as place:
        for name in names:
            path = Path(place) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(from_the_first(None))
        yield config.model_copy(update={"output": OutputSection(checkpoint_every=_NEVER)}), Path(place)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".html")
