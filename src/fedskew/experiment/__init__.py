"""Configs, runs, their folders, and what is shown of them."""

from fedskew.experiment._config import Config, parse_change, put, read, resolve
from fedskew.experiment._folder import read_runs
from fedskew.experiment._grid import Cell, Sweep, read_sweep
from fedskew.experiment._records import SeedRun
from fedskew.experiment._report import write_report
from fedskew.experiment._simulate import Result, run_folder, simulate
from fedskew.experiment._summary import over_seeds
from fedskew.experiment._sweep import Job, SweepResult, Watcher, run_sweep
from fedskew.experiment._sweep_tables import notes, text_table

__all__ = [
    "Cell",
    "Config",
    "Job",
    "Result",
    "SeedRun",
    "Sweep",
    "SweepResult",
    "Watcher",
    "notes",
    "over_seeds",
    "parse_change",
    "put",
    "read",
    "read_runs",
    "read_sweep",
    "resolve",
    "run_folder",
    "run_sweep",
    "simulate",
    "text_table",
    "write_report",
]
