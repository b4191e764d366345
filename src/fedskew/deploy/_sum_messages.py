"""The messages of masked sums, as Flower's records, and their checks.

With `updates = "masked"` a training or evaluation message also says which sum its answer is for (`SumAsked`), in its
`config`:

    fedskew-session     the run, and which start of its server
    fedskew-attempt     how often sites were asked for masks in this round, from 1
    fedskew-members     names of the sites that are asked
    fedskew-weights     for training: the weights of their updates, in the same order

The reply holds `sums`, an ArrayRecord of masked integers, `commitments`, and `metrics` with round and attempt; no
model, loss or number of steps. Two messages of the type "query.NAME" follow, whose `config` also has round and purpose:

    query.again     without a site that did not answer: the same answer, with new masks and weights
    query.unmask    every member's answer came; the reply's `opening` opens the sum over all of them, and no other
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedskew.deploy._arrays import RefusedError, Specs, decode, short
from fedskew.deploy._messages import CLIENT, CONFIG, METRICS, ROUND, TrainInstruction, hash_of_question
from fedskew.errors import RunError
from fedskew.sums import SEED, FixedPoint, Masked, Opening, SumContext

SESSION, ATTEMPT, MEMBERS, WEIGHTS, PURPOSE = (
    f"fedskew-{key}" for key in ("session", "attempt", "members", "weights", "purpose")
)
SUMS, COMMITMENTS, OPENING = "sums", "commitments", "opening"
UNMASK, AGAIN = "unmask", "again"
"""Flower's names of the two queries."""

TRAIN, EVALUATE, COUNTS = "train", "evaluate", "counts"
"""Purposes of a sum; the last is also Flower's name of the query for label counts that are only ever summed."""

ANSWER = "answer"
"""Name of the array with a site's answer to such a query."""

LOSSES = FixedPoint(64, 16, 2.0**36)
"""For sums of losses over samples; what is above, or not finite, counts as the limit."""

EVEN = 5 / 6
"""Least effective number of sites in a sum, 1 / (sum of squared weights), in fewest sites (`sum_sites`)."""

ROUNDING = 1e-9
OWN = "own"
MOST_MEMBERS = 10_000


class SumAsked(NamedTuple):
    """Which sum a site is asked for.

    Attributes:
        session: The run, and which start of its server.
        round: Number of the round.
        attempt: How often sites were asked for masks in this round, from 1.
        purpose: "train", "evaluate" or "counts".
        members: Names of the sites that are asked.
        weights: Weights of their updates, sum 1; empty where nothing is weighed.
    """

    session: str
    round: int
    attempt: int
    purpose: str
    members: tuple[str, ...]
    weights: tuple[float, ...] = ()

    @classmethod
    def parse(cls, config: ConfigRecord, purpose: str | None = None) -> SumAsked | None:
        """Read from a message's config which sum it asks for.

        Args:
            config: The config.
            purpose: What the message is for; None: the config says.

        Returns:
            The sum; None if the message asks for none.

        Raises:
            RunError: A value is missing or of the wrong kind.
        """
        if MEMBERS not in config:
            return None
        session, round, attempt = config.get(SESSION), config.get(ROUND), config.get(ATTEMPT)
        members, weights = config.get(MEMBERS), config.get(WEIGHTS, [])
        purpose = config.get(PURPOSE) if purpose is None else purpose  # type: ignore[assignment]
        if (
            not isinstance(session, str)
            or not 0 < len(session) <= 100
            or not isinstance(round, int)
            or not isinstance(attempt, int)
            or not (0 <= round < 2**53 and 0 < attempt < 2**53)
            or purpose not in (TRAIN, EVALUATE, COUNTS)
            or not isinstance(members, list)
            or not all(isinstance(name, str) for name in members)
            or len(members) > MOST_MEMBERS
            or not isinstance(weights, list)
            or not all(isinstance(weight, int | float) for weight in weights)
        ):
            raise RunError(f"the server's config asks for no valid sum: {dict(config)!r:.200}")
        return cls(session, round, attempt, purpose, tuple(map(str, members)), tuple(map(float, weights)))

    def entries(self) -> dict[str, str | int | list[str] | list[float]]:
        """Return the entries of a message's config."""
        weights: dict[str, list[float]] = {WEIGHTS: list(self.weights)} if self.weights else {}
        return {
            SESSION: self.session,
            ROUND: self.round,
            ATTEMPT: self.attempt,
            PURPOSE: self.purpose,
            MEMBERS: list(self.members),
            **weights,
        }

    def context(self, about: str) -> SumContext:
        """Return what masks are derived from. Sites that were told another model or other weights have other masks.

        Args:
            about: See `about_of`.
        """
        public = json.dumps(
            [about, dict(zip(self.members, map(float.hex, self.weights), strict=False))], sort_keys=True
        )
        return SumContext(self.session, self.round, self.attempt, self.purpose, self.members, public)


def about_of(content: RecordDict) -> str:
    """Hash what all members of a sum must be told alike: the model, what is sent beside it, and how to train."""
    config = content.get(CONFIG)
    given = TrainInstruction.parse(config) if isinstance(config, ConfigRecord) else None
    alike = None if given is None else given._replace(client=0, counted=0)
    return hash_of_question(content, ("sum", alike))


def even(least: int) -> float:
    """Return the largest weight limit with which no sum is in effect one over too few sites.

    Args:
        least: Fewest sites that a sum may be over.
    """
    return 1 / (EVEN * least)  # as the sum of squared weights is at most the largest weight


def over_few(weights: Collection[float], least: int) -> str:
    """Return why a weighted sum is in effect one over too few sites; empty if it is not.

    In a sum over two sites, or one in which two have nearly all of the weight, each of them learns the other's update.

    Args:
        weights: Weights of all members of the sum, sum 1.
        least: Fewest sites that a sum may be over.
    """
    effective = 1 / sum(weight * weight for weight in weights)
    if effective >= EVEN * least:
        return ""
    return (
        f"with these weights a sum over {len(weights)} sites is in effect one over {effective:.2f}, and "
        f"{EVEN * least:.2f} are the least: lower training.weight_limit in run.toml to {even(least):.3g}"
    )


def why_no_sum(weights: Collection[float], least: int, limit: float | None, of: int | None = None) -> str:
    """Return why no sum over sites with these weights is allowed; empty if one is.

    Args:
        weights: Weights of those that are there.
        least: Fewest sites that a sum may be over.
        limit: Largest share of the weight that one may have; None: nothing is weighed.
        of: How many were asked; None: nobody was yet.
    """
    if len(weights) < least:
        there = f"{len(weights)} of {of} answered" if of is not None else f"there are {len(weights)}"
        return f"a masked sum is over {least} sites at least, and {there}"
    if limit is None:
        return ""
    whole = sum(weights)
    if not whole > 0:
        return "none of the sites that are there has a weight"
    if max(weights) > (limit + ROUNDING) * whole:
        return (
            f"one of the sites that are there has {max(weights) / whole:.3g} of the weight; sites allow {limit:g} "
            "(training.weight_limit in run.toml)"
        )
    return over_few([weight / whole for weight in weights], least)


def masked_content(asked: SumAsked, masked: Masked, client: int | None = None) -> RecordDict:
    """Make the reply with a site's masked integers."""
    figures = MetricRecord({ROUND: asked.round, ATTEMPT: asked.attempt})
    if client is not None:
        figures[CLIENT] = client
    return RecordDict(
        {
            SUMS: ArrayRecord({name: Array(values) for name, values in masked.values.items()}),
            COMMITMENTS: ConfigRecord(dict(masked.commitments)),
            METRICS: figures,
        }
    )


def check_masked(content: RecordDict, asked: SumAsked, specs: Specs) -> Masked:
    """Validate a site's masked integers; only their form can be checked, as nobody sees their values.

    Args:
        content: The reply's records.
        asked: The sum.
        specs: Lengths and dtypes of the arrays.

    Raises:
        RefusedError: The reply differs from what was asked for; the message says how.
    """
    metrics, sums, hashes = (content.get(key) for key in (METRICS, SUMS, COMMITMENTS))
    if (
        not isinstance(metrics, MetricRecord)
        or not isinstance(sums, ArrayRecord)
        or not isinstance(hashes, ConfigRecord)
    ):
        raise RefusedError(f"the reply has the records {short(sorted(content))}, not {[COMMITMENTS, METRICS, SUMS]}")
    for key, value in ((ROUND, asked.round), (ATTEMPT, asked.attempt)):
        if metrics.get(key) != value:
            raise RefusedError(f"the reply is of {key} {short(metrics.get(key))}, not {value}")
    return Masked(decode(sums, specs, "its array"), _seeds(hashes, asked.members, "commitments"))


def unmask_content(asked: SumAsked) -> RecordDict:
    """Make the request to open the sum over all that were asked."""
    return RecordDict({CONFIG: ConfigRecord({key: entry for key, entry in asked.entries().items() if key != WEIGHTS})})


def opening_content(opening: Opening) -> RecordDict:
    """Make the reply that opens a site's part."""
    return RecordDict({OPENING: ConfigRecord({OWN: opening.own})})


def check_opening(content: RecordDict) -> Opening:
    """Validate what a site sent to open a sum.

    Args:
        content: The reply's records.

    Raises:
        RefusedError: The reply differs from what was asked for; the message says how.
    """
    record = content.get(OPENING)
    if not isinstance(record, ConfigRecord):
        raise RefusedError(f"the reply has no {OPENING}")
    return Opening(_seeds(record, [OWN], OPENING)[OWN], {})


def _seeds(record: ConfigRecord, names: Collection[str], what: str) -> Mapping[str, bytes]:
    if set(record) != set(names):
        raise RefusedError(f"its {what} are of {short(sorted(record))}, not {short(sorted(names))}")
    seeds = dict(record)
    if not all(isinstance(seed, bytes) and len(seed) == SEED for seed in seeds.values()):
        raise RefusedError(f"its {what} are not {SEED} bytes each")
    return seeds  # type: ignore[return-value]
