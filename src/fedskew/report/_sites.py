"""The activity of each site of a real federation in a run, read from its records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fedskew.report._groups import listed
from fedskew.report._runs import SeedRun

if TYPE_CHECKING:
    from fedskew.engine import RoundRecord


class Trouble(NamedTuple):
    """Why nothing of a site was counted in a round.

    Attributes:
        round: The round's number.
        when: When the round ended: UTC, ISO 8601; empty if that is not recorded.
        what: What happened, with the reason where there is one.
    """

    round: int
    when: str
    what: str

    def __str__(self) -> str:
        return f"round {self.round}{f', {self.when}' if self.when else ''}: {self.what}"


@dataclass
class SiteActivity:
    """One site's activity in the rounds of a run.

    Attributes:
        name: The site's name.
        selected: Rounds for which it was selected.
        counted: Rounds in which its update moved the model.
        refused: Rounds in which its reply was refused.
        failed: Rounds in which it replied with an error.
        offline: Rounds in which it was not connected.
        silent: Rounds in which it did not reply in time.
        skipped: Rounds in which it was not asked, as it did not answer before.
        left_out: Rounds in which it was not asked, as a round that it took part in was undone.
        out_of_line: Rounds in which its update was out of line, or contrary to those of sites with its labels.
        last_counted: The last round in which its update moved the model, and when that ended.
        quarantine: The undone round for which it is left out at present; None if it takes part.
        accuracy: The last model's accuracy on its own test samples, as it said.
        test_samples: Number of these samples, as it said.
        trouble: The last round in which something went wrong, which may be that its label counts are missing.
    """

    name: str
    selected: int = 0
    counted: int = 0
    refused: int = 0
    failed: int = 0
    offline: int = 0
    silent: int = 0
    skipped: int = 0
    left_out: int = 0
    out_of_line: int = 0
    last_counted: tuple[int, str] | None = None
    quarantine: int | None = None
    accuracy: float | None = None
    test_samples: int | None = None
    trouble: Trouble | None = None

    @property
    def asked(self) -> int:
        """Rounds in which it was sent the model to train."""
        return self.selected - self.offline - self.skipped - self.left_out


def site_activity(run: SeedRun) -> list[SiteActivity]:
    """Return what each site did, by client index; nothing for a run that was simulated.

    Args:
        run: The run, finished or not.
    """
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
        if "undone" not in notes:
            for client in record.answered:
                site = sites[run.client_names[client]]
                site.counted += 1
                site.last_counted = (record.round, when)
        for name, what in _troubles(notes):
            if name in sites:
                sites[name].trouble = Trouble(record.round, when, what)
        for kind in ("refused", "failed", "offline", "silent", "skipped", "left_out", "out_of_line"):
            for name in notes.get(kind, ()):
                if name in sites:
                    setattr(sites[name], kind, getattr(sites[name], kind) + 1)
        for name in notes.get("contrary", ()):
            if name in sites:
                sites[name].out_of_line += 1
        for name, said in notes.get("evaluations", {}).items():
            if name in sites:
                sites[name].accuracy, sites[name].test_samples = said["accuracy"], said["samples"]
        if "quarantine" in notes:
            for name, site in sites.items():
                site.quarantine = notes["quarantine"].get(name)
    return list(sites.values())


def site_rows(sites: Sequence[SiteActivity]) -> tuple[list[str], list[list[str]]]:
    """Return the headings of a table of sites, and a row of texts for each.

    Args:
        sites: What each site did.
    """
    headings = ["site", "counted", "not counted", "last counted (UTC)", "own test accuracy"]
    rows = []
    for site in sites:
        kinds = ("refused", "failed", "offline", "silent", "skipped", "left_out")
        problems = [f"{number} {kind.replace('_', ' ')}" for kind in kinds if (number := getattr(site, kind))]
        if site.quarantine is not None:
            problems = [*(one for one in problems if "left out" not in one), f"left out since round {site.quarantine}"]
        if site.out_of_line:
            problems.append(f"{site.out_of_line} out of line")
        round, when = site.last_counted or (0, "")
        rows.append(
            [
                site.name,
                f"{site.counted} of {site.asked}",
                ", ".join(problems) or "\u2013",
                f"round {round}, {when[:16].replace('T', ' ')}" if round else "never",
                "\u2013" if site.accuracy is None else f"{100 * site.accuracy:.1f} % of {site.test_samples}",
            ]
        )
    return headings, rows


def undone_rounds(run: SeedRun) -> list[str]:
    """Return a line for each round that was undone.

    Args:
        run: The run.
    """
    lines = []
    for record in run.rounds:
        undone = (record.deployment or {}).get("undone")
        if undone:
            out = ", ".join(undone["left_out"]) or "nobody"
            when = f", {record.deployment['ended']}" if record.deployment and "ended" in record.deployment else ""
            lines.append(
                f"Round {record.round}{when}, was undone: {undone['reason']}. The model went back to that of round "
                f"{undone['back_to']}; left out: {out}."
            )
    return lines


def stands_still(record: RoundRecord) -> bool:
    """Return whether a round of real sites left the model as it was, other than by being undone.

    Args:
        record: The round.
    """
    notes = record.deployment
    return record.round > 0 and notes is not None and "undone" not in notes and not record.answered


def why_still(record: RoundRecord) -> str:
    """Say why a round left the model as it was, and what is the matter with each site.

    Args:
        record: The round.
    """
    notes = record.deployment or {}
    said = dict.fromkeys(notes.get("skipped", ()), "skipped, as it did not answer before")
    said |= dict.fromkeys(notes.get("left_out", ()), "left out") | dict(_troubles(notes))
    sites = ", ".join(f"{name} ({what})" for name, what in sorted(said.items()))
    return "; ".join(filter(None, (record.unmoved, sites))) or "no update counted"


def still_rounds(run: SeedRun) -> list[str]:
    """Return a line for the rounds that left the model as it was, one for all with the same reason.

    Args:
        run: The run.
    """
    rounds: dict[str, list[int]] = {}
    for record in run.rounds:
        if stands_still(record):
            rounds.setdefault(why_still(record), []).append(record.round)
    return [
        f"Round{'' if len(found) == 1 else 's'} {listed(found)} left the model as it was: {why}"
        for why, found in rounds.items()
    ]


def _troubles(notes: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return what went wrong in a round, by site; the gravest of a site last."""
    for kind, said in (("offline", "not connected"), ("silent", "no reply in time")):
        for name in notes.get(kind, ()):
            yield name, said
    for name, reason in notes.get("unevaluated", {}).items():
        yield name, f"no evaluation: {reason}"
    for name, times in notes.get("out_of_line", {}).items():
        yield name, f"out of line: {times:.3g} times as large as is likely"
    for name, mean in notes.get("contrary", {}).items():
        yield name, f"out of line: goes against the updates of sites with its labels ({mean:.2f})"
    for kind in ("failed", "refused"):
        for name, reason in notes.get(kind, {}).items():
            yield name, f"{kind}: {reason}"
    for name, reason in notes.get("unreported", {}).items():
        yield name, f"no label counts: {reason}"
    for name in notes.get("undone", {}).get("left_out", ()):
        yield name, f"left out, as the round was undone: {notes['undone']['reason']}"
