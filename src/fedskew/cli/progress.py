"""The bars of commands that train: what is said first, and a line for each run that ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import rich.console
import typer

from fedskew.cli.options import print_estimate
from fedskew.cli.page import Console
from fedskew.experiment import Bar, Job, RunBar
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew.arena import ArenaJob, Trained
    from fedskew.experiment import Config

AnyBar = TypeVar("AnyBar", bound=Bar)


def announced(
    bar: RunBar,
    config: Config,
    words: Callable[[], Sequence[str]] = tuple,
    notes: Callable[[int], Sequence[str]] = lambda seed: (),
) -> Callable[[Mapping[str, Any]], None]:
    """Begin a config, and return what to call with each of its records; the first prints `words`, objective and target,
    and each seed's first its `notes`."""
    from fedskew.methods import objective_in_words

    listen_to, said = bar.start(config), set[str]()

    def listen(record: Mapping[str, Any]) -> None:
        if not said:  # everything that is checked before a run has been
            evaluation = record["evaluation"]
            several = evaluation is not None and not evaluation["confusion"]
            minimised = f"{config.name} minimises {objective_in_words(config.method, several)}"
            for text in filter(None, [*words(), minimised, config.target_in_words()]):
                bar.print(text)
                said.add(text)
        for note in notes(record["seed"]) if not record["round"] else ():
            if note not in said:
                bar.print(f"note on {config.name}, seed {record['seed']}: {note}", style="yellow")
                said.add(note)
        listen_to(record)

    return listen


@contextmanager
def stoppable(bar: AnyBar) -> Iterator[AnyBar]:
    """Show a bar; at Ctrl-C say that the same command goes on, and exit."""
    with bar:
        try:
            yield bar
        except KeyboardInterrupt:
            bar.stop()
            bar.print("stopped; run the same command again to continue")
            raise typer.Exit(130) from None


class SweepProgressBar(Bar):
    """A bar over the rounds of all runs of a sweep, and a line for each run that ends (see `SweepProgress`)."""

    console: Console

    def __init__(self, console: Console) -> None:
        super().__init__(console, "rounds ", period=600.0)  # methods differ in cost

    def moved(self, folders: Sequence[Path]) -> None:
        """Say where runs are now that are trained anew."""
        self.print(f"{counted(len(folders), 'run')} moved to {folders[0].parent}, to be trained anew")

    def refused(self, label: str, reason: str) -> None:
        """Say why a cell is not run."""
        self.print(f"refused, while the others run: {label}: {reason}")

    def begin(self, jobs: Sequence[Job], finished: int) -> None:
        """Show how long the jobs take, and the bar."""
        print_estimate(self.console, Job.configs(jobs), only=False)
        self._left = {job.name: job.config.most_rounds for job in jobs}
        self._ended, self._all = finished, finished + len(jobs)
        self.open(sum(self._left.values()))
        self.show(description=self._runs())
        if finished:
            self.print(f"{self._runs()} {'is' if self._all == 1 else 'are'} finished already")

    def round(self, job: Job, round: int, accuracy: float | None) -> None:
        """Count a round."""
        if round:
            self._left[job.name] -= 1
            self.advance(lambda: f"{self._runs()}, {self.done:,} of {counted(self.total, 'round')}")

    def ended(self, job: Job, failure: str | None, accuracy: float | None) -> None:
        """Say how a run ended; not all of its rounds are over where it stopped early or failed."""
        self._ended += 1
        self.show(self.done + self._left.pop(job.name), description=self._runs())
        result = "done" if accuracy is None else f"accuracy {100 * accuracy:.1f} %"
        self.print(f"{self._runs()}  {job.name}: {result if failure is None else 'failed'}")

    def _runs(self) -> str:
        return f"{self._ended:,} of {counted(self._all, 'run')}"


class ArenaProgressBar(Bar):
    """A bar over the runs of an arena (see `ArenaProgress`)."""

    def __init__(self, console: rich.console.Console, every: float = 30.0) -> None:
        super().__init__(console, "runs ", every=every)

    def begin(self, finished: int, runs: int) -> None:
        """Show the bar."""
        self.open(runs, finished)
        if finished:
            self.print(f"{finished:,} of {counted(runs, 'run')} are there already")

    def ended(self, results: Sequence[tuple[ArenaJob, Trained]], runs: int) -> None:
        """Count runs that ended together, and say which failed."""
        self.total -= min(runs, 0)  # what ended has made more of them necessary
        self.show(description=results[-1][0].name[:60], total=self.total)
        self.advance(lambda: f"{self.done:,} of {counted(self.total, 'run')}", steps=max(runs, 0))
        for job, trained in results:
            if trained.failed:
                self.print(f"failed: {job.name}: {trained.failed}")
