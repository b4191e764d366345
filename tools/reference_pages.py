"""Pages of the reference for `mkdocs build`: one for each public package and module of fedskew, from its docstrings.

An mkdocs hook and a griffe extension (see `mkdocs.yml`). Pages exist only while the site is built, so that a new
package or name appears by itself. `ORDER` says which come first in the navigation; all others follow by name.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).resolve().parent.parent / "src" / "fedskew"
ORDER = (
    "fedskew",
    "fedskew.labels",
    "fedskew.methods",
    "fedskew.methods.catalogue",
    "fedskew.selection",
    "fedskew.objectives",
    "fedskew.objectives.functional",
    "fedskew.local_steps",
    "fedskew.weighting",
    "fedskew.server_updates",
    "fedskew.pipelines",
    "fedskew.parameters",
    "fedskew.hooks",
    "fedskew.components",
    "fedskew.partition",
    "fedskew.data",
    "fedskew.models",
    "fedskew.metrics",
    "fedskew.mixing",
    "fedskew.experiment",
    "fedskew.deploy",
    "fedskew.engine",
    "fedskew.report",
    "fedskew.drawing",
    "fedskew.papers",
)
COMMANDS = "fedskew.cli"
"""The command line, whose reference is `fedskew --help`."""


def modules() -> list[str]:
    """Every module whose dotted name has no private part, first those of `ORDER`."""
    found = {
        ".".join(("fedskew", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }
    public = {
        name: path
        for name, path in found.items()
        if not any(part.startswith("_") for part in name.split("."))
        and not f"{name}.".startswith(f"{COMMANDS}.")
        and (path.parent / "__init__.py").exists()
    }
    return sorted(public, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def exported(module: str) -> list[str]:
    """The names that a module exports: those of its stub, or else of its `__all__`; none where it has neither."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    stub = file.with_suffix(".pyi")
    if stub.exists():
        imports = [node for node in _statements(stub) if isinstance(node, ast.ImportFrom) and node.module]
        return [alias.name for node in imports for alias in node.names]
    for node in _statements(file):
        if isinstance(node, ast.Assign) and any(getattr(name, "id", "") == "__all__" for name in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


class ComponentSignatures(griffe.Extension):
    """Show a `@component` with the signature of the frozen dataclass that it is."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Give the class the decorator that griffe knows."""
        for decorator in cls.decorators:
            if getattr(decorator.value, "canonical_path", "") == "fedskew.parameters.component":
                decorator.value = griffe.ExprName("dataclasses.dataclass")


def _statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages in the navigation, under "Reference"."""
    assert config.nav is not None
    for section in config.nav:
        if "Reference" in section:
            section["Reference"] += [{name: _address(name)} for name in modules()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name in modules():
        names = exported(name)
        chosen = f"    options:\n      members: {names}\n" if names else ""
        files.append(File.generated(config, _address(name), content=f"# {name}\n\n::: {name}\n{chosen}"))
    return files


def _address(name: str) -> str:
    return f"reference/{name}.md"
