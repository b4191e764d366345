"""Configs, runs, their folders, and what is shown of them."""

from fedskew.experiment._config import Config, parse_change, read, resolve
from fedskew.experiment._folder import read_runs
from fedskew.experiment._records import SeedRun
from fedskew.experiment._report import write_report
from fedskew.experiment._simulate import Result, run_folder, simulate
from fedskew.experiment._summary import over_seeds

__all__ = [
    "Config",
    "Result",
    "SeedRun",
    "over_seeds",
    "parse_change",
    "read",
    "read_runs",
    "resolve",
    "run_folder",
    "simulate",
    "write_report",
]
