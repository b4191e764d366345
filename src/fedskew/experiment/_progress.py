"""Who is told of a run's rounds: a bar on a terminal or in a notebook, lines elsewhere, and trackers.

The packages TensorBoard, MLflow and Weights & Biases are imported only when their tracker is made. Unless the user
points them elsewhere with the package's own environment variables, all three write below one folder and reach no
network:

- TensorBoard: `FOLDER/tensorboard` (`tensorboard --logdir FOLDER`);
- MLflow: `FOLDER/mlflow.db` (`mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db`), or the server that
  `MLFLOW_TRACKING_URI` names;
- Weights & Biases: `FOLDER/wandb`, for `wandb sync` later, or at once with `WANDB_MODE=online`.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedskew import torchrun
from fedskew.engine import Evaluation, RoundRecord
from fedskew.errors import optional
from fedskew.experiment._config import Config
from fedskew.experiment._summary import numbers
from fedskew.files import write_text
from fedskew.report import SeedRun
from fedskew.tables import counted, duration, flatten

Listen = Callable[[dict[str, Any]], None]
"""Called with every record, in plain values, as soon as its round is over."""

_KEPT = 0.9
"""How much of what steps took counts for the pace still, once another line is printed."""


class Bar:
    """A bar that disappears at the end, or a line every so many seconds; `unit` stands after the numbers."""

    def __init__(self, console: Console, unit: str, period: float = 3600.0, every: float = 30.0) -> None:
        self.console = console
        self.total, self.done = 0, 0
        self._every = every
        self._printed, self._since, self._steps, self._seconds = console.get_time(), 0.0, 0.0, 0.0
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
        """Count steps that ended together, in so many seconds, and print a line where that is due."""
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
        self._printed, self._since = now, now - _KEPT * (now - self._since)
        self._steps, self._seconds = _KEPT * self._steps, _KEPT * self._seconds

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
    """A bar over the rounds of several configs, run one after another."""

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
                found = Evaluation.from_dict(evaluation)
                measure = found.measure(config.evaluation.measure)
                value = getattr(found, measure)
                shown = "undefined" if value is None else f"{value:.3f}"
                latest = f"seed {record['seed']}  {SeedRun.FIGURES[measure]}{of} {shown}"
                self.show(latest=latest)
            self.advance(words, 1 if record["round"] else 0, record["seconds"])
            self.said = words()

        return listen


@contextmanager
def watched(config: Config, progress: Listen | bool | None) -> Iterator[Listen | None]:
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


class Tracker(Protocol):
    """A service that a run reports to. `start` is called once, before any round, also when a run is resumed."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the run and store its config, which is resolved and has one seed."""

    def log(self, record: RoundRecord) -> None:
        """Store the numbers of one round that are finite, at step `record.round`, named as in `Result.to_frame`."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Store the final figures and close the run."""


class TensorBoard:
    """Writes event files with the writer that ships with torch; config and summary are texts."""

    def __init__(self, folder: Path) -> None:
        self._module = _import("tensorboard", "torch.utils.tensorboard")
        self._folder = folder / "tensorboard"

    def start(self, config: Mapping[str, Any]) -> None:
        """Open an event file and store the config."""
        self._writer = self._module.SummaryWriter(str(self._folder))
        self._writer.add_text("config", _block(config))

    def log(self, record: RoundRecord) -> None:
        """Store the numbers of one round and flush, so that an open board shows them."""
        for name, value in _finite(numbers(record)).items():
            self._writer.add_scalar(name, value, record.round)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Store the summary and close the event file."""
        self._writer.add_text("summary", _block(summary))
        self._writer.close()


class MLflow:
    """Writes one MLflow run, in the experiment `fedskew` or the one that `MLFLOW_EXPERIMENT_NAME` names."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run sends nothing unless the user asks for it
        self._folder = folder.resolve()
        self._uri = os.environ.get("MLFLOW_TRACKING_URI")
        if self._uri is None:
            _import("mlflow", "sqlalchemy")
            _import("mlflow", "alembic")
            self._uri = f"sqlite:///{self._folder / 'mlflow.db'}"
        # After these, as MLflow looks for them once, when it is imported.
        self._mlflow, self._entities = _import("mlflow", "mlflow"), _import("mlflow", "mlflow.entities")

    def start(self, config: Mapping[str, Any]) -> None:
        """Create the run, or go on with the one of this folder, and store the config as parameters."""
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        self._run = _run_id(self._folder / "mlflow-run-id", lambda: self._create_run(_run_name(config)))
        self._client.update_run(self._run, status="RUNNING")
        params = [self._entities.Param(key, str(value)) for key, value in flatten(config).items()]
        for first in range(0, len(params), 100):  # MLflow takes at most 100 parameters a call
            self._client.log_batch(self._run, params=params[first : first + 100])

    def log(self, record: RoundRecord) -> None:
        """Store the numbers of one round."""
        self._log(_finite(numbers(record)), record.round)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Store the summary's numbers as metrics and the rest as tags, both named `summary.*`, and end the run."""
        flat = flatten({"summary": summary})
        self._log(_finite(flat), 0)
        for name in flat.keys() - _finite(flat).keys():
            self._client.set_tag(self._run, name, str(flat[name]))
        self._client.set_terminated(self._run)

    def _create_run(self, run_name: str) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedskew")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        return str(self._client.create_run(experiment_id, run_name=run_name).info.run_id)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)


class WandB:
    """Writes one Weights & Biases run, offline unless `WANDB_MODE` says otherwise, in `WANDB_PROJECT` or `fedskew`."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # as for MLflow above
        self._folder = folder.resolve()
        self._wandb = _import("wandb", "wandb")

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the run under this folder's id and store the config."""
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedskew"),
            mode=os.environ.get("WANDB_MODE", "offline"),
            name=_run_name(config),
            id=_run_id(self._folder / "wandb-run-id", lambda: uuid.uuid4().hex),
            dir=str(self._folder),
            resume="allow",
            config=dict(config),
            settings=self._wandb.Settings(silent=True, console="off"),
        )

    def log(self, record: RoundRecord) -> None:
        """Store the numbers of one round."""
        self._run.log(_finite(numbers(record)), step=record.round)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Store the summary, named `summary.*`, and close the run."""
        self._run.summary.update(flatten({"summary": summary}))
        self._run.finish()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
"""The trackers by the name that a config gives them; each writes below a folder."""


def _import(tracker: str, module: str) -> Any:
    return optional(module, f"tracker {tracker!r} needs a package that is missing: pip install 'fedskew[tracking]'")


def _run_id(path: Path, create: Callable[[], str]) -> str:
    """Return the run id stored in a file, so that a resumed run continues the same run at the tracker."""
    if not path.exists():
        write_text(path, create())
    return path.read_text(encoding="utf-8")


def _run_name(config: Mapping[str, Any]) -> str:
    return f"{config['name']} seed {config['seeds'][0]}"


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(one) for name, one in values.items() if isinstance(one, int | float) and math.isfinite(one)}


def _block(values: Mapping[str, Any]) -> str:
    """Values as a Markdown block of JSON."""
    return "```json\n" + json.dumps(values, indent=2, default=str) + "\n```"
