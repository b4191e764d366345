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


@pytest.fixture
def pages_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTML pages whose figures are made but not rendered, which takes most of a page's time: for tests of the rest."""
    from html import escape

    from fedskew import drawing

    monkeypatch.setattr(drawing, "inline_svg", lambda figure, alt: f'<svg role="img" aria-label="{escape(alt)}"></svg>')
