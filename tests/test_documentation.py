"""The documentation builds without a warning, asks nothing of the network, and holds every public name."""

import re
import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.mark.first
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of mkdocs's own parts; its warnings about our pages are errors by --strict
def test_the_site_builds_and_holds_every_public_name(tmp_path, monkeypatch, capfd):
    mkdocs = pytest.importorskip("mkdocs.__main__", reason="the extra docs is not installed")
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.setenv("DOCS_SEARCH", "false")  # an index of words, a quarter of the time
    monkeypatch.setenv("DOCS_LINE_LENGTH", "100000")  # so that no signature starts ruff, another quarter
    # In this process, which has imported most of what the pages are made from.
    mkdocs.cli(["build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")], standalone_mode=False)
    out, err = capfd.readouterr()
    assert not out + err

    pages = {
        path.relative_to(tmp_path / "site"): path.read_text(encoding="utf-8")
        for path in (tmp_path / "site").rglob("*.html")
    }
    elsewhere = r'<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)="?((?:https?:)?//[^">\s]+)'
    assert {str(path): found for path, text in pages.items() if (found := re.findall(elsewhere, text))} == {}
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text(encoding="utf-8")), style

    reference = runpy.run_path(str(REPOSITORY / "tools" / "reference_pages.py"))
    for module in reference["modules"]():
        page = pages[Path(f"reference/{module}.html")]
        absent = [name for name in reference["exported"](module) if f'id="{module}.{name}"' not in page]
        assert not absent, module
