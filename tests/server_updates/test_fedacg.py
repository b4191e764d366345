"""FedACG: by hand, and what of it is evaluated."""

from __future__ import annotations

import numpy as np
import torch

import fedskew
from fedskew import methods
from fedskew.local_steps import INDEX as STEPS
from fedskew.server_updates import INDEX as UPDATES
from updating import moved

FedProx = STEPS["fedprox"]
FedACG = UPDATES["fedacg"]

TASK = {
    "data": "digits",
    "partition": {"rule": "dirichlet_by_class", "clients": 6, "beta": 0.3, "min_size": 1},
    "model": {"name": "mlp3", "width": 8},
    "training": {"rounds": 3, "participation": 0.5, "epochs": 1, "batch_size": 64, "lr": 0.05},
}


def test_two_rounds_by_hand():
    # l = 1/2. D = 2 from 0: w = 2, m = 2, sent 3. D = 1 from 3: w = 4, m = 1 + 1 = 2, sent 5.
    component = FedACG(momentum=0.5)
    sent = torch.zeros(1)
    state = component.init(sent)
    assert component.evaluated(state, sent).item() == 0
    for change, average, momentum, following in ((2.0, 2.0, 2.0, 3.0), (1.0, 4.0, 2.0, 5.0)):
        updates = torch.tensor([[change - 1], [change + 1]])
        sent, state = moved(component, state, sent, updates, np.full(2, 0.5), np.ones(2))
        assert (state["momentum"].item(), sent.item()) == (momentum, following)
        assert component.evaluated(state, sent).item() == average


def test_prototypes_that_fednh_sets_are_evaluated_in_the_same_round():
    # No client moves prototypes, so they have no momentum; and m is 0 before the first round.
    task = {**TASK, "training": {**TASK["training"], "rounds": 1}}
    both = {"preset": "fednh", "server_update": {"name": "fedacg"}}
    ours, plain = (fedskew.simulate(**task, method=method).model.state_dict() for method in (both, "fednh"))
    for name, value in plain.items():
        np.testing.assert_allclose(ours[name].numpy(), value.numpy(), atol=1e-5, err_msg=name)


def test_the_preset_binds_the_pull_of_its_paper_and_gives_way_to_another_local_step():
    # beta ||y - s||^2 has the gradient 2 beta (y - s): FedProx's mu is 2 beta.
    bound = methods.build(methods.expand({"preset": "fedacg"}))
    assert (bound.local_step, bound.server_update) == (FedProx(mu=0.002), FedACG(momentum=0.85))
    assert methods.build(methods.expand({"preset": "fedacg+fedprox"})).local_step == FedProx()
    assert methods.build(methods.expand({"preset": "fedsam+fedacg"})).server_update == FedACG()
