"""What several test folders share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder that holds the real data sets; skips where there is none."""
    root = Path(os.environ.get("FEDSKEW_DATA", REPOSITORY / ".data"))
    if not root.is_dir():
        pytest.skip("real data sets are not laid out (set FEDSKEW_DATA, or run make test beside ../shared)")
    return root


@pytest.fixture(scope="session")
def interrupt_after() -> Callable[[int, Mapping[str, Any], Path], Path]:
    """Run a config in an empty folder until a round is over, as Ctrl-C ends it, and return the run folder."""
    import fedskew

    def run(round: int, tree: Mapping[str, Any], out: Path) -> Path:
        def interrupt(record: Mapping[str, Any]) -> None:
            if record["round"] == round:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fedskew.simulate(tree, out=out, progress=interrupt)
        (folder,) = out.iterdir()
        return folder

    return run
