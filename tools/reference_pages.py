"""Pages of the reference for `mkdocs build`: the command line, and each public package and module of fedskew.

An mkdocs hook and a griffe extension (see `mkdocs.yml`). Pages are made from docstrings and from the commands' help
while the site is built, so that a new package, name or option appears by itself. `ORDER` says which packages come first
in the navigation; all others follow by name.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

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
    "fedskew.aggregation",
    "fedskew.server_updates",
    "fedskew.finish",
    "fedskew.personal",
    "fedskew.pipelines",
    "fedskew.parameters",
    "fedskew.hooks",
    "fedskew.components",
    "fedskew.partition",
    "fedskew.data",
    "fedskew.models",
    "fedskew.metrics",
    "fedskew.mixing",
    "fedskew.sums",
    "fedskew.privacy",
    "fedskew.experiment",
    "fedskew.deploy",
    "fedskew.engine",
    "fedskew.report",
    "fedskew.report.drawing",
    "fedskew.papers",
)
KEYS = "<!-- every key -->"
"""Where the page of all keys has its tables."""
COMMANDS = "fedskew.cli"
"""The command line, which has a page of its own."""
COMMAND_LINE = """# Command line

`fedskew COMMAND --help` prints the same. A user's error is one line and exit status 2; `fedskew --debug COMMAND` shows
its traceback. `fedskew --version` prints the version.
"""


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
    """The names that a module or its stub imports as themselves, or has in `__all__`, and the components of `INDEX`."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    stub = file.with_suffix(".pyi")
    names: dict[str, None] = {}
    for node in _statements(stub if stub.exists() else file):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= dict.fromkeys(alias.name for alias in node.names if alias.name == alias.asname)
        elif isinstance(node, ast.Assign) and any(getattr(name, "id", "") == "__all__" for name in node.targets):
            names |= dict.fromkeys(ast.literal_eval(node.value))
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "INDEX":
            assert isinstance(node.value, ast.Dict)
            names |= dict.fromkeys(["INDEX", *map(ast.unparse, node.value.values)])
    return list(names)


def command_line() -> str:
    """The page of the command line: help, options and examples of every command."""
    sys.path.insert(0, str(SOURCE.parent))
    from typer.main import get_command

    from fedskew.cli import app

    return COMMAND_LINE + "".join(_commands("fedskew", get_command(app)))


def _commands(name: str, command: Any) -> Iterator[str]:
    """The sections of a group's commands."""
    for part, inner in command.commands.items():
        if hasattr(inner, "commands"):
            yield from _commands(f"{name} {part}", inner)
        else:
            yield _command(f"{name} {part}", inner)


def _command(name: str, command: Any) -> str:
    description, *examples = re.split(r"^Examples?:", command.help, flags=re.MULTILINE)
    rows = [_parameter(parameter) for parameter in command.params]
    lines = [line.strip() for example in examples for line in example.splitlines() if line.strip()]
    shown = "\n".join(re.sub(r"\s{3,}\((.*)\)$", r"  # \1", line) for line in lines)
    table = "| argument or option | meaning |\n|---|---|\n" + "\n".join(rows) if rows else ""
    return f"\n## {name}\n\n{description.strip()}\n\n```sh\n{shown}\n```\n\n{table}\n"


def _parameter(parameter: Any) -> str:
    """The row of an argument or option: how it is written, what it means, whether it is required, its default."""
    value = parameter.metavar or ("" if getattr(parameter, "is_flag", False) else parameter.type.name.upper())
    argument = parameter.param_type_name == "argument"
    written = (parameter.metavar or parameter.name.upper()) if argument else f"{parameter.opts[0]} {value}".strip()
    notes = re.sub(r"\s+\[default: (.*)\]$", r" Default: \1.", getattr(parameter, "help", None) or "")
    if argument and not parameter.required:
        written = f"[{written}]"
    if parameter.required and not argument:
        notes += " Required."
    if parameter.default not in (None, False) and not parameter.required:
        notes += f" Default: `{parameter.default}`."
    return f"| `{written}` | {notes.strip().replace('|', '&#124;')} |"


def schema() -> str:
    """The JSON schema of a config, for editors."""
    sys.path.insert(0, str(SOURCE.parent))
    from fedskew.cli.config_keys import json_schema

    return json.dumps(json_schema(), indent=1, ensure_ascii=False)


def config_keys() -> str:
    """Every key of a config, table by table, and the keys that go with each name."""
    sys.path.insert(0, str(SOURCE.parent))
    from fedskew.cli.config_keys import choices, tables

    parts = [_keys(f"[{entry.name}]" if entry.name else "Top of the file", entry) for entry in tables()]
    for place, entries in choices().items():
        parts.append(f"## What `{place}` may be\n\n| name | what it is |\n|---|---|\n")
        parts += [f"| `{entry.name}` | {_cell(entry.summary)} |\n" for entry in entries]
        parts.append("\n")
        parts += [_keys(f"{place} = {entry.name}", entry, level=3) for entry in entries if entry.keys]
    return "".join(parts)


def _keys(title: str, entry: Any, level: int = 2) -> str:
    rows = []
    for key in entry.keys:
        default = f"`{_cell(key.value)}`" if key.value else "required" if key.required else ""
        rows.append(f'| <code class="key">{key.name}</code> | {_cell(key.kind)} | {default} | {_cell(key.meaning)} |\n')
    head = "| key | value | default | meaning |\n|---|---|---|---|\n" if rows else ""
    return f"{'#' * level} {title}\n\n{_cell(entry.summary) if level == 2 else ''}\n\n{head}{''.join(rows)}\n"


def _cell(text: str) -> str:
    return text.replace("|", "&#124;")


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
    """List the pages of packages and modules in the navigation, under "Reference"."""
    assert config.nav is not None
    for section in config.nav:
        if "Reference" in section:
            section["Reference"] += [{name: _address(name)} for name in modules()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    files.append(File.generated(config, _address("command-line"), content=command_line()))
    files.append(File.generated(config, "reference/fedskew.schema.json", content=schema()))
    security = (Path(__file__).parents[1] / "SECURITY.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "security.md", content=re.sub(r"\]\(docs/", "](", security)))
    for name in modules():
        names = exported(name)
        chosen = f"    options:\n      members: {names}\n" if names else ""
        files.append(File.generated(config, _address(name), content=f"# {name}\n\n::: {name}\n{chosen}"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the page of all keys."""
    return markdown.replace(KEYS, config_keys()) if KEYS in markdown else markdown


def _address(name: str) -> str:
    return f"reference/{name}.md"
