"""A round whose updates are masked: what each client sends, as integers, and what the server reads in their sum.

The server decides the weight a_k of every member of a sum, and tells it; where one is lost before the sum is opened,
the others are weighed anew. A client encodes
(`fedskew.sums`: clipped, weighed, rounded)

    update    a_k f_k D_k          f_k is 1, or the server update's (`SummedUpdate`)
    buffers   a_k times the floating-point buffers
    integers  the integer buffers
    loss      a_k times its mean loss
    steps     its local steps
    number    a_k m_k, if the server update has such a number
    weight    a_k, where the server does not know it (`Federation.announced`)
    reply.*   what a component returns beside the update, divided by the cohort's size

(with noise, the update alone: see `fedskew.privacy`) and the server divides the sums by A, the weights of those that
replied. A simulation and a federation of real sites call the same functions, so that their sums are the same integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew import sums
from fedskew.engine._backend import Update
from fedskew.engine._contracts import calling, checked_share
from fedskew.errors import ArgumentError
from fedskew.methods import Method
from fedskew.models import ModelState
from fedskew.privacy import UpdateNoise
from fedskew.server_updates import reads_sums
from fedskew.weighting import BySums, Facts

Integers = Mapping[str, NDArray[Any]]

REPLY = "reply."


class Asked(NamedTuple):
    """What is decided about the members of a sum before they add to it.

    Attributes:
        clients: The members, `(members,)`, in the order of the cohort.
        weights: Weight of each, `(members,)`, sum 1; empty if nobody holds a sample. Where each client knows its own
            weight alone, its share of all clients: their sum is below 1 where some are not members.
        limited: Mask of those whose weight `training.weight_limit` lowered, `(members,)`.
        fallback: Why the weights are FedAvg's in place of the method's; None if they are the method's.
    """

    clients: NDArray[np.int64]
    weights: NDArray[np.float64]
    limited: NDArray[np.bool_]
    fallback: str | None

    @classmethod
    def unknown(cls, clients: NDArray[np.int64]) -> Asked:
        """Return what a server knows of members who weigh themselves.

        Args:
            clients: The members.
        """
        return cls(clients, np.zeros(0), np.zeros(len(clients), dtype=np.bool_), None)


class Opened(NamedTuple):
    """The contents of a sum, decoded at the server.

    Attributes:
        change: Sum of a_k f_k D_k, `(parameters,)`, float64, where the a_k of those that replied sum to 1.
        buffers: Weighted mean of the buffers, `(buffers,)`.
        integers: Mean of the integer buffers, rounded up; those that were sent where they are in no sum.
        loss: Weighted mean of the losses; None if they were not sent.
        steps: Number of local steps of all; None if they were not sent.
        number: Sum of a_k m_k; 0 if the server update has no such number.
        reply: Sums of what components returned, by name; empty if they return nothing.
    """

    change: Tensor
    buffers: Tensor
    integers: Tensor
    loss: float | None
    steps: int | None
    number: float
    reply: dict[str, Tensor]


def encode_update(
    method: Method,
    update: Update,
    weight: float,
    cohort: int,
    noise: UpdateNoise | None = None,
    rng: np.random.Generator | None = None,
    own_weight: bool = False,
) -> dict[str, NDArray[Any]]:
    """Encode what a client sends in a round whose updates are masked; at a real site, `sums.mask` takes it next.

    Args:
        method: The method.
        update: The client's update, finite.
        weight: Its weight, as the server told it.
        cohort: Number of members of the sum.
        noise: With differential privacy: how the update is clipped, and what noise is added. Nothing else is sent then.
        rng: See `UpdateNoise.protect`.
        own_weight: Whether the weight is the client's own secret, and is sent, too.

    Returns:
        int32 and int64 arrays by name; the names and shapes are the same at all clients.

    Raises:
        ArgumentError: A value is not finite, the weight is above 1 or above the noise's limit, or with noise, there is
            more to send than the update.
        ComponentError: A server update of a user's own fails, or has no such share.
    """
    if noise is not None:
        hidden = ["weight"] if own_weight else []
        if beside := [*update.reply, *(["buffers"] if update.buffers.numel() else []), *hidden]:
            raise ArgumentError(f"{', '.join(beside)}: would be sent without noise, beside an update with noise")
        return {"update": noise.protect(_numpy(update.change), weight, rng, cohort)}
    factor, number = 1.0, None
    if reads_sums(method.server_update):
        with calling("server_update", method.server_update, "share"):
            shared = method.server_update.share(update.change, update.steps)  # type: ignore[attr-defined]
        factor, number = checked_share(method.server_update, shared)
    loss = update.loss if math.isfinite(update.loss) else sums.NUMBERS.limit
    arrays = {
        "update": sums.UPDATES.encode(_numpy(update.change), weight * factor),
        "buffers": sums.NUMBERS.encode(_numpy(update.buffers), weight),
        "integers": sums.COUNTS.encode(_numpy(update.integers)),
        "loss": sums.NUMBERS.encode([loss], weight),
        "steps": sums.COUNTS.encode([update.steps]),
    }
    if own_weight:
        arrays["weight"] = sums.NUMBERS.encode([weight])
    if number is not None:
        arrays["number"] = sums.NUMBERS.encode([number], weight)
    for name, tensor in update.reply.items():
        arrays[REPLY + name] = sums.UPDATES.encode(_numpy(tensor), 1 / cohort)
    return {name: array for name, array in arrays.items() if array.size}


def add_up(encoded: Iterable[Integers]) -> dict[str, NDArray[Any]]:
    """Add what clients encoded, as opened masks add it up.

    Args:
        encoded: Each client's arrays by name; at least one client's.

    Returns:
        The sums by name.
    """
    total: dict[str, NDArray[Any]] = {}
    for arrays in encoded:
        if not total:
            total = {name: array.copy() for name, array in arrays.items()}
            continue
        for name, array in arrays.items():
            sums.add_to(total[name], array)
    return total


def whole_weight(totals: Integers, known: float) -> float:
    """Return the sum of the weights of those that are in a sum.

    Args:
        totals: The sums by name.
        known: The sum of the weights as the server knows them, where clients don't send theirs.
    """
    return float(sums.NUMBERS.decode(totals["weight"])[0]) if "weight" in totals else known


def answers_in_sum(weighting: BySums, counts: NDArray[np.float64], question: Facts) -> NDArray[np.float64]:
    """Add up what clients answer to a question about their label counts, as masks add it up.

    Args:
        weighting: The weighting.
        counts: Label counts, `(clients, classes)`.
        question: The question.

    Returns:
        The sum of their answers.
    """
    return decode_answers(sums.add(encode_answer(weighting, own, question) for own in counts), question)


def summable(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round label counts with noise to what sums of them carry, so that a total is exactly the sum of its parts.

    Args:
        counts: Label counts, any shape.
    """
    return sums.AMOUNTS.decode(sums.AMOUNTS.encode(counts))


def encode_answer(weighting: BySums, counts: NDArray[np.float64], question: Facts) -> NDArray[Any]:
    """Encode a client's answer to a question about its label counts; at a real site, `sums.mask` takes it next.

    Args:
        weighting: The weighting.
        counts: Its label counts, `(classes,)`.
        question: The question.
    """
    return _answers(question).encode(weighting.answer(counts, question))


def decode_answers(total: NDArray[Any], question: Facts) -> NDArray[np.float64]:
    """Decode the sum of what clients encoded by `encode_answer`.

    Args:
        total: The sum.
        question: The question.
    """
    return _answers(question).decode(total)


def _answers(question: Facts) -> sums.FixedPoint:
    """Return the encoding of the answers: of amounts of samples in the first question, of weights and mixes later."""
    return sums.SHARES if question else sums.AMOUNTS


def decode_sums(totals: Integers, weight: float, cohort: int, members: int, sent: ModelState) -> Opened:
    """Decode the sums of what clients encoded by `encode_update`.

    Args:
        totals: The sums by name.
        weight: Sum of the weights of those that replied, above 0.
        cohort: Number of clients that were asked.
        members: Number of clients that replied.
        sent: The model that was sent.

    Returns:
        What the server reads in them.
    """
    like = sent.parameters
    integers = sent.integers  # where they are in no sum, as with noise, they stay
    if "integers" in totals:
        integers = torch.from_numpy(np.ceil(totals["integers"] / members)).to(integers.device, integers.dtype)
    buffers = sums.NUMBERS.decode(totals["buffers"], weight) if "buffers" in totals else np.zeros(0)
    return Opened(
        change=torch.from_numpy(sums.UPDATES.decode(totals["update"], weight)).to(like.device),
        buffers=torch.from_numpy(buffers).to(sent.buffers.device, sent.buffers.dtype),
        integers=integers,
        loss=float(sums.NUMBERS.decode(totals["loss"], weight)[0]) if "loss" in totals else None,
        steps=int(totals["steps"][0]) if "steps" in totals else None,
        number=float(sums.NUMBERS.decode(totals["number"], weight)[0]) if "number" in totals else 0.0,
        reply={
            name.removeprefix(REPLY): torch.from_numpy(sums.UPDATES.decode(total, 1 / cohort)).to(
                like.device, like.dtype
            )
            for name, total in totals.items()
            if name.startswith(REPLY)
        },
    )


def bytes_of(totals: Integers, cohort: int, members: int) -> int:
    """Count the bytes that one client sends: its integers, a commitment for each member, and the seeds that it opens.

    Args:
        totals: The sums, or what one client encoded.
        cohort: Number of clients that were asked.
        members: Number of clients that replied.
    """
    return sum(array.nbytes for array in totals.values()) + sums.SEED * (cohort + 1 + cohort - members)


def _numpy(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array
