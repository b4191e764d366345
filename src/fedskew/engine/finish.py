"""The finish of a method: questions to all holders of samples, and another last layer for the trained model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.engine._backend import ClientSamples, tensor_bytes
from fedskew.engine._records import BATCH
from fedskew.engine.contracts import calling, checked_finished, checked_sums, name_in, tensors
from fedskew.errors import ArgumentError, FinishError, RunError, placed
from fedskew.finish import Finish, Head, Known, Observed, Source
from fedskew.models import FlatModel, ModelState, last_layer, with_features

AskHolders = Callable[[Source, Mapping[str, Tensor]], Iterable[Mapping[str, Tensor]]]
"""Asks all holders of some samples a question, and yields their answers in order; each is added up as it comes."""


@dataclass(frozen=True)
class FinishedModel:
    """What a finish made of a trained model; bytes of questions (each with the model) and of answers."""

    state: ModelState
    notes: dict[str, Any]
    clients: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@torch.no_grad()
def answer(
    component: Finish, module: nn.Module, samples: ClientSamples, question: Mapping[str, Tensor], labelled: bool = True
) -> dict[str, Tensor]:
    """Answer a question of a finish at one holder of samples; leaves the network in eval mode."""
    rows = torch.from_numpy(samples.rows).to(samples.targets.device)
    network, device = with_features(module.eval()), next(module.parameters()).device
    parts = [network(samples.inputs.index_select(0, some).to(device)) for some in torch.split(rows, BATCH)]
    observed = Observed(
        torch.cat([part.features for part in parts]),
        torch.cat([part.logits for part in parts]),
        samples.targets[rows].to(device) if labelled else None,
    )
    with calling("finish", component, "statistics"):
        return tensors("finish", component, "statistics", component.statistics(question, observed))


def check_finish(component: Finish, module: nn.Module, samples: Tensor, known: Known) -> nn.Linear:
    """Return the last layer that a finish replaces; ArgumentError where there is none, or the run lacks something."""
    if (lacking := component.lacks(known)) is not None:
        raise ArgumentError(f"method.{name_in('finish', component).replace(' ', ': ')} {lacking}")
    try:
        layer = last_layer(module, samples.to(next(module.parameters()).device))
    except ArgumentError as error:
        raise ArgumentError(
            f"method.finish: it makes another last layer, and {str(error).removeprefix('model: ')}; end the network "
            "with a linear layer that has one, or take no finish"
        ) from None
    if not (layer.weight.requires_grad and layer.bias.requires_grad):
        raise ArgumentError("method.finish: it makes another last layer, and that of this network is not trained")
    return layer


def finish_model(
    component: Finish, model: FlatModel, state: ModelState, samples: Tensor, answers: AskHolders, known: Known
) -> FinishedModel:
    """Finish a trained model; `samples`, `(batch, ...)`, show its last layer. FinishError where network or answers
    don't allow it, ComponentError for a user's own that has a mistake, RunError where no holder answers."""
    model.write_state(state)
    with placed("", FinishError):
        layer = check_finish(component, model.module, samples, known)
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    head = Head(layer.weight.detach().double().cpu(), layer.bias.detach().double().cpu())
    answered: list[list[int]] = []  # bytes of every holder's answer to each question
    bytes_down = 0

    def weighed(source: Source, question: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        nonlocal bytes_down
        answered.append([])
        for given in answers(source, question):
            answered[-1].append(tensor_bytes(given))
            bytes_down += tensor_bytes(state._asdict()) + tensor_bytes(question)
            with calling("finish", component, "summand"):
                summand = component.summand(question, given)
            yield summand

    def ask(source: Source, **question: Tensor) -> dict[str, Tensor]:
        if source not in known.sources:
            raise ArgumentError(f"there are no samples ({source}) to ask for")
        given = weighed(source, question)
        if (first := next(given, None)) is None:  # of sites, which may answer when the run is started again
            name = type(component).__name__
            raise RunError(f"method.finish: {name}: there are no samples ({source}) to ask for; nobody answers")
        return checked_sums(component, chain([first], given))

    named = f"method.finish: {type(component).__name__}: "
    with placed(named, FinishError), calling("finish", component, "finish"):
        finished = checked_finished(component, component.finish(head, ask, known), head)
    parameters = state.parameters.clone()
    views = model.views(parameters)
    with torch.no_grad():
        for old, new in zip((layer.weight, layer.bias), finished.head, strict=True):
            views[names[id(old)]].copy_(new)
    return FinishedModel(
        state._replace(parameters=parameters),
        dict(finished.notes),
        clients=max(map(len, answered), default=0),
        bytes_up=sum(map(sum, answered)),
        bytes_down=bytes_down,
    )
