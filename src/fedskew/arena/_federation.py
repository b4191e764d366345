"""The training of federations, on any worker: configs in plain values come in, a row for each seed goes out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedskew import methods
from fedskew.arena._advice import figures as figures_of
from fedskew.errors import ArgumentError, BackendWarning, ConfigError, DataWarning, FedskewError, PartitionError
from fedskew.experiment import Config, Result, keep_data, resolve, simulate, simulate_together
from fedskew.report import SeedRun, with_finished

FIGURES = (
    *("score", "accuracy", "worst_class", "target_accuracy", "validation", "curve"),
    *("steps", "megabytes", "finish_megabytes", "finish_clients", "seconds", "diverged", "made", "failure"),
)
"""Columns of a run's results.

Accuracies are shares from 0 to 1, means over the last evaluations. `score` is the accuracy on the target mix, or
`accuracy` where there is none. `curve`: the score of each evaluation in hundredths of a percent. `steps`: local steps
in units of FedAvg's, so that a step with a further pass counts for more. `megabytes`: up and down, the finish's
included, which `finish_megabytes` and `finish_clients` tell apart; empty without a finish, whose one evaluation is of
the last round's model. `made`: version and revision of fedskew.
`failure`: why this config can't be trained; all other columns are empty then.
"""


@dataclass(frozen=True)
class Trained:
    """What became of one config.

    Attributes:
        rows: The results of each seed, as texts by the names in `FIGURES`.
        federation: The federation in words, and its figures; empty where it could not be trained.
        failed: Why it could not be trained this time: data are missing, or a run failed; empty if it was, or never can
            be. There are no rows then.
    """

    rows: dict[int, dict[str, str]]
    federation: dict[str, str]
    failed: str = ""


def train(trees: Sequence[Mapping[str, Any]], last: int) -> list[Trained]:
    """Train the seeds of some configs, and return their results; nothing is written.

    Several configs train as one cohort where they can; where one of them fails in training, each is trained alone.

    Args:
        trees: The configs in plain values; several have `engine.seeds_together`.
        last: Number of evaluations at the end whose mean is the result.

    Returns:
        The results, by config.
    """
    keep_data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendWarning)
        warnings.simplefilter("ignore", DataWarning)
        if len(trees) > 1:
            try:
                configs = [resolve(tree) for tree in trees]
                trained = simulate_together(configs)
            except Exception as error:
                logging.getLogger(__name__).debug("trained one after another, as one of them failed: %s", error)
            else:
                return [_outcome(config, result, last) for config, result in zip(configs, trained, strict=True)]
        return [_train_alone(tree, last) for tree in trees]


def _train_alone(tree: Mapping[str, Any], last: int) -> Trained:
    """Train the seeds of one config."""
    try:
        config = resolve(tree)
    except FedskewError as error:
        return Trained({}, {}, str(error))
    try:
        return _trained(simulate(config, progress=False), last)
    except FedskewError as error:
        return _outcome(config, error, last)
    except Exception as error:  # from a user's own component
        return Trained({}, {}, f"{type(error).__name__}: {' '.join(str(error).split())}")


def _outcome(config: Config, result: Result | FedskewError, last: int) -> Trained:
    """Return what became of a config that was trained, or whose training ended with an error."""
    if isinstance(result, Result):
        return _trained(result, last)
    if isinstance(result, (PartitionError, ConfigError, ArgumentError)):  # it would fail again
        nothing = dict.fromkeys(FIGURES, "")
        return Trained({seed: nothing | {"failure": f"refused: {result}"} for seed in config.seeds}, {})
    return Trained({}, {}, str(result))


def _trained(result: Result, last: int) -> Trained:
    """Return the rows and the figures of a federation that was trained."""
    config = result.config
    rows = {run.seed: _row(config, run, last) for run in result.runs}
    first = result.runs[0]
    training = config.training
    figures = figures_of(
        first.counts, first.target, training.participation, training.epochs if training.steps is None else None
    )
    return Trained(rows, {"federation": _in_words(config)} | {name: f"{value:.6g}" for name, value in figures.items()})


def _in_words(config: Config) -> str:
    """Return a federation in a few words."""
    rule = config.partition
    options = {**rule.parameters, "clients": rule.clients}
    said = ", ".join(f"{name} {value}" for name, value in options.items() if not isinstance(value, bool | None))
    share = f"{config.training.participation:.0%} a round, {config.training.epochs:g} epochs"
    aim = "" if config.target.mix is None else ", for a target mix"
    return f"{config.data.name}, {rule.rule} ({said}), {share}{aim}"


def _row(config: Config, trained: SeedRun, last: int) -> dict[str, str]:
    run = with_finished([trained])[-1]
    said = trained.summary.get("finished") or {}
    finish = said if said.get("evaluation") else {}  # one that failed made no other model
    evaluations = [one.evaluation for one in run.rounds if (one.round or finish) and one.evaluation is not None]
    validations = [record.validation for record in trained.rounds if record.round and record.validation is not None]
    end = evaluations[-last:]
    cost = methods.cost(methods.build(config.method, config.training.momentum))
    steps = sum(sum(record.steps) for record in run.rounds) * (3 + cost.forward + 2 * cost.backward) / 3
    summary = trained.summary
    made = [summary["versions"]["fedskew"], (summary["revision"] or "")[:7]]
    return {
        "score": _mean(one.score for one in end),
        "accuracy": _mean(one.accuracy for one in end),
        "worst_class": _mean(one.worst_class for one in end),
        "target_accuracy": _mean(one.target_accuracy for one in end),
        "validation": _mean(one.score for one in validations[-last:]),
        "curve": " ".join(f"{10_000 * one.score:.0f}" for one in evaluations),
        "steps": f"{steps:.0f}",
        "megabytes": _megabytes(run.summary),
        "finish_megabytes": _megabytes(finish) if finish else "",
        "finish_clients": str(finish.get("clients", "")),
        "seconds": f"{summary['seconds']:.2f}",
        "diverged": str(summary["diverged"]),
        "made": "+".join(filter(None, made)),
        "failure": "",
    }


def _megabytes(spent: Mapping[str, Any]) -> str:
    return f"{(spent['bytes_up'] + spent['bytes_down']) / 1e6:.4g}"


def _mean(values: Iterable[float | None]) -> str:
    """Return the mean of shares as text; empty where there are none."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.5f}" if known else ""
