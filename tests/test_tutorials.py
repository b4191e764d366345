"""The tutorials, and blocks of other pages, work as they stand: files are written, commands run, in the page's order.

A block with a title is a file, or the next part of it; a config trains for two rounds. A block of Python without one is
run, and so is every block of shell commands, unless the comment `<!-- not run by the tests -->` stands before it. Our
own commands and Python run in this process, which has imported PyTorch already. After `<!-- fails -->` every command of
the block has to fail; after `<!-- printed -->` a block holds lines that the block before it printed; spaces don't
count, and `...` is anything.
"""

import glob
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from fedskew.cli import main, new

TUTORIALS = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
MARK = r"(?:<!-- (not run by the tests|fails|printed) -->\n+)?"
BLOCK = re.compile(MARK + r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)


WRITTEN = {
    "own-data.md": ["who.html", "runs/clinics.html", "runs/sweep-*/table.md"],
    "own-method.md": ["runs/own-*/report.html", "runs/own-*/finished.safetensors"],
    "new-place.md": ["runs/clinics-*/adapted.safetensors", "predictions.csv", "target-mix.png"],
    "researcher.md": ["runs/rare.html", "runs/sweep-compare-*/report.html"],
    "coordinator.md": ["weights.csv", "predictions.csv"],
    "clinics.md": ["runs/clinics-*/inputs.json", "predictions.csv", "model.pt"],
    "sites.md": ["runs/hospitals-*/report.html", "hospitals/app/run.toml", "hospitals/server/run.sh"],
    "pretrained.md": ["runs/sites-*/frozen.safetensors", "federation/sites/east/weights.safetensors", "model.pt"],
    "../label-counts.md": [],
    "../data.md": [],
}
"""Pages, and files that following them writes."""


@pytest.mark.first
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if written else []) for page, written in WRITTEN.items()]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a user sees them, and no error
def test_a_page_works_as_it_stands(page, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file may change twice in a second
    monkeypatch.setattr(new, "LOCAL_STEPS", 100)  # what `fedskew new` writes is run, and need not have learnt
    printed = ""
    monkeypatch.syspath_prepend(str(tmp_path))
    for marked, language, title, text in BLOCK.findall((TUTORIALS / page).read_text(encoding="utf-8")):
        if title:
            if page != "researcher.md":  # which prints what it reaches
                text = re.sub(r"^rounds = \d+", "rounds = 2", text, flags=re.MULTILINE)
            name, part, _ = title.partition(" (continued)")
            with Path(name).open("a" if part else "w", encoding="utf-8") as file:
                file.write(text)
        elif marked == "not run by the tests":
            continue
        elif marked == "printed":
            for line in text.splitlines():
                pattern = ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
                assert re.search(pattern, printed), line
        elif language == "python":
            Path("block.py").write_text(text, encoding="utf-8")
            runpy.run_path("block.py", run_name="__main__")
        elif language == "sh":
            run_commands(text, monkeypatch, tmp_path, fails=marked == "fails")
        if not title and language in ("python", "sh"):
            printed = re.sub(" +", " ", "".join(capfd.readouterr()))
    for pattern in WRITTEN[page]:
        assert list(tmp_path.glob(pattern)), f"{page}: {pattern} was not written"


def forget_modules(folder: Path) -> None:
    """Let the page's own modules be imported anew, as a new process would."""
    for name, module in list(sys.modules.items()):
        if str(folder) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def run_commands(text: str, monkeypatch: pytest.MonkeyPatch, folder: Path, fails: bool) -> None:
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    if all(words and words[0] in ("fedskew", "python", "cat") for words in lines):
        for line in lines:
            forget_modules(folder)
            words = [found for word in line for found in (sorted(glob.glob(word)) if "*" in word else [word])]
            words, to = (words[:-2], words[-1:]) if ">" in words else (words, [])
            monkeypatch.setattr(sys, "argv", words)
            if words[0] == "cat":
                print(Path(words[1]).read_text(encoding="utf-8"))
            elif words[0] == "python":
                runpy.run_path(words[1], run_name="__main__")
            else:
                with redirect_stdout(io.StringIO() if to else sys.stdout) as file, pytest.raises(SystemExit) as ended:
                    main()
                if to:
                    Path(to[0]).write_text(file.getvalue(), encoding="utf-8")
                assert bool(ended.value.code) == fails, words
    else:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        subprocess.run(["sh", "-e", "-c", text], check=True, env={**os.environ, "PATH": path})
