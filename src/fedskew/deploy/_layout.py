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

from fedskew.deploy._arrays import Form, encode, forms
from fedskew.models import FlatModel, ModelState

AnyArray = NDArray[np.generic]


class Layout(Protocol):
    """Which arrays a model is made of, and where each lies in the flat vectors."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """Shape and dtype of every array, by name."""

    def record(self, state: ModelState) -> ArrayRecord:
        """The model's arrays, to be sent."""

    def flat(self, arrays: Mapping[str, AnyArray], out: Tensor | None = None) -> ModelState:
        """The model that these arrays are; they have the layout's names, shapes and dtypes.

        `out`: memory for its parameters, `(parameters,)` float32 on the CPU; None: their own.
        """


class ModelLayout:
    """The state dict of a network: its trainable parameters, its buffers, and what is frozen in it.

    Frozen parameters travel, since a state dict has them, but what comes back of them is not used.
    """

    def __init__(self, model: FlatModel) -> None:
        self._model = FlatModel(copy.deepcopy(model.module).cpu())
        state = self._model.state_dict()
        self.forms: Mapping[str, Form] = forms(state)
        buffers = {name: buffer for name, buffer in self._model.module.named_buffers() if name in state}
        self._buffers = [name for name, buffer in buffers.items() if buffer.is_floating_point()]
        self._integers = list(self._model.integer_buffers)

    def record(self, state: ModelState) -> ArrayRecord:
        """See `Layout.record`."""
        self._model.write_state(ModelState(*(part.cpu() for part in state)))
        return encode(self._model.state_dict())

    def flat(self, arrays: Mapping[str, AnyArray], out: Tensor | None = None) -> ModelState:
        """See `Layout.flat`."""
        vector = torch.empty_like(self._model.vector) if out is None else out
        for name, view in self._model.views(vector).items():
            np.copyto(view.numpy(), arrays[name])
        return ModelState(
            vector,
            _joined([arrays[name] for name in self._buffers], np.float32),
            _joined([arrays[name] for name in self._integers], np.int64),
        )


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

    def flat(self, arrays: Mapping[str, AnyArray], out: Tensor | None = None) -> ModelState:
        """See `Layout.flat`."""
        return ModelState(
            _joined([arrays[name] for name in self._floats], np.float32, out),
            torch.zeros(0),
            _joined([arrays[name] for name in self._integers], np.int64),
        )


def _lay_out(forms: Mapping[str, Form]) -> dict[str, _Part]:
    parts, start = {}, 0
    for name, form in forms.items():
        parts[name] = _Part(start, start + form.size)
        start += form.size
    return parts


def _joined(arrays: list[AnyArray], dtype: type[np.generic], out: Tensor | None = None) -> Tensor:
    joined = np.empty(sum(array.size for array in arrays), dtype) if out is None else out.numpy()
    np.concatenate([joined[:0], *(array.reshape(-1) for array in arrays)], out=joined)
    return torch.from_numpy(joined)
