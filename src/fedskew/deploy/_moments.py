"""Means and deviations of a table's numbers over all sites, as sums, before the first round.

    z = (x - middle) / half                                    of the range that the schema gives
    each site: n, sum of z, sum of z^2, of its training samples, for each number                  as integers
    mean = middle + half * (sum z / n)       deviation = half * sqrt(sum z^2 / n - (sum z / n)^2)

They are those of the pooled samples, to 2^-32 of half a range for each site. Where updates are masked, the server
learns the sums over all sites alone. Everyone is told the result with each message from then on, and a site takes one.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedskew.data import TableSchema
from fedskew.deploy import _wire as wire
from fedskew.deploy._agreement import MEAN, STD, Agreement
from fedskew.deploy._arrays import ArraySpec, RefusedError, decode
from fedskew.deploy._ask import PAUSE
from fedskew.deploy._log import LOG
from fedskew.deploy._replies import arrays_of
from fedskew.deploy._roster import Roster
from fedskew.deploy._sums import MaskedSums, sum_over_all
from fedskew.errors import DataError, EndedEarlyError, RunError
from fedskew.files import write_text, writing
from fedskew.sums.fixed_point import FixedPoint, add

FILE = "moments.json"
FORM = FixedPoint(64, 32, 2.0**24)
"""Each number's z is at most 1, so that sums over 2**24 samples of a site fit, and over 2**31 of all sites."""


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
    """Return the agreement with the means and deviations over all sites, which are asked once; the run folder keeps
    them. EndedEarlyError where a site was away for too long."""
    if not agreement.sums_moments:
        return agreement
    path, schema = folder / FILE, agreement.table
    assert schema is not None, "as `sums_moments` says"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return agreement.told(stored)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: can't be read ({type(error).__name__}); restore it") from None
    spec = ArraySpec((3, schema.numbers), "int64")
    patience = max(agreement.idle_timeout, agreement.start_timeout)
    if agreement.updates == "masked":
        sums = MaskedSums(roster.members, roster.session, len(roster.names), 1.0)
        total = sum_over_all(sums, wire.SUM_MOMENTS, 1, spec, patience)
    else:
        total = _plain_sum(agreement, roster, spec, patience)
    mean, std = decoded_moments(schema, total)
    told = {MEAN: mean, STD: std}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(told), private=True)
    LOG.info("means and deviations of %d columns are those of all sites", schema.numbers)
    return agreement.told(told)


def _plain_sum(agreement: Agreement, roster: Roster, spec: ArraySpec, patience: float) -> NDArray[Any]:
    """Ask the sites until all have answered, or enough have when the start timeout has passed."""
    members, began = roster.members, time.monotonic()
    answers: dict[int, NDArray[Any]] = {}

    def read(reply: RecordDict, client: int) -> NDArray[Any]:
        found = decode(arrays_of(reply, wire.SUMS), {wire.ANSWER: spec}, "its array")[wire.ANSWER]
        size, first, second = FORM.decode(found)
        if not ((size >= 0) & (size <= FORM.limit) & (abs(first) <= size) & (second >= 0) & (second <= size)).all():
            raise RefusedError("its sums are of no numbers in the schema's ranges")
        return found

    while True:
        asked = [client for client in members.online() if client not in answers]
        question = RecordDict({wire.CONFIG: ConfigRecord({wire.ROUND: 0})})
        kind = f"query.{wire.SUM_MOMENTS}"
        answers |= members.ask(kind, dict.fromkeys(asked, question), read, "means", in_round=False).valid
        waited, missing = time.monotonic() - began, [roster.names[k] for k in range(members.sites) if k not in answers]
        if not missing or (len(answers) >= agreement.min_sites and waited >= agreement.start_timeout):
            break
        if waited >= patience:
            raise EndedEarlyError(
                f"means and deviations take {agreement.min_sites} sites at least, and {', '.join(missing)} did not "
                "answer; start again when they can be reached"
            )
        time.sleep(PAUSE)
    if missing:
        LOG.warning("means and deviations are those of all sites but %s", ", ".join(missing))
    return add(list(answers.values()))
