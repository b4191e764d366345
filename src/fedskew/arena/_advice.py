"""What methods gained in the simulated federations that are most like a real one. Imports no PyTorch."""

import csv
import gzip
import io
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError, DataError, nearest, placed
from fedskew.labels import CountsLike, LabelCounts, describe
from fedskew.tables import csv_text

FloatArray = NDArray[np.float64]
Federation = tuple[str, ...]

SHIPPED = Path(__file__).with_name("evidence.csv.gz")
NEIGHBOURS = 10
_GAIN = "gain:"
_SPREAD = ("skew", "clients_log", "classes_log", "samples_per_client_log", "participation", "epochs_log")
_NAMES = (*_SPREAD, "target", "target_distance")
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Advice:
    """What each method gained where labels were like these.

    Attributes:
        methods: By method, the largest median first: `median` gain over FedAvg in points, `low` and `high` (the ends of
            80 %), in how many federations it was `ahead`, `of` how many that it trained in.
        neighbours: The nearest federations, nearest first: `federation` in words, `distance`, the `best` method and its
            `gain`.
        supported: Whether the federation is like those of the table (one label a sample); else no method is named.
    """

    methods: tuple[dict[str, Any], ...]
    neighbours: tuple[dict[str, Any], ...]
    supported: bool

    @property
    def method(self) -> str | None:
        """The method that gained most, by its median; "fedavg" where none gained, None where nothing is like this."""
        if not self.supported:
            return None
        return next((one["method"] for one in self.methods if one["median"] > 0), "fedavg")

    def sentence(self) -> str:
        """Return the advice in a sentence."""
        if not self.supported:
            return "No method is named: this federation is unlike all simulated ones, whose gains say little of it."
        near = f"the {len(self.neighbours)} simulated federations that are most like this one"
        if self.method == "fedavg":
            return f"In {near} no method gained over FedAvg (median)."
        first = self.methods[0]
        often = f"it was ahead of FedAvg in {first['ahead']} of {first['of']}"
        gains = f"{first['median']:+.1f} points (median; 80 % of them {first['low']:+.1f} to {first['high']:+.1f})"
        return f"In {near}, {first['method']} gained most: {often}, by {gains}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {"method": self.method, "reason": self.sentence(), **vars(self)}


def figures(
    counts: CountsLike, target: ArrayLike | None, participation: float, epochs: float | None
) -> dict[str, float]:
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


def advise(
    counts: CountsLike,
    target: ArrayLike | None = None,
    participation: float = 1.0,
    epochs: float = 1.0,
    without: Collection[str] = (),
    table: Path | None = None,
) -> Advice:
    """Return what each method gained in the simulated federations that are most like this one.

    Looked at are those that have a target, or none, as this one, and where all clients take part in a round, or not.

    Args:
        counts: Label counts of the clients that train, shape `(clients, classes)`.
        target: Label mix that the model will serve, shape `(classes,)`; None: that of the test data.
        participation: Share of the clients that takes part in a round.
        without: Labels of methods that can't be used.
        table: `evidence.csv.gz` of an arena; None: the one that comes with fedskew. DataError where it can't be read.
    """
    if not 0 < participation <= 1:
        raise ArgumentError(f"participation: must be a share above 0 and up to 1, not {participation}")
    if not epochs > 0:
        raise ArgumentError(f"epochs: must be above 0, not {epochs}")
    federations, values, gains = _read(table or SHIPPED)
    unknown = next((method for method in without if method not in gains), None)
    if unknown is not None:
        raise ArgumentError(f"without: the table has no method {unknown!r}{nearest(unknown, gains)}")
    gains = {method: own for method, own in gains.items() if method not in without}
    own = figures(counts, target, participation, epochs)
    here = np.array([own[name] for name in _NAMES])
    at_target, at_part = _NAMES.index("target"), _NAMES.index("participation")
    alike = (values[:, at_target] == here[at_target]) & ((values[:, at_part] >= 1) == (participation >= 1))
    if not alike.any():
        return Advice((), (), False)
    spread = values.std(axis=0)
    spread[spread < 1e-9] = 1.0
    apart = _distances(values[alike] / spread, values[alike] / spread)
    distances = _distances(here[None] / spread, values[alike] / spread)[0]
    near = np.argsort(distances, kind="stable")[:NEIGHBOURS]
    rows = np.flatnonzero(alike)[near]
    usual = np.sort(apart, axis=1)[:, min(len(near), len(apart) - 1)].max()  # each is its own nearest
    several = isinstance(counts, LabelCounts) and counts.several
    methods = [_gained(method, own[rows]) for method, own in gains.items() if np.isfinite(own[rows]).any()]
    return Advice(
        tuple(sorted(methods, key=lambda one: -float(one["median"]))),
        tuple(
            {"federation": federations[row], "distance": float(distances[place]), **_best(gains, row)}
            for place, row in zip(near, rows, strict=True)
        ),
        bool(distances[near[-1]] <= usual + _ROUNDING) and not several,
    )


def evidence_bytes(
    federations: Mapping[Federation, Mapping[str, str]], gains: Mapping[Federation, Mapping[str, float]]
) -> bytes:
    """Return the content of `evidence.csv.gz`: each federation in words, its figures, and each method's gain there."""
    methods = list(dict.fromkeys(method for own in gains.values() for method in own))
    lines: list[list[Any]] = [["federation", *_NAMES, *(f"{_GAIN}{method}" for method in methods)]]
    for key, line in federations.items():
        if own := gains.get(key):
            points = [f"{own[method]:.3f}" if method in own else "" for method in methods]
            lines.append([line["federation"], *(line[name] for name in _NAMES), *points])
    return gzip.compress(csv_text(lines).encode(), mtime=0)


def _read(path: Path) -> tuple[list[str], FloatArray, dict[str, FloatArray]]:
    """Read a table: the federations in words, their figures, and gains by method, NaN where it did not train."""
    with placed(f"{path}: the table of evidence can't be read: ", DataError, (OSError, EOFError, UnicodeDecodeError)):
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
    lines = list(csv.DictReader(io.StringIO(text, newline="")))
    try:
        values = np.array([[float(line[name]) for name in _NAMES] for line in lines]).reshape(-1, len(_NAMES))
        gains = {
            name.removeprefix(_GAIN): np.array([float(line[name] or "nan") for line in lines])
            for name in (lines[0] if lines else ())
            if name.startswith(_GAIN)
        }
        return [line["federation"] for line in lines], values, gains
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path}: is not a table of evidence; `fedskew arena` writes one, evidence.csv.gz") from None


def _distances(one: FloatArray, other: FloatArray) -> FloatArray:
    found: FloatArray = np.sqrt(((one[:, None] - other[None]) ** 2).mean(axis=2))
    return found


def _gained(method: str, gains: FloatArray) -> dict[str, Any]:
    known = gains[np.isfinite(gains)]
    median, low, high = np.percentile(known, [50, 10, 90]).tolist()
    ahead = int((known > 0).sum())
    return {"method": method, "median": median, "low": low, "high": high, "ahead": ahead, "of": len(known)}


def _best(gains: Mapping[str, FloatArray], row: int) -> dict[str, Any]:
    gain, method = max(((float(own[row]), method) for method, own in gains.items() if own[row] > 0), default=(0.0, ""))
    return {"best": method or "fedavg", "gain": gain}
