"""A weighting of ours as a `ModelAggregator` of NVIDIA FLARE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from fedskew.components import has, make_component
from fedskew.errors import ArgumentError, ConfigError
from fedskew.labels import as_target
from fedskew.nvflare._label_counts import COUNTS, FloatArray, client_name, label_counts
from fedskew.weighting import INDEX, Answered, Weighting, limited


class _Reply(NamedTuple):
    model: Any
    counts: FloatArray


class WeightingAggregator(ModelAggregator):  # type: ignore[misc]  # FLARE comes without types
    """Aggregates models by a weighting of fedskew, from the label counts that clients send with them.

    Works for whole models and for differences, of numpy arrays or PyTorch tensors. Whole numbers, such as batch norm's
    counters, are the largest of the clients'. A model without label counts, with other arrays than the first one's, or
    with values that are not finite is left out, which the log says. Clients are ordered by their names, so that the
    result does not depend on who replies first; it has the weights as `meta["weights"]`, by client.

    Args:
        weighting: A weighting's name (`fedskew methods`), such as "fedla", or `module:Class` of your own.
        target: Target label mix, one share for each class, for weightings that need it.
        parameters: The weighting's parameters, such as `{"ess": 0.5}`.
        weight_limit: Upper limit on a client's weight, from above 0 to 1; None: no limit.

    Raises:
        ConfigError: The weighting is unknown, needs a target and has none, or keeps something between rounds (AFL).

    Example:
        WeightingAggregator("fedpals", target=[0.2, 0.8], parameters={"ess": 0.5})
    """

    def __init__(
        self,
        weighting: str = "fedla",
        target: Sequence[float] | None = None,
        parameters: Mapping[str, Any] | None = None,
        weight_limit: float | None = None,
    ) -> None:
        super().__init__()
        # FLARE writes a job's components to a file by the attributes that have the names of their arguments.
        self.weighting, self.target, self.parameters, self.weight_limit = weighting, target, parameters, weight_limit
        self._weighting: Weighting = make_component(INDEX, {"name": weighting, **(parameters or {})}, "weighting")
        if has(self._weighting, "keeps_state"):
            raise ConfigError(f"weighting: {weighting} keeps something between rounds; take one that weighs by counts")
        if has(self._weighting, "needs_target") and target is None:
            raise ConfigError(
                f"target: {weighting} weighs clients towards a target label mix; give one share per class"
            )
        if weight_limit is not None and not 0 < weight_limit <= 1:
            raise ConfigError(f"weight_limit: expected a share above 0 and at most 1, got {weight_limit!r}")
        self._replies: dict[str, _Reply] = {}

    def reset_stats(self) -> None:
        """Forget the models of the last round."""
        self._replies = {}

    def accept_model(self, model: FLModel) -> None:
        """Take the model of one client, or leave it out and say why.

        Args:
            model: The model, with label counts in its `meta`.
        """
        name = client_name(model, str(len(self._replies)))
        try:
            self._replies[name] = _Reply(model, self._checked(model))
        except ArgumentError as error:
            self.warning(f"left out the model of {name}: {error}")

    def aggregate_model(self) -> FLModel:
        """Return the weighted mean of the models, and forget them.

        Raises:
            ArgumentError: None was accepted.
        """
        if not self._replies:
            raise ArgumentError(f"no client sent a model with its label counts; add meta={{{COUNTS!r}: counts}} to it")
        names = sorted(self._replies)
        replies = [self._replies[name] for name in names]
        weights = self._weigh(np.stack([reply.counts for reply in replies]))
        models = [reply.model for reply in replies]
        self.reset_stats()
        return FLModel(
            params_type=models[0].params_type,
            params={key: _mean([model.params[key] for model in models], weights) for key in models[0].params},
            metrics=_metrics([model.metrics for model in models], weights),
            meta={"weights": dict(zip(names, weights.tolist(), strict=True))},
        )

    def _weigh(self, counts: FloatArray) -> FloatArray:
        sizes = counts.sum(axis=1)
        target = None if self.target is None else as_target(self.target, counts.shape[1])
        given = Answered(counts, sizes, target, np.arange(len(counts)), limit=self.weight_limit)
        weights = self._weighting.weigh(given)
        return weights if self.weight_limit is None else limited(weights, self.weight_limit, sizes)

    def _checked(self, model: FLModel) -> FloatArray:
        """Return the label counts of a model; ArgumentError if it can't be used."""
        row = label_counts(model)
        for reply in self._replies.values():
            if row.shape != reply.counts.shape:
                raise ArgumentError(f"{COUNTS}: {len(row)} classes, and another client's are of {len(reply.counts)}")
            if _shapes(model) != _shapes(reply.model):
                raise ArgumentError("its arrays have other names or shapes than another client's")
        for key, value in model.params.items():
            if not np.isfinite(_array(value)).all():
                raise ArgumentError(f"{key} is not finite")
        return row


def _shapes(model: FLModel) -> dict[str, tuple[int, ...]]:
    return {key: tuple(np.shape(value)) for key, value in model.params.items()}


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _mean(values: Sequence[Any], weights: FloatArray) -> Any:
    """Return the weighted mean, of the type of the first; of whole numbers, the largest."""
    arrays = [_array(value) for value in values]
    if arrays[0].dtype.kind in "iub":
        found = np.max(arrays, axis=0)
    else:
        found = sum(weight * array.astype(np.float64) for weight, array in zip(weights, arrays, strict=True))
    found = np.asarray(found).astype(arrays[0].dtype)
    if not hasattr(values[0], "detach"):
        return found
    import torch

    return torch.from_numpy(found).to(values[0].device)


def _metrics(metrics: Sequence[Mapping[str, Any] | None], weights: FloatArray) -> dict[str, float] | None:
    """Return the weighted mean of each metric that every client has."""
    shared = [one for one in metrics if one]
    if len(shared) < len(metrics):
        return None
    keys = [key for key in shared[0] if all(isinstance(one.get(key), int | float) for one in shared)]
    return {key: float(weights @ [one[key] for one in shared]) for key in keys}
