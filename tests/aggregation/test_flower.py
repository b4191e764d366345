"""Equal weights give what Flower's own strategies give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity

from fedskew.aggregation import INDEX

Krum = INDEX["krum"]
Median = INDEX["median"]
TrimmedMean = INDEX["trimmed_mean"]


def replies(models: np.ndarray) -> list[Message]:
    """Replies of clients that have as many samples each, with models of two arrays."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's runtime says
    found = []
    for place, model in enumerate(models):
        asked = Message(RecordDict(), dst_node_id=place + 1, message_type=MessageType.TRAIN)
        arrays = ArrayRecord({"a": Array(model[:6].reshape(2, 3)), "b": Array(model[6:])})
        metrics = MetricRecord({"num-examples": 10})
        found.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=asked))
    return found


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
    arrays, _ = theirs.aggregate_train(1, replies(models))
    wanted = np.concatenate([array.numpy().ravel() for array in arrays.values()])
    rows, shares = ours.combine(torch.from_numpy(models - sent), np.full(clients, 1 / clients))
    np.testing.assert_allclose(sent + shares @ rows.numpy(), wanted, atol=1e-6, rtol=0)
