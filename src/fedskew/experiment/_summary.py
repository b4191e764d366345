"""The summary of a run, and of several seeds; runs of several folders, each with a label of its own."""

import math
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew import metrics
from fedskew.engine import Evaluation, RoundRecord
from fedskew.experiment._config import Config
from fedskew.experiment._model_info import ModelInfo
from fedskew.models import ModelState
from fedskew.privacy import COVERED
from fedskew.randomness import Purpose, generator
from fedskew.report import SeedRun
from fedskew.tables import Spread

EVALUATED = (*SeedRun.FIGURES, "loss")
_version = cache(version)
Scoring = Callable[[ModelState, bool], metrics.Scores | metrics.FindingScores | None]
"""Returns a model's logits of the test set, or, with True, of the validation set; None for a set that there isn't."""

_DECIDING = ("accuracy", "balanced_accuracy", "macro_f1")


def figures(evaluation: Evaluation) -> dict[str, float | None]:
    """Return the figures of one evaluation by name."""
    return {name: getattr(evaluation, name) for name in EVALUATED}


def numbers(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a record and of its evaluations (`evaluation.accuracy`); NaN where one is undefined."""
    found = record.numbers() | {"diverged": len(record.diverged)}
    del found["seed"], found["round"]
    for name, part in (("evaluation", record.evaluation), ("validation", record.validation)):
        if part is not None:
            found |= {f"{name}.{key}": value for key, value in figures(part).items()}
    found |= {f"logged.{name}": value for name, value in (record.logged or {}).items()}
    return {name: math.nan if value is None else value for name, value in found.items()}


def summarise(rounds: Sequence[RoundRecord], best_round: int | None, summary: str) -> dict[str, Any]:
    """Summarise a run's records.

    `final` is the last evaluation, `last10` the mean over the evaluations of the last 10 rounds, without the untrained
    model, and their number `evaluations`, `last_tenth` the same of the last tenth of the rounds, `best_by_validation`
    the round that validation chose, and `max` each figure's best over all evaluations on the test set (the lowest
    loss), which is optimistic. None: not evaluated. `headline` are the figures of one of these, and `of` says which.
    `privacy`, with differential privacy alone, is what the run spent (see `RoundRecord.privacy`), and of what.
    """

    def mean(last: int) -> dict[str, Any]:
        found = [figures(one) for one in SeedRun.last_evaluated(rounds, last)]
        return {name: Spread.of(_known(found, name)).mean for name in EVALUATED} | {"evaluations": len(found)}

    evaluated = [(record.round, figures(record.evaluation)) for record in rounds if record.evaluation is not None]
    chosen = next((values for round, values in evaluated if round == best_round), None)
    spent = rounds[-1].privacy
    moments: dict[str, Any] = {
        "final": evaluated[-1][1] if evaluated else None,
        "last10": mean(SeedRun.LAST),
        "last_tenth": mean(math.ceil(rounds[-1].round / 10)),
        "best_by_validation": None if chosen is None else {**chosen, "round": best_round},
        "max": {name: _best([values for _, values in evaluated], name) for name in EVALUATED} if evaluated else None,
    }
    counted: dict[str, Any] = {
        "rounds": rounds[-1].round,
        "seconds": sum(record.seconds for record in rounds),
        "bytes_up": sum(record.bytes_up for record in rounds),
        "bytes_down": sum(record.bytes_down for record in rounds),
        "diverged": sum(len(record.diverged) for record in rounds),
    }
    if spent is not None:
        counted["privacy"] = {**{key: spent[key] for key in ("epsilon", "delta", "rounds")}, "of": COVERED}
    return moments | headline(moments, summary) | counted


def headline(moments: Mapping[str, Any], summary: str) -> dict[str, Any]:
    """Return a summary's `headline`, alone: the figures that `evaluation.summary` names, and `of` what they are."""
    return {"headline": {"of": summary, **(moments[SeedRun.MOMENTS[summary]] or {})}}


def _known(evaluations: Sequence[dict[str, float | None]], name: str) -> list[float]:
    return [value for entry in evaluations if (value := entry.get(name)) is not None]


def _best(evaluations: Sequence[dict[str, float | None]], name: str) -> float | None:
    return (min if name in metrics.SiteRow.LOW else max)(_known(evaluations, name), default=None)


def over_seeds(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return mean and standard deviation of every figure over seeds; None for a kind that one doesn't have."""
    together: dict[str, Any] = {"seeds": len(summaries)}
    for kind in ("headline", "final", "last10", "last_tenth", "best_by_validation", "max"):
        known = [summary[kind] for summary in summaries if summary[kind] is not None]
        if len(known) < len(summaries) or any(EVALUATED[0] not in one for one in known):
            together[kind] = None
            continue
        together[kind] = {name: asdict(Spread.of(_known(known, name))) for name in EVALUATED}
        if kind == "headline":
            together[kind]["of"] = known[0]["of"]
    evaluated = [(summary.get("finished") or {}).get("evaluation") for summary in summaries]
    finished = [figures(Evaluation.from_dict(one)) for one in evaluated if one is not None]
    if len(finished) == len(summaries):
        together["finished"] = {name: asdict(Spread.of(_known(finished, name))) for name in EVALUATED}
    return together


def surroundings(threads: int, device: torch.device) -> dict[str, Any]:
    """Return versions, machine and revision, which a summary names."""
    return {
        "versions": {name: _version(name) for name in ("fedskew", "torch", "numpy")}
        | {"python": platform.python_version()},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": threads,
        },
        "revision": _revision(),
        "command": Path(sys.argv[0]).name,
    }


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache  # of the code that this process runs
def _revision() -> str | None:
    """Return the git revision of fedskew's own source, where it runs from a checkout."""
    folder = Path(__file__).parent
    if not any((parent / ".git").exists() for parent in folder.parents[:4]):
        return None
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


@dataclass(frozen=True)
class FinalLook:
    """Looks at trained models; `scores` is None where samples are not here, `target` the target's mix, if any."""

    config: Config
    scores: Scoring | None
    target: NDArray[np.float64] | None

    def decided(self, info: ModelInfo, state: ModelState) -> ModelInfo:
        """Return a model's notes, with the threshold by validation samples for two classes without a target."""
        if self.scores is None or self.target is not None or len(info.classes) != 2:
            return info
        validation = self.scores(state, True)
        if not isinstance(validation, metrics.Scores):
            return info
        # the measure, where that is a figure of a confusion matrix
        measure = Evaluation.of(validation.confusion(), 0.0, None).measure(self.config.evaluation.measure)
        figure = measure if measure in _DECIDING else "balanced_accuracy"
        return replace(info, threshold=validation.threshold(figure))

    def summary(self, info: ModelInfo, state: ModelState, evaluation: Evaluation | None) -> dict[str, Any]:
        """Return `intervals` of the model's figures on the test set, if asked, and what its `threshold` gives there."""
        if evaluation is None or not (self.config.evaluation.intervals or info.threshold is not None):
            return {}
        test = None if self.scores is None else self.scores(state, False)
        rng = generator(self.config.seeds[0], Purpose.BOOTSTRAP)
        if isinstance(test, metrics.FindingScores):
            return {"intervals": test.intervals(rng)}
        found: dict[str, Any] = {}
        if self.config.evaluation.intervals:
            confusion = np.array(evaluation.confusion, dtype=np.int64)
            found["intervals"] = metrics.Scores.intervals(confusion, rng, test, self.target)
        if test is not None and info.threshold is not None:
            at = vars(Evaluation.of(test.confusion(info.threshold), 0.0, None))
            known = {name: at[name] for name in _DECIDING}
            found["threshold"] = {"class": info.classes[1], "probability": info.threshold, **known}
        return found
