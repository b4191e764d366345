"""`fedskew run`: train a federation from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from fedskew.experiment import Config


def run(
    config: Annotated[Path, typer.Argument(help="The TOML file.", show_default=False)],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as training.lr=0.05.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Use this preset instead of the file's method; may be given several times.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, such as 0,1,2.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Apply the file's own [quick] table: minutes, not hours.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    out: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs"),
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where the data sets are (else FEDSKEW_DATA).")] = None,
) -> None:
    """Train a federation that a TOML file describes, and write its records, model and report.

    Examples:

        fedskew run recipes/fedvls-mnist-dir0.05.toml --quick

        fedskew run my.toml --set training.lr=0.05 --seeds 0,1,2

        fedskew run my.toml --method fedavg --method fedvls      (the same task under each, and one report)

        torchrun --nproc-per-node 4 -m fedskew run my.toml      (each cohort over four processes, or GPUs)
    """
    from fedskew import methods, models, torchrun
    from fedskew.cli.changes import changed_keys
    from fedskew.cli.progress import Watch
    from fedskew.cli.tables import results_table
    from fedskew.experiment import read, run_folder, simulate
    from fedskew.report import write_report

    changed = changed_keys(changes, seeds, device, data_root)
    whole = read(config, changed, quick)
    configs: list[Config] = [whole.with_method(name) for name in method] if method else [whole]
    console = Console(quiet=torchrun.rank() > 0)
    for one in configs:
        notes = methods.check(methods.build(one.method, one.training.momentum))
        for note in filter(None, [*notes, models.note(one.model.name, one.model.parameters)]):
            console.print(f"note on {one.name}: {note}", style="yellow", highlight=False)
    results = []
    with Watch(console, configs) as watch:
        for one in configs:
            try:
                results.append(simulate(one, out=out, resume=resume, progress=watch.start(one)))
            except KeyboardInterrupt:
                watch.stop()
                console.print(f"stopped; go on with --resume ({run_folder(one, out)})")
                raise typer.Exit(130) from None
    console.print(results_table(results))
    for result in results:
        if diverged := sum(run.summary["diverged"] for run in result.runs):
            console.print(
                f"{result.config.name}: {diverged} updates diverged and were left out; try a smaller training.lr"
            )
    path = results[0].folder / "report.html" if results[0].folder else out
    if len(results) > 1 and torchrun.rank() == 0:
        path = write_report([run for result in results for run in result.runs], out / f"{whole.name}.html", whole.name)
    console.print(f"report: {path}", soft_wrap=True)
