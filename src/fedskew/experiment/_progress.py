"""Progress: rounds done, accuracy so far, time left; a bar on a terminal or in a notebook, lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedskew import torchrun
from fedskew.experiment._config import Config
from fedskew.tables import counted, duration

Listen = Callable[[dict[str, Any]], None]
"""Called with every record, in plain values, as soon as its round is over."""


class Bar:
    """A bar that disappears at the end; where output is no terminal, a line now and then, with the time left.

    Args:
        console: Where it is shown.
        unit: What stands after the numbers.
        period: Seconds by which the speed is told.
        every: Seconds between lines.
    """

    def __init__(self, console: Console, unit: str, period: float = 3600.0, every: float = 30.0) -> None:
        self.console = console
        self.total, self.done = 0, 0
        self._every = every
        self._printed, self._since, self._steps, self._seconds = console.get_time(), 0.0, 0, 0.0
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
            disable=not (console.is_terminal or console.is_jupyter),
            speed_estimate_period=period,
        )

    def open(self, total: int, done: int = 0, **fields: Any) -> None:
        """Show the bar."""
        self.total, self.done = total, done
        self._task = self._bar.add_task("", total=total, completed=done, **fields)
        self._bar.start()

    def show(self, done: int | None = None, **fields: Any) -> None:
        """Change how far it is, or what it says."""
        self.done = self.done if done is None else done
        self._bar.update(self._task, completed=self.done, **fields)

    def advance(self, words: Callable[[], str], steps: int = 1, seconds: float = 0.0) -> None:
        """Count steps that ended together, and print a line where that is due.

        Args:
            words: What the line says of what is done.
            steps: How many steps.
            seconds: Seconds that they took: the records of a resumed run come all at once, but took longer.
        """
        if not steps:
            return
        self.show(self.done + steps)
        now, left = self.console.get_time(), self.total - self.done
        if not self._warm:  # before the end of the first step lies what no other waits for
            self._warm, self._since, said = True, now, "..."
        else:
            self._steps, self._seconds = self._steps + steps, self._seconds + seconds
            said = f"about {duration(max(now - self._since, self._seconds) / self._steps * left)}"
        if not self._bar.disable or not left or now - self._printed < self._every:
            return
        self.print(f"{words()}, {said} left")
        self._printed = self._since = now
        self._steps, self._seconds = 0, 0.0

    def print(self, text: str, style: str | None = None) -> None:
        """Print a line above the bar."""
        self.console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)

    def stop(self) -> None:
        """Take the bar off the screen."""
        self._bar.stop()

    def __enter__(self) -> Self:
        return self  # `open` starts it, below what is said first

    def __exit__(self, *error: object) -> None:
        self.stop()


class RunBar(Bar):
    """A bar over the rounds of several configs, run one after another.

    Args:
        console: Where it is shown.
        configs: The configs.
        every: Seconds between lines where that is no terminal.
    """

    def __init__(self, console: Console, configs: Sequence[Config], every: float = 30.0) -> None:
        super().__init__(console, "{task.fields[latest]}", every=every)
        self._ends = 0
        self.said = ""
        self.open(sum(config.most_rounds for config in configs), latest="")

    def start(self, config: Config) -> Callable[[Mapping[str, Any]], None]:
        """Begin a config, and return what to call with each of its records."""
        self.show(self._ends, description=config.name)  # an earlier one may have stopped early
        self._ends += config.most_rounds
        latest = ""

        def words() -> str:
            return f"{config.name}: {self.done:,} of {counted(self.total, 'round')}  {latest}".rstrip()

        def listen(record: Mapping[str, Any]) -> None:
            nonlocal latest
            if evaluation := record["evaluation"]:
                of = "" if config.evaluation.summary == "final" else " of this round"
                latest = f"seed {record['seed']}  accuracy{of} {evaluation['accuracy']:.3f}"
                self.show(latest=latest)
            self.advance(words, 1 if record["round"] else 0, record["seconds"])
            self.said = words()

        return listen


@contextmanager
def watched(config: Config, progress: Listen | bool | None) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """Give what is to be called with each record: the caller's own function, a bar's, or nothing (see `simulate`)."""
    console = Console(stderr=True)
    seen = console.is_terminal or console.is_jupyter
    if callable(progress) or torchrun.rank() > 0 or progress is False or not (seen or progress):
        yield progress if callable(progress) else None
        return
    with RunBar(console, [config]) as bar:
        yield bar.start(config)
    if progress:
        bar.print(bar.said)
