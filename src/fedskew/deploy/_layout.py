"""A model's named arrays, which travel, and the flat vectors that the engine computes with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from fedskew.deploy._arrays import Form, encode
from fedskew.models import FlatModel, ModelState

AnyArray = NDArray[np.generic]


class Layout(Protocol):
    """Which arrays a model is made of, and where each lies in the flat vectors."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """Shape and dtype of every array, by name."""

    def record(self, state: ModelState) -> ArrayRecord:
        """The model's arrays, to be sent."""

    def flat(self, arrays: Mapping[str, AnyArray]) -> ModelState:
        """The model that these arrays are; they have the layout's names, shapes and dtypes."""


class ModelLayout:
    """The state dict of a network: its trainable parameters, its buffers, and what is frozen in it.

    Frozen parameters travel, since a state dict has them, but what comes back of them is not used.
    """

    def __init__(self, model: FlatModel) -> None:
        self._model = FlatModel(copy.deepcopy(model.module).cpu())
        self.forms: Mapping[str, Form] = {
            name: Form(tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in self._model.state_dict().items()
        }

    def record(self, state: ModelState) -> ArrayRecord:
        """See `Layout.record`."""
        self._model.write_state(ModelState(*(part.cpu() for part in state)))
        return encode(self._model.state_dict())

    def flat(self, arrays: Mapping[str, AnyArray]) -> ModelState:
        """See `Layout.flat`."""
        self._model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
        return self._model.read_state()


class _Part(NamedTuple):
    """Where one array lies in the vector of its kind."""

    start: int
    end: int


class ArraysLayout:
    """Arrays of a model that is not known here: every floating-point array counts as parameters, in float32.

    So a server update that extrapolates, or normalises, acts on batch norm's statistics too; give `strategy` the model
    where that matters.
    """

    def __init__(self, arrays: ArrayRecord) -> None:
        self.forms: Mapping[str, Form] = {name: Form(tuple(array.shape), array.dtype) for name, array in arrays.items()}
        self._floats = _lay_out({name: form for name, form in self.forms.items() if form.is_float})
        self._integers = _lay_out({name: form for name, form in self.forms.items() if not form.is_float})

    def record(self, state: ModelState) -> ArrayRecord:
        """See `Layout.record`."""
        arrays: dict[str, Array] = {}
        for name, form in self.forms.items():
            vector, part = (
                (state.parameters, self._floats[name]) if form.is_float else (state.integers, self._integers[name])
            )
            values = vector[part.start : part.end].cpu().numpy().astype(form.dtype).reshape(form.shape)
            arrays[name] = Array(values)
        return ArrayRecord(arrays)

    def flat(self, arrays: Mapping[str, AnyArray]) -> ModelState:
        """See `Layout.flat`."""
        return ModelState(
            _joined([arrays[name] for name in self._floats], torch.float32),
            torch.zeros(0),
            _joined([arrays[name] for name in self._integers], torch.int64),
        )


def _lay_out(forms: Mapping[str, Form]) -> dict[str, _Part]:
    parts, start = {}, 0
    for name, form in forms.items():
        parts[name] = _Part(start, start + form.size)
        start += form.size
    return parts


def _joined(arrays: list[AnyArray], dtype: torch.dtype) -> Tensor:
    flat = [torch.from_numpy(array).reshape(-1).to(dtype) for array in arrays]
    return torch.cat([torch.zeros(0, dtype=dtype), *flat])
