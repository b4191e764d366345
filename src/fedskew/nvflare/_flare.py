"""A weighting of ours as an aggregator of NVIDIA FLARE, and a selection in its FedAvg workflow."""

import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.workflows.fedavg import FedAvg

from fedskew import selection as selections
from fedskew import weighting as weightings
from fedskew.components import has, make_component
from fedskew.errors import ArgumentError, ConfigError, RunError
from fedskew.labels import LabelCounts, as_counts, as_target
from fedskew.mixing import limited
from fedskew.randomness import Purpose, generator
from fedskew.selection import Selection
from fedskew.weighting import Answered, Weighting

FloatArray = NDArray[np.float64]

COUNTS = "label_counts"
"""Key of label counts in a model's `meta`, and the task in which a workflow asks for them."""
MOST_SAMPLES = 1e9  # of a client, of one class


def _name(model: FLModel, default: int) -> str:
    return str((model.meta or {}).get("client_name", default))


def _label_counts(model: FLModel) -> FloatArray:
    """Return the label counts that a client sent, shape `(classes,)`; ArgumentError if it sent none, or no counts."""
    counts: Any = (model.meta or {}).get(COUNTS)
    if counts is None:
        raise ArgumentError(f"it has no {COUNTS}; the client adds meta={{{COUNTS!r}: counts}} to it")
    row: FloatArray = as_counts([counts], COUNTS)[0]
    if row.max() > MOST_SAMPLES:
        raise ArgumentError(f"{COUNTS}: has {row.max():g} of a class; {MOST_SAMPLES:g} samples at most")
    return row


def _unlike(forms: Mapping[str, Hashable]) -> list[str]:
    # of several as frequent forms, that of the first client
    usual = Counter(forms.values()).most_common(1)
    return [name for name, form in forms.items() if form != usual[0][0]]


class WeightingAggregator(ModelAggregator):  # type: ignore[misc]  # FLARE comes without types
    """Aggregates models by a weighting of fedskew, from the label counts that clients send with them.

    Works for whole models and for differences, of numpy arrays or PyTorch tensors. Whole numbers, such as batch norm's
    counters, are the largest of the clients'. A model without label counts, with values that are not finite, or unlike
    most (arrays, types; of a tie, the first) is left out, as the log says. `meta["weights"]` has the result's weights.

    Args:
        weighting: A weighting's name (`fedskew methods`), such as "fedla", or `module:Class` of your own.
        target: Target label mix, one share for each class, for weightings that need it.
        parameters: The weighting's parameters, such as `{"ess": 0.5}`.
        weight_limit: Upper limit on a client's weight, from above 0 to 1; None: no limit.

    Raises:
        ConfigError: The weighting is unknown, needs a target and has none, or keeps something between rounds (AFL).
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
        self._rule: Weighting = make_component(weightings.INDEX, {"name": weighting, **(parameters or {})}, "weighting")
        if has(self._rule, "keeps_state"):
            raise ConfigError(f"weighting: {weighting} keeps something between rounds; take one that weighs by counts")
        if has(self._rule, "needs_target") and target is None:
            raise ConfigError(f"target: {weighting} weighs clients towards a target label mix; give its shares")
        if weight_limit is not None and not 0 < weight_limit <= 1:
            raise ConfigError(f"weight_limit: expected a share above 0 and at most 1, got {weight_limit!r}")
        self.reset_stats()

    def reset_stats(self) -> None:
        """Forget the models of the last round."""
        self._models: dict[str, Any] = {}
        self._counts: dict[str, FloatArray] = {}

    def accept_model(self, model: FLModel) -> None:
        """Take the model of one client, or leave it out and say why."""
        name = _name(model, len(self._models))
        try:
            self._counts[name] = _check(model)
            self._models[name] = model
        except (ArgumentError, TypeError, ValueError) as error:  # of a list that is no array, too
            self.warning(f"left out the model of {name}: {error}")

    def aggregate_model(self) -> FLModel:
        """Return the weighted mean of the models, and forget them; ArgumentError if none was accepted."""
        if not self._models:
            raise ArgumentError(f"no client sent a model with its label counts; add meta={{{COUNTS!r}: counts}} to it")
        forms = {name: (len(self._counts[name]), _form(model)) for name, model in self._models.items()}
        for name in _unlike(forms):
            self.warning(f"left out the model of {name}: its classes or arrays are not the most frequent ones")
            del self._models[name]
        names = sorted(self._models)
        models, counts = [self._models[name] for name in names], np.stack([self._counts[name] for name in names])
        sizes, limit = counts.sum(axis=1), self.weight_limit
        target = None if self.target is None else as_target(self.target, counts.shape[1])
        weights = self._rule.weigh(Answered(counts, sizes, target, np.arange(len(counts)), limit=limit))
        weights = weights if limit is None else limited(weights, limit, sizes)
        self.reset_stats()
        return FLModel(
            params_type=models[0].params_type,
            params={key: _mean([model.params[key] for model in models], weights) for key in models[0].params},
            metrics=_metrics([model.metrics for model in models], weights),
            meta={"weights": dict(zip(names, weights.tolist(), strict=True))},
        )


class SelectingFedAvg(FedAvg):  # type: ignore[misc]  # FLARE comes without types
    """FLARE's FedAvg, whose sites of a round are chosen by a selection of fedskew instead of at random.

    A site that sends no label counts before the first round is left out of the job, which the log says. Sites are
    ordered by their names, so that a job chooses what a simulation of the same clients and seed does. A site that is
    offline when it is chosen misses the round, and one that connects later takes part in the next job.

    Args:
        args: As in FLARE's FedAvg.
        selection: A selection's name (`fedskew methods`), such as "fedentopt", or `module:Class` of your own.
        parameters: Its parameters, such as `{"buffer": 0.3}`.
        seed: Seed of the selection.
        query_timeout: Seconds to wait for label counts.
        kwargs: As in FLARE's FedAvg; `num_clients` is the number of sites in a round.

    Raises:
        ConfigError: The selection is unknown, or says on how many samples a site trains (SeolKim).
    """

    def __init__(
        self,
        *args: Any,
        selection: str = "fedentopt",
        parameters: Mapping[str, Any] | None = None,
        seed: int = 0,
        query_timeout: int = 600,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # FLARE writes a job's components to a file by the attributes that have the names of their arguments, those of
        # the class that this one inherits from too, as long as both `args` and `kwargs` are there.
        self.selection, self.parameters, self.seed, self.query_timeout = selection, parameters, seed, query_timeout
        self._rule: Selection = make_component(selections.INDEX, {"name": selection, **(parameters or {})}, "selection")
        if has(self._rule, "assigns_quotas"):
            raise ConfigError(
                f"selection: {selection} says on how many samples of each class a site trains, and FLARE's clients "
                "are not told; take fedentopt"
            )
        if has(self._rule, "needs_target"):
            raise ConfigError(f"selection: {selection} needs a target label mix, which is given to weightings alone")
        self._sites: list[str] = []
        self._selection_state: Any = None

    def run(self) -> None:
        """Ask for label counts, then play FLARE's rounds; called by FLARE."""
        question = FLModel(params={}, meta={})
        self._begin(self.send_model_and_wait(task_name=COUNTS, data=question, timeout=self.query_timeout))
        super().run()

    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        """Choose the sites of a round; called by FLARE. RunError: all that were chosen are offline."""
        round, size = self.current_round + 1, num_clients or len(self._sites)
        rng = generator(self.seed, Purpose.SELECTION, round)
        ids, self._selection_state = self._rule.select(self._selection_state, self._counts, size, rng)
        online = {client.name for client in self.engine.get_clients()}
        chosen = [self._sites[place] for place in np.asarray(ids).tolist()]
        if away := sorted({*chosen} - online):
            self.warning(f"round {round}: chosen and offline: {', '.join(away)}")
        if not online & {*chosen}:
            raise RunError(f"round {round}: all sites that were chosen are offline: {', '.join(chosen)}")
        self.info(f"round {round}: {self.selection} chose {', '.join(chosen)}")
        return [name for name in chosen if name in online]

    def _begin(self, replies: list[FLModel]) -> None:
        """Take the sites' label counts; ArgumentError where no cohort can be chosen of those that sent some."""
        counts: dict[str, FloatArray] = {}
        for place, reply in enumerate(replies):
            name = _name(reply, place)
            try:
                counts[name] = _label_counts(reply)
            except ArgumentError as error:
                self.warning(f"left out {name}: {error}")
        for name in _unlike({name: len(row) for name, row in counts.items()}):
            self.warning(f"left out {name}: {COUNTS}: {len(counts.pop(name))} classes, unlike most")
        if not counts:
            raise ArgumentError(
                f"no site sent its label counts; in the task {COUNTS!r} a client sends "
                f"FLModel(params={{}}, meta={{{COUNTS!r}: counts}})"
            )
        self._sites = sorted(counts)
        self._counts = LabelCounts(np.stack([counts[name] for name in self._sites]))
        if (check := getattr(self._rule, "check", None)) is not None:  # a user's own selection may have none
            check(self._counts, self.num_clients or len(self._sites))
        self._selection_state = self._rule.init(self._counts)


def _check(model: FLModel) -> FloatArray:
    """Return the label counts of a model; ArgumentError if it can't be used."""
    if not model.params:
        raise ArgumentError("it has no arrays")
    for key, value in model.params.items():
        array = _array(value)
        if array.dtype.kind not in "iubf" or not np.isfinite(array).all():
            raise ArgumentError(f"{key} has a value that is no finite number")
    return _label_counts(model)


def _form(model: FLModel) -> Hashable:
    arrays = {key: _array(value) for key, value in model.params.items()}
    return model.params_type, frozenset((key, array.shape, array.dtype) for key, array in arrays.items())


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _mean(values: Sequence[Any], weights: FloatArray) -> Any:
    """Return the weighted mean, of the type of the first; of whole numbers, the largest."""
    arrays = [_array(value) for value in values]
    whole = arrays[0].dtype.kind in "iub"
    mean = np.max(arrays, axis=0) if whole else np.tensordot(weights, np.asarray(arrays, dtype=np.float64), axes=1)
    mean = np.asarray(mean).astype(arrays[0].dtype)
    if not hasattr(values[0], "detach"):
        return mean
    import torch

    return torch.from_numpy(mean).to(values[0].device)


def _metrics(metrics: Sequence[Mapping[str, Any] | None], weights: FloatArray) -> dict[str, float] | None:
    """Return the weighted mean of each metric of which half of the clients or more report a finite number."""
    found = {}
    for key in {key: None for one in metrics for key in one or ()}:
        told = [(w, own) for w, one in zip(weights, metrics, strict=True) if _is_finite(own := (one or {}).get(key))]
        if (whole := sum(weight for weight, _ in told)) > 0 and 2 * len(told) >= len(metrics):
            found[key] = float(sum(weight / whole * value for weight, value in told))
    return found or None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
