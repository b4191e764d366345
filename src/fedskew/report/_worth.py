"""Whether it is worth it for each client: its figures under each model, and the differences between models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedskew.metrics import SiteRow
from fedskew.report._runs import SeedRun, listed
from fedskew.report.drawing import FloatArray
from fedskew.tables import counted

_RESAMPLES, _AT_ONCE = 4000, 100
_NAMED = 20  # clients that lose
_PAIRS = (("common", "alone"), ("personal", "alone"), ("pooled", "alone"), ("personal", "common"))


@dataclass(frozen=True)
class Gain:
    """What clients gain by one row against another: differences of a figure, paired over the clients that have both,
    from who loses most to who gains most, and the interval of 95 % of their mean, by the bootstrap over clients."""

    row: str
    other: str
    figure: str
    names: tuple[str, ...]
    differences: FloatArray
    low: float
    high: float

    @property
    def losing(self) -> int:
        """How many clients have a worse figure by `row` than by `other`: the first ones."""
        return int(np.count_nonzero(self._gains < 0))

    @property
    def gaining(self) -> int:
        """How many clients have a better figure: the last ones."""
        return int(np.count_nonzero(self._gains > 0))

    @property
    def _gains(self) -> FloatArray:
        return -self.differences if self.figure in SiteRow.LOW else self.differences

    def in_words(self) -> str:
        """Return a sentence: the mean with its interval, how many gain, and who loses."""
        ends = "" if math.isnan(self.low) else f" (95 % interval {self._text(self.low)} to {self._text(self.high)})"
        lost = [f"{name} ({self._text(self.differences[at])})" for at, name in enumerate(self.names[: self.losing])]
        mean = self._text(self.differences.mean(), unit=True)
        return (
            f"{self.row.capitalize()} against {self.other}: {mean} in the mean over "
            f"{counted(len(self.names), 'client')}{ends}; {self.gaining:,} gain, {len(lost):,} lose"
            f"{f': {listed(lost, _NAMED)}' if lost else ''}."
        )

    def _text(self, difference: float, unit: bool = False) -> str:
        name = f" points of {self.figure.replace('_', ' ')}" if unit else ""
        return f"{difference:+.3f}" if self.figure == "loss" else f"{100 * difference:+.1f}{name}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        low, high = (None if math.isnan(end) else end for end in (self.low, self.high))
        mean = float(self.differences.mean())
        counts = {"clients": len(self.names), "gain": self.gaining, "lose": self.losing}
        by_client = dict(zip(self.names, self.differences.tolist(), strict=True))
        pair = {"row": self.row, "against": self.other}
        return {**pair, "mean": mean, "low": low, "high": high, **counts, "differences": by_client}


@dataclass(frozen=True)
class ClientTable:
    """The figures of each client under each model, over the seeds of one config.

    Where all seeds train one federation (natural clients, a stored partition, `partition.seed`), a client's figures are
    means over the seeds; where each seed divides the data anew, each of its clients is one of its own.

    Attributes:
        names: The clients' names.
        rows: The figures; `SiteRow.client` is a place in `names`.
    """

    label: str
    seeds: tuple[int, ...]
    names: tuple[str, ...]
    rows: tuple[SiteRow, ...]

    @classmethod
    def of(cls, runs: Sequence[SeedRun]) -> ClientTable:
        """Make the table of the runs of one config; without rows where their clients have no test samples."""
        section = runs[0].config.get("partition", {})
        together = len(runs) < 2 or section.get("seed") is not None or section.get("rule") in ("natural", "file")
        names: dict[str, int] = {}
        found: dict[tuple[int, str], list[SiteRow]] = {}
        for run in runs:
            for row in run.sites:
                name = run.client_names[row.client]
                name = f"client {name}" if name.isdecimal() else name
                at = names.setdefault(name if together else f"{name}, seed {run.seed}", len(names))
                found.setdefault((at, row.row), []).append(row)
        rows = tuple(_mean(client, kind, of_seeds) for (client, kind), of_seeds in found.items())
        return cls(runs[0].label, tuple(run.seed for run in runs), tuple(names), rows)

    def summaries(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return every figure of every row over the clients (see `SiteRow.over_clients`)."""
        return SiteRow.over_clients(self.rows)

    @property
    def kinds(self) -> list[str]:
        """The rows that there are, in the order of a table."""
        return [kind for kind in SiteRow.ROWS if any(row.row == kind for row in self.rows)]

    def values(self, row: str, figure: str) -> FloatArray:
        """Return a figure of each client by a row, `(clients,)`; NaN where there is none."""
        values = np.full(len(self.names), np.nan)
        for one in self.rows:
            if one.row == row:
                values[one.client] = getattr(one, figure)
        return values

    def gains(self, figure: str) -> list[Gain]:
        """Compare the rows with training alone, and the personal models with the common one."""
        pairs = [pair for pair in _PAIRS if {*pair} <= {*self.kinds}]
        return [found for row, other in pairs if len((found := self._gain(row, other, figure)).names)]

    def _gain(self, row: str, other: str, figure: str) -> Gain:
        differences = self.values(row, figure) - self.values(other, figure)
        known = np.flatnonzero(np.isfinite(differences))
        order = known[np.argsort((-1 if figure in SiteRow.LOW else 1) * differences[known], kind="stable")]
        sorted_, low, high = differences[order], math.nan, math.nan
        if len(order) > 1:
            from fedskew.randomness import Purpose, generator  # here, as it imports PyTorch

            rng, size = generator(self.seeds[0], Purpose.INTERVAL), len(order)
            means = [
                sorted_[rng.integers(size, size=(_AT_ONCE, size))].mean(axis=1) for _ in range(0, _RESAMPLES, _AT_ONCE)
            ]
            low, high = np.quantile(means, (0.025, 0.975)).tolist()
        return Gain(row, other, figure, tuple(self.names[at] for at in order), sorted_, low, high)


def _mean(client: int, kind: str, rows: Sequence[SiteRow]) -> SiteRow:
    """Return the mean of a client's figures over seeds, of those in which they are defined."""
    known = {name: [value for row in rows if math.isfinite(value := getattr(row, name))] for name in SiteRow.FIGURES}
    means = {name: sum(values) / len(values) if values else math.nan for name, values in known.items()}
    return SiteRow(client, kind, round(sum(row.samples for row in rows) / len(rows)), **means)
