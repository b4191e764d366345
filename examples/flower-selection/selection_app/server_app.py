"""A stock Flower server, except for the two marked lines."""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedskew.deploy import strategy  # 1: was "from flwr.serverapp.strategy import FedAvg"
from selection_app.task import make_network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print the accuracy of every round."""
    chosen = strategy("fedentopt+fedla", participation=0.5)  # 2: was "FedAvg(fraction_train=0.5)"
    result = chosen.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_network().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        train_config=ConfigRecord({"lr": 0.1}),
    )
    for round, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {round}: accuracy {metrics['accuracy']:.3f}")
