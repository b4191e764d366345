"""Count src/ and tests/: lines of code, lines of docstrings, files, names that packages export.

    python tools/size.py              # the sums and their limits; exit status 1 above one
    python tools/size.py --packages   # by package, too

A line of code has a token that is neither a comment nor part of a docstring. Exported names are those of the packages'
`__init__`, each counted where it is exported. Limits only rise by a commit that says why.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "src": {"code": 38_646, "docstrings": 9_564, "files": 315, "names": 330},
    "tests": {"code": 33_609},
}
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that docstrings take, those of fields (after an assignment) among them."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, DOCUMENTED):
            continue
        for at, statement in enumerate(node.body):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            described = at == 0 or isinstance(node.body[at - 1], ast.Assign | ast.AnnAssign)
            if described and isinstance(statement.value.value, str):
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def exported(tree: ast.Module) -> int:
    """Return how many names a package's `__init__` exports: its `__all__`, or `from .x import y as y`."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "__all__":
            return len(getattr(statement.value, "elts", []))
    imports = [statement for statement in tree.body if isinstance(statement, ast.ImportFrom)]
    return sum(alias.asname == alias.name for statement in imports for alias in statement.names)


def count(file: Path) -> Counter[str]:
    """Count one file."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    described = docstrings(tree)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    names = exported(tree) if file.stem == "__init__" else 0
    return Counter(code=len(code - described), docstrings=len(described), files=1, names=names)


def main() -> int:
    """Print the counts; return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", action="store_true", help="print each package, too")
    by_package = parser.parse_args().packages
    above = []
    for place, limits in LIMITS.items():
        top = ROOT / place / "fedskew" if place == "src" else ROOT / place
        counts: dict[str, Counter[str]] = {}
        for file in sorted([*top.rglob("*.py"), *top.rglob("*.pyi")]):
            part = file.relative_to(top).parts[0] if file.parent != top else "."
            counts.setdefault(part, Counter()).update(count(file))
        total = sum(counts.values(), Counter())
        if by_package:
            for part, own in sorted(counts.items(), key=lambda item: -item[1]["code"]):
                print(f"  {part:16}", *(f"{own[key]:7,} {key}" for key in ("code", "docstrings", "files", "names")))
        said = [f"{total[key]:,} of {limit:,} {key}" for key, limit in limits.items()]
        print(f"{place}: " + ", ".join(said))
        above += [f"{place}: {total[key]:,} {key}" for key, limit in limits.items() if total[key] > limit]
    if above:
        print("above its limit: " + "; ".join(above) + ". Take lines out elsewhere, or raise the limit and say why.")
    return bool(above)


if __name__ == "__main__":
    raise SystemExit(main())
