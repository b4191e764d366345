"""The server's checks of a sum that it opened: a site applies its weight itself, and could add anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from fedskew.deploy._arrays import COUNTER, Layout
from fedskew.engine.sums import decode_sums
from fedskew.models import ModelState
from fedskew.privacy import UpdateNoise
from fedskew.sums import NUMBERS, UPDATES

VARIANCE = "running_var"
DEVIATIONS = 9
"""Noise of so many standard deviations is in no coordinate of any model: once in 10^18 draws."""


def impossible(
    total: Mapping[str, NDArray[Any]],
    weight: float,
    members: int,
    sent: ModelState,
    layout: Layout,
    steps: tuple[int, int],
    least_loss: float,
    noise: UpdateNoise | None = None,
) -> str:
    """Say why no honest sites' answers can have this sum; empty: they can.

    Args:
        total: The sum of what sites encoded by `encode_update`.
        weight: Sum of their weights.
        members: Number of sites.
        sent: The model that was sent.
        layout: Names of its parts.
        steps: Fewest and most local steps of all together.
        least_loss: Lowest loss that there can be.
        noise: The noise of the updates; None: they have none.
    """
    opened = decode_sums(total, weight, members, members, sent)
    largest = float(opened.change.abs().max()) if opened.change.numel() else 0.0
    clip, around = UPDATES.limit, UPDATES.error(members, weight)
    if noise is not None:
        shares = math.sqrt(members / (noise.answers or members))
        deviation = shares * noise.deviation(opened.change.numel()) * 2.0**-UPDATES.fraction / weight
        clip, around = noise.clip, around + DEVIATIONS * deviation
    if largest > clip + around:
        return f"the mean update reaches {largest:.4g}, and each was clipped to {clip:g}"
    rounding, most = NUMBERS.error(members, weight), NUMBERS.limit * (1 + 2**-20)
    extras = [(name, value, -most) for name, value in opened.extras.items()]
    for what, value, least in (("loss", opened.loss, least_loss), *extras):
        if value is not None and not least - rounding <= value <= most:
            return f"the mean {what} is {value:.4g}"
    if opened.steps is not None and not steps[0] <= opened.steps <= steps[1]:
        return f"there are {opened.steps} local steps in all; expected {steps[0]} to {steps[1]}"
    found = sent._replace(buffers=opened.buffers, integers=opened.integers)
    for name, values in layout.statistics(found).items():
        if values.numel() and float(values.abs().max()) > most:
            return f"the mean of {name} reaches {float(values.abs().max()):.4g}"
        if name.endswith(VARIANCE) and values.numel() and float(values.min()) < -rounding:
            return f"the mean of {name}, a variance, is below 0"
    before = layout.counters(sent)
    for name, values in layout.counters(found).items():
        if name.endswith(COUNTER) and bool((values < before[name]).any()):
            return f"the counter {name} fell"
        if not name.endswith(COUNTER) and not torch.equal(values, before[name]):
            return f"the integers of {name} are not what was sent"
    return ""
