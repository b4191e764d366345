"""Means and deviations of a table's numbers over all sites, as sums, before the first round; and what inputs look like.

    z = (x - middle) / half                                    of the range that the schema gives
    each site: n, sum of z, sum of z^2, of its training samples, for each number                  as integers
    mean = middle + half * (sum z / n)       deviation = half * sqrt(sum z^2 / n - (sum z / n)^2)

They are those of the pooled samples, to 2^-32 of half a range for each site. Where updates are masked, the server
learns the sums over all sites alone. Everyone is told the result with each message from then on, and a site takes one.
Where that is agreed to, sites then add up what their inputs look like, in cells by these means (see `data.Profile`).
"balanced" class weights are told likewise, by the label counts that sites reported, or the sum of these.
"""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedskew.data import Inputs, Profile, TableSchema
from fedskew.deploy import _wire as wire
from fedskew.deploy._agreement import MEAN, STD, Agreement
from fedskew.deploy._arrays import ArraySpec, RefusedError, decode
from fedskew.deploy._ask import PAUSE
from fedskew.deploy._log import LOG
from fedskew.deploy._plan import Plan
from fedskew.deploy._replies import arrays_of
from fedskew.deploy._roster import Roster
from fedskew.deploy._sums import MaskedSums, in_words, kept, sum_over_all
from fedskew.errors import ArgumentError, DataError, EndedEarlyError, RunError, placed
from fedskew.experiment import Config, RunFolder
from fedskew.sums.fixed_point import AMOUNTS, FixedPoint, add

FILE, WEIGHTS_FILE = "moments.json", "class-weights.json"
WEIGHTS = "fedskew-class-weights"
"""Key of a message's config for class weights by the label counts of all sites."""

FORM = FixedPoint(64, 32, 2.0**24)
"""Each number's z is at most 1, so that sums over 2**24 samples of a site fit, and over 2**31 of all sites."""


PATIENCE = 10.0
"""Seconds in which sites are asked once more what their inputs look like, as no training waits for that."""

PROFILE_FORM = FixedPoint(64, 16, 2.0**26)
"""The square of a score is below 3."""


def encoded_moments(schema: TableSchema, inputs: Tensor) -> NDArray[Any]:
    """Return a site's integers, `(3, numbers)`: of inputs in their own units, NaN where missing."""
    if len(inputs) > FORM.limit:
        raise DataError(f"{len(inputs):,} samples are more than the {FORM.limit:,.0f} of which sums are taken")
    middle, half = schema.middles()
    z = (inputs[:, : schema.numbers].double().numpy() - middle) / half
    return FORM.encode(np.stack([np.isfinite(z).sum(axis=0), np.nansum(z, axis=0), np.nansum(z**2, axis=0)]))


def decoded_moments(schema: TableSchema, total: NDArray[Any]) -> tuple[list[float], list[float]]:
    """Return mean and deviation of every input of all sites together; 0 and 1 of what is no number."""
    size, first, second = FORM.decode(total)
    middle, half = schema.middles()
    there = np.maximum(size, 1)
    mean, others = middle + half * first / there, len(schema.slots) - schema.numbers
    std = half * np.sqrt(np.maximum(second / there - (first / there) ** 2, 0.0))
    std[std <= 1e-9 * half] = 1.0  # it never varies
    return [*mean.tolist(), *[0.0] * others], [*std.tolist(), *[1.0] * others]


def standardised(agreement: Agreement, roster: Roster, folder: Path) -> Agreement:
    """Return the agreement with means and deviations over all sites, asked for once; EndedEarlyError if one is away."""
    if not agreement.sums_moments:
        return agreement
    schema = agreement.table
    assert schema is not None, "as `sums_moments` says"

    def ask() -> dict[str, Any]:
        spec = ArraySpec((3, schema.numbers), "int64")
        total = _sum(agreement, roster, wire.SUM_MOMENTS, spec, _patience(agreement), _check)
        mean, std = decoded_moments(schema, total)
        LOG.info("means and deviations of %d columns are those of all sites", schema.numbers)
        return {MEAN: mean, STD: std}

    return agreement.told(kept(folder / FILE, ask))


def balanced(plan: Plan, roster: Roster, folder: Path) -> dict[str, Any]:
    """Return what all sites are told of class weights that go by all their label counts; the run folder keeps it."""
    agreement = plan.agreement

    def ask() -> dict[str, Any]:
        counts, size = roster.counts.sum(axis=0), float(roster.sizes.sum())
        if roster.is_summed:
            spec = ArraySpec((len(counts) + agreement.multi_label,), "int64")
            total = AMOUNTS.decode(_sum(agreement, roster, wire.SUM_LABELS, spec, _patience(agreement), _check))
            counts, size = total[: len(counts)], float(total[-1])
        return {WEIGHTS: list(plan.class_weights(counts, size))}

    return kept(folder / WEIGHTS_FILE, ask) if plan.config.training.balances else {}


def weighted(config: Config, said: Mapping[str, Any]) -> Config:
    """Return a config with the class weights that a message says, where they are to go by all sites' label counts."""
    if not config.training.balances or WEIGHTS not in said:
        return config
    weights = list(said[WEIGHTS])
    if not all(isinstance(weight, float) and 0 < weight < math.inf for weight in weights):
        raise RunError("class weights that were told are not all above 0 and finite")
    return config.with_value("training.class_weights", weights)


def _patience(agreement: Agreement) -> float:
    return max(agreement.idle_timeout, agreement.start_timeout)


def encoded_profile(agreement: Agreement, inputs: Inputs) -> NDArray[Any]:
    """Return what a site's normalised inputs look like, in integers."""
    if len(inputs) > FORM.limit:
        raise DataError(f"{len(inputs):,} samples are more than the {FORM.limit:,.0f} of which sums are taken")
    cells = agreement.cells or {}
    if not len(inputs):
        return PROFILE_FORM.encode(np.zeros(Profile.size(cells)))
    return PROFILE_FORM.encode(agreement.info.profile(inputs, cells).flat())


def profiled(plan: Plan, roster: Roster, folder: Path) -> None:
    """Ask the sites once what their inputs look like, and write it to the run folder; without it, rounds go on."""
    agreement = plan.agreement
    if not plan.profile_size or (folder / RunFolder.INPUTS).exists():
        return
    cells, knows, is_masked = agreement.cells or {}, agreement.label_counts in ("exact", "withheld"), plan.is_masked

    def read(found: NDArray[Any], sizes: NDArray[Any] | None) -> Profile:
        profile = Profile.of_flat(PROFILE_FORM.decode(found), cells, PROFILE_FORM.error(len(roster.names)) + 1e-6)
        if knows and sizes is not None and profile.samples != sizes.sum():
            raise ArgumentError(f"are of {profile.samples} samples, and {sizes.sum():.0f} were told")
        return profile

    def check(found: NDArray[Any], client: int) -> None:
        with placed("what its inputs look like can't be: ", RefusedError):
            read(found, roster.sizes[[client]])

    try:
        spec = ArraySpec((plan.profile_size,), "int64")
        total = _sum(agreement, roster, wire.SUM_PROFILE, spec, PATIENCE if is_masked else 0.0, check)
        profile = read(total, roster.sizes if is_masked else None)
    except (EndedEarlyError, ArgumentError) as error:
        LOG.warning("what inputs look like is not known, for fedskew watch: %s", error)
        return
    RunFolder(folder).write_profile(profile)
    LOG.info("what the inputs of %d samples look like is known, for fedskew watch", profile.samples)


Check = Callable[[NDArray[Any], int], None]


def _sum(
    agreement: Agreement, roster: Roster, purpose: str, spec: ArraySpec, patience: float, check: Check
) -> NDArray[Any]:
    """Ask for a sum over all sites, masked where updates are; else each site's part is checked, and some may lack."""
    if agreement.updates == "masked":
        sums = MaskedSums(roster.members, roster.session, len(roster.names), 1.0)
        return sum_over_all(sums, purpose, 1, spec, patience)
    members, began = roster.members, time.monotonic()
    answers: dict[int, NDArray[Any]] = {}
    what = in_words(purpose)

    def read(reply: RecordDict, client: int) -> NDArray[Any]:
        found = decode(arrays_of(reply, wire.SUMS), {wire.ANSWER: spec}, "its array")[wire.ANSWER]
        check(found, client)
        return found

    while True:
        asked = [client for client in members.online() if client not in answers]
        question = RecordDict({wire.CONFIG: ConfigRecord({wire.ROUND: 0})})
        answers |= members.ask(f"query.{purpose}", dict.fromkeys(asked, question), read, what, in_round=False).valid
        waited, missing = time.monotonic() - began, [roster.names[k] for k in range(members.sites) if k not in answers]
        if not missing or (len(answers) >= agreement.min_sites and waited >= min(agreement.start_timeout, patience)):
            break
        if waited >= patience:
            raise EndedEarlyError(
                f"{what} take {agreement.min_sites} sites at least, and {', '.join(missing)} did not answer; start "
                "again when they can be reached"
            )
        time.sleep(PAUSE)
    if missing:
        LOG.warning("%s are those of all sites but %s", what, ", ".join(missing))
    return add(list(answers.values()))


def _check(found: NDArray[Any], client: int) -> None:
    size, first, second = FORM.decode(found)
    if not ((size >= 0) & (size <= FORM.limit) & (abs(first) <= size) & (second >= 0) & (second <= size)).all():
        raise RefusedError("its sums are of no numbers in the schema's ranges")
