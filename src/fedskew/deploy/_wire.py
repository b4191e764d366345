"""The messages between a server and a site, as Flower's records, and the checks of their form.

A training message contains

    arrays      ArrayRecord     the model: the network's state dict
    broadcast   ArrayRecord     the tensors that the method sends beside the model; absent if there are none
    config      ConfigRecord    server-round; for fedskew's sites also fedskew-run, -client, -epochs and -counted,
                                -steps and -quota if the round has them, -reported and -refused (see below)

An evaluation message contains `arrays` and a `config` with `server-round` and what is asked for: `confusion`, or where
the target's mix is estimated `outcomes`, and of the target site `cells`; their values are the number of bins.

A reply contains `arrays`, `metrics`, and `reply` with the tensors that the method returns beside the model. A stock
Flower server sends `arrays` and a `config` with `server-round`; a stock Flower client reads only these.

With `updates = "masked"` a training or evaluation message also says which sum its answer is for (`SumAsked`):

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

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import pydantic
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import ConfigDict, Field, TypeAdapter
from torch import Tensor

from fedskew.deploy._arrays import encode
from fedskew.engine import Assignment
from fedskew.errors import RunError
from fedskew.parameters import first_mistake
from fedskew.sums import Masked, SumContext
from fedskew.sums.fixed_point import FixedPoint

ANNOUNCED = "announced."
"""Beginning of the names of what is announced to all sites from sums, beside what a method sends."""

ARRAYS, BROADCAST, CONFIG, METRICS, REPLY = "arrays", "broadcast", "config", "metrics", "reply"
ROUND, CLIENT, STEPS = "server-round", "fedskew-client", "fedskew-steps"
VERSION = "fedskew-version"
"""Key of the server's version of fedskew, which a site's own has to be."""

REPORTED = "fedskew-reported"
"""Key of the hash of the label counts that the server has of a site (see `fingerprint`), so that the site notices that
they are no longer those that it would report."""

REFUSED = "fedskew-refused"
"""Key of the reason for which the server refused what the site sent last, for the site's own log."""

CHANGED = "its label counts have changed"
"""Reason of a site's error reply, upon which the server asks for its label counts again."""

FINISH = "finish"
"""Flower's name of a question of a finish, in messages of the type "query.finish": `arrays` is the trained model,
`broadcast` the question, and the reply's `reply` holds the sums; it is empty where the site has no such samples."""

KEEP = "keep"
"""Flower's name of the message that leaves the trained model at a site: a training's, but nothing is trained, and the
reply says the round alone."""

SOURCE = "fedskew-source"
"""Key that says of which samples such a question is: "training" or "held_out", the site's test samples."""

COUNTS, SAMPLES, LOSS, EVALUATION_LOSS = "label-counts", "num-examples", "train-loss", "eval-loss"
CONFUSION, OUTCOMES, CELLS = "confusion", "outcomes", "cells"
"""Keys of the metrics in replies."""

LAST_COUNTED = "deployed.counted"
"""Name of the state that the server keeps for a site: the last round in which the site's update was aggregated."""

SUMS, COMMITMENTS, OPENING = "sums", "commitments", "opening"
UNMASK, AGAIN = "unmask", "again"
"""Flower's names of the two queries."""

TRAIN, EVALUATE, SITES = "train", "evaluate", "sites"
SUM_COUNTS, SUM_LABELS, SUM_MOMENTS, SUM_PROFILE = "counts", "labels", "moments", "profile"
"""Purposes of a sum; all but the first two are also Flower's names of queries: for figures of the models that a site
has, label counts that are only ever summed, for the weighting and for class weights, sums of a table's numbers, and
what its inputs look like."""

OVER_ALL = (SUM_COUNTS, SUM_LABELS, SUM_MOMENTS, SUM_PROFILE)
"""Purposes of sums over all sites and no fewer, before the first round."""

FIGURES, FIGURES_FORM = "figures", FixedPoint(64, 10, 1024.0)
"""Name of the array with what models are worth to sites, `(2, models, figures)`: values, and 1 where one is better
than the model alone. As coarse as a table: of exact shares k / n with few samples a sum tells each site's k."""

ANSWER = "answer"
"""Name of the array with a site's answer to such a query."""

LOSSES = FixedPoint(64, 16, 2.0**36)
"""For sums of losses over samples; what is above, or not finite, counts as the limit."""

EVEN = 5 / 6
"""Least effective number of sites in a sum, 1 / (sum of squared weights), in fewest sites (`sum_sites`)."""

ROUNDING = 1e-9
OWN = "own"
MOST_MEMBERS = 10_000

Number = Annotated[int, Field(ge=0, lt=2**53)]


class TrainInstruction(NamedTuple):
    """The instruction to one site in a round: of a federation's run (hex digits; a resumed run keeps it), for the
    client with this index, to train for so many local epochs, or `steps` at most, on a `quota` of samples of each class
    (None: all). `counted` is the last round in which its update was aggregated, 0 before the first."""

    run: Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]
    round: Number
    client: Number
    epochs: Annotated[float, Field(ge=0, lt=2**53)]
    counted: Number
    steps: Number | None = None
    quota: tuple[Number, ...] | None = None

    @classmethod
    def of(cls, run: str, round: int, assignment: Assignment) -> TrainInstruction:
        """Make the instruction that corresponds to an engine's assignment."""
        quota = None if assignment.quota is None else tuple(int(share) for share in assignment.quota)
        counted = int(assignment.state[LAST_COUNTED]) if LAST_COUNTED in assignment.state else 0
        return cls(run, round, assignment.client, assignment.epochs, counted, assignment.steps, quota)

    @classmethod
    def parse(cls, config: ConfigRecord) -> TrainInstruction | None:
        """Read the instruction from a message's config; None of a server that is not fedskew's, RunError if invalid."""
        return _read(cls, config) if CLIENT in config else None

    def assignment(self, state: Mapping[str, Tensor]) -> Assignment:
        """Make the engine's assignment, with what the site kept when it last took part."""
        quota = None if self.quota is None else np.array(self.quota, dtype=np.float64)
        return Assignment(self.client, self.epochs, state, quota, self.steps)

    def content(
        self, arrays: ArrayRecord, broadcast: Mapping[str, Tensor], config: Mapping[str, Any] | None = None
    ) -> RecordDict:
        """Make the records of a training message."""
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**(config or {}), **entries_of(self)})})
        if broadcast:
            content[BROADCAST] = encode(broadcast)
        return content


class SumAsked(NamedTuple):
    """Which sum a site is asked for: in this session (the run, and which start of its server), round and attempt (from
    1), for this purpose, over these members, whose updates have these weights, sum 1; none where nothing is weighed."""

    session: Annotated[str, Field(min_length=1, max_length=100)]
    round: Number
    attempt: Annotated[int, Field(gt=0, lt=2**53)]
    purpose: Annotated[str, Field(pattern="^(train|evaluate|counts|labels|moments|profile|sites)$")]
    members: Annotated[tuple[str, ...], Field(max_length=MOST_MEMBERS)]
    weights: tuple[float, ...] = ()

    @classmethod
    def parse(cls, config: ConfigRecord, purpose: str | None = None) -> SumAsked | None:
        """Read which sum is asked for (a first message's type tells the purpose); RunError if it is invalid."""
        if key_of("members") not in config:
            return None
        return _read(cls, config, **({} if purpose is None else {"purpose": purpose}))

    def context(self, about: str) -> SumContext:
        """Return what masks are derived from. Sites that were told another model or other weights have other masks."""
        weights = dict(zip(self.members, map(float.hex, self.weights), strict=False))
        public = json.dumps([about, weights], sort_keys=True)
        return SumContext(self.session, self.round, self.attempt, self.purpose, self.members, public)


_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind, config=ConfigDict(strict=True)) for kind in (TrainInstruction, SumAsked)
}
Asked = TypeVar("Asked", TrainInstruction, SumAsked)


def key_of(field: str) -> str:
    """Return the key in a message's config of a field of an instruction, or of a sum that is asked for."""
    return ROUND if field == "round" else f"fedskew-{field}"


def entries_of(asked: TrainInstruction | SumAsked) -> dict[str, Any]:
    """Return the entries of a message's config that say what is asked; none of a field that is None or empty."""
    return {
        key_of(name): list(value) if isinstance(value, tuple) else value
        for name, value in asked._asdict().items()
        if value is not None and value != ()
    }


def _read(kind: type[Asked], config: ConfigRecord, **known: Any) -> Asked:
    values = {name: config[key_of(name)] for name in kind._fields if key_of(name) in config} | known
    try:
        made: Asked = _ADAPTERS[kind].validate_python(
            {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        )
    except pydantic.ValidationError as error:
        what = "instruction" if kind is TrainInstruction else "sum"
        raise RunError(f"the server's config has no valid {what}: {first_mistake(error):.200}") from None
    return made


def config_of(content: RecordDict) -> ConfigRecord:
    """Return a message's config; an empty one if it has none."""
    record = content.get(CONFIG)
    return record if isinstance(record, ConfigRecord) else ConfigRecord()


def fingerprint(reported: Sequence[float]) -> str:
    """Hash what a site reported of its labels: the number of samples of each class, or of all."""
    return hashlib.sha256(",".join(repr(float(value)) for value in reported).encode()).hexdigest()[:16]


def hash_of_question(content: RecordDict, asked: object) -> str:
    """Hash what the answer to a message depends on: its arrays, and what else it asks."""
    whole = hashlib.sha256(repr(asked).encode())
    for key in (ARRAYS, BROADCAST):
        record = content.get(key)
        for name, array in sorted(record.items()) if isinstance(record, ArrayRecord) else ():
            whole.update(f"{key} {name} {len(array.data)}\n".encode())
            whole.update(array.data)
    return whole.hexdigest()[:32]


def about_of(content: RecordDict) -> str:
    """Hash what all members of a sum must be told alike: the model, what is sent beside it, and how to train."""
    instruction = TrainInstruction.parse(config_of(content))
    alike = None if instruction is None else instruction._replace(client=0, counted=0)
    return hash_of_question(content, ("sum", alike))


def counted_in(round: int) -> dict[str, Tensor]:
    """Make the state that the server keeps for a client after aggregating its update of this round."""
    return {LAST_COUNTED: torch.tensor([round], dtype=torch.int64)}


def even(least: int) -> float:
    """Return the largest weight limit with which no sum is in effect one over fewer than `least` sites."""
    return 1 / (EVEN * least)  # as the sum of squared weights is at most the largest weight


def over_few(weights: Collection[float], least: int) -> str:
    """Return why a weighted sum is in effect one over fewer than `least` sites, of whom one learns others' updates."""
    effective = 1 / sum(weight * weight for weight in weights)
    if effective >= EVEN * least:
        return ""
    return (
        f"with these weights a sum over {len(weights)} sites is in effect one over {effective:.2f}, and "
        f"{EVEN * least:.2f} are the least: lower training.weight_limit in run.toml to {even(least):.3g}"
    )


def why_no_sum(weights: Collection[float], least: int, limit: float | None, of: int | None = None) -> str:
    """Return why no sum over sites with these weights is allowed, `of` so many that were asked; empty if one is."""
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
    figures = MetricRecord({ROUND: asked.round, key_of("attempt"): asked.attempt})
    if client is not None:
        figures[CLIENT] = client
    return RecordDict(
        {
            SUMS: ArrayRecord({name: Array(values) for name, values in masked.values.items()}),
            COMMITMENTS: ConfigRecord(dict(masked.commitments)),
            METRICS: figures,
        }
    )
