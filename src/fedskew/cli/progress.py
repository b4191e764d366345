"""Progress: rounds done, accuracy so far, time left; a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedskew.cli.console import Console
from fedskew.cli.options import print_estimate
from fedskew.experiment import SECONDS_BETWEEN_LINES, configs_of, rounds_of, target_in_words
from fedskew.tables import counted, duration

if TYPE_CHECKING:
    from fedskew.arena import ArenaJob, Trained
    from fedskew.experiment import Config, Job


class _Bar:
    """A progress bar on a terminal, which disappears at the end."""

    def __init__(self, console: Console, unit: str, speed_estimate_period: float, every: float) -> None:
        self._console = console
        self._every = every
        self._printed, self._since, self._rounds, self._seconds = time.monotonic(), 0.0, 0, 0.0
        self._warm = False
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=speed_estimate_period,
        )

    def _line(self, done: str, left: int, seconds: float = 0.0, rounds: int = 1) -> None:
        """Count rounds, and print a line where that is due: in a log, `every` so many seconds, or rounds if longer.

        Args:
            done: What is done.
            left: Rounds that are left.
            seconds: Seconds that the round took: the records of a resumed run come all at once, but took longer.
            rounds: How many have ended together.
        """
        if not rounds:
            return
        now = time.monotonic()
        if not self._warm:  # before the end of the first round lies what no other round waits for
            self._warm, self._since, said = True, now, "..."
        else:
            self._rounds, self._seconds = self._rounds + rounds, self._seconds + seconds
            said = f"about {duration(max(now - self._since, self._seconds) / self._rounds * left)}"
        if self._console.is_terminal or not left or now - self._printed < self._every:
            return
        self._console.print(f"{done}, {said} left", soft_wrap=True, markup=False, highlight=False)
        self._printed = self._since = now
        self._rounds, self._seconds = 0, 0.0

    def stop(self) -> None:
        """Take the bar off the screen."""
        self._bar.stop()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class RunProgressBar(_Bar):
    """A progress bar over the rounds of several configs, run one after another.

    Args:
        console: Where it is shown.
        configs: The configs.
        every: Seconds between lines where that is no terminal.
    """

    def __init__(self, console: Console, configs: Sequence[Config], every: float = SECONDS_BETWEEN_LINES) -> None:
        # rounds may take minutes
        super().__init__(console, "{task.fields[latest]}", speed_estimate_period=3600.0, every=every)
        self._total = sum(map(rounds_of, configs))
        self._task = self._bar.add_task("", total=self._total, latest="")
        self._done = 0

    def start(
        self,
        config: Config,
        words: Callable[[], Sequence[str]] = tuple,
        notes: Callable[[int], Sequence[str]] = lambda seed: (),
    ) -> Callable[[Mapping[str, Any]], None]:
        """Begin a config, and return what to call with each of its records; the first prints objective and target.

        Args:
            config: The config.
            words: Called before that for lines to print first.
            notes: Called with a seed at its first record, for what is to be known of its run.
        """
        from fedskew.methods import objective_in_words

        self._bar.update(self._task, completed=self._done, description=config.name)
        done = self._done
        self._done += rounds_of(config)
        latest = ""
        begun = False
        noted: set[str] = set()

        def listen(record: Mapping[str, Any]) -> None:
            nonlocal done, latest, begun
            if not begun:  # everything that is checked before a run has been
                said = [*words(), f"{config.name} minimises {objective_in_words(config.method)}"]
                for text in filter(None, [*said, target_in_words(config)]):
                    self._console.print(text, soft_wrap=True, markup=False, highlight=False)
            begun = True
            new = [note for note in notes(record["seed"]) if note not in noted] if not record["round"] else []
            for note in new:
                text = f"note on {config.name}, seed {record['seed']}: {note}"
                self._console.print(text, soft_wrap=True, markup=False, highlight=False, style="yellow")
            noted.update(new)
            if evaluation := record["evaluation"]:
                of = "" if config.evaluation.summary == "final" else " of this round"
                latest = f"seed {record['seed']}  accuracy{of} {evaluation['accuracy']:.3f}"
                self._bar.update(self._task, latest=latest)
            if record["round"]:
                done += 1
                self._bar.update(self._task, advance=1)
                text = f"{config.name}: {done:,} of {counted(self._total, 'round')}  {latest}".rstrip()
                self._line(text, self._total - done, record["seconds"])

        return listen


class SweepProgressBar(_Bar):
    """A progress bar over the rounds of all runs of a sweep, and a line for each run that ends.

    Args:
        console: Where it is shown.
        every: Seconds between lines where that is no terminal.
    """

    def __init__(self, console: Console, every: float = SECONDS_BETWEEN_LINES) -> None:
        super().__init__(console, "rounds ", speed_estimate_period=600.0, every=every)  # methods differ in cost

    def __enter__(self) -> Self:
        return self  # `begin` starts the bar, below what is said first

    def moved(self, folders: Sequence[Path]) -> None:
        """See `SweepProgress`."""
        self._print(f"{counted(len(folders), 'run')} moved to {folders[0].parent}, to be trained anew")

    def refused(self, label: str, reason: str) -> None:
        """See `SweepProgress`."""
        self._print(f"refused, while the others run: {label}: {reason}")

    def begin(self, jobs: Sequence[Job], finished: int) -> None:
        """See `SweepProgress`."""
        print_estimate(self._console, configs_of(jobs), only=False)
        self._bar.start()
        self._rounds_left = {job.name: rounds_of(job.config) for job in jobs}
        self._ended, self._all = finished, finished + len(jobs)
        self._total = sum(self._rounds_left.values())
        self._task = self._bar.add_task(self._runs(), total=self._total)
        if finished:
            self._print(f"{self._runs()} {'is' if self._all == 1 else 'are'} finished already")

    def round(self, job: Job, round: int, accuracy: float | None) -> None:
        """See `SweepProgress`."""
        if round:
            self._rounds_left[job.name] -= 1
            self._bar.advance(self._task)
            left = sum(self._rounds_left.values())
            self._line(f"{self._runs()}, {self._total - left:,} of {counted(self._total, 'round')}", left)

    def ended(self, job: Job, failure: str | None, accuracy: float | None) -> None:
        """See `SweepProgress`."""
        self._ended += 1
        left = self._rounds_left[job.name]  # not 0 where a run stops early or fails
        self._rounds_left[job.name] = 0
        self._bar.advance(self._task, left)
        self._bar.update(self._task, description=self._runs())
        result = "done" if accuracy is None else f"accuracy {100 * accuracy:.1f} %"
        self._print(f"{self._runs()}  {job.name}: {result if failure is None else 'failed'}")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _runs(self) -> str:
        return f"{self._ended:,} of {counted(self._all, 'run')}"


class ArenaProgressBar(_Bar):
    """A progress bar over the runs of an arena.

    Args:
        console: Where it is shown.
        every: Seconds between lines where that is no terminal.
    """

    def __init__(self, console: Console, every: float = SECONDS_BETWEEN_LINES) -> None:
        super().__init__(console, "runs ", speed_estimate_period=3600.0, every=every)

    def __enter__(self) -> Self:
        return self  # `begin` starts the bar

    def begin(self, finished: int, runs: int) -> None:
        """See `ArenaProgress`."""
        self._finished, self._runs = finished, runs
        self._bar.start()
        self._task = self._bar.add_task("", total=runs, completed=finished)
        if finished:
            self._console.print(f"{finished:,} of {counted(runs, 'run')} are there already", highlight=False)

    def ended(self, results: Sequence[tuple[ArenaJob, Trained]]) -> None:
        """See `ArenaProgress`."""
        runs = sum(len(trained.rows) for _, trained in results)
        self._finished += runs
        self._bar.update(self._task, completed=self._finished, description=results[-1][0].name[:60])
        self._line(f"{self._finished:,} of {counted(self._runs, 'run')}", self._runs - self._finished, rounds=runs)
        for job, trained in results:
            if trained.failed:
                text = f"failed: {job.name}: {trained.failed}"
                self._console.print(text, soft_wrap=True, markup=False, highlight=False)
