"""Adapters by peft: a few parameters beside a network's own, which stay as they are. It needs the extra `peft`."""

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedskew.errors import ArgumentError, in_one_line, nearest, optional

_ALSO = {"rank": "r", "targets": "target_modules"}
"""Names of arguments that mean the same as peft's own."""


def with_adapters(module: nn.Module, wanted: Mapping[str, Any], seed: int) -> nn.Module:
    """Return a network with adapters of a `kind` of peft's, drawn by a seed; nothing else is trained.

    The other keys are that kind's arguments, by peft's names, or `rank` and `targets`. ArgumentError where there is no
    such kind or argument, or it fits no layer; MissingPackageError without peft.
    """
    peft = _peft()
    kinds = {str(getattr(kind, "value", kind)).lower(): made for kind, made in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = str(wanted.get("kind"))
    if kind not in kinds:
        said = f"peft has none {kind!r}" if "kind" in wanted else "missing"
        raise ArgumentError(f"adapters.kind: {said}{nearest(kind, kinds)}")
    known = {field.name for field in dataclasses.fields(kinds[kind]) if field.init}
    given = {name: value for name, value in wanted.items() if name != "kind"}
    for name in given:
        if name not in known | _ALSO.keys():
            raise ArgumentError(f"adapters.{name}: {kind} has no such argument{nearest(name, known | _ALSO.keys())}")
    own = {_ALSO.get(name, name) if name not in known else name: value for name, value in given.items()}
    if hasattr(module, "config") and "task_type" in known:  # of transformers: its new last layer is trained too
        own = {"task_type": "SEQ_CLS"} | own
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            made = peft.get_peft_model(module, kinds[kind](**own))
    except Exception as error:  # peft raises all kinds
        raise ArgumentError(f"adapters: peft can't make {kind} for this network: {in_one_line(error)}") from None
    assert isinstance(made, nn.Module), "as peft makes them"
    return made.train(module.training)


def merged(network: nn.Module) -> nn.Module:
    """Return a copy of a network with its adapters added to its own weights; as it is where there are none."""
    made = copy.deepcopy(network)
    for parent, name, child in _adapted(made):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = child.merge_and_unload() if hasattr(child.base_model, "merge_and_unload") else child
        if parent is None:
            made = plain
        else:
            setattr(parent, name, plain)
    return made


def save_adapters(network: nn.Module, folder: Path) -> None:
    """Write a network's adapters to a folder as peft does; ArgumentError where it has none."""
    found = _adapted(network)
    if not found:
        raise ArgumentError("kind: this network has no adapters (model.adapters)")
    for _, _, child in found:
        child.save_pretrained(str(folder))


def _adapted(network: nn.Module) -> list[tuple[nn.Module | None, str, Any]]:
    """Return the networks with adapters inside a network, and where each is; None: it is one itself."""
    whole = [
        (None, "", network),
        *((layer, name, one) for layer in network.modules() for name, one in layer._modules.items()),
    ]
    if not any(type(one).__module__.startswith("peft.") for _, _, one in whole):
        return []
    kind = _peft().PeftModel
    return [(parent, name, one) for parent, name, one in whole if isinstance(one, kind)]


def _peft() -> Any:
    return optional("peft", "adapters need peft: pip install 'fedskew[peft]'")
