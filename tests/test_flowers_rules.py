"""Aggregations with equal weights, and adaptive server updates, give what Flower's own strategies give."""

from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity

from common import moved
from fedskew.aggregation import INDEX as RULES
from fedskew.server_updates import INDEX as UPDATES

Krum, Median, TrimmedMean = (RULES[name] for name in ("krum", "median", "trimmed_mean"))
FedAdagrad, FedAdam, FedYogi = (UPDATES[name] for name in ("fedadagrad", "fedadam", "fedyogi"))


def aggregated(strategy, round: int, models: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """What Flower's strategy makes of replies with models of two arrays, and numbers of samples."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's runtime says
    replies = []
    for place, model in enumerate(models):
        asked = Message(RecordDict(), dst_node_id=place + 1, message_type=MessageType.TRAIN)
        arrays = ArrayRecord({"a": Array(model[:6].reshape(2, 3)), "b": Array(model[6:])})
        metrics = MetricRecord({"num-examples": int(samples[place])})
        replies.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=asked))
    arrays, _ = strategy.aggregate_train(round, replies)
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])


@pytest.mark.parametrize("clients", [7, 10])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Median(), flower.FedMedian()),
        (TrimmedMean(0.2), flower.FedTrimmedAvg(beta=0.2)),
        (Krum(malicious=1), flower.Krum(num_malicious_nodes=1)),
        (Krum(malicious=2, keep=4), flower.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=4)),
    ],
    ids=["median", "trimmed_mean", "krum", "multi_krum"],
)
def test_equal_weights_give_flowers_result(clients, ours, theirs):
    if clients == 7 and isinstance(ours, TrimmedMean):
        ours, theirs = TrimmedMean(2 / 7), flower.FedTrimmedAvg(beta=2 / 7 + 1e-9)  # both cut two clients
    rng = np.random.default_rng(clients)
    sent, models = rng.normal(size=11), rng.normal(size=(clients, 11))
    models[3] *= -3
    rows, shares = ours.combine(torch.from_numpy(models - sent), np.full(clients, 1 / clients))
    expected = aggregated(theirs, 1, models, np.full(clients, 10))
    np.testing.assert_allclose(sent + shares @ rows.numpy(), expected, atol=1e-6, rtol=0)


OTHER = {"initial": 0.0, "corrected": True}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FedAdagrad(initial=0.0), flower.FedAdagrad),
        (FedAdam(lr=0.1, **OTHER), flower.FedAdam),
        (FedYogi(initial=0.0), flower.FedYogi),
        (
            FedAdam(lr=0.03, momentum=0.5, decay=0.9, tau=0.01, **OTHER),
            partial(flower.FedAdam, eta=0.03, beta_1=0.5, beta_2=0.9, tau=0.01),
        ),
    ],
    ids=["fedadagrad", "fedadam", "fedyogi", "other parameters"],
)
def test_ten_rounds_are_flowers_own(ours, theirs, dtype):
    rng = np.random.default_rng(0)
    model, samples = rng.normal(scale=0.05, size=40).astype(dtype), np.array([10, 30, 5])
    mine, theirs = torch.from_numpy(model), theirs()
    state = ours.init(mine)
    for round in range(1, 11):
        updates = rng.normal(scale=0.1 / round, size=(3, 40)).astype(dtype)
        updates[:, :5] = 0  # parameters that nobody moves
        models = model + updates
        theirs.current_arrays = {"a": model[:6].reshape(2, 3), "b": model[6:]}
        changes = torch.from_numpy(models - model)
        mine, state = moved(ours, state, mine, changes, samples / samples.sum(), np.full(3, 5))
        model = aggregated(theirs, round, models, samples)
        np.testing.assert_allclose(mine.numpy(), model, atol=1e-6, rtol=0)
    assert np.abs(model[5:]).max() > 0
