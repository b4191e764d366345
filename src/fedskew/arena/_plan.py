"""The runs that an arena still needs, worked out from those that it has, so that it can be continued from any state.

Each method in each situation goes through the same steps. It tries the arena's learning rates; then, with the best
of them, the values of its own parameter, and rates near the best one while its budget lasts. With `arena.widen` it goes
on beyond an end of the rates, and of its own values, while the best one is there; of its own values for
`arena.beyond` values more, once the budget is spent. The values with the best mean validation score are trained on
every partition with every seed. A method with a finish is trained once more, for as many rounds fewer as its finish
costs traffic.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from statistics import fmean
from typing import Any, Literal, NamedTuple

from fedskew.arena._arena import Arena, ArenaEntry
from fedskew.errors import FedskewError
from fedskew.experiment import Config
from fedskew.tables import grouped

Line = Mapping[str, str]
"""A line of `runs.csv`: one run, its texts by column."""
Runs = Mapping[str, Line]
"""The finished runs, by their config's digest."""
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
        """The digest of each run's config, by seed; runs with the same have the same result."""
        return {seed: self.config.for_seed(seed).digest for seed in self.config.seeds}

    @cached_property
    def trained(self) -> Config:
        """What trains, see `ArenaEntry.trained`."""
        return self.entry.trained(self.config)

    @cached_property
    def training(self) -> str:
        """The digest of what trains."""
        return self.trained.digest

    def views(self, entries: Sequence[ArenaEntry]) -> "list[ArenaJob]":
        """Return this job, and the same one in what other entries are views of its training."""
        own = self.entry
        others = [one for one in entries if one.method == own.method and one.training == own.training and one != own]
        seen = [self.config.model_copy(update={"target": entry.config.target}) for entry in others]
        return [self, *(replace(self, entry=entry, config=config) for entry, config in zip(others, seen, strict=True))]

    def is_done(self, known: Collection[str]) -> bool:
        """Return whether all of its runs are among those with these digests."""
        return all(key in known for key in self.keys.values())

    @property
    def name(self) -> str:
        """Name in messages."""
        of = "tuning" if self.stage == "tune" else f"partition {self.config.partition.seed}"
        own = f", {self.own}" if self.own else ""
        return f"{self.entry.name}, {of}, lr {self.config.training.lr:g}{own}"


@dataclass(frozen=True, eq=False)  # a value may be a list
class _Values:
    """What is tuned: a learning rate, and perhaps a value of the method's own parameter."""

    rate: float | None
    own: tuple[str, Any] | None = None

    @property
    def text(self) -> str:
        return "" if self.own is None else f"{self.own[0].removeprefix('method.')} = {json.dumps(self.own[1])}"


class _Judged(NamedTuple):
    """What is known of values that were tried: their mean validation score, and whether a run diverged."""

    score: float
    diverged: bool


@dataclass
class Plan:
    """The jobs of one method in one situation."""

    arena: Arena
    entry: ArenaEntry
    _made: dict[tuple[Stage, str], ArenaJob] = field(default_factory=dict, repr=False)

    def steps(self, runs: Runs) -> list[list[ArenaJob]]:
        """Return the jobs of each step that is known so far: the rates, what else is tuned, what is compared, that at
        equal traffic; a step follows from the results of those before it."""
        steps: list[list[ArenaJob]] = []
        best, tried = _Values(None), dict[_Values, _Judged]()
        while self._is_tuned and (values := self._next(tried, best)):
            jobs = {one: self._tune(one) for one in values}
            steps.append([job for own in jobs.values() for job in own])
            if not all(job.is_done(runs) for job in steps[-1]):
                return steps
            tried |= {one: _judged(own, runs) for one, own in jobs.items()}
            best = self._best(tried)
            if all(runs[key]["failure"] for step in steps for job in step for key in job.keys.values()):
                return steps  # whatever is tried is refused, so would be what is compared
        steps.append([self._job("run", self._config(best, seed), best) for seed in self.arena.settings.partitions])
        if self._may_pay and all(job.is_done(runs) for job in steps[-1]):
            steps.append([self._paying(job, best, runs) for job in steps[-1]])
        return steps

    def missing(self, runs: Runs) -> list[ArenaJob]:
        """Return the jobs that can be trained now; none when all are done."""
        return [job for job in self.steps(runs)[-1] if not job.is_done(runs)]

    def jobs(self, runs: Runs) -> list[ArenaJob]:
        """Return all jobs that are known so far."""
        return [job for step in self.steps(runs) for job in step]

    def finished(self, runs: Runs) -> list[str]:
        """Return the digests of those of its runs that have ended."""
        return [*dict.fromkeys(key for job in self.jobs(runs) for key in job.keys.values() if key in runs)]

    def left(self, runs: Runs) -> int:
        """Return how many runs it needs yet, as far as these tell."""
        stages = {key: job.stage for job in self.jobs(runs) for key in job.keys.values()}
        if stages.keys() <= runs.keys():
            return 0
        settings = self.arena.settings
        budget = settings.budget * len(settings.tuning.partitions) * len(settings.tuning.seeds)
        compared = len(settings.partitions) * len(self.entry.config.seeds)
        number = max(budget, [*stages.values()].count("tune")) if self._is_tuned else 0
        return number + compared * (2 if self._may_pay else 1) - len(stages.keys() & runs.keys())

    @property
    def _is_tuned(self) -> bool:
        return bool(self.arena.settings.rates) and self.entry.config.training.rounds > 0  # no round, nothing to tune

    @property
    def _may_pay(self) -> bool:  # for its finish, in rounds
        return "finish" in self.entry.config.method and self.entry.config.training.rounds > 0

    def _paying(self, job: ArenaJob, values: _Values, runs: Runs) -> ArenaJob:
        """Return a job whose rounds and finish need no more traffic than another's rounds alone."""
        training = job.config.training
        lines = [runs[key] for key in job.keys.values()]
        spent = [(float(one["megabytes"]), float(one["finish_megabytes"])) for one in lines if one["finish_megabytes"]]
        share = max([0.0, *(finish / (whole - finish) for whole, finish in spent if whole > finish)])
        rounds = math.floor(training.rounds * max(0.0, 1 - share))
        fewer = training.model_copy(update={"rounds": rounds})
        return self._job("traffic", job.config.model_copy(update={"training": fewer}), values)

    def _next(self, tried: Collection[_Values], best: _Values) -> list[_Values]:
        """Return the values that are tried next; none when the budget is spent."""
        settings = self.arena.settings
        left = settings.budget - len(tried)
        if best.rate is None:
            return [_Values(rate) for rate in settings.rates]
        if left <= 0:
            return self._beyond(tried, best) if left > -settings.beyond else []
        rates = sorted(one.rate for one in tried if one.own is None and one.rate is not None)
        known = [one.own[1] for one in tried if one.own is not None]
        own = [] if known else [_Values(best.rate, value) for value in self.entry.own]
        rate = further(self.entry, "training.lr", best.rate, rates)
        if settings.widen and not known and left > len(own) and rate is not None:
            return [_Values(rate)]
        if settings.widen and own:
            return own
        if settings.widen and best.own and (value := further(self.entry, *best.own, known)) is not None:
            return [_Values(best.rate, (best.own[0], value))]
        return [*own, *(_Values(rate, best.own) for rate in _rates_beside(best.rate, rates, left - len(own)))]

    def _beyond(self, tried: Collection[_Values], best: _Values) -> list[_Values]:
        """Return the best rate with a value beyond the end of its own values, the default's among them, where it is."""
        if not self.entry.own:
            return []
        key = self.entry.own[0][0]
        known = [one.own[1] if one.own else self.entry.default for one in (best, *tried)]
        value = further(self.entry, key, known[0], known)
        return [] if value is None else [_Values(best.rate, (key, value))]

    def _best(self, tried: Mapping[_Values, _Judged]) -> _Values:
        """Return the best values, the first of equals; those that diverged come last, before them those next to one."""

        def merit(one: _Values) -> tuple[int, float]:
            above = [other for other in tried if other.own == one.own and (other.rate or 0) > (one.rate or 0)]
            following = sorted(above, key=lambda other: other.rate or 0)[:1]
            diverged = [tried[other].diverged for other in (one, *following) if self.arena.settings.widen]
            return (0 if any(diverged[:1]) else 1 if any(diverged) else 2), tried[one].score

        return max(tried, key=merit)

    def _tune(self, values: _Values) -> list[ArenaJob]:
        tuning = self.arena.settings.tuning
        configs = [self._config(values, partition) for partition in tuning.partitions]
        training = configs[0].training
        rounds = tuning.rounds or training.rounds
        changes = {"seeds": [*tuning.seeds], "training": training.model_copy(update={"rounds": rounds})}
        return [self._job("tune", config.model_copy(update=changes), values) for config in configs]

    def _job(self, stage: Stage, config: Config, values: _Values) -> ArenaJob:
        return self._made.setdefault((stage, config.digest), ArenaJob(self.entry, stage, config, values.text))

    def _config(self, values: _Values, partition: int) -> Config:
        config = self.entry.config
        changes: dict[str, Any] = {"partition": config.partition.model_copy(update={"seed": partition})}
        if values.rate is not None:
            changes["training"] = config.training.model_copy(update={"lr": values.rate})
        config = config.model_copy(update=changes)
        return config if values.own is None else config.with_value(*values.own)

    @staticmethod
    def next_calls(plans: "Sequence[Plan]", runs: Runs, failed: Collection[str]) -> list[list[ArenaJob]]:
        """Return the next calls for situations that share trainings; at most `arena.together` runs train at a time.

        No method goes on to its next step before all are done with this one, so that which runs train together depends
        neither on the number of workers nor on where an arena was stopped. Runs with the digests `failed` are not tried
        again. The jobs of a call are of different trainings.
        """
        known = {*runs, *failed}
        for jobs in zip_longest(*(plan.steps(runs) for plan in plans), fillvalue=[]):
            # Divided first, so that what is done already does not change which runs train together.
            calls = _together([job for of_plan in jobs for job in of_plan], plans[0].arena.settings.together)
            undone = [[[job for job in same if not job.is_done(known)] for same in call] for call in calls]
            missing = [[same[0] for same in call if same] for call in undone]
            if any(missing):
                return [call for call in missing if call]
        return []


def sharing(plans: Sequence[Plan]) -> list[list[Plan]]:
    """Return the plans in groups: those of one situation, and of all that have views of its trainings."""
    name: dict[tuple[str, ...], tuple[str, ...]] = {}
    first: dict[tuple[str, str], tuple[str, ...]] = {}
    for entry in (plan.entry for plan in plans):
        own = tuple(entry.situation.values())
        name[own] = name.get(first.setdefault((entry.method, entry.training), own), name.setdefault(own, own))
    return list(grouped(plans, lambda plan: name[tuple(plan.entry.situation.values())]).values())


def _together(jobs: Sequence[ArenaJob], most: int) -> list[list[list[ArenaJob]]]:
    """Divide jobs into calls of at most so many runs; jobs of one training stand in one list and train once."""
    # Jobs with the same objective and local step stand side by side, as these can become one cohort, as a rule.
    distinct = grouped(jobs, lambda job: job.training)  # methods with the same config share its runs, as do views

    def objective_and_step(same: list[ArenaJob]) -> str:
        method = same[0].config.method
        return json.dumps([method["objective"], method["local_step"]])

    alike = grouped(distinct.values(), objective_and_step)
    calls: list[list[list[ArenaJob]]] = []
    room = 0
    for same in (same for group in alike.values() for same in group):
        config = same[0].config
        if room < len(config.seeds) or not config.engine.seeds_together:
            calls.append([])
            room = most
        calls[-1].append(same)
        room -= len(config.seeds)
    return calls


def _judged(jobs: Sequence[ArenaJob], runs: Runs) -> _Judged:
    """Return what the tuning runs of some values say; one that is refused, or has no validation part, has no score."""
    lines = [runs[key] for job in jobs for key in job.keys.values()]
    scores = [float(line["validation"]) for line in lines if line["validation"]]
    diverged = any(line["failure"] or int(line["diverged"] or 0) for line in lines)
    return _Judged(fmean(scores) if scores else -math.inf, diverged)


def further(entry: ArenaEntry, key: str, value: Any, tried: Collection[Any]) -> float | None:
    """Return the number beyond one at an end of those tried, as far from it in ratio as its neighbour; None where it is
    inside, or nothing is cut off, as it is 0 or the config refuses that number (a share above 1, say)."""
    if not all(isinstance(one, int | float) for one in tried) or len(known := sorted({*tried})) < 2:
        return None
    if value not in (known[0], known[-1]):
        return None
    neighbour = known[1] if value == known[0] else known[-2]
    beyond = float(f"{value * value / neighbour if neighbour else 2 * value:.3g}")
    if known[0] <= beyond <= known[-1]:
        return None
    try:
        entry.config.with_value(key, beyond)
    except FedskewError:
        return None
    return beyond


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
