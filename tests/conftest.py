"""What several test folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder that holds the real data sets; skips where there is none."""
    root = Path(os.environ.get("FEDSKEW_DATA", REPOSITORY / ".data"))
    if not root.is_dir():
        pytest.skip("real data sets are not laid out (set FEDSKEW_DATA, or run make test beside ../shared)")
    return root
