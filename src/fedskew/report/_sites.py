"""What sites of a real federation did in a run, and whether a model is worth it for each client, by its figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedskew.metrics import SiteRow
from fedskew.report._runs import SeedRun, listed
from fedskew.report.drawing import FloatArray
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew.engine import RoundRecord

_KINDS = ("refused", "failed", "offline", "silent", "skipped", "left_out")
_TROUBLES = {  # kinds of a round's notes, which name sites, most with a reason or number each
    "offline": "not connected",
    "silent": "no reply in time",
    "unevaluated": "no evaluation: {}",
    "out_of_line": "out of line: {:.3g} times as large as is likely",
    "contrary": "out of line: goes against the updates of sites with its labels ({:.2f})",
    "failed": "failed: {}",
    "refused": "refused: {}",
    "unreported": "no label counts: {}",
}


@dataclass
class SiteActivity:
    """One site's activity in the rounds of a run.

    Attributes:
        counted: Rounds in which its update moved the model.
        times: Rounds by what went wrong: its reply was refused; it failed, was offline, silent (no reply in time),
            skipped (as it did not answer before), left out (as a round that it took part in was undone); or its update
            was out of line, or contrary to those of sites with its labels.
        last_counted: The last round in which its update moved the model, and when that ended.
        quarantine: The undone round for which it is left out at present; None if it takes part.
        accuracy: The last model's accuracy on its own test samples, as it said.
        trouble: The last round in which something went wrong, when that ended (UTC), and what.
    """

    name: str
    selected: int = 0
    counted: int = 0
    times: Counter[str] = field(default_factory=Counter)
    last_counted: tuple[int, str] | None = None
    quarantine: int | None = None
    accuracy: float | None = None
    test_samples: int | None = None
    trouble: str | None = None

    @property
    def asked(self) -> int:
        """Rounds in which it was sent the model to train."""
        return self.selected - sum(self.times[kind] for kind in ("offline", "skipped", "left_out"))

    @staticmethod
    def of(run: SeedRun) -> list[SiteActivity]:
        """Return what each site did, by client index, in a run that may go on; nothing for a run that was simulated."""
        if not any(record.deployment for record in run.rounds):
            return []
        sites = {name: SiteActivity(name) for name in run.client_names}
        for record in run.rounds:
            notes = record.deployment
            if notes is None:
                continue
            when = str(notes.get("ended", ""))
            for client in record.cohort:
                sites[run.client_names[client]].selected += 1
            for client in [] if "undone" in notes else record.answered:
                site = sites[run.client_names[client]]
                site.counted, site.last_counted = site.counted + 1, (record.round, when)
            for name, what in _troubles(notes):
                if name in sites:
                    sites[name].trouble = f"round {record.round}{f', {when}' if when else ''}: {what}"
            for name, site in sites.items():
                site.times.update(kind for kind in (*_KINDS, "out_of_line") if name in notes.get(kind, ()))
                site.times["out_of_line"] += name in notes.get("contrary", ())
                if own := notes.get("evaluations", {}).get(name):
                    site.accuracy, site.test_samples = own["accuracy"], own["samples"]
                if "quarantine" in notes:
                    site.quarantine = notes["quarantine"].get(name)
        return list(sites.values())

    @staticmethod
    def table(sites: Sequence[SiteActivity]) -> tuple[list[str], list[list[str]]]:
        """Return the headings of a table of sites, and a row of texts for each."""
        headings = ["site", "counted", "not counted", "last counted (UTC)", "own test accuracy"]
        rows = []
        for site in sites:
            kinds = [kind for kind in _KINDS if site.times[kind] and (site.quarantine is None or kind != "left_out")]
            problems = [f"{site.times[kind]} {kind.replace('_', ' ')}" for kind in kinds]
            problems += [] if site.quarantine is None else [f"left out since round {site.quarantine}"]
            problems += [f"{site.times['out_of_line']} out of line"] if site.times["out_of_line"] else []
            round, when = site.last_counted or (0, "")
            last = f"round {round}, {when[:16].replace('T', ' ')}" if round else "never"
            own = "\u2013" if site.accuracy is None else f"{100 * site.accuracy:.1f} % of {site.test_samples}"
            rows.append([site.name, f"{site.counted} of {site.asked}", ", ".join(problems) or "\u2013", last, own])
        return headings, rows

    @staticmethod
    def undone_rounds(run: SeedRun) -> list[str]:
        """Return a line for each round that was undone."""
        lines = []
        for record in run.rounds:
            notes = record.deployment or {}
            if undone := notes.get("undone"):
                when = f", {notes['ended']}" if "ended" in notes else ""
                lines.append(
                    f"Round {record.round}{when}, was undone: {undone['reason']}. The model went back to that of round "
                    f"{undone['back_to']}; left out: {', '.join(undone['left_out']) or 'nobody'}."
                )
        return lines

    @staticmethod
    def why_still(record: RoundRecord) -> str | None:
        """Say why a round of real sites left the model as it was, and what is wrong with each; None if it did not."""
        notes = record.deployment
        if not record.round or notes is None or "undone" in notes or record.answered:
            return None
        matters = dict.fromkeys(notes.get("skipped", ()), "skipped, as it did not answer before")
        matters |= dict.fromkeys(notes.get("left_out", ()), "left out") | dict(_troubles(notes))
        sites = ", ".join(f"{name} ({what})" for name, what in sorted(matters.items()))
        return "; ".join(filter(None, (record.unmoved, sites))) or "no update counted"

    @staticmethod
    def still_rounds(run: SeedRun) -> list[str]:
        """Return a line for the rounds that left the model as it was, one for all with the same reason."""
        rounds: dict[str, list[int]] = {}
        for record in run.rounds:
            if (why := SiteActivity.why_still(record)) is not None:
                rounds.setdefault(why, []).append(record.round)
        return [
            f"Round{'' if len(alike) == 1 else 's'} {listed(alike)} left the model as it was: {why}"
            for why, alike in rounds.items()
        ]


def _troubles(notes: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return what went wrong in a round, by site; the gravest of a site last."""
    for kind, words in _TROUBLES.items():
        found = notes.get(kind, ())
        for name in found:
            yield name, words.format(found[name] if isinstance(found, dict) else "")
    for name in notes.get("undone", {}).get("left_out", ()):
        yield name, f"left out, as the round was undone: {notes['undone']['reason']}"


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
