"""What the operator of a federation's server starts, asks and decides: `run`, `status`, `readmit`, keys of sites."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len
from rich.table import Table
from typer import Argument, Option

from fedskew.cli.deploy import Federation
from fedskew.cli.page import Console, table_of
from fedskew.errors import ConfigError, EndedEarlyError, RunError
from fedskew.names import visible

if TYPE_CHECKING:
    from fedskew.report import SiteActivity

RUN = Argument(help="The federation's folder: its newest run; or a run folder, server/runs/NAME-....")


def run(context: typer.Context) -> None:
    """Start the training, show its log until it ends, and end with a status that says how it ended.

    Takes the arguments of `flwr run`. Exit status: 0 trained; 1 stopped, as the model was ruined again and again; 2
    refused, or files can't be written; 3 cut short (start it again, and it goes on); 4 stopped, as two rounds in a row
    left the model as it was, or trained with such rounds; 70 a fault of fedskew's own; 130 Ctrl-C (the run goes on).

    Example:

        fedskew deploy run ../app fedskew --run-config 'out="/srv/runs"'      (see server/run.sh)
    """
    from fedskew.deploy import Ending

    path = Path.cwd() / f".ended-{os.getpid()}.json"
    Ending.reserve(path)
    words = ["flwr", "run", *context.args, "--stream", "--run-config", f'ended="{path}"']
    console = Console(stderr=True)
    try:
        status = subprocess.call(words)  # Ctrl-C reaches Flower's command too, which then only stops showing the log
        ended = Ending.read(path)
    except KeyboardInterrupt:
        home = f"with FLWR_HOME={os.environ.get('FLWR_HOME', '')}"
        console.say(f"the run goes on; {home}, flwr list tells its ID, flwr log ID shows its log, flwr stop ID ends it")
        raise typer.Exit(130) from None
    finally:
        path.unlink(missing_ok=True)
    if ended is None:
        silent = "its process ended without a word, as when it is killed; start it again"
        why = f"flwr run ended with status {status}, as when superlink.sh does not run; start that, then run.sh again"
        ended = Ending(EndedEarlyError.exit_code, f"the run was cut short: {why if status else silent}, and it goes on")
    if ended.code:
        console.say(f"fedskew: {ended.message}", style="red")
        raise typer.Exit(ended.code)


def status(run: Annotated[Path, RUN]) -> None:
    """Show what each site did in a run that goes on or has ended.

    That is how often it was asked and counted; refused, and why; offline, silent, out of line or left out; and when
    (UTC).

    Example:

        fedskew deploy status hospitals
    """
    from fedskew.deploy import expires_soon, target_line
    from fedskew.experiment import RunFolder
    from fedskew.report import SiteActivity

    folder = _run_folder(run)
    (seed,) = RunFolder.read_runs(folder)
    sites = SiteActivity.of(seed)
    if not sites:
        raise RunError(f"{folder}: is a simulation's run, or has no round of a real federation yet")
    console = Console()
    last = seed.rounds[-1]
    ended = (last.deployment or {}).get("ended", "")
    state = "trained to its end" if seed.summary else "not finished"
    accuracy = "" if last.evaluation is None else f", accuracy {100 * last.evaluation.accuracy:.1f} %"
    console.say(f"{folder.name}: {state}; round {last.round} of {seed.config['training']['rounds']}, {ended}{accuracy}")
    console.print(sites_table(sites))
    if (estimated := target_line(seed)) is not None:
        console.say(estimated)
    for site in sites:
        if site.trouble is not None:
            console.say(f"{site.name}: {site.trouble}")
    for line in (*SiteActivity.undone_rounds(seed), *SiteActivity.still_rounds(seed)):
        console.say(line, style="yellow")
    certificate = folder.parent.parent / "server.crt"
    if certificate.exists() and (said := expires_soon(certificate)):
        console.say(said, style="yellow")
    if out := [site.name for site in sites if site.quarantine is not None]:
        console.say(f"after a look at {', '.join(out)}: fedskew deploy readmit {folder} NAME")


def readmit(
    run: Annotated[Path, RUN],
    sites: Annotated[list[str] | None, Argument(help="Sites that may take part again.")] = None,
    nobody: Annotated[bool, Option("--nobody", help="All sites that are left out stay so.")] = False,
) -> None:
    """Readmit sites that were left out because a round was undone: look at them first. A run that stopped may then go
    on; the command may also be given while the run goes on.

    Example: fedskew deploy readmit hospitals north

    Example: fedskew deploy readmit hospitals --nobody      (go on without them)
    """
    from fedskew.deploy import Decisions
    from fedskew.experiment import RunFolder
    from fedskew.report import SiteActivity

    names = sites or []
    if bool(names) == nobody:
        raise ConfigError("name the sites that may take part again, or give --nobody")
    folder = _run_folder(run)
    (seed,) = RunFolder.read_runs(folder)
    out = {site.name: site.quarantine for site in SiteActivity.of(seed) if site.quarantine is not None}
    decided = Decisions.read(folder)
    waiting = {name: round for name, round in out.items() if not decided.readmits(name, round)}
    for name in names:
        if name not in waiting:
            raise ConfigError(f"{name}: is not left out ({', '.join(waiting) or 'nobody'} is)")
    again = {name: round for name, round in waiting.items() if name in names}
    Decisions(decided.readmitted | again, seed.rounds[-1].round).write(folder)
    still = [name for name in waiting if name not in again]
    Console().say(
        f"{', '.join(again) or 'nobody'} may take part again from the next round on; left out: "
        f"{', '.join(still) or 'nobody'}"
    )


def superlink(
    context: typer.Context,
    max_reply: Annotated[int, Option(min=1, help="Most bytes that a site may send in reply to one message.")] = 2**30,
) -> None:
    """Run Flower's flower-superlink with its options, but accept commands (register a node, run an app) from this
    machine only, and from others no more bytes than they need. Flower's own accepts both from anybody who reaches its
    port.

    Example:

        fedskew deploy superlink --host 0.0.0.0 --port 9092 --enable-supernode-auth ...      (see server/superlink.sh)
    """
    from fedskew.deploy import run_superlink

    run_superlink(context.args, max_reply)


def register(folder: Federation) -> None:
    """Register the sites' keys at the server that runs on this machine, those that are not registered yet.

    Example:

        fedskew deploy register hospitals       (as server/register.sh does)
    """
    from fedskew.deploy import Agreement, Registry

    names = Agreement.read(folder / "app" / "deploy.toml").members
    with Registry.of(folder) as registry:
        for line in registry.register(names):
            typer.echo(line)


def revoke(folder: Federation, name: Annotated[str, Argument(help="The site.")]) -> None:
    """Remove a site's key from the server that runs on this machine: the site is out, and can't join with it again.

    Rounds go on without the site. It may come back with another key: put its key.pub into sites/NAME, and run
    register.sh.

    Example:

        fedskew deploy revoke hospitals north
    """
    from fedskew.deploy import Registry

    with Registry.of(folder) as registry:
        Console().say(registry.revoke(name))


def _run_folder(place: Path) -> Path:
    """Return a run folder: the one given, or the newest of a federation's or its server's folder."""

    if (place / "rounds.jsonl").exists():
        return place
    runs = [path.parent for server in (place / "server", place) for path in server.glob("runs/*/rounds.jsonl")]
    if not runs:
        raise ConfigError(f"{place}: expected a federation's folder in which a run has begun, or a run folder")
    return max(runs, key=lambda path: (path / "rounds.jsonl").stat().st_mtime)


def sites_table(sites: "Sequence[SiteActivity]") -> Table:
    """Return a row for each site: how often it was asked and counted, and what went wrong; to be read at 60 columns."""
    from fedskew.report import SiteActivity

    headings, rows = SiteActivity.table(sites)
    table = table_of(headings, rows)
    table.columns[0].min_width = min(16, max(cell_len(visible(row[0])) for row in rows))
    table.columns[1].no_wrap = True
    for column, heading in zip(table.columns[2:], headings[2:], strict=True):
        column.min_width, column.overflow = max(map(len, heading.split())), "ellipsis"
    return table
