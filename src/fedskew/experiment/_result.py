"""What a simulation returns: its runs, model and summary, and how to look at them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from fedskew import report
from fedskew.engine import RoundRecord
from fedskew.errors import ArgumentError, nearest, optional
from fedskew.experiment._config import Config
from fedskew.experiment._summary import EVALUATED, numbers, over_seeds
from fedskew.report import SeedRun
from fedskew.tables import Spread, counted, filled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike
    from torch import Tensor

    from fedskew.experiment._adapt import Adaptation
    from fedskew.labels import MixMethod


@dataclass(frozen=True, repr=False)
class Result:
    """The result of `simulate`. A notebook shows its headline figures.

    Attributes:
        model: The final model of the first seed.
        summary: The summary of the run; of several seeds, mean and standard deviation of every figure.
        folder: The run folder; None where nothing was written.
        finished: The first seed's model after the method's finish; None where it has none.
    """

    config: Config
    runs: tuple[SeedRun, ...]
    model: nn.Module
    summary: dict[str, Any]
    folder: Path | None
    finished: nn.Module | None = None

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The records of all seeds as plain dicts, like the lines of `rounds.jsonl` (see `engine.RoundRecord`)."""
        return [record.to_dict() for run in self.runs for record in run.rounds]

    def headline(self, of: str | None = None) -> dict[str, Spread]:
        """Return the figures that a reader looks for first, as shares over the seeds.

        They are accuracy, worst class and, with a target, accuracy on its mix; where classes are uneven, or
        `evaluation.measure` says so, more, the one that ranks first.

        Args:
            of: "final": of the last round's model alone; "finished": of the finished model, empty where there is none;
                None: of what `evaluation.summary` names.
        """
        kind = of or SeedRun.MOMENTS[self.config.evaluation.summary]
        found = over_seeds([run.summary for run in self.runs]).get(kind) or {}
        shown = {name: SeedRun.FIGURES[name] for name in SeedRun.shown_figures(self.runs)}
        return {
            heading: Spread(**found[name])
            for name, heading in shown.items()
            if name in found and found[name]["mean"] is not None
        }

    def intervals(self, of: str | None = None) -> dict[str, tuple[float, float]]:
        """Return the intervals of 95 % over test samples of `headline`'s figures that have one; mean over the seeds."""
        kind = of or SeedRun.MOMENTS[self.config.evaluation.summary]
        wholes = [run.summary if kind == "final" else run.summary.get(kind) or {} for run in self.runs]
        found = [whole.get("intervals", {}) for whole in wholes]
        return {
            heading: (float(np.mean([one[name][0] for one in found])), float(np.mean([one[name][1] for one in found])))
            for name, heading in SeedRun.FIGURES.items()
            if all(name in one for one in found)
        }

    def to_frame(self) -> pd.DataFrame:
        """Return the numbers of all rounds as a tidy data frame: a row for each seed and round.

        Columns are `run` (the config's name), `seed`, `round`, every number of the record, the figures on the test set
        as `evaluation.accuracy` and so on, and those on validation samples as `validation.accuracy` and so on. What a
        record has more than one number of (cohort, weights) stands in `rounds`.

        It needs pandas.
        """
        rows = [
            {"run": self.config.name, "seed": run.seed, "round": record.round, **numbers(record)}
            for run in self.runs
            for record in run.rounds
        ]
        return _pandas("to_frame").DataFrame(rows)

    def per_class(self, round: int | None = None) -> pd.DataFrame:
        """Return how well each class is recognised as a tidy data frame: a row for each seed and class.

        Columns are `run`, `seed`, `round`, `class`, `accuracy` (share of the class's test samples that the model gets
        right; NaN where there are none), `test_samples`, `predicted` (test samples that the model takes for this
        class), `training_samples` and `clients` (how many clients hold the class). Where a sample may have several
        labels, `auroc` stands in place of numbers of test samples.

        `round` is an evaluated round (ArgumentError for another one), None the last one of each seed. It needs pandas.
        """
        pandas = _pandas("per_class")
        frames = []
        for run in self.runs:
            record = _evaluated(run, round)
            assert record.evaluation is not None
            confusion = np.asarray(record.evaluation.confusion)
            tested = {"auroc": np.array(record.evaluation.per_class_auroc, dtype=np.float64)}
            if confusion.size:
                tested = {"test_samples": confusion.sum(axis=1), "predicted": confusion.sum(axis=0)}
            columns = {
                "class": run.class_names,
                "accuracy": np.array(record.evaluation.per_class, dtype=np.float64),  # None becomes NaN
                **tested,
                "training_samples": run.counts.sum(axis=0),
                "clients": np.count_nonzero(run.counts, axis=0),
            }
            frames.append(
                pandas.DataFrame({"run": self.config.name, "seed": run.seed, "round": record.round, **columns})
            )
        return pandas.concat(frames, ignore_index=True)

    def sites(self) -> list[dict[str, Any]]:
        """Return the figures of the models at each client, on the client's own test samples.

        They are plain dicts, one for each seed, client and row. Keys are `seed`, `client`, `name` (the client's), `row`
        ("alone", "common", "personal" or "pooled"), `samples` and the figures (see `metrics.SiteRow`);
        `pandas.DataFrame(result.sites())` is a tidy data frame.

        Raises:
            ArgumentError: Clients have no test samples of their own.
        """
        rows = [
            {"seed": run.seed, **vars(one), "name": run.client_names[one.client]}
            for run in self.runs
            for one in run.sites
        ]
        if not rows:
            raise ArgumentError("sites: clients have no test samples of their own; set data.client_test = 0.3")
        return rows

    def adapt(
        self,
        target: ArrayLike | Tensor,
        held_out: tuple[ArrayLike | Tensor, ArrayLike] | None = None,
        method: MixMethod = "gls",
    ) -> Adaptation:
        """Move the first seed's model to the label mix of unlabelled samples (see `fedskew adapt`); nothing is written.

            found = result.adapt(unlabelled)
            found.estimate.mix                  # the target's label mix
            found.model.predict(unlabelled)     # probabilities there

        Args:
            target: Unlabelled samples of the target, in their own units (see `TrainedModel.predict`).
            held_out: Labelled samples that the model was not trained on, and their classes; None: the run's own.

        Raises:
            ArgumentError: The run has no folder, or the model can't take the samples.
            RunError: The run held no samples out.
        """
        from fedskew.experiment._adapt import Adaptation
        from fedskew.experiment._trained import load

        if self.folder is None:
            raise ArgumentError(
                "adapt: takes the model from the run's folder, and this run has none; simulate with out="
            )
        model = load(self.folder)
        labelled = model.held_out() if held_out is None else held_out
        return Adaptation.of(model, target, labelled, method, normalised=held_out is None)

    def plot(self, figure: str = "accuracy", ax: Axes | None = None) -> Axes:
        """Draw a number of each round: the mean over seeds, with a band of one standard deviation.

            axes = result.plot()
            other.plot(ax=axes)                 # a second result beside the first

        Args:
            figure: A figure on the test set (accuracy, balanced_accuracy, macro_f1, auroc, pr_auc, ece, worst_class,
                target_accuracy, loss) or another number of the record, as in `to_frame`.
            ax: matplotlib's axes to draw on; None: a new figure's.

        Raises:
            ArgumentError: No round has such a number.
        """
        from matplotlib import pyplot

        from fedskew.report import drawing

        series = [points for run in self.runs if (points := _series(run, figure))]
        if not series:
            known = {
                name.removeprefix("evaluation.")
                for run in self.runs
                for record in run.rounds
                for name in numbers(record)
            }
            raise ArgumentError(f"figure: no round has {figure!r}{nearest(figure, known)}")
        if ax is None:
            _, ax = pyplot.subplots(layout="constrained")
        share = figure in SeedRun.FIGURES
        scaled = [{at: 100 * value if share else value for at, value in points.items()} for points in series]
        style = len(ax.get_legend_handles_labels()[1])
        drawing.curves(ax, [drawing.Curve.over_seeds(style, scaled, label=self.config.name)], unit="%" if share else "")
        ax.set_title(f"{figure.replace('_', ' ')}{', %' if share else ''}")
        ax.legend()
        return ax

    def report(self, path: str | Path) -> Path:
        """Write the report page of these runs to an HTML file, and return its path."""
        return report.write_report(self.runs, Path(path), self.config.name)

    def __repr__(self) -> str:
        found = [f"{heading} {value.text(scale=100)} %" for heading, value in self.headline().items()]
        of = f"{SeedRun.headline_in_words(self.runs)}, " if found else ""
        basis = [f"{of}{counted(len(self.runs), 'seed')}"]
        after = [f"{heading} {value.text(scale=100)} %" for heading, value in self.headline("finished").items()]
        if after:
            basis.append(f"after {self.config.method['finish']['name']}: {', '.join(after)}")
        where = [] if self.folder is None else [str(self.folder)]
        return f"<Result of {self.config.name!r}: {'; '.join([*found, *basis, *where])}>"

    def _repr_html_(self) -> str:
        return filled(
            "fedskew.experiment",
            "result.html",
            {"counted": counted},
            result=self,
            run=self.runs[0],
            of=SeedRun.headline_in_words(self.runs),
            rounds=max(run.rounds[-1].round for run in self.runs),
            seconds=sum(run.summary["seconds"] for run in self.runs),
        )


def _series(run: SeedRun, figure: str) -> dict[int, float]:
    """Return a number by round; `loss` is the one on the test set, as in a summary."""
    key = f"evaluation.{figure}" if figure in EVALUATED else figure
    found = ((record.round, numbers(record).get(key, math.nan)) for record in run.rounds)
    return {round: float(value) for round, value in found if not math.isnan(value)}


def _evaluated(run: SeedRun, round: int | None) -> RoundRecord:
    known = [record for record in run.rounds if record.evaluation is not None]
    found = known[-1:] if round is None else [record for record in known if record.round == round]
    if not found:
        rounds = ", ".join(str(record.round) for record in known)
        raise ArgumentError(f"round: {'the last' if round is None else round} was not evaluated (evaluated: {rounds})")
    return found[0]


def _pandas(method: str) -> Any:
    return optional("pandas", f"Result.{method} needs pandas: pip install 'fedskew[frames]'")
