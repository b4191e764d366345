"""What methods gained in the simulated federations that are most like a real one. Imports no PyTorch."""

import csv
import gzip
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError, DataError, nearest, placed
from fedskew.labels import CountsLike, LabelCounts, describe
from fedskew.parameters import FloatArray, Positive, PositiveShare, checked
from fedskew.tables import csv_text

SHIPPED = Path(__file__).with_name("evidence.csv.gz")
NEIGHBOURS = 5
NETWORKS = {
    "logistic": "a last layer on given features (logistic)",
    "mlp3": "two hidden layers (mlp3)",
    "lenet5": "a small convolutional network (lenet5)",
}
"""The networks of the evidence that ships, in words."""
_GAIN = "gain:"
SCALES = {
    "skew": 0.25,
    "clients_log": math.log(3),
    "classes_log": math.log(3),
    "samples_per_client_log": math.log(5),
    "participation": 0.25,
    "epochs_log": math.log(3),
    "target": 1.0,
    "target_distance": 0.2,
}
"""Columns of the numbers by which federations are compared, and the difference in each that counts as 1."""


@dataclass(frozen=True)
class Advice:
    """What each method gained where labels were like these and the same network trained.

    Attributes:
        network: Name of the network, as a config has it.
        methods: By method, the largest mean first, but last those that trained in fewer than half of the neighbours:
            its `mean` gain over FedAvg in points, the `least` and the `most`, in how many federations it was `ahead`,
            `of` how many that it trained in.
        neighbours: The nearest federations, nearest first: `federation` in words, `distance`, the `best` method and its
            `gain`.
        refusal: Why no method is named: fewer than five have such a setting, a neighbour is farther than 1, all are
            more skewed by a quarter, or a sample may have several labels; else empty.
    """

    network: str
    methods: tuple[dict[str, Any], ...]
    neighbours: tuple[dict[str, Any], ...]
    refusal: str

    @property
    def often(self) -> tuple[dict[str, Any], ...]:
        """Of `methods` those that trained in half of the neighbours or more."""
        return tuple(one for one in self.methods if 2 * one["of"] >= NEIGHBOURS)

    @property
    def method(self) -> str | None:
        """The method that gained most on average, of those that trained in half of the neighbours or more; "fedavg"
        where none gained, None where nothing is like this."""
        if self.refusal:
            return None
        return next((one["method"] for one in self.often if one["mean"] > 0), "fedavg")

    def sentence(self) -> str:
        """Return the advice in a sentence."""
        network = NETWORKS.get(self.network, self.network)
        if self.refusal:
            return f"On {network} no method is named: {self.refusal}."
        near = f"On {network}, in the {NEIGHBOURS} simulated federations most like this one"
        if self.method == "fedavg":
            return f"{near}, no method gained over FedAvg on average."
        first = next(one for one in self.methods if one["method"] == self.method)
        gains = f"{first['mean']:+.1f} points on average ({first['least']:+.1f} to {first['most']:+.1f})"
        weak = "; less than a point says nothing" if first["mean"] < 1 else ""
        ahead = f"ahead of FedAvg in {first['ahead']} of {first['of']}, by {gains}{weak}"
        return f"{near}, {self.method} gained most of the methods that trained in half of them or more: {ahead}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {"method": self.method, "reason": self.sentence(), **vars(self)}


def figures(counts: CountsLike, target: ArrayLike | None, participation: float, epochs: float) -> dict[str, float]:
    """Return the numbers by which a federation is compared with others: its skew, sizes, setting and target."""
    report = describe(counts, target)
    found = {
        "skew": report.label_distribution.skew,
        "clients_log": math.log(len(report.counts)),
        "classes_log": math.log(len(report.counts.classes)),
        "samples_per_client_log": math.log(max(report.quantity.mean, 1.0)),
        "participation": participation,
        "epochs_log": math.log(epochs) if epochs else 0.0,
        "target": float(report.target is not None),
        "target_distance": 0.0 if report.target is None else math.sqrt(report.target.fedavg_distance),
    }
    return {name: 0.0 if math.isnan(value) else float(value) for name, value in found.items()}


def local_epochs(training: Mapping[str, Any], samples: float) -> float:
    """Return the local epochs of a round by a config's `[training]` in plain values; where `steps` stand in their
    place, as many as these are for a client with so many samples."""
    if training.get("steps") is None:
        return float(training["epochs"])
    return float(training["steps"] * training["batch_size"] / max(samples, 1))


@checked
def advise(
    counts: CountsLike,
    target: ArrayLike | None = None,
    participation: PositiveShare = 1.0,
    epochs: Positive = 1.0,
    without: Collection[str] = (),
    table: Path | None = None,
) -> tuple[Advice, ...]:
    """Return what each method gained in the simulated federations that are most like this one, for each network.

    Looked at are those that have a target, or none, as this one, and where all clients take part in a round, or not.

    Args:
        counts: Label counts of the clients that train, shape `(clients, classes)`.
        target: Label mix that the model will serve, shape `(classes,)`; None: that of the test data.
        participation: Share of the clients that takes part in a round.
        epochs: Local epochs of a round.
        without: Labels of methods that can't be used, nor variants of them, such as "fedlc: no mask".
        table: `evidence.csv.gz` of an arena; None: the one that comes with fedskew. DataError where it can't be read.
    """
    evidence = read_evidence(table or SHIPPED)
    known = {name for method in evidence.gains for name in (method, method.split(":")[0])}
    if (unknown := next((method for method in without if method not in known), None)) is not None:
        raise ArgumentError(f"without: the table has no method {unknown!r}{nearest(unknown, known)}")
    own = figures(counts, target, participation, epochs)
    here = np.array([own[name] for name in SCALES])
    several = "a sample may have several labels" if isinstance(counts, LabelCounts) and counts.several else ""
    found = (evidence.near(here, network, without) for network in dict.fromkeys(evidence.networks))
    return tuple(replace(one, refusal=several or one.refusal) for one in found)


@dataclass(frozen=True)
class Evidence:
    """A table of simulated federations: the network that trained in each and the federation in words, `figures` of
    shape `(federations, figures)`, each method's gains in points, NaN where it did not train."""

    networks: tuple[str, ...]
    federations: tuple[str, ...]
    figures: FloatArray
    gains: Mapping[str, FloatArray]

    def near(self, here: FloatArray, network: str, without: Collection[str], left_out: Collection[int] = ()) -> Advice:
        """Return what methods gained on a network in the federations nearest to figures, but for those left out."""
        at_target, at_part, at_skew = map([*SCALES].index, ("target", "participation", "skew"))
        targets, whole = self.figures[:, at_target] == here[at_target], here[at_part] >= 1
        alike = targets & ((self.figures[:, at_part] >= 1) == whole) & [one == network for one in self.networks]
        alike[list(left_out)] = False
        distances = np.sqrt((((self.figures - here) / [*SCALES.values()]) ** 2).mean(axis=1))
        rows = np.flatnonzero(alike)[np.argsort(distances[alike], kind="stable")[:NEIGHBOURS]]
        gains = {method: gain for method, gain in self.gains.items() if not {method, method.split(":")[0]} & {*without}}
        known = [_gained(method, gain[rows]) for method, gain in gains.items() if np.isfinite(gain[rows]).any()]
        refusal = ""
        if len(rows) < NEIGHBOURS:
            setting = f"{'a' if here[at_target] else 'no'} target and participation {'1' if whole else 'below 1'}"
            refusal = f"fewer than {NEIGHBOURS} simulated federations have {setting}"
        elif (distances[rows] > 1).any():
            refusal = "the simulated federations are unlike this one"
        elif (self.figures[rows, at_skew] > here[at_skew] + SCALES["skew"]).all():
            refusal = "its labels are more even than those of the nearest"
        return Advice(
            network,
            tuple(sorted(known, key=lambda one: (2 * one["of"] < NEIGHBOURS, -one["mean"]))),
            tuple(
                {"federation": self.federations[row], "distance": float(distances[row]), **_best(gains, row)}
                for row in rows
            ),
            refusal,
        )


def evidence_bytes(rows: Sequence[tuple[str, Mapping[str, str], Mapping[str, float]]]) -> bytes:
    """Return the content of `evidence.csv.gz`: for each federation the network, its text and figures, and gains."""
    methods = list(dict.fromkeys(method for _, _, gains in rows for method in gains))
    lines: list[list[Any]] = [["network", "federation", *SCALES, *(f"{_GAIN}{method}" for method in methods)]]
    for network, federation, gains in rows:
        points = [f"{gains[method]:.3f}" if method in gains else "" for method in methods]
        lines.append([network, federation["federation"], *(federation[name] for name in SCALES), *points])
    return gzip.compress(csv_text(lines).encode(), mtime=0)


def read_evidence(path: Path = SHIPPED) -> Evidence:
    """Read a table of evidence; DataError where it can't be read."""
    with placed(f"{path}: the table of evidence can't be read: ", DataError, (OSError, EOFError, UnicodeDecodeError)):
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
    lines = list(csv.DictReader(io.StringIO(text, newline="")))
    try:
        values = np.array([[float(line[name]) for name in SCALES] for line in lines])
        gains = {
            name.removeprefix(_GAIN): np.array([float(line[name] or "nan") for line in lines])
            for name in lines[0]
            if name.startswith(_GAIN)
        }
        if not np.isfinite(values).all() or any(np.isinf(gain).any() for gain in gains.values()):
            raise ValueError
        networks, federations = (tuple(line[name] for line in lines) for name in ("network", "federation"))
        return Evidence(networks, federations, values, gains)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise DataError(f"{path}: is not a table of evidence; `fedskew arena` writes one, evidence.csv.gz") from None


def _gained(method: str, gains: FloatArray) -> dict[str, Any]:
    known = gains[np.isfinite(gains)]
    mean, least, most = float(known.mean()), float(known.min()), float(known.max())
    return {
        "method": method,
        "mean": mean,
        "least": least,
        "most": most,
        "ahead": int((known > 0).sum()),
        "of": len(known),
    }


def _best(gains: Mapping[str, FloatArray], row: int) -> dict[str, Any]:
    gain, method = max(((float(own[row]), method) for method, own in gains.items() if own[row] > 0), default=(0.0, ""))
    return {"best": method or "fedavg", "gain": gain}
