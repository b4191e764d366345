"""The values that a table or figure reads from runs, and differences from FedAvg on the same task and seed."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedskew.data import take
from fedskew.engine import predict
from fedskew.errors import ConfigError, RunError, placed
from fedskew.experiment import Config, make_task, make_training_loop
from fedskew.files import load_tensors
from fedskew.labels import projection_distance
from fedskew.papers._recipe import Labels
from fedskew.report import SeedRun, paired_differences
from fedskew.report.drawing import FloatArray

BASELINE = "FedAvg"
DRAWN = "federation"
"""An axis of recipes whose labels are drawn alike: its runs are repetitions of one task."""

_SUMMARIES = {
    "last10": "mean of the last 10 rounds",
    "max": "maximum over the rounds, picked on the test set",
    "best_by_validation": "of the round that validation picks",
    "final": "of the last round",
    "last": "in the last round",
}
_NUMBERS = {
    "accuracy": "test accuracy",
    "target_accuracy": "accuracy on the target mix",
    "macro_f1": "macro F1 on the test set",
    "domain_accuracy": "test accuracy by domain",
    "entropy": "label entropy of the cohort in bits",
    "drift": "drift diversity of the updates",
    "ess_share": "share of effective samples",
}


def value_of(run: SeedRun, measure: str, reading: Mapping[str, str] | None = None) -> float | None:
    """Return one number of a run, in the unit that `unit_of` names; None where the run has none.

    A measure is a moment and a number of its summary, such as "last10.accuracy"; "last." and a key of the last round's
    record, such as "last.drift"; or "projection_distance", the squared distance from the target to the hull of the
    clients' label mixes. In a reading, "rounds" reads "max.accuracy" as if the run had ended there; "domain" says of
    which domain "final.domain_accuracy" is.
    """
    reading = reading or {}
    if measure == "projection_distance":
        return None if run.target is None else projection_distance(run.counts, run.target)
    moment, _, name = measure.partition(".")
    if moment == "last":
        found: Any = next((record for record in reversed(run.rounds) if record.round), None)
        value = None if found is None else getattr(found, name)
    elif measure == "max.accuracy" and "rounds" in reading:
        last = int(reading["rounds"])
        evaluated = [record for record in run.rounds if record.evaluation is not None and record.round <= last]
        reached = run.rounds[-1].round >= last
        value = max(record.evaluation.accuracy for record in evaluated if record.evaluation) if reached else None
    elif measure == "final.domain_accuracy":
        value = run.summary["final"]["domains"][reading["domain"].lower()]
    elif moment in _SUMMARIES:
        value = (run.summary[moment] or {}).get(name)
    else:
        raise ConfigError(
            f"measure: unknown {measure!r}; expected projection_distance, or one of {', '.join(_SUMMARIES)} with a "
            "number of the summary, such as last10.accuracy"
        )
    return None if value is None else float(value) * (100.0 if unit_of(measure) == "%" else 1.0)


def ceiling(run: SeedRun, measure: str) -> float | None:
    """Return the most that a measure on the target's label mix can be, in percent: the share of the target's classes
    that some client holds; None for other measures."""
    if run.target is None or not measure.endswith("target_accuracy"):
        return None
    return 100.0 * (1.0 - float(run.target[~run.counts.any(axis=0)].sum() / run.target.sum()))


def unit_of(measure: str) -> str:
    """Return the unit of a measure: "%", or "" for a number without one."""
    return "%" if measure.endswith(("accuracy", "worst_class")) else ""


def in_words(measure: str) -> str:
    """Return a measure in words."""
    if measure == "projection_distance":
        return "squared distance from the target to the hull of the clients' label mixes"
    moment, _, name = measure.partition(".")
    unit = " in %" if unit_of(measure) else ""
    return f"{_NUMBERS.get(name, name)}{unit}, {_SUMMARIES.get(moment, moment)}"


def domain_accuracies(config: Config, seed: int, folder: Path) -> dict[str, float]:
    """Return the test accuracy of a finished run's model on each domain, a share, by name, and their "average"; kept in
    the run folder's `domains.json`."""
    kept = folder / "domains.json"
    if kept.exists():
        known: dict[str, float] = json.loads(kept.read_text(encoding="utf-8"))
        return known
    task = make_task(config, seed)
    dataset = task.dataset
    if dataset.test_domains is None:
        raise ConfigError(f"data.name: data set {dataset.name!r} has no domains")
    model = make_training_loop(config, seed, task=task).model
    path = folder / "model.safetensors"
    with placed(f"{path}: the model can't be read: ", None, of=RunError):
        model.load_state_dict(load_tensors(path)[0])
    device = model.vector.device
    found = {}
    for number, name in enumerate(dataset.domain_names):
        rows = torch.from_numpy(np.flatnonzero(dataset.test_domains == number))
        inputs, targets = take(dataset.test_inputs, rows).to(device), dataset.test_targets[rows].to(device)
        confusion = predict(model.network, inputs, targets, dataset.num_classes).confusion
        found[name] = float(np.trace(confusion) / confusion.sum())
    found["average"] = statistics.fmean(found.values())
    kept.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


@dataclass(frozen=True)
class PairedDifference:
    """How much a method is ahead of FedAvg on the same seed; where a task has several federations, on each, as the mean
    over its seeds."""

    labels: Labels
    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the differences."""
        return statistics.fmean(self.differences)

    @property
    def ahead(self) -> int:
        """How many of them are above 0."""
        return sum(difference > 0 for difference in self.differences)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by Student's t; None for a single difference, or where all are equal."""
        values = np.array([self.differences])
        (found,) = paired_differences(values, np.zeros_like(values))
        return (found.low, found.high) if math.isfinite(found.low) else None


def paired(lines: Sequence[tuple[Labels, Mapping[int, float]]]) -> list[PairedDifference]:
    """Compare every method of a task with FedAvg, where both have values (in `lines`, by labels) of the same seeds."""

    def task(labels: Labels) -> tuple[tuple[str, str], ...]:
        return tuple((axis, label) for axis, label in labels.items() if axis != "method")

    basis = {task(labels): values for labels, values in lines if labels.get("method", "") == BASELINE}
    found = []
    for labels, values in lines:
        theirs = basis.get(task(labels), {})
        differences = [value - theirs[seed] for seed, value in values.items() if seed in theirs]
        if differences and labels.get("method", "") != BASELINE:
            found.append((labels, np.array(differences)))
    return [PairedDifference(labels, tuple(units.tolist())) for labels, units in repetitions(found)]


def repetitions(lines: Sequence[tuple[Labels, FloatArray]]) -> list[tuple[Labels, FloatArray]]:
    """Join lines, labels and what each seed gave, `(seeds, ...)`, that differ only in the federation drawn; return
    labels without the federation, and what each repetition gave: each seed, or the mean over seeds of each federation,
    as seeds do not repeat the draw."""
    tasks: dict[tuple[tuple[str, str], ...], list[FloatArray]] = {}
    for labels, values in lines:
        task = tuple((axis, label) for axis, label in labels.items() if axis != DRAWN)
        tasks.setdefault(task, []).append(values)
    return [
        (dict(task), drawn[0] if len(drawn) == 1 else np.stack([values.mean(axis=0) for values in drawn]))
        for task, drawn in tasks.items()
    ]
