"""What a round leaves behind, in plain values: the lines of `rounds.jsonl`."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class Evaluation(TypedDict):
    """A model on one data set. Shares are in [0, 1]; None where undefined (a class without a sample, no target)."""

    accuracy: float
    loss: float | None
    balanced_accuracy: float
    macro_f1: float
    per_class: list[float | None]
    confusion: list[list[int]]  # rows truth, columns prediction
    target_accuracy: float | None  # per-class accuracy averaged with the target mix


class ClientEvaluation(TypedDict):
    """One client's model after its local training, on the test set."""

    client: int
    per_class: list[float | None]
    confusion: list[list[int]]
    majority: float | None  # mean accuracy over the classes that this client holds many of, few of, none of
    minority: float | None
    vacant: float | None


class Round(TypedDict):
    """One line of `rounds.jsonl`. Round 0 is the untrained model: it has an evaluation and an empty cohort."""

    seed: int
    round: int
    cohort: list[int]  # in order of choice
    answered: list[int]  # the cohort without those that dropped out or diverged
    dropped: list[int]
    diverged: list[int]
    weights: list[float]  # of `answered`, sum 1
    steps: list[int]  # local steps of `answered`
    loss: float | None  # training loss of the round, weighted
    entropy: float | None  # bits, of the cohort's summed labels
    kl: float | None  # bits, to uniform
    ess: float | None  # effective sample size of the weights
    ess_share: float | None  # of the cohort's samples
    target_distance: float | None  # squared distance of the weighted label mix from the target
    drift: float | None  # drift diversity of the updates
    seconds: float
    bytes_up: int
    bytes_down: int
    evaluation: Evaluation | None
    validation: Evaluation | None
    clients: list[ClientEvaluation] | None
    deployment: NotRequired[dict[str, Any]]  # what happened to sites and their replies, where these are real
