"""Remove the defences that docs/threats.md names, one at a time, and see that a test fails each time.

tools/defences.toml has them: a file, the text that defends, what stands in its place once it is removed, and tests. Of
each the source is copied, changed and tested; nothing here is touched.

    python tools/defences.py                              # all: some minutes
    python tools/defences.py --only "noise is paid for"   # one, by name
    python tools/defences.py --check                      # of make lint: whether their texts and tests are still there
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from mutants import is_there

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "defences.toml"


def outdated(defences: list[dict[str, Any]]) -> list[str]:
    """Say of which defences the text does not stand in its file once, or a test is gone."""
    texts = [
        f"{defence['name']}: {defence['file']}" for defence in defences if source(defence).count(defence["find"]) != 1
    ]
    tests = [f"{defence['name']}: {test}" for defence in defences for test in defence["tests"] if not is_there(test)]
    return [*texts, *tests]


def source(defence: dict[str, Any]) -> str:
    """Return the text of a defence's file; empty where there is no such file."""
    path = ROOT / "src" / "fedskew" / defence["file"]
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def passes(package: Path, tests: list[str]) -> bool:
    """Return whether tests pass with the package in a folder."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not faults", *tests]
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == 0


def main() -> int:
    """Remove each defence; return 1 if the tests of one still pass."""
    defences = tomllib.loads(LIST.read_text(encoding="utf-8"))["defence"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[one["name"] for one in defences], metavar="NAME", help="one defence")
    parser.add_argument("--check", action="store_true", help="only say which are out of date")
    options = parser.parse_args()
    if gone := outdated(defences):
        print(*gone, "not there, or not once: write down in tools/defences.toml where they are", sep="\n")
        return 1
    if options.check:
        return 0
    chosen = [defence for defence in defences if options.only in (None, defence["name"])]
    every = sorted({test for defence in chosen for test in defence["tests"]})
    if not passes(ROOT / "src", every):
        print("the tests fail as it is; mend that first")
        return 1
    survivors = []
    for number, defence in enumerate(chosen, 1):
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place) / "src"
            shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
            without = source(defence).replace(defence["find"], defence["replace"])
            (copy / "fedskew" / defence["file"]).write_text(without, encoding="utf-8")
            survived = passes(copy, defence["tests"])
        survivors += [defence["name"]] if survived else []
        print(
            f"{number}/{len(chosen)} {defence['name']}: {'NO TEST FAILED' if survived else 'a test failed'}", flush=True
        )
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} removals were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
