"""`fedskew sweep`: a grid of methods, partitions and seeds from one TOML file."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from fedskew.cli.console import Console
from fedskew.cli.options import (
    Changes,
    ConfigFile,
    DataRoot,
    Device,
    Estimate,
    Fresh,
    On,
    Out,
    Processes,
    Quick,
    Seeds,
    changed_keys,
    config_file,
    print_estimate,
    print_failures,
    quick_note,
)
from fedskew.errors import ArgumentError


def sweep(
    config: ConfigFile,
    changes: Changes = None,
    seeds: Seeds = None,
    quick: Quick = False,
    estimate: Estimate = False,
    out: Out = Path("runs"),
    fresh: Fresh = False,
    processes: Processes = None,
    on: On = None,
    device: Device = None,
    data_root: DataRoot = None,
) -> None:
    """Train every combination of a grid that a TOML file describes, and compare them in one table.

    Takes the time of all its runs over the number that train at once; what is left is shown, in a log every 30 seconds.

    The file is a config of `fedskew run` with one more table:

        [sweep]
        accuracy = 0.8              # the table says after how many rounds it is reached
        methods = [
            "fedavg",
            "fedentopt+fedprox",
            {label = "half", weighting = {name = "fedpals", ess = 0.5}},
        ]

        [sweep.grid]                # any keys, every combination
        partition.beta = [0.1, 0.5]

    Every cell and seed becomes a run folder like those of `fedskew run`. A sweep that is started again does only what
    is missing, whether it was stopped or its grid has grown. Where your code or data have changed since, it says so and
    stops; --fresh trains what is concerned anew.

    A combination that makes no sense, or that your data do not allow, is left out: the others run, and it stands in the
    tables with its reason. The exit status is 1 then, as where a run failed. A mistake in the file, missing data or a
    missing package stop everything before the first run.

    Examples:

        fedskew sweep @compare --quick

        fedskew sweep my.toml --seeds 0,1,2 --processes 4

        fedskew sweep my.toml --on tcp://10.0.0.1:8786 --out /shared/runs
    """
    from fedskew.cli.progress import SweepProgressBar, stoppable
    from fedskew.cli.tables import sweep_table
    from fedskew.executors import executor
    from fedskew.experiment import Job, Sweep, configs_of, run_sweep

    config = config_file(config)
    changed = changed_keys(changes, seeds, device, data_root)
    whole = Sweep.read(config, changed, quick)
    console = Console()
    if estimate:
        missing = [job for job in Job.of(whole) if not job.is_finished(out)]
        print_estimate(console, configs_of(missing), only=True)
        return
    if processes is not None and on is not None:
        raise ArgumentError("--processes: is for this machine, and --on for others; give one of them")
    workers = executor(1, on) if on is not None else nullcontext((None, 1))
    with stoppable(SweepProgressBar(console)) as bar, workers as (pool, _):
        result = run_sweep(whole, out, processes, bar, fresh, pool)
    wide = console.wide
    wide.print(sweep_table(result, wide.width))
    for note in result.notes():
        wide.note(note)
    if quick:
        wide.note(quick_note(config, changed), style="yellow")
    console.say(f"tables: {result.folder}/table.csv, table.md, runs.csv")
    if result.report.exists():
        console.say(f"report: {result.report}")
    print_failures(result.failures, result.refused)
