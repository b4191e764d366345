"""Finished or half-finished runs, as a report reads them, and the seeds of a label, which a page compares."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError
from fedskew.tables import grouped

if TYPE_CHECKING:
    from fedskew.engine import Evaluation, RoundRecord
    from fedskew.metrics import SiteRow


_NOT_TESTED = ("root", "validation", "held_out", "client_test")  # keys of `[data]` that don't change the test set
_WORSE = 0.01  # of accuracy: a finish that costs more is pointed out


@dataclass(frozen=True)
class SeedRun:
    """One seed of one config, read back from its folder or straight from memory.

    Attributes:
        label: What it is called in a report; the seeds of one config share it.
        config: The whole config, defaults included.
        counts: Label counts of the clients that train, shape `(clients, classes)`.
        target: Label mix of the target, shape `(classes,)`, sum 1; None without a target.
        summary: The content of `summary.json`; empty for a run that has not ended.
        notes: What its labels said about it before it was trained, a sentence each.
        sites: Figures of the trained models at each client, on its own test samples; empty where there are none.
    """

    LAST: ClassVar[int] = 10
    """How many rounds at the end `last10` of a summary is a mean of."""

    MOMENTS: ClassVar[Mapping[str, str]] = {
        "final": "final",
        "last 10": "last10",
        "best on validation": "best_by_validation",
    }
    """The entry of a summary that a value of `evaluation.summary` names."""

    FIGURES: ClassVar[Mapping[str, str]] = {
        "accuracy": "accuracy",
        "worst_class": "worst class",
        "target_accuracy": "target mix",
        "balanced_accuracy": "balanced accuracy",
        "auroc": "AUROC",
        "pr_auc": "PR-AUC",
        "macro_f1": "macro F1",
        "ece": "calibration error",
    }
    """The figures of an evaluation that are shares, and what they are called."""

    label: str
    seed: int
    config: dict[str, Any]
    rounds: list[RoundRecord]
    counts: NDArray[Any]
    client_names: tuple[str, ...]
    class_names: tuple[str, ...]
    target: NDArray[np.float64] | None
    summary: dict[str, Any]
    notes: tuple[str, ...] = ()
    sites: tuple[SiteRow, ...] = ()
    sizes: NDArray[Any] | None = None

    @property
    def samples(self) -> NDArray[Any]:
        """Training samples of each client, `(clients,)`: what its label counts sum to, where a sample has one class."""
        return self.counts.sum(axis=1) if self.sizes is None else self.sizes

    @property
    def summarised_by(self) -> str:
        """What stands for the run: its config's `evaluation.summary`."""
        return str(self.config.get("evaluation", {}).get("summary", "final"))

    @property
    def measure(self) -> str:
        """The figure that it is ranked by: what its config's `evaluation.measure` means on its test set."""
        wanted, last = str(self.config.get("evaluation", {}).get("measure", "auto")), self.last_evaluation
        return last.measure(wanted) if last is not None else "accuracy" if wanted == "auto" else wanted

    def summarised(self, by: str, **more: str) -> SeedRun:
        """Return the run with another value of `evaluation.summary`, or of more keys beside it."""
        evaluation = {**self.config.get("evaluation", {}), "summary": by, **more}
        return replace(self, config=self.config | {"evaluation": evaluation})

    @property
    def headline(self) -> Mapping[str, Any]:
        """The figures that stand for the run, as `evaluation.summary` says; empty where there are none."""
        return self.summary.get(SeedRun.MOMENTS[self.summarised_by]) or {}

    @property
    def last_tenth(self) -> Mapping[str, Any]:
        """The means over the last tenth of the rounds; empty where these have a single evaluation, or none."""
        means = self.summary.get("last_tenth") or {}
        return means if means.get("evaluations", 0) > 1 else {}

    @property
    def last_round(self) -> int:
        """The number of the last round."""
        return self.rounds[-1].round if self.rounds else 0

    @property
    def diverged(self) -> int:
        """How many clients were left out of a round as they diverged, over all rounds."""
        return sum(len(record.diverged) for record in self.rounds)

    @property
    def last_evaluation(self) -> Evaluation | None:
        """The last evaluation; None where there is none."""
        return next((record.evaluation for record in reversed(self.rounds) if record.evaluation is not None), None)

    def series(self, value: str, scale: float = 1.0) -> dict[int, float]:
        """Return an entry of its records by round, such as "drift", times `scale`, if finite; of clients their mean."""
        known = ((record.round, _entry(record, *value.split("."))) for record in self.rounds)
        return {round: scale * x for round, x in known if math.isfinite(x)}

    def rounds_to(self, accuracy: float) -> float | None:
        """Return the first evaluated round with this test accuracy, a share; None if no round reached it."""
        evaluated = ((one.round, one.evaluation) for one in self.rounds if one.evaluation is not None)
        return next((float(round) for round, evaluation in evaluated if evaluation.accuracy >= accuracy), None)

    def mean_weights(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Return who took part, their weights as shares, mean over their rounds, and FedAvg's in the same rounds."""
        sizes = self.samples
        weights, fedavg, times = np.zeros((3, len(sizes)))
        for record in self.rounds:
            if not record.weights:  # the model stayed as it was
                continue
            weights[record.answered] += record.weights
            fedavg[record.answered] += label_shares(sizes[record.answered])
            times[record.answered] += 1
        clients = np.flatnonzero(times)
        return clients, weights[clients] / times[clients], fedavg[clients] / times[clients]

    def effective_mix(self) -> NDArray[np.float64] | None:
        """Return the label mix that trained the model: weighted clients', mean over the rounds in which any replied."""
        mixes = label_shares(self.counts)
        rounds = [np.asarray(record.weights) @ mixes[record.answered] for record in self.rounds if record.weights]
        return np.mean(rounds, axis=0) if rounds else None

    @property
    def finish_note(self) -> str | None:
        """Why the trained model could not be finished, or that finishing made it worse; None otherwise."""
        finish = self.summary.get("finished") or {}
        if "failed" in finish:
            return f"{finish['name']} was not done: {finish['failed']}. All figures are of the model as it was trained."
        trained, after = self.summary.get("final") or {}, finish.get("evaluation") or {}
        key = "accuracy" if after.get("target_accuracy") is None else "target_accuracy"
        if key not in trained or key not in after or after[key] >= trained[key] - _WORSE:
            return None
        what = key.replace("_", " ")
        return (
            f"{finish['name']} made the model worse: {what} {after[key]:.4f}, and {trained[key]:.4f} before. "
            "Use the model as it was trained (model.safetensors)."
        )

    @staticmethod
    def most_frequent(runs: Iterable[SeedRun]) -> str | None:
        """Say what the most frequent class gets, in the first of these runs with uneven test classes; None: in none."""
        for run in runs:
            if (evaluation := run.last_evaluation) is None or not evaluation.uneven:
                continue
            counts = np.sum(evaluation.confusion, axis=1)
            return (
                f"Always \u2018{run.class_names[counts.argmax()]}\u2019, the most frequent class of the test set, gets "
                f"an accuracy of {100 * evaluation.majority:.1f} % and a balanced accuracy (the mean over classes) of "
                f"{100 / np.count_nonzero(counts):.1f} %."
            )
        return None

    @staticmethod
    def shown_figures(runs: Iterable[SeedRun]) -> list[str]:
        """Return which figures a table of runs shows, the first of which ranks; rare classes' where they are uneven."""
        known = list(runs)
        ranked, usual = SeedRun.measure_of(known), ["accuracy", "worst_class", "target_accuracy"]
        if ranked in usual and SeedRun.most_frequent(known) is None:
            return usual
        return list(dict.fromkeys([ranked, *SeedRun.FIGURES]))

    @staticmethod
    def measure_of(runs: Iterable[SeedRun]) -> str:
        """Return the figure that ranks some runs: their measure, where they have several the most particular."""
        found = [run.measure for run in runs if run.last_evaluation is not None] or ["accuracy"]
        return next((name for name in ("target_accuracy", "balanced_accuracy") if name in found), found[0])

    @staticmethod
    def threshold_notes(runs: Iterable[SeedRun]) -> list[str]:
        """Return what deciding between two classes by the threshold that validation chose makes of each run's model."""
        return [
            f"{run.label}, seed {run.seed}: \u2018{cut['class']}\u2019 from a probability of {cut['probability']:.3g} "
            f"on, as validation samples chose, gets a balanced accuracy of {100 * cut['balanced_accuracy']:.1f} %, an "
            f"accuracy of {100 * cut['accuracy']:.1f} % and a macro F1 of {100 * cut['macro_f1']:.1f} %. fedskew "
            "predict decides so; all other figures take the likelier class."
            for run in runs
            if (cut := run.summary.get("threshold")) is not None
        ]

    @staticmethod
    def label_notes(runs: Iterable[SeedRun]) -> list[str]:
        """Return the notes of runs, each once, with the labels and seeds that it is about where these are not all; of
        several sentences whose first is that of another seed's note, one note stands for both."""
        about: dict[str, dict[str, tuple[list[int], list[int]]]] = {}  # seeds whose note it is, and those it stands for
        everywhere: dict[str, tuple[list[int], list[int]]] = {}
        shown: dict[tuple[str, str, int], str] = {}
        for run in runs:
            everywhere.setdefault(run.label, ([], []))[0].append(run.seed)
            begun = Counter[str]()
            for note in filter(None, (*run.notes, run.finish_note)):
                first, _, more = note.partition(". ")
                begun[first] += 1
                stands = shown.setdefault((run.label, first if more else note, begun[first]), note)
                about.setdefault(stands, {}).setdefault(run.label, ([], []))[stands != note].append(run.seed)
        notes = []
        for note, labels in about.items():
            where = [
                label if of == everywhere[label] else f"{label} ({_of_seeds(*of)})" for label, of in labels.items()
            ]
            notes.append(note if labels == everywhere else f"{'; '.join(where)}: {note}")
        return notes

    @staticmethod
    def as_trained(label: str) -> str:
        """Name the model of a run whose method has a finish as it was before that."""
        return f"{label}, as trained"

    @staticmethod
    def after_finish(label: str, finish: str) -> str:
        """Name the model that a finish made."""
        return f"{label}, after {finish}"

    @staticmethod
    def last_evaluated(rounds: Sequence[RoundRecord], last: int = LAST) -> list[Evaluation]:
        """Return the evaluations of the last so many rounds, never the untrained model's."""
        trained = [record.evaluation for record in rounds if record.round > _first(rounds, last)]
        return [evaluation for evaluation in trained if evaluation is not None]

    @staticmethod
    def by_label(runs: Iterable[SeedRun]) -> dict[str, list[SeedRun]]:
        """Return the runs of each label; ArgumentError where one has a seed twice."""
        found = grouped(runs, lambda run: run.label)
        for label, own in found.items():
            seeds = [run.seed for run in own]
            if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
                raise ArgumentError(
                    f"runs: {label!r} has seed {twice[0]} twice; give each configuration its own label (LABEL=RUN)"
                )
        return found

    @staticmethod
    def with_finished(runs: Iterable[SeedRun]) -> list[SeedRun]:
        """Return the runs, and after each whose method has a finish the finished model as a run of its own.

        The two are labelled `as_trained` and `after_finish`, and both are judged by one evaluation, of the last round's
        model: beside a mean over rounds the finish would seem to do what the last rounds did. Bytes and seconds of the
        second include the finish's.
        """
        shown = []
        for run in runs:
            finish = run.summary.get("finished") or {}
            if finish.get("evaluation") is None and "failed" not in finish:
                shown.append(run)
                continue
            run = run.summarised("final")
            shown.append(replace(run, label=SeedRun.as_trained(run.label)))
            if "failed" not in finish:
                shown.append(_finished(run, finish))
        return shown

    @staticmethod
    def headline_in_words(runs: Iterable[SeedRun]) -> str:
        """Say in words what the headline figures of some runs are of, such as "the final model"."""
        by_kind = grouped(runs, lambda run: run.summarised_by)
        words = {
            "final": "the final model",
            "last 10": averaged_over(by_kind.get("last 10", [])),
            "best on validation": "the model that is best on validation",
        }
        return " or ".join(words[kind] for kind in by_kind)

    @staticmethod
    def machine_notes(runs: Iterable[SeedRun]) -> list[str]:
        """Return one line for each combination of machine, versions and revision, with its seconds of training."""
        seconds: dict[str, float] = {}
        for run in runs:
            key = json.dumps([run.summary.get(key) for key in ("machine", "versions", "revision")])
            seconds[key] = seconds.get(key, 0.0) + run.summary["seconds"]
        lines = []
        for key in sorted(seconds):
            machine, versions, revision = json.loads(key)
            packages = ", ".join(f"{name} {number}" for name, number in versions.items())
            where = machine["processor"] if machine["device"] == "cpu" else machine["device"]
            threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''} a run"
            at = "" if revision is None else f", revision {revision[:10]}"
            lines.append(f"{where}, {threads}, {seconds[key]:,.0f} s of training; {packages}{at}.")
        return lines


def _entry(record: RoundRecord, name: str, *path: str) -> float:
    """Return a record's entry, or by a path an entry inside it; NaN where there is none."""
    whole: Any = getattr(record, name)
    values = whole if isinstance(whole, list) else [whole]
    for inner in path:
        known_parts = [part for part in values if part is not None]
        values = [part.get(inner) if isinstance(part, dict) else getattr(part, inner) for part in known_parts]
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else math.nan


def _finished(run: SeedRun, finish: dict[str, Any]) -> SeedRun:
    from fedskew.engine import Evaluation

    rounds = [replace(record, evaluation=None, validation=None) for record in run.rounds]
    evaluation = Evaluation.from_dict(finish["evaluation"])
    figures = {name: getattr(evaluation, name) for name in run.summary["final"]}
    costs = {key: finish.get(key, 0) for key in ("bytes_up", "bytes_down", "seconds")}
    last = {key: getattr(rounds[-1], key) + cost for key, cost in costs.items()}
    rounds[-1] = replace(rounds[-1], evaluation=evaluation, **last)
    moments = {"final": figures, "last10": {**figures, "evaluations": 1}, "max": figures}
    missing = {"last_tenth": None, "best_by_validation": None, "threshold": None}
    missing["intervals"] = finish.get("intervals", {})
    summary = run.summary | {key: run.summary[key] + cost for key, cost in costs.items()} | moments | missing
    return replace(run, label=SeedRun.after_finish(run.label, finish["name"]), rounds=rounds, summary=summary, sites=())


def averaged_over(runs: Iterable[SeedRun]) -> str:
    """Say in words which rounds `last10` of these runs' summaries averages, such as "mean of the last 10 rounds"."""
    begun = [run.rounds for run in runs if run.rounds]
    evaluations = [len(SeedRun.last_evaluated(rounds)) for rounds in begun]
    spans = [rounds[-1].round - _first(rounds) for rounds in begun]
    if not any(evaluations):
        return "no trained round"
    if evaluations == spans:
        return "last round" if max(spans) == 1 else f"mean of the last {_from_to(spans)} rounds"
    which = "round" if max(spans) == 1 else f"{_from_to(spans)} rounds"
    if max(evaluations) == 1:
        return f"one evaluation in the last {which}"
    return f"mean of {_from_to(evaluations)} evaluations in the last {which}"


def _first(rounds: Sequence[RoundRecord], last: int = SeedRun.LAST) -> int:
    """Return the round before the last ones."""
    return max(rounds[-1].round - last, 0) if rounds else 0


def _from_to(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def label_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return label counts, `(..., classes)`, over their sum along the last axis; 0 where there is no sample."""
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1)
    return shares


@dataclass(frozen=True)
class Group:
    """The runs of one label, by seed, and the number of the label's colour and dashes, the same on the whole page."""

    label: str
    style: int
    seeds: list[SeedRun]

    @property
    def first(self) -> SeedRun:
        """The lowest seed, which figures of single clients show: another seed may split the data otherwise."""
        return self.seeds[0]


def same_classes(group: Group) -> Hashable:
    """Return a key that is equal for runs with the same classes."""
    return group.first.class_names


def same_test(group: Group) -> Hashable:
    """Return a key that is equal for runs whose accuracies are of the same test set."""
    data = {key: value for key, value in group.first.config.get("data", {}).items() if key not in _NOT_TESTED}
    return json.dumps(data, sort_keys=True, default=str), group.first.class_names


def same_target(group: Group) -> Hashable:
    """Return a key that is equal for runs with the same target."""
    return tuple((run.seed, None if run.target is None else run.target.tobytes()) for run in group.seeds)


def same_data(group: Group) -> Hashable:
    """Return a key, equal for runs whose clients hold the same numbers of samples of each class, seed by seed."""
    return same_test(group), tuple((run.seed, run.counts.tobytes()) for run in group.seeds)


def same_split(one: Group, other: Group) -> bool:
    """Return whether two groups have one test, and clients with the same label counts in every seed that both have."""
    if same_test(one) != same_test(other):
        return False
    counts = {run.seed: run.counts for run in one.seeds}
    return all(np.array_equal(run.counts, counts[run.seed]) for run in other.seeds if run.seed in counts)


def same_cohorts(group: Group) -> Hashable:
    """Return a key that is equal for runs that selected the same clients in every round of every seed."""
    return tuple((run.seed, tuple(tuple(sorted(record.cohort)) for record in run.rounds)) for run in group.seeds)


def together(groups: list[Group]) -> str:
    """Return the labels of groups whose figures are one and the same."""
    return " = ".join(group.label for group in groups)


def listed(names: Iterable[Any], most: int = 8) -> str:
    """Return names as a sentence has them, the first ones where there are many."""
    found = [str(name) for name in names]
    if len(found) > most:
        return f"{', '.join(found[:most])} and {len(found) - most:,} more"
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def _of_seeds(own: list[int], others: list[int]) -> str:
    said = [f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" for seeds in (own, others) if seeds]
    return "; ".join(said) + " with other figures" * bool(others)
