"""A model's named arrays and its flat vectors are the same model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from fedskew.deploy import ArraysLayout, ModelLayout, decode
from fedskew.models import FlatModel, ModelState


def network() -> nn.Module:
    """Convolutions (whose vector is not in canonical order), batch norm (floats and a counter), and a frozen layer."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    module[3].weight.requires_grad_(False)
    return module


def test_a_model_comes_back_as_it_was_sent() -> None:
    model = FlatModel(network())
    layout = ModelLayout(model)
    before = model.read_state()
    state = ModelState(
        torch.randn_like(before.parameters), torch.rand_like(before.buffers), torch.full_like(before.integers, 7)
    )
    back = layout.to_state(decode(layout.to_record(state), layout.specs, "array"))
    for sent, came in zip(state, back, strict=True):
        assert torch.equal(sent, came)
    model.write_state(state)
    for name, values in model.state_dict().items():
        np.testing.assert_array_equal(layout.to_record(state)[name].numpy(), values.numpy())


def test_what_comes_back_of_a_frozen_layer_is_not_used() -> None:
    model = FlatModel(network())
    layout = ModelLayout(model)
    record = layout.to_record(model.read_state())
    record["3.weight"] = Array(np.full((2, 16), 99.0, np.float32))
    layout.to_state(decode(record, layout.specs, "array"))
    assert layout.to_record(model.read_state())["3.weight"].numpy().max() < 99


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_arrays_of_an_unknown_model_keep_their_shapes_and_dtypes(dtype: str) -> None:
    record = ArrayRecord({"w": Array(np.arange(6, dtype=dtype).reshape(2, 3)), "n": Array(np.array(5, dtype=np.int64))})
    layout = ArraysLayout(record)
    state = layout.to_state(decode(record, layout.specs, "array"))
    assert state.parameters.tolist() == [0, 1, 2, 3, 4, 5]
    assert state.integers.tolist() == [5]
    back = layout.to_record(state)
    assert back["w"].dtype == dtype
    np.testing.assert_array_equal(back["w"].numpy(), record["w"].numpy())
    assert back["n"].numpy() == 5
