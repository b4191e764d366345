"""A contract for import-linter: a package's private files are its own.

Files and folders whose name begins with one underscore may be imported from within the folder that holds them only;
everybody else uses what the folder's `__init__` exports.
"""

from __future__ import annotations

from grimp import DetailedImport, ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class PrivateContract(Contract):
    """No import crosses into another package's private files."""

    root = fields.StringField()

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find every import of a private file from outside the folder that holds it."""
        root = str(self.root)
        crossings: list[DetailedImport] = []
        for imported in sorted(graph.modules):
            owner = _owner(imported)
            if not imported.startswith(root) or owner is None:
                continue
            for importer in sorted(graph.find_modules_that_directly_import(imported)):
                if importer != owner and not importer.startswith(f"{owner}."):
                    crossings += graph.get_import_details(importer=importer, imported=imported)
        return ContractCheck(kept=not crossings, metadata={"crossings": crossings})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each crossing with its line."""
        for crossing in check.metadata["crossings"]:
            where = f"{crossing['importer']}:{crossing['line_number']}"
            output.print_error(
                f"{where} imports {crossing['imported']}; export what it needs from its package", bold=False
            )


def _owner(module: str) -> str | None:
    """The package that a private module belongs to; None for a public one."""
    parts = module.split(".")
    for at, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[:at])
    return None
