"""`fedskew sweep`: a grid of methods, partitions and seeds from one TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from fedskew.experiment import Job


def sweep(
    config: Annotated[Path, typer.Argument(help="The TOML file.", show_default=False)],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as training.lr=0.05.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, such as 0,1,2.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Apply the file's own [quick] table: minutes, not hours.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where run folders and the sweep's own folder go.")] = Path("runs"),
    processes: Annotated[
        int | None,
        typer.Option(help="Runs at a time.  [default: cores / engine.threads; 1 on a GPU]", show_default=False),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where the data sets are (else FEDSKEW_DATA).")] = None,
) -> None:
    """Train every combination of a grid that a TOML file describes, and compare them in one table.

    The file is a config of `fedskew run` with one more table:

        [sweep]
        accuracy = 0.8              # how soon is it reached?
        methods = [
            "fedavg",
            "fedentopt+fedprox",
            {label = "half", weighting = {name = "fedpals", ess = 0.5}},
        ]

        [sweep.grid]                # any keys, each with each
        partition.beta = [0.1, 0.5]

    Every cell and seed becomes a run folder like those of `fedskew run`. A sweep that was stopped does only what is
    missing when it is started again; so does one whose grid has grown.

    Examples:

        fedskew sweep recipes/compare.toml --quick

        fedskew sweep my.toml --seeds 0,1,2 --processes 4
    """
    from fedskew.cli.changes import changed_keys
    from fedskew.cli.tables import sweep_table
    from fedskew.experiment import read_sweep, run_sweep, sweep_notes

    whole = read_sweep(config, changed_keys(changes, seeds, device, data_root), quick)
    console = Console()
    with SweepWatch(console) as watch:
        try:
            result = run_sweep(whole, out, processes, watch)
        except KeyboardInterrupt:
            watch.stop()
            console.print("stopped; the same command goes on from here")
            raise typer.Exit(130) from None
    wide = console if console.is_terminal else Console(width=160)  # a log has no edge to keep to
    wide.print(sweep_table(result, wide.width))
    for note in sweep_notes(result.sweep, result.rows):
        wide.print(note, markup=False, highlight=False)
    console.print(f"tables: {result.folder}/table.csv, table.md, table.html", soft_wrap=True, markup=False)
    if result.report.exists():
        console.print(f"report: {result.report}", soft_wrap=True, markup=False)
    for failure in result.failures:
        Console(stderr=True, soft_wrap=True).print(f"failed: {failure}", markup=False, highlight=False, style="red")
    if result.failures:
        raise typer.Exit(1)


class SweepWatch:
    """A progress bar over the rounds of all runs, and a line for each run that ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("rounds "),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=600,  # methods differ in cost, so a minute says little of the whole
        )

    def begin(self, jobs: Sequence[Job], finished: int) -> None:
        """See `SweepProgress`."""
        from fedskew.cli.progress import rounds_of

        self._rounds_left = {job.name: rounds_of(job.config) for job in jobs}
        self._accuracy: dict[str, float] = {}
        self._ended, self._all = finished, finished + len(jobs)
        self._task = self._bar.add_task(self._runs(), total=sum(self._rounds_left.values()))
        if finished:
            self._print(f"{self._runs()} are there already")

    def round(self, job: Job, round: int, accuracy: float | None) -> None:
        """See `SweepProgress`."""
        if accuracy is not None:
            self._accuracy[job.name] = accuracy
        if round:
            self._rounds_left[job.name] -= 1
            self._bar.advance(self._task)

    def ended(self, job: Job, failure: str | None) -> None:
        """See `SweepProgress`."""
        self._ended += 1
        left = self._rounds_left[job.name]  # some, where a run stops early or fails
        self._bar.advance(self._task, left)
        self._bar.update(self._task, description=self._runs())
        known = f"accuracy {100 * self._accuracy[job.name]:.1f} % at its end" if job.name in self._accuracy else "done"
        self._print(f"{self._runs()}  {job.name}: {known if failure is None else 'failed'}")

    def stop(self) -> None:
        """Take the bar off the screen."""
        self._bar.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _runs(self) -> str:
        return f"{self._ended} of {self._all} runs"

    def __enter__(self) -> SweepWatch:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
