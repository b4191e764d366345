"""Configs, runs, their folders, and what is shown of them.

Each module is imported when the first of its names is used, so that a site of a real federation, which only reads its
config, need not wait for the libraries that draw reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedskew.experiment._config import Config, parse_change, put, read, read_tree, resolve, write
    from fedskew.experiment._folder import plain_json, read_runs, whole_lines, write_text
    from fedskew.experiment._grid import Cell, Sweep, read_sweep
    from fedskew.experiment._records import SeedRun
    from fedskew.experiment._report import write_report
    from fedskew.experiment._setup import load_dataset, make_task
    from fedskew.experiment._simulate import Result, run_folder, simulate
    from fedskew.experiment._summary import over_seeds
    from fedskew.experiment._sweep import Job, SweepResult, Watcher, run_sweep
    from fedskew.experiment._sweep_tables import notes, text_table
    from fedskew.experiment._work import make_network, make_work

__all__ = [
    "Cell",
    "Config",
    "Job",
    "Result",
    "SeedRun",
    "Sweep",
    "SweepResult",
    "Watcher",
    "load_dataset",
    "make_network",
    "make_task",
    "make_work",
    "notes",
    "over_seeds",
    "parse_change",
    "plain_json",
    "put",
    "read",
    "read_runs",
    "read_sweep",
    "read_tree",
    "resolve",
    "run_folder",
    "run_sweep",
    "simulate",
    "text_table",
    "whole_lines",
    "write",
    "write_report",
    "write_text",
]

_LATE = {
    "Cell": "_grid",
    "Config": "_config",
    "Job": "_sweep",
    "Result": "_simulate",
    "SeedRun": "_records",
    "Sweep": "_grid",
    "SweepResult": "_sweep",
    "Watcher": "_sweep",
    "load_dataset": "_setup",
    "make_network": "_work",
    "make_task": "_setup",
    "make_work": "_work",
    "notes": "_sweep_tables",
    "over_seeds": "_summary",
    "parse_change": "_config",
    "plain_json": "_folder",
    "put": "_config",
    "read": "_config",
    "read_runs": "_folder",
    "read_sweep": "_grid",
    "read_tree": "_config",
    "resolve": "_config",
    "run_folder": "_simulate",
    "run_sweep": "_sweep",
    "simulate": "_simulate",
    "text_table": "_sweep_tables",
    "whole_lines": "_folder",
    "write": "_config",
    "write_report": "_report",
    "write_text": "_folder",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'fedskew.experiment' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"fedskew.experiment.{_LATE[name]}"), name)
