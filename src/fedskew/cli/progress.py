"""Live progress of runs: rounds done, accuracy so far, time left."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedskew.engine import Round
from fedskew.experiment import Config
from fedskew.experiment import Progress as Listener


class Watch:
    """A progress bar over the rounds of several configs."""

    def __init__(self, console: Console, configs: Sequence[Config]) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            speed_estimate_period=3600.0,  # rounds may take minutes
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=sum(map(rounds_of, configs)), news="")
        self._done = 0.0

    def start(self, config: Config) -> Listener:
        """What `simulate` calls with each record of this config."""
        self._bar.update(self._task, completed=self._done, description=config.name)
        self._done += rounds_of(config)

        def listen(record: Round) -> None:
            if evaluation := record["evaluation"]:
                self._bar.update(self._task, news=f"seed {record['seed']}  accuracy {evaluation['accuracy']:.3f}")
            self._bar.update(self._task, advance=1 if record["round"] else 0)

        return listen

    def stop(self) -> None:
        """Take the bar off the screen."""
        self._bar.stop()

    def __enter__(self) -> Watch:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def rounds_of(config: Config) -> int:
    """How many rounds a config will play at the most."""
    tried = 1 if config.tune is None else len(config.tune.values)
    return config.training.rounds * len(config.seeds) * tried
