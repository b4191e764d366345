"""Test sets in which one class is far more frequent than the others, so that accuracy says little."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedskew.report._runs import SeedRun

UNEVEN = 1.5
"""The most frequent class has more than so many times an even share of the test samples."""


@dataclass(frozen=True)
class MostFrequent:
    """What a model gets that always answers with the most frequent class of the test set.

    Attributes:
        name: The class.
        accuracy: Its accuracy, a share.
        balanced: Its balanced accuracy, a share.
    """

    name: str
    accuracy: float
    balanced: float

    def __str__(self) -> str:
        """Say it in a sentence."""
        return (
            f"Always \u2018{self.name}\u2019, the most frequent class of the test set, gets an accuracy of "
            f"{100 * self.accuracy:.1f} % and a balanced accuracy (the mean over classes) of "
            f"{100 * self.balanced:.1f} %."
        )


def most_frequent(runs: Iterable[SeedRun]) -> MostFrequent | None:
    """Return what the most frequent class gets, in the first of these runs whose test classes are uneven.

    Args:
        runs: The runs.

    Returns:
        None where every class has about as many test samples.
    """
    for run in runs:
        evaluation = next((record.evaluation for record in reversed(run.rounds) if record.evaluation is not None), None)
        if evaluation is None:
            continue
        counts = np.sum(evaluation.confusion, axis=1)
        present, share = np.count_nonzero(counts), counts.max() / max(counts.sum(), 1)
        if present > 1 and share > UNEVEN / present:
            return MostFrequent(run.class_names[counts.argmax()], float(share), 1 / present)
    return None
