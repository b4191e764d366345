"""What is said of a trained model once: intervals of its figures, and for two classes the probability that decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew import metrics
from fedskew.engine import Evaluation
from fedskew.experiment._config import Config
from fedskew.experiment._model_info import ModelInfo
from fedskew.models import ModelState
from fedskew.randomness import Purpose, generator

Scoring = Callable[[ModelState, bool], metrics.Scores | None]
"""Returns a model's logits of the test set, or, with True, of the validation set; None for a set that there isn't."""

_DECIDING = ("accuracy", "balanced_accuracy", "macro_f1")


@dataclass(frozen=True)
class FinalLook:
    """Looks at trained models; `scores` is None where samples are not here, `target` the target's mix, if any."""

    config: Config
    scores: Scoring | None
    target: NDArray[np.float64] | None

    def decided(self, info: ModelInfo, state: ModelState) -> ModelInfo:
        """Return the notes of a model's file, with the threshold that validation samples choose for two classes.

        With a target there is none: its label mix is another than theirs.
        """
        if self.scores is None or self.target is not None or len(info.classes) != 2:
            return info
        validation = self.scores(state, True)
        return info if validation is None else replace(info, threshold=validation.threshold(self._figure(validation)))

    def summary(self, info: ModelInfo, state: ModelState, evaluation: Evaluation | None) -> dict[str, Any]:
        """Return `intervals` of the model's figures on the test set, and those that its `threshold` gives there."""
        if evaluation is None:
            return {}
        test = None if self.scores is None else self.scores(state, False)
        rng = generator(self.config.seeds[0], Purpose.BOOTSTRAP)
        confusion = np.array(evaluation.confusion, dtype=np.int64)
        found: dict[str, Any] = {"intervals": metrics.Scores.intervals(confusion, rng, test, self.target)}
        if test is not None and info.threshold is not None:
            at = vars(Evaluation.of(test.confusion(info.threshold), 0.0, None))
            known = {name: at[name] for name in _DECIDING}
            found["threshold"] = {"class": info.classes[1], "probability": info.threshold, **known}
        return found

    def _figure(self, validation: metrics.Scores) -> str:
        """Return the figure that a threshold makes highest: the measure where that is one of a confusion matrix."""
        measure = Evaluation.of(validation.confusion(), 0.0, None).measure(self.config.evaluation.measure)
        return measure if measure in _DECIDING else "balanced_accuracy"
