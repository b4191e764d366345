"""`fedskew demo`: FedAvg and the four papers' methods on real data that ships with scikit-learn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from fedskew.cli.console import Console
from fedskew.cli.options import Out

TASK: dict[str, Any] = {
    "schema": 1,
    "name": "demo",
    "seeds": [0, 1, 2],
    "data": {"name": "digits"},
    "partition": {"rule": "dirichlet_by_class", "clients": 20, "beta": 0.1, "min_size": 1},
    "model": {"name": "mlp3"},
    "training": {"rounds": 25, "participation": 0.25, "epochs": 5, "batch_size": 16, "lr": 0.05},
    "target": {"mix": [0.02] * 5 + [0.18] * 5},
}
METHODS = ("fedavg", "fedentopt", "fedvls", "fedla", "fedpals")

SETTING = (
    "1,352 handwritten digits on 20 clients under strong label skew: each digit is divided by Dir(0.1), so a client "
    "holds many of a few digits and none of others. 5 clients train in a round. The model is for a place where digits "
    "5 to 9 are nine times as frequent as 0 to 4: that is the target mix, which FedPALS knows and the others don't.\n"
)

READING = (
    "Few clients a round under strong skew is where the choice of clients (FedEntOpt) and weights by label variety "
    "(FedLA) should show; classes that clients lack are what FedVLS is made for; the target mix is what FedPALS is "
    "made for. Differences no larger than the spreads may be chance: these are 3 seeds.\n"
)


def demo(
    out: Out = Path("runs"),
) -> None:
    """Train FedAvg and the four papers' methods on digits, 20 clients under strong label skew, 3 seeds: two minutes.

    Example:

        fedskew demo
    """
    from fedskew.cli.progress import announced
    from fedskew.cli.tables import results_table
    from fedskew.experiment import RunBar, resolve, run_folder, simulate
    from fedskew.report import write_report

    console = Console()
    console.print(SETTING)
    configs = [resolve(TASK).with_method(name) for name in METHODS]
    results = []
    with RunBar(console, configs) as bar:
        for config in configs:
            shutil.rmtree(run_folder(config, out), ignore_errors=True)  # a demo never continues an earlier one
            results.append(simulate(config, out=out, progress=announced(bar, config)))
    console.print(results_table(results))
    console.print(READING)
    page = write_report(
        [run for result in results for run in result.runs], out / "demo" / "report.html", "fedskew demo"
    )
    console.print(f"report: {page}", soft_wrap=True)
