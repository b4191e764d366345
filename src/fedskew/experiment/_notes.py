"""Notes on how a run's labels suit its method, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedskew.components import has
from fedskew.experiment._config import Config
from fedskew.labels import ClassPairs, unheld_in_words
from fedskew.methods import Method, key_of
from fedskew.weighting import BySums


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

    Returns:
        Sentences; none where nothing is to be said.
    """
    notes = []
    if target is not None:
        notes.append(unheld_in_words(counts, target, class_names))
    elif test.any():
        notes.append(unheld_in_words(counts, test, class_names, "test part"))
    if len(held := np.flatnonzero(counts.any(axis=0))) == 1:
        notes.append(
            f"All samples of the clients are of class {class_names[held[0]]}: there is nothing to tell apart, and an "
            "accuracy says nothing of the method."
        )
    relying = [
        key_of(slot, component).partition(".")[2]
        for slot, component in method.components()
        if has(component, "needs_colocation")
    ]
    if relying and len(counts) > 1 and (found := ClassPairs.of(counts).in_words(class_names)):
        notes.append(
            f"{relying[0]} tells two classes apart only where some client holds both. Here {found}. Expect these to be "
            "confused with each other; cross_entropy and fedrs don't rely on it."
        )
    return tuple(filter(None, notes))


def network_notes(method: Method, network: nn.Module) -> tuple[str, ...]:
    """Say which terms of an objective do nothing with this network, because no layer before its last one is trained.

    Args:
        method: The method.
        network: The network as the method adapts it.

    Returns:
        Sentences; none where nothing is to be said.
    """
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
        if has(term, "shapes_features")
    )


def sums_notes(config: Config, method: Method) -> tuple[str, ...]:
    """Say where sums of exact label counts would tell one client's, so that real sites refuse them.

    Args:
        config: The config.
        method: Its method.

    Returns:
        Sentences; none where nothing is to be said.
    """
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


def notes_of(folder: Path, seed: int) -> list[str]:
    """Return the notes of a seed's run, from its run folder.

    Args:
        folder: The run folder, of one seed or several.
        seed: The seed.
    """
    places = [folder / "task.json", *sorted((folder / f"seed-{seed}").rglob("task.json"))]
    for path in places:
        if path.exists():
            return list(json.loads(path.read_text(encoding="utf-8")).get("notes", []))
    return []
