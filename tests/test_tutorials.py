"""The tutorials, and blocks of other pages, work as they stand: files are written, commands run, in the page's order.

A block with a title is a file, or the next part of it. A block of Python without one is run, and so is every block of
shell commands, unless the comment `<!-- not run by the tests -->` stands before it. Our own commands and Python run in
this process, which has imported PyTorch already.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedskew.cli import main

TUTORIALS = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
BLOCK = re.compile(r'(<!-- not run by the tests -->\n+)?```(\w+)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)


@pytest.mark.parametrize(
    ("page", "written"),
    [
        pytest.param("own-data.md", ["who.svg", "runs/clinics.html", "runs/sweep-*/table.md"], marks=pytest.mark.slow),
        ("own-method.md", ["runs/own-*/report.html"]),
        ("../label-counts.md", []),
        ("../data.md", []),
        ("sites.md", ["runs/hospitals-*/report.html", "hospitals/app/run.toml", "hospitals/server/run.sh"]),
    ],
)
def test_a_page_works_as_it_stands(page, written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = set(sys.modules)
    for skipped, language, title, text in BLOCK.findall((TUTORIALS / page).read_text(encoding="utf-8")):
        if title:
            name, part, _ = title.partition(" (continued)")
            with Path(name).open("a" if part else "w", encoding="utf-8") as file:
                file.write(text)
        elif skipped:
            continue
        elif language == "python":
            Path("block.py").write_text(text, encoding="utf-8")
            runpy.run_path("block.py", run_name="__main__")
        elif language == "sh":
            run_commands(text, monkeypatch)
    for pattern in written:
        assert list(tmp_path.glob(pattern)), f"{page}: {pattern} was not written"
    for name in set(sys.modules) - loaded:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def run_commands(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    if all(words and words[0] in ("fedskew", "python") for words in lines):
        for words in lines:
            monkeypatch.setattr(sys, "argv", words)
            if words[0] == "python":
                runpy.run_path(words[1], run_name="__main__")
            else:
                with pytest.raises(SystemExit) as ended:
                    main()
                assert not ended.value.code, words
    else:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        subprocess.run(["sh", "-e", "-c", text], check=True, env={**os.environ, "PATH": path})
