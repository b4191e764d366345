"""FedAdagrad, FedAdam and FedYogi: by hand, and beside Flower's own."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity

from fedskew.server_updates import INDEX
from updating import moved

FedAdagrad = INDEX["fedadagrad"]
FedAdam = INDEX["fedadam"]
FedYogi = INDEX["fedyogi"]

ONE, STEPS = np.ones(1), np.ones(1, dtype=np.int64)


def after(component, *changes: float) -> list[float]:
    """One parameter, from 0: its value after each of these mean updates."""
    model, path = torch.zeros(1, dtype=torch.float64), []
    state = component.init(model)
    for change in changes:
        update = torch.tensor([[change]], dtype=torch.float64)
        model, state = moved(component, state, model, update, ONE, STEPS)
        path.append(model.item())
    return path


def test_fedadagrad_by_hand():
    # v = 9, then 25: 0.5 * 3 / (3 + 1), then 0.5 * 4 / (5 + 1) more.
    assert after(FedAdagrad(lr=0.5, tau=1.0, initial=0.0), 3, 4) == pytest.approx([3 / 8, 3 / 8 + 1 / 3], rel=1e-14)


def test_fedadam_by_hand():
    # m = 1, v = 4 / 4; then m = 1/2 + D/2, v = 3/4 + 13/4 = 4.
    last = math.sqrt(13)
    component = FedAdam(lr=1.0, momentum=0.5, decay=0.75, tau=1.0, initial=0.0)
    assert after(component, 2, last) == pytest.approx([0.5, 0.5 + (0.5 + last / 2) / 3], rel=1e-14)


def test_fedadam_corrected_by_hand():
    # Factors sqrt(1 - 0.75^2) / (1 - 0.5^2), then with cubes: the exponent is the round's number plus 1.
    component = FedAdam(lr=1.0, momentum=0.5, decay=0.75, tau=1.0, initial=0.0, corrected=True)
    first = math.sqrt(7) / 4 / 0.75 * 0.5
    second = math.sqrt(37) / 8 / 0.875 * (0.5 + math.sqrt(13) / 2) / 3
    assert after(component, 2, math.sqrt(13)) == pytest.approx([first, first + second], rel=1e-14)


def test_fedyogi_by_hand():
    # v: 0 + 4/4 = 1; D = 1 leaves it (sign 0); D = 1/2 takes 1/16 off.  m: 1, 1, 3/4.
    component = FedYogi(lr=1.0, momentum=0.5, decay=0.75, tau=1.0, initial=0.0)
    last = 0.75 / (math.sqrt(15 / 16) + 1)
    assert after(component, 2, 1, 0.5) == pytest.approx([0.5, 1.0, 1.0 + last], rel=1e-14)


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi])
def test_v_begins_at_tau_squared_as_in_the_paper(kind):
    model = torch.zeros(3)
    assert kind(tau=0.5).init(model)["square"].tolist() == [0.25] * 3
    assert kind(tau=0.5, initial=0.0).init(model)["square"].tolist() == [0.0] * 3
    assert len(FedAdagrad().init(model)["mean"]) == 0  # without momentum no mean is kept
    # The paper's step from v = tau^2, for D = tau: with b1 = 0 lr tau / (sqrt(v) + tau).
    step = {FedAdagrad: math.sqrt(2), FedAdam: 1.0, FedYogi: 1.0}[kind]
    component = kind(lr=1.0, momentum=0.0, tau=0.5)
    assert after(component, 0.5) == pytest.approx([1 / (step + 1)], rel=1e-14)


def replies(models: np.ndarray, samples: np.ndarray) -> list[Message]:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's runtime says
    found = []
    for place, model in enumerate(models):
        asked = Message(RecordDict(), dst_node_id=place + 1, message_type=MessageType.TRAIN)
        metrics = MetricRecord({"num-examples": int(samples[place])})
        content = RecordDict({"arrays": ArrayRecord({"a": Array(model)}), "metrics": metrics})
        found.append(Message(content, reply_to=asked))
    return found


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FedAdagrad(initial=0.0), flower.FedAdagrad),
        (FedAdam(lr=0.1, initial=0.0, corrected=True), flower.FedAdam),
        (FedYogi(initial=0.0), flower.FedYogi),
        (
            FedAdam(lr=0.03, momentum=0.5, decay=0.9, tau=0.01, initial=0.0, corrected=True),
            partial(flower.FedAdam, eta=0.03, beta_1=0.5, beta_2=0.9, tau=0.01),
        ),
    ],
    ids=["fedadagrad", "fedadam", "fedyogi", "other parameters"],
)
def test_ten_rounds_are_flowers_own(ours, theirs, dtype):
    rng = np.random.default_rng(0)
    model, samples = rng.normal(scale=0.05, size=40).astype(dtype), np.array([10, 30, 5])
    weights, mine, theirs = samples / samples.sum(), torch.from_numpy(model), theirs()
    state = ours.init(mine)
    for round in range(1, 11):
        updates = rng.normal(scale=0.1 / round, size=(3, 40)).astype(dtype)
        updates[:, :5] = 0  # parameters that nobody moves
        models = model + updates
        theirs.current_arrays = {"a": model}
        arrays, _ = theirs.aggregate_train(round, replies(models, samples))
        mine, state = moved(ours, state, mine, torch.from_numpy(models - model), weights, np.full(3, 5))
        model = arrays["a"].numpy()
        np.testing.assert_allclose(mine.numpy(), model, atol=1e-6, rtol=0)
    assert np.abs(model[5:]).max() > 0
