"""Finished or half-finished runs, as a report reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fedskew.engine import RoundRecord


LAST = 10
"""How many rounds at the end `last10` of a summary is a mean of."""

MOMENTS: Mapping[str, str] = {"final": "final", "last 10": "last10", "best on validation": "best_by_validation"}
"""The entry of a summary that a value of `evaluation.summary` names."""

WORSE = 0.01
"""How much accuracy a finish may cost before that is said."""


@dataclass(frozen=True)
class SeedRun:
    """One seed of one config, read back from its folder or straight from memory.

    Attributes:
        label: What it is called in a report; the seeds of one config share it.
        seed: The seed.
        config: The whole config, defaults included.
        rounds: The records, in order of their rounds.
        counts: Label counts of the clients that train, shape `(clients, classes)`.
        client_names: Names of these clients.
        class_names: Names of the classes.
        target: Label mix of the target, shape `(classes,)`, sum 1; None without a target.
        summary: The content of `summary.json`; empty for a run that has not ended.
        notes: What its labels said about it before it was trained, a sentence each.
    """

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


def with_finished(runs: Iterable[SeedRun]) -> list[SeedRun]:
    """Return the runs, and after each whose method has a finish the finished model as a run of its own.

    The two are labelled `as_trained` and `after_finish`, and both are judged by one evaluation, of the last round's
    model: beside a mean over rounds the finish would seem to do what the last rounds did. Bytes and seconds of the
    second include the finish's.

    Args:
        runs: The runs.
    """
    found = []
    for run in runs:
        said = run.summary.get("finished") or {}
        if said.get("evaluation") is None and "failed" not in said:
            found.append(run)
            continue
        run = as_summarised(run, "final")
        found.append(replace(run, label=as_trained(run.label)))
        if "failed" not in said:
            found.append(_finished(run, said["evaluation"]))
    return found


def finish_in_words(run: SeedRun) -> str | None:
    """Say why a run's trained model could not be finished, or that finishing made it worse; None otherwise.

    Args:
        run: The run.
    """
    said = run.summary.get("finished") or {}
    if "failed" in said:
        return f"{said['name']} was not done: {said['failed']}. All figures are of the model as it was trained."
    trained, after = run.summary.get("final") or {}, said.get("evaluation") or {}
    key = "accuracy" if after.get("target_accuracy") is None else "target_accuracy"
    if key not in trained or key not in after or after[key] >= trained[key] - WORSE:
        return None
    what = key.replace("_", " ")
    return (
        f"{said['name']} made the model worse: {what} {after[key]:.4f}, and {trained[key]:.4f} before. "
        "Use the model as it was trained (model.safetensors)."
    )


def as_trained(label: str) -> str:
    """Name the model of a run whose method has a finish as it was before that.

    Args:
        label: The run's label.
    """
    return f"{label}, as trained"


def after_finish(label: str, finish: str) -> str:
    """Name the model that a finish made.

    Args:
        label: The run's label.
        finish: Name of the finish.
    """
    return f"{label}, after {finish}"


def _finished(run: SeedRun, values: dict[str, Any]) -> SeedRun:
    from fedskew.engine import Evaluation

    rounds = [replace(record, evaluation=None, validation=None) for record in run.rounds]
    evaluation = Evaluation.from_dict(values)
    figures = {name: getattr(evaluation, name) for name in run.summary["final"]}
    finish = run.summary["finished"]
    costs = {key: finish.get(key, 0) for key in ("bytes_up", "bytes_down", "seconds")}
    last = {key: getattr(rounds[-1], key) + cost for key, cost in costs.items()}
    rounds[-1] = replace(rounds[-1], evaluation=evaluation, **last)
    return replace(
        run,
        label=after_finish(run.label, finish["name"]),
        rounds=rounds,
        summary=run.summary
        | {key: run.summary[key] + cost for key, cost in costs.items()}
        | {
            "final": figures,
            "last10": {**figures, "evaluations": 1},
            "last_tenth": None,
            "best_by_validation": None,
            "max": figures,
        },
    )


def as_summarised(run: SeedRun, summary: str) -> SeedRun:
    """Return a run whose headline figures are others.

    Args:
        run: The run.
        summary: A value of `evaluation.summary`.
    """
    return replace(run, config=run.config | {"evaluation": {**run.config.get("evaluation", {}), "summary": summary}})


def headline(run: SeedRun) -> Mapping[str, Any]:
    """Return the figures that stand for a run, as its config's `evaluation.summary` says; empty where there are none.

    Args:
        run: The run.
    """
    return run.summary.get(MOMENTS[summary_of(run)]) or {}


def last_tenth(run: SeedRun) -> Mapping[str, Any]:
    """Return the means over the last tenth of the rounds; empty where these have a single evaluation, or none.

    Args:
        run: The run.
    """
    found = run.summary.get("last_tenth") or {}
    return found if found.get("evaluations", 0) > 1 else {}


def headline_in_words(runs: Iterable[SeedRun]) -> str:
    """Say in words what the headline figures of some runs are of, such as "the final model".

    Args:
        runs: The runs.
    """
    by_kind: dict[str, list[SeedRun]] = {}
    for run in runs:
        by_kind.setdefault(summary_of(run), []).append(run)
    said = {
        "final": "the final model",
        "last 10": averaged_over(by_kind.get("last 10", [])),
        "best on validation": "the model that is best on validation",
    }
    return " or ".join(said[kind] for kind in by_kind)


def summary_of(run: SeedRun) -> str:
    """Return what stands for a run: its config's `evaluation.summary`."""
    return str(run.config.get("evaluation", {}).get("summary", "final"))


def last_evaluated(rounds: Sequence[RoundRecord], last: int = LAST) -> list[RoundRecord]:
    """Return the evaluated records of the last rounds, never the untrained model's.

    Args:
        rounds: All records of a run.
        last: How many rounds these are.
    """
    return [record for record in rounds if record.evaluation is not None and record.round > _first(rounds, last)]


def averaged_over(runs: Iterable[SeedRun]) -> str:
    """Say in words which rounds `last10` of these runs' summaries averages, such as "mean of the last 10 rounds".

    Args:
        runs: The runs.
    """
    known = [run.rounds for run in runs if run.rounds]
    evaluations = [len(last_evaluated(rounds)) for rounds in known]
    spans = [rounds[-1].round - _first(rounds) for rounds in known]
    if not any(evaluations):
        return "no trained round"
    if evaluations == spans:
        return "last round" if max(spans) == 1 else f"mean of the last {_from_to(spans)} rounds"
    which = "round" if max(spans) == 1 else f"{_from_to(spans)} rounds"
    if max(evaluations) == 1:
        return f"one evaluation in the last {which}"
    return f"mean of {_from_to(evaluations)} evaluations in the last {which}"


def _first(rounds: Sequence[RoundRecord], last: int = LAST) -> int:
    """Return the round before the last ones."""
    return max(rounds[-1].round - last, 0) if rounds else 0


def _from_to(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class MeanWeights:
    """Clients' weights, mean over the rounds in which they took part.

    Attributes:
        clients: Ids of the clients that took part.
        given: What each of them was given, a share.
        fedavg: What FedAvg would have given it in the same rounds.
    """

    clients: NDArray[np.int64]
    given: NDArray[np.float64]
    fedavg: NDArray[np.float64]


def mean_weights(run: SeedRun) -> MeanWeights:
    """Return how much each client of a run counted, beside FedAvg's weights in the same rounds.

    Args:
        run: The run.
    """
    sizes = run.counts.sum(axis=1)
    given, fedavg, times = np.zeros((3, len(sizes)))
    for record in run.rounds:
        if not record.weights:  # the model stayed as it was
            continue
        answered = record.answered
        given[answered] += record.weights
        fedavg[answered] += label_shares(sizes[answered])
        times[answered] += 1
    clients = np.flatnonzero(times)
    return MeanWeights(clients, given[clients] / times[clients], fedavg[clients] / times[clients])


def rounds_to(run: SeedRun, accuracy: float) -> float | None:
    """Return the first evaluated round with this test accuracy; None if no round reached it.

    Args:
        run: The run.
        accuracy: The accuracy, a share.
    """
    reached = (
        float(record.round)
        for record in run.rounds
        if record.evaluation is not None and record.evaluation.accuracy >= accuracy
    )
    return next(reached, None)


def label_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return label counts over their sum along the last axis; 0 where there is no sample.

    Args:
        counts: Label counts, `(..., classes)`.
    """
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1)
    return shares


def effective_mix(run: SeedRun) -> NDArray[np.float64] | None:
    """Return the label mix that trained the model, shape `(classes,)`.

    It is the label mixes of the clients that replied, times their weights, mean over the rounds that had any; None
    where no round had.

    Args:
        run: The run.
    """
    mixes = label_shares(run.counts)
    rounds = [np.asarray(record.weights) @ mixes[record.answered] for record in run.rounds if record.weights]
    return np.mean(rounds, axis=0) if rounds else None


def machine_notes(runs: Iterable[SeedRun]) -> list[str]:
    """Return one line for each combination of machine, versions and revision, with its seconds of training.

    Args:
        runs: The runs.
    """
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
