"""A stock Flower client that also replies to the query for label counts."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional

from selection_app.task import CLASSES, make_network, share

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Report the number of samples of each class, which FedEntOpt and FedLA use."""
    _, labels, _, _ = _share(context)
    counts = torch.bincount(labels, minlength=CLASSES).tolist()
    return Message(RecordDict({"metrics": MetricRecord({"label-counts": counts})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for two epochs of SGD."""
    inputs, targets, _, _ = _share(context)
    model = make_network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=float(message.content["config"]["lr"]))
    for _ in range(2):
        for batch in torch.randperm(len(targets)).split(16):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(targets)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure the accuracy on this node's test samples."""
    _, _, inputs, targets = _share(context)
    model = make_network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with torch.no_grad():
        right = (model(inputs).argmax(dim=1) == targets).float().mean().item()
    metrics = MetricRecord({"accuracy": right, "num-examples": len(targets)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _share(context: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return share(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
