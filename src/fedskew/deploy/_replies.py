"""Checks of replies: what differs from the agreement is refused, so that no reply can crash the server.

They are pure, and raise only RefusedError, whatever a site sends. What can't be true is refused; what is not plausible
(`_plausible`) is out of line, and reported or left out as agreed. Neither is a defence against sites that send
plausible but wrong updates.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedskew.deploy import _wire as wire
from fedskew.deploy._arrays import (
    COUNTER,
    RUNNING_VARIANCE,
    AnyArray,
    NotFiniteError,
    RefusedError,
    Specs,
    bytes_of,
    decode,
    short,
)

MOST = 10**12
"""Upper limit of a network's integer counters."""

MOST_SAMPLES = 10**9
"""Upper limit of a site's number of samples of a class, and of all classes together."""

MOST_COUNT_BYTES = 2**24
"""Largest size of a reply with label counts, in bytes."""

ROUNDING = 1e-3
"""How far a loss may be below its least, by rounding."""

AnyRecord = TypeVar("AnyRecord", ArrayRecord, MetricRecord)


def bytes_needed(*arrays: Specs) -> int:
    """Compute an upper limit of the size of a reply with these arrays, in bytes."""
    return 2**20 + sum(map(bytes_of, arrays))


def check_size(content: RecordDict, max_bytes: int) -> None:
    """Raise RefusedError for a reply of more than `max_bytes` bytes."""
    size = sum(map(_size, content.values()))
    if size > max_bytes:
        raise RefusedError(f"the reply has {size} bytes; expected {max_bytes} at most")


def check_arrays(
    record: ArrayRecord, expected: Specs, counters: Mapping[str, torch.Tensor], most_counted: int
) -> dict[str, AnyArray]:
    """Validate a model's arrays: values are finite, variances not negative, counters as far on as they can be.

    Integers that are no counters, such as position ids, must be what was sent: nothing of ours trains them.
    """
    arrays = decode(record, expected, "its array")
    for name, array in arrays.items():
        if not array.size or expected[name].is_float:
            if name.endswith(RUNNING_VARIANCE) and array.size and array.min() < 0:
                raise RefusedError(f"its array {name!r} has a variance below 0")
            continue
        if not 0 <= int(array.min()) <= int(array.max()) <= MOST:
            raise RefusedError(f"its array {name!r} has a counter below 0 or above {MOST}")
        if name in counters:
            change = array.reshape(-1).astype(np.int64) - counters[name].numpy()
            if not name.endswith(COUNTER) and change.any():
                raise RefusedError(
                    f"its array {name!r} is not what was sent; of integers only batch norm's {COUNTER} may change"
                )
            risen = int(change.max())
            if risen > most_counted:
                raise RefusedError(
                    f"its array {name!r} has a counter {risen} above what was sent; {most_counted} at most"
                )
    return arrays


def check_counts(content: RecordDict, classes: int, whole: bool) -> NDArray[np.float64]:
    """Validate the label counts that a site reports, `(classes,)`; `whole` refuses fractions, where they are exact.

    Raises RefusedError where they are missing, of another length, negative, too large, or not finite.
    """
    check_size(content, MOST_COUNT_BYTES)
    values = only(MetricRecord, content).get(wire.COUNTS)
    if not isinstance(values, list) or len(values) != classes:
        raise RefusedError(f"its label counts are {short(values)}; expected {classes} numbers, one per class")
    for value in values:
        if not 0 <= value <= MOST_SAMPLES:
            raise RefusedError(f"one of its label counts is {short(value)}; expected a number from 0 to {MOST_SAMPLES}")
        if whole and value != int(value):
            raise RefusedError(f"one of its label counts is {short(value)}; expected a whole number")
    if sum(values) > MOST_SAMPLES:
        raise RefusedError(f"its label counts are {short(sum(values))} samples in all; expected {MOST_SAMPLES} at most")
    return np.array(values, dtype=np.float64)


def check_only_samples(content: RecordDict) -> int:
    """Validate the number of samples of a site that reports no label counts; RefusedError where it can't be one."""
    check_size(content, MOST_COUNT_BYTES)
    samples = only(MetricRecord, content).get(wire.SAMPLES)
    if not isinstance(samples, int | float) or not 0 <= samples <= MOST_SAMPLES or samples != int(samples):
        raise RefusedError(
            f"its number of samples is {short(samples)}; expected a whole number from 0 to {MOST_SAMPLES}"
        )
    return int(samples)


def figures_of(content: RecordDict, **echoed: object) -> MetricRecord:
    """Return a reply's figures, which repeat these of the message; RefusedError where they do not."""
    metrics = content.get(wire.METRICS)
    if not isinstance(metrics, MetricRecord):
        raise RefusedError(f"the reply has no {wire.METRICS}")
    for name, value in echoed.items():
        if metrics.get(key := wire.key_of(name)) != value:
            raise RefusedError(f"the reply is of {key} {short(metrics.get(key))}, not {value}")
    return metrics


def only(kind: type[AnyRecord], content: RecordDict) -> AnyRecord:
    """Return a reply's only record of a kind, whatever its key; RefusedError where there is none, or another."""
    records = [record for record in content.values() if isinstance(record, kind)]
    if len(records) != 1:
        raise RefusedError(f"the reply has {len(records)} {kind.__name__}s; expected one")
    return records[0]


def check_finite(value: object, what: str) -> float:
    """Return a finite number; RefusedError for anything else."""
    if not isinstance(value, int | float) or not -sys.float_info.max <= value <= sys.float_info.max:
        kind = NotFiniteError if isinstance(value, float) else RefusedError
        raise kind(f"its {what} is {short(value)}; expected a finite number")
    return float(value)


def check_loss(value: object, what: str, least: float) -> float:
    """Return a loss that is finite and not below the least that it can be; RefusedError for anything else."""
    loss = check_finite(value, what)
    if loss < least - ROUNDING:
        raise RefusedError(f"its {what} is {short(loss)}; expected a number from {least:g}")
    return loss


def check_amounts(values: object, shape: tuple[int, ...], what: str) -> NDArray[np.int64]:
    """Return numbers of samples as an array; RefusedError for anything else."""
    if (
        not isinstance(values, list)
        or len(values) != math.prod(shape)
        or not all(isinstance(value, int) and 0 <= value <= MOST_SAMPLES for value in values)
    ):
        raise RefusedError(f"its {what} is {short(values)}; expected {' x '.join(map(str, shape))} whole numbers")
    return np.array(values, dtype=np.int64).reshape(shape)


def arrays_of(content: RecordDict, key: str) -> ArrayRecord:
    """Return a reply's arrays; RefusedError where there are none."""
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        raise RefusedError(f"the reply's {key!r} is no ArrayRecord")
    return record


def _size(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    """Compute the size of a record's keys and values, in bytes."""
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
