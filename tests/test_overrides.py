"""What a class overrides is what runs: no short cut that it inherits stands for a function of its own."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import fedskew
from common import Normalised, built, task
from fedskew import methods
from fedskew.aggregation import Mean
from fedskew.components import covers
from fedskew.errors import ConfigError
from fedskew.local_steps import INDEX, SGD
from fedskew.models import Dropout
from fedskew.weighting import FedAvg

Scaffold = INDEX["scaffold"]

TASK = task(12, labels=2, rounds=2, lr=0.1) | {"data": {"name": "digits", "rows": 200}}


@dataclass(frozen=True)
class HalfStep(SGD):
    def step(self, parameters, gradient, carried, settings):
        after, carried = super().step(parameters, gradient, carried, settings)
        return parameters + 0.5 * (after - parameters), carried


class HalfStepBeside:
    """The same override, by a class that stands before SGD among the parents."""

    step = HalfStep.step


@dataclass(frozen=True)
class Mixed(HalfStepBeside, HalfStep):
    pass


@dataclass(frozen=True)
class Renamed(SGD):
    rate: float = 1.0


@dataclass(frozen=True)
class Even(FedAvg):
    def weigh(self, answered):
        return np.full(len(answered.sizes), 1 / len(answered.sizes))


@dataclass(frozen=True)
class First(Mean):
    def combine(self, updates, weights):
        return updates[:1], np.ones(1)


@dataclass(frozen=True)
class OwnVariates(Scaffold):
    def end_round(self, state, end):
        return super().end_round(state, end)


class Noise(nn.Dropout):
    def forward(self, x):
        return x + self.p


class Noisy(nn.Sequential):
    def __init__(self, num_classes, in_shape):
        super().__init__(nn.Flatten(), Noise(0.5), nn.Linear(64, num_classes))


def trained(**change) -> torch.Tensor:
    return nn.utils.parameters_to_vector(fedskew.simulate(TASK | change).model.parameters()).detach()


@pytest.mark.parametrize("kind", [HalfStep, Mixed])
@pytest.mark.slow
def test_a_step_of_ones_own_is_taken_one_after_another_and_together(kind):
    alone = trained(method={"local_step": kind})
    assert not torch.equal(alone, trained())
    together = trained(method={"local_step": kind}, engine={"backend": "cohort"})
    assert torch.allclose(alone, together, atol=1e-5)


def test_a_class_that_overrides_nothing_keeps_the_short_cut():
    assert covers(Renamed, "step_in_place", "step")
    torch.testing.assert_close(trained(method={"local_step": Renamed}), trained(), rtol=0, atol=1e-6)


def masked(**method) -> dict:
    return TASK | {"method": method, "engine": {"updates": "masked"}}


def test_masks_are_refused_where_sums_are_those_of_what_is_overridden():
    with pytest.raises(ConfigError, match=r"works on each client's update"):
        fedskew.simulate(masked(aggregation=First))
    with pytest.raises(ConfigError, match=r"does not declare adds_up"):
        fedskew.simulate(masked(local_step=OwnVariates, weighting="uniform"))


def test_summed_counts_are_refused_for_weights_of_ones_own():
    refused = str(methods.summed_counts_refused(built(weighting=Even), 1.0))
    assert "weighs by each client's label counts" in refused
    assert methods.summed_counts_refused(built(weighting=FedAvg), 1.0) is None


def test_buffers_are_combined_as_an_aggregation_of_ones_own_says():
    def statistics(**method) -> torch.Tensor:
        made = fedskew.simulate(TASK | {"model": Normalised, "method": method, "training": {"rounds": 1}}).model
        return made.get_buffer("1.running_mean")

    assert not torch.equal(statistics(), statistics(aggregation=First))


def test_a_dropout_of_ones_own_stays():
    assert type(Dropout.swap(Noisy(3, (64,)))[1]) is Noise
