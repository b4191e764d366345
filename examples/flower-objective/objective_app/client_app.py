"""fedskew's client, training with FedVLS so that a node does not forget the classes that it lacks."""

from __future__ import annotations

from flwr.app import Context

from fedskew.deploy import SiteData, client_app
from fedskew.engine import LocalTraining
from objective_app.task import CLASSES, make_network, share


def site(context: Context) -> SiteData:
    """This node's samples."""
    node, nodes = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return SiteData(*share(node, nodes), num_classes=CLASSES)


app = client_app(make_network, site, "fedvls", training=LocalTraining(lr=0.1, batch_size=16), epochs=2)
