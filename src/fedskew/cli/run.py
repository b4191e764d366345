"""`fedskew run` trains a federation from a TOML file; `fedskew report` compares runs on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fedskew.cli import options
from fedskew.cli.page import Console
from fedskew.errors import ArgumentError
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew import Result
    from fedskew.experiment import Config
    from fedskew.report import SeedRun


def run(
    config: options.ConfigFile,
    changes: options.Changes = None,
    method: Annotated[list[str] | None, Option(help="Use this preset, not the file's method; may be repeated.")] = None,
    seeds: options.Seeds = None,
    quick: options.Quick = False,
    estimate: options.Estimate = False,
    resume: Annotated[
        bool, Option("--resume", help="Continue a run that was stopped; refused where there is none.")
    ] = False,
    fresh: Annotated[
        bool, Option("--fresh", help="Start over; a run that is there is moved to earlier/ beside it.")
    ] = False,
    out: options.Out = Path("runs"),
    device: options.Device = None,
    data_root: options.DataRoot = None,
    skip_broken: options.SkipBroken = False,
    trust_code: options.TrustCode = False,
) -> None:
    """Train a federation that a TOML file describes, and write its records, model and report.

    Takes seconds to days: --estimate says how long, and the time left is shown, in a log every 30 seconds. With --quick
    it takes seconds to minutes, shows that everything works, and proves nothing.

    Examples:

        fedskew run @fedvls-mnist-dir0.05 --quick --data-root DATA
        fedskew run my.toml --set training.lr=0.05 --seeds 0,1,2
        fedskew run my.toml --resume             (go on; it says so where code or data have changed since)
        fedskew run runs/my-1a2b3c4d/config.toml --out again      (the same run again, from any folder)
        fedskew run my.toml --estimate      (how long it would take; said of every run of minutes anyway)
        fedskew run my.toml --method fedavg --method fedvls      (the same task under each, and one report)
        torchrun --nproc-per-node 4 -m fedskew run my.toml      (each cohort over four processes, or GPUs)
    """
    from fedskew import experiment, methods, models, simulate, torchrun
    from fedskew.cli.progress import announced
    from fedskew.report import SeedRun, write_report

    config = options.config_file(config)
    changed = options.changed_keys(changes, seeds, device, data_root, skip_broken)
    if method and (lost := next((key for key in changed if key.partition(".")[0] == "method"), None)):
        raise ArgumentError(f"--set {lost}: would be lost; write --set method.preset={method[0]} in place of --method")
    whole = experiment.read(config, changed, quick, trust_code)
    configs: list[Config] = [whole.with_method(name) for name in method] if method else [whole]
    console = Console(quiet=torchrun.rank() > 0)
    if (resume or fresh) and config.parent.name == whole.folder(out).name:  # the config of a run folder: that run
        out = config.parent.parent
    for one in configs:
        notes = methods.check(methods.build(one.method, one.training.momentum))
        for note in filter(None, [*notes, models.note(one.model.name, one.model.parameters)]):
            console.say(f"note on {one.name}: {note}", style="yellow")
    results, places = [], [one.folder(out) / "config.toml" for one in configs]
    there = [None if resume else _inode(place) for place in places]
    with experiment.shared_data():
        if not estimate and torchrun.rank() == 0:
            experiment.check_runs(configs, out, resume, fresh)
        if not resume and not torchrun.launched():
            options.print_estimate(console, configs, only=estimate)
        if estimate:
            return
        with experiment.RunBar(console, configs) as bar:
            for one in configs:
                folder = one.folder(out)
                words = partial(_first_words, one, config.parent, folder, fresh)
                try:
                    listen = announced(bar, one, words, partial(experiment.RunFolder.notes, folder))
                    results.append(simulate(one, out=out, resume=resume, fresh=fresh, progress=listen))
                except KeyboardInterrupt:
                    bar.stop()
                    begun = any(_inode(place) not in (None, old) for place, old in zip(places, there, strict=True))
                    how = f"continue with --resume ({folder})" if begun else "nothing is written yet; run it again"
                    console.say(f"stopped; {how}")
                    raise typer.Exit(130) from None
    print_results(console, results)
    runs = [run for result in results for run in result.runs]
    for note in filter(None, [SeedRun.most_frequent(runs), *SeedRun.threshold_notes(runs)]):
        console.note(note)
    if quick:
        console.say(options.quick_note(config, changed), style="yellow")
    for result in results:
        if diverged := sum(run.summary["diverged"] for run in result.runs):
            lost = counted(diverged, "diverged update")
            console.print(f"{result.config.name}: left out {lost}; try a smaller training.lr")
        for said in dict.fromkeys(filter(None, (run.finish_note for run in result.runs))):
            console.say(f"{result.config.name}: {said}", style="yellow")
    path = results[0].folder / "report.html" if results[0].folder else out
    if len(results) > 1 and torchrun.rank() == 0:
        path = write_report(runs, out / f"{whole.name}.html", whole.name)
    console.say(f"report: {path}")


def _inode(path: Path) -> int | None:
    """Return what tells a file from another that is at its place later; None where there is none."""
    return path.stat().st_ino if path.exists() else None


def print_results(console: Console, results: Sequence[Result]) -> None:
    """Print a row for each result, in percent, over its seeds; with a finish two, of the model before and after it."""
    from fedskew.report import SeedRun

    seeds = min(len(result.runs) for result in results)
    rows: list[tuple[str, Mapping[str, str], float]] = []
    for result in results:
        name, seconds = result.config.name, sum(run.summary["seconds"] for run in result.runs)
        if result.headline("finished"):
            longer = seconds + sum(run.summary["finished"]["seconds"] for run in result.runs)
            finish = result.config.method["finish"]["name"]
            rows.append((SeedRun.as_trained(name), _cells(result, "final"), seconds))
            rows.append((SeedRun.after_finish(name, finish), _cells(result, "finished"), longer))
        else:
            rows.append((name, _cells(result), seconds))
    columns = list(dict.fromkeys(heading for _, figures, _ in rows for heading in figures))
    lines = [[name, *(figures.get(one, "-") for one in columns), f"{seconds:.1f}"] for name, figures, seconds in rows]
    title = f"Test set, {SeedRun.headline_in_words(run for result in results for run in result.runs)}, %"
    caption = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed: no spread is known"
    if any("(" in cell for _, figures, _ in rows for cell in figures.values()):
        caption += "; in brackets 95 % over test samples"
    more = "; as trained, after a finish: the last round's model alone" if len(rows) > len(results) else ""
    wide = len(columns) > 3  # their headings take two lines
    headings = ["run", *(f">{heading.replace(' ', chr(10)) if wide else heading}" for heading in columns), ">seconds"]
    console.wide_table(headings, lines, title, caption + more)


def _cells(result: Result, of: str | None = None) -> dict[str, str]:
    """Return the headline's figures in percent, with their intervals."""
    ends = {name: f" ({100 * low:.1f}-{100 * high:.1f})" for name, (low, high) in result.intervals(of).items()}
    return {name: spread.text(scale=100) + ends.get(name, "") for name, spread in result.headline(of).items()}


def _first_words(config: Config, source: Path, folder: Path, fresh: bool) -> list[str]:
    """Return where an earlier run was moved, and in what a replay differs from the run in its file's folder."""
    from fedskew.experiment import RunFolder

    moved = sorted((folder.parent / "earlier").glob(f"{folder.name}.*"), key=lambda one: (len(one.name), one.name))
    lines = [f"the earlier run is now in {moved[-1]}"] if fresh and moved else []
    if config.origin is not None and folder != source and (changes := RunFolder.changes_since(source, config)):
        lines.append(f"not a repetition: since the run in {source}, {' and '.join(changes)}")
    return lines


def report(
    folders: Annotated[list[str], Argument(metavar="RUN...", help="Run folders, or LABEL=RUN.")],
    label: Annotated[
        list[str] | None, Option(help="What a run is called on the page; once for each run, in their order.")
    ] = None,
    out: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, Option(help="Title of the page.")] = "Comparison of runs",
) -> None:
    """Write one self-contained page that compares runs: figures first, then tables. Takes seconds.

    A run is called by its config's name; runs of one name by the keys in which their configs differ, too. A folder that
    holds run folders stands for all of them.

    Examples:

        fedskew report runs/digits-fedavg-* runs/digits-fedvls-* --out comparison.html
        fedskew report small=runs/digits-1a2b3c4d large=runs/digits-5e6f7a8b
    """
    from fedskew.report import write_report

    Console().say(f"report: {write_report(read_runs(folders, label), out, title)}")


def read_runs(folders: Sequence[str], label: Sequence[str] | None = None) -> list[SeedRun]:
    """Read the runs that arguments RUN and LABEL=RUN name, or with these labels."""
    from fedskew.experiment import RunFolder

    named = [label_and_folder(one) for one in folders]
    if label and len(label) != len(folders):
        raise ArgumentError(f"--label: {len(label)} given for {counted(len(folders), 'run')}; give one for each")
    labels: list[str | None] = [*label] if label else [name for name, _ in named]
    return RunFolder.read_compared([Path(folder) for _, folder in named], labels)


def label_and_folder(text: str) -> tuple[str | None, str]:
    """Return both parts of LABEL=RUN; no label where it is a folder alone, or there is one of the whole name."""
    label, equals, folder = text.partition("=")
    return (label, folder) if equals and label and folder and not Path(text).exists() else (None, text)
