"""The activity of each site of a real federation in a run, read from its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedskew.report._runs import SeedRun, listed

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
        name: The site's name.
        selected: Rounds for which it was selected.
        counted: Rounds in which its update moved the model.
        times: Rounds by what went wrong: its reply was refused; it failed, was offline, silent (no reply in time),
            skipped (as it did not answer before), left out (as a round that it took part in was undone); or its update
            was out of line, or contrary to those of sites with its labels.
        last_counted: The last round in which its update moved the model, and when that ended.
        quarantine: The undone round for which it is left out at present; None if it takes part.
        accuracy: The last model's accuracy on its own test samples, as it said.
        test_samples: Number of these samples, as it said.
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
        """Say why a round of real sites left the model as it was, and what is the matter with each site; None if it did
        not."""
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
