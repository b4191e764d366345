"""Every server update: a pure function, which is FedAvg where it has nothing to add."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedskew.components import with_clients
from fedskew.errors import ArgumentError
from fedskew.server_updates import INDEX, Plain
from updating import moved

RNG = np.random.default_rng(0)
MODEL, UPDATES = torch.tensor(RNG.normal(size=9)), torch.tensor(RNG.normal(size=(3, 9)))
WEIGHTS, STEPS = np.array([0.5, 0.2, 0.3]), np.full(3, 4)

OTHERS = [Plain(lr=0.3, momentum=0.9), INDEX["fedadam"](corrected=True), INDEX["fedyogi"](initial=0.0)]
TOLD = {"fednova": {"local_momentum": 0.9}}
EVERY = [with_clients(kind(**TOLD.get(name, {})), 5) for name, kind in INDEX.items()] + OTHERS


@pytest.mark.parametrize("update", EVERY, ids=repr)
def test_no_argument_is_written_to_and_zeros_move_nothing(update):
    state = update.init(MODEL)
    still, _ = moved(update, state, MODEL, torch.zeros_like(UPDATES), WEIGHTS, STEPS)
    assert torch.equal(still, MODEL)
    given = {**state, "model": MODEL, "updates": UPDATES}
    copies = {name: part.clone() for name, part in given.items()}
    after, _ = moved(update, state, MODEL, UPDATES, WEIGHTS, STEPS)
    assert not torch.equal(after, MODEL)
    assert all(torch.equal(given[name], part) for name, part in copies.items())
    assert WEIGHTS.tolist() == [0.5, 0.2, 0.3]


ALIKE = UPDATES[:1].expand(3, -1)


@pytest.mark.parametrize(
    ("update", "updates"),
    [
        (INDEX["fedexp"](), ALIKE),
        (INDEX["fednova"](0.0), UPDATES),
        (INDEX["fednova"](0.9), UPDATES),
        (INDEX["fedacg"](momentum=0.0), UPDATES),
        (INDEX["fedadagrad"](lr=1e9, tau=1e9, initial=0.0), UPDATES),
    ],
    ids=repr,
)
def test_where_it_has_nothing_to_add_it_is_fedavg(update, updates):
    ours, _ = moved(update, update.init(MODEL), MODEL, updates, WEIGHTS, STEPS)
    theirs, _ = moved(Plain(), {}, MODEL, updates, WEIGHTS, STEPS)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("update", [Plain(), INDEX["fedexp"](), INDEX["fednova"](0.9)], ids=repr)
def test_what_needs_no_state_has_none_and_is_evaluated_as_it_is(update):
    assert update.init(MODEL) == {}
    assert moved(update, {}, MODEL, UPDATES, WEIGHTS, STEPS)[1] == {}
    assert getattr(update, "evaluated", lambda _, model: model)({}, MODEL) is MODEL


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("plain", {"lr": 0.0}, "^lr: input should be greater than 0"),
        ("plain", {"lr": math.nan}, "^lr: input should be a finite number"),
        ("plain", {"momentum": -0.1}, "^momentum: input should be greater than or equal to 0"),
        ("plain", {"momentum": 1.0}, "^momentum: input should be less than 1"),
        ("fedexp", {"eps": -1.0}, "^eps: input should be greater than or equal to 0"),
        ("fedexp", {"eps": math.inf}, "^eps: input should be a finite number"),
        ("fednova", {"local_momentum": 1.0}, "^local_momentum: input should be less than 1"),
        ("fedadam", {"lr": 0.0}, "^lr: input should be greater than 0"),
        ("fedadam", {"momentum": 1.0}, "^momentum: input should be less than 1"),
        ("fedadam", {"decay": 1.0}, "^decay: input should be less than 1"),
        ("fedadam", {"tau": 0.0}, "^tau: input should be greater than 0"),
        ("fedadam", {"initial": -1.0}, "^initial: input should be greater than or equal to 0"),
    ],
)
def test_senseless_parameters_are_refused_by_name(name, options, message):
    with pytest.raises(ArgumentError, match=message):
        INDEX[name](**options)
