"""A stock Flower server with FedAvg."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from objective_app.task import make_network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print the accuracy of every round."""
    result = FedAvg().start(
        grid=grid,
        initial_arrays=ArrayRecord(make_network().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
    )
    for round, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {round}: accuracy {metrics['accuracy']:.3f}")
