"""Remove the defences that docs/threats.md names, one at a time, and see that a test fails each time.

tools/defences.toml has them: a file, the text that defends, what stands in its place once it is removed, and tests. Of
each the source is copied, changed and tested; nothing here is touched.

    python tools/defences.py                    # all: some minutes
    python tools/defences.py --only sum-twice   # one, by name
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

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "defences.toml"


def removed(text: str, defence: dict[str, Any]) -> str:
    """Return a file's text without a defence; ValueError unless what defends stands in it once."""
    if text.count(defence["find"]) != 1:
        raise ValueError(
            f"{defence['name']}: {defence['file']} has its text {text.count(defence['find'])} times, not once"
        )
    return text.replace(defence["find"], defence["replace"])


def passes(source: Path, tests: list[str]) -> bool:
    """Return whether tests pass with the package in a folder."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not faults", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == 0


def main() -> int:
    """Remove each defence; return 1 if the tests of one still pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="name of one defence")
    only = parser.parse_args().only
    defences = tomllib.loads(LIST.read_text(encoding="utf-8"))["defence"]
    chosen = [defence for defence in defences if only in (None, defence["name"])]
    every = sorted({test for defence in chosen for test in defence["tests"]})
    if not passes(ROOT / "src", every):
        print("the tests fail as it is; mend that first")
        return 1
    survivors = []
    for number, defence in enumerate(chosen, 1):
        with tempfile.TemporaryDirectory() as place:
            source = Path(place) / "src"
            shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
            path = source / "fedskew" / defence["file"]
            path.write_text(removed(path.read_text(encoding="utf-8"), defence), encoding="utf-8")
            survived = passes(source, defence["tests"])
        survivors += [defence["name"]] if survived else []
        print(
            f"{number}/{len(chosen)} {defence['name']}: {'NO TEST FAILED' if survived else 'a test failed'}", flush=True
        )
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} removals were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
