"""`fedskew sweep`: a grid of methods, partitions and seeds; `fedskew arena`: methods tuned in many situations."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from typer import Option

from fedskew.cli import options
from fedskew.cli.page import Console
from fedskew.errors import ArgumentError
from fedskew.tables import counted

_SHOWN = 5


def sweep(
    config: options.ConfigFile,
    changes: options.Changes = None,
    seeds: options.Seeds = None,
    quick: options.Quick = False,
    estimate: options.Estimate = False,
    out: options.Out = Path("runs"),
    fresh: options.Fresh = False,
    processes: options.Processes = None,
    on: options.On = None,
    device: options.Device = None,
    data_root: options.DataRoot = None,
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
    from fedskew.executors import executor
    from fedskew.experiment import Job, Sweep, run_sweep

    config = options.config_file(config)
    changed = options.changed_keys(changes, seeds, device, data_root)
    whole = Sweep.read(config, changed, quick)
    console = Console()
    if estimate:
        missing = [job for job in Job.of(whole) if not job.is_finished(out)]
        options.print_estimate(console, Job.configs(missing), only=True)
        return
    options.check_processes(processes, on)
    workers = executor(1, on) if on is not None else nullcontext((None, 1))
    with stoppable(SweepProgressBar(console)) as bar, workers as (pool, _):
        result = run_sweep(whole, out, processes, bar, fresh, pool)
    headings, rows = result.table()
    axes = len(result.sweep.axes)
    if sum(max(map(len, column)) + 2 for column in zip(headings, *rows, strict=True)) > console.wide.width:
        headings = [*headings[:axes], *(heading.replace(" ", "\n", 1) for heading in headings[axes:])]
        rows = [[*row[:axes], *(re.sub(r" (?=[±(])", "\n", cell) for cell in row[axes:])] for row in rows]
    made = [f"tables: {result.folder}/table.csv, table.md, runs.csv"]
    made += [f"report: {result.report}"] if result.report.exists() else []
    smaller = options.quick_note(config, changed) if quick else ""
    options.finish(
        result.sweep.name, (headings, rows, axes), result.notes(), smaller, made, result.failures, result.refused
    )


def arena(
    config: options.ConfigFile,
    changes: options.Changes = None,
    only: Annotated[
        list[str] | None,
        Option(
            metavar="AXIS=LABEL", help='A part of it, such as task=digits or "method=fedavg|fedla"; may be repeated.'
        ),
    ] = None,
    seeds: options.Seeds = None,
    quick: options.Quick = False,
    estimate: Annotated[bool, Option("--estimate", help="Only estimate how long the missing runs take here.")] = False,
    tables: Annotated[bool, Option("--tables", help="Train nothing; write the tables so far.")] = False,
    out: options.Out = Path("runs"),
    processes: options.Processes = None,
    on: options.On = None,
    data_root: options.DataRoot = None,
) -> None:
    """Compare methods in many situations, each tuned there under one budget.

    Takes hours for a whole arena; the time is estimated first, and the time left is shown. It may be stopped at any
    time: every run that ends is a line of runs.csv, and the same command goes on with what is missing.

    The file is one of `fedskew sweep`, whose grid holds the situations, with one more table:

        [arena]
        partitions = [0, 1]                 # seeds: each situation is partitioned once with each
        rates = [0.01, 0.03, 0.1, 0.3]      # learning rates that every method tries, by validation samples
        budget = 6                          # runs that each may spend on its tuning, the rates included

        [sweep]
        methods = [
            "fedavg",
            {label = "fedprox", preset = "fedprox", own = {method.local_step.mu = [0.1, 1.0]}},
        ]

    After the rates, a method tries the values of one parameter of its `own`, or further rates. A method or situation
    that is added later costs only its own runs. Methods are compared on the same partition and seed, at equal rounds,
    compute and traffic; differences.png is read first. `set = {partition.baseline = "pooled"}`, or "alone", is a row.

    Examples:

        fedskew arena @arena --quick
        fedskew arena @arena --only task=digits --only participation=0.2 --processes 2
        fedskew arena @arena --on tcp://10.0.0.1:8786
    """
    from fedskew.arena import Arena, ArenaState, comparison, run_arena, write_comparison
    from fedskew.cli.progress import ArenaProgressBar, stoppable
    from fedskew.executors import cores, executor

    options.check_processes(processes, on)
    path = options.config_file(config)
    changed = options.changed_keys(changes, seeds, None, data_root)
    whole = Arena.read(path, changed, quick, _labels(only))
    console = Console()
    state = ArenaState.read(whole, out)
    if not tables:
        configs = [job.config.for_seed(job.config.seeds[0]) for job, _ in state.missing]
        options.print_estimate(console, configs, only=estimate, times=[runs for _, runs in state.missing])
        if estimate:
            return
        for line in whole.refused[:_SHOWN]:
            console.say(f"left out: {line}")
        if len(whole.refused) > _SHOWN:
            console.print(f"and {len(whole.refused) - _SHOWN:,} more combinations that make no sense")
        with stoppable(ArenaProgressBar(console)) as bar, executor(processes or cores(), on) as (pool, at_once):
            state = run_arena(whole, out, pool, at_once, bar)
    files = write_comparison(state, out)
    headings, body, notes = comparison(state)
    refused: list[str] = []
    if not body:
        reasons = (line["failure"].removeprefix("refused: ") for line in state.runs if line["failure"])
        refused = list(dict.fromkeys(reasons))[:_SHOWN]
        notes = [f"Nothing can be compared with {whole.settings.reference} yet."]
    made = "; ".join(filter(None, [str(whole.folder(out) / "runs.csv"), ", ".join(file.name for file in files)]))
    smaller = options.quick_note(path, changed) if quick else ""
    trained = f"{len(state.runs):,} of {counted(state.number, 'run')}: {made}"
    options.finish("", (headings, body, 1), notes, smaller, [trained], state.failures, refused)


def _labels(only: list[str] | None) -> dict[str, str]:
    found = {}
    for text in only or []:
        axis, separator, labels = text.partition("=")
        if not separator or not axis.strip() or not labels.strip():
            raise ArgumentError(f"--only {text!r}: expected AXIS=LABEL, such as task=digits")
        found[axis.strip()] = labels
    return found
