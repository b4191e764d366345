"""The runs that an arena still needs, worked out from those that it has, so that it can be continued from any state.

Each method in each situation goes through the same steps. It tries the arena's learning rates; then, with the best
of them, the values of its own parameter, and rates near the best one while its budget lasts. The values with the best
validation score are trained on every partition with every seed. A method with a finish is trained once more, for as
many rounds fewer as its finish costs traffic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

from fedskew.arena._arena import TUNING_SEED, Arena, ArenaEntry
from fedskew.experiment import Config

Line = Mapping[str, str]
"""A line of `runs.csv`: one run, its texts by column."""
Runs = Mapping[str, Line]
"""The finished runs, by their config's hash."""
Stage = Literal["tune", "run", "traffic"]


@dataclass(frozen=True)
class ArenaJob:
    """The runs of one config, one for each of its seeds.

    Runs of stage "tune" tune, those of "run" are compared, and those of "traffic", with fewer rounds, are compared at
    equal traffic in their place. `own` is the value of the method's own parameter, as text; empty: the default.
    """

    entry: ArenaEntry
    stage: Stage
    config: Config
    own: str = ""

    @cached_property
    def keys(self) -> dict[int, str]:
        """The config hash of each run, by seed; runs with the same hash have the same result."""
        return {seed: self.config.for_seed(seed).hash for seed in self.config.seeds}

    def is_done(self, known: Collection[str]) -> bool:
        """Return whether all of its runs are among those with these hashes."""
        return all(key in known for key in self.keys.values())

    @property
    def name(self) -> str:
        """Name in messages."""
        of = "tuning" if self.stage == "tune" else f"partition {self.config.partition.seed}"
        own = f", {self.own}" if self.own else ""
        return f"{self.entry.name}, {of}, lr {self.config.training.lr:g}{own}"


@dataclass(frozen=True)
class _Values:
    """What is tuned: a learning rate, and perhaps a value of the method's own parameter."""

    rate: float | None
    own: tuple[str, Any] | None = None

    @property
    def text(self) -> str:
        return "" if self.own is None else f"{self.own[0].removeprefix('method.')} = {json.dumps(self.own[1])}"


@dataclass
class Plan:
    """The jobs of one method in one situation."""

    arena: Arena
    entry: ArenaEntry
    _made: dict[tuple[Stage, str], ArenaJob] = field(default_factory=dict, repr=False)

    def steps(self, runs: Runs) -> list[list[ArenaJob]]:
        """Return the jobs of each step that is known so far, as a step follows from the results of those before it.

        The steps are the rates, what else is tuned, what is compared, and what is compared at equal traffic.
        """
        settings = self.arena.settings
        steps: list[list[ArenaJob]] = [[], []]
        best = _Values(None)
        if self._is_tuned:
            tried: list[tuple[_Values, ArenaJob]] = []
            for step in steps:
                values = self._further(best) if tried else [_Values(rate) for rate in settings.rates]
                step += [self._tune(one) for one in values]
                if not all(job.is_done(runs) for job in step):
                    return steps if tried else steps[:1]
                tried += zip(values, step, strict=True)
                best, _ = max(tried, key=lambda pair: _validation(pair[1], runs))  # the first of equals
        steps.append([self._job("run", self._config(best, seed), best) for seed in settings.partitions])
        if self._has_finish and all(job.is_done(runs) for job in steps[2]):
            steps.append([self._paying(job, best, runs) for job in steps[2]])
        return steps

    def missing(self, runs: Runs) -> list[ArenaJob]:
        """Return the jobs that can be trained now; none when all are done."""
        return [job for job in self.steps(runs)[-1] if not job.is_done(runs)]

    def jobs(self, runs: Runs) -> list[ArenaJob]:
        """Return all jobs that are known so far."""
        return [job for step in self.steps(runs) for job in step]

    @property
    def number(self) -> int:
        """Number of runs in all."""
        compared = len(self.arena.settings.partitions) * len(self.entry.config.seeds)
        return (self.arena.settings.budget if self._is_tuned else 0) + compared * (2 if self._has_finish else 1)

    @property
    def _is_tuned(self) -> bool:
        return bool(self.arena.settings.rates) and self.entry.config.training.rounds > 0  # no round, nothing to tune

    @property
    def _has_finish(self) -> bool:
        return "finish" in self.entry.config.method

    def _paying(self, job: ArenaJob, values: _Values, runs: Runs) -> ArenaJob:
        """Return a job whose rounds and finish need no more traffic than another's rounds alone."""
        training = job.config.training
        share = 0.0
        for line in (runs[key] for key in job.keys.values()):
            if line["finish_megabytes"] and training.rounds:
                finish = float(line["finish_megabytes"])
                share = max(share, finish / (float(line["megabytes"]) - finish))
        rounds = math.floor(training.rounds * max(0.0, 1 - share))
        fewer = training.model_copy(update={"rounds": rounds})
        return self._job("traffic", job.config.model_copy(update={"training": fewer}), values)

    def _further(self, best: _Values) -> list[_Values]:
        """Return the values that are tried with the rest of the budget."""
        assert best.rate is not None, "there are rates"
        rates = self.arena.settings.rates
        own = [_Values(best.rate, value) for value in self.entry.own]
        left = self.arena.settings.budget - len(rates) - len(own)
        return [*own, *(_Values(rate) for rate in _rates_beside(best.rate, rates, left))]

    def _tune(self, values: _Values) -> ArenaJob:
        config = self._config(values, TUNING_SEED)
        return self._job("tune", config.model_copy(update={"seeds": [TUNING_SEED]}), values)

    def _job(self, stage: Stage, config: Config, values: _Values) -> ArenaJob:
        return self._made.setdefault((stage, config.hash), ArenaJob(self.entry, stage, config, values.text))

    def _config(self, values: _Values, partition: int) -> Config:
        config = self.entry.config
        changes: dict[str, Any] = {"partition": config.partition.model_copy(update={"seed": partition})}
        if values.rate is not None:
            changes["training"] = config.training.model_copy(update={"lr": values.rate})
        config = config.model_copy(update=changes)
        return config if values.own is None else config.with_value(*values.own)

    @staticmethod
    def next_calls(plans: Sequence[Plan], runs: Runs, failed: Collection[str]) -> list[list[ArenaJob]]:
        """Return the next calls for a situation; the jobs of a call train at a time, at most `arena.together` runs.

        No method goes on to its next step before all are done with this one, so that which runs train together depends
        neither on the number of workers nor on where an arena was stopped. Runs with the hashes `failed` are not tried
        again.
        """
        known = {*runs, *failed}
        for jobs in zip_longest(*(plan.steps(runs) for plan in plans), fillvalue=[]):
            # Divided first, so that what is done already does not change which runs train together.
            calls = _together([job for of_plan in jobs for job in of_plan], plans[0].arena.settings.together)
            missing = [[job for job in call if not job.is_done(known)] for call in calls]
            if any(missing):
                return [call for call in missing if call]
        return []


def _together(jobs: Sequence[ArenaJob], most: int) -> list[list[ArenaJob]]:
    """Divide jobs into calls of so many runs."""
    # Jobs with the same objective and local step stand side by side, as these can become one cohort, as a rule.
    distinct = {tuple(job.keys.values()): job for job in jobs}  # methods with the same config share its runs
    by_training: dict[str, list[ArenaJob]] = {}
    for job in distinct.values():
        method = job.config.method
        by_training.setdefault(json.dumps([method["objective"], method["local_step"]]), []).append(job)
    calls: list[list[ArenaJob]] = []
    room = 0
    for job in (job for group in by_training.values() for job in group):
        if room < len(job.config.seeds) or not job.config.engine.seeds_together:
            calls.append([])
            room = most
        calls[-1].append(job)
        room -= len(job.config.seeds)
    return calls


def _validation(job: ArenaJob, runs: Runs) -> float:
    """Return the validation score of a tuning job."""
    texts = [runs[key]["validation"] for key in job.keys.values()]
    return max((float(text) for text in texts if text), default=-math.inf)


def _rates_beside(best: float, rates: Sequence[float], number: int) -> list[float]:
    """Rates near the best one: its geometric means with its neighbours; beyond the first or last rate, a full step."""
    at = rates.index(best)
    up = rates[at + 1] / best if at + 1 < len(rates) else best / rates[at - 1]
    down = best / rates[at - 1] if at else up
    above = math.sqrt(up) if at + 1 < len(rates) else up
    below = math.sqrt(down) if at else down
    found: list[float] = []
    step = 1.0
    while len(found) < number:
        found += [best * above**step, best / below**step]
        step /= 2
    return [float(f"{rate:.3g}") for rate in found[:number]]
