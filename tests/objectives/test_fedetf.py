"""FedETF and FedGELA, two losses on a network whose last layer is a fixed simplex; and FedRoD's, which is FedETF's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedskew
from fedskew.errors import CombinationError, ConfigError
from fedskew.methods import expand
from losses import balanced_cross_entropy, fedgela

COUNTS = torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64)
RNG = np.random.default_rng(5)
LOGITS, TARGETS = torch.tensor(RNG.normal(size=(6, 3))), torch.tensor([0, 2, 2, 0, 0, 2])
TASK = {
    "data": {"name": "digits"},
    "partition": {"rule": "dirichlet_by_class", "clients": 4, "beta": 0.3, "min_size": 1},
    "model": {"name": "mlp3", "width": 8},
    "training": {"rounds": 1, "batch_size": 64, "lr": 0.1},
}


def test_a_missing_class_is_pushed_down_by_one_samples_share_or_not_at_all():
    for least, expected in ((1.0, 1 / 5), (0.0, 0.0)):
        logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        balanced_cross_entropy(logits, torch.tensor([0]), COUNTS, least).backward()
        assert logits.grad[0, 1].item() == pytest.approx(expected, abs=1e-12)


def test_fedgela_worked_out_by_hand():
    # Phi = 3 (3/4, 0, 1/4): the logits become ln 2, 0 and 0, whatever the missing class's was.
    logits = torch.tensor([[4 / 9 * math.log(2), 100.0, 0.0]], dtype=torch.float64, requires_grad=True)
    value = fedgela(logits, torch.tensor([0]), COUNTS)
    assert value.item() == pytest.approx(math.log(2), abs=1e-12)
    value.backward()
    # Phi (softmax - 1 of the target's class): 9/4 (1/2 - 1), 0, 3/4 (1/4).
    assert logits.grad[0].tolist() == pytest.approx([-9 / 8, 0, 3 / 16], abs=1e-12)


@pytest.mark.parametrize(("name", "scale"), [("fedetf", 1.0), ("fedgela", 5.0)])
def test_a_run_trains_all_but_its_simplex_which_is_its_seeds(name, scale):
    runs = [fedskew.simulate({**TASK, "method": name, "seeds": [seed]}) for seed in (0, 0, 1)]
    ends = [run.model.state_dict() for run in runs]
    heads = [end["head.weight"] for end in ends]
    assert torch.equal(heads[0], heads[1])
    assert not torch.allclose(heads[0], heads[2], atol=0.1)
    gram = heads[0] @ heads[0].T
    torch.testing.assert_close(gram.diagonal(), torch.ones(10))
    torch.testing.assert_close(gram[0, 1:], torch.full((9,), -1 / 9))
    assert (ends[0]["head.scale"].item() == scale) == (name == "fedgela")


@pytest.mark.parametrize("preset", ["fedetf+adapt", "ccvr+fedgela"])
def test_a_finish_is_refused_as_it_makes_another_last_layer(preset):
    with pytest.raises(CombinationError, match=r"it makes another last layer, and the objective's is fixed; take "):
        expand({"preset": preset})


def test_fedconcat_is_refused_as_its_last_layer_is_trained():
    with pytest.raises(CombinationError, match=r"it fixes the last layer, and here that is a trained one .*; take"):
        expand({"preset": "fedconcat+fedetf"})


class Plain(torch.nn.Sequential):
    """A network without a layer `head`."""

    def __init__(self, num_classes, in_shape):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(math.prod(in_shape), num_classes))


def test_a_network_of_ones_own_without_a_head_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"FedETF can't adapt .*Plain: .* give it a linear layer self.head") as error:
        fedskew.simulate({**TASK, "model": {"name": f"{__name__}:Plain"}, "method": "fedetf"})
    assert "\n" not in str(error.value)
