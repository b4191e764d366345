"""What a frozen body makes of samples: computed once, by group, whoever asks."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common import largest_file
from fedskew.data.features import Features
from fedskew.errors import RunError

INPUTS = torch.arange(20.0).view(10, 2)


class Body(nn.Module):
    """Doubles, and adds the size of the batch; counts the samples that pass it."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passed += len(x)
        return 2 * x + len(x)


def made() -> tuple[Features, Body]:
    body = Body()
    features = Features(INPUTS, body, [np.array([7, 1]), np.array([2])])
    body.passed = 0  # one sample told the shape
    return features, body


def test_a_group_is_computed_once_in_its_own_batch() -> None:
    features, body = made()
    assert features.shape == (10, 2)
    assert len(features) == 10
    assert torch.equal(features.index_select(0, torch.tensor([1])), 2 * INPUTS[[1]] + 2)
    assert body.passed == 2
    expected = 2 * INPUTS[[7, 2, 1]] + torch.tensor([[2], [1], [2]])
    assert torch.equal(features.index_select(0, torch.tensor([7, 2, 1])), expected)
    assert body.passed == 3
    assert torch.equal(features.index_select(0, torch.tensor([0, 9])), 2 * INPUTS[[0, 9]] + 7)  # of no group
    assert body.passed == 10


def test_on_a_full_disk_they_are_refused_in_one_line_before_anything_is_computed(tmp_path: Path) -> None:
    with largest_file(10_000), pytest.raises(RunError, match="values.npy: can't be written: "):
        Features(torch.zeros(10_000, 2), nn.Linear(2, 8), [], tmp_path)
    assert not tmp_path.exists()
    Features(torch.zeros(10_000, 2), nn.Linear(2, 8), [], tmp_path)
    assert (tmp_path / "values.npy").stat().st_blocks * 512 >= 320_000  # else writing ends in a bus error


def test_a_copy_reads_the_same_file() -> None:
    features, body = made()
    copied = pickle.loads(pickle.dumps(features))
    copied.index_select(0, torch.arange(10))
    features.index_select(0, torch.arange(10))
    assert body.passed == 0
