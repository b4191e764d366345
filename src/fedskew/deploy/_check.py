"""What a server believes of a reply: nothing that was not agreed on, so that no reply can crash it or spoil the model.

Every function here is pure and raises nothing but RefusedError, whose message is the reason, whatever a site sends. A
finite update of the agreed shape is believed, whatever its values: this is no defence against sites that lie well.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedskew.deploy._arrays import HEADER, AnyArray, Form, decode
from fedskew.deploy._instruction import ARRAYS, CLIENT, METRICS, REPLY, ROUND, STEPS
from fedskew.deploy._refusal import RefusedError

COUNTS, SAMPLES, LOSS, CONFUSION = "label-counts", "num-examples", "train-loss", "confusion"
EVALUATION_LOSS = "eval-loss"
MOST = 10**12
"""No site has more samples, and no counter of a network counts further."""


class Expected(NamedTuple):
    """What a reply to a training task has to be.

    `client`, `round`: of the task; `arrays`: of the model; `returned`: what the method's components return beside
    it, and
    `idle`: what they do where no step was taken; `most_steps`: that the site can have taken; `max_bytes`: of the whole
    reply.
    """

    client: int
    round: int
    arrays: Mapping[str, Form]
    returned: Mapping[str, Form]
    idle: Mapping[str, Form]
    most_steps: int
    max_bytes: int


class Reply(NamedTuple):
    """A reply that is believed: the model's arrays, steps taken, mean training loss, and what components return."""

    arrays: dict[str, AnyArray]
    steps: int
    loss: float
    returned: dict[str, AnyArray]


def bytes_needed(*arrays: Mapping[str, Form]) -> int:
    """The most bytes that a reply with these arrays can have."""
    return 2**20 + sum(form.bytes + HEADER for part in arrays for form in part.values())


def check_size(content: RecordDict, max_bytes: int) -> None:
    """Refuse a reply that is larger than agreed."""
    size = sum(map(_size, content.values()))
    if size > max_bytes:
        raise RefusedError(f"the reply has {size} bytes; agreed are {max_bytes} at the most")


def check_reply(content: RecordDict, expected: Expected) -> Reply:
    """A reply of a site of ours to a training task, if it is just what was expected. Raises RefusedError."""
    check_size(content, expected.max_bytes)
    metrics = _metrics(content)
    for key, value in ((CLIENT, expected.client), (ROUND, expected.round)):
        if metrics.get(key) != value:
            raise RefusedError(f"the reply is of {key} {_short(metrics.get(key))}, not {value}")
    steps = check_steps(metrics, expected.most_steps)
    loss = check_loss(metrics)
    returned = expected.returned if steps else expected.idle
    known = {ARRAYS, METRICS, REPLY} if returned else {ARRAYS, METRICS}
    if set(content) != known:
        raise RefusedError(f"the reply has the records {_short(sorted(content))}, not {sorted(known)}")
    extra = decode(_arrays(content, REPLY), returned, "its reply") if returned else {}
    return Reply(check_arrays(_arrays(content, ARRAYS), expected.arrays), steps, loss, extra)


def check_arrays(record: ArrayRecord, expected: Mapping[str, Form]) -> dict[str, AnyArray]:
    """The model's arrays: finite, and no counter out of range. Raises RefusedError."""
    arrays = decode(record, expected, "its array")
    for name, array in arrays.items():
        if not expected[name].is_float and array.size and not 0 <= int(array.min()) <= int(array.max()) <= MOST:
            raise RefusedError(f"its array {name!r} has a counter below 0 or above {MOST}")
    return arrays


def check_steps(metrics: MetricRecord, most: int) -> int:
    """The local steps that a site says it took. Raises RefusedError."""
    steps = metrics.get(STEPS)
    if not isinstance(steps, int) or not 0 <= steps <= most:
        raise RefusedError(f"its steps are {_short(steps)}; expected a whole number from 0 to {most}")
    return steps


def check_loss(metrics: MetricRecord) -> float:
    """The training loss that a site says it had. Raises RefusedError."""
    loss = metrics.get(LOSS)
    return _finite(loss, "training loss")


def check_counts(content: RecordDict, classes: int, whole: bool, max_bytes: int = 2**24) -> NDArray[np.float64]:
    """A site's label counts, `(classes,)`; `whole`: they are to be exact, so not fractions. Raises RefusedError."""
    check_size(content, max_bytes)
    values = only_metrics(content).get(COUNTS)
    if not isinstance(values, list) or len(values) != classes:
        raise RefusedError(f"its label counts are {_short(values)}; expected {classes} numbers, one per class")
    for value in values:
        if not 0 <= value <= MOST:
            raise RefusedError(f"one of its label counts is {_short(value)}; expected a number from 0 to {MOST}")
        if whole and value != int(value):
            raise RefusedError(f"one of its label counts is {_short(value)}; expected a whole number")
    return np.array(values, dtype=np.float64)


def check_samples(metrics: MetricRecord) -> int:
    """The number of samples that a site says it has. Raises RefusedError."""
    samples = metrics.get(SAMPLES)
    if not isinstance(samples, int | float) or not 0 <= samples <= MOST or samples != int(samples):
        raise RefusedError(f"its number of samples is {_short(samples)}; expected a whole number from 0 to {MOST}")
    return int(samples)


def check_only_samples(content: RecordDict, max_bytes: int = 2**24) -> int:
    """The number of samples of a site that withholds its label counts. Raises RefusedError."""
    check_size(content, max_bytes)
    return check_samples(only_metrics(content))


def check_confusion(content: RecordDict, classes: int, round: int) -> tuple[NDArray[np.int64], float]:
    """A site's confusion matrix, `(classes, classes)`, and its mean loss. Raises RefusedError."""
    check_size(content, 2**20 + 16 * classes * classes)
    metrics = only_metrics(content)
    if metrics.get(ROUND) != round:
        raise RefusedError(f"the evaluation is of {ROUND} {_short(metrics.get(ROUND))}, not {round}")
    values, loss = metrics.get(CONFUSION), metrics.get(EVALUATION_LOSS)
    if (
        not isinstance(values, list)
        or len(values) != classes * classes
        or not all(isinstance(value, int) and 0 <= value <= MOST for value in values)
    ):
        raise RefusedError(f"its confusion matrix is {_short(values)}; expected {classes} x {classes} whole numbers")
    return np.array(values, dtype=np.int64).reshape(classes, classes), _finite(loss, "loss")


def only_arrays(content: RecordDict) -> ArrayRecord:
    """The one ArrayRecord of a stock Flower client's reply, whatever it is called. Raises RefusedError."""
    found = [record for record in content.values() if isinstance(record, ArrayRecord)]
    if len(found) != 1:
        raise RefusedError(f"the reply has {len(found)} ArrayRecords; expected one, the trained model's")
    return found[0]


def only_metrics(content: RecordDict) -> MetricRecord:
    """The one MetricRecord of a stock Flower client's reply, whatever it is called. Raises RefusedError."""
    found = [record for record in content.values() if isinstance(record, MetricRecord)]
    if len(found) != 1:
        raise RefusedError(f"the reply has {len(found)} MetricRecords; expected one")
    return found[0]


def _finite(value: object, what: str) -> float:
    if not isinstance(value, int | float) or not -sys.float_info.max <= value <= sys.float_info.max:
        raise RefusedError(f"its {what} is {_short(value)}; expected a finite number")
    return float(value)


def _metrics(content: RecordDict) -> MetricRecord:
    record = content.get(METRICS)
    if not isinstance(record, MetricRecord):
        raise RefusedError(f"the reply has no {METRICS}")
    return record


def _arrays(content: RecordDict, key: str) -> ArrayRecord:
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise RefusedError(f"the reply's {key!r} is no ArrayRecord")
    return record


def _size(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    total = 0
    for name, value in record.items():
        total += len(name)
        if isinstance(value, Array):
            total += len(value.data) if isinstance(value.data, bytes) else 0
        elif isinstance(value, str | bytes):
            total += len(value)
        elif isinstance(value, list):
            total += sum(len(entry) if isinstance(entry, str | bytes) else 8 for entry in value)
        else:
            total += 8
    return total


def _short(value: object) -> str:
    """Somebody else's value, fit for one line of a log."""
    if isinstance(value, list) and len(value) > 8:
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) > 2**64:
        return "a number of more than 64 bits"
    line = repr(value)
    return line if len(line) <= 60 else f"{line[:57]}..."
