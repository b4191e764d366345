"""Progress bars: rounds done, accuracy so far, time left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from fedskew.experiment import Config, Job


class _Bar:
    """A progress bar that is shown on a terminal only, and disappears at the end."""

    def __init__(self, console: Console, unit: str, speed_estimate_period: float) -> None:
        self._console = console
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
    """

    def __init__(self, console: Console, configs: Sequence[Config]) -> None:
        super().__init__(console, "{task.fields[latest]}", speed_estimate_period=3600.0)  # rounds may take minutes
        self._task = self._bar.add_task("", total=sum(map(rounds_of, configs)), latest="")
        self._done = 0.0

    def start(self, config: Config) -> Callable[[Mapping[str, Any]], None]:
        """Begin a config, and return what to call with each of its records; the first prints the whole objective."""
        from fedskew.methods import objective_in_words

        self._bar.update(self._task, completed=self._done, description=config.name)
        self._done += rounds_of(config)
        texts = [f"{config.name} minimises {objective_in_words(config.method)}"]

        def listen(record: Mapping[str, Any]) -> None:
            if texts:  # everything that is checked before a run has been
                self._console.print(texts.pop(), soft_wrap=True, markup=False, highlight=False)
            if evaluation := record["evaluation"]:
                self._bar.update(self._task, latest=f"seed {record['seed']}  accuracy {evaluation['accuracy']:.3f}")
            self._bar.update(self._task, advance=1 if record["round"] else 0)

        return listen


class SweepProgressBar(_Bar):
    """A progress bar over the rounds of all runs of a sweep, and a line for each run that ends.

    Args:
        console: Where it is shown.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console, "rounds ", speed_estimate_period=600.0)  # methods differ in cost

    def begin(self, jobs: Sequence[Job], finished: int) -> None:
        """See `SweepProgress`."""
        self._rounds_left = {job.name: rounds_of(job.config) for job in jobs}
        self._accuracy: dict[str, float] = {}
        self._ended, self._all = finished, finished + len(jobs)
        self._task = self._bar.add_task(self._runs(), total=sum(self._rounds_left.values()))
        if finished:
            self._print(f"{self._runs()} are finished already")

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
        left = self._rounds_left[job.name]  # not 0 where a run stops early or fails
        self._bar.advance(self._task, left)
        self._bar.update(self._task, description=self._runs())
        result = f"accuracy {100 * self._accuracy[job.name]:.1f} %" if job.name in self._accuracy else "done"
        self._print(f"{self._runs()}  {job.name}: {result if failure is None else 'failed'}")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _runs(self) -> str:
        return f"{self._ended} of {self._all} runs"


def rounds_of(config: Config) -> int:
    """Return how many rounds a config takes at most."""
    values = 1 if config.tune is None else len(config.tune.values)
    return config.training.rounds * len(config.seeds) * values
