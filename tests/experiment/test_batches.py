"""Batches of one sample and batch norm: found before the first round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedskew
from fedskew.data import Dataset
from fedskew.errors import ConfigError


def data() -> Dataset:
    """Clients of 8, 9 and 12 samples: of batches of 4, the second has a last one of one sample."""
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(29, 6)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, size=29))
    clients = np.repeat([0, 1, 2], [8, 9, 12])
    return Dataset(
        "few", inputs, labels, inputs[:9], labels[:9], ("a", "b", "c"), clients=clients, client_names=("x", "y", "z")
    )


class Normalised(nn.Sequential):
    """Batch norm, which refuses a single sample."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, num_classes))


TASK = {
    "name": "few",
    "data": {"name": data},
    "partition": {"rule": "natural"},
    "model": {"name": Normalised},
    "training": {"rounds": 2, "batch_size": 4, "lr": 0.1},
}


def training(**changes):
    return {"training": {**TASK["training"], **changes}}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_a_batch_of_one_is_found_before_the_first_round_and_leaving_it_out_is_the_cure(tmp_path, backend):
    engine = {"backend": backend}
    says = r"training.smallest_batch: client y has a batch of one .*Normalised can't be trained; set training.small"
    with pytest.raises(ConfigError, match=says):
        fedskew.simulate(TASK, engine=engine, out=tmp_path)
    assert not any(tmp_path.iterdir())
    result = fedskew.simulate(TASK, **training(smallest_batch=2), engine=engine)
    assert sorted(result.rounds[1]["steps"]) == [2, 2, 3]


def test_a_part_of_an_epoch_that_reaches_the_batch_of_one_is_found_too():
    """0.9 of three batches, rounded up, is all three."""
    with pytest.raises(ConfigError, match="client y has a batch of one"):
        fedskew.simulate(TASK, **training(epochs=0.9))


@pytest.mark.parametrize(
    "changes", [{"epochs": 0.5}, {"batch_size": 5}, {"steps": 1}, {"epochs": 0}, {"smallest_batch": 4}]
)
def test_what_brings_no_batch_of_one_trains(changes):
    fedskew.simulate(TASK, **training(**changes))


def test_batches_of_one_throughout_have_another_cure():
    with pytest.raises(ConfigError, match="3 clients, such as x, have .*; set training.batch_size to 2 or more"):
        fedskew.simulate(TASK, **training(batch_size=1))


def test_images_that_stay_larger_than_one_pixel_may_come_alone():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(x.view(len(x), 2, 3)).flatten(1))

    fedskew.simulate(TASK, model=Wide())
