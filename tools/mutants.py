"""Change one line of src/ at a time, and see which test notices: how much the tests can, as a number.

    python tools/mutants.py draw                # 200 changes, by seed, into tools/mutants.json
    python tools/mutants.py check               # of make lint: whether their lines and tests are still there
    python tools/mutants.py run --of labels     # in files whose path begins so: does the test still notice?
    pytest --cov=fedskew --cov-context=test     # which test runs which line: .coverage (pip install pytest-cov)
    python tools/mutants.py run --processes 2   # of each, the test that fails; the last line counts them

A change is an arithmetic or comparison operator, a constant, or a line that is taken out, and is kept as the line
before and after. Who rewrites such a line writes the same change to it down in the list; who deletes it, another of
that kind in what came in its place. First the test runs that noticed it last time, then, where there is a `.coverage`,
the tests that run the line, those of its own package first. Of each change the source is copied; nothing here is
touched.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fedskew"
LIST = ROOT / "tools" / "mutants.json"
PACKAGES = (
    *("aggregation", "deploy", "engine", "finish", "labels", "local_steps", "mixing", "objectives"),
    *("selection", "server_updates", "sums", "weighting"),
)
MUTANTS, TESTS, SECONDS = 200, 150, 300
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
COMPARISONS = {
    "<=": "<",
    ">=": ">",
    "<": "<=",
    ">": ">=",
    "==": "!=",
    "!=": "==",
    " is not ": " is ",
    " not in ": " in ",
}


def between(line: str, left: ast.expr, right: ast.expr, pattern: str, put: str) -> str:
    """Return a line with what stands between two expressions on it replaced."""
    start, end = left.end_col_offset or 0, right.col_offset
    return line[:start] + re.sub(pattern, lambda _: put, line[start:end], count=1) + line[end:]


def changes(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield kind, line before and line after, of the changes to a file that fit on a line that stands there once."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno:
            continue
        line, kind = lines[node.lineno - 1], ""
        after = line
        if not line.isascii():
            continue
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            kind, after = "arithmetic", between(line, node.left, node.right, r"[-+*/]", OPERATORS[type(node.op)])
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            between_them = line[node.left.end_col_offset : node.comparators[0].col_offset]
            found = next((one for one in COMPARISONS if one in between_them), None)
            if found:
                kind, after = "comparison", between(line, node.left, node.comparators[0], found, COMPARISONS[found])
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
        ):
            kind = "constant"
            after = f"{line[: node.col_offset]}{node.value + 1}{line[node.end_col_offset :]}"
        elif isinstance(node, ast.AugAssign | ast.Raise) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            kind, after = "removed", line[: node.col_offset] + "pass" + line[node.end_col_offset :]
        if kind and after != line:
            yield kind, line, after


def draw(seed: int) -> list[dict[str, str]]:
    """Draw as many changes of each kind; ones in files in proportion to what can be changed there."""
    texts = {file: file.read_text(encoding="utf-8") for name in PACKAGES for file in (SOURCE / name).glob("*.py")}
    often = Counter(line for file in SOURCE.rglob("*.py") for line in file.read_text(encoding="utf-8").splitlines())
    found = [
        {"file": str(file.relative_to(SOURCE)), "kind": kind, "before": before, "after": after}
        for file, text in sorted(texts.items())
        for kind, before, after in changes(text)
        if often[before] == 1
    ]
    kinds = sorted({change["kind"] for change in found})
    generator = random.Random(seed)
    return [
        change
        for kind in kinds
        for change in generator.sample([one for one in found if one["kind"] == kind], MUTANTS // len(kinds))
    ]


def place(change: dict[str, str]) -> int | None:
    """Return the number of a change's line in its file; None where it does not stand there once."""
    file = SOURCE / change["file"]
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return lines.index(change["before"]) + 1 if lines.count(change["before"]) == 1 else None


def is_there(test: str) -> bool:
    """Return whether the file of a test has a function of its name."""
    file, _, name = test.partition("::")
    defined = f"def {name.partition('[')[0]}("
    return (ROOT / file).is_file() and defined in (ROOT / file).read_text(encoding="utf-8")


def outdated(known: list[dict[str, str]]) -> list[str]:
    """Say of which changes the line is gone, or the test."""
    lines = [f"{change['file']}: {change['before'].strip()}" for change in known if place(change) is None]
    tests = [change["noticed"] for change in known if "::" in (change.get("noticed") or "")]
    return [*lines, *(test for test in tests if not is_there(test))]


def tests_of(measured: Any, file: Path, number: int) -> list[str]:
    """Return the tests that run a line, those of its package first; of many, some, by a seed."""
    contexts = measured.contexts_by_lineno(str(file)).get(number, [])
    tests = sorted({context.partition("|")[0] for context in contexts if "::" in context})
    random.Random(0).shuffle(tests)
    own = f"tests/{file.relative_to(SOURCE).parts[0]}/"
    return sorted(tests, key=lambda test: not test.startswith(own))[:TESTS]


def failing(source: Path, tests: list[str]) -> str | None:
    """Return the first test that fails with the package in a folder; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider", "-p", "no:cov", *tests]
    own = source.parent / "tmp"  # tests forget modules that lie where temporary files do
    own.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "TMPDIR": str(own)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return "it does not end"
    if ended.returncode in (0, 5):  # 5: -m leaves none of them
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", ended.stdout, re.MULTILINE)
    return failed[1] if failed else "it can't be imported"


def noticed(change: dict[str, str], measured: Any) -> str | None:
    """Return which test notices a change; None if no test does."""
    file, number, last = SOURCE / change["file"], place(change), change.get("noticed") or ""
    assert number is not None, "checked before"
    tests = tests_of(measured, file, number) if measured else []
    if "::" in last and (last in tests or not measured):
        tests = [last, *(test for test in tests if test != last)]
    if not tests:
        return None if measured else last or None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        for beside in ("recipes", "docs", "examples"):  # found from the package's place
            (Path(folder) / beside).symlink_to(ROOT / beside)
        lines = file.read_text(encoding="utf-8").splitlines()
        lines[number - 1] = change["after"]
        (copy / "fedskew" / change["file"]).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return failing(copy, tests)


def main() -> int:
    """Draw, check or run; return 1 if the list is out of date, or what a test noticed the last time survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["draw", "check", "run"])
    parser.add_argument("--processes", type=int, default=1, help="changes tested at once")
    parser.add_argument("--of", default="", help="how the paths of the files begin whose changes run")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    options = parser.parse_args()
    if options.what == "draw":
        LIST.write_text(json.dumps(draw(options.seed), indent=1) + "\n", encoding="utf-8")
        return 0
    known = json.loads(LIST.read_text(encoding="utf-8"))
    if gone := outdated(known):
        print(*gone, "no longer there: write down in tools/mutants.json where they are, or another change", sep="\n")
        return 1
    if options.what == "check":
        return 0
    measured, lost = None, []
    if (ROOT / ".coverage").exists():
        import coverage  # comes with pytest-cov; the rest does without it

        measured = coverage.CoverageData(str(ROOT / ".coverage"))
        measured.read()
    chosen = [change for change in known if change["file"].startswith(options.of)]
    with ThreadPoolExecutor(options.processes) as pool:
        tests = pool.map(lambda change: noticed(change, measured), chosen)
        for number, (change, by) in enumerate(zip(chosen, tests, strict=True), 1):
            if by is None and change.get("noticed"):
                lost.append(change)
            change["noticed"], change["now"] = by, "noticed" if by else "survived"
            print(f"{number}/{len(chosen)} {change['file']}: {by or 'NO TEST FAILED'}", flush=True)
    LIST.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    counts = Counter(change["now"] for change in known)
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    for change in lost:
        print(f"noticed before, survives now: {change['file']}: {change['before'].strip()}")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
