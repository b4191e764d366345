"""The training of federations, on any worker: configs in plain values come in, a row for each seed goes out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedskew import methods
from fedskew.arena._advice import figures
from fedskew.errors import ArgumentError, BackendWarning, ConfigError, DataWarning, FedskewError, PartitionError
from fedskew.experiment import Config, Result, keep_data, resolve, simulate, simulate_together
from fedskew.report import SeedRun

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
    """What became of one config, as texts: its rows by seed, and the federation's figures.

    Where it could not be trained this time there are no rows, and `failed` says why.
    """

    rows: dict[int, dict[str, str]]
    federation: dict[str, str]
    failed: str = ""


def train(trees: Sequence[Mapping[str, Any]], last: int) -> list[Trained]:
    """Train the seeds of some configs, and return their results; nothing is written.

    Several configs, which have `engine.seeds_together`, train as one cohort where they can; where one of them fails in
    training, each is trained alone. A result is the mean of the `last` evaluations.
    """
    keep_data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendWarning)
        warnings.simplefilter("ignore", DataWarning)
        if len(trees) > 1:
            try:
                configs = [resolve(tree) for tree in trees]
                results = simulate_together(configs)
            except Exception as error:
                logging.getLogger(__name__).debug("trained one after another, as one of them failed: %s", error)
            else:
                return [_outcome(config, result, last) for config, result in zip(configs, results, strict=True)]
        return [_train_alone(tree, last) for tree in trees]


def _train_alone(tree: Mapping[str, Any], last: int) -> Trained:
    try:
        config = resolve(tree)
    except FedskewError as error:
        return Trained({}, {}, str(error))
    try:
        return _outcome(config, simulate(config, progress=False), last)
    except Exception as error:
        return _outcome(config, error, last)


def _outcome(config: Config, result: Result | Exception, last: int) -> Trained:
    if isinstance(result, Result):
        first, training = result.runs[0], config.training
        epochs = training.epochs if training.steps is None else None
        found = figures(first.counts, first.target, training.participation, epochs)
        federation = {"federation": _in_words(config)} | {name: f"{value:.6g}" for name, value in found.items()}
        return Trained({run.seed: _row(config, run, last) for run in result.runs}, federation)
    if isinstance(result, (PartitionError, ConfigError, ArgumentError)):  # it would fail again
        nothing = dict.fromkeys(FIGURES, "")
        return Trained({seed: nothing | {"failure": f"refused: {result}"} for seed in config.seeds}, {})
    return Trained({}, {}, reason_of(result))


def reason_of(error: BaseException) -> str:
    """Return why something failed, in one line."""
    said = " ".join(str(error).split())
    return said if isinstance(error, FedskewError) else f"{type(error).__name__}: {said}"


def _in_words(config: Config) -> str:
    """Return a federation in a few words."""
    rule = config.partition
    options = {**rule.parameters, "clients": rule.clients}
    said = ", ".join(f"{name} {value}" for name, value in options.items() if not isinstance(value, bool | None))
    share = f"{config.training.participation:.0%} a round, {config.training.epochs:g} epochs"
    aim = "" if config.target.mix is None else ", for a target mix"
    return f"{config.data.name}, {rule.rule} ({said}), {share}{aim}"


def _row(config: Config, trained: SeedRun, last: int) -> dict[str, str]:
    run, summary = SeedRun.with_finished([trained])[-1], trained.summary
    said = summary.get("finished") or {}
    finish = said if said.get("evaluation") else {}  # one that failed made no other model
    evaluations = [one.evaluation for one in run.rounds if (one.round or finish) and one.evaluation is not None]
    validations = [record.validation for record in trained.rounds if record.round and record.validation is not None]
    end = evaluations[-last:]
    cost = methods.cost(methods.build(config.method, config.training.momentum))
    steps = sum(sum(record.steps) for record in run.rounds) * (3 + cost.forward + 2 * cost.backward) / 3
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
        "made": "+".join(filter(None, [summary["versions"]["fedskew"], (summary["revision"] or "")[:7]])),
        "failure": "",
    }


def _megabytes(spent: Mapping[str, Any]) -> str:
    return f"{(spent['bytes_up'] + spent['bytes_down']) / 1e6:.4g}"


def _mean(values: Iterable[float | None]) -> str:
    """Return the mean of shares as text; empty where there are none."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.5f}" if known else ""
