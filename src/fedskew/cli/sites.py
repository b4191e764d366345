"""`fedskew sites`: whether it is worth it for each client, and by which model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.table import Table
from typer import Argument, Option

from fedskew.cli.page import RULED, AsJson, Console, print_json, table_of, write_csv
from fedskew.cli.run import label_and_folder, read_runs
from fedskew.errors import DataError
from fedskew.tables import counted

if TYPE_CHECKING:
    from fedskew.report import ClientTable, SeedRun

_COLUMNS = {"mean": "mean", "weighted": "weighted", "median": "median", "worst_tenth": "worst tenth", "std": "std"}


def sites(
    folders: Annotated[list[str], Argument(metavar="RUN...", help="Run folders, or LABEL=RUN.")],
    figure: Annotated[
        Literal["accuracy", "balanced_accuracy", "macro_f1", "auroc", "pr_auc", "ece", "loss"],
        Option(help="What is compared; of ece (calibration error) and loss, less is better."),
    ] = "accuracy",
    as_json: AsJson = False,
    csv_path: Annotated[Path | None, Option("--csv", help="Write every figure of every client to this file.")] = None,
) -> None:
    """Show what each model is worth to the clients, by their own test samples, and who gains or loses. Takes seconds.

    The runs have test samples of each client's own: `data.client_test = 0.3`. Rows are the models that a client can
    have: its own ("alone"), the federation's ("common"), its "personal" one, and that of "pooled" data. Columns are
    over the clients: mean, mean weighted by test samples, median, mean of the worst tenth, standard deviation, and how
    many are worse off than alone. Of a federation of real sites with site_figures = "summed" it shows what these added
    up.

    Examples:

        fedskew sites runs/hospitals-1a2b3c4d
        fedskew sites fedavg=runs/my-1a2b3c4d fedvls=runs/my-5e6f7a8b --figure balanced_accuracy --csv sites.csv
    """
    from fedskew.experiment import RunFolder
    from fedskew.metrics import SiteRow
    from fedskew.report import ClientTable, SeedRun

    paths = [Path(label_and_folder(one)[1]) for one in folders]
    place = paths[0] / RunFolder.SITE_FIGURES
    if len(folders) == 1 and place.exists():
        if csv_path is not None:
            raise DataError(
                f"--csv: {paths[0]} has what its sites added up, and no site's own figures; leave --csv out"
            )
        _print_summed(place, figure, as_json)
        return
    runs = read_runs(folders)
    for run in runs:
        _check(run)
    tables = [ClientTable.of(own) for own in SeedRun.by_label(runs).values()]
    if csv_path is not None:
        cells = [(run.label, run.seed, run.client_names[row.client], *row.cells()) for run in runs for row in run.sites]
        write_csv(csv_path, [("run", "seed", "name", *SiteRow.__annotations__), *cells], *paths)
    if as_json:
        print_json({"figure": figure, "runs": [_plain(table, figure) for table in tables]})
        return
    console = Console(highlight=False)
    console.print(_table(tables, figure))
    for table in tables:
        said = [gain.in_words() for gain in table.gains(figure)]
        if "alone" not in table.kinds:
            said.append('What clients get alone is not known: evaluation.baselines = ["alone"] trains that too.')
        console.sentences(f"Who gains and who loses{f', {table.label}' if len(tables) > 1 else ''}", said)


def _check(run: SeedRun) -> None:
    if run.sites:
        return
    if any(record.deployment is not None for record in run.rounds):
        here = 'with site_figures = "summed" in deploy.toml their means are here; fedskew deploy status has accuracies'
        own = "each of its sites has its own figures (fedskew deploy site --report data.toml)"
        raise DataError(f"{run.label}: a federation of real sites; {own}; {here}")
    if not run.config.get("data", {}).get("client_test"):
        raise DataError(
            f"{run.label}: its clients have no test samples of their own; train it with data.client_test = 0.3 "
            "(fedskew run CONFIG --set data.client_test=0.3)"
        )
    raise DataError(f"{run.label}: is not finished (seed {run.seed}); go on with fedskew run CONFIG --resume")


def _print_summed(place: Path, figure: str, as_json: bool) -> None:
    """Print what the sites of a real federation added up: means over them, and at how many a model is better."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        models, names = dict(found["models"]), found["sites"]
        lines = [
            [model, *(f"{known['mean']:.3f}" for known in figures.values()), str(figures[figure]["better"])]
            for model, figures in models.items()
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, KeyError) and error.args == (figure,):
            raise DataError(
                f"--figure: sites don't add up {figure}; take one of {', '.join(models['alone'])}"
            ) from None
        raise DataError(f"{place}: can't be read ({type(error).__name__}); put the file back") from None
    if as_json:
        print_json(found)
        return
    headings = ["model", *(f">{name.replace('_', ' ')}" for name in models["alone"]), ">better than alone"]
    console, title = Console(highlight=False), f"Means over {len(names)} sites, each on its own test samples"
    caption = f"better than alone: at how many sites, by {figure.replace('_', ' ')}; the server saw sums alone"
    console.print(table_of(headings, lines, title, caption=caption, **RULED))


def _table(tables: Sequence[ClientTable], figure: str) -> Table:
    """Return a row for each run and model: a figure over the clients."""
    scale, digits = (1, 3) if figure == "loss" else (100, 1)
    lines = []
    for table in tables:
        for kind, summaries in table.summaries().items():
            found = summaries[figure]
            cells = ["-" if found[key] is None else f"{scale * found[key]:.{digits}f}" for key in _COLUMNS]
            lines.append([table.label, kind, str(found["clients"]), *cells, str(found.get("losing", "-"))])
    headings = ["run", "model", ">clients", *(f">{name}" for name in _COLUMNS.values()), ">lose"]
    seeds = max(len(table.seeds) for table in tables)
    title = f"{figure.replace('_', ' ').capitalize()} at the clients, by their own test samples{', %' * (scale == 100)}"
    caption = f"{counted(seeds, 'seed')}; lose: how many clients are worse off than alone"
    return table_of(headings, lines, title, caption=caption, **RULED)


def _plain(table: ClientTable, figure: str) -> dict[str, Any]:
    """Return what `--json` prints of a run."""
    rows = {kind: summaries[figure] for kind, summaries in table.summaries().items()}
    gains = [gain.to_dict() for gain in table.gains(figure)]
    return {"run": table.label, "seeds": list(table.seeds), "rows": rows, "gains": gains}
