"""What labels, sizes and network tell of a run before its first round: notes, and batches that can't be trained on."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedskew import components, methods
from fedskew.errors import ConfigError
from fedskew.experiment._config import Config
from fedskew.experiment._sections import TrainingSection
from fedskew.labels import ClassPairs, SkewReport
from fedskew.methods import Method, key_of
from fedskew.weighting import BySums

_BatchNorm = nn.modules.batchnorm._BatchNorm


def refuses_one(module: nn.Module, sample: Tensor) -> bool:
    """Return whether a network can't be trained on `(1, *in_shape)`, as batch norm then sees one value a channel."""
    if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        return False
    tried = copy.deepcopy(module).cpu().eval()
    for layer in tried.modules():
        if isinstance(layer, _BatchNorm):
            layer.train()
    try:
        with torch.no_grad():
            tried(sample.cpu())
    except ValueError as error:
        return "more than 1 value per channel" in str(error)
    return False


def check_batches(config: Config, names: Sequence[str], sizes: NDArray[np.int64]) -> None:
    """Raise ConfigError where a client has a batch of one sample, for a network that can't be trained on it.

    `names` and `sizes` are of the clients that train.
    """
    training = config.training
    if components.has(methods.build(config.method, training.momentum).selection, "assigns_quotas"):
        return  # a client's samples differ from round to round
    found = [name for name, size in zip(names, sizes.tolist(), strict=True) if _has_batch_of_one(training, size)]
    if not found:
        return
    who = f"client {found[0]} has" if len(found) == 1 else f"{len(found)} clients, such as {found[0]}, have"
    cure = (
        "set training.batch_size to 2 or more"
        if training.batch_size == 1
        else "set training.smallest_batch = 2, which leaves it out, or another batch_size"
    )
    raise ConfigError(
        f"training.smallest_batch: {who} a batch of one sample, on which the batch norm of {config.model.name} can't "
        f"be trained; {cure}"
    )


def _has_batch_of_one(training: TrainingSection, size: int) -> bool:
    batches = math.ceil(size / training.batch_size)
    if training.batch_size == 1:
        return size > 0 and training.epochs > 0
    steps = math.ceil(training.epochs * batches - 1e-9) if training.steps is None else training.steps
    reached = 0 < batches <= steps
    return reached and training.smallest_batch == 1 and size % training.batch_size == 1


def label_notes(
    method: Method,
    counts: NDArray[np.float64],
    class_names: tuple[str, ...],
    target: NDArray[np.float64] | None,
    test: NDArray[np.int64],
) -> tuple[str, ...]:
    """Say what can't be learnt from these labels, whatever the training, or not by this method.

    Args:
        method: The method.
        counts: Label counts of the clients that train, shape `(clients, classes)`.
        class_names: Names of the classes.
        target: Target label mix, shape `(classes,)`; None: there is none.
        test: Label counts of the test part, which counts where there is no target, shape `(classes,)`.
    """
    notes = []
    if target is not None:
        notes.append(SkewReport.unheld_in_words(counts, target, class_names))
    elif test.any():
        notes.append(SkewReport.unheld_in_words(counts, test, class_names, "test part"))
    if len(held := np.flatnonzero(counts.any(axis=0))) == 1:
        notes.append(
            f"All samples of the clients are of class {class_names[held[0]]}: there is nothing to tell apart, and an "
            "accuracy says nothing of the method."
        )
    relying = [
        key_of(slot, component).partition(".")[2]
        for slot, component in method.components()
        if components.has(component, "needs_colocation")
    ]
    if relying and len(counts) > 1 and (found := ClassPairs.of(counts).in_words(class_names)):
        notes.append(
            f"{relying[0]} tells two classes apart only where some client holds both. Here {found}. Expect these to be "
            "confused with each other; cross_entropy and fedrs don't rely on it."
        )
    return tuple(filter(None, notes))


def network_notes(method: Method, network: nn.Module) -> tuple[str, ...]:
    """Say which terms of an objective do nothing with this network, because no layer before its last one is trained."""
    head = getattr(network, "head", None)
    if method.pipeline is not None or not isinstance(head, nn.Linear):
        return ()
    last = {id(parameter) for parameter in head.parameters()}
    if any(parameter.requires_grad and id(parameter) not in last for parameter in network.parameters()):
        return ()
    return tuple(
        f"{key_of('objective', term).partition('.')[2]} acts on the features before the last layer, and "
        f"{type(network).__name__} trains no layer before that: the term changes nothing. Take another model, or leave "
        "it out."
        for _, term in method.objective.terms
        if components.has(term, "shapes_features")
    )


def sums_notes(config: Config, method: Method) -> tuple[str, ...]:
    """Say where sums of exact label counts would tell one client's, so that real sites refuse them."""
    weighting = method.weighting
    if config.engine.label_counts == "reported" or config.conditions.count_epsilon is not None:
        return ()
    if not isinstance(weighting, BySums) or weighting.reveals is None:
        return ()
    name = key_of("weighting", weighting).partition(".")[2]
    return (
        f"{name} from sums of exact label counts is for simulations: {weighting.reveals}. Real sites add noise "
        "to their counts first: conditions.count_epsilon here, deploy init --label-counts summed --epsilon there.",
    )
