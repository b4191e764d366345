"""What the method that `fedskew advise` names is worth in federations of a task that it has not seen.

    python benchmarks/advice.py [METHOD ...]     # without these methods

Each federation of the table that ships is looked up among those of other tasks. Beside the gain there of the method
that is named: that of the method that gains most on average over all of other tasks that have its network, a target or
none, and all clients in a round or not, as it has; and that of the best in hindsight; all of the methods that trained
in it. Points over FedAvg, means over federations, by network.
"""

import sys
from statistics import fmean

import numpy as np

from fedskew.arena._advice import SCALES, read_evidence
from fedskew.tables import markdown_table


def task_of(federation: str) -> str:
    """The data set; a part of it is the same task."""
    return federation.split(",")[0].removesuffix("-part")


def main() -> None:
    """Print the table."""
    evidence = read_evidence()
    if unknown := {*sys.argv[1:]} - {*evidence.gains}:
        sys.exit(f"no such method in the table: {', '.join(sorted(unknown))}; it has {', '.join(evidence.gains)}")
    tasks = [task_of(federation) for federation in evidence.federations]
    target, whole = map([*SCALES].index, ("target", "participation"))
    found: dict[str, list[tuple[float, float, float]]] = {}
    for at, (network, task) in enumerate(zip(evidence.networks, tasks, strict=True)):
        here = {method: float(gain[at]) for method, gain in evidence.gains.items()}
        known = [method for method, gain in here.items() if np.isfinite(gain) and method not in sys.argv[1:]]
        left = [method for method in evidence.gains if method not in known]
        left_out = [other for other, own in enumerate(tasks) if own == task]
        own = found.setdefault(network, [])
        named = evidence.near(evidence.figures[at], network, left, left_out).method
        if named is None:
            continue
        others = np.array([one == network for one in evidence.networks])
        others &= (evidence.figures[:, whole] >= 1) == (evidence.figures[at, whole] >= 1)
        others &= evidence.figures[:, target] == evidence.figures[at, target]
        others[left_out] = False
        of_others = {method: evidence.gains[method][others] for method in known}
        means = {method: np.nanmean(gain) for method, gain in of_others.items() if np.isfinite(gain).any()}
        fixed = max(means, key=lambda method: means[method])
        own.append((here.get(named, 0.0), here[fixed], max(0.0, *(here[method] for method in known))))
    rows = []
    for network, gains in found.items():
        harmed = [sum(gain[place] < -1 for gain in gains) for place in (0, 1)]
        shown = [f"{fmean(column):+.1f}" for column in zip(*gains, strict=True)] or ["", "", ""]
        rows.append([network, f"{len(gains)} of {evidence.networks.count(network)}", *shown, *map(str, harmed)])
    headings = ["network", "federations", "named", "best on others", "best there", "named harmed", "fixed harmed"]
    print(markdown_table(headings, rows, labels=1))


if __name__ == "__main__":
    main()
