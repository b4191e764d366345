"""`fedskew deploy status | readmit`: what the operator of a federation's server asks and decides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli.console import Console

RUN = typer.Argument(
    help="The run folder, server/runs/NAME-...; or the server's folder: its newest run.", show_default=False
)


def status(run: Annotated[Path, RUN]) -> None:
    """Show what each site did in a run, going on or ended: how often it was asked and counted, refused and why,
    offline, silent, out of line, left out; and when (UTC).

    Example:

        fedskew deploy status hospitals/server
    """
    from fedskew.cli.tables import sites_table
    from fedskew.errors import RunError
    from fedskew.experiment import read_runs
    from fedskew.report import site_activity, undone_rounds

    folder = _run_folder(run)
    (seed,) = read_runs(folder)
    sites = site_activity(seed)
    if not sites:
        raise RunError(f"{folder}: is a simulation's run, or has no round of a real federation yet")
    console = Console(soft_wrap=True, highlight=False)
    last = seed.rounds[-1]
    ended = (last.deployment or {}).get("ended", "")
    state = "trained to its end" if seed.summary else "not finished"
    accuracy = "" if last.evaluation is None else f", accuracy {100 * last.evaluation.accuracy:.1f} %"
    console.print(
        f"{folder.name}: {state}; round {last.round} of {seed.config['training']['rounds']}, {ended}{accuracy}"
    )
    console.print(sites_table(sites), soft_wrap=False)
    for site in sites:
        if site.trouble is not None:
            console.print(f"{site.name}: {site.trouble}", markup=False)
    for line in undone_rounds(seed):
        console.print(line, style="yellow", markup=False)
    if out := [site.name for site in sites if site.quarantine is not None]:
        console.print(f"after a look at {', '.join(out)}: fedskew deploy readmit {folder} NAME", markup=False)


def readmit(
    run: Annotated[Path, RUN],
    sites: Annotated[list[str] | None, typer.Argument(help="Sites that may take part again.")] = None,
    nobody: Annotated[bool, typer.Option("--nobody", help="All sites that are left out stay so.")] = False,
) -> None:
    """Say after a look at the sites that were left out, since a round was undone, which may take part again; a run that
    stopped may then go on. It may be given while the run goes on.

    Examples:

        fedskew deploy readmit hospitals/server north

        fedskew deploy readmit hospitals/server --nobody      (go on without them)
    """
    from fedskew.deploy import Decisions
    from fedskew.errors import ConfigError
    from fedskew.experiment import read_runs
    from fedskew.report import site_activity

    names = sites or []
    if bool(names) == nobody:
        raise ConfigError("name the sites that may take part again, or give --nobody")
    folder = _run_folder(run)
    (seed,) = read_runs(folder)
    out = {site.name: site.quarantine for site in site_activity(seed) if site.quarantine is not None}
    decided = Decisions.read(folder)
    waiting = {name: round for name, round in out.items() if not decided.readmits(name, round)}
    for name in names:
        if name not in waiting:
            raise ConfigError(f"{name}: is not left out ({', '.join(waiting) or 'nobody'} is)")
    again = {name: round for name, round in waiting.items() if name in names}
    Decisions(decided.readmitted | again, seed.rounds[-1].round).write(folder)
    still = [name for name in waiting if name not in again]
    Console(soft_wrap=True, highlight=False).print(
        f"{', '.join(again) or 'nobody'} may take part again from the next round on; left out: "
        f"{', '.join(still) or 'nobody'}",
        markup=False,
    )


def _run_folder(place: Path) -> Path:
    """Return a run folder: the one given, or the newest of a server's folder."""
    from fedskew.errors import ConfigError

    if (place / "rounds.jsonl").exists():
        return place
    runs = [path.parent for path in place.glob("runs/*/rounds.jsonl")]
    if not runs:
        raise ConfigError(f"{place}: is neither a run folder nor a server's folder with a run in runs/")
    return max(runs, key=lambda path: (path / "rounds.jsonl").stat().st_mtime)
